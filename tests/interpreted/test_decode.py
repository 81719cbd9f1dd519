"""Decode with one query row per request, executed without a GPU: numbers against f64, cut rows, the workspace after a run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cutlass import Boolean

from cute_kernels.attention import kernel_spec
from cute_kernels.config.decode import KEPT_REQUESTS, DecodeConfig
from cute_kernels.device.combine import combine
from cute_kernels.device.kernels import results
from cute_kernels.device.mainloop.tma import TmaMainloop
from tests.interpreted.machine import copies, warp
from tests.interpreted.machine.attention import Kernel, kernel_of
from tests.interpreted.machine.grid import Deadlock
from tests.interpreted.machine.launch import compiled, compiled_anew
from tests.interpreted.machine.warp import Fault
from tests.interpreted.runs import decode_operands, run_decode
from tests.support.harness import assert_bitwise, assert_close
from tests.support.inputs import Shape, make_inputs
from tests.support.storage import STORAGES

ONE_HEAD: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1}
CUT = (700, 0, 33, 400)  # lengths of rows that take several CTAs, no CTA and one CTA
WHOLE = (0, 1, 17, 100, 40)
WARPS_4 = DecodeConfig(32, 8, 4, 1)
SM80 = ("sm80", "balanced", WARPS_4)
CASES: dict[str, tuple[Shape, tuple[str, str, DecodeConfig]]] = {
    "whole": (Shape(lengths=WHOLE, num_heads=8, num_kv_heads=2), ("sm90", "whole", WARPS_4)),
    "balanced": (Shape(lengths=CUT, **ONE_HEAD), ("sm90", "balanced", WARPS_4)),
    "invariant": (Shape(lengths=(1100, 33, 700), **ONE_HEAD), ("sm90", "invariant", WARPS_4)),
    "two KV heads a CTA": (
        Shape(lengths=CUT, num_heads=8, num_kv_heads=2, table_format="csr"),
        ("sm90", "balanced", replace(WARPS_4, unit_heads=2)),
    ),
    "contiguous f16": (
        Shape(lengths=(700,) * 2, page_size=0, head_dim=64, dtype=torch.float16, lse_base="2", **ONE_HEAD),
        ("sm90", "balanced", WARPS_4),
    ),
    "e4m3": (Shape(lengths=CUT, order="NHD", **STORAGES["e4m3"], **ONE_HEAD), ("sm90", "balanced", WARPS_4)),
    "int8 token": (Shape(lengths=CUT, **STORAGES["int8 token"], **ONE_HEAD), ("sm90", "balanced", WARPS_4)),
    "sm80": (Shape(lengths=CUT, head_dim=40, page_size=5, **ONE_HEAD), SM80),
    "sm80 int8 token": (Shape(lengths=CUT, head_dim=64, **STORAGES["int8 token"], **ONE_HEAD), SM80),
}


def made(name: str, get: Any = compiled, slices: int = 4) -> tuple[Kernel, Shape]:
    shape, (arch, partition, config) = CASES[name]
    return kernel_of(shape.descriptor().problem, config, partition, slices, arch=arch, get=get), shape


@pytest.mark.parametrize("name", CASES)
def test_decode(name: str) -> None:
    """Two runs over one workspace are right, with the same bits whatever the order of warps and the CTAs that run together."""
    kernel, shape = made(name)
    inputs = make_inputs(shape, "cpu")
    found = run_decode(kernel, inputs)
    assert_close(inputs, *found)
    assert_bitwise(run_decode(kernel, inputs, seed=2, resident=1), found)


@pytest.mark.parametrize("name", ["balanced", "invariant"])
def test_rows_are_cut(name: str) -> None:
    """These cases do cut a row, as the tests above assume."""
    kernel, shape = made(name)
    stores = kernel.run(decode_operands(make_inputs(shape, "cpu")))
    assert stores > 4 * 2 * kernel.spec.row_words, "no piece but of one CTA"


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Counts the bytes that each CTA brings, by its number."""
    brought: Counter[int] = Counter()

    def counted(cta: Any, *arguments: Any) -> int:
        found = copies.land_box(cta, *arguments)
        brought[cta.number] += found
        return found

    monkeypatch.setattr(warp, "land_box", counted)
    return brought


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_equal_rows_are_cut_into_equal_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four CTAs on rows of one length bring as many bytes each: all begin with a piece, whether it begins its row or not."""
    brought = count_bytes(monkeypatch)
    kernel, _ = made("balanced")
    inputs = make_inputs(Shape(lengths=(1536 // rows,) * rows, **ONE_HEAD), "cpu")
    assert_close(inputs, *run_decode(kernel, inputs))
    assert len(brought) == 4 and set(brought.values()) == {1536 // 4 * 2 * 128 * 2}


@pytest.mark.parametrize(
    ("rows", "tiles", "parts", "idle"), [(2, 13, 2, 0), (4, 9, 2, 0), (3, 12, 2, 0), (3, 14, 3, 0), (2, 22, 4, 0), (5, 9, 2, 1)]
)
def test_no_part_of_equal_rows_lies_in_two_rows(
    rows: int, tiles: int, parts: int, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has as many CTAs, and they bring the same numbers of its tiles, though these do not divide into equal parts."""
    brought, tile_n = count_bytes(monkeypatch), WARPS_4.tile_n
    kernel, _ = made("balanced", slices=parts * rows + idle)
    inputs = make_inputs(Shape(lengths=(tiles * tile_n,) * rows, **ONE_HEAD), "cpu")
    assert_close(inputs, *run_decode(kernel, inputs))
    most = -(-tiles // parts)
    of_row = [tiles - (parts - 1) * most] + [most] * (parts - 1)
    assert brought == {cta: found * tile_n * 2 * 128 * 2 for cta, found in enumerate(of_row * rows)}


@pytest.mark.parametrize(("rows", "tokens", "working"), [(2, 320, 4), (2, 4096, 5), (4, 320, 4), (3, 320, 3), (3, 640, 5)])
def test_equal_rows_leave_a_cta_idle_if_that_pays(rows: int, tokens: int, working: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five CTAs some have no work, so that all others have one piece of the same length: of two to four short rows."""
    brought = count_bytes(monkeypatch)
    kernel, _ = made("balanced", slices=5)
    inputs = make_inputs(Shape(lengths=(tokens,) * rows, **ONE_HEAD), "cpu")
    assert_close(inputs, *run_decode(kernel, inputs))
    assert len(brought) == working
    assert (len(set(brought.values())) == 1) == (working < 5)


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((700,), KEPT_REQUESTS),
        ((0,), KEPT_REQUESTS),
        ((1,), KEPT_REQUESTS),
        *((tuple(37 * row % 90 for row in range(rows)), KEPT_REQUESTS[1:]) for rows in (20, 40, 70)),
    ],
    ids=lambda value: str(len(value)),
)
@pytest.mark.parametrize("partition", ["balanced", "invariant", "whole"])
def test_shares_do_not_depend_on_the_requests_that_a_warp_keeps(
    lengths: tuple[int, ...], kept: tuple[int, ...], partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do bits: kernels of one request, of up to 32, 64 and 128, and those that keep too few and search for shares, agree."""
    shape = Shape(lengths=lengths, head_dim=64, **ONE_HEAD)
    inputs, found = make_inputs(shape, "cpu"), []
    for requests in kept:
        monkeypatch.setattr(kernel_spec, "kept_requests_of", lambda *_, requests=requests: requests)
        kernel = kernel_of(shape.descriptor().problem, WARPS_4, partition, 4)
        assert kernel.spec.kept_requests == requests
        found.append(run_decode(kernel, inputs))
        assert_bitwise(run_decode(kernel, inputs, seed=2, resident=1), found[0])
    assert_close(inputs, *found[0])
    for one in found[1:]:
        assert_bitwise(one, found[0])


@pytest.mark.parametrize("seed", range(3))
def test_every_order_of_ctas(seed: int) -> None:
    """Four CTAs work on one row; `resident` CTAs run at a time: they combine it, or hand it over, and leave no word."""
    kernel, _ = made("balanced")
    inputs = make_inputs(Shape(lengths=(1500,), **ONE_HEAD), "cpu", seed=seed)
    expected = run_decode(kernel, inputs, seed=seed)
    assert_close(inputs, *expected)
    for resident in (1, 2, 3):
        assert_bitwise(run_decode(kernel, inputs, seed=seed + 10, resident=resident), expected)


@pytest.mark.parametrize("config", [WARPS_4, DecodeConfig(16, 16, 8, 1)], ids=["4 warps", "8 warps"])
def test_a_query_row_of_nan_in_many_parts(config: DecodeConfig) -> None:
    """Threads that share its columns merge what they have: NaN, not the state of a row without keys."""
    shape = Shape(lengths=(2600, 33), head_dim=64, **ONE_HEAD)
    kernel, inputs = kernel_of(shape.descriptor().problem, config, "balanced", 20), make_inputs(shape, "cpu")
    clean = run_decode(kernel, inputs)
    inputs.q[0, 1] = math.nan
    out, lse = run_decode(kernel, inputs)
    assert out[0, 1].isnan().all() and lse[0, 1].isnan()
    others = torch.tensor([[0, 0], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]).unbind(1)
    assert_bitwise((out[others], lse[others]), (clean[0][others], clean[1][others]))


def test_control_a_combine_that_never_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine, "clear", lambda *_: None)
    kernel, shape = made("balanced", compiled_anew)
    with pytest.raises(AssertionError, match="as it found it"):
        run_decode(kernel, make_inputs(shape, "cpu"))


def test_control_a_cta_that_waits_for_one_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "declines", lambda *_: Boolean(False))
    kernel, _ = made("balanced", compiled_anew)
    inputs = make_inputs(Shape(lengths=(1500,), **ONE_HEAD), "cpu")
    assert_close(inputs, *run_decode(kernel, inputs))
    with pytest.raises(Deadlock, match="no warp can go on"):
        run_decode(kernel, inputs, resident=1)


