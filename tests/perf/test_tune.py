"""perf.tune with a clock that needs no GPU: what is gated, timed, given up and written."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

import cute_kernels as ck
from cute_kernels import cli
from cute_kernels.attention.choice import heuristics, tuned
from cute_kernels.attention.choice.tuning import sweep
from cute_kernels.attention.variants import explain
from cute_kernels.config.decode import DecodeConfig
from cute_kernels.planning.variants import PRETEND
from perf.cases import Case, Rows, append_case, fixed
from perf.measure import Limits
from perf.providers.ours import Configured, descriptor, paged_descriptor
from perf.resume import Deadline
from perf.tune import save_table, task_of, task_or_reason, tunable, tune, tune_task
from tests.support.perf_fakes import FakeClock, Kernel

CPU = torch.device("cpu")
H200 = PRETEND["h200"]
CASE = Case(4, 2, 64, 16, fixed(2, 40))
LIMITS = Limits(replays=15, trials=2, memory_bytes=2**24, rotated_bytes=1, host_calls=0)
FASTER = DecodeConfig(tile_n=16, num_stages=16, num_warps=2, ctas_per_sm=1)


class Noisy(FakeClock):
    """A clock that gives what is timed a second time in one round a longer time."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def times(self, rotations, replays):
        seen, timings = set(), super().times(rotations, replays)
        for index, rotation in enumerate(rotations):
            if id(rotation) in seen:
                timings[index] = replace(timings[index], median=timings[index].median * (1 + self.noise))
            seen.add(id(rotation))
        return timings


def kernels(us, *wrong):
    return partial(Kernel, us, wrong)


def faster(case, config):
    """10 us, and 9 with FASTER."""
    return 9.0 if config == FASTER else 10.0


def run_task(us=faster, *wrong, clock=None, case=CASE):
    task = task_of(case, H200)
    configs = sweep(task.problem, task.arch, task.target, 132)
    assert FASTER in configs
    return tune_task(task, configs, LIMITS, clock or FakeClock(), CPU, kernels(us, *wrong))


def test_the_fastest_configuration_is_found_and_wins() -> None:
    result, trial = run_task()
    assert result.finding.config == FASTER
    assert (result.finding.us, result.finding.heuristic_us, result.finding.noise) == (9.0, 10.0, 0.0)
    assert result.finding.wins
    assert result.tried == len(trial) > 10
    assert "10.00 -> 9.00 us, +10.0% of 2.0% needed" in result.summary


def test_the_noise_of_the_heuristic_against_itself_raises_the_bar() -> None:
    result, _ = run_task(clock=Noisy(0.04))
    assert result.finding.noise == pytest.approx(0.04, rel=0.05)
    assert result.finding.gain == pytest.approx(0.1)
    assert not result.finding.wins  # 10% against 3 x 4%
    assert "heuristic stays" in result.summary


def test_a_wrong_configuration_is_reported_and_never_timed() -> None:
    result, trial = run_task(faster, FASTER)
    assert FASTER not in trial
    assert not result.finding.wins
    (line,) = result.wrong
    assert str(FASTER) in line
    assert "exceeds" in line


def test_nothing_is_found_where_the_heuristic_is_wrong_or_memory_is_short() -> None:
    task = task_of(CASE, H200)
    result, trial = run_task(faster, task.heuristic)
    assert (result.finding, trial) == (None, {})
    assert len(result.wrong) == 1
    short = replace(LIMITS, memory_bytes=10)
    result, _ = tune_task(task, [], short, FakeClock(), CPU, kernels(faster))
    assert "10 bytes allowed" in result.summary
    assert not result.wrong


def run_all(cases, us, path: Path, deadline=None, clock=None):
    tasks = [task_of(case, H200) for case in cases]
    save = save_table(path, "NVIDIA H200", tuned.load(path), "abc")
    console = Console(file=io.StringIO())
    done = tune(tasks, LIMITS, clock or FakeClock(), CPU, save, deadline or Deadline(None), console, kernels(us))
    tuned.load.cache_clear()
    return done


