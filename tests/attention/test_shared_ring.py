"""Long queries on sm80: blocks of packed rows whose warps share a ring of tiles (mainloop/block.py)."""

from __future__ import annotations

import pytest

from cute_kernels.attention.choice.heuristics import block_config
from cute_kernels.attention.variants import explain
from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.attention.test_gathered import CASES as SMALL_PAGES
from tests.attention.test_long_queries import LONG, PATTERNS, patterned
from tests.support.attention_cases import Case, make_attention
from tests.support.attention_harness import assert_close, assert_every_row, run, select

CASES = (*LONG, *SMALL_PAGES)


@pytest.mark.parametrize("described", CASES, ids=str)
def test_whose_warps_share_a_ring(described: Case) -> None:
    """Without a GPU: a plan on one SM has blocks for four warps, 128 packed rows or 64 of wide heads."""
    problem = described.descriptor().problem
    preference = PlanPreference(arch="sm80", sm_count=1)
    facts = preference.part_of(PRETEND["h200"])
    spec = explain(problem, facts, preference).chosen.spec
    assert spec.shares_ring and spec.turns == 1 and spec.num_warps == 4 and spec.query_buffers == 1
    assert spec.block_rows == (128 if spec.padded_head_dim <= 128 else 64)


@pytest.mark.parametrize(("name", "warps", "ctas_per_sm"), [("long", 2, 1), ("long_d64", 4, 1)])
def test_blocks_of_a_device_with_less_memory(name: str, warps: int, ctas_per_sm: int) -> None:
    """99 KB of shared memory a CTA hold what two warps share at head_dim 128, and what four do at 64."""
    described = next(c for c in LONG if c.name == name)
    config = block_config(described.descriptor().problem, "sm_80", 1)
    assert config is not None and (config.num_warps, config.ctas_per_sm) == (warps, ctas_per_sm)


@pytest.mark.gpu
@pytest.mark.parametrize("sm_count", [1, 3])
@pytest.mark.parametrize("described", CASES, ids=str)
def test_every_row_of_shared_tiles(described: Case, sm_count: int) -> None:
    """Right row by row beside NaN in all memory that is not theirs, and the same bits again."""
    plan, inputs = select(described, "sm80", sm_count=sm_count), make_attention(described, "cuda")
    if sm_count == 1:
        assert plan.explain().chosen.spec.shares_ring, plan.explain()
    assert_every_row(plan, inputs, again=20)


@pytest.mark.gpu
@pytest.mark.parametrize(("pattern", "kind", "rows"), PATTERNS)
def test_logits_over_shared_tiles(pattern: str, kind: str, rows: str) -> None:
    inputs = patterned(pattern, kind, rows, "cuda")
    assert_close(inputs, run(select(inputs.case, "sm80", sm_count=1), inputs))
