"""The backward of attention in plain PyTorch, query row by query row, without autograd. In f32 it is also the CPU variant.

With P = exp(S - lse), dP = dout V^T and delta = rowsum(dout * out): dS = P (dP - delta), times 1 - tanh^2 under a soft cap;
dV += P^T dout, dQ = dS K and dK += dS^T Q, both times softmax_scale; a sink's gradient is -exp(sink - lse) delta. As in
attention/reference.py: which keys a query row sees, and how bad metadata is masked.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.reference import Keys, Place, Scoring, find_tokens, first_bad_row, real_values, scores_of, seen_by
from ..attention.requests import key_lengths, query_rows, seen_keys
from ..config.backward import MOST_EXPONENT
from ..config.decode import LOG2_E
from ..config.modifiers import QueryForm
from ..kv.faults import Span, record
from ..kv.page_table import PageTable
from ..planning.variants import Launch
from .checks import Operands
from .descriptor import PagedAttentionBackwardDescriptor


class Sums(NamedTuple):
    """Sums of the gradients of the caches and of the sinks, in the reference's dtype; read: which tokens are read."""

    dk: Tensor
    dv: Tensor
    dsinks: Tensor
    read: Tensor


class RowGradients(NamedTuple):
    """One query row's gradients: dq [num_heads, head_dim], dk and dv [keys, num_kv_heads, head_dim], dsinks [num_heads]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor


def backward(
    operands: Operands,
    page_table: PageTable,
    scoring: Scoring,
    query: QueryForm,
    max_q_len: int,
    keep_unread: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Span:
    """Writes dq of every query row, dk_cache, dv_cache and dsinks, computed in `dtype`; operands are as a kernel takes them.

    keep_unread: whether tokens that no query row may see keep their gradient's bits, or become 0. Returns the keys that the
    query rows of each request may see.
    """
    rows = query_rows(query, operands.q, operands.qo_indptr, max_q_len)
    lengths = key_lengths(page_table, operands.k_cache, rows)
    span = seen_keys(scoring.modifiers, scoring.window_left, scoring.window_right, rows.q_lens, lengths)
    cache, heads = operands.k_cache, operands.q.shape[-2]
    dk, dv = (torch.zeros_like(cache, dtype=dtype, memory_format=torch.contiguous_format) for _ in range(2))
    read = torch.zeros(cache.shape[0], cache.shape[2], dtype=torch.bool, device=cache.device)
    sums = Sums(dk, dv, torch.zeros(heads, dtype=dtype, device=cache.device), read)
    facts = zip(*(t.tolist() for t in (*rows, lengths, *span)), strict=True)
    for request, (begin, count, length, first, past) in enumerate(facts):
        if count:
            place = find_tokens(cache, page_table, request, torch.arange(first, past, device=cache.device))
            mine: Any = request if query == "uniform" else slice(begin, begin + count)
            _add_request(operands, page_table, scoring, mine, (count, length), place, sums, dtype)
    _store(operands, sums, keep_unread)
    return span


def _add_request(
    operands: Operands,
    page_table: PageTable,
    scoring: Scoring,
    mine: Any,
    extent: tuple[int, int],
    place: Place,
    sums: Sums,
    dtype: torch.dtype,
) -> None:
    """Writes a request's dq, and adds its rows' gradients to the sums. mine: its part of q; extent: its query rows and keys."""
    count, length = extent
    values = (real_values(cache, None, page_table, place, dtype) for cache in (operands.k_cache, operands.v_cache))
    keys = Keys(place.position, *values)
    dk, dv = torch.zeros_like(keys.k), torch.zeros_like(keys.v)
    rows = zip(*(getattr(operands, name)[mine] for name in ("q", "dout", "out", "lse", "dq")), strict=True)
    for row, (q, dout, out, lse, dq) in enumerate(rows):
        position = row + (0 if scoring.modifiers.causal == "top_left" else length - count)
        seen = seen_by(scoring, keys, position, length - count, None) if scoring.modifiers.masks else keys
        at = torch.searchsorted(keys.position, seen.position)
        made = row_gradients(q, dout, out, lse, seen, position, scoring)
        dq.copy_(made.dq)
        dk[at] += made.dk
        dv[at] += made.dv
        sums.dsinks.add_(made.dsinks)
    for total, own in ((sums.dk, dk), (sums.dv, dv)):
        total.transpose(1, 2).index_put_((place.page, place.slot), own, accumulate=True)
    sums.read[place.page, place.slot] = True


def row_gradients(q: Tensor, dout: Tensor, out: Tensor, lse: Tensor, keys: Keys, position: int, scoring: Scoring) -> RowGradients:
    """A query row's gradients over the keys that it sees, in `keys`' dtype. q, dout, out [num_heads, head_dim], lse [num_heads].

    With the lse of the same run a weight passes 1 by no more than that lse's rounding. With the lse of another run a weight is at
    most 2. With an lse of -inf, which a row without keys has, a weight is 0.
    """
    dtype, (num_heads, head_dim) = keys.k.dtype, q.shape
    num_kv_heads = keys.k.shape[1]
    lse = lse.to(dtype).where(lse != -math.inf, math.inf) / (LOG2_E if scoring.lse_base == "2" else 1.0)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    sinks = torch.zeros_like(delta)
    if scoring.sinks is not None:
        sinks = -_weight(scoring.sinks.to(dtype) - lse) * delta
    if not len(keys.position):
        return RowGradients(torch.zeros_like(q, dtype=dtype), keys.k, keys.v, sinks)
    grouped = (num_kv_heads, num_heads // num_kv_heads)
    weights = _weight(scores_of(q, keys, position, scoring) - lse.view(*grouped, 1))
    queries, douts = (t.to(dtype).reshape(*grouped, head_dim) for t in (q, dout))
    dscores = weights * (douts @ keys.v.permute(1, 2, 0) - delta.view(*grouped, 1)) * scoring.softmax_scale
    if scoring.modifiers.softcap:
        scores = queries @ keys.k.permute(1, 2, 0) * scoring.softmax_scale
        dscores = dscores * (1 - torch.tanh(scores / scoring.softcap) ** 2)
    dq = (dscores @ keys.k.transpose(0, 1)).reshape(num_heads, head_dim)
    dk, dv = ((part.mT @ rows).transpose(0, 1) for part, rows in ((dscores, queries), (weights, douts)))
    return RowGradients(dq, dk, dv, sinks)


def _weight(exponent: Tensor) -> Tensor:
    """Returns exp(exponent), but at most 2, as a GPU does, so that finite operands give finite sums."""
    return torch.exp(exponent.clamp(max=MOST_EXPONENT / LOG2_E))


def _store(operands: Operands, sums: Sums, keep_unread: bool) -> None:
    """Rounds the sums into the gradients."""
    read = sums.read[:, None, :, None]
    for target, total in ((operands.dk_cache, sums.dk), (operands.dv_cache, sums.dv)):
        made = total.to(target.dtype)
        target.copy_(torch.where(read, made, target) if keep_unread else made)
    if operands.dsinks is not None:
        operands.dsinks.copy_(sums.dsinks)


def cpu_variant(descriptor: PagedAttentionBackwardDescriptor) -> Launch:
    """The CPU variant, called as a compiled kernel is, but with the status words themselves, not their address."""
    d, problem = descriptor.attention, descriptor.problem

    def launch(*arguments: Any) -> None:
        tensors, status = arguments[: len(Operands._fields) - 1], arguments[-1]
        operands = Operands._make((*tensors, None))
        table = PageTable(d.table_format, (operands.table0, operands.table1, operands.table2))
        masks = (problem.modifiers, *d.launch_values)
        scoring = Scoring(d.scale, d.lse_base, *masks, operands.alibi_slopes, operands.sinks)
        keep = descriptor.unread == "untouched"
        span = backward(operands, table, scoring, problem.query, problem.max_q_len, keep)
        fault = first_bad_row(operands.q, operands.k_cache, table, span, operands.qo_indptr, problem.max_q_len)
        if fault is not None:
            record(status, fault)

    return launch


def spans_of(descriptor: PagedAttentionBackwardDescriptor, operands: Operands, table: PageTable) -> Span:
    """The keys that the query rows of each request may see. operands: as a kernel takes them."""
    problem = descriptor.problem
    rows = query_rows(problem.query, operands.q, operands.qo_indptr, problem.max_q_len)
    lengths = key_lengths(table, operands.k_cache, rows)
    return seen_keys(problem.modifiers, *descriptor.attention.launch_values[:2], rows.q_lens, lengths)
