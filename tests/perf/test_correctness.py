"""perf.correctness: every input set, row and head is held to its own allowance, and a wrong result does not pass."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from perf.cases import Case, Rows, fixed
from perf.correctness import (
    FP8_QUERY,
    OURS,
    PEERS,
    Reference,
    Tolerance,
    attention_f64,
    check,
    chunks,
    judge,
    over,
    reference_of,
    same_dtype,
    ulp,
)
from perf.inputs import Inputs, make_inputs
from perf.measure import gate
from perf.providers.base import Candidate
from tests.support.perf_fakes import Fake

CPU = torch.device("cpu")
RAGGED = Case(4, 2, 16, 4, Rows(((2, 9), (1, 4), (1, 1))))
CONTIGUOUS = Case(4, 2, 16, 0, fixed(3, 7), "f16", table_format="none")
INT8 = replace(RAGGED, kv_dtype="int8", kv_scale="token-f16")
LONG = Case(4, 2, 16, 16, Rows(((3, 3), (1, 4096))))  # a long row among short ones: its output is 30 times smaller


def inputs_of(case: Case) -> Inputs:
    return make_inputs(case, CPU, memory_bytes=2**24, rotated_bytes=3 * case.kv_bytes)


def exact(inputs: Inputs, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The right answer in the inputs' dtype, and its lse, row by row."""
    outs, lses = [], []
    for row, q in enumerate(inputs.sets[index].q):
        out, lse = attention_f64(q, *inputs.row(index, row), inputs.softmax_scale)
        outs.append(out.to(q.dtype))
        lses.append(lse.float())
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("case", [RAGGED, CONTIGUOUS, INT8, LONG, replace(CONTIGUOUS, kv_dtype="e4m3")])
def test_the_right_answer_passes(case: Case) -> None:
    inputs = inputs_of(case)
    result = check(inputs, 2, *exact(inputs, 2), OURS)
    assert result.passed and result.reason == ""
    assert result.error <= ulp(torch.tensor(4.0, dtype=torch.float64), torch.bfloat16)
    assert result.lse_error <= 1e-6
    assert 0 < result.relative_error < 2**-8 and 0 < result.used < 0.5
    assert result.tolerance == OURS


