"""Attention of a layer over the keys in transformers' own caches: prefill and decode of generate, and plain forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.attention import paged_attention
from ...config.append import MAX_HEAD_DIM
from ...errors import Unsupported
from ...kv.page_table import PageTable
from .fallback import own_attention, tell_fallback
from .masks import dense_mask, lengths_of

CHOSEN = ("indices", "block_indices")  # names of the keys that a layer has chosen: transformers' sdpa ignores these names
UNSERVED = ("position_bias", "sinks")  # arguments that change scores


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Any]:
    """transformers' attention interface: (out [batch, q_len, num_heads, head_dim], None).

    query: [batch, num_heads, q_len, head_dim]; key, value: [batch, num_kv_heads, kv_len, head_dim], any strides with a unit last
    one. attention_mask: from `lengths_mask`, or a mask for sdpa. sliding_window: keys that a row sees, its own included. s_aux:
    sinks [num_heads]. If no plan serves a layer, transformers' own attention computes it, with one log line for each reason.

    Raises Unsupported for a layer that gives the keys it has chosen, and InvalidProblem for any other mask of integers.
    """
    refuse(module, CHOSEN, others)
    lengths = lengths_of(attention_mask, query.shape[0])
    why = _refusal(query, key, value, dropout, others)
    if lengths is not None and lengths.sliding != (sliding_window is not None):
        window = "none" if sliding_window is None else f"sliding_window = {sliding_window}"
        why = f"{type(module).__name__} has {window} beside a mask that is {'' if lengths.sliding else 'not '}sliding"
    if why or (attention_mask is not None and lengths is None):
        if why:
            tell_fallback(why)
        if lengths is not None:
            attention_mask = dense_mask(lengths, query.shape[2], key.shape[2])
        names = ("dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux")
        given = (dropout, scaling, is_causal, sliding_window, softcap, s_aux)
        return own_attention(module, query, key, value, attention_mask, dict(zip(names, given, strict=True)), **others)
    causal, table, window_left = _whole(module, query, key, is_causal), PageTable.whole(), None
    if lengths is not None:
        causal, table = "bottom_right", PageTable.lengths(lengths.seq_lens)
        window_left = sliding_window - 1 if lengths.sliding and sliding_window is not None else None
    # fmt: off
    out, _ = paged_attention(
        query.transpose(1, 2), key, value, page_table=table, causal=causal, window_left=window_left, softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(), softmax_scale=scaling,
    )
    # fmt: on
    return out, None


def refuse(module: Any, names: tuple[str, ...], given: dict[str, Any]) -> None:
    """Raises Unsupported if a layer gives an argument of one of these names."""
    refused = [f"{type(module).__name__} gives {name}, which no plan takes" for name in names if given.get(name) is not None]
    if refused:
        raise Unsupported(refused)


def _whole(module: Any, query: Tensor, key: Tensor, is_causal: bool | None) -> Any:
    """The causal mask that sdpa applies without a mask: several rows see keys 0 to their own, a single row sees all keys."""
    if query.shape[2] == 1 or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return None
    return "bottom_right" if query.shape[2] == key.shape[2] else "top_left"


def _refusal(query: Tensor, key: Tensor, value: Tensor, dropout: float, others: dict[str, Any]) -> str | None:
    """The reason why no plan serves a layer; None if one does."""
    if query.device.type not in ("cuda", "cpu"):
        return f"a model on {query.device.type}"
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"a model in {query.dtype}"
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim = {query.shape[-1]}, above {MAX_HEAD_DIM}"
    if value.shape[-1] != key.shape[-1]:
        return f"V of head_dim {value.shape[-1]} beside K of {key.shape[-1]}"
    if dropout:
        return f"dropout = {dropout}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients that are recorded"
    return next((f"{name} given to a layer" for name in UNSERVED if others.get(name) is not None), None)
