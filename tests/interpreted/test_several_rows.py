"""Attention by warps with several query rows per request, executed without a GPU: wide words of cut rows, masks, scores."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.config.decode import DecodeConfig
from tests.interpreted.machine.attention import Kernel, kernel_of
from tests.interpreted.machine.grid import Cta
from tests.interpreted.runs import attention_operands, run_attention
from tests.support.attention_cases import EVERYTHING, TOKEN_SCALES, Case, case, make_attention
from tests.support.attention_harness import assert_close, assert_close_by_columns, assert_padding, spread_values
from tests.support.harness import assert_bitwise
from tests.support.inputs import NAN
from tests.support.logit_patterns import LOGITS, follow_logits

ONE_HEAD: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1}
LENGTHS = {"lengths": (700, 0, 33, 400)}
WARPS = {4: DecodeConfig(32, 8, 4, 1), 8: DecodeConfig(16, 8, 8, 1)}
TWO_HEADS = DecodeConfig(16, 8, 8, 1, 2)
E4M3 = {"kv_dtype": ck.KVDtype.E4M3}
HEAD = ck.KVScale.HEAD
# (head_dim, query rows of 4 heads, warps) -> (packed rows per unit, words that a thread merges and sends together)
WIDE: dict[tuple[int, int, int], tuple[int, int]] = {
    (64, 2, 4): (8, 1),
    (64, 4, 4): (16, 2),
    (64, 8, 8): (32, 1),
    (80, 4, 8): (16, 1),
    (80, 8, 4): (32, 4),
    (128, 2, 8): (8, 1),
    (128, 4, 4): (16, 4),
    (128, 8, 8): (32, 2),
}
MANY_ROWS = {"q_lens": (8, 8, 7, 1), "max_q_len": 8}


def rows_of(q_len: int) -> dict[str, Any]:
    """Requests with `q_len` query rows, with one row fewer, and with one row."""
    return {"q_lens": (q_len, q_len, q_len - 1, 1), "max_q_len": q_len}


def made(problem: Case, warps: int, partition: Any = "balanced") -> Kernel:
    descriptor = problem.descriptor()
    return kernel_of(descriptor.problem, WARPS[warps], partition, 4, descriptor=descriptor)


def check(kernel: Kernel, problem: Case) -> None:
    """Two runs over one workspace are right, and bit for bit the same whatever the order of warps and CTAs."""
    inputs = make_attention(problem)
    found = run_attention(kernel, inputs)
    assert_close(inputs, found)
    assert_padding(inputs, found, NAN)
    again = run_attention(kernel, inputs, seed=2, resident=2)
    total = sum(problem.q_lens)
    assert_bitwise((again[0][:total], again[1][:total]), (found[0][:total], found[1][:total]))


@pytest.mark.parametrize(("head_dim", "q_len", "warps"), WIDE)
def test_wide_words(head_dim: int, q_len: int, warps: int) -> None:
    problem = case("wide", {**ONE_HEAD, **LENGTHS, "head_dim": head_dim}, **rows_of(q_len))
    kernel = made(problem, warps)
    spec = kernel.spec
    assert spec.wide_words and not spec.by_warpgroup
    assert (spec.packed_rows, spec.words_together) == WIDE[head_dim, q_len, warps]
    check(kernel, problem)


@pytest.mark.parametrize("partition", ["balanced", "invariant"])
@pytest.mark.parametrize("warps", WARPS)
def test_words_of_f16(warps: int, partition: str) -> None:
    """Columns of V of any magnitude, infinity and NaN keep what bf16 has of them, whether a row is cut or not."""
    problem = case("f16", {**ONE_HEAD, **LENGTHS, "head_dim": 128}, **MANY_ROWS)
    kernel, inputs = made(problem, warps, partition), make_attention(problem)
    assert kernel.spec.half_words and not kernel.spec.by_warpgroup
    spread_values(inputs)
    found = run_attention(kernel, inputs)
    assert_close_by_columns(inputs, found)
    assert_bitwise(run_attention(kernel, inputs, seed=3, resident=1), found)


def test_wide_words_of_an_invariant_plan() -> None:
    problem = case("invariant", {**ONE_HEAD, "lengths": (1100, 0, 33, 700), "head_dim": 64}, **rows_of(4))
    check(made(problem, 4, "invariant"), problem)


def test_rows_are_cut() -> None:
    """This case does cut rows, as the tests above assume."""
    problem = case("wide", {**ONE_HEAD, **LENGTHS, "head_dim": 64}, **rows_of(4))
    kernel = made(problem, 4)
    stores = kernel.run(*attention_operands(make_attention(problem)))
    assert stores > 4 * kernel.spec.packed_rows * kernel.spec.row_words, "no row of two pieces that are written and cleared"


@pytest.mark.parametrize("seed", range(2))
def test_every_order_of_ctas(seed: int) -> None:
    """Four CTAs work on one request; `resident` of them run at a time."""
    problem = case("wide", {**ONE_HEAD, "lengths": (1500,), "head_dim": 64}, q_lens=(4,), max_q_len=4)
    kernel, inputs = made(problem, 4), make_attention(problem, seed=seed)
    expected = run_attention(kernel, inputs, seed=seed)
    assert_close(inputs, expected)
    for resident in (1, 2, 3):
        found = run_attention(kernel, inputs, seed=seed + 10, resident=resident)
        assert_bitwise((found[0][:4], found[1][:4]), (expected[0][:4], expected[1][:4]))


@pytest.mark.parametrize(
    ("cache", "fields"),
    [
        ({"kv_dtype": None}, {"tree": True, **EVERYTHING}),
        (TOKEN_SCALES, {"table": "packed", "window_left": 300}),
    ],
    ids=["everything", "int8 token scales, packed"],
)
def test_masks_and_scores(cache: dict[str, Any], fields: dict[str, Any]) -> None:
    problem = case("masks", {**ONE_HEAD, **LENGTHS, "head_dim": 64, **cache}, **rows_of(4), **fields)
    check(made(problem, 4), problem)


@pytest.mark.parametrize(
    ("cache", "q_len", "fields"),
    [
        ({**E4M3, "head_dim": 128}, 8, {}),
        ({**E4M3, "head_dim": 64}, 16, {"sinks": True, "window_left": 300}),
        ({**TOKEN_SCALES, "head_dim": 64}, 8, EVERYTHING),
        ({**E4M3, "head_dim": 64}, 8, {"uniform": False, **rows_of(8)}),
    ],
    ids=["e4m3", "64 rows", "int8 token scales, everything", "ragged"],
)
def test_two_m_tiles_of_eight_warps(cache: dict[str, Any], q_len: int, fields: dict[str, Any]) -> None:
    """The states of later turns join those of earlier ones, in the order of the piece's tiles; some turns have no tile."""
    rows = {"q_lens": (q_len,) * 4, "max_q_len": q_len, "uniform": True}
    problem = case("paired", {**ONE_HEAD, **LENGTHS, **cache}, **{**rows, **fields})
    kernel = made(problem, 8)
    spec = kernel.spec
    assert spec.warp_tiles == 2 and spec.folds and spec.merge_places == spec.turns // 2 == 32 // q_len
    assert (spec.register_shares, spec.query_warps) == (((232, 40), 4) if spec.token_scales else ((224, 56), 3))
    assert spec.stores_beside == (not spec.token_scales)
    check(kernel, problem)


