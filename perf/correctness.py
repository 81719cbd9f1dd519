"""The correctness gate: nothing is timed before its result on the same inputs was compared with f64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perf.inputs import Inputs

SAMPLED_ROWS = 8
LSE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Tolerance:
    """What a row's error may be: `factor` times that of same-dtype PyTorch, plus `ulps` ulp of the output, plus `relative` of it.

    The output counts by the largest magnitude of the row.
    """

    factor: float
    ulps: float
    relative: float = 0.0


OURS = Tolerance(factor=1.25, ulps=2)
EXACT = Tolerance(factor=0.0, ulps=0)  # of an append: every byte
PEERS = Tolerance(factor=4.0, ulps=8)  # their own choices of precision: this catches wrong answers only
FP8_QUERY = Tolerance(factor=4.0, ulps=8, relative=0.1)  # peers that round q, or q and P, to e4m3: 0.02 to 0.035 was measured


@dataclass(frozen=True)
class RowError:
    """How far one row is from f64: max |out - f64|, the same of PyTorch in the output's dtype, and what is allowed.

    relative: the 2-norm of out - f64 over that of f64. lse: the largest |lse - f64| / max(1, |f64|) over the heads, None where
    no lse was given.
    """

    out: float
    torch: float
    allowed: float
    relative: float
    lse: float | None


@dataclass(frozen=True)
class GateResult:
    """The errors of the worst sampled rows (None where nothing could be compared), the verdict, and why it failed.

    Of an append, error is the number of wrong bytes, and the others are None.

    error, torch_error: of the row that comes closest to what is allowed, or exceeds it most. relative_error, lse_error: the
    largest (see RowError). tolerance: what was asked.
    """

    error: float | None
    torch_error: float | None
    lse_error: float | None
    passed: bool
    reason: str = ""
    relative_error: float | None = None
    tolerance: Tolerance | None = None


def check(inputs: Inputs, index: int, out: torch.Tensor, lse: torch.Tensor | None, tolerance: Tolerance) -> GateResult:
    """Compare a result on set `index` with f64 on a sample of rows (see sample_rows).

    out: [batch, num_heads, head_dim]; lse: f32 [batch, num_heads], base e, or None. Every element has to be finite.
    """
    if not torch.isfinite(out).all() or (lse is not None and not torch.isfinite(lse).all()):
        return GateResult(None, None, None, False, "the result holds NaN or Inf", tolerance=tolerance)
    rows = [
        row_error(inputs, index, row, out[row], None if lse is None else lse[row], tolerance)
        for row in sample_rows(inputs.case.tokens())
    ]
    worst = max(rows, key=lambda r: r.out / r.allowed)
    lse_error = None if lse is None else max(r.lse for r in rows if r.lse is not None)
    reasons = []
    if worst.out > worst.allowed:
        reasons.append(f"error {worst.out:.3g} exceeds {worst.allowed:.3g} (same-dtype PyTorch: {worst.torch:.3g})")
    if lse_error is not None and lse_error > LSE_TOLERANCE:
        reasons.append(f"lse error {lse_error:.3g} exceeds {LSE_TOLERANCE:g}")
    relative = max(r.relative for r in rows)
    return GateResult(worst.out, worst.torch, lse_error, not reasons, "; ".join(reasons), relative, tolerance)


def row_error(
    inputs: Inputs, index: int, row: int, out: torch.Tensor, lse: torch.Tensor | None, tolerance: Tolerance
) -> RowError:
    """The error of one row: out [num_heads, head_dim], lse [num_heads] or None."""
    q = inputs.sets[index].q[row]
    k, v = inputs.row(index, row)
    expected, expected_lse = attention_f64(q, k, v, inputs.softmax_scale)
    torch_error = max_abs(same_dtype(q, k, v, inputs.softmax_scale).double() - expected)
    largest, difference = max_abs(expected), out.double() - expected
    allowed = tolerance.factor * torch_error + tolerance.ulps * ulp(largest, out.dtype) + tolerance.relative * largest
    relative = float(difference.norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
    lse_error = None if lse is None else max_abs((lse.double() - expected_lse) / expected_lse.abs().clamp_min(1))
    return RowError(max_abs(difference), torch_error, allowed, relative, lse_error)


def sample_rows(tokens: tuple[int, ...]) -> list[int]:
    """At most SAMPLED_ROWS rows of a batch: the first, the last, and others evenly by length with both extremes."""
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    ranks = SAMPLED_ROWS - 2
    by_length = {order[i * (len(tokens) - 1) // (ranks - 1)] for i in range(ranks)}
    return sorted({0, len(tokens) - 1} | by_length)


def attention_f64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row in f64: q [num_heads, head_dim], k and v [num_kv_heads, tokens, head_dim].

    Returns out [num_heads, head_dim] and lse [num_heads] (natural log), f64. A KV head at a time bounds the memory.
    """
    outs, lses = [], []
    for queries, keys, values in zip(q.double().chunk(len(k)), k, v, strict=True):
        scores = softmax_scale * queries @ keys.double().T
        outs.append(torch.softmax(scores, dim=-1) @ values.double())
        lses.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(outs), torch.cat(lses)


def same_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """What PyTorch makes of the same row in q's dtype: [num_heads, head_dim]."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    out = F.scaled_dot_product_attention(q[None, :, None], k[None], v[None], scale=softmax_scale, enable_gqa=True)
    return out[0, :, 0]


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at `magnitude`."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(magnitude, torch.finfo(dtype).tiny)))


def max_abs(tensor: torch.Tensor) -> float:
    """The largest magnitude."""
    return float(tensor.abs().max())
