"""Times configurations on this GPU for `python -m cute_kernels tune`; attention/choice/tuning.py decides what the times mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from cute_kernels import InvalidArgument, Unsupported
from cute_kernels.attention.choice import tuned
from cute_kernels.attention.choice.tuning import Cell, Finding, Group, cells, finalists, group_of, sweep, updated
from cute_kernels.attention.descriptors import DecodeProblem
from cute_kernels.attention.variants import explain
from cute_kernels.compile.kernels import compile_ahead
from cute_kernels.config.decode import DecodeConfig, KernelSpec
from cute_kernels.config.tiling import Arch, Target
from cute_kernels.planning.variants import DeviceFacts
from perf.case_sets import select_cases
from perf.cases import Case, Rows
from perf.inputs import Inputs, make_inputs
from perf.measure import Contender, DeviceFailed, Limits, Outcome, enter
from perf.providers.base import Provider
from perf.providers.ours import Configured, descriptor, spec_of
from perf.record import commit
from perf.report import progress
from perf.resume import Deadline
from perf.run import CASES_LEFT, WRONG, split
from perf.timing import Clock, GraphClock

Save = Callable[[Sequence[tuple[Finding, Cell]]], None]  # is given every finding of the run so far


@dataclass(frozen=True)
class Task:
    """One problem to tune: its case, the mainloop and target that the plan takes on this device, and the heuristic's choice."""

    case: Case
    problem: DecodeProblem
    arch: Arch
    target: Target
    heuristic: DecodeConfig
    sm_count: int


