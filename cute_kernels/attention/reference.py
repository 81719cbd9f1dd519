"""The semantics of attention in plain PyTorch, query row by query row; also the CPU variant, in f32, or in f64 for f32 q.

A query row attends to the keys t < length that its masks show, if the table holds their page and the pool has that page. Only
keys that some query row of their request may see are looked up, and a row's result is made only of keys that the row itself
sees: other bytes of a cache and other tokens' scales cannot reach it, whatever they hold. The real value of an element is what
is stored times its scale, computed in the reference's dtype. A row without keys gives out = 0 and lse = -inf, or its sink.

Bad metadata is masked request by request. Keys of a page outside the pool are left out. A negative length counts as 0, a length
past what the row's part of the table holds as that capacity. A row whose indptr is negative, decreasing or past what it indexes
is empty; by a bad qo_indptr, a request has no query rows. Of more than max_q_len query rows, only the first max_q_len count.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks.fields import MAX_EXTENT
from ..config.decode import LOG2_E
from ..config.modifiers import UNMODIFIED, Modifiers, QueryForm
from ..config.problem import LseBase
from ..kv.faults import Fault, Span, first_fault, first_query_fault, record
from ..kv.page_table import PAGED, PageTable, held
from ..planning.variants import Launch
from .descriptors import TREE_WORD_BITS, DecodeProblem
from .operands import NO_EXTRAS, Extras, Operands
from .requests import QueryRows, key_lengths, query_rows, seen_keys


class Scoring(NamedTuple):
    """What a launch does with scores: which modifiers there are, and their values."""

    softmax_scale: float
    lse_base: LseBase = "e"
    modifiers: Modifiers = UNMODIFIED
    window_left: int = 0
    window_right: int = 0
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


class Keys(NamedTuple):
    """Keys of one request: their positions [tokens], and the real K and V [tokens, num_kv_heads, head_dim]."""

    position: Tensor
    k: Tensor
    v: Tensor

    def part(self, which: slice | Tensor) -> Keys:
        """The keys of a slice or of a mask [tokens]."""
        return Keys(*(tensor[which] for tensor in self))


def attention(
    operands: Operands,
    page_table: PageTable,
    scoring: Scoring,
    query: QueryForm = "one",
    max_q_len: int = 1,
    extras: Extras = NO_EXTRAS,
    dtype: torch.dtype = torch.float32,
) -> tuple[QueryRows, Span]:
    """Writes out and lse of every query row of every request, computed in `dtype`; operands are as a kernel takes them.

    q, out: [batch, num_heads, head_dim]; uniform [batch, q_len, num_heads, head_dim]; ragged [total_q, num_heads, head_dim].
    lse: the same without head_dim; tree_mask: the words of a query row in place of the last two axes. Caches: pages [num_pages,
    num_kv_heads, page_size, head_dim]; [batch, num_kv_heads, max_len, head_dim]; packed [1, num_kv_heads, total_k, head_dim];
    fp8 as fp8. Returns which query rows there are, and the keys that they may see.
    """
    q, k = operands.q, operands.k_cache
    rows = query_rows(query, q, extras.qo_indptr, max_q_len)
    lengths = key_lengths(page_table, k, rows)
    span = seen_keys(scoring.modifiers, scoring.window_left, scoring.window_right, rows.q_lens, lengths)
    facts = zip(*(t.tolist() for t in (*rows, lengths, *span)), strict=True)
    for request, (begin, count, length, first, past) in enumerate(facts):
        if not count:
            continue
        keys = keys_of(operands, page_table, request, torch.arange(first, past, device=q.device), dtype)
        mine: Any = request if query == "uniform" else slice(begin, begin + count)
        words = [None] * count if extras.tree_mask is None else extras.tree_mask[mine]
        outs, lses = operands.out[mine], operands.lse[mine]
        for row, (query_row, bits) in enumerate(zip(q[mine], words, strict=True)):
            position = row + (0 if scoring.modifiers.causal == "top_left" else length - count)
            seen = seen_by(scoring, keys, position, length - count, bits) if scoring.modifiers.masks else keys
            outs[row], lses[row] = attend(query_row, seen, position, scoring)
    return rows, span


def attend(q: Tensor, keys: Keys, position: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """One query row over the keys that it sees, in their dtype: q [num_heads, head_dim] -> out like q, lse [num_heads]."""
    dtype, (num_heads, head_dim) = keys.k.dtype, q.shape
    tokens, num_kv_heads, _ = keys.k.shape
    units = LOG2_E if scoring.lse_base == "2" else 1.0
    sinks = None if scoring.sinks is None else scoring.sinks.to(dtype)
    if tokens == 0:
        lse = q.new_full((num_heads,), -math.inf, dtype=dtype) if sinks is None else sinks * units
        return q.new_zeros((num_heads, head_dim), dtype=dtype), lse
    scores = scores_of(q, keys, position, scoring)
    if sinks is not None:  # one more score, of a token whose value is 0
        scores = torch.cat([scores, sinks.view(num_kv_heads, -1, 1)], -1)
    out = scores.softmax(-1)[..., :tokens] @ keys.v.transpose(0, 1)
    return out.reshape(num_heads, head_dim), (scores.logsumexp(-1) * units).reshape(num_heads)


def scores_of(q: Tensor, keys: Keys, position: int, scoring: Scoring) -> Tensor:
    """Scaled and modified scores of a query row [num_heads, head_dim]: [num_kv_heads, group_size, tokens] in the keys' dtype."""
    dtype, (num_heads, head_dim) = keys.k.dtype, q.shape
    num_kv_heads = keys.k.shape[1]
    grouped = q.to(dtype).reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ keys.k.permute(1, 2, 0) * scoring.softmax_scale
    if scoring.modifiers.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.alibi_slopes is not None:
        slopes = scoring.alibi_slopes.to(dtype).view(num_kv_heads, -1, 1)
        scores = scores - slopes * (position - keys.position).abs().to(dtype)
    return scores


