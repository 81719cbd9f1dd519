"""perf.configs: the plan's choice beside other configurations, on a clock that needs no GPU."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from cute_kernels.config.decode import DecodeConfig
from cute_kernels.planning.variants import PRETEND
from perf import configs
from perf.case_sets import select_cases
from perf.cases import Case, fixed
from perf.configs import compare, parse, to_compare
from perf.measure import Limits
from perf.tune import task_of
from tests.support.perf_fakes import FakeClock, Kernel

CPU = torch.device("cpu")
H200 = PRETEND["h200"]
CASE = Case(4, 2, 64, 16, fixed(2, 40))
LIMITS = Limits(replays=15, trials=2, memory_bytes=2**24, rotated_bytes=1, host_calls=0)
OTHER = DecodeConfig(tile_n=16, num_stages=16, num_warps=2, ctas_per_sm=1)
WRONG = DecodeConfig(tile_n=16, num_stages=8, num_warps=2, ctas_per_sm=1)


def us(case, config):
    """9.75 us with OTHER, 10 with any other configuration."""
    return 9.75 if config == OTHER else 10.0


def run(configurations, *wrong, clock=None):
    return compare(task_of(CASE, H200), configurations, LIMITS, clock or FakeClock(), CPU, partial(Kernel, us, wrong))


def test_the_choice_is_timed_twice_beside_the_others_in_the_same_rounds():
    rounds = []

    class Listening(FakeClock):
        def times(self, rotations, replays):
            rounds.append(([rotation.us for rotation in rotations], replays))
            return super().times(rotations, replays)

    chosen = task_of(CASE, H200).heuristic
    compared = run([chosen, OTHER], clock=Listening())
    assert rounds == [([10.0, 9.75, 10.0], 15)]
    assert {config: timing.median for config, timing in compared.times.items()} == {chosen: 10.0, OTHER: 9.75}
    assert compared.again.median == 10.0
    console = Console(width=200, file=io.StringIO())
    console.print(compared.table())
    lines = [line.split() for line in console.file.getvalue().splitlines() if "10.00" in line or "9.75" in line]
    found = [[word for word in line if word not in "│┃"] for line in lines]
    assert [line[6:10] for line in found] == [["10.00"] * 3 + ["1.0000"]] * 2 + [["9.75"] * 3 + ["0.9750"]]
    assert [" ".join(line[10:]) for line in found] == ["the plan's choice", "the same again", ""]
    assert found[2][:6] == ["16", "16", "2", "1", "1", "warp"]


def test_a_wrong_configuration_has_a_line_and_no_time():
    chosen = task_of(CASE, H200).heuristic
    compared = run([chosen, WRONG, OTHER], WRONG)
    assert set(compared.times) == {chosen, OTHER}
    (line,) = compared.wrong
    assert str(WRONG) in line and "exceeds" in line
    broken = run([chosen, OTHER], chosen)
    assert broken.times == {} and "the plan's choice could not be timed" in broken.wrong[-1]


def test_64_rows_of_8k_at_e4m3_are_compared_with_two_ctas_an_sm():
    (case,) = select_cases([configs.CASES])
    task = task_of(case, H200)
    chosen, *others = to_compare(task, H200, [])[0]
    assert chosen == task.heuristic
    assert (chosen.tile_n, chosen.ctas_per_sm) == (64, 1)
    assert (32, 2) in {(config.tile_n, config.ctas_per_sm) for config in others}
    assert to_compare(task, H200, [chosen, OTHER, OTHER]) == ([chosen, OTHER], [])


def test_what_a_plan_would_not_take_is_left_out_with_the_reason():
    """A forced configuration that does not fit is replaced by the heuristic's without a word: it may not be timed as itself."""
    task, odd = task_of(CASE, H200), DecodeConfig(tile_n=24, num_stages=3, num_warps=2, ctas_per_sm=1)
    fitting, (line,) = to_compare(task, H200, [OTHER, odd])
    assert fitting == [task.heuristic, OTHER]
    assert "tile_n=24 is not a positive multiple of 16; num_stages=3 is not a multiple" in line


def test_configurations_are_given_by_their_knobs():
    assert parse("64, 8,4,1") == DecodeConfig(64, 8, 4, 1)
    assert parse("32,8,8,1,2") == DecodeConfig(32, 8, 8, 1, 2)
    for text in ("64,8,4", "64,8,4,x", "1,2,3,4,5,6", ""):
        with pytest.raises(typer.BadParameter, match="tile_n, num_stages"):
            parse(text)


def test_the_command_needs_a_gpu_and_cases():
    app = typer.Typer()
    app.command()(configs.main)
    for arguments in ([], ["--cases", "nothing"], ["--config", "64"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2
