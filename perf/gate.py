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

from perf.compare import Comparison, Control, compare_revisions, control
from perf.history import Revision, by_gpu, revision, revisions
from perf.records import Record, read_records
from perf.run import split

BEST, LATEST = "best", "latest"
STYLES = {"slower": "red", "faster": "green", "same": "dim"}
console = Console(width=None if sys.stdout.isatty() else 200)


def main(
    results: Annotated[Path, typer.Argument(help="Records of one GPU.", exists=True, dir_okay=False)] = Path(
        "perf/results/h200.jsonl"
    ),
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
    """What is known, oldest first, and the new side. Raises ValueError where there is none, or records of several GPUs."""
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
    """The newest records without a time of cases that had one."""
    records = [new.newest(key) for key in new.runs if key[1] in providers and any(base.timed(key) for base in bases)]
    return [record for record in records if record is not None and record.us is None]


def table(comparisons: Sequence[Comparison]) -> Table:
    """One row a case, the slowest first."""
    grid = Table(title="device time, new over base")
    for column in ("case", "provider", "base"):
        grid.add_column(column, overflow="fold")
    for column in ("us", "new us", "ratio", "95% interval", "threshold", "p"):
        grid.add_column(column, justify="right")
    grid.add_column("verdict")
    for comparison in sorted(comparisons, key=lambda entry: -entry.ratio):
        grid.add_row(
            *(comparison.name, comparison.provider, comparison.base),
            *(f"{comparison.base_us:.2f}", f"{comparison.new_us:.2f}", f"{comparison.ratio:.4f}"),
            *(f"{comparison.low:.4f} to {comparison.high:.4f}", f"{100 * comparison.threshold:.1f}%", f"{comparison.p:.1g}"),
            Text(comparison.verdict, style=STYLES[comparison.verdict]),
        )
    return grid


def summary(bases: Sequence[Revision], new: Revision, comparisons: Sequence[Comparison], lost: Sequence[Record]) -> Text:
    """What the comparison rests on, which cases lost their time, and how many changed."""
    text = Text()
    for base in bases:
        if any(comparison.base == base.label for comparison in comparisons):
            text.append(f"{base.label} -> {new.label}: {describe(control(base, new))}\n")
    if not all(comparison.sampled for comparison in comparisons):
        text.append("samples not recorded on some side: its interval rests on a log-normal through the recorded percentiles\n")
    for record in lost:
        text.append(f"{record.name}: {record.provider} has no time any more: {record.reason}\n", style="red")
    counts = {kind: sum(comparison.verdict == kind for comparison in comparisons) for kind in STYLES}
    text.append(", ".join(f"{count} {kind}" for kind, count in counts.items()) + f", {len(lost)} lost, of {new.label}")
    return text


def describe(controlled: Control) -> str:
    """The control of a comparison in words."""
    drift, noise = (100 * value for value in (controlled.drift, controlled.noise))
    if not controlled.trusted:
        return f"the read kernel ran in {controlled.cases} common cases only: no drift divided out, noise taken as {noise:.2f}%"
    return f"the read kernel drifted by {drift:+.2f}% over {controlled.cases} cases, A/A noise {noise:.2f}%"


if __name__ == "__main__":
    typer.run(main)