def lose_tokens(inputs: Inputs, index: int, row: int, head: int) -> torch.Tensor:
    """One head's output without the first sixteenth of its row's V."""
    k, v = inputs.row(index, row)
    v = v.clone()
    v[:, : v.shape[1] // 16] = 0
    return attention_f64(inputs.sets[index].q[row], k, v, inputs.softmax_scale)[0][head]


CORRUPTIONS = {
    "zeros": lambda inputs, index, row, head, out: torch.zeros_like(out),
    "negated": lambda inputs, index, row, head, out: -out,
    "x 0.9": lambda inputs, index, row, head, out: 0.9 * out,
    "V of 256 of 4,096 tokens lost": lambda inputs, index, row, head, out: lose_tokens(inputs, index, row, head),
}


@pytest.mark.parametrize("tolerance", [OURS, PEERS], ids=["ours", "peers"])
@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_one_wrong_head_of_a_long_row_among_short_ones_fails(corrupt, tolerance: Tolerance) -> None:
    inputs = inputs_of(LONG)
    row, head = LONG.tokens().index(4096), 2
    out, lse = exact(inputs, 0)
    out[row, head] = corrupt(inputs, 0, row, head, out[row, head]).to(out.dtype)
    result = check(inputs, 0, out, lse, tolerance)
    assert not result.passed and result.used > 1
    assert f"in row {row}, head {head} of set 0" in result.reason
    assert result.reason.startswith("error ")


def test_a_head_of_small_values_beside_one_of_large_ones_fails() -> None:
    """V of one KV head is 1,000 times that of the other, whose heads are held to what is allowed them."""
    inputs = inputs_of(CONTIGUOUS)
    for s in inputs.sets:
        s.v[:, 0] *= 1000
    out, lse = exact(inputs, 0)
    assert check(inputs, 0, out, lse, OURS).passed
    out[1, 2] = 0
    result = check(inputs, 0, out, lse, PEERS)
    assert not result.passed and "in row 1, head 2 of set 0" in result.reason


def test_a_small_error_all_over_a_head_fails_by_its_2_norm_alone() -> None:
    """Each element within 2 ulp of the largest, the vector 1.5% off: no element says it, the 2-norm does."""
    inputs = inputs_of(LONG)
    out, lse = exact(inputs, 0)
    row = LONG.tokens().index(4096)
    out[row, 1] = (out[row, 1].double() * 1.015).to(out.dtype)
    result = check(inputs, 0, out, lse, OURS)
    assert not result.passed and result.reason.startswith("error in 2-norm ")
    assert check(inputs, 0, out, lse, replace(OURS, norm_ulps=8)).passed


def test_one_wrong_element_fails_by_itself() -> None:
    """3% off in one of 4,096 elements of 1, where PyTorch is off by 1%: the 2-norm does not see it."""
    ones = torch.ones(1, 1, dtype=torch.float64)
    out = torch.ones(1, 1, 4096, dtype=torch.float16)
    reference = Reference(out.double(), ones, norm=64 * ones, largest=ones, torch_norm=0.64 * ones, torch_largest=0.01 * ones)
    out[0, 0, 7] += 0.03
    result = judge(reference, out, None, OURS, "of set 0")
    assert result.reason == "error 0.0303 exceeds 0.022 (same-dtype PyTorch: 0.01) in row 0, head 0 of set 0"


def test_an_error_and_its_limit_never_look_alike() -> None:
    assert over(0.0303, 0.022) == "0.0303 exceeds 0.022"
    assert over(1.4004e-6, torch.tensor(1.4e-6, dtype=torch.float64)) == "1.4004e-06 exceeds 1.4e-06"
    assert over(math.nextafter(1e-5, 1), 1e-5) == "1.0000000000000003e-05 exceeds 1.0000000000000001e-05"
    assert over(math.nan, 1e-5) == "nan exceeds 1e-05"


def test_the_rule_in_numbers() -> None:
    """One row and head whose errors are chosen: 1.25 and 1 ulp in 2-norm, 2 and 2 ulp by element, in bf16 (eps 2^-7)."""
    out = torch.zeros(1, 1, 4, dtype=torch.float64)
    out[..., 0] = 3.0
    one = lambda value: torch.full((1, 1), value, dtype=torch.float64)  # noqa: E731
    reference = Reference(out, one(0.5), norm=one(3.0), largest=one(3.0), torch_norm=one(0.1), torch_largest=one(0.05))
    norm, element = 1.25 * 0.1 + 2**-7 * 3.0, 2 * 0.05 + 2 * 2**-6  # the ulp of 3.0 is 2^-6

    def used(error: torch.Tensor, tolerance: Tolerance) -> float:
        kept = replace(reference, out=out - error)  # in place of out + error, which bf16 would round
        return judge(kept, out.to(torch.bfloat16), None, tolerance, "").used

    spread = torch.full((1, 1, 4), 0.01, dtype=torch.float64)
    assert used(spread, replace(OURS, element_factor=100)) == pytest.approx(0.02 / norm)
    single = torch.tensor([[[0.0, 0.1, 0.0, 0.0]]], dtype=torch.float64)
    assert used(single, replace(OURS, norm_factor=100)) == pytest.approx(0.1 / element)
    assert used(single, OURS) == pytest.approx(max(0.1 / norm, 0.1 / element))
    with_relative = replace(OURS, norm_factor=100, relative=0.1)
    assert used(single, with_relative) == pytest.approx(0.1 / (element + 0.1 * 3.0))


@pytest.mark.parametrize("tolerance", [OURS, PEERS, FP8_QUERY])
def test_another_heads_output_fails(tolerance: Tolerance) -> None:
    inputs = inputs_of(RAGGED)
    out, lse = exact(inputs, 0)
    longest = RAGGED.tokens().index(9)
    out[longest, 3] = out[longest, 2]  # another head of the group
    result = check(inputs, 0, out, lse, tolerance)
    assert not result.passed and result.error > 0.1


def test_the_result_of_another_set_and_a_wrong_lse_fail() -> None:
    inputs = inputs_of(CONTIGUOUS)
    out, lse = exact(inputs, 0)
    assert not check(inputs, 1, out, lse, PEERS).passed
    lse[1, 3] *= 1 + 1.5e-5
    wrong = check(inputs, 0, out, lse, OURS)
    assert not wrong.passed and wrong.lse_error > 1e-5
    assert wrong.reason.startswith("lse error ") and wrong.reason.endswith("in row 1, head 3 of set 0")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["out", "lse"])
