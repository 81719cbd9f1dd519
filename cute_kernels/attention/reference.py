"""The semantics of decode attention in plain PyTorch, row by row. In f32 it is also the CPU variant.

A row attends to the tokens t < length whose page the table holds and the pool has. No other byte of a cache and no other
token's scale is read, so whatever they hold cannot reach a result. The real value of an element is what is stored times its
scale, computed in the reference's dtype. A row without tokens gives out = 0 and lse = -inf.

Bad metadata is masked row by row: tokens of a page outside the pool are left out, a negative length counts as 0, a length past
what the row's part of the table holds as that, and a row whose indptr is negative, decreasing or past the indices is empty.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..config.decode import LseBase
from ..kv.faults import first_fault, record
from ..kv.page_table import PageTable
from ..planning.variants import Launch
from .descriptors import DecodeProblem

LOG2_E = math.log2(math.e)


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
    """Decode attention over HND pages, computed in `dtype`.

    q [batch, num_heads, head_dim]; caches [num_pages, num_kv_heads, page_size, head_dim] (pass an NHD cache as
    `cache.transpose(1, 2)`, fp8 bytes viewed as fp8). Scales: [] or [1], [num_kv_heads], or [num_pages, page_size,
    num_kv_heads]. Returns out [batch, num_heads, head_dim] and lse [batch, num_heads], both of `dtype`.
    """
    num_pages, _, page_size, _ = k_cache.shape
    out, lse = _empty_outputs(q, dtype)
    for row in range(q.shape[0]):
        page, slot = _row_tokens(page_table, row, page_size)
        known = (page >= 0) & (page < num_pages)
        page, slot = page[known], slot[known]
        k, v = (
            _real(cache[page, :, slot], scale[page, slot] if _per_token(scale) else scale, dtype)
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        out[row], lse[row] = attend(q[row], k, v, softmax_scale, lse_base)
    return out, lse


def decode_contiguous(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    lse_base: LseBase = "e",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Decode attention over k and v [batch, num_kv_heads, seq_len, head_dim], as decode_paged.

    Scales: [] or [1], [num_kv_heads], or [batch, num_kv_heads, seq_len].
    """
    out, lse = _empty_outputs(q, dtype)
    for row in range(q.shape[0]):
        keys, values = (
            _real(cache[row].transpose(0, 1), scale[row].T if _per_token(scale) else scale, dtype)
            for cache, scale in ((k, k_scale), (v, v_scale))
        )
        out[row], lse[row] = attend(q[row], keys, values, softmax_scale, lse_base)
    return out, lse


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, lse_base: LseBase) -> tuple[Tensor, Tensor]:
    """One row in the dtype of k and v, their real values [tokens, num_kv_heads, head_dim].

    q [num_heads, head_dim] -> out like q, lse [num_heads].
    """
    dtype = k.dtype
    num_heads, head_dim = q.shape
    tokens, num_kv_heads, _ = k.shape
    if tokens == 0:
        return q.new_zeros((num_heads, head_dim), dtype=dtype), q.new_full((num_heads,), -math.inf, dtype=dtype)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    grouped = q.to(dtype).view(num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ k.permute(1, 2, 0) * scale  # [num_kv_heads, group_size, tokens]
    out = scores.softmax(-1) @ v.transpose(0, 1)
    lse = scores.logsumexp(-1) * (LOG2_E if lse_base == "2" else 1.0)
    return out.reshape(num_heads, head_dim), lse.reshape(num_heads)


def cpu_variant(problem: DecodeProblem) -> Launch:
    """The CPU variant for `problem`, called as a compiled kernel is, but with the status words themselves, not their address.

    It needs no workspace.
    """
    k_dtype, v_dtype = problem.kv_dtype.torch_dtype, problem.v_dtype.torch_dtype

    def launch(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table0: Tensor | None,
        table1: Tensor | None,
        table2: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        out: Tensor,
        lse: Tensor,
        workspace: Tensor | None,
        softmax_scale: float,
        num_ctas: int,
        status: Tensor,
    ) -> None:
        k, v = k.view(k_dtype), v.view(v_dtype)  # fp8 comes as bytes
        rules: dict[str, Any] = {
            "k_scale": k_scale,
            "v_scale": v_scale,
            "softmax_scale": softmax_scale,
            "lse_base": problem.lse_base,
        }
        if table0 is None or table1 is None:
            result = decode_contiguous(q, k, v, **rules)
        else:
            table = PageTable("dense" if table2 is None else "csr", (table0, table1, table2))
            result = decode_paged(q, k, v, table, **rules)
            fault = first_fault(table, k.shape[2], k.shape[0])
            if fault is not None:
                record(status, fault)
        out.copy_(result[0])
        lse.copy_(result[1])

    return launch


def _empty_outputs(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)


def _per_token(scale: Tensor | None) -> TypeGuard[Tensor]:
    return scale is not None and scale.dim() == 3


def _real(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `stored` [tokens, num_kv_heads, head_dim] stands for; scale: [], [1], [num_kv_heads] or [tokens, num_kv_heads]."""
    return stored.to(dtype) if scale is None else stored.to(dtype) * scale.to(dtype)[..., None]


def _row_tokens(page_table: PageTable, row: int, page_size: int) -> tuple[Tensor, Tensor]:
    """(page id, slot) of each token of a row, bounded by what its part of the table can hold; ids are unchecked."""
    first, second, last_page_len = page_table.operands
    if last_page_len is None:
        pages, length = first[row], int(second[row])
    else:
        indices, indptr = first, second
        begin, end = int(indptr[row]), int(indptr[row + 1])
        pages = indices[begin:end] if 0 <= begin <= end <= len(indices) else indices[:0]
        length = (len(pages) - 1) * page_size + int(last_page_len[row]) if len(pages) else 0
    token = torch.arange(max(0, min(length, len(pages) * page_size)), device=pages.device)
    return pages[token // page_size].long(), token % page_size