@dataclass(frozen=True)
class Tuned:
    """The outcome of a task. finding: None if the heuristic's own configuration has no time, for `reason`.

    tried: how many configurations were timed. wrong: the reason for each configuration that crashed or gave a wrong result.
    """

    task: Task
    finding: Finding | None = None
    reason: str = ""
    tried: int = 0
    wrong: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line: both times, and the result."""
        if self.finding is None:
            return f"{self.task.case.name}: not tuned: {self.reason}"
        f = self.finding
        verdict = f"entry {tuple(vars(f.config).values())}" if f.wins else "heuristic stays"
        times = f"{f.heuristic_us:.2f} -> {f.us:.2f} us, {100 * f.gain:+.1f}% of {100 * f.threshold:.1f}% needed"
        return f"{self.task.case.name}: {times}, {self.tried} tried: {verdict}"


def task_of(case: Case, facts: DeviceFacts) -> Task:
    """The task of a case on such a device. Raises Unsupported if no variant with configurations serves it."""
    problem = descriptor(case).problem
    with tuned.forced(None):
        chosen = explain(problem, facts).chosen
    if chosen.spec is None or chosen.config is None:
        raise Unsupported([f"{chosen.variant}: has no configurations to choose from"])
    return Task(case, problem, chosen.spec.arch, chosen.spec.target, chosen.config, facts.sm_count)


def specs_of(task: Task, device: torch.device, configs: Sequence[DecodeConfig]) -> list[KernelSpec]:
    """The specs that the plans of a task's configurations compile, and that of the heuristic's choice."""
    facts, specs = DeviceFacts.of(device), []
    for config in (task.heuristic, *configs):
        with tuned.forced(config):
            specs.append(spec_of(task.problem, facts))
    return [spec for spec in specs if spec is not None]


def task_or_reason(case: Case, facts: DeviceFacts) -> Task | str:
    """The task of a case, or the reason why there is none."""
    try:
        return task_of(case, facts)
    except Unsupported as unsupported:
        return f"{case.name}: {unsupported}"


def tunable(cases: Iterable[Case]) -> tuple[list[Case], list[str]]:
    """(the cases that a plan can tell apart, the reasons why the other cases are left out)."""
    kept: dict[tuple[object, ...], Case] = {}
    left_out = []
    for case in cases:
        if case.operation != "decode":
            left_out.append(f"{case.name}: {case.operation} is not tuned")
            continue
        problem = descriptor(case).problem
        key = (group_of(problem, "sm90"), problem.batch_size, problem.max_seq_len)
        if not isinstance(case.lengths, Rows) or len(case.lengths.groups) > 1:
            left_out.append(f"{case.name}: a plan does not know that its rows have different lengths")
        elif key in kept:
            left_out.append(f"{case.name}: a plan table does not tell it from {kept[key].name}")
        else:
            kept[key] = case
    return list(kept.values()), left_out


def tune_task(
    task: Task,
    configs: Sequence[DecodeConfig],
    limits: Limits,
    clock: Clock,
    device: torch.device,
    provider: Callable[[DecodeConfig], Provider] = Configured,
) -> tuple[Tuned, dict[DecodeConfig, float]]:
    """(the outcome of a task, each configuration's time in the short trial). Raises DeviceFailed.

    Every configuration passes the correctness gate first. The last round times the heuristic's choice twice: that is the noise.
    """
    try:
        inputs = make_inputs(task.case, device, limits.memory_bytes, limits.rotated_bytes)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Tuned(task, reason=str(error)), {}
    contenders, wrong = gated([task.heuristic, *configs], inputs, limits, clock, provider)
    if task.heuristic not in contenders:
        return Tuned(task, reason="the heuristic's choice could not be timed", wrong=wrong), {}
    trial = clock.times([contender.rotation for contender in contenders.values()], limits.trials)
    trial_us = dict(zip(contenders, (timing.median for timing in trial), strict=True))
    last = [task.heuristic, task.heuristic, *(config for config in finalists(trial_us) if config != task.heuristic)]
    first, again, *others = (t.median for t in clock.times([contenders[config].rotation for config in last], limits.replays))
    times = {task.heuristic: min(first, again), **dict(zip(last[2:], others, strict=True))}
    best = min(times, key=times.__getitem__)
    finding = Finding(task.problem, task.arch, best, times[best], times[task.heuristic], abs(first / again - 1))
    return Tuned(task, finding, tried=len(contenders), wrong=wrong), trial_us


def gated(
    configs: Iterable[DecodeConfig], inputs: Inputs, limits: Limits, clock: Clock, provider: Callable[[DecodeConfig], Provider]
) -> tuple[dict[DecodeConfig, Contender], tuple[str, ...]]:
    """The configurations that gave a right result, each once and captured, and a line for each that crashed or was wrong.

    Configurations that cannot serve the case are in neither. Raises DeviceFailed.
    """
    contenders: dict[DecodeConfig, Contender] = {}
    wrong = []
    for config in dict.fromkeys(configs):
        entry = enter(provider(config), Outcome(inputs.case, "ours", "", strict=True), inputs, limits, clock)
        if isinstance(entry, Contender):
            contenders[config] = entry
        elif entry.failed:
            wrong.append(f"{inputs.case.name}: {config}: {entry.reason}")
    return contenders, tuple(wrong)


def tune(
    tasks: Sequence[Task],
    limits: Limits,
    clock: Clock,
    device: torch.device,
    save: Save,
    deadline: Deadline,
    console: Console,
    provider: Callable[[DecodeConfig], Provider] = Configured,
) -> list[Tuned]:
    """Tunes the tasks one after the other, and calls `save` after each; the deadline ends the run early."""
    spans = cells([(task.problem, task.arch) for task in tasks])
    groups: dict[object, Group] = {}
    done: list[Tuned] = []
    found: list[tuple[Finding, Cell]] = []
    with progress(console) as shown:
        bar = shown.add_task("problems", total=len(tasks))
        for task, cell in zip(tasks, spans, strict=True):
            if not deadline.allows_another():
                break
            shown.update(bar, description=task.case.name)
            group = groups.setdefault(group_of(task.problem, task.arch), Group())
            configs = group.worth_trying(sweep(task.problem, task.arch, task.target, task.sm_count))
            compile_ahead(specs_of(task, device, configs))
            try:
                result, trial_us = tune_task(task, configs, limits, clock, device, provider)
            except DeviceFailed as failure:
                done.append(Tuned(task, reason="the device is lost", wrong=(f"{task.case.name}: {failure}",)))
                shown.console.print(*done[-1].wrong, highlight=False, markup=False)
                break
            if trial_us:
                group.learn(trial_us)
            done.append(result)
            if result.finding is not None:
                found.append((result.finding, cell))
                save(found)
            for line in (*result.wrong, result.summary):
                shown.console.print(line, highlight=False, markup=False)
            shown.advance(bar)
    return done


def save_table(path: Path, gpu: str, before: Sequence[tuned.Entry], commit: str) -> Save:
    """A Save that writes the table at `path`: the entries `before`, updated by the findings so far."""

    def save(found: Sequence[tuple[Finding, Cell]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tuned.dump(gpu, updated(before, found, commit)), encoding="utf-8")

    return save


def tune_cases(patterns: str, out: Path | None, minutes: float, limits: Limits, share: float, console: Console) -> int:
    """The command: tunes the cases that sets and globs name on the current GPU, writes <out>/<gpu>.json, returns the exit code.

    out: None for the folder that plans are read from. share: the share of the free device memory for the caches, which replaces
    the memory in `limits`. Raises InvalidArgument for a pattern that names nothing, Unsupported without a GPU.
    """
    deadline = Deadline(60 * minutes if minutes else None)
    try:
        cases, left_out = tunable(select_cases(split(patterns)))
    except ValueError as error:
        raise InvalidArgument("cases", str(error).removeprefix("cases: ")) from error
    if not torch.cuda.is_available():
        raise Unsupported(["device: tune times a CUDA device and there is none"])
    device = torch.device("cuda", torch.cuda.current_device())
    facts, revision = DeviceFacts.of(device), commit()
    name = f"{facts.slug}.json"
    label = str(revision["commit"] or "unknown") + ("-dirty" if revision["dirty"] else "")
    save = save_table((out or tuned.plans_folder()) / name, facts.name, tuned.load(tuned.plans_folder() / name), label)
    limits = replace(limits, memory_bytes=int(share * torch.cuda.mem_get_info(device)[0]))
    served = [task_or_reason(case, facts) for case in cases]
    tasks = [task for task in served if isinstance(task, Task)]
    for line in (*left_out, *(reason for reason in served if isinstance(reason, str))):
        console.print(f"left out: {line}", highlight=False, markup=False)
    done = tune(tasks, limits, GraphClock(), device, save, deadline, console)
    wins = sum(result.finding is not None and result.finding.wins for result in done)
    console.print(f"{wins} of {len(done)} problems have an entry, {len(tasks) - len(done)} were not reached", highlight=False)
    if any(result.wrong for result in done):
        return WRONG
    return CASES_LEFT if len(done) < len(tasks) else 0
