"""What vLLM's cache of a layer holds: K, V and their scales, as views of one tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidProblem, Unsupported
from ...kv.scale import Granularity

SCALE = torch.float32  # of a token and KV head, behind its elements


class Stored(NamedTuple):
    """What a kv_cache_dtype of vLLM says. dtype: None for that of the cache's tensor."""

    dtype: torch.dtype | None
    scales: Granularity


STORED = {
    **dict.fromkeys(("auto", "float16", "bfloat16"), Stored(None, "none")),
    **dict.fromkeys(("fp8", "fp8_e4m3"), Stored(torch.float8_e4m3fn, "tensor")),
    "fp8_e5m2": Stored(torch.float8_e5m2, "tensor"),
    "int8_per_token_head": Stored(torch.int8, "token"),
    "fp8_per_token_head": Stored(torch.float8_e4m3fn, "token"),
}


class Cache(NamedTuple):
    """k, v: [num_pages, page_size, num_kv_heads, head_dim]. k_scale, v_scale: f32 [num_pages, page_size, num_kv_heads], or None
    where a layer's own, one for all tokens, are given beside them."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def stored_as(kv_cache_dtype: str) -> Stored:
    """What vLLM's name of a cache says. Raises Unsupported for one that is not served."""
    stored = STORED.get(kv_cache_dtype)
    if stored is None:
        raise Unsupported([f"kv_cache_dtype = {kv_cache_dtype!r}: must be one of {', '.join(STORED)}"])
    return stored


def content_bytes(stored: Stored, head_dim: int, element_bytes: int) -> int:
    """Bytes of K and V of a token and KV head, with their scales."""
    return 2 * (head_dim * element_bytes + (SCALE.itemsize if stored.scales == "token" else 0))


def cache_of(kv_cache: Tensor, stored: Stored, head_dim: int) -> Cache:
    """The views of vLLM's tensor [num_pages, num_kv_heads, page_size, content], in any strides with a unit last one.

    content: K, its scale where there is one a token, V, its scale. Raises InvalidProblem for a tensor of other axes.
    """
    wanted = content_bytes(stored, head_dim, kv_cache.element_size()) // kv_cache.element_size()
    if kv_cache.dim() != 4 or kv_cache.shape[3] != wanted:
        rule = f"must be [num_blocks, num_kv_heads, block_size, {wanted}]: K and V of a head of {head_dim}, in the last axis"
        raise InvalidProblem("kv_cache.shape", tuple(kv_cache.shape), rule)
    tokens, half = kv_cache.transpose(1, 2), wanted // 2
    k, v = (tokens[..., start : start + head_dim].view(stored.dtype or kv_cache.dtype) for start in (0, half))
    if stored.scales != "token":
        return Cache(k, v, None, None)
    scales: Any = tokens.view(SCALE)
    per = SCALE.itemsize // kv_cache.element_size()
    return Cache(k, v, scales[..., head_dim // per], scales[..., (half + head_dim) // per])
