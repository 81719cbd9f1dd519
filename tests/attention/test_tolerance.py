"""The tolerance rule itself: right results pass, each planted corruption of one row or one head is found and named."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from tests.support import harness
from tests.support.harness import assert_close, attend, run, select
from tests.support.inputs import LENGTHS, NAN, Inputs, Shape, make_inputs
from tests.support.storage import STORAGES
from tests.support.tolerance import OF_16_BITS, State, check_states, tolerance_of, ulp

SHAPES = {
    "long beside short": Shape(4, 2, 64, 64, lengths=(65_537, 3, 0, 4096, 700)),
    "default lengths": Shape(),
    "e4m3": Shape(**STORAGES["e4m3"]),
}
PIECES = 132  # that a row is cut into, at most: the SMs of an H200
Corruption = Callable[["Solved", int], State]  # out and lse of one row, wrong


@dataclass(frozen=True)
class Solved:
    """A problem, what the CPU variant makes of it, and what `attend` says of each row."""

    inputs: Inputs
    out: Tensor
    lse: Tensor
    attended: list[tuple[Tensor, Tensor, Tensor]]

    def row(self, row: int) -> State:
        return self.out[row].clone(), self.lse[row].clone()


@functools.cache
def solved(name: str) -> Solved:
    inputs = make_inputs(SHAPES[name], "cpu")
    state = run(select(inputs.shape, "cpu"), inputs)
    return Solved(inputs, *state, [attend(inputs, row) for row in range(len(inputs.shape.lengths))])


def pieces_of(inputs: Inputs, row: int) -> list[Inputs]:
    """A row cut between pages, each piece a problem of its own."""
    size, length = inputs.shape.page_size, inputs.shape.lengths[row]
    parts = inputs.rows[row].tensor_split(min(PIECES, len(inputs.rows[row])))
    begins = [size * sum(map(len, parts[:i])) for i in range(len(parts))]
    lengths = [min(size * len(part), length - begin) for part, begin in zip(parts, begins, strict=True)]
    cut = zip(parts, lengths, strict=True)
    return [replace(inputs, shape=replace(inputs.shape, lengths=(n,)), q=inputs.q[row : row + 1], rows=[part]) for part, n in cut]


def combined(problem: Solved, row: int, spoil: Callable[[Tensor], Tensor]) -> State:
    """The row as the combine of its pieces' states, whose weights [pieces, num_heads] are spoilt."""
    states = [attend(piece, 0) for piece in pieces_of(problem.inputs, row)]
    outs, lses = torch.stack([out for out, _, _ in states]), torch.stack([lse for _, lse, _ in states])
    lse = lses.logsumexp(0)
    out = (spoil((lses - lse).exp())[..., None] * outs).sum(0)
    return out.to(problem.out.dtype), lse.float()


