"""How far a result may be from f64. Each row and head is judged by itself, so that no row's allowance covers another row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

State = tuple[Tensor, Tensor]  # out [rows, num_heads, head_dim] and lse [rows, num_heads]
LSE_ERROR = 1e-5  # relative to max(1, |lse|)


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed error, in the terms of cute_kernels.PrecisionGuarantee.

    An error's 2-norm: norm_factor times that of PyTorch in the same dtype, plus norm_ulps ulp of the exact vector's 2-norm. Each
    element's error: element_factor times PyTorch's largest, plus element_ulps ulp at the exact vector's largest element.
    """

    norm_factor: float = 1.25
    norm_ulps: float = 1
    element_factor: float = 2
    element_ulps: float = 2


OF_16_BITS, OF_F32 = Tolerance(), Tolerance(norm_ulps=8, element_ulps=8)
# for products by parts (device/attend/split_mma.py). Emulated: of 2,000 rows whose logits are within 6 of each other, the worst
# needs 1.3 ulp, in rows of few keys, whose errors are mostly those of exp2 and of a reciprocal; logits 40 apart need 4.1
OF_SPLIT_F32 = Tolerance(norm_ulps=4, element_ulps=6)


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """The tolerance for outputs of this dtype."""
    return OF_F32 if dtype == torch.float32 else OF_16_BITS


def check_states(
    got: State, exact: State, same: Tensor, rows: Sequence[int] | None = None, tolerance: Tolerance | None = None
) -> None:
    """Raises AssertionError that names the worst row and head, their error and their allowance. NaN never passes.

    exact: in f64. same: PyTorch's out in the dtype of got's out. rows: the rows' names, 0, 1, ... by default. A row and head
    whose exact lse is -inf must be empty: every bit of its out 0, and lse -inf. tolerance: by default that of out's dtype.
    """
    (out, lse), (exact_out, exact_lse) = got, exact
    assert out.shape == same.shape == exact_out.shape and lse.shape == exact_lse.shape == out.shape[:2]
    rows = range(len(out)) if rows is None else rows
    check_rows(out, exact_out, same, rows, tolerance=tolerance)
    empty = exact_lse == -torch.inf
    gap = (lse.double() - exact_lse).abs().where(lse != exact_lse, 0.0)
    _check_bound("error of lse", gap, (LSE_ERROR * exact_lse.abs().clamp(min=1)).where(~empty, 0.0), rows)
    bits = out.contiguous().view(torch.uint8).amax(-1).double().where(empty, 0.0)
    _check_bound("not +0.0 in an empty row, bits", bits, torch.zeros_like(bits), rows)


def check_rows(
    out: Tensor,
    exact: Tensor,
    same: Tensor,
    rows: Sequence[int],
    floor: Tensor | float = 0.0,
    tolerance: Tolerance | None = None,
) -> None:
    """The rule for each row and head of `out` [rows, num_heads, columns]. floor: an added allowance, [rows, num_heads]."""
    tolerance, number = tolerance or tolerance_of(out.dtype), torch.finfo(out.dtype)
    error, others = out.double() - exact, same.double() - exact
    units = number.eps * exact.norm(dim=-1).clamp(min=number.tiny)  # below tiny, neighbours are as far apart as at tiny
    allowed = tolerance.norm_factor * others.norm(dim=-1) + tolerance.norm_ulps * units
    _check_bound("2-norm of the error", error.norm(dim=-1), allowed + floor, rows)
    units = ulp(exact.abs().amax(-1), out.dtype)
    allowed = tolerance.element_factor * others.abs().amax(-1) + tolerance.element_ulps * units
    _check_bound("largest error", error.abs().amax(-1), allowed + floor, rows)


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of `dtype` at each magnitude, in f64."""
    number = torch.finfo(dtype)
    _, exponent = magnitude.double().clamp(min=number.tiny).frexp()  # a mantissa in [0.5, 1)
    return number.eps * torch.exp2(exponent.double() - 1)


def _check_bound(name: str, error: Tensor, allowed: Tensor, rows: Sequence[int]) -> None:
    """Raises AssertionError unless error <= allowed, both [rows, num_heads]."""
    within = error <= allowed
    if within.all():
        return
    excess = (error / allowed).nan_to_num(nan=torch.inf, posinf=torch.inf).where(~within, -1.0)
    row, head = divmod(int(excess.argmax()), error.shape[1])
    found = f"{name} {error[row, head].item():.3g}, allowed {allowed[row, head].item():.3g}"
    raise AssertionError(
        f"row {rows[row]}, head {head}: {found}; wrong: {(~within).sum().item()} of {within.numel()} rows and heads"
    )
