"""The correctness gate: nothing is timed before its results on all input sets were compared with f64.

Every row and every head is judged by itself, against the error of PyTorch's own attention in the same dtype for that row and
head: the allowance of one row, head or set never covers another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perf.cases import Case
from perf.inputs import Inputs, Reference
from perf.scores import Scores

LSE_TOLERANCE = 1e-5
CHUNK = 2**25  # elements of K that are used at once: 256 MiB in f64, next to as much of V


@dataclass(frozen=True)
class Tolerance:
    """The error that one row and head may have; the defaults are the rule for this package's own results.

    The 2-norm of out - f64 may be `norm_factor` times that of same-dtype PyTorch, plus `norm_ulps` ulp of the output in 2-norm
    (eps times the 2-norm of the f64 vector). Each element's error may be `element_factor` times PyTorch's largest error in that
    row and head, plus `element_ulps` ulp at its largest value. relative: an added share of the 2-norm, and of the largest value.
    """

    norm_factor: float = 1.25
    norm_ulps: float = 1
    element_factor: float = 2
    element_ulps: float = 2
    relative: float = 0.0


OURS = Tolerance()
OURS_F32 = Tolerance(
    norm_ulps=4, element_ulps=6
)  # products by parts: exp2 and a reciprocal cost 4 ulp of 2**-24 (docs/design.md)
EXACT = Tolerance(0, 0, 0, 0)  # for an append: every byte must be equal
PEERS = Tolerance(4, 8, 4, 8)  # their own choices of precision: this catches wrong answers only
FP8_QUERY = replace(PEERS, relative=0.1)  # peers that round q, or q and P, to e4m3: 0.02 to 0.035 was measured


@dataclass(frozen=True)
class GateResult:
    """The errors of the worst rows and heads (None if nothing could be compared), the verdict, and why it failed.

    used: the largest part of its allowance that any row and head has used; above 1 it fails. error, torch_error: max |out - f64|
    of that row and head, and the same for PyTorch. relative_error: the largest 2-norm of out - f64 over that of f64. lse_error:
    the largest |lse - f64| / max(1, |f64|). tolerance: the one asked for. For an append, error is the number of wrong bytes, and
    the other errors are None.
    """

    error: float | None
    torch_error: float | None
    lse_error: float | None
    passed: bool
    reason: str = ""
    relative_error: float | None = None
    tolerance: Tolerance | None = None
    used: float | None = None


def check(inputs: Inputs, index: int, out: torch.Tensor, lse: torch.Tensor | None, tolerance: Tolerance) -> GateResult:
    """Compares a result on set `index` with f64, every row and head.

    out: of the case's query_shape, or with the query rows of all requests in one axis; lse: f32 [query rows, num_heads], base e,
    or None. Every element has to be finite.
    """
    shape = inputs.sets[index].q.flatten(0, -3).shape
    out = out.flatten(0, -3) if out.shape == inputs.case.query_shape else out
    if out.shape != shape or (lse is not None and lse.shape != shape[:2]):
        shapes = [list(tensor.shape) for tensor in (out, lse) if tensor is not None]
        return GateResult(None, None, None, False, f"shapes {shapes} do not fit q's {list(shape)}", tolerance=tolerance)
    if not torch.isfinite(out).all() or (lse is not None and not torch.isfinite(lse).all()):
        return GateResult(None, None, None, False, f"the result on set {index} holds NaN or Inf", tolerance=tolerance)
    return judge(reference_of(inputs, index), out, lse, tolerance, f"of set {index}")


def judge_attention(
    inputs: Inputs, index: int, call: Callable[[], tuple[torch.Tensor, torch.Tensor | None]], tolerance: Tolerance
) -> GateResult:
    """Runs `call`, and returns `check` of its result."""
    return check(inputs, index, *call(), tolerance)


def judge(reference: Reference, out: torch.Tensor, lse: torch.Tensor | None, tolerance: Tolerance, where: str) -> GateResult:
    """The verdict on a result: whether each row and head keeps to its own allowance, which NaN never does.

    where: the result's origin in words, for the reason.
    """
    difference = out.double() - reference.out
    norm, largest = difference.norm(dim=-1), difference.abs().amax(-1)
    finfo = torch.finfo(out.dtype)
    unit = reference.norm.clamp_min(finfo.tiny)
    allowed_norm = tolerance.norm_factor * reference.torch_norm + (tolerance.norm_ulps * finfo.eps + tolerance.relative) * unit
    allowed = tolerance.element_factor * reference.torch_largest + tolerance.element_ulps * ulp(reference.largest, out.dtype)
    allowed = allowed + tolerance.relative * reference.largest
    used_norm, used_largest = norm / allowed_norm, largest / allowed
    used = torch.maximum(used_norm, used_largest)
    at, place = worst(used)
    reasons = []
    for name, part, error, limit, theirs in (
        ("error", used_largest, largest, allowed, reference.torch_largest),
        ("error in 2-norm", used_norm, norm, allowed_norm, reference.torch_norm),
    ):
        if not bool(part[at] <= 1):
            reasons.append(f"{name} {over(error[at], limit[at])} (same-dtype PyTorch: {theirs[at]:.3g}) in {place} {where}")
    worst_lse = None
    if lse is not None:
        lse_errors = (lse.double() - reference.lse).abs() / reference.lse.abs().clamp_min(1)
        lse_at, place = worst(lse_errors)
        worst_lse = float(lse_errors[lse_at])
        if not worst_lse <= LSE_TOLERANCE:
            reasons.append(f"lse error {over(worst_lse, LSE_TOLERANCE)} in {place} {where}")
    return GateResult(
        error=float(largest[at]),
        torch_error=float(reference.torch_largest[at]),
        lse_error=worst_lse,
        passed=not reasons,
        reason="; ".join(reasons),
        relative_error=float((norm / unit).max()),
        tolerance=tolerance,
        used=float(used[at]),
    )


def over(error: float | torch.Tensor, limit: float | torch.Tensor) -> str:
    """The text "error exceeds limit", with three digits of both, or as many as tell them apart."""
    error, limit = float(error), float(limit)
    digits = next((n for n in range(3, 17) if f"{error:.{n}g}" != f"{limit:.{n}g}"), 17)
    return f"{error:.{digits}g} exceeds {limit:.{digits}g}"


def worst(values: torch.Tensor) -> tuple[tuple[int, int], str]:
    """The index of the largest value of [batch, num_heads], also in words. NaN is larger than any number."""
    row, head = divmod(int(values.argmax()), values.shape[1])
    return (row, head), f"row {row}, head {head}"


def worst_of(results: Sequence[GateResult]) -> GateResult:
    """One result for several input sets: the first that failed, else the one nearest to failing, with the largest errors."""
    failed = next((result for result in results if not result.passed), None)
    if failed is not None:
        return failed
    nearest = max(results, key=lambda result: result.used or 0.0)
    lse_errors = [result.lse_error for result in results if result.lse_error is not None]
    relative = [result.relative_error for result in results if result.relative_error is not None]
    return replace(nearest, lse_error=max(lse_errors, default=None), relative_error=max(relative, default=None))


def reference_of(inputs: Inputs, index: int) -> Reference:
    """The result that set `index` must have. It depends on the inputs alone: computed once, and kept and dropped with them."""
    if index not in inputs.references:
        inputs.references[index] = make_reference(inputs, index)
    return inputs.references[index]


def make_reference(inputs: Inputs, index: int) -> Reference:
    """The reference of one set; for a mixed batch, the references of its parts one after the other."""
    found = [attended(part, index) for part in inputs.parts()]
    out, lse, theirs = (torch.cat(results) for results in zip(*found, strict=True))
    error = theirs.double() - out
    return Reference(out, lse, out.norm(dim=-1), out.abs().amax(-1), error.norm(dim=-1), error.abs().amax(-1))


def attended(inputs: Inputs, index: int) -> tuple[torch.Tensor, ...]:
    """(out, lse, same-dtype PyTorch's out) of one set of uniform query rows, CHUNK elements of K and of V at a time.

    out and lse are in f64; the query rows of all requests are in one axis.
    """
    case = inputs.case
    q = inputs.sets[index].q.view(case.batch_size, case.q_rows, case.num_heads, case.head_dim)
    group = case.num_heads // case.num_kv_heads
    out, theirs = torch.empty_like(q, dtype=torch.float64), torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float64, device=q.device)
    for rows, kv_heads in chunks(case):
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        part = q[rows][:, :, heads], *inputs.rows(index, rows, kv_heads), inputs.softmax_scale
        if case.operation == "attention":
            results = modified_attention(Scores(case, inputs.operands, rows, heads), *part)
        else:
            results = one_row_attention(*part)
        for whole, result in zip((out, lse, theirs), results, strict=True):
            whole[rows, :, heads] = result
    return tuple(whole.flatten(0, 1) for whole in (out, lse, theirs))


def chunks(case: Case) -> Iterator[tuple[list[int], slice]]:
    """Every row and KV head of a case once: some rows of one length with all KV heads, or some KV heads of one long row."""
    by_length: dict[int, list[int]] = {}
    for row, tokens in enumerate(case.tokens()):
        by_length.setdefault(tokens, []).append(row)
    for tokens, rows in by_length.items():
        width = max(case.head_dim, case.packed_rows)  # a token's values, or its scores if there are more of them
        vectors = max(1, CHUNK // (max(tokens, 1) * width))  # pairs of a row and a KV head
        heads = min(case.num_kv_heads, vectors)
        step = max(1, vectors // case.num_kv_heads)
        for first in range(0, len(rows), step):
            for head in range(0, case.num_kv_heads, heads):
                yield rows[first : first + step], slice(head, min(head + heads, case.num_kv_heads))


def attention_f64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in f64: q [..., num_heads, head_dim], k and v [..., num_kv_heads, tokens, head_dim].

    Returns out [..., num_heads, head_dim] and lse [..., num_heads] (natural log), f64.
    """
    scores = softmax_scale * q.double().unflatten(-2, (k.shape[-3], -1)) @ k.double().mT
    out = torch.softmax(scores, dim=-1) @ v.double()
    return out.flatten(-3, -2), torch.logsumexp(scores, dim=-1).flatten(-2)


def one_row_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, ...]:
    """(out, lse, same-dtype PyTorch's out) of q [requests, 1, num_heads, head_dim]; out and lse in f64."""
    operands = (q[:, 0], k, v, softmax_scale)
    return tuple(result[:, None] for result in (*attention_f64(*operands), same_dtype(*operands)))


def modified_attention(
    scores: Scores, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, ...]:
    """one_row_attention for several query rows or modified scores: q [requests, q rows, num_heads, head_dim].

    Same-dtype PyTorch computes in f32, on operands of q's dtype, and rounds once, as its math backend does. The math backend
    itself has no soft cap and no sinks, and takes ALiBi's bias rounded to q's dtype.
    """
    exact = scores.attention(torch.float64, q, k, v, softmax_scale)
    theirs, _ = scores.attention(torch.float32, q, k.to(q.dtype), v.to(q.dtype), softmax_scale)
    return *exact, theirs.to(q.dtype)


def same_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """The out of PyTorch's math backend on the operands in q's dtype; query heads of one KV head become its query rows."""
    grouped = q.unflatten(-2, (k.shape[-3], -1))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(grouped, k.to(q.dtype), v.to(q.dtype), scale=softmax_scale).flatten(-3, -2)


def ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring `dtype` numbers at each f64 `magnitude`; below the smallest normal number, its distance."""
    finfo = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp_min(finfo.tiny))  # the exponent for a mantissa in [0.5, 1)
    return torch.ldexp(torch.full_like(magnitude, finfo.eps), exponent - 1)
