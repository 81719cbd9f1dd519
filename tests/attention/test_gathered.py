"""Long queries over pages that no TMA box can bring: producer warps gather tokens one by one (mainloop/gather.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.variants import explain
from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.attention.test_long_queries import EVERYTHING, UNIFORM_LENGTHS, UNIFORM_ROWS, long_case
from tests.support.attention_cases import Case, make_attention
from tests.support.attention_harness import assert_close, assert_every_row, run, select
from tests.support.harness import device_of
from tests.support.inputs import INT_MAX


def paged(name: str, page_size: int, cache: dict[str, object] | None = None, **fields: object) -> Case:
    return long_case(name, {"page_size": page_size, **(cache or {})}, **fields)


CASES = (
    paged("page_1", 1),
    paged("page_4_d64", 4, {"head_dim": 64}, window_left=31),
    paged("page_5_d96", 5, {"head_dim": 96}, causal=None),
    paged("page_2_d192", 2, {"head_dim": 192}, causal="top_left"),
    paged("page_3_d256", 3, {"head_dim": 256}),
    paged("page_12_f16", 12, {"dtype": torch.float16}, window_left=100),
    paged("page_1_nhd_csr", 1, {"order": "NHD"}, table="csr"),
    paged("page_1_everything", 1, **EVERYTHING),
    paged("page_7_d80_everything", 7, {"head_dim": 80}, **EVERYTHING),
    paged("page_1_uniform", 1, UNIFORM_LENGTHS, **UNIFORM_ROWS),
)


@pytest.mark.parametrize("described", CASES, ids=str)
def test_which_pages_are_gathered(described: Case) -> None:
    """Without a GPU: a plan on one SM gathers, with a producer for 32 tokens of a tile."""
    problem, facts = described.descriptor().problem, PlanPreference(sm_count=1).part_of(PRETEND["h200"])
    spec = explain(problem, facts).chosen.spec
    assert spec.gathers and spec.dealt and spec.arch == "sm90"
    assert spec.gatherers == -(-spec.tile_n // 32) and (spec.hole_tokens, spec.hole_words) == (1, spec.gatherers)


@pytest.mark.parametrize("fields", [{"kv_dtype": ck.KVDtype.E4M3}, {"max_q_len": 8}], ids=str)
def test_what_is_not_gathered(fields: dict[str, object]) -> None:
    """8-bit caches, and few query rows, go to sm80; sm90 says why."""
    described = replace(CASES[0].descriptor(), **fields)
    explanation = explain(described.problem, PRETEND["h200"])
    assert explanation.chosen.arch == "sm80"
    assert any("gathered" in reason for candidate in explanation.candidates for reason in candidate.reasons)


@pytest.mark.parametrize("described", CASES, ids=str)
def test_gathered_pages_on_the_cpu(described: Case) -> None:
    inputs = make_attention(described)
    assert_close(inputs, run(select(described, "cpu"), inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("sm_count", [1, 3])
@pytest.mark.parametrize("described", CASES, ids=str)
def test_every_row_of_gathered_tiles(described: Case, sm_count: int) -> None:
    """Right row by row beside NaN in all memory that is not theirs, and the same bits again."""
    plan, inputs = select(described, "sm90", sm_count=sm_count), make_attention(described, "cuda")
    assert plan.explain().chosen.spec.gathers, plan.explain()
    assert_every_row(plan, inputs, again=20)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["page_1", "page_5_d96", "page_12_f16"])
def test_gathered_holes(name: str) -> None:
    """Pages outside the pool: their tokens count for nothing, as the CPU has it, and they are reported."""
    described = next(c for c in CASES if c.name == name)
    inputs = make_attention(described, "cuda", dead=0.5)
    table, lengths = (operand.clone() for operand in inputs.table.operands[:2])
    holes = {0: (3, -1), 3: (7, INT_MAX), 4: (0, len(inputs.k))}  # of requests: an entry, and what it is now
    for request, (entry, value) in holes.items():
        table[request, entry] = value
    plan = select(described, "sm90", sm_count=1)
    out, lse = run(plan, inputs, page_table=ck.PageTable.dense(table, lengths))
    fault = plan.status()
    assert fault is not None and (fault.kind, fault.value) == ("page", holes[fault.row][1])
    on_cpu = make_attention(described, "cpu", dead=0.5)
    for ours, theirs in ((on_cpu.q, inputs.q), (on_cpu.k, inputs.k), (on_cpu.v, inputs.v)):
        ours.copy_(theirs.cpu())
    reference = ck.PagedAttentionPlan.select(described.descriptor(), device_of("cpu"), ck.PlanPreference(arch="cpu"))
    broken = ck.PageTable.dense(table.cpu(), lengths.cpu())
    expected = run(reference, on_cpu, page_table=broken)
    rows = sum(described.q_lens)
    torch.testing.assert_close(out[:rows].cpu(), expected[0][:rows], rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse[:rows].cpu(), expected[1][:rows], rtol=1e-5, atol=1e-5)
