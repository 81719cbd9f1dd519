"""python -m perf.run: gates, times and records cases by provider."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cute_kernels.planning.variants import DeviceFacts
from perf.case_sets import select_cases
from perf.cases import OPERATIONS, Case
from perf.measure import DeviceFailed, Limits, Outcome, measure
from perf.providers import PROVIDER_NAMES, CompilesAhead, Provider, providers_of
from perf.record import RESULTS, append, case_fields, environment, machine, timestamp
from perf.records import read_records
from perf.report import problems, progress, summary
from perf.resume import Deadline, unfinished
from perf.timing import GraphClock

app = typer.Typer(add_completion=False)
console = Console(width=None if sys.stdout.isatty() else 200)
WRONG, CASES_LEFT = 1, 3  # exit codes


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Sets and globs over case names, separated by commas.")] = "throughput",
    providers: Annotated[str, typer.Option(help=f"Any of {', '.join(PROVIDER_NAMES)}, separated by commas.")] = ",".join(
        PROVIDER_NAMES
    ),
    out: Annotated[
        Path, typer.Option(help="Folder of the records, one file for each GPU.", show_default="the checkout's perf/results")
    ] = RESULTS,
    replays: Annotated[int, typer.Option(min=15, help="Replays of each provider's graph.")] = 21,
    trials: Annotated[int, typer.Option(min=1, help="Replays that choose among a provider's candidates.")] = 5,
    memory: Annotated[float, typer.Option(help="Share of the free device memory that the caches may take.")] = 0.4,
    host_calls: Annotated[int, typer.Option(min=0, help="Calls of a host time (run, select, a peer's plan); 0: none.")] = 2000,
    in_stream: Annotated[
        int, typer.Option(min=0, help="Replays of the time behind a kernel that writes q; 0: none.")
    ] = Limits.in_stream,
    behind_weights: Annotated[
        int, typer.Option(min=0, help="Replays of the time behind a kernel that reads weights past L2; 0: none.")
    ] = Limits.behind_weights,
    minutes: Annotated[float, typer.Option(min=0, help="Stop before a case that would end later than this; 0: no limit.")] = 0,
    resume: Annotated[bool, typer.Option(help="Leave out cases that all providers have records of, at this commit.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Print the chosen cases and stop.")] = False,
) -> None:
    """Measure attention and appends.

    Exit code 1 when a result is wrong, 2 when the request is, 3 when --minutes left cases over.
    """
    deadline = Deadline(60 * minutes if minutes else None)
    try:
        chosen = select_cases(required("cases", cases))
        competitors = providers_of(required("providers", providers))
    except ValueError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(2) from error
    if list_only:
        for case in chosen:
            console.print(f"{case.name}  {case.kv_bytes / 2**20:.0f} MiB", highlight=False)
        return
    if not torch.cuda.is_available():
        console.print("[red]perf.run measures a CUDA device and there is none; --list shows the cases")
        raise typer.Exit(2)
    device = torch.device("cuda", torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info(device)
    path = out / f"{DeviceFacts.of(device).slug}.jsonl"
    if resume:
        chosen = still_to_run(chosen, competitors, [path, RESULTS / path.name])
    compile_ahead(competitors, chosen)
    limits = Limits(
        replays, trials, int(memory * free), host_calls=host_calls, in_stream=in_stream, behind_weights=behind_weights
    )
    outcomes, left = run_cases(chosen, competitors, limits, device, path, deadline)
    console.print(summary(outcomes))
    console.print(problems(outcomes))
    console.print(f"{len(outcomes)} records appended to {path}")
    if left:
        console.print(f"[yellow]{left} of {len(chosen)} cases left: run again with --resume")
    raise typer.Exit(WRONG if any(outcome.failed for outcome in outcomes) else CASES_LEFT if left else 0)


def still_to_run(cases: list[Case], competitors: list[Provider], paths: list[Path]) -> list[Case]:
    """The cases without complete records at this commit; in a changed checkout all cases, since nothing names its state."""
    facts = environment()
    if facts["commit"] is None or facts["dirty"]:
        console.print("[yellow]--resume: the checkout is not a commit, so no record counts and every case is measured")
        return cases
    records, skipped = read_records(dict.fromkeys(path.resolve() for path in paths if path.is_file()))
    for problem in skipped:
        console.print(f"[yellow]{problem}", highlight=False)
    left = []
    for operation in OPERATIONS:
        names = [provider.name for provider in competitors if provider.operation == operation]
        left += unfinished([case for case in cases if case.operation == operation], records, names, str(facts["commit"]))
    console.print(f"{len(cases) - len(left)} of {len(cases)} cases have records at {facts['commit']}", highlight=False)
    return left


def compile_ahead(competitors: list[Provider], cases: list[Case]) -> None:
    """Lets the competitors that can compile for all cases at once do so."""
    for provider in competitors:
        if cases and isinstance(provider, CompilesAhead) and provider.available() is None:
            start = time.perf_counter()
            with console.status(f"compiling {provider.name}"):
                provider.compile_ahead([case for case in cases if case.operation == provider.operation])
            console.print(f"compiled {provider.name}  {time.perf_counter() - start:.1f} s", highlight=False)


def run_cases(
    cases: list[Case], competitors: list[Provider], limits: Limits, device: torch.device, path: Path, deadline: Deadline
) -> tuple[list[Outcome], int]:
    """Measures the cases and appends their records as soon as they are known: (outcomes, number of cases left over).

    The deadline ends the run early, and so does a lost device.
    """
    outcomes: list[Outcome] = []
    begun = 0
    with progress(console) as bar:
        task = bar.add_task("cases", total=len(cases))
        for case in cases:
            if not deadline.allows_another():
                break
            begun += 1
            bar.update(task, description=case.name)
            start, lost = time.perf_counter(), False
            try:
                taking_part = [provider for provider in competitors if provider.operation == case.operation]
                measured = measure(case, taking_part, limits, GraphClock(), device)
            except DeviceFailed as failure:
                measured, lost = [replace(failure.outcome, machine=machine(device))], True
            facts = environment() | {"gpu": DeviceFacts.of(device).name, "timestamp": timestamp()}
            for outcome in measured:
                append(path, case_fields(case) | outcome.fields() | facts)
            outcomes += measured
            if lost:
                console.print(f"[red]{case.name}: the device is lost")
                break
            torch.cuda.empty_cache()
            bar.advance(task)
            bar.console.print(f"{case.name}  {time.perf_counter() - start:.1f} s", highlight=False)
    return outcomes, len(cases) - begun


def required(name: str, text: str) -> list[str]:
    """The words of an option. Raises ValueError if it has none."""
    words = split(text)
    if not words:
        raise ValueError(f"{name}: {text!r} names nothing")
    return words


def split(text: str) -> list[str]:
    """The words of a list separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    app()