@pytest.mark.parametrize(
    ("stored", "math"),
    [
        ({**E4M3, "k_scale": HEAD, "v_dtype": ck.KVDtype.INT8, "v_scale": ck.KVScale.TOKEN}, ("f16", "bf16")),
        ({**TOKEN_SCALES, "v_dtype": ck.KVDtype.E4M3, "v_scale": HEAD}, ("bf16", "f16")),
        ({**TOKEN_SCALES, "k_scale": HEAD, "v_scale": HEAD}, ("bf16", "bf16")),
        ({**TOKEN_SCALES, "k_scale": HEAD, "v_scale": ck.KVScale.TOKEN}, ("bf16", "bf16")),
        ({**TOKEN_SCALES, "k_scale": ck.KVScale.TOKEN, "v_scale": HEAD}, ("bf16", "bf16")),
    ],
    ids=["e4m3 K, int8 V", "int8 K, e4m3 V", "int8 head", "int8 head, V token", "int8 K token, V head"],
)
def test_types_of_products(stored: dict[str, Any], math: tuple[str, str]) -> None:
    """Int8 is multiplied in bf16, e4m3 in f16, and each product has its own type; some requests have fewer rows."""
    problem = case("types", {**ONE_HEAD, **LENGTHS, **stored}, q_lens=(8, 5, 8, 1), max_q_len=8)
    kernel = made(problem, 8)
    assert (kernel.spec.k_math, kernel.spec.v_math) == math and kernel.spec.lazy_bases
    check(kernel, problem)