@pytest.mark.parametrize("wait", ["cp_async_wait_group", "mbarrier_wait"])
def test_control_no_wait(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    """Without the wait for the query or for tiles, a kernel reads NaN: copies land late, and memory has NaN before."""
    monkeypatch.setattr(cute.arch, wait, lambda *_, **__: None)
    kernel, shape = made("whole", compiled_anew)
    inputs = make_inputs(shape, "cpu")
    with pytest.raises((AssertionError, Fault)):
        assert_close(inputs, *run_decode(kernel, inputs))


def test_control_a_producer_that_does_not_wait_for_a_free_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies land at once, on tiles that are still read."""
    monkeypatch.setattr(TmaMainloop, "await_stage", lambda self, _, ordinal, *__: self.place_in_ring(ordinal)[0])
    kernel, shape = made("whole", compiled_anew)
    inputs = make_inputs(replace(shape, lengths=(700,)), "cpu")
    with pytest.raises((AssertionError, Fault)):
        assert_close(inputs, *run_decode(kernel, inputs, seed=2))


def test_control_a_store_outside_of_the_tensors() -> None:
    kernel, shape = made("whole")
    operands = decode_operands(make_inputs(shape, "cpu"))
    with pytest.raises(Fault, match=r"write of 4 bytes outside of the tensors(.|\n)*st\.global"):
        kernel.run(operands._replace(out=operands.out[:-1]))
