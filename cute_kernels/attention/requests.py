"""Which query rows and which keys each request has, from metadata on the device that may be bad."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..config.modifiers import Modifiers, QueryForm
from ..kv.faults import Span
from ..kv.page_table import PageTable, outside, row_lengths


class QueryRows(NamedTuple):
    """For each request, int64 [batch]: the number of its first query row among all rows of q, and how many rows it has."""

    first: Tensor
    q_lens: Tensor


def query_rows(form: QueryForm, q: Tensor, qo_indptr: Tensor | None, max_q_len: int) -> QueryRows:
    """The query rows of q as a kernel takes it; a request with a bad qo_indptr has none, with too many the first max_q_len."""
    if qo_indptr is None:
        q_len = q.shape[1] if form == "uniform" else 1
        first = torch.arange(len(q), device=q.device) * q_len
        return QueryRows(first, torch.full_like(first, q_len))
    begin, end = qo_indptr[:-1].long(), qo_indptr[1:].long()
    return QueryRows(begin, (end - begin).masked_fill(outside(begin, end, len(q)), 0).clamp(max=max_q_len))


def belongs(rows: QueryRows, total_q: int) -> Tensor:
    """bool [total_q]: the query rows that belong to a request; all other rows are padding."""
    ends = torch.zeros(total_q + 1, dtype=torch.long, device=rows.first.device)
    some = rows.q_lens > 0
    first = rows.first.masked_fill(~some, 0)
    ends.index_add_(0, first, some.long()).index_add_(0, first + rows.q_lens, -some.long())
    return ends.cumsum(0)[:-1] > 0


def key_lengths(page_table: PageTable, k: Tensor, rows: QueryRows) -> Tensor:
    """Keys of each request, int64 [batch]. k: as a kernel takes it, [..., page_size or tokens, head_dim]."""
    return row_lengths(page_table, k.shape[2], rows.q_lens)


def seen_keys(modifiers: Modifiers, window_left: int, window_right: int, q_lens: Tensor, seq_lens: Tensor) -> Span:
    """For each request, the keys from the first to the last that any of its query rows may see."""
    first_position = torch.zeros_like(seq_lens) if modifiers.causal == "top_left" else seq_lens - q_lens
    last_position = first_position + q_lens - 1
    first, past = torch.zeros_like(seq_lens), seq_lens
    if modifiers.window_left:
        first = (first_position - window_left).clamp(min=0)
    if modifiers.causal != "none" and not modifiers.tree_mask:
        past = torch.minimum(past, last_position + 1)
    if modifiers.window_right:
        past = torch.minimum(past, last_position + 1 + window_right)
    none = (q_lens == 0) | (first >= past)
    return Span(first.masked_fill(none, 0), past.masked_fill(none, 0))