@pytest.mark.parametrize("pattern", LOGITS)
@pytest.mark.parametrize(
    ("dtype", "v_scale"),
    [(torch.bfloat16, ck.KVScale.TOKEN_F16), (torch.bfloat16, HEAD), (torch.float16, ck.KVScale.TOKEN_F16)],
    ids=["bf16", "bf16, V head", "f16"],
)
def test_logits_over_int8(dtype: torch.dtype, v_scale: ck.KVScale, pattern: str) -> None:
    """With bf16 queries bases seldom move, and scores are relative to them; with f16 they follow the maxima."""
    fields = {**ONE_HEAD, **TOKEN_SCALES, **LENGTHS, "v_scale": v_scale, "dtype": dtype, "softmax_scale": 1.0}
    problem = case("logits", fields, q_lens=(8,) * 4, max_q_len=8, uniform=True)
    kernel = made(problem, 8)
    in_bf16 = dtype is torch.bfloat16
    assert kernel.spec.paired and kernel.spec.relates_scores == kernel.spec.lazy_bases == in_bf16
    inputs = follow_logits(make_attention(problem), pattern)
    assert_close(inputs, run_attention(kernel, inputs))


@pytest.mark.parametrize("cache", [E4M3, TOKEN_SCALES], ids=["e4m3", "int8 token scales"])
@pytest.mark.parametrize("partition", ["balanced", "invariant"])
def test_queries_of_many_requests_beside_the_loop(partition: Any, cache: dict[str, Any]) -> None:
    """Each CTA has more requests than a query has buffers, some of them empty; under "invariant" some have several pieces."""
    lengths, q_len = (33, 0, 70, 1100, 16, 0, 0, 300, 8, 90, 40), 8
    rows = {"q_lens": (q_len,) * len(lengths), "max_q_len": q_len, "uniform": True}
    problem = case("beside", {**ONE_HEAD, **cache, "head_dim": 64, "lengths": lengths}, **rows)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, WARPS[8], partition, 2, descriptor=descriptor)
    assert (kernel.spec.query_warps, kernel.spec.query_buffers) == (4 if kernel.spec.token_scales else 3, 2)
    assert kernel.spec.stores_beside == (partition == "balanced" and not kernel.spec.token_scales)
    check(kernel, problem)


@pytest.mark.parametrize(
    ("fields", "rows", "partition", "ctas"),
    [
        ({"head_dim": 128}, {"q_lens": (8, 8, 7, 1, 8)}, "balanced", 4),
        ({"num_heads": 20}, {"q_lens": (6,) * 5, "uniform": True, **EVERYTHING}, "balanced", 2),
        ({"num_heads": 20, "kv_dtype": ck.KVDtype.E4M3, "v_scale": ck.KVScale.NONE}, {"q_lens": (6, 6, 5, 0, 6)}, "balanced", 4),
        ({"dtype": torch.float16, "num_heads": 32}, {"q_lens": (4, 3, 4, 4, 4)}, "balanced", 2),
        ({"num_heads": 32}, {"q_lens": (4,) * 5, "uniform": True, "tree": True, **EVERYTHING}, "balanced", 2),
        ({}, {"q_lens": (8, 8, 7, 1, 8)}, "invariant", 2),
        ({}, {"q_lens": (8, 8, 7, 1, 8)}, "whole", 2),
    ],
    ids=["int8", "groups of 5, everything", "e4m3 K alone", "f16 queries", "tree, everything", "invariant", "whole"],
)
def test_two_kv_heads_of_paired_warps(fields: dict[str, Any], rows: dict[str, Any], partition: Any, ctas: int) -> None:
    """Two units of two KV heads: neighbouring warps attend to different heads; some requests have few tiles, one has none."""
    of_heads = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "lengths": (700, 0, 33, 300, 90), **TOKEN_SCALES, **fields}
    problem = case("heads", of_heads, **{"max_q_len": max(rows["q_lens"]), **rows})
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, TWO_HEADS, partition, ctas, descriptor=descriptor)
    spec = kernel.spec
    assert spec.paired and (spec.unit_heads, spec.block_rows, spec.turns, spec.merge_rows) == (2, 64, 8, 32)
    check(kernel, problem)


