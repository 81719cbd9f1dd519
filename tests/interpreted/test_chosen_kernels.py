"""What a plan chooses, executed without a GPU: the kernels of random batches on parts of a device are right, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.attention.variants import explain
from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.interpreted.machine.attention import chosen_kernel
from tests.interpreted.runs import run_attention
from tests.support.attention_cases import EVERYTHING, Case, case, make_attention
from tests.support.attention_harness import assert_close
from tests.support.storage import STORAGES

LENGTHS = st.sampled_from([0, 1, 17, 64, 97, 130, 300])
FIELDS: tuple[dict[str, Any], ...] = ({}, {}, {"causal": None}, {"window_left": 31}, {"window_left": 100}, EVERYTHING)


@st.composite
def batches(draw: Any, storage: str) -> Case:
    """A batch of one to three requests, each with up to 60 query rows: up to 480 packed rows."""
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4, 7, 8]))
    lengths = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=3)))
    most, uniform = draw(st.sampled_from([1, 3, 8, 16, 20, 33, 60])), draw(st.booleans())
    q_lens = tuple(most if uniform else draw(st.sampled_from([0, 1, -(-most // 2), most])) for _ in lengths)
    cache = {
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "lengths": lengths,
        "head_dim": draw(st.sampled_from([32, 64, 96, 128, 192])),
        "page_size": draw(st.sampled_from([5, 8, 16, 64])),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16])),
        "max_seq_len": draw(st.sampled_from([None, 8192])),
        **STORAGES[storage],
    }
    return case("chosen", cache, q_lens=q_lens, max_q_len=most, uniform=uniform, **draw(st.sampled_from(FIELDS)))


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=4, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), sm_count=st.sampled_from([1, 2, 3, 5]), batch_invariant=st.booleans())
def test_what_a_plan_chooses(storage: str, data: Any, sm_count: int, batch_invariant: bool) -> None:
    described = data.draw(batches(storage))
    facts, preference = PRETEND["h200"], PlanPreference(arch="sm90", sm_count=sm_count, batch_invariant=batch_invariant)
    descriptor, part = described.descriptor(), preference.part_of(facts)
    try:
        _ = explain(descriptor.problem, part, preference).chosen
    except ck.Unsupported:
        assume(False)
    inputs = make_attention(described)
    assert_close(inputs, run_attention(chosen_kernel(descriptor, part, preference), inputs))
