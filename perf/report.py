"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from perf.cases import PLAIN
from perf.measure import DEVICE, Outcome


def progress(console: Console) -> Progress:
    """A progress bar with the number of finished cases and the current measurement."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def summary(outcomes: Sequence[Outcome]) -> Table:
    """One row per case: each provider's microseconds and ratio to the floor, then the bar and whether it is met."""
    device = [outcome for outcome in outcomes if outcome.metric == DEVICE]
    providers = list(dict.fromkeys(outcome.provider for outcome in device))
    table = Table(title="device time, us (ratio to read; of long queries TFLOPS, ratio to wgmma), relative error")
    table.add_column("case", overflow="fold")
    table.add_column("MB", justify="right")
    for provider in providers:
        table.add_column(provider, justify="right")
    table.add_column("bar", justify="right")
    for name in dict.fromkeys(outcome.case.name for outcome in device):
        row = {outcome.provider: outcome for outcome in device if outcome.case.name == name}
        cells = [cell(row[provider]) if provider in row else Text() for provider in providers]
        megabytes = f"{next(iter(row.values())).case.kv_bytes / 1e6:.1f}"
        table.add_row(name, megabytes, *cells, verdict(row.values()))
    return table


def cell(outcome: Outcome) -> Text:
    """A provider's time, rate (long queries), ratio to the floor and relative error in percent; or one word why there is none."""
    if outcome.us is None:
        word = "-" if outcome.not_supported else "error" if outcome.error else "wrong"
        return Text(word, style="red" if word != "-" else "dim")
    less = outcome.case.long and outcome.provider == PLAIN  # PLAIN has only one of the case's query rows
    rate = [f"{outcome.case.tflops(outcome.us.median):.0f} TFLOPS"] if outcome.case.long and not less else []
    beside = [] if outcome.ratio_to_floor is None or less else [f"{outcome.ratio_to_floor:.3f}"]
    ratio = f" ({', '.join(rate + beside)})" if rate or beside else ""
    error = outcome.gate.relative_error if outcome.gate is not None else None
    accuracy = "" if error is None else f" {100 * error:.2f}%"
    return Text(f"{outcome.us.median:.1f}{ratio}{accuracy}")


def verdict(row: Iterable[Outcome]) -> Text:
    """The bar of a case and whether it is met, from the first outcome that has one, the plan's own choice."""
    for outcome in row:
        if outcome.bar is not None:
            word, style = {True: ("met", "green"), False: ("missed", "red"), None: ("not measured", "yellow")}[outcome.bar_met]
            return Text(f"{outcome.bar} {word}", style=style)
    return Text()


def problems(outcomes: Sequence[Outcome]) -> Text:
    """One line for each provider that has no time, then the host times and how many bars were met."""
    lines = Text()
    for outcome in outcomes:
        if outcome.reason:
            lines.append(f"{outcome.case.name}: {outcome.provider}: {outcome.reason}\n", style="red" if outcome.failed else "dim")
    for outcome in outcomes:
        if outcome.metric != DEVICE and outcome.us is not None:
            lines.append(f"{outcome.case.name}: {outcome.provider} {outcome.metric} {outcome.us.median:.2f} us\n")
    held = [outcome for outcome in outcomes if outcome.bar is not None]
    if held:
        lines.append(f"{sum(outcome.bar_met is True for outcome in held)} of {len(held)} bars met")
    return lines
