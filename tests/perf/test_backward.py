"""Attention's backward as it is measured: what providers run, and the gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perf.backward import Gradients, backward_cases
from perf.case_sets import bar_of, select_cases
from perf.cases import Case, attention_case, backward_case, fixed
from perf.correctness import OURS
from perf.inputs import make_inputs
from perf.operations import PROCEDURES
from perf.providers import providers_of
from perf.providers.backward import OursBackward

CPU = torch.device("cpu")
SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
CASES = (
    backward_case(fixed(2, 33), **SMALL),
    backward_case(fixed(2, 33), **SMALL, page_size=16),
    backward_case(fixed(1, 20), **SMALL, page_size=8, table_format="csr", layout="NHD", dtype="f16"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_passes_the_gate_on_every_set(case: Case) -> None:
    inputs = make_inputs(case, CPU, 2**26, 0)
    (candidate,) = OursBackward().prepare(inputs)
    assert len(candidate.calls) == len(inputs.sets) >= 2
    for index, call in enumerate(candidate.calls):
        found = PROCEDURES["backward"].judge(inputs, index, call, OURS)
        assert found.passed and found.used is not None and 0 < found.used < 1, found.reason


@pytest.mark.parametrize("name", Gradients._fields)
def test_the_gate_sees_one_wrong_row(name: str) -> None:
    inputs = make_inputs(CASES[0], CPU, 2**26, 0)
    (candidate,) = OursBackward().prepare(inputs)
    call: Any = candidate.calls[0]

    def wrong(factor: float) -> Gradients:
        result = Gradients(*(t.clone() for t in call()))
        row = result.dq[1, 20, 3] if name == "dq" else getattr(result, name)[1, 1, 20]
        row *= factor
        return result

    for factor in (1.05, float("nan"), 0.0):
        found = PROCEDURES["backward"].judge(inputs, 0, lambda factor=factor: wrong(factor), OURS)
        assert not found.passed and name in found.reason
    assert PROCEDURES["backward"].judge(inputs, 0, lambda: wrong(1.0), OURS).passed


def test_the_rate_counts_five_products_for_two() -> None:
    case = backward_case(fixed(1, 8192))
    forward = attention_case(fixed(1, 8192), q_len=8192, page_size=0, table_format="none")
    assert case.tflop == 2.5 * forward.tflop and case.kv_bytes == 2 * case.cache_bytes + 4 * case.query_bytes


def test_cases_and_who_takes_part() -> None:
    cases = select_cases(["backward"])
    assert cases == list(backward_cases()) and len({case.name for case in cases}) == len(cases) == 6
    assert [str(bar_of(case)) for case in cases[:2]] == ["2 x fa4"] * 2 and bar_of(cases[-1]) is None
    found = [p.name for p in providers_of(["ours", "ours-sm80", "fa4", "read"]) if p.operation == "backward"]
    assert found == ["ours", "ours-sm80", "fa4"]