def test_a_run_writes_a_table_that_plans_are_then_chosen_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [CASE, replace(CASE, lengths=fixed(8, 40)), replace(CASE, page_size=32)]
    done = run_all(cases, lambda case, config: faster(case, config) if case.batch_size == 2 else 10.0, tmp_path / "h200.json")
    assert [result.finding.wins for result in done] == [True, False, True]
    monkeypatch.setattr(tuned, "plans_folder", lambda: tmp_path)
    chosen = [task_chosen(case) for case in cases]
    assert [source for _, source in chosen] == ["plans/h200.json", "heuristics", "plans/h200.json"]
    assert chosen[0][0] == FASTER
    assert {entry.measured.commit for entry in tuned.load(tmp_path / "h200.json")} == {"abc"}
    run_all(cases[:1], lambda case, config: 10.0, tmp_path / "h200.json")  # measured again: nothing to gain any more
    assert [source for _, source in map(task_chosen, cases)] == ["heuristics", "heuristics", "plans/h200.json"]


def task_chosen(case: Case) -> tuple[DecodeConfig, str]:
    """What an H200 would take: the configuration, and who chose it."""
    chosen = explain(descriptor(case).problem, H200).candidates[0]
    return chosen.config, chosen.config_source


def test_hopeless_configurations_are_given_up_for_the_rest_of_their_group(tmp_path: Path) -> None:
    cases = [replace(CASE, lengths=fixed(batch, 40)) for batch in (5, 6, 7, 8)]  # of each FASTER is a configuration
    done = run_all(cases, lambda case, config: 9.0 if config == FASTER else 12.0, tmp_path / "h200.json")
    tried = [result.tried for result in done]
    assert tried[:3] == [len(sweep(descriptor(case).problem, "sm90", "sm_90a", H200.sm_count)) for case in cases[:3]]
    assert min(tried[:3]) > 10
    assert tried[3] == 2  # FASTER, and the heuristic's, which is always timed


def test_a_deadline_and_a_lost_device_keep_what_was_found(tmp_path: Path) -> None:
    cases = [replace(CASE, lengths=fixed(batch, 40)) for batch in (2, 8, 32)]
    seconds = iter((0, 0, 50, 60))
    done = run_all(cases, faster, tmp_path / "h200.json", Deadline(100, lambda: next(seconds)))
    assert len(done) == 2
    assert len(tuned.load(tmp_path / "h200.json")) == 2

    def crash(case, config):
        raise RuntimeError("an illegal memory access was encountered")

    (lost,) = run_all(cases, crash, tmp_path / "lost.json", clock=FakeClock(lost=True))
    assert "illegal memory access" in lost.wrong[0]
    assert not (tmp_path / "lost.json").exists()


def test_what_a_plan_table_cannot_tell_apart_is_left_out() -> None:
    ragged = replace(CASE, lengths=Rows(((1, 40), (1, 4))))
    again = replace(CASE, layout="NHD")
    kept, left_out = tunable([CASE, ragged, again, replace(CASE, page_size=32)])
    assert tunable([append_case(64)]) == ([], [f"{append_case(64).name}: append is not tuned"])
    assert kept == [CASE, replace(CASE, page_size=32)]
    assert ["different lengths" in line for line in left_out] == [True, False]
    assert CASE.name in left_out[1]


def test_a_case_without_configurations_has_a_reason_instead_of_a_task() -> None:
    assert task_or_reason(CASE, H200) == task_of(CASE, H200)
    assert task_or_reason(CASE, PRETEND["cpu"]) == f"{CASE.name}: cpu_reference: has no configurations to choose from"
    odd = replace(CASE, head_dim=257)
    assert "head_dim=257 is outside 1..256" in task_or_reason(odd, H200)


def test_a_configured_plan_runs_what_it_is_told(pretend_h200) -> None:
    case = replace(CASE, head_dim=128)
    heuristic = task_of(case, H200).heuristic
    plan = ck.PagedDecodePlan
    told = Configured(FASTER).make(plan, paged_descriptor(case), CPU)
    assert told.sku.config == FASTER != heuristic
    assert Configured(None).make(plan, paged_descriptor(case), CPU).sku.config == heuristic
    assert plan.select(paged_descriptor(case), device=CPU).sku.config == heuristic  # nothing of it is remembered
    assert heuristics.choose(descriptor(case).problem, "sm90", "sm_90a", 132) == heuristic


def test_the_command_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, error in (([], "there is none"), (["--cases", "nothing"], "cases: 'nothing' is neither a set")):
        with pytest.raises(ck.CuteKernelsError, match=error):
            cli.app(["tune", *arguments], standalone_mode=False)
    monkeypatch.setitem(sys.modules, "perf", None)
    for name in [name for name in sys.modules if name.startswith("perf.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ck.MissingDependency, match="part of the checkout"):
        cli.app(["tune"], standalone_mode=False)
