"""Scales of tokens in long queries, which the warps that widen a tile make f32 for all that read it (device/kv/scale.py)."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.variants import explain
from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.attention.test_long_queries import EVERYTHING, QUERY_ROWS, check_kernel, long_case
from tests.support.attention_cases import AttentionInputs, Case, make_attention
from tests.support.attention_harness import assert_close, assert_every_row, run, select
from tests.support.scale_patterns import EXPONENTS, follow_pattern

INT8, E4M3, E5M2 = ck.KVDtype.INT8, ck.KVDtype.E4M3, ck.KVDtype.E5M2
TOKEN, TOKEN_F16, HEAD = ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16, ck.KVScale.HEAD


def of(k_dtype: ck.KVDtype, k_scale: ck.KVScale, v_dtype: ck.KVDtype, v_scale: ck.KVScale, **cache: object) -> dict[str, object]:
    return {"kv_dtype": k_dtype, "k_scale": k_scale, "v_dtype": v_dtype, "v_scale": v_scale, **cache}


KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {  # fields of the cache, and of the case
    "int8_f16": (of(INT8, TOKEN_F16, INT8, TOKEN_F16), {}),
    "int8_f16_q_f16": (of(INT8, TOKEN_F16, INT8, TOKEN_F16, dtype=torch.float16), {}),
    "int8_f32": (of(INT8, TOKEN, INT8, TOKEN), {}),
    "e4m3_f32_e5m2_f32": (of(E4M3, TOKEN, E5M2, TOKEN, head_dim=64), {}),
    "e4m3_head_int8_f16": (of(E4M3, HEAD, INT8, TOKEN_F16, head_dim=96), {}),
    "int8_f16_everything": (of(INT8, TOKEN_F16, INT8, TOKEN_F16), EVERYTHING),
    "e5m2_f16_e4m3_d256": (of(E5M2, TOKEN_F16, E4M3, TOKEN_F16, head_dim=256), {"causal": None}),
}
CASES = [
    (name, pattern, rows)
    for rows in QUERY_ROWS
    for name in KINDS
    for pattern in EXPONENTS
    if rows == "long" or "d256" not in name
]


def scaled_case(name: str, rows: str = "long") -> Case:
    cache, fields = KINDS[name]
    return long_case(name, cache, **QUERY_ROWS[rows], **fields)


def scaled(name: str, pattern: str, rows: str, device: str) -> AttentionInputs:
    """Requests whose scales follow a pattern from token to token."""
    described = scaled_case(name, rows)
    return follow_pattern(make_attention(described, device), pattern)


@pytest.mark.parametrize(("name", "rows"), dict.fromkeys((name, rows) for name, _, rows in CASES))
def test_who_makes_scales_f32(name: str, rows: str) -> None:
    """Without a GPU: the plan of such a case deals its items and widens its tiles, or attends to 32 rows by warps."""
    explanation = explain(scaled_case(name, rows).descriptor().problem, PlanPreference(sm_count=1).part_of(PRETEND["h200"]))
    check_kernel(explanation, rows)
    spec = getattr(explanation.chosen.spec, "many", explanation.chosen.spec)
    assert spec.widens_tiles == (rows == "long") and spec.token_scales > 0


@pytest.mark.parametrize(("name", "pattern", "rows"), CASES)
def test_long_scales_on_the_cpu(name: str, pattern: str, rows: str) -> None:
    """The reference, on the scales below."""
    inputs = scaled(name, pattern, rows, "cpu")
    assert_close(inputs, run(select(inputs.case, "cpu"), inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "pattern", "rows"), CASES)
def test_every_row_of_long_scales(name: str, pattern: str, rows: str) -> None:
    """Row by row, where the unit of the weights grows with each tile, once, or not at all, beside scales a thousandth of it."""
    inputs = scaled(name, pattern, rows, "cuda")
    plan = select(inputs.case, "sm90", sm_count=1)
    check_kernel(plan.explain(), rows)
    assert_every_row(plan, inputs)
