"""PagedAttentionDescriptor, the modifiers of decode's descriptors, and PlanPreference.sm_count."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.config.modifiers import UNMODIFIED, Modifiers
from cute_kernels.planning.variants import PRETEND

BF16 = torch.bfloat16
GOOD: dict[str, Any] = {
    "batch_size": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
    "q_dtype": BF16,
    "max_q_len": 8,
}
CONTIGUOUS = {"page_size": None, "table_format": "lengths"}
PACKED = {"page_size": None, "table_format": "packed"}
BAD: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    *[({name: 0}, ck.InvalidProblem, (f"{name} = 0", "from 1")) for name in list(GOOD)[1:5]],
    ({"batch_size": -1}, ck.InvalidProblem, ("batch_size = -1", "from 0")),
    ({"max_q_len": 0}, ck.InvalidProblem, ("max_q_len = 0", "from 1")),
    ({"max_q_len": 2**31}, ck.InvalidProblem, ("max_q_len = 2147483648", "2**31 - 1")),
    ({"max_q_len": True}, ck.InvalidProblem, ("max_q_len = True", "int")),
    ({"num_heads": 8, "num_kv_heads": 2, "max_q_len": 2**29}, ck.InvalidProblem, ("at most 536870880", "num_kv_heads = 2")),
    ({"num_heads": 7}, ck.InvalidProblem, ("num_heads = 7", "multiple of num_kv_heads = 2")),
    ({"page_size": None}, ck.InvalidProblem, ("page_size = None", "int from 1")),
    ({"query_format": "padded"}, ck.InvalidProblem, ("query_format = 'padded'", '"ragged" or "uniform"')),
    ({"table_format": "coo"}, ck.InvalidProblem, ("table_format = 'coo'", "dense, csr, lengths, packed, none")),
    ({"table_format": "lengths"}, ck.InvalidProblem, ("page_size = 16", 'None beside table_format = "lengths"')),
    ({**CONTIGUOUS, "num_pages": 3}, ck.InvalidProblem, ("num_pages = 3", 'None beside table_format = "lengths"')),
    ({**PACKED, "max_pages": 3}, ck.InvalidProblem, ("max_pages = 3", 'None beside table_format = "packed"')),
    ({**PACKED, "layout": ck.KVLayout.NHD}, ck.InvalidProblem, ("layout.order = 'NHD'", "packed")),
    ({"layout": "HND"}, ck.InvalidProblem, ("layout = 'HND'", "KVLayout")),
    ({"num_pages": 0}, ck.InvalidProblem, ("num_pages = 0", "from 1")),
    ({"max_seq_len": 0}, ck.InvalidProblem, ("max_seq_len = 0", "from 1")),
    ({"softmax_scale": -1.0}, ck.InvalidProblem, ("softmax_scale = -1.0", "above 0")),
    ({"lse_base": "10"}, ck.InvalidProblem, ("lse_base = '10'", '"e" or "2"')),
    ({"kv_dtype": "int8"}, ck.InvalidProblem, ("kv_dtype = 'int8'", "KVDtype")),
    ({"k_scale": "head"}, ck.InvalidProblem, ("k_scale = 'head'", "KVScale")),
    ({"q_dtype": torch.float64}, ck.Unsupported, ("q_dtype = torch.float64", "bfloat16")),
    ({"causal": True}, ck.InvalidProblem, ("causal = True", '"bottom_right"')),
    ({"causal": "none"}, ck.InvalidProblem, ("causal = 'none'", "None")),
    ({"window_right": 0}, ck.InvalidProblem, ("window_right = 0", 'None beside causal = "bottom_right"')),
    ({"window_right": 3, "causal": "top_left"}, ck.InvalidProblem, ("window_right = 3", 'causal = "top_left"')),
    ({"window_right": -1, "causal": None}, ck.InvalidProblem, ("window_right = -1", "from 0")),
    ({"tree_mask": True, "causal": None}, ck.InvalidProblem, ("tree_mask = True", "bottom_right", "got None")),
    ({"tree_mask": True, "causal": "top_left"}, ck.InvalidProblem, ("tree_mask = True", "got 'top_left'")),
    ({"tree_mask": 1}, ck.InvalidProblem, ("tree_mask = 1", "bool")),
]
MODIFIERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [  # of decode's descriptors too
    *[({"window_left": w}, (f"window_left = {w!r}", "int from 0")) for w in (-1, 1.0, True, "3", 2**31)],
    *[({"softcap": c}, (f"softcap = {c!r}", "finite number above 0")) for c in (0.0, -2, math.nan, math.inf, True, "30")],
    *[({name: v}, (f"{name} = {v!r}", "bool")) for name in ("alibi", "sinks") for v in (1, None)],
]
DECODE = {name: GOOD[name] for name in list(GOOD)[:6]}
FLASH = {"batch_size": 4, "num_heads": 8, "num_kv_heads": 2, "seq_len": 33, "head_dim": 64, "dtype": BF16}
ALL = ((ck.PagedAttentionDescriptor, GOOD), (ck.PagedDecodeDescriptor, DECODE), (ck.FlashDecodingDescriptor, FLASH))


def described(**changes: Any) -> ck.PagedAttentionDescriptor:
    return ck.PagedAttentionDescriptor(**{**GOOD, **changes})


@pytest.mark.parametrize(("changes", "error", "fragments"), BAD, ids=lambda value: str(value)[:40])
def test_bad_fields(changes: dict[str, Any], error: type[Exception], fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        described(**changes)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize(("kind", "fields"), ALL, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize(("changes", "fragments"), MODIFIERS, ids=lambda value: str(value)[:40])
def test_bad_modifiers(kind: Any, fields: dict[str, Any], changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    kind(**fields)
    with pytest.raises(ck.InvalidProblem) as caught:
        kind(**{**fields, **changes})
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_a_descriptor_is_frozen_and_a_key() -> None:
    descriptor = described(softcap=2.0)
    with pytest.raises(FrozenInstanceError):
        descriptor.max_q_len = 9  # type: ignore[misc]
    assert hash(descriptor) == hash(described(softcap=2.0)) and descriptor == described(softcap=2.0)
    assert len({described(), described(causal=None), described(window_left=3), described(window_left=4), descriptor}) == 5
    assert described(kv_dtype=ck.KVDtype.BF16) == described()


def test_the_problem_has_the_form_and_the_modifiers() -> None:
    problem = described(window_left=0, softcap=3, sinks=True, tree_mask=True).problem
    assert (problem.query, problem.max_q_len, problem.source, problem.page_size) == ("ragged", 8, "paged", 16)
    assert problem.modifiers == Modifiers("bottom_right", window_left=True, tree_mask=True, softcap=True, sinks=True)
    assert not problem.plain
    problem = described(**CONTIGUOUS, causal=None, window_right=2, query_format="uniform").problem
    assert (problem.query, problem.source, problem.page_size, problem.table_format) == ("uniform", "contiguous", 0, "lengths")
    assert problem.modifiers == Modifiers(window_right=True)
    assert [described(max_q_len=n).problem.tree_words for n in (1, 32, 33, 64)] == [1, 1, 2, 2]


def test_one_uniform_row_at_the_last_key_is_decode() -> None:
    """Causal and window_right hide nothing from it; ragged rows may be none, a tree's row may hide itself."""
    one = {"query_format": "uniform", "max_q_len": 1}
    decode = ck.PagedDecodeDescriptor(**DECODE)
    assert described(**one).problem == decode.problem and described(**one).problem.plain
    assert described(**one, causal=None, window_right=0).problem == decode.problem
    windowed = replace(decode, window_left=5, softcap=2.0, alibi=True, sinks=True)
    assert described(**one, window_left=5, softcap=2.0, alibi=True, sinks=True).problem == windowed.problem
    assert windowed.problem.modifiers == Modifiers(window_left=True, softcap=True, alibi=True, sinks=True)
    assert decode.problem.modifiers == UNMODIFIED
    for other in ({"causal": "top_left"}, {"tree_mask": True}, {"query_format": "ragged"}, {"max_q_len": 2}):
        assert described(**{**one, **other}).problem.query != "one"


