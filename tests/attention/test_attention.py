"""Attention with several query rows against a dense f64 softmax, on every backend: masks, modifiers, formats, storage."""

from __future__ import annotations

import pytest

from tests.support.attention_cases import CASES, Case, make_attention
from tests.support.attention_harness import assert_close, assert_padding, run, select
from tests.support.harness import BACKENDS, device_of

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)


def served(case: Case, backend: str) -> None:
    if backend == "sm90" and not case.tma:
        pytest.skip("no TMA box holds such a page")


@EVERY_BACKEND
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_is_right(case: Case, backend: str) -> None:
    """Over NaN in every slot that no row owns; rows of no request are left alone."""
    served(case, backend)
    plan, inputs = select(case, backend), make_attention(case, device_of(backend))
    plan.clear_status()
    got = run(plan, inputs)
    assert_close(inputs, got)
    assert_padding(inputs, got, float("nan"))
    assert plan.status() is None