def halved(weights: Tensor) -> Tensor:
    weights[len(weights) // 2] *= 0.5
    return weights


def swapped(weights: Tensor) -> Tensor:
    """The largest and the smallest weight of each head change places."""
    low, high = weights.argmin(0, keepdim=True), weights.argmax(0, keepdim=True)
    return weights.scatter(0, low, weights.gather(0, high)).scatter(0, high, weights.gather(0, low))


def without_values(problem: Solved, row: int) -> State:
    """V of a sixteenth of the tokens, 256 of 4,096, is zero; their weights stay."""
    inputs, length = problem.inputs, problem.inputs.shape.lengths[row]
    size, v = inputs.shape.page_size, inputs.v.clone()
    for token in range(length // 3, length // 3 + length // 16):
        v[int(inputs.rows[row][token // size]), :, token % size] = 0
    alone = replace(inputs.shape, lengths=(length,))
    lost = replace(inputs, shape=alone, q=inputs.q[row : row + 1], v=v, rows=[inputs.rows[row]])
    out, lse = run(select(alone, "cpu"), lost)
    return out[0], lse[0]


def element(value: float) -> Corruption:
    def corrupt(problem: Solved, row: int) -> State:
        out, lse = problem.row(row)
        out[:, 5] = value
        return out, lse

    return corrupt


def lse_error(factor: float) -> Corruption:
    """Off by so many times max(1, |lse|)."""
    return lambda problem, row: (problem.out[row], problem.lse[row] + factor * problem.lse[row].abs().clamp(min=1))


CORRUPTIONS: dict[str, tuple[int, Corruption]] = {  # the least length of a row that can have it
    "zeros": (1, lambda p, row: (torch.zeros_like(p.out[row]), p.lse[row])),
    "negated": (1, lambda p, row: (-p.out[row], p.lse[row])),
    "x 0.9": (1, lambda p, row: ((p.out[row].double() * 0.9).to(p.out.dtype), p.lse[row])),
    "a sixteenth of V lost": (16, without_values),
    "a combine weight halved": (17, lambda p, row: combined(p, row, halved)),
    "combine weights swapped": (17, lambda p, row: combined(p, row, swapped)),
    "NaN in one element": (1, element(NAN)),
    "inf in one element": (1, element(math.inf)),
    "lse too high": (1, lse_error(1e-4)),
    "lse too low": (1, lse_error(-1e-4)),
    "lse NaN": (1, lse_error(NAN)),
    "lse inf": (1, lse_error(math.inf)),
    "lse -inf": (1, lse_error(-math.inf)),
}


@pytest.fixture(params=SHAPES)
def problem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Solved:
    """The references are computed once, not for each corruption."""
    found = solved(request.param)
    monkeypatch.setattr(harness, "attend", lambda inputs, row: found.attended[row])
    return found


def refused(problem: Solved, out: Tensor, lse: Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close(problem.inputs, out, lse)


@pytest.mark.parametrize("name", SHAPES)
def test_a_right_result_passes(name: str) -> None:
    found = solved(name)
    assert_close(found.inputs, found.out, found.lse)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_of_a_row_or_of_a_head_is_found(problem: Solved, name: str) -> None:
    least, corrupt = CORRUPTIONS[name]
    rows = [row for row, length in enumerate(problem.inputs.shape.lengths) if length >= least]
    assert rows
    for row in rows:
        bad = corrupt(problem, row)
        wrong = problem.out.clone(), problem.lse.clone()
        wrong[0][row], wrong[1][row] = bad
        refused(problem, *wrong, rf"row {row}, head \d+: .* allowed .*wrong: {len(bad[1])} of")
        for head in (0, len(bad[1]) - 1):
            wrong = problem.out.clone(), problem.lse.clone()
            wrong[0][row, head], wrong[1][row, head] = bad[0][head], bad[1][head]
            refused(problem, *wrong, rf"row {row}, head {head}: .* allowed .*wrong: 1 of")


def test_a_right_combine_passes(problem: Solved) -> None:
    """The control of the weights."""
    out, lse = problem.out.clone(), problem.lse.clone()
    for row, length in enumerate(problem.inputs.shape.lengths):
        if length:
            out[row], lse[row] = combined(problem, row, lambda weights: weights)
    assert_close(problem.inputs, out, lse)


@pytest.mark.parametrize("off", [1e-4, -1e-4])
def test_an_lse_of_few_tokens_is_off_by_little(problem: Solved, off: float) -> None:
    row = min((n, row) for row, n in enumerate(problem.inputs.shape.lengths) if n > 1)[1]
    assert problem.lse[row].abs().max() < 9
    lse = problem.lse.clone()
    lse[row, 1] += off
    refused(problem, problem.out, lse, f"row {row}, head 1: error of lse")


@pytest.mark.parametrize("value", [-0.0, 1e-30, 1.0, NAN])
def test_an_empty_row_is_positive_zero(problem: Solved, value: float) -> None:
    row, out = problem.inputs.shape.lengths.index(0), problem.out.clone()
    out[row, 1, 3] = value
    refused(problem, out, problem.lse, f"row {row}, head 1")


@pytest.mark.parametrize("value", [0.0, -1e30, math.inf, NAN])
def test_the_lse_of_an_empty_row_is_minus_infinity(problem: Solved, value: float) -> None:
    row, lse = problem.inputs.shape.lengths.index(0), problem.lse.clone()
    lse[row, 1] = value
    refused(problem, problem.out, lse, f"row {row}, head 1: error of lse")


def bounded(dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor, Callable[[Tensor], float]]:
    """(an out of `dtype`, the direction of its error, the error allowed for an exact vector) of a rule by itself.

    PyTorch's error is 1e-3 in each of 64 elements: one element alone is held by the element's rule, all alike by the norm's.
    """
    out = torch.linspace(0.5, 3.9, 64).to(dtype)
    along = torch.ones(64).double() if kind == "2-norm" else torch.eye(64).double()[9]
    number = tolerance_of(dtype)
    eps = torch.finfo(dtype).eps

    def allowed(exact: Tensor) -> float:
        if kind == "2-norm":
            return number.norm_factor * 1e-3 * 8 + number.norm_ulps * eps * float(exact.norm())
        return number.element_factor * 1e-3 + number.element_ulps * eps * 2.0  # the largest element is in [2, 4)

    return out, along / along.norm(), allowed


@pytest.mark.parametrize("kind", ["2-norm", "largest"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_bounds_are_where_the_rule_says(dtype: torch.dtype, kind: str) -> None:
    out, along, allowed = bounded(dtype, kind)
    for factor, within in ((0.999, True), (1.001, False)):
        exact = out.double()
        for _ in range(20):  # the exact vector for which `out` is as far off as that
            exact = out.double() - factor * allowed(exact) * along
        case = (out[None, None], torch.zeros(1, 1)), (exact[None, None], torch.zeros(1, 1).double())
        if within:
            check_states(*case, exact[None, None] + 1e-3)
        else:
            with pytest.raises(AssertionError, match=f"row 0, head 0: {kind}"):
                check_states(*case, exact[None, None] + 1e-3)


def test_ulps() -> None:
    values = torch.tensor([1.0, 1.99, 2.0, 3.0, 0.5, 1e-30, 0.0]).double()
    assert ulp(values, torch.float16).tolist() == [2**-10, 2**-10, 2**-9, 2**-9, 2**-11, 2**-24, 2**-24]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_plans_promise_what_is_tested(dtype: torch.dtype) -> None:
    plans = [
        ck.PagedDecodePlan.select(ck.PagedDecodeDescriptor(2, 8, 2, 64, 16, dtype), "cpu"),
        ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor(2, 8, 2, 33, 64, dtype), "cpu"),
        ck.MergeStatesPlan.select(ck.MergeStatesDescriptor(3, 4, 5, 64, dtype), "cpu"),
    ]
    for plan in plans:
        promise = vars(plan.precision_guarantee)
        assert promise == promise | vars(tolerance_of(dtype))
    assert vars(OF_16_BITS) == {"norm_factor": 1.25, "norm_ulps": 1, "element_factor": 2, "element_ulps": 2}


def test_appends_promise_every_bit() -> None:
    promise = ck.KVAppendPlan.select(ck.KVAppendDescriptor(9, 3, 128, 8, torch.bfloat16), "cpu").precision_guarantee
    assert (promise.norm_factor, promise.norm_ulps, promise.element_factor, promise.element_ulps) == (1, 0, 1, 0)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_f32_on_the_cpu(head_dim: int) -> None:
    for seed in range(3):
        inputs = make_inputs(Shape(dtype=torch.float32, head_dim=head_dim, lengths=(*LENGTHS, 3001)), "cpu", seed)
        assert_close(inputs, *run(select(inputs.shape, "cpu"), inputs))