@pytest.mark.parametrize("count", [4, 5, 6])
def test_whole_requests_of_one_length(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three CTAs of a unit takes two whole requests, the last of them what is left, which may be none."""
    rows = {"q_lens": (8,) * count, "max_q_len": 8, "uniform": True}
    of_heads = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "lengths": (256,) * count, **TOKEN_SCALES}
    problem = case("whole", of_heads, **rows)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, TWO_HEADS, "balanced", 3, descriptor=descriptor)
    check(kernel, problem)
    (operands, extras), done, start = attention_operands(make_attention(problem)), [], Cta.__init__

    def count_rows(cta: Cta, grid: Any, number: int) -> None:
        done.append(int((~operands.lse.isnan()).sum()))  # what the CTAs before have stored
        start(cta, grid, number)

    monkeypatch.setattr(Cta, "__init__", count_rows)
    kernel.run(operands, extras, resident=1)
    of_request = problem.q_lens[0] * 8  # rows of a unit's query heads
    expected = [min(2, max(count - 2 * ctas, 0)) * of_request for ctas in range(3) for _ in range(2)]
    assert [after - before for before, after in pairwise([*done, count * 2 * of_request])] == expected


@pytest.mark.parametrize("head_dim", [32, 96])
@pytest.mark.parametrize("cache", [E4M3, {"kv_dtype": ck.KVDtype.BF16, "v_dtype": ck.KVDtype.E4M3}], ids=["e4m3", "K of 16 bits"])
def test_queries_of_paired_warps(cache: dict[str, Any], head_dim: int) -> None:
    """Some lanes bring no columns, some rows are not in use, and K's type decides the order of columns."""
    problem = case("columns", {**ONE_HEAD, **LENGTHS, **cache, "head_dim": head_dim}, **MANY_ROWS)
    kernel = made(problem, 8)
    assert kernel.spec.paired and kernel.spec.query_warps > 0
    check(kernel, problem)


@pytest.mark.parametrize(("tile_n", "page_size", "producers"), [(16, 16, 4), (32, 8, 4), (48, 8, 4), (80, 8, 1)])
def test_producers_that_take_tiles_in_turn(tile_n: int, page_size: int, producers: int) -> None:
    """A tile is 1 to 10 boxes, so that 32 pages are those of 32 tiles, 8, 5 or 3; rows end before, at and after such a bound."""
    lengths, q_len = (1300, 0, 5 * 48, 5 * 48 + 1, 16, 700), 8
    rows = {"q_lens": (q_len,) * len(lengths), "max_q_len": q_len, "uniform": True}
    fields = {**ONE_HEAD, **TOKEN_SCALES, "head_dim": 64, "lengths": lengths, "page_size": page_size}
    problem = case("producers", fields, **rows)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, DecodeConfig(tile_n, 8, 8, 1), "balanced", 2, descriptor=descriptor)
    assert kernel.spec.paired and kernel.spec.tile_producers == producers
    check(kernel, problem)


def test_query_rows_of_nan_in_many_parts() -> None:
    """A request of more parts than a thread of the combine takes at once; the other rows keep their bits."""
    problem = case("nan", {**ONE_HEAD, "lengths": (33, 900), "head_dim": 64}, q_lens=(4, 4), max_q_len=4)
    descriptor = problem.descriptor()
    kernel, inputs = kernel_of(descriptor.problem, WARPS[8], "balanced", 16, descriptor=descriptor), make_attention(problem)
    clean = run_attention(kernel, inputs)
    broken, others = [1, 6], [0, 2, 3, 4, 5, 7]
    inputs.q[broken] = NAN
    out, lse = run_attention(kernel, inputs)
    assert out[broken].isnan().all() and lse[broken].isnan().all()
    assert_bitwise((out[others], lse[others]), (clean[0][others], clean[1][others]))