def decode_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: PageTable,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    lse_base: LseBase = "e",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of one query row per request, computed in `dtype`.

    q [batch, num_heads, head_dim]; caches [num_pages, num_kv_heads, page_size, head_dim] (pass an NHD cache as
    `cache.transpose(1, 2)`, fp8 bytes viewed as fp8). Scales: [] or [1], [num_kv_heads], or [num_pages, page_size,
    num_kv_heads]. Returns out [batch, num_heads, head_dim] and lse [batch, num_heads], both of `dtype`.
    """
    out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)
    scoring = Scoring(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, lse_base)
    attention(Operands(q, k_cache, v_cache, None, None, None, k_scale, v_scale, out, lse, None), page_table, scoring, dtype=dtype)
    return out, lse


def decode_contiguous(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> tuple[Tensor, Tensor]:
    """As decode_paged, over k and v [batch, num_kv_heads, seq_len, head_dim]; token scales: [batch, num_kv_heads, seq_len]."""
    return decode_paged(q, k, v, PageTable.whole(), **rules)


def cpu_variant(problem: DecodeProblem) -> Launch:
    """The CPU variant for `problem`, called as a compiled kernel is, but with the status words themselves, not their address.

    It needs no workspace.
    """
    k_dtype, v_dtype = problem.kv_dtype.torch_dtype, problem.v_dtype.torch_dtype
    num_operands = len(Operands._fields)

    def launch(*arguments: Any) -> None:
        operands, rest = Operands(*arguments[:num_operands]), arguments[num_operands:]
        extras = NO_EXTRAS
        if not problem.plain:
            extras, rest = Extras(*rest[: len(NO_EXTRAS)]), rest[len(NO_EXTRAS) :]
        softmax_scale, _, status, *values = rest
        _, window_left, window_right, softcap = values or (1, 0, 0, 0.0)
        masks = (problem.modifiers, window_left, window_right, softcap)
        scoring = Scoring(softmax_scale, problem.lse_base, *masks, extras.alibi_slopes, extras.sinks)
        table = PageTable(problem.table_format, (operands.table0, operands.table1, operands.table2))
        k, v = operands.k_cache.view(k_dtype), operands.v_cache.view(v_dtype)  # fp8 comes as bytes
        operands = operands._replace(k_cache=k, v_cache=v)
        dtype = torch.float64 if operands.q.dtype == torch.float32 else torch.float32
        _, span = attention(operands, table, scoring, problem.query, problem.max_q_len, extras, dtype)
        fault = first_bad_row(operands.q, operands.k_cache, table, span, extras.qo_indptr, problem.max_q_len)
        if fault is not None:
            record(status, fault)

    return launch


def first_bad_row(
    q: Tensor, k_cache: Tensor, table: PageTable, span: Span, qo_indptr: Tensor | None, max_q_len: int
) -> Fault | None:
    """The first request whose metadata breaks a rule; synchronises. q, k_cache: as a kernel takes them."""
    fault = None if qo_indptr is None else first_query_fault(qo_indptr, len(q), max_q_len)
    if fault is None and table.format != "none":
        fault = first_fault(table, k_cache.shape[2], k_cache.shape[0], span=span)
    return fault


def seen_by(scoring: Scoring, keys: Keys, position: int, old: int, tree: Tensor | None) -> Keys:
    """The keys of a request that the query row at `position` sees, out of `keys`.

    old: how many keys are before the request's new tokens. tree: the row's words of the tree mask.
    """
    modifiers = scoring.modifiers
    least, most = 0, MAX_EXTENT
    if modifiers.window_left:
        least = position - scoring.window_left
    if modifiers.window_right:
        most = position + scoring.window_right
    if modifiers.causal != "none" and tree is None:
        most = position
    ends = torch.tensor([least, most + 1], device=keys.position.device)
    begin, end = torch.searchsorted(keys.position, ends).tolist()
    keys = keys.part(slice(begin, end))
    if tree is None:
        return keys
    new = (keys.position - old).clamp(min=0)
    return keys.part((keys.position < old) | ((tree[new // TREE_WORD_BITS] >> (new % TREE_WORD_BITS)) & 1).bool())


class Place(NamedTuple):
    """Where tokens of a request are in a cache, each [tokens]: positions in the row, pages or rows of the cache, slots there."""

    position: Tensor
    page: Tensor
    slot: Tensor


def find_tokens(k: Tensor, page_table: PageTable, request: int, tokens: Tensor) -> Place:
    """Where the tokens of a request at these positions are, except on pages that the pool lacks. k: as a kernel takes it."""
    if page_table.format in PAGED:
        pages, slot = _pages(page_table, request)[tokens // k.shape[2]].long(), tokens % k.shape[2]
        known = (pages >= 0) & (pages < len(k))
        return Place(tokens[known], pages[known], slot[known])
    if page_table.format == "packed":
        return Place(tokens, torch.zeros_like(tokens), tokens + held(page_table, 0)[request])
    return Place(tokens, torch.full_like(tokens, request), tokens)


def real_values(cache: Tensor, scale: Tensor | None, page_table: PageTable, place: Place, dtype: torch.dtype) -> Tensor:
    """The real values of the tokens at `place`, [tokens, num_kv_heads, head_dim]: what is stored, times its scale."""
    stored = cache[place.page, :, place.slot].to(dtype)
    if scale is None:
        return stored
    if scale.dim() == 3:
        scale = scale[place.page, place.slot] if page_table.format in PAGED else scale[place.page, :, place.slot]
    return stored * scale.to(dtype)[..., None]


def keys_of(operands: Operands, page_table: PageTable, request: int, tokens: Tensor, dtype: torch.dtype) -> Keys:
    """The keys of a request at these positions."""
    place = find_tokens(operands.k_cache, page_table, request, tokens)
    stored = (operands.k_cache, operands.k_scale), (operands.v_cache, operands.v_scale)
    return Keys(place.position, *(real_values(cache, scale, page_table, place, dtype) for cache, scale in stored))


def _pages(page_table: PageTable, request: int) -> Tensor:
    """The page ids of a row, from its first page on; entries past the row's length are no page ids."""
    if page_table.format == "dense":
        return held(page_table, 0)[request]
    return held(page_table, 0)[max(0, int(held(page_table, 1)[request])) :]
