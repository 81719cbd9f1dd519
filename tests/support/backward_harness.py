"""Attention's backward on each backend, and a reference by torch.autograd in f64 that shares nothing with the package."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import cute_kernels as ck
from tests.support.attention_harness import dense, scores_of, visible
from tests.support.backward_cases import BackwardInputs, Case
from tests.support.harness import device_of
from tests.support.inputs import NAN
from tests.support.tolerance import check_rows

F32_TERMS = 2.0**-20  # the error, relative to its terms, that f32 products leave in a sum that cancels


@dataclass(frozen=True)
class Expected:
    """Gradients of q [total_q, num_heads, head_dim], of the caches as they are given, and of the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor


def select(one: Case, backend: str, **preference: object) -> ck.PagedAttentionBackwardPlan:
    """A plan forced onto `backend`."""
    preferred = ck.PlanPreference(arch=backend, **preference)
    return ck.PagedAttentionBackwardPlan.select(one.descriptor(), device_of(backend), preferred)


def run(
    plan: ck.PagedAttentionBackwardPlan, inputs: BackwardInputs, fill: float = NAN, **changes: object
) -> ck.AttentionGradients:
    """The gradients of a run, prefilled with `fill`; checks that the workspace is clean."""
    q, k, v = inputs.attention.q, inputs.attention.k, inputs.attention.v
    made = {"dq": torch.full_like(q, fill), "dk_cache": torch.full_like(k, fill), "dv_cache": torch.full_like(v, fill)}
    if inputs.case.attention.sinks:
        made["dsinks"] = torch.full((q.shape[-2],), fill, device=q.device)
    workspace = plan.new_workspace()
    result = plan.run(**{**inputs.given, **made, "workspace": workspace, **changes})
    assert not workspace.any(), "a launch leaves the workspace as it found it"
    return result


def tokens(inputs: BackwardInputs, cache: Tensor, request: int) -> Tensor:
    """A request's tokens in a cache as a run is given it, [num_kv_heads, length, head_dim], differentiable."""
    one, length = inputs.case.attention, inputs.case.attention.cache.lengths[request]
    if one.table == "packed":
        begin = sum(one.cache.lengths[:request])
        return cache[begin : begin + length].transpose(0, 1)
    cache = cache.transpose(1, 2) if one.cache.order == "NHD" else cache
    if one.table in ("lengths", "none"):
        return cache[request, :, :length]
    pages = cache[inputs.attention.kv.rows[request].long()].transpose(0, 1)
    return pages.reshape(pages.shape[0], -1, pages.shape[3])[:, :length]


def expected(inputs: BackwardInputs) -> tuple[Expected, Expected, Expected]:
    """(f64; PyTorch in f32 on the operands as they are, rounded once; the error that f32 leaves in sums).

    The second uses the rounded out and lse that a backward is given.
    """
    attention, one = inputs.attention, inputs.case.attention
    group = one.cache.num_heads // one.cache.num_kv_heads
    rows, dtype = attention.rows, attention.q.dtype
    flat = {name: t.flatten(0, 1) if one.uniform else t for name, t in (("dout", inputs.dout), ("out", inputs.out))}
    exact = [t.detach().double().requires_grad_() for t in (rows, attention.k, attention.v)]
    same = [t.detach().float().requires_grad_() for t in (rows, attention.k, attention.v)]  # no f32 operand is a leaf
    terms = [torch.zeros_like(t, dtype=torch.float64).requires_grad_() for t in (rows, attention.k, attention.v)]
    sinks = inputs.extras["sinks"].double() if one.sinks else torch.zeros(rows.shape[1], device=rows.device)
    sinks.requires_grad_()
    own = replace(attention, extras={**attention.extras, "sinks": sinks}) if one.sinks else attention
    dsinks = [torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device) for _ in range(2)]
    total, surrogate, bound = (torch.zeros((), dtype=torch.float64, device=rows.device) for _ in range(3))
    for b, n in enumerate(one.q_lens):
        if not n:
            continue
        part, seen = slice(one.begins[b], one.begins[b] + n), visible(attention, b)
        dout, out, lse = flat["dout"][part].float(), flat["out"][part].float(), inputs.lse[part]
        lse = (lse * math.log(2) if one.cache.lse_base == "2" else lse).T[..., None]
        made, _ = dense(own, b, exact[0][part], *(tokens(inputs, t, b) for t in exact[1:]), seen)
        total = total + (made * dout.double()).sum()
        q, k, v = same[0][part], *(tokens(inputs, t, b) for t in same[1:])
        scores = scores_of(attention, b, q, k, seen)
        weights = torch.exp(scores.detach() - lse.where(lse > -math.inf, 0.0))
        delta = (dout * out).sum(-1).T[..., None]
        dp = torch.einsum("nhd,htd->hnt", dout, v.detach().repeat_interleave(group, 0))
        dscores = weights * (dp - delta)
        surrogate = surrogate + (dscores.where(seen, 0.0).double() * scores.where(seen, 0.0).double()).sum()
        surrogate = surrogate + torch.einsum("hnt,nhd,htd->", weights, dout, v.repeat_interleave(group, 0)).double()
        bound = bound + _terms(inputs, b, part, terms, weights, dout, out, [t.detach() for t in (q, k, v)])
        if one.sinks:
            share = torch.exp(sinks.detach().view(-1, 1) - lse[..., 0])
            dsinks[0] -= (share * delta[..., 0].double()).sum(1)
            dsinks[1] += (share * (dout.norm(dim=-1) * out.norm(dim=-1)).T).sum(1)
    grads = gradients_of(total, [*exact, *([sinks] if one.sinks else [])])
    found = Expected(*grads[:3], grads[3] if one.sinks else dsinks[0])
    others = Expected(*(t.to(dtype) for t in gradients_of(surrogate, same)), dsinks[0])
    return found, others, Expected(*(F32_TERMS * t for t in gradients_of(bound, terms)), F32_TERMS * dsinks[1])


