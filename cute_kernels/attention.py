"""decode_attention(): describe, select and run in one call."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import plan_cache, torch_ops
from .config import LseBase
from .descriptors import KVDtype
from .errors import InvalidArgument, InvalidProblem
from .page_table import PageTable


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: PageTable | Tensor | None = None,
    seq_lens: Tensor | int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dtype: KVDtype | None = None,
    softmax_scale: float | None = None,
    layout: Literal["HND", "NHD"] = "HND",
    lse_base: LseBase = "e",
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode attention of one query row a request; selects and keeps the plan and its workspace. Returns (out, lse).

    q, out: [batch, num_heads, head_dim], also with one unit query axis. page_table: a PageTable, or an int32 table [batch,
    max_pages] with `seq_lens` (int32 [batch] or an int); then the caches are pages in `layout`. Without a page_table
    they are contiguous, [batch, num_kv_heads, seq_len, head_dim] ("NHD": the middle axes swapped). lse: f32 [batch,
    num_heads] in `lse_base`. k_scale, v_scale: [] or [1], [num_kv_heads], or one for each token and KV head, [num_pages,
    page_size, num_kv_heads] (contiguous: the cache's axes but head_dim). kv_dtype: what the caches are stored as, where their
    dtype does not say it (uint8). softmax_scale: head_dim ** -0.5 by default. max_seq_len: a hint for the choice of a
    configuration.

    Raises what the descriptors, `select` and `run` raise.
    """
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(name, f"got {type(tensor).__name__}, must be a tensor")
    if layout not in ("HND", "NHD"):
        raise InvalidProblem("layout", layout, 'must be "HND" or "NHD"')
    if kv_dtype is not None and not isinstance(kv_dtype, KVDtype):
        raise InvalidProblem("kv_dtype", kv_dtype, "must be a KVDtype or None")
    encoding = None if kv_dtype is None else kv_dtype.value
    if out is None:
        out = q.new_empty(q.shape)
    if lse is None:
        lse = q.new_empty(_lse_shape(q), dtype=torch.float32)
    traced = torch.compiler.is_compiling()
    if page_table is None:
        if seq_lens is not None:
            raise InvalidArgument("seq_lens", "given without a page_table, must be None: a contiguous cache has one length")
        if layout == "NHD":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
            k_scale, v_scale = _head_major(k_scale), _head_major(v_scale)
        contiguous = torch_ops.flash_decoding if traced else plan_cache.run_contiguous
        contiguous(q, k_cache, v_cache, k_scale, v_scale, out, lse, softmax_scale, lse_base, encoding)
        return out, lse
    table = _table(page_table, seq_lens)
    paged = torch_ops.paged_decode if traced else plan_cache.run_paged
    operands = (q, k_cache, v_cache, *table.operands, k_scale, v_scale, out, lse)
    paged(*operands, softmax_scale, layout, lse_base, max_seq_len, encoding)
    return out, lse


def _head_major(scale: Tensor | None) -> Tensor | None:
    """Scales per token of a contiguous NHD cache as [batch, num_kv_heads, seq_len]."""
    return scale.transpose(1, 2) if isinstance(scale, Tensor) and scale.dim() == 3 else scale


def _table(page_table: PageTable | Tensor, seq_lens: Tensor | int | None) -> PageTable:
    if isinstance(page_table, PageTable):
        if seq_lens is not None:
            raise InvalidArgument("seq_lens", "given beside a PageTable, must be None: the PageTable holds the lengths")
        return page_table
    if not isinstance(page_table, Tensor):
        raise InvalidArgument("page_table", f"got {type(page_table).__name__}, must be a PageTable, a tensor or None")
    if seq_lens is None:
        raise InvalidArgument("seq_lens", "is None, must be given with a table tensor")
    return PageTable.dense(page_table, seq_lens)


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    """[batch, num_heads] of q; the plan checks q itself."""
    if q.dim() == 4:
        return q.shape[0], q.shape[1] * q.shape[2]
    return tuple(q.shape[:2])
