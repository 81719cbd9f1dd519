"""The command: times a layer of a model here, and prints it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from ..kv.types import KVDtype
from ..planning.variants import DeviceFacts
from .clock import rounds, seconds_of
from .jobs import Bench, Job, Size
from .models import Model, model_named

LONGEST_PROMPT = 32768
ON_CPU = Size(2, 256, 64)


@dataclass(frozen=True)
class Measured:
    """One job, in microseconds per call."""

    job: Job
    us: float

    @property
    def decodes(self) -> bool:
        return not self.job.name.startswith("prompt")


def run_bench(
    name: str, batch: int, context: int, page_size: int, kv_dtype: KVDtype | None, as_json: bool, console: Console
) -> None:
    """Raises InvalidArgument for an unknown model, and for sizes that do not fit."""
    model, device = model_named(name), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = Size(batch, context, min(context, LONGEST_PROMPT))
    size = asked if device.type == "cuda" else Size(*map(min, vars(asked).values(), vars(ON_CPU).values()))
    bench = Bench(model, size, page_size, kv_dtype, device)
    jobs = list(bench.jobs())
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, disable=as_json) as bar:
        task = bar.add_task("", total=len(jobs) * rounds(device))
        found = []
        for job in jobs:
            bar.update(task, description=job.name)
            found.append(Measured(job, 1e6 * seconds_of(job.calls, device, lambda: bar.advance(task))))
    facts = DeviceFacts.of(device)
    if as_json:
        console.print_json(json.dumps(_as_data(name, facts, size, found)))
        return
    if device.type != "cuda":
        console.print(_on_cpu(size, asked))
    stored = "bf16" if kv_dtype is None else kv_dtype.value
    title = f"a layer of {name.lower()} on {facts}: {size.batch} x {size.context:,} tokens, pages of {page_size}, {stored}"
    console.print(_table(title, found))
    if device.type == "cuda":
        console.print(_summary(model, size, found))


def _on_cpu(size: Size, asked: Size) -> str:
    """The sizes that were timed without a GPU, and those asked for."""
    less = []
    if (size.batch, size.context) != (asked.batch, asked.context):
        requests = "1 request" if size.batch == 1 else f"{size.batch} requests"
        less.append(f"{requests} of {size.context:,} tokens in place of {asked.batch} of {asked.context:,}")
    if size.prompt != asked.prompt:
        less.append(f"a prompt of {size.prompt:,} in place of {asked.prompt:,}")
    reduced = f" with {' and '.join(less)}" if less else ""
    return f"No GPU is here: the PyTorch reference runs on the CPU{reduced}. The times show that it runs, not how fast a GPU is."


def _table(title: str, found: list[Measured]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "us", "TB/s", "TFLOPS", "layers"):
        table.add_column(column, justify="right" if column else "left")
    for job, us in ((each.job, each.us) for each in found):
        rates = (f"{job.nbytes / us / 1e6:.2f}", f"{job.flops / us / 1e6:.1f}" if job.flops else "")
        table.add_row(job.name, f"{us:,.1f}", *rates, str(job.count))
    return table


def _summary(model: Model, size: Size, found: list[Measured]) -> str:
    layers = sum(each.count for each in model.layers)
    step, prompt = (sum(m.us * m.job.count for m in found if m.decodes is kind) / 1e3 for kind in (True, False))
    return (
        f"All {layers} layers: {step:,.2f} ms a decode step, which is at most {1e3 * size.batch / step:,.0f} tokens/s, and "
        f"{prompt:,.1f} ms a prompt, without what is not attention."
    )


def _as_data(name: str, facts: DeviceFacts, size: Size, found: list[Measured]) -> dict[str, object]:
    jobs = [{"name": m.job.name, "us": m.us, "bytes": m.job.nbytes, "flops": m.job.flops, "layers": m.job.count} for m in found]
    return {"model": name.lower(), "device": str(facts), **vars(size), "jobs": jobs}
