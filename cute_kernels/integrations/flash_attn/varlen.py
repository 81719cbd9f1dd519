"""flash_attn_varlen_func and flash_attn_func: attention over packed and dense keys, for inference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...checks.tensors import check_shape, check_tensors
from ...errors import CuteKernelsError, InvalidArgument, Unsupported
from ...kv.page_table import PageTable
from .. import with_unit_last_stride
from .arguments import NO_WINDOW, check_inference, in_callers_words, scores_of, settled
from .attend import attend


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, *, seqused_k: Tensor | None = None,
    page_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = NO_WINDOW, softcap: float = 0.0, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, alibi_slopes: Tensor | None = None, s_aux: Tensor | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False, out: Tensor | None = None, **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed query rows over packed keys, or over pages. Returns out, or (out, lse) with return_attn_probs.

    q, out: f16 or bf16 [total_q, num_heads, head_dim]; request b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], at most
    max_seqlen_q (rows of q by default). k, v: [total_k, num_kv_heads, head_dim] with cu_seqlens_k; or pages [num_pages,
    page_size, num_kv_heads, head_dim] with page_table int32 [batch, max_pages]; then seqused_k int32 [batch], or the
    differences of cu_seqlens_k, are the keys of each request. cu_seqlens: int32 [batch + 1]. lse: f32 [num_heads, total_q],
    natural log, -inf for a row that sees no key. Rows past cu_seqlens_q[batch] are padding, and not written.

    The masks, modifiers, scales, errors and `others` are as in flash_attn_with_kvcache. Arguments after max_seqlen_k are by
    name, since FlashAttention-2 and 3 order them differently.
    """
    if others:
        page_table, s_aux, return_attn_probs = settled(
            others, page_table=page_table, s_aux=s_aux, return_attn_probs=return_attn_probs
        )
    check_inference(q, k, v)
    if not isinstance(cu_seqlens_q, Tensor):
        raise InvalidArgument("cu_seqlens_q", f"got {type(cu_seqlens_q).__name__}, must be an int32 tensor [batch + 1]")
    scores = scores_of(causal, window_size, softcap, softmax_scale, sm_margin)
    try:
        if page_table is None:
            table, longest = _packed_table(cu_seqlens_k, seqused_k), max_seqlen_k
            k, v = with_unit_last_stride(k), with_unit_last_stride(v)
        else:
            table, longest = _paged_table(page_table, cu_seqlens_k, seqused_k), None
        # fmt: off
        return attend(
            q, k, v, table, scores, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=longest,
            k_descale=k_descale, v_descale=v_descale, alibi_slopes=alibi_slopes, s_aux=s_aux, out=out,
            return_lse=return_attn_probs,
        )
        # fmt: on
    except CuteKernelsError as error:
        lengths = "cu_seqlens_k" if seqused_k is None else "seqused_k"
        raise in_callers_words(error, others, k_cache="k", v_cache="v", **{"page_table.seq_lens": lengths}) from error


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = NO_WINDOW,
    softcap: float = 0.0,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [batch, q_len, num_heads, head_dim] over k, v [batch, seqlen, num_kv_heads, head_dim], for inference.

    Returns out, of q's shape, or (out, lse) with return_attn_probs; lse is f32 [batch, num_heads, q_len]. All else is as in
    flash_attn_with_kvcache. Arguments after v are by name, since FlashAttention-2 and 3 order them differently.
    """
    if others:
        s_aux, return_attn_probs = settled(others, s_aux=s_aux, return_attn_probs=return_attn_probs)
    check_inference(q, k, v)
    scores = scores_of(causal, window_size, softcap, softmax_scale, sm_margin)
    try:
        # fmt: off
        return attend(
            q, with_unit_last_stride(k), with_unit_last_stride(v), PageTable.whole(), scores, k_descale=k_descale,
            v_descale=v_descale, alibi_slopes=alibi_slopes, s_aux=s_aux, return_lse=return_attn_probs,
        )
        # fmt: on
    except CuteKernelsError as error:
        raise in_callers_words(error, others, k_cache="k", v_cache="v") from error


def _packed_table(cu_seqlens_k: Tensor | None, seqused_k: Tensor | None) -> PageTable:
    if cu_seqlens_k is None:
        raise InvalidArgument("cu_seqlens_k", "is None, must be an int32 tensor [batch + 1] without a page_table")
    check_tensors(cu_seqlens_k=cu_seqlens_k)
    if seqused_k is not None:
        raise Unsupported(["seqused_k beside cu_seqlens_k without a page_table: packed keys of a request are all used"])
    return PageTable.packed(cu_seqlens_k)


def _paged_table(page_table: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None) -> PageTable:
    if seqused_k is None:
        if cu_seqlens_k is None:
            raise InvalidArgument(
                "seqused_k", "is None, must be an int32 tensor [batch] beside a page_table without cu_seqlens_k"
            )
        check_tensors(cu_seqlens_k=cu_seqlens_k)
        check_shape("cu_seqlens_k", cu_seqlens_k, (None,), "[batch + 1]")
        seqused_k = cu_seqlens_k.diff()
    return PageTable.dense(page_table, seqused_k)
