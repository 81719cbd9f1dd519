"""The contents of vLLM's cache of a layer: K, V and their scales, as views of one tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidProblem, Unsupported
from ...kv.scale import Granularity

SCALE = torch.float32  # the scale of a token and KV head, stored after elements


class Stored(NamedTuple):
    """The meaning of a kv_cache_dtype of vLLM. dtype: None for the dtype of the cache's tensor."""

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
    """k, v: [num_pages, page_size, num_kv_heads, head_dim].

    k_scale, v_scale: f32 [num_pages, page_size, num_kv_heads]; None if the cache has none: a layer may have one for all tokens.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def stored_as(kv_cache_dtype: str) -> Stored:
    """The meaning of vLLM's name of a cache dtype. Raises Unsupported for a name that is not served."""
    stored = STORED.get(kv_cache_dtype)
    if stored is None:
        raise Unsupported([f"kv_cache_dtype = {kv_cache_dtype!r}: must be one of {', '.join(STORED)}"])
    return stored


def content_bytes(stored: Stored, head_dim: int, element_bytes: int) -> int:
    """Bytes of K and V, with their scales, for one token and KV head."""
    return 2 * (head_dim * element_bytes + (SCALE.itemsize if stored.scales == "token" else 0))


def cache_of(kv_cache: Tensor, stored: Stored, head_dim: int) -> Cache:
    """The views of vLLM's tensor [num_pages, num_kv_heads, page_size, content], in any strides with a unit last one.

    content: the elements of K, then those of V. Scales per token lie after all elements of a page (NHD), or of a page's head
    (HND), so that rows stay aligned for TMA; if neither is contiguous, each lies after its own elements. Raises InvalidProblem
    for a tensor of other axes.
    """
    wanted = content_bytes(stored, head_dim, kv_cache.element_size()) // kv_cache.element_size()
    if kv_cache.dim() != 4 or kv_cache.shape[3] != wanted:
        rule = f"must be [num_blocks, num_kv_heads, block_size, {wanted}]: K and V of a head of {head_dim}, in the last axis"
        raise InvalidProblem("kv_cache.shape", tuple(kv_cache.shape), rule)
    if stored.scales == "token":
        cache = _with_token_scales(kv_cache, head_dim)
    else:
        k, v = kv_cache.transpose(1, 2).split(head_dim, -1)
        cache = Cache(k, v, None, None)
    dtype = stored.dtype or kv_cache.dtype
    return cache._replace(k=cache.k.view(dtype), v=cache.v.view(dtype))


def _with_token_scales(kv_cache: Tensor, head_dim: int) -> Cache:
    """The views with scales per token. kv_cache: bytes, content_bytes for each token and KV head."""
    pages, heads, tokens, content = kv_cache.shape
    page, head, token, _ = kv_cache.stride()
    if token == content or tokens == 1:  # HND: [page, head] planes
        plane = kv_cache.as_strided((pages, heads, tokens * content), (page, head, 1))
        k, v, scales = plane.split([tokens * head_dim, tokens * head_dim, 2 * SCALE.itemsize * tokens], -1)
        k, v = (x.unflatten(-1, (tokens, head_dim)).transpose(1, 2) for x in (k, v))
        k_scale, v_scale = (x.transpose(1, 2) for x in scales.view(SCALE).split(tokens, -1))
    elif (head == content or heads == 1) and token == heads * content:  # NHD: [page] planes
        rows = tokens * heads
        plane = kv_cache.as_strided((pages, rows * content), (page, 1))
        k, v, scales = plane.split([rows * head_dim, rows * head_dim, 2 * SCALE.itemsize * rows], -1)
        k, v = (x.unflatten(-1, (tokens, heads, head_dim)) for x in (k, v))
        k_scale, v_scale = scales.view(SCALE).unflatten(-1, (2, tokens, heads)).unbind(1)
    else:
        halves = kv_cache.transpose(1, 2).split(content // 2, -1)
        k, v = (half[..., :head_dim] for half in halves)
        k_scale, v_scale = (half[..., head_dim:].view(SCALE)[..., 0] for half in halves)
    return Cache(k, v, k_scale, v_scale)
