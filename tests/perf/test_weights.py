"""Attention weights as they are measured: what providers run, and the gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from perf.cases import Case, Rows, fixed, weights_case
from perf.correctness import OURS
from perf.inputs import make_inputs
from perf.operations import PROCEDURES
from perf.providers import providers_of
from perf.providers.weights import OursWeights
from perf.weights import weights_descriptor

CPU = torch.device("cpu")
SMALL = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
CASES = (
    weights_case(Rows(((1, 100), (2, 17))), **SMALL),
    weights_case(fixed(2, 33), **SMALL, kv_dtype="int8", kv_scale="token-f16", table_format="csr", layout="NHD"),
    weights_case(fixed(2, 33), **SMALL, page_size=0, table_format="none", kv_dtype="e4m3"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_passes_the_gate_on_every_set(case: Case) -> None:
    inputs = make_inputs(case, CPU, 2**26, 0)
    (candidate,) = OursWeights().prepare(inputs)
    assert len(candidate.calls) == len(inputs.sets) >= 2
    for index, call in enumerate(candidate.calls):
        found = PROCEDURES["weights"].judge(inputs, index, call, OURS)
        assert found.passed and found.used is not None and 0 < found.used < 1, found.reason


@pytest.mark.parametrize("name", ["weights", "mean", "page_mass"])
def test_the_gate_sees_one_wrong_number(name: str) -> None:
    inputs = make_inputs(CASES[0], CPU, 2**26, 0)
    (candidate,) = OursWeights().prepare(inputs)
    call: Any = candidate.calls[0]

    def wrong(factor: float) -> ck.AttentionWeights:
        result = ck.AttentionWeights(*(t.clone() for t in call()))
        row = max(range(3), key=CASES[0].tokens().__getitem__)
        getattr(result, name)[row].view(-1)[2] *= factor
        return result

    for factor in (1.001, float("nan"), 0.0):
        found = PROCEDURES["weights"].judge(inputs, 0, lambda factor=factor: wrong(factor), OURS)
        assert not found.passed and name in found.reason
    assert PROCEDURES["weights"].judge(inputs, 0, lambda: wrong(1.0), OURS).passed


def test_what_is_asked_for() -> None:
    d = weights_descriptor(CASES[0])
    assert (d.max_seq_len, d.mean, d.page_mass, d.weights_dtype) == (100, True, True, torch.float32)
    assert not weights_descriptor(CASES[2]).page_mass
    assert sum(4 * torch.Size(shape).numel() for shape in d.shapes.values()) == CASES[0].weight_bytes
    assert replace(CASES[0], kv_dtype="e4m3").weight_bytes == CASES[0].weight_bytes


def test_ours_and_the_read_take_part() -> None:
    found = [provider.name for provider in providers_of(["ours", "ours-sm80", "read"]) if provider.operation == "weights"]
    assert found == ["ours", "ours-sm80", "read"]
