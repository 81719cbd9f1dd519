"""Attention's backward: the cases with their bars, a run's inputs, and the gate, row by row against f64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import cute_kernels as ck
from perf.cases import Bar, Case, backward_case, fixed
from perf.correctness import GateResult, Tolerance
from perf.inputs import Inputs, InputSet

K = 1024
HALF_OF_FA4 = Bar("ratio", 2.0, beside="fa4")  # both are deterministic
CANCELS = 2.0**-14  # a share of the rows' mean 2-norm: less than a hundredth of a bf16 ulp
CHUNK_ROWS = 512  # query rows that the gate compares at once


class Gradients(NamedTuple):
    """dq in q's shape, dk and dv in the caches' shapes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward_cases() -> dict[Case, Bar | None]:
    """Prompts of one request, causal: contiguous, then over pages, which have no bar."""
    found: dict[Case, Bar | None] = {backward_case(fixed(1, tokens)): HALF_OF_FA4 for tokens in (8 * K, 16 * K)}
    for heads, head_dim in ((64, 64), (16, 256)):
        found[backward_case(fixed(1, 8 * K), num_heads=heads, head_dim=head_dim)] = HALF_OF_FA4
    for page in (64, 16):
        found[backward_case(fixed(1, 8 * K), page_size=page)] = None
    return found


def backward_descriptor(inputs: Inputs, attention: ck.PagedAttentionDescriptor) -> ck.PagedAttentionBackwardDescriptor:
    """The backward's descriptor of a case; attention: the descriptor of its forward."""
    if inputs.pages is not None:
        attention = replace(attention, num_pages=len(inputs.sets[0].k), max_pages=inputs.pages.table.shape[1])
    return ck.PagedAttentionBackwardDescriptor(attention)


def dout_of(inputs: Inputs, index: int) -> Tensor:
    """The gradient of out on set `index`: normal random values."""
    q = inputs.sets[index].q
    generator = torch.Generator(q.device).manual_seed(index)
    return torch.randn(q.shape, device=q.device, generator=generator).to(q.dtype)


def judge_backward(inputs: Inputs, index: int, call: Callable[[], Gradients], tolerance: Tolerance) -> GateResult:
    """The verdict on a result on set `index`: each row of the first and last request and KV head by itself, against f64.

    A row's error in 2-norm may be the sum of some ulps of the exact row, of the change by an out that is off by one ulp, as the
    out given to a backward is, and of the rest that f32 leaves if large terms cancel: dQ of a row with one key is zero. used: the
    largest part of its allowance that a row has used; above 1 it fails.
    """
    case, result, worst, where = inputs.case, call(), 0.0, ""
    gradients = Inputs(case, (InputSet(result.dq, result.dk, result.dv),), inputs.pages)
    units = (tolerance.norm_factor + tolerance.norm_ulps) * torch.finfo(result.dq.dtype).eps
    group = case.num_heads // case.num_kv_heads
    for row in {0, case.batch_size - 1}:
        dk, dv = gradients.row(0, row)
        for head in {0, case.num_kv_heads - 1}:
            dq = result.dq[row, :, head * group : (head + 1) * group]
            exacts, moved = exact_gradients(inputs, index, row, head)
            for name, got, exact, floor in zip(Gradients._fields, (dq, dk[head], dv[head]), exacts, moved, strict=True):
                norms = exact.norm(dim=-1)
                allowed = units * norms + floor + CANCELS * norms.mean()
                used = float(((got.double() - exact).norm(dim=-1) / allowed).nan_to_num(nan=torch.inf).amax())
                if used > worst:
                    worst, where = used, f"{name} of row {row}, KV head {head} of set {index}"
    reason = f"{where}: an error of {worst:.3g} times what is allowed" if worst > 1 else ""
    return GateResult(None, None, None, worst <= 1, reason, tolerance=tolerance, used=worst)


def exact_gradients(inputs: Inputs, index: int, row: int, head: int) -> tuple[Gradients, Gradients]:
    """(gradients, how far an out's rounding moves them) of a request and KV head, f64.

    dq [q_len, group, head_dim], dk and dv [tokens, head_dim]. dS = P (dP - delta), delta = rowsum(dout * out) (FlashAttention-2,
    Dao 2023, section 3.1). Moved: 2-norms of rows, for an out whose elements are each off by an ulp, independently.
    """
    group, scale = inputs.case.num_heads // inputs.case.num_kv_heads, inputs.softmax_scale
    mine, given = slice(head * group, (head + 1) * group), inputs.sets[index].q
    q, dout = (t[row, :, mine].double() for t in (given, dout_of(inputs, index)))
    k, v = (t[head].double() for t in inputs.row(index, row))
    exact = Gradients(torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v))
    moved = Gradients(*(torch.zeros_like(t[..., 0]) for t in exact))
    for rows in chunks(len(q)):
        last = torch.arange(rows.start, rows.stop, device=k.device)[:, None] + (len(k) - len(q))
        scores = torch.einsum("ngd,td->gnt", q[rows], k) * scale
        weights = scores.masked_fill(torch.arange(len(k), device=k.device) > last, -torch.inf).softmax(-1)
        terms = dout[rows] * torch.einsum("gnt,td->ngd", weights, v)
        dscores = weights * (torch.einsum("ngd,td->gnt", dout[rows], v) - terms.sum(-1).T[..., None]) * scale
        exact.dq[rows] = torch.einsum("gnt,td->ngd", dscores, k)
        exact.dk.add_(torch.einsum("gnt,ngd->td", dscores, q[rows]))
        exact.dv.add_(torch.einsum("gnt,ngd->td", weights, dout[rows]))
        off = torch.finfo(given.dtype).eps * scale * terms.norm(dim=-1)  # the error of delta, times scale, [n, group]
        moved.dq[rows] = off * torch.einsum("gnt,td->ngd", weights, k).norm(dim=-1)
        moved.dk.add_(torch.einsum("gnt,ng->t", weights.square(), (off * q[rows].norm(dim=-1)).square()))
    return exact, moved._replace(dk=moved.dk.sqrt())


def chunks(rows: int) -> Iterator[slice]:
    """The rows in slices of at most CHUNK_ROWS."""
    return (slice(begin, min(begin + CHUNK_ROWS, rows)) for begin in range(0, rows, CHUNK_ROWS))