def test_nan_and_inf_in_out_or_lse_fail(where: str, value: float) -> None:
    """By the check that says so, and by the comparisons where that check is not asked."""
    inputs = inputs_of(CONTIGUOUS)
    result = dict(zip(("out", "lse"), exact(inputs, 0), strict=True))
    result[where][(2, 1, 5)[: result[where].dim()]] = value
    found = check(inputs, 0, result["out"], result["lse"], PEERS)
    assert not found.passed and found.reason == "the result on set 0 holds NaN or Inf" and found.error is None
    assert not judge(reference_of(inputs, 0), result["out"], result["lse"], PEERS, "").passed


def test_a_result_of_another_shape_fails_instead_of_being_broadcast() -> None:
    inputs = inputs_of(CONTIGUOUS)
    out, lse = exact(inputs, 0)
    for wrong in ((out[:, None], lse), (out[:1], lse), (out, lse[:, :1]), (out, lse.T)):
        assert "do not fit q's [3, 4, 16]" in check(inputs, 0, *wrong, OURS).reason


@pytest.mark.parametrize("case", [replace(RAGGED, kv_dtype="e4m3"), INT8])
def test_a_rounded_query_is_told_from_an_exact_one(case: Case) -> None:
    inputs = inputs_of(case)
    rounded = replace(inputs, sets=tuple(replace(s, q=s.q.to(torch.float8_e4m3fn).to(s.q.dtype)) for s in inputs.sets))
    out, _ = exact(rounded, 0)
    ours, theirs = check(inputs, 0, out, None, OURS), check(inputs, 0, out, None, FP8_QUERY)
    assert not ours.passed
    assert theirs.passed
    assert 2**-8 < ours.relative_error == theirs.relative_error < 0.1


def test_a_result_without_the_scales_fails() -> None:
    inputs = inputs_of(INT8)
    unscaled = replace(inputs, sets=tuple(replace(s, v_scale=torch.ones_like(s.v_scale)) for s in inputs.sets))
    assert not check(inputs, 0, *exact(unscaled, 0), FP8_QUERY).passed


