"""Gradients of attention on every backend against torch.autograd in f64, row by row."""

from __future__ import annotations

import pytest
import torch

from tests.support.backward_cases import CASES, Case, in_f32, make_backward
from tests.support.backward_harness import assert_bitwise, assert_close, bits, run, select
from tests.support.harness import BACKENDS, device_of


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("one", CASES, ids=str)
def test_gradients(one: Case, backend: str) -> None:
    """Poison in what no request owns, garbage in what no table uses; the bits of a second run."""
    inputs, plan = make_backward(one, device_of(backend)), select(one, backend)
    result = run(plan, inputs)
    assert_close(inputs, result)
    assert plan.status() is None
    again = run(plan, inputs, fill=7.0 if one.unread == "zeros" and one.attention.uniform else float("nan"))
    assert_bitwise(bits(again), bits(result))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("one", CASES, ids=str)
def test_gradients_in_f32(one: Case, backend: str) -> None:
    """On a GPU from three bf16 parts of each operand."""
    one = in_f32(one)
    inputs, plan = make_backward(one, device_of(backend)), select(one, backend)
    result = run(plan, inputs)
    assert_close(inputs, result)
    assert_bitwise(bits(run(plan, inputs)), bits(result))


def test_the_rule_sees_a_gradient_that_is_off() -> None:
    """A 32nd of one row of one head is more than the rule allows."""
    one = next(case for case in CASES if case.name == "everything")
    inputs = make_backward(one)
    for name in ("dq", "dk_cache", "dv_cache"):
        result = run(select(one, "cpu"), inputs)
        wrong = getattr(result, name)
        row = wrong[25] if name == "dq" else wrong[inputs.attention.kv.rows[6][-2]]
        row *= 1 + 2**-5
        with pytest.raises(AssertionError):
            assert_close(inputs, result)
    result = run(select(one, "cpu"), inputs)
    result.dsinks.mul_(1.05)
    with pytest.raises(AssertionError):
        assert_close(inputs, result)
    assert not torch.isnan(result.dk_cache).any()
