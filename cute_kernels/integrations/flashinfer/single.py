"""FlashInfer's attention of one request over contiguous K and V."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.attention import decode_attention, paged_attention
from .. import with_unit_last_stride
from .arguments import Scores, heads_and_types, layout_named, refuse, scaled


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """One query row through decode_attention. Returns out, or (out, lse) with return_lse.

    q, out: [num_qo_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim], "HND": the first two axes swapped; lse: f32
    [num_qo_heads], to base 2. q_scale, k_scale, v_scale: factors on q, K and V. use_tensor_cores changes nothing.

    Raises Unsupported for an argument without a counterpart, and what decode_attention raises.
    """
    scores = Scores(True, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
    out, lse = decode_attention(
        with_unit_last_stride(q)[None],
        k[None],
        v[None],
        **_options(q, k, kv_layout, scores, return_lse),
        **_scales(q, q_scale, k_scale, v_scale),
    )
    return (out[0], lse[0]) if return_lse else out[0]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Several query rows through paged_attention, over contiguous K and V. Returns out, or (out, lse) with return_lse.

    q, out: [rows, num_qo_heads, head_dim], whose last row is at the last token; lse: f32 [rows, num_qo_heads], to base 2; k, v
    and the scales are as in single_decode_with_kv_cache. backend changes nothing.

    Raises Unsupported for an argument without a counterpart, and what paged_attention raises.
    """
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, use_fp16_qk_reduction=use_fp16_qk_reduction)
    scores = Scores(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
    options = _options(q, k, kv_layout, scores, return_lse, o_dtype)
    mask: Any = "bottom_right" if causal else None
    scales = _scales(q, None, k_scale, v_scale)
    out, lse = paged_attention(with_unit_last_stride(q)[None], k[None], v[None], causal=mask, **options, **scales)
    return (out[0], lse) if return_lse else out[0]


def single_prefill_with_kv_cache_return_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """`single_prefill_with_kv_cache` with return_lse."""
    result: tuple[Tensor, Tensor] = single_prefill_with_kv_cache(*args, **{**options, "return_lse": True})
    return result


def _options(
    q: Tensor, k: Tensor, kv_layout: str, scores: Scores, return_lse: bool, o_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """The options about scores and the cache that both calls pass on. Raises Unsupported, InvalidProblem."""
    layout = layout_named(kv_layout).order
    num_heads, head_dim = q.shape[-2:]
    heads_and_types(num_heads, k.shape[0 if layout == "HND" else 1], head_dim, None, q.dtype, k.dtype, o_dtype)
    scores.refuse_what_alibi_changes(return_lse, None)
    return {
        "layout": layout,
        "lse_base": "2",
        "window_left": scores.window,
        "softcap": scores.softcap,
        "softmax_scale": scores.sm_scale,
        "alibi_slopes": scores.slopes(num_heads, q.device),
    }


def _scales(q: Tensor, q_scale: float | None, k_scale: float | None, v_scale: float | None) -> dict[str, Any]:
    """The scales that are not 1, f32 [1]."""
    given: tuple[tuple[str, Any], ...] = (
        ("k_scale", k_scale if q_scale is None else scaled(q_scale, k_scale)),
        ("v_scale", v_scale),
    )
    return {name: q.new_full((1,), scale, dtype=torch.float32) for name, scale in given if scale not in (None, 1)}