def wrong_in(inputs: Inputs, index: int, bad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The right answer, but for one head on set `bad`."""
    out, lse = exact(inputs, index)
    if index == bad:
        out[0, 1] *= 0.9
    return out, lse


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_every_input_set_is_gated(bad: int) -> None:
    inputs = inputs_of(CONTIGUOUS)
    assert len(inputs.sets) == 3
    provider = Fake("ours", partial(wrong_in, bad=bad), tolerance=OURS)
    result = gate(provider, provider.prepare(inputs)[0], inputs)
    assert result is not None and not result.passed and f"row 0, head 1 of set {bad}" in result.reason
    right = Fake("ours", partial(wrong_in, bad=-1), tolerance=OURS)
    result = gate(right, right.prepare(inputs)[0], inputs)
    each = [check(inputs, index, *exact(inputs, index), OURS) for index in range(3)]
    assert result is not None and result.passed
    assert result.used == max(one.used for one in each)
    assert result.lse_error == max(one.lse_error for one in each)
    assert result.relative_error == max(one.relative_error for one in each)


def test_a_provider_with_too_few_calls_is_refused() -> None:
    inputs = inputs_of(CONTIGUOUS)
    with pytest.raises(ValueError, match="zip"):
        gate(Fake("ours", tolerance=OURS), Candidate([partial(exact, inputs, 0)]), inputs)


def test_the_reference_of_a_set_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(CONTIGUOUS)
    first = [reference_of(inputs, index) for index in range(3)]
    monkeypatch.setattr("perf.correctness.make_reference", lambda *given: pytest.fail("computed again"))
    assert [reference_of(inputs, index) for index in range(3)] == first
    assert not replace(inputs, sets=inputs.sets[::-1]).references, "other inputs have references of their own"


@pytest.mark.parametrize("chunk", [1, 40, 16 * 9 * 2, 10**6])
@pytest.mark.parametrize(
    "case", [RAGGED, CONTIGUOUS, INT8, replace(RAGGED, num_heads=2, layout="NHD", kv_dtype="e5m2", kv_scale="head")]
)
def test_the_reference_is_that_of_each_row_by_itself(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.correctness.CHUNK", chunk)
    inputs = inputs_of(case)
    reference = reference_of(inputs, 1)
    for row, q in enumerate(inputs.sets[1].q):
        k, v = inputs.row(1, row)
        out, lse = attention_f64(q, k, v, inputs.softmax_scale)
        torch.testing.assert_close(reference.out[row], out, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(reference.lse[row], lse, rtol=1e-13, atol=1e-13)
        error = same_dtype(q, k, v, inputs.softmax_scale).double() - out
        for head in range(case.num_heads):
            assert float(reference.norm[row, head]) == pytest.approx(float(out[head].norm()))
            assert float(reference.largest[row, head]) == pytest.approx(float(out[head].abs().max()))
            assert float(reference.torch_norm[row, head]) == pytest.approx(float(error[head].norm()), rel=0.1, abs=1e-4)
            assert float(reference.torch_largest[row, head]) == pytest.approx(float(error[head].abs().max()), rel=0.1, abs=1e-4)


def test_chunks_hold_every_row_and_head_once_within_the_memory_that_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(32, 8, 128, 16, Rows(((3, 131072), (60, 1024), (2, 7))))
    seen = [(row, head) for rows, heads in chunks(case) for row in rows for head in range(heads.start, heads.stop)]
    assert sorted(seen) == [(row, head) for row in range(65) for head in range(8)]
    for rows, heads in chunks(case):
        tokens = {case.tokens()[row] for row in rows}
        assert len(tokens) == 1
        assert 8 * len(rows) * (heads.stop - heads.start) * tokens.pop() * 128 <= 2**28  # bytes of K in f64
    assert len(list(chunks(case))) == 3 * 4 + 2 + 1


def test_attention_f64_against_a_loop() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    out, lse = attention_f64(q, k, v, 0.3)
    for head in range(4):
        scores = [0.3 * float(q[head].double() @ k[head // 2, token].double()) for token in range(5)]
        weights = torch.tensor(scores, dtype=torch.float64).exp()
        expected = (weights[:, None] * v[head // 2].double()).sum(0) / weights.sum()
        torch.testing.assert_close(out[head], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[head], weights.sum().log(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(same_dtype(q, k, v, 0.3).double(), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("magnitude", "dtype", "expected"), [(1.5, torch.bfloat16, 2**-7), (0.3, torch.float16, 2**-12), (2.0, torch.float16, 2**-9)]
)
def test_ulp(magnitude: float, dtype: torch.dtype, expected: float) -> None:
    assert float(ulp(torch.tensor(magnitude, dtype=torch.float64), dtype)) == expected