def test_a_plan_says_what_it_is() -> None:
    plan = ck.PagedAttentionPlan.select(described(sinks=True, **CONTIGUOUS), "cpu")
    assert (plan.sku.operation, plan.sku.variant, plan.sku.arch, plan.sku.config) == (
        "paged_attention",
        "cpu_reference",
        "cpu",
        None,
    )
    assert plan.workspace_size() == 0 and plan.workspace_regions() == ()
    text = str(plan.explain())
    assert text.startswith(
        "attention, ragged query rows, at most 8 a request, batch 4, heads 8/2, head_dim 64, contiguous with lengths"
    )
    assert "causal bottom_right, sinks" in text
    assert ck.PagedAttentionPlan.select(described(sinks=True, **CONTIGUOUS), "cpu") is plan
    one = ck.PagedAttentionPlan.select(described(query_format="uniform", max_q_len=1), "cpu")
    assert one.sku.operation == "paged_attention"
    with pytest.raises(ck.InvalidArgument, match="must be a PagedAttentionDescriptor"):
        ck.PagedAttentionPlan.select(ck.PagedDecodeDescriptor(**DECODE), "cpu")


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "8"])
def test_sm_count_is_an_int_from_1(count: object) -> None:
    with pytest.raises(ck.InvalidArgument, match=r"^sm_count: got .*, must be an int of at least 1, or None"):
        ck.PlanPreference(sm_count=count)


def test_sm_count_is_at_most_the_devices() -> None:
    h200 = PRETEND["h200"]
    assert ck.PlanPreference().part_of(h200) is h200
    assert ck.PlanPreference(sm_count=132).part_of(h200) == h200
    assert ck.PlanPreference(sm_count=100).part_of(h200) == replace(h200, sm_count=100)
    with pytest.raises(ck.InvalidArgument, match="sm_count: got 133, must be at most 132, the SMs of NVIDIA H200"):
        ck.PlanPreference(sm_count=133).part_of(h200)
    assert ck.PagedDecodePlan.select(ck.PagedDecodeDescriptor(**DECODE), "cpu", ck.PlanPreference(sm_count=1)).sm_count == 1
    with pytest.raises(ck.InvalidArgument, match="sm_count: got 2, must be at most 1, the SMs of cpu"):
        ck.PagedDecodePlan.select(ck.PagedDecodeDescriptor(**DECODE), "cpu", ck.PlanPreference(sm_count=2))
