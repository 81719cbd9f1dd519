"""python -m perf.gate: has anything become slower? Two revisions of a results file, or a run against the best known."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perf.compare import Comparison, Control, Controls, compare_revisions
from perf.history import Key, Revision, by_gpu, revision, revisions
from perf.measure import DEVICE
from perf.record import H200
from perf.records import Record, read_records
from perf.run import split

BEST, LATEST = "best", "latest"
STYLES = {"slower": "red", "faster": "green", "same": "dim"}
console = Console(width=None if sys.stdout.isatty() else 200)


def main(
    results: Annotated[
        Path, typer.Argument(help="Records of one GPU.", exists=True, dir_okay=False, show_default="the checkout's, of the H200")
    ] = H200,
    base: Annotated[str, typer.Option(help=f"A commit, or {BEST}: for each case the fastest one known.")] = BEST,
    new: Annotated[str, typer.Option(help=f"A commit, or {LATEST}.")] = LATEST,
    run: Annotated[
        Path | None, typer.Option(help="Take the new side from this file instead.", exists=True, dir_okay=False)
    ] = None,
    providers: Annotated[str, typer.Option(help="Whose times are held to the past, separated by commas.")] = "ours",
) -> None:
    """Exit code 0: nothing slower; 1: something is, or has lost its time; 2: nothing could be compared."""
    paths = [results] if run is None else [results, run]
    records, problems = read_records(paths)
    for problem in problems:
        print(problem, file=sys.stderr)
    try:
        known, newest = sides(records, new, run)
        bases = known if base == BEST else [find(known, base, "base")]
        watched = split(providers)
        comparisons = compare_revisions(bases, newest, watched)
        lost = lost_times(bases, newest, watched)
        if not comparisons and not lost:
            raise ValueError(f"providers: {providers!r} timed no case at both {base} and {newest.label}")
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    console.print(table(comparisons))
    console.print(summary(bases, newest, comparisons, lost))
    raise typer.Exit(1 if lost or any(comparison.verdict == "slower" for comparison in comparisons) else 0)


def sides(records: Sequence[Record], new: str, run: Path | None) -> tuple[list[Revision], Revision]:
    """(the known revisions, oldest first; the new side). Raises ValueError if either is missing, or for several GPUs' records."""
    gpus = by_gpu(records)
    if len(gpus) != 1:
        raise ValueError(f"results: hold {len(gpus)} GPUs ({', '.join(gpus)}); times of one GPU are compared")
    if run is not None:
        new_side = revision(str(run), [record for record in records if record.path == run])
        known = revisions(record for record in records if record.path != run)
    else:
        history = revisions(records)
        new_side = history[-1] if new == LATEST and history else find(history, new, "new")
        known = [entry for entry in history if entry.label != new_side.label]
    if not known:
        raise ValueError(f"base: no record to hold {new_side.label} against")
    return known, new_side


def find(history: Sequence[Revision], commit: str, name: str) -> Revision:
    """The revision that a commit's first characters name. Raises ValueError unless there is exactly one."""
    found = [entry for entry in history if entry.label == commit] or [
        entry for entry in history if entry.label.startswith(commit[:9])
    ]
    if len(found) != 1:
        labels = ", ".join(entry.label for entry in history)
        raise ValueError(f"{name}: {commit!r} names {len(found)} of the recorded revisions ({labels})")
    return found[0]


def lost_times(bases: Sequence[Revision], new: Revision, providers: Sequence[str]) -> list[Record]:
    """The newest records without a device time, for cases that had one."""
    records = [
        new.newest(key)
        for key in new.runs
        if key.provider in providers and key.metric == DEVICE and any(base.timed(key) for base in bases)
    ]
    return [record for record in records if record is not None and record.us is None]


def table(comparisons: Sequence[Comparison]) -> Table:
    """One row per case, the most slowed first."""
    grid = Table(title="new over base")
    for column in ("case", "provider", "metric", "base"):
        grid.add_column(column, overflow="fold")
    for column in ("us", "new us", "ratio", "95% interval", "at least", "threshold", "p"):
        grid.add_column(column, justify="right")
    grid.add_column("verdict")
    for comparison in sorted(comparisons, key=lambda entry: -entry.ratio):
        grid.add_row(
            *(comparison.name, comparison.provider, comparison.metric, comparison.base),
            *(f"{comparison.base_us:.2f}", f"{comparison.new_us:.2f}", f"{comparison.ratio:.4f}"),
            *(f"{comparison.low:.4f} to {comparison.high:.4f}", f"{comparison.least:.4f}"),
            *(f"{100 * comparison.threshold:.1f}%", f"{comparison.p:.1g}"),
            Text(comparison.verdict, style=STYLES[comparison.verdict]),
        )
    return grid


def summary(bases: Sequence[Revision], new: Revision, comparisons: Sequence[Comparison], lost: Sequence[Record]) -> Text:
    """A summary: the data that the comparison rests on, the cases that lost their time, and how many changed."""
    text, controls = Text(), Controls()
    for base in bases:
        keys = [Key(entry.name, entry.provider, entry.metric) for entry in comparisons if entry.base == base.label]
        for line in dict.fromkeys(f"{key.metric}: {describe(controls.of(base, new, key))}" for key in keys):
            text.append(f"{base.label} -> {new.label}: {line}\n")
        if keys:
            text.append(f"{base.label} -> {new.label}: {describe_machines(base.machines, new.machines)}\n")
    if not all(comparison.sampled for comparison in comparisons):
        text.append("samples not recorded on some side: its interval rests on a log-normal through the recorded percentiles\n")
    for record in lost:
        text.append(f"{record.name}: {record.provider} has no time any more: {record.reason}\n", style="red")
    counts = {kind: sum(comparison.verdict == kind for comparison in comparisons) for kind in STYLES}
    text.append(", ".join(f"{count} {kind}" for kind, count in counts.items()) + f", {len(lost)} lost, of {new.label}")
    return text


def describe(controlled: Control) -> str:
    """The control of a comparison in words."""
    drift, noise, low, high = (100 * value for value in (controlled.drift, controlled.noise, controlled.low, controlled.high))
    if not controlled.trusted:
        said = (
            f"{controlled.floor} ran in {controlled.cases} common cases only: no drift divided out, noise taken as {noise:.2f}%"
        )
    else:
        said = f"{controlled.floor} drifted by {drift:+.2f}% over {controlled.cases} cases, A/A noise {noise:.2f}%"
    return f"{said}; unchanged kernels by {low:+.2f} to {high:+.2f}% ({controlled.peers} times of peers)"


def describe_machines(base: frozenset[str | None], new: frozenset[str | None]) -> str:
    """Whether two revisions ran on one physical GPU, in words."""
    if None in base | new:
        return "a record does not name its physical GPU"
    if base == new and len(base) == 1:
        return f"both on the GPU {next(iter(base))}"
    return " and ".join("+".join(sorted(str(name) for name in side)) for side in (base, new)) + ": not one physical GPU"


if __name__ == "__main__":
    typer.run(main)
