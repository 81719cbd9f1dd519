"""flash-attention's functions for packed tensors: q, k and v, or k and v, side by side in one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...checks.tensors import check_tensors
from ...errors import InvalidProblem
from .varlen import flash_attn_func, flash_attn_varlen_func

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_qkvpacked_func(qkv: Tensor, *, num_heads_q: int | None = None, **options: Any) -> Result:
    """Returns flash_attn_func of qkv [batch, seqlen, 3, num_heads, head_dim], or [batch, seqlen, heads of q, k and v, head_dim].

    num_heads_q: given if the heads of all three share an axis; q's heads come first. Arguments after qkv are by name.
    """
    if num_heads_q is None:
        return flash_attn_func(*_parts("qkv", qkv, 3, "[batch, seqlen, 3, num_heads, head_dim]"), **options)
    check_tensors(qkv=qkv)
    kv_heads = (qkv.shape[2] - num_heads_q) // 2 if qkv.dim() == 4 else 0
    if kv_heads < 1 or num_heads_q + 2 * kv_heads != qkv.shape[2]:
        rule = f"must be [batch, seqlen, num_heads_q + 2 num_kv_heads, head_dim] beside num_heads_q = {num_heads_q}"
        raise InvalidProblem("qkv.shape", tuple(qkv.shape), rule)
    return flash_attn_func(*qkv.split([num_heads_q, kv_heads, kv_heads], 2), **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, **options: Any) -> Result:
    """Returns flash_attn_func of kv [batch, seqlen, 2, num_kv_heads, head_dim]. Arguments after kv are by name."""
    return flash_attn_func(q, *_parts("kv", kv, 2, "[batch, seqlen, 2, num_kv_heads, head_dim]"), **options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, **options: Any) -> Result:
    """Returns flash_attn_varlen_func of qkv [total, 3, num_heads, head_dim], whose requests have as many queries as keys.

    Arguments after max_seqlen are by name.
    """
    q, k, v = _parts("qkv", qkv, 3, "[total, 3, num_heads, head_dim]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> Result:
    """Returns flash_attn_varlen_func of kv [total_k, 2, num_kv_heads, head_dim]. Arguments after max_seqlen_k are by name."""
    k, v = _parts("kv", kv, 2, "[total_k, 2, num_kv_heads, head_dim]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def _parts(name: str, packed: Tensor, count: int, axes: str) -> tuple[Tensor, ...]:
    """Returns views of the `count` tensors that lie side by side. Raises InvalidProblem for other axes."""
    check_tensors(**{name: packed})
    if packed.dim() != axes.count(",") + 1 or packed.shape[-3] != count:
        raise InvalidProblem(f"{name}.shape", tuple(packed.shape), f"must be {axes}")
    return packed.unbind(-3)
