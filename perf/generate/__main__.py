"""python -m perf.generate: tokens per second of generate_batch and generate, their agreement, and a second process's compiles.

FA3_SO names the library of FlashAttention-3. Without a GPU: --tiny, which shows that the program runs.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from cute_kernels.planning.variants import DeviceFacts
from perf.generate.agree import Agreement, agreements
from perf.generate.kernels import compile_for
from perf.generate.measure import Timed, batched, generated
from perf.generate.models import Work, model_of, prompts_of, use

console = Console(width=200, highlight=False)


class Compiles(logging.Handler):
    """Counts the kernels that this process compiles."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("compiled ")


def main(
    batch: Annotated[int, typer.Option(help="Prompts.")] = 64,
    prompt: Annotated[int, typer.Option(help="Tokens of each.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="Tokens to add to each.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    providers: Annotated[str, typer.Option(help="Of ours, ours e4m3, fa3; sdpa is measured always.")] = "ours,ours e4m3,fa3",
    compare: Annotated[int, typer.Option(help="Prompts whose tokens and logits are compared.")] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model and prompts that a CPU serves.")] = False,
    second: Annotated[bool, typer.Option("--second", help="Only count what a second process compiles.")] = False,
) -> None:
    """Times, compares, and prints tables. Exit code 1 where tokens or logits disagree, or a second process compiles."""
    compiles = Compiles()
    package = logging.getLogger("cute_kernels")
    package.addHandler(compiles)
    package.setLevel(logging.INFO)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work, less = Work(batch, prompt, new_tokens), Work(max(1, batch // 4), prompt // 2, max(2, new_tokens // 4))
    names = providers.split(",")
    if "fa3" in names and device.type == "cuda" and "FA3_SO" not in os.environ:
        names.remove("fa3")
        console.print("fa3 is left out: FA3_SO names no library")
    if tiny:
        work, less, layers = Work(4, 40, 12), Work(2, 20, 6), 2
    if device.type == "cuda" and not second:
        started = time.perf_counter()
        count = compile_for(work, "ours e4m3" in names, DeviceFacts.of(device))
        console.print(f"{count} kernels were compiled or on disk in {time.perf_counter() - started:.1f} s", style="dim")
    model = model_of(layers, tiny, device)
    prompts, fewer = (prompts_of(each, model.config.vocab_size) for each in (work, less))
    if second:
        for name in names:
            if name.startswith("ours"):
                use(name, model)
                batched(model, name, prompts, work, once=True)
        print(f"compiled {compiles.count}")
        return
    console.print(
        f"{DeviceFacts.of(device)}, torch {torch.__version__}, transformers {transformers.__version__}, {layers} layers"
    )
    beside_sdpa = [*(name for name in names if name != "ours e4m3"), "sdpa"]
    found = [told(batched, model, name, prompts, work) for name in names]
    found += [told(batched, model, name, fewer, less) for name in beside_sdpa]
    found += [told(generated, model, name, prompts, work) for name in ("ours", "sdpa")]
    if found[-1] is None:  # for all prompts, sdpa may need more memory than there is
        found.append(told(generated, model, "sdpa", prompts[:compare], replace(work, prompts=compare)))
    timed = [each for each in found if each is not None]
    console.print(table_of(timed))
    console.print(f"kernels compiled by this process: {compiles.count}")
    failed = any(each is None for each in (*found[: len(names)], found[-1]))
    wrong = failed or compared(model, prompts[:compare], timed)
    del model  # the second process needs its memory
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    run = subprocess.run(
        [sys.executable, "-m", "perf.generate", "--second", *sys.argv[1:]], capture_output=True, text=True, check=False
    )
    said = run.stdout.strip().splitlines()[-1:] or run.stderr.strip().splitlines()[-1:]
    console.print(f"kernels of a second process: {said[0] if said else 'nothing was said'}", markup=False)
    if device.type == "cuda" and said != ["compiled 0"]:
        wrong = True
    raise typer.Exit(1 if wrong else 0)


def told(measure: Callable[..., Timed], model: Any, name: str, prompts: list[list[int]], work: Work) -> Timed | None:
    """Measures, which takes seconds, and prints when it is done. None if the measurement failed; then the error is printed."""
    started = time.perf_counter()
    try:
        use(name, model)
        found = measure(model, name, prompts, work)
    except RuntimeError as error:
        console.print(f"{name_of(name)}, {measure.__name__}, {work}: {str(error)[:500]}", markup=False)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None
    line = f"{name_of(name)}, {found.api}, {work}: {found.tokens_per_second:,.0f} tokens/s"
    console.print(f"{line}, measured in {time.perf_counter() - started:.1f} s", style="dim")
    return found


def name_of(provider: str) -> str:
    """The name that tables give a provider: the one whose attention really ran."""
    return f"{provider} (ours stands in)" if provider == "fa3" and not torch.cuda.is_available() else provider


def milliseconds(ms: float | None) -> str:
    """A time as the table shows it. The time of a step is a difference of two runs: if it is not positive, it is noise."""
    return "" if ms is None else f"{ms:.2f}" if ms > 0 else "-"


def table_of(timed: list[Timed]) -> Table:
    """Tokens per second, compared with fa3 and sdpa at the same work by the same function."""
    table = Table(title="generated tokens a second, prompts included")
    for column in (
        "function",
        "prompts x tokens + new",
        "attention",
        "tokens/s",
        f"of {name_of('fa3')}",
        "of sdpa",
        "ms a step",
        "ms on the device",
    ):
        table.add_column(column, justify="left" if column in ("function", "attention") else "right")
    for each in timed:
        beside = {other.provider: other for other in timed if (other.api, other.work) == (each.api, each.work)}
        ratios = [f"{each.tokens_per_second / beside[p].tokens_per_second:.2f}" if p in beside else "" for p in ("fa3", "sdpa")]
        step, device = map(milliseconds, (each.step_ms, each.device_ms))
        who = name_of(each.provider)
        table.add_row(each.api, str(each.work), who, f"{each.tokens_per_second:,.0f}", *ratios, step, device)
    return table


def compared(model: Any, prompts: list[list[int]], timed: list[Timed]) -> bool:
    """Prints how tokens and logits compare with sdpa's of generate; returns whether something is wrong."""
    sdpa = timed[-1]
    wrong = False
    for each in timed:
        if each.provider != "ours" or (each.work.prompt_len, each.work.new_tokens) != (
            sdpa.work.prompt_len,
            sdpa.work.new_tokens,
        ):
            continue
        table = Table(title=f"{each.api}: tokens beside sdpa's of generate, logits beside f32")
        columns = ("prompt", "first near tie", "first difference", "rms ours", "rms sdpa", "max ours", "max sdpa")
        for column in (*columns, "below best: ours", "sdpa", ""):
            table.add_column(column, justify="right")
        rows = agreements(model, prompts, sdpa.tokens[: len(prompts)], each.tokens[: len(prompts)])
        for number, row in enumerate(rows):
            table.add_row(str(number), *cells(row))
            wrong = wrong or not row.holds
        console.print(table)
    return wrong


def cells(row: Agreement) -> list[str]:
    steps = ["none" if step is None else str(step) for step in (row.first_tie, row.first_difference)]
    errors = [f"{value:.4f}" for pair in zip(row.ours, row.sdpas, strict=True) for value in pair]
    return [*steps, *errors, f"{row.below:.4f}", f"{row.sdpas_below:.4f}", "as sdpa" if row.holds else "WRONG"]


if __name__ == "__main__":
    typer.run(main)