def gradients_of(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """A scalar's gradients; zeros for leaves that it does not depend on."""
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def _terms(
    inputs: BackwardInputs, b: int, part: slice, terms: list[Tensor], weights: Tensor, dout: Tensor, out: Tensor, values: list
) -> Tensor:
    """A scalar whose gradient has, in each column, the sum of the 2-norms of the terms that make a row of a gradient."""
    one = inputs.case.attention
    group = one.cache.num_heads // one.cache.num_kv_heads
    q, k, v = (t.double().norm(dim=-1) for t in values)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    size = dout.double().norm(dim=-1).T[..., None]
    dscores = weights.double() * size * (v[:, None] + out.double().norm(dim=-1).T[..., None]) * one.cache.scale
    dscores = dscores.nan_to_num(0.0, 0.0, 0.0)
    of_k, of_v = (tokens(inputs, t, b).repeat_interleave(group, 0) for t in terms[1:])
    found = torch.einsum("hnt,ht,nhd->", dscores, k, terms[0][part])
    found = found + torch.einsum("hnt,hn,htd->", dscores, q.T, of_k)
    return found + torch.einsum("hnt,hn,htd->", weights.double(), size[..., 0], of_v)


def assert_close(inputs: BackwardInputs, result: ck.AttentionGradients, fill: float = NAN) -> None:
    """Asserts that every gradient row is as near f64 as tolerance.py asks; unwritten rows hold `fill`."""
    one = inputs.case.attention
    exact, same, floor = expected(inputs)
    total = sum(one.q_lens)
    dq = result.dq.flatten(0, 1) if one.uniform else result.dq
    if total:
        rows = slice(0, total)
        check_rows(dq[rows], exact.dq[rows], same.dq[rows], range(total), floor.dq[rows, :, 0])
    assert_filled(dq[total:], fill)
    read = read_tokens(inputs)
    for name in ("dk", "dv"):
        got, want, others, least = getattr(result, f"{name}_cache"), *(getattr(e, name) for e in (exact, same, floor))
        got, want, others, least = (in_rows(inputs, t) for t in (got, want, others, least))
        check_rows(got[read], want[read], others[read], read.nonzero()[:, 0].tolist(), least[read][..., 0])
        rest = got[~read]
        assert_filled(rest, fill if inputs.case.unread == "untouched" else 0.0)
    if one.sinks:
        gap, others = (result.dsinks.double() - exact.dsinks).abs(), (same.dsinks.double() - exact.dsinks).abs()
        assert (gap <= 1.25 * others + floor.dsinks * 2).all(), (gap, others, floor.dsinks)


def in_rows(inputs: BackwardInputs, cache: Tensor) -> Tensor:
    """A cache, as a run is given it, as a view [tokens of the cache, num_kv_heads, head_dim]."""
    one = inputs.case.attention
    if one.table != "packed":
        cache = (cache if one.cache.order == "NHD" else cache.transpose(1, 2)).flatten(0, 1)
    return cache


def read_tokens(inputs: BackwardInputs) -> Tensor:
    """bool [tokens of the cache]: the tokens from the first to the last key that some query row of a request may see."""
    one, cache = inputs.case.attention, inputs.attention.k
    marks = torch.zeros_like(cache, dtype=torch.float64).requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=cache.device)
    for b, n in enumerate(one.q_lens):
        seen = visible(inputs.attention, b).any(0).nonzero()
        if n and len(seen):
            first, last = int(seen[0]), int(seen[-1])
            total = total + tokens(inputs, marks, b)[:, first : last + 1].sum()
    (found,) = gradients_of(total, [marks])
    return in_rows(inputs, found)[:, 0, 0] > 0


def assert_filled(tensor: Tensor, fill: float) -> None:
    """Asserts that every element is `fill`."""
    expected = tensor.isnan() if math.isnan(fill) else tensor == fill
    assert expected.all(), f"{(~expected).sum()} of {expected.numel()} elements are not {fill}"


def bits(result: ck.AttentionGradients) -> list[Tensor]:
    """The gradients' bits."""
    return [t.contiguous().view(torch.uint8).clone() for t in result if t is not None]


def assert_bitwise(got: list[Tensor], wanted: list[Tensor]) -> None:
    """Asserts that the tensors are equal bit for bit."""
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
