"""Attention with several query rows on each backend, and a dense f64 reference that shares nothing with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import cute_kernels as ck
from tests.support.attention_cases import AttentionInputs, Case
from tests.support.harness import assert_bitwise, device_of
from tests.support.inputs import NAN
from tests.support.tolerance import Tolerance, check_rows, check_states

Result = tuple[Tensor, Tensor]


def select(case: Case, backend: str, **preference: object) -> ck.PagedAttentionPlan:
    """A plan forced onto `backend`."""
    return ck.PagedAttentionPlan.select(case.descriptor(), device_of(backend), ck.PlanPreference(arch=backend, **preference))


def run(plan: ck.PagedAttentionPlan, inputs: AttentionInputs, fill: float = NAN, **changes: object) -> Result:
    """(out, lse) as [total_q, ...], prefilled with `fill`; checks that the workspace is clean. changes: replaced operands."""
    q = inputs.q
    out = torch.full_like(q, fill)  # like q also in its strides
    rows = q.shape[0] * q.shape[1] if inputs.case.uniform else len(q)
    lse = torch.full((rows, q.shape[-2]), fill, device=q.device)
    workspace = plan.new_workspace()
    given = {"q": q, "k_cache": inputs.k, "v_cache": inputs.v, "page_table": inputs.table, **inputs.scales, **inputs.extras}
    stream = changes.get("stream")
    if isinstance(stream, torch.cuda.Stream):
        stream.wait_stream(torch.cuda.current_stream())
    plan.run(**{**given, **changes}, out=out, lse=lse, workspace=workspace)
    if isinstance(stream, torch.cuda.Stream):
        torch.cuda.current_stream().wait_stream(stream)
    assert not workspace.any(), "a launch leaves the workspace as it found it"
    return (out.flatten(0, 1) if inputs.case.uniform else out), lse


def tensors_of(inputs: AttentionInputs) -> list[Tensor]:
    """All tensors that a run reads."""
    scales = [scale for scale in inputs.scales.values() if scale is not None]
    tables = [operand for operand in inputs.table.operands if operand is not None]
    return [inputs.q, inputs.k, inputs.v, *tables, *scales, *inputs.extras.values()]


def visible(inputs: AttentionInputs, request: int) -> Tensor:
    """bool [n, keys]: which keys of a request each of its query rows sees, computed from the definition."""
    case = inputs.case
    n, keys, begin = case.q_lens[request], case.cache.lengths[request], case.begins[request]
    seen = torch.zeros(n, keys, dtype=torch.bool)
    words = inputs.extras["tree_mask"].tolist() if case.tree else []
    for i in range(n):
        p = position(case, request, i)
        for t in range(keys):
            new = t - (keys - n)  # the key's index among the new tokens
            if case.tree and new >= 0:
                shown = bool(words[begin + i][new // 32] >> (new % 32) & 1)
            else:
                shown = case.causal is None or case.tree or t <= p
            if case.window_left is not None:
                shown = shown and t >= p - case.window_left
            if case.window_right is not None:
                shown = shown and t <= p + case.window_right
            seen[i, t] = shown
    return seen.to(inputs.q.device)


def position(case: Case, request: int, row: int) -> int:
    """The position of a query row."""
    return row if case.causal == "top_left" else case.cache.lengths[request] - case.q_lens[request] + row


def attend(inputs: AttentionInputs, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """(out f64, lse f64, out computed in f32 from q's dtype and rounded to it) of a request's rows [n, num_heads, ...]."""
    case, dtype = inputs.case, inputs.q.dtype
    begin, n = case.begins[request], case.q_lens[request]
    q, seen = inputs.rows[begin : begin + n], visible(inputs, request)
    k, v = inputs.kv.real("k", request), inputs.kv.real("v", request)
    exact, lse = dense(inputs, request, q.double(), k, v, seen)
    same, _ = dense(inputs, request, q.float(), k.to(dtype).float(), v.to(dtype).float(), seen)
    return exact, lse / math.log(2) if case.cache.lse_base == "2" else lse, same.to(dtype)


def dense(inputs: AttentionInputs, request: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Result:
    """Softmax over all keys at once, in q's dtype: hidden keys weigh 0. q [n, num_heads, head_dim], k and v [kv, t, d]."""
    case = inputs.case
    group, keys = case.cache.num_heads // case.cache.num_kv_heads, seen.shape[1]
    scores = scores_of(inputs, request, q, k, seen)
    top = scores.amax(-1) if keys else scores.new_full(scores.shape[:2], -math.inf)
    sinks = inputs.extras["sinks"].to(q.dtype).view(-1, 1) if case.sinks else None
    if sinks is not None:
        top = torch.maximum(top, sinks)
    finite = top.where(top > -math.inf, 0.0)
    weights = torch.exp(scores - finite[..., None])
    total = weights.sum(-1) + (torch.exp(sinks - finite) if sinks is not None else 0.0)
    out = torch.einsum("hnt,htd->hnd", weights, v.repeat_interleave(group, 0)) / total.where(total > 0, 1.0)[..., None]
    return out.transpose(0, 1), (finite + torch.log(total)).T


def scores_of(inputs: AttentionInputs, request: int, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Scores [num_heads, n, t] in the dtype of q [n, num_heads, head_dim], -inf for hidden keys. k: [kv, t, d]."""
    case, (n, keys) = inputs.case, seen.shape
    group = case.cache.num_heads // case.cache.num_kv_heads
    scores = torch.einsum("nhd,htd->hnt", q, k.repeat_interleave(group, 0)) * case.cache.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi:
        at = torch.tensor([position(case, request, i) for i in range(n)], device=q.device).view(n, 1)
        distance = (at - torch.arange(keys, device=q.device)).abs()
        scores = scores - inputs.extras["alibi_slopes"].to(q.dtype).view(-1, 1, 1) * distance
    return scores.masked_fill(~seen, -math.inf)


def assert_close(
    inputs: AttentionInputs, result: Result, requests: list[int] | None = None, tolerance: Tolerance | None = None
) -> None:
    """Asserts that every query row and head of these requests is as near f64 as tolerance.py asks; (0, -inf) without keys."""
    case = inputs.case
    requests = [b for b in (range(case.batch) if requests is None else requests) if case.q_lens[b]]
    rows = [case.begins[b] + i for b in requests for i in range(case.q_lens[b])]
    if rows:
        exact, lse, same = (torch.cat(t) for t in zip(*(attend(inputs, b) for b in requests), strict=True))
        check_states((result[0][rows], result[1][rows]), (exact, lse), same, rows, tolerance)


def assert_every_row(plan: ck.PagedAttentionPlan, inputs: AttentionInputs, again: int = 1) -> None:
    """Asserts that a run is right row by row, with NaN in all other memory, and has the same bits in `again` more runs."""
    result = run(plan, inputs)
    assert_close(inputs, result)
    assert_padding(inputs, result, NAN)
    for _ in range(again):
        assert_bitwise(run(plan, inputs), result)


def assert_padding(inputs: AttentionInputs, result: Result, fill: float) -> None:
    """Asserts that rows of no request still hold `fill`."""
    total = sum(inputs.case.q_lens)
    for tensor in result:
        rest = tensor[total:]
        assert torch.equal(rest.isnan(), torch.full_like(rest, math.isnan(fill), dtype=torch.bool))
        assert math.isnan(fill) or (rest == fill).all()


def spread_values(inputs: AttentionInputs) -> None:
    """Makes V's columns multiples of powers of two, another one for each 32, and gives two columns an infinity and a NaN.

    A request's first key, which all its query rows see, has them. V has 16 bits, in pages [pages, heads, slots, head_dim].
    """
    powers = torch.tensor([2.0**100, 1.0, 2.0**-100, 2.0**50], dtype=inputs.v.dtype, device=inputs.v.device)
    inputs.v.mul_(powers.repeat_interleave(32)[: inputs.v.shape[-1]])
    for pages in inputs.kv.rows:
        if len(pages):
            inputs.v[int(pages[0]), :, 0, 5], inputs.v[int(pages[0]), :, 0, 40] = torch.inf, torch.nan


def assert_close_by_columns(inputs: AttentionInputs, result: Result, width: int = 32) -> None:
    """assert_close of `width` columns at a time. Columns that are not finite in f64 are so in the result."""
    case = inputs.case
    for request in (b for b in range(case.batch) if case.q_lens[b] and case.cache.lengths[b]):
        rows = range(case.begins[request], case.begins[request] + case.q_lens[request])
        exact, _, same = attend(inputs, request)
        found, finite = result[0][rows.start : rows.stop], exact.isfinite()
        assert torch.equal(found.double().where(~finite, 0.0).nan_to_num(7.0), exact.where(~finite, 0.0).nan_to_num(7.0))
        parts = (tensor.where(finite, 0.0).split(width, -1) for tensor in (found, exact, same))
        for part in zip(*parts, strict=True):
            check_rows(*part, rows)
