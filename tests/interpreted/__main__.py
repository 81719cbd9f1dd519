"""Runs the cases of the GPU tests on the interpreter, each by the kernel that a plan would choose on a few SMs of an H200."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
import typer
from rich.progress import track

from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.interpreted.machine.attention import chosen_kernel
from tests.interpreted.runs import run_attention, run_backward
from tests.support import backward_cases, backward_harness
from tests.support.attention_cases import CASES, F32_CASES, Case, make_attention
from tests.support.attention_harness import assert_close
from tests.support.harness import assert_bitwise

Arch = Literal["sm90", "sm80"]
SM_COUNTS = (1, 2, 3, 5, 8)  # few CTAs, so that rows are cut between them, or blocks dealt to them, even if lengths are small
INVARIANT_SHARE = 0.3


def attention(case: Case, arch: Arch, draw: random.Random) -> None:
    """Runs a case twice over one workspace, in two orders of warps: each row is right, and both runs have the same bits."""
    preference = PlanPreference(arch=arch, sm_count=draw.choice(SM_COUNTS), batch_invariant=draw.random() < INVARIANT_SHARE)
    kernel = chosen_kernel(case.descriptor(), preference.part_of(PRETEND["h200"]), preference)
    inputs, total = make_attention(case), sum(case.q_lens)
    found = run_attention(kernel, inputs, seed=draw.randrange(100))
    assert_close(inputs, found)
    again = run_attention(kernel, inputs, seed=draw.randrange(100))
    assert_bitwise((again[0][:total], again[1][:total]), (found[0][:total], found[1][:total]))


def backward(case: backward_cases.Case, arch: Arch, draw: random.Random) -> None:
    """Checks the gradients of a case; half of the cases run in f32."""
    backward_harness.assert_close(*run_backward(backward_cases.in_f32(case) if draw.random() < 0.5 else case, arch))


def runs(arch: Arch, draw: random.Random) -> dict[str, Callable[[], None]]:
    """The function that each name runs."""
    served = (case for case in (*CASES, *F32_CASES) if case.tma or arch == "sm80")
    found = {f"attention-{case.name}": partial(attention, case, arch, draw) for case in served}
    return found | {f"backward-{case.name}": partial(backward, case, arch, draw) for case in backward_cases.CASES}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Run only cases whose names have one of these parts.")] = None,
    arch: Annotated[Arch, typer.Option(help="Whose kernels.")] = "sm90",
    seed: Annotated[int, typer.Option(help="Of the order of cases and warps, and of the SMs.")] = 0,
    minutes: Annotated[float, typer.Option(help="Begin no case later.")] = 30.0,
) -> None:
    """Runs cases in a random order. Ends with 1 if one is wrong, or cannot go on."""
    torch.set_num_threads(1)
    draw, end, wrong = random.Random(seed), time.monotonic() + 60 * minutes, 0
    chosen = [(name, run) for name, run in runs(arch, draw).items() if not names or any(part in name for part in names)]
    draw.shuffle(chosen)
    for name, run in track(chosen, description=arch):
        if time.monotonic() > end:
            break
        try:
            run()
        except Exception as error:  # after any error of a kernel, the other cases go on
            wrong += 1
            typer.echo(f"WRONG {name}: {type(error).__name__}: {error}", err=True)
        else:
            typer.echo(f"ok    {name}")
    raise typer.Exit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
