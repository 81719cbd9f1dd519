"""The combine of a row divided between its CTAs (device/schedule/crew.py): who takes its columns changes no bit."""

from collections.abc import Callable
from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from cutlass import Boolean

from cute_kernels.config.decode import DecodeConfig
from cute_kernels.device.schedule import crew
from tests.support.harness import assert_bitwise, assert_close, run, select, select_forced, select_patched
from tests.support.inputs import Inputs, Shape, make_inputs
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
ARCHES = pytest.mark.parametrize("arch", ["sm90", "sm80"])
ROWS = (16_000, 3, 5000, 0, 12_345)  # in up to 132 pieces
SHAPES = {
    "32/8": Shape(num_heads=32, num_kv_heads=8, lengths=ROWS, max_seq_len=16_000),
    "8/1": Shape(num_heads=8, num_kv_heads=1, lengths=ROWS, max_seq_len=16_000),
    "3/1 d80": Shape(num_heads=3, num_kv_heads=1, head_dim=80, lengths=ROWS, max_seq_len=16_000),
    "16/1 int8": Shape(num_heads=16, num_kv_heads=1, lengths=ROWS, max_seq_len=16_000, **STORAGES["int8 token"]),
}


def nobody(spec: object, problem: object, cta: object) -> Boolean:
    return Boolean(False)


def every_second(spec: object, problem: object, cta: object) -> Boolean:
    """To the CTAs of an odd place in their row, whose own index is at hand."""
    return cute.arch.block_idx()[0] % 2 == 1


def patched(monkeypatch: pytest.MonkeyPatch, name: str, value: object, shape: Shape, arch: str) -> Callable[[Inputs], tuple]:
    """Runs of a kernel compiled with another `crew.name`."""
    plan = select_patched(monkeypatch, crew, name, value, shape, arch)
    return lambda inputs: run(plan, inputs)


@ARCHES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("announced", [nobody, every_second])
def test_columns_that_are_declined_are_combined_by_the_last_cta(
    monkeypatch: pytest.MonkeyPatch, announced: Callable, shape: Shape, arch: str
) -> None:
    inputs = make_inputs(shape, "cuda")
    expected = run(select(shape, arch), inputs)
    assert_close(inputs, *expected)
    declining = patched(monkeypatch, "is_announced", announced, shape, arch)
    for _ in range(3):
        assert_bitwise(declining(inputs), expected)


@ARCHES
def test_a_row_in_more_pieces_than_are_kept_apart_is_combined_by_its_last_cta(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    shape = SHAPES["8/1"]
    inputs, alone = make_inputs(shape, "cuda"), patched(monkeypatch, "MOST_PIECES", 3, shape, arch)
    first = alone(inputs)
    assert_close(inputs, *first)
    assert_bitwise(alone(inputs), first)


FORCED = {  # few warps, which only a tuned plan has, merge more in the combine than states of theirs take
    "8 warps": (DecodeConfig(16, 16, 8, 1), {}),
    "4 warps, 2 CTAs": (DecodeConfig(32, 4, 4, 2), {}),
    "2 warps": (DecodeConfig(32, 8, 2, 1), {"num_heads": 2, "head_dim": 96}),
    "1 warp": (DecodeConfig(32, 4, 1, 1), {"num_heads": 1}),
}


@pytest.mark.parametrize(("config", "heads"), FORCED.values(), ids=FORCED)
def test_a_row_in_any_number_of_pieces(config: DecodeConfig, heads: dict[str, int]) -> None:
    """Beside each other on a line of columns, threads take turns at the pieces: no number of turns may leave lanes behind.

    Slices of the smallest share, then as many as there are CTAs, of more.
    """
    shape = replace(SHAPES["8/1"], lengths=(128_000,), max_seq_len=128_000, **heads)
    plan = select_forced(shape, config)
    spec = plan.explain().chosen.spec
    costs = [slices * spec.min_share for slices in (5, 9, 33, *range(63, 82), *range(127, plan.num_ctas + 1))]
    costs += [plan.num_ctas * step for step in range(spec.min_share + 1, spec.min_share + 12)]
    for cost in costs:
        length = spec.tile_n * cost
        inputs = make_inputs(replace(shape, lengths=(length,)), "cuda", seed=cost)
        assert_close(inputs, *run(plan, inputs))


@ARCHES
def test_a_grid_that_starts_piece_by_piece(arch: str) -> None:
    """Beside a launch that fills the device, on another stream, CTAs start as room comes: some before the row's last one."""
    large = Shape(num_heads=32, num_kv_heads=8, lengths=(8192,) * 32, max_seq_len=8192)
    small = SHAPES["8/1"]
    plans, inputs = [select(s, arch) for s in (large, small)], [make_inputs(s, "cuda", dead=None) for s in (large, small)]
    expected = [run(plan, x) for plan, x in zip(plans, inputs, strict=True)]
    tables, streams = [x.table() for x in inputs], [torch.cuda.Stream() for _ in plans]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for plan, x, table, stream in zip(plans, inputs, tables, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(plan, x, table=table, concurrent=True))
        torch.cuda.synchronize()
        for result, wanted in zip(found, expected, strict=True):
            assert_bitwise(result, wanted)
