"""Values that few runs meet, and a kernel handles apart: NaN in all that a row sees, rows of zeros, scales far apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cute_kernels as ck
from tests.support.attention_cases import VERIFY_32, VERIFY_64, case, make_attention, make_low_attention, make_sunk_attention
from tests.support.attention_harness import assert_close, assert_close_by_columns, run, select, spread_values
from tests.support.harness import BACKENDS, assert_bitwise, device_of
from tests.support.storage import STORAGES

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
E4M3 = STORAGES["e4m3"]
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
ROWS = {"q_lens": (32, 1, 5, 40), "max_q_len": 40}  # up to 160 packed rows: two warpgroups, whose products overlap
LENGTHS = {"lengths": (300, 40, 70, 900), "max_seq_len": 1000}
ALONE = {"q_lens": (1, 1, 1, 1), "max_q_len": 1}


@EVERY_BACKEND
@pytest.mark.parametrize("rows", [VERIFY_32, ROWS], ids=["32 rows", "many rows"])
@pytest.mark.parametrize("storage", ["16 bits", "e4m3"])
def test_a_row_that_sees_only_nan_is_not_empty(storage: str, rows: dict[str, Any], backend: str) -> None:
    """A query row of NaN has NaN in out and in lse, for a merge passes over an empty one. The other rows keep their bits."""
    described = case("nan", {**HEADS, **LENGTHS, **(E4M3 if storage == "e4m3" else {})}, **rows)
    inputs, plan = make_attention(described, device_of(backend)), select(described, backend)
    clean = run(plan, inputs)
    broken = [3, described.begins[2] + 2, described.begins[3] + described.q_lens[3] - 1]
    inputs.rows[broken] = math.nan
    out, lse = run(plan, inputs)
    assert out[broken].isnan().all() and lse[broken].isnan().all()
    others = [row for row in range(sum(described.q_lens)) if row not in broken]
    assert_bitwise((out[others], lse[others]), (clean[0][others], clean[1][others]))


@EVERY_BACKEND
@pytest.mark.parametrize("k_scale", [1.0, 1e-7, 1e-30])
@pytest.mark.parametrize("rows", [ALONE, VERIFY_32, ROWS], ids=["one row", "32 rows", "many rows"])
def test_a_query_row_of_zeros_weighs_all_keys_alike(rows: dict[str, Any], k_scale: float, backend: str) -> None:
    """Also where the scale of K takes the factor of its scores below the smallest f32, whose product with -inf would be NaN."""
    stored = {**E4M3, "k_scale": ck.KVScale.TENSOR, "v_scale": ck.KVScale.TENSOR}
    described = case("zeros", {**HEADS, **LENGTHS, **stored}, **rows)
    inputs, plan = make_attention(described, device_of(backend)), select(described, backend)
    inputs.rows[: sum(rows["q_lens"])].zero_()
    inputs.scales["k_scale"].fill_(k_scale)
    assert_close(inputs, run(plan, inputs))


@EVERY_BACKEND
@pytest.mark.parametrize("rows", [ALONE, VERIFY_32, ROWS], ids=["one row", "32 rows", "many rows"])
def test_scales_of_v_from_nothing_to_large(rows: dict[str, Any], backend: str) -> None:
    """Tiles whose tokens have scales of 0 come before one of 2**70: between them lie more binades than f32 has."""
    stored = {"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.TOKEN, "v_scale": ck.KVScale.TOKEN}
    described = case("far apart", {**HEADS, **LENGTHS, **stored}, **rows)
    inputs, plan = make_attention(described, device_of(backend)), select(described, backend)
    table, scales = inputs.table.operands[0], inputs.scales["v_scale"]
    for request, keys in enumerate(described.cache.lengths):
        pages = table[request, : -(-keys // described.cache.page_size)].long()
        half = len(pages) // 2
        scales[pages[:half]], scales[pages[half:]] = 0.0, 2.0**70
    assert_close(inputs, run(plan, inputs))


@EVERY_BACKEND
@pytest.mark.parametrize("rows", [ALONE, VERIFY_32, VERIFY_64, ROWS], ids=["one row", "32 rows", "64 rows", "many rows"])
@pytest.mark.parametrize("storage", STORAGES)
def test_scores_below_zero_that_rise(storage: str, rows: dict[str, Any], backend: str) -> None:
    """Maxima that move without ever being above zero: bits of floats are not in the order of integers there."""
    described = case("low", {**HEADS, **LENGTHS, **STORAGES[storage]}, **rows)
    inputs = make_low_attention(described, device_of(backend))
    keys, row = inputs.kv.real("k", 0), inputs.rows[0].double()
    scores = torch.einsum("htd,hgd->hgt", keys, row.unflatten(0, (HEADS["num_kv_heads"], -1)))
    early, late = scores.chunk(2, dim=-1)
    assert scores.max() < 0 and early.mean() < late.mean()
    assert_close(inputs, run(select(described, backend), inputs))


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [VERIFY_32, VERIFY_64, ROWS], ids=["32 rows", "64 rows", "many rows"])
@pytest.mark.parametrize("storage", ["16 bits", "e4m3", "int8 token"])
def test_rows_with_a_token_without_values(storage: str, rows: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    """As test_query_range has it for one query row: the output is that of the other tokens, of e ** -20 of the weight each."""
    described = case("sink", {**HEADS, **LENGTHS, **STORAGES[storage], "dtype": dtype, "softmax_scale": 1.0}, **rows)
    inputs = make_sunk_attention(described, device_of(backend))
    assert_close(inputs, run(select(described, backend), inputs))


@EVERY_BACKEND
@pytest.mark.parametrize("rows", [ALONE, VERIFY_32, VERIFY_64, ROWS], ids=["one row", "32 rows", "64 rows", "many rows"])
def test_columns_of_v_of_any_magnitude(rows: dict[str, Any], backend: str) -> None:
    """Between parts of a cut row some columns travel as f16; an infinity or a NaN among them is none of its neighbours."""
    described = case("columns", {**HEADS, **LENGTHS}, **rows)
    inputs, plan = make_attention(described, device_of(backend)), select(described, backend)
    spread_values(inputs)
    assert_close_by_columns(inputs, run(plan, inputs))
