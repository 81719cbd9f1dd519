"""python -m perf.configs: times the configuration that a plan chooses next to others, on this GPU. Nothing is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, cast, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table

from cute_kernels import Unsupported
from cute_kernels.attention.choice import heuristics
from cute_kernels.attention.choice.tuned import KNOBS
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.attention.variants import explain, misfits
from cute_kernels.compile.kernels import compile_ahead
from cute_kernels.config.decode import DecodeConfig
from cute_kernels.config.tiling import MmaScope
from cute_kernels.planning.variants import DeviceFacts
from perf.case_sets import select_cases
from perf.cases import Case
from perf.inputs import make_inputs
from perf.measure import DeviceFailed, Limits
from perf.providers.base import Provider
from perf.providers.ours import Configured
from perf.record import machine
from perf.run import WRONG, split
from perf.timing import Clock, GraphClock, Timing
from perf.tune import Task, gated, specs_of, task_of

CASES = "gqa_paged_decode_h32_kv8_d128_ps16_bf16_kve4m3_b64_l8k"
console = Console(width=None if sys.stdout.isatty() else 200)


@dataclass(frozen=True)
class Compared:
    """One case's times.

    times: of each configuration that gave a right result, the plan's choice first. again: the choice's second time in the same
    rounds, which shows the noise. wrong: one line for each configuration that crashed or was wrong.
    """

    case: Case
    times: dict[DecodeConfig, Timing]
    again: Timing | None
    wrong: tuple[str, ...] = ()

    def table(self) -> Table:
        """One row per configuration, with its median over that of the plan's choice."""
        table = Table(title=self.case.name)
        for column in (*KNOBS, "median us", "p20", "p80", "of the choice", ""):
            table.add_column(column, justify="right")
        rows = [
            (config, timing, "" if index else "the plan's choice") for index, (config, timing) in enumerate(self.times.items())
        ]
        if self.again is not None:
            rows.insert(1, (rows[0][0], self.again, "the same again"))
        for config, timing, note in rows:
            times = (f"{us:.2f}" for us in (timing.median, timing.p20, timing.p80))
            knobs = (str(getattr(config, knob)) for knob in KNOBS)
            table.add_row(*knobs, *times, f"{timing.median / rows[0][1].median:.4f}", note)
        return table


def compare(
    task: Task,
    configs: Sequence[DecodeConfig],
    limits: Limits,
    clock: Clock,
    device: torch.device,
    provider: Callable[[DecodeConfig], Provider] = Configured,
) -> Compared:
    """Times `configs` interleaved, the first of them twice. Each passes the correctness gate first. Raises DeviceFailed."""
    inputs = make_inputs(task.case, device, limits.memory_bytes, limits.rotated_bytes)
    contenders, wrong = gated(configs, inputs, limits, clock, provider)
    if configs[0] not in contenders:
        return Compared(task.case, {}, None, (*wrong, f"{task.case.name}: the plan's choice could not be timed"))
    rotations = [contender.rotation for contender in contenders.values()]
    *times, again = clock.times([*rotations, rotations[0]], limits.replays)
    return Compared(task.case, dict(zip(contenders, times, strict=True)), again, wrong)


def parse(text: str) -> DecodeConfig:
    """A configuration from its knobs in order, "64,8,4,1" or "64,4,8,1,warpgroup". Raises typer.BadParameter."""
    numbers, scopes = split(text), get_args(MmaScope)
    mma = numbers.pop() if numbers and numbers[-1] in scopes else "warp"
    if not 4 <= len(numbers) < len(KNOBS) or not all(word.isdecimal() for word in numbers):
        raise typer.BadParameter(f"{text!r} is not {', '.join(KNOBS)} (the last two may be left out; mma is one of {scopes})")
    tile_n, num_stages, num_warps, ctas_per_sm, unit_heads = (*map(int, numbers), 1)[: len(KNOBS) - 1]
    return DecodeConfig(tile_n, num_stages, num_warps, ctas_per_sm, unit_heads, cast(MmaScope, mma))


def main(
    cases: Annotated[str, typer.Option(help="Sets and globs over case names, separated by commas.")] = CASES,
    config: Annotated[
        list[str] | None, typer.Option(help=f"{','.join(KNOBS)}; repeat for more. Default: all that a plan chooses among.")
    ] = None,
    replays: Annotated[int, typer.Option(min=15, help="Replays of each configuration.")] = 41,
    memory: Annotated[float, typer.Option(help="Share of the free device memory that the caches may take.")] = 0.4,
) -> None:
    """Times the plan's choice of each case beside other configurations; exit code 1 when one is wrong, 2 for a bad request."""
    given = [parse(text) for text in config or ()]
    try:
        chosen = select_cases(split(cases))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--cases") from error
    if not torch.cuda.is_available():
        raise typer.BadParameter("perf.configs times a CUDA device and there is none")
    device = torch.device("cuda", torch.cuda.current_device())
    facts = DeviceFacts.of(device)
    limits = Limits(replays, trials=1, memory_bytes=int(memory * torch.cuda.mem_get_info(device)[0]))
    console.print(f"{facts}, machine {machine(device).get('id')}", highlight=False)
    wrong: list[str] = []
    for case in chosen:
        try:
            task = task_of(case, facts)
            configs, misfit = to_compare(task, facts, given)
            for line in misfit:
                console.print(f"{case.name}: {line}", highlight=False, markup=False)
            compile_ahead(specs_of(task, device, configs))
            compared = compare(task, configs, limits, GraphClock(), device)
        except (Unsupported, MemoryError) as reason:
            console.print(f"{case.name}: left out: {reason}", highlight=False, markup=False)
            continue
        except DeviceFailed as lost:
            wrong.append(f"{case.name}: {lost}")
            break
        console.print(compared.table())
        wrong += compared.wrong
    for line in wrong:
        console.print(line, highlight=False, markup=False)
    raise typer.Exit(WRONG if wrong else 0)


def to_compare(task: Task, facts: DeviceFacts, given: Sequence[DecodeConfig]) -> tuple[list[DecodeConfig], list[str]]:
    """(the configurations to time, a line for each that is left out because a plan would not take it).

    First comes the choice of a plan on this device, which uses its table of tuned plans, then `given`, or all configurations
    that the heuristic ranks.
    """
    chosen = explain(task.problem, facts).chosen.config or task.heuristic
    fitting, left_out = [chosen], []
    for config in given or heuristics.candidates(task.problem, task.arch, task.target, facts.sm_count):
        reasons = misfits(task.problem, kernel_spec(task.problem, task.arch, task.target, config, partition="balanced"))
        if reasons:
            left_out.append(f"{config} is left out: {'; '.join(reasons)}")
        else:
            fitting.append(config)
    return list(dict.fromkeys(fitting)), left_out


if __name__ == "__main__":
    typer.run(main)
