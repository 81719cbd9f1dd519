"""Attention of a layer in continuous batching: new tokens are stored in pages, and attended to with the earlier tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.attention import paged_attention
from ...api.functional import append_kv
from ...api.plan_cache import LONG_CHUNK, length_hint, rounded_rows
from ...errors import Unsupported
from ...kv.page_table import PageTable
from .engine import moved
from .forward import CHOSEN, UNSERVED, refuse

KEPT = "cache_of_cute_kernels"  # the attribute of a K: the cache whose `update` was called with this K


class Pages(NamedTuple):
    """The cache of a layer whose keys are all kept. k, v: [num_pages, page_size, num_kv_heads, head_dim].

    span: the distance of two pages in transformers' indices, in tokens; 2 page_size if pages of K and V alternate.
    """

    k: Tensor
    v: Tensor
    span: int

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    def stored_as(self, kv_dtype: torch.dtype | None) -> Pages:
        """The same pages, each with elements of 8 bits in its first half; unchanged if kv_dtype is None."""
        if kv_dtype is None:
            return self
        k, v = (x.flatten(1).view(kv_dtype)[:, : x[0].numel()].unflatten(1, x.shape[1:]) for x in (self.k, self.v))
        return self._replace(k=k, v=v)

    def ids(self, table: Tensor) -> Tensor:
        """int32 pages of transformers' block table, whose entries count page_size tokens each."""
        return table if self.span == self.page_size else table // 2

    def slots(self, write_index: Tensor) -> Tensor:
        """Slots, page * page_size + offset, from transformers' indices of tokens."""
        if self.span == self.page_size:
            return write_index
        return write_index // self.span * self.page_size + write_index % self.span

    def table(self, read_index: Tensor, cu_seq_lens: Tensor, max_pages: int) -> Tensor:
        """int32 [batch, max_pages]: the page of each page_size-th token of a request; any page past the request's end."""
        firsts = cu_seq_lens[:-1, None] + torch.arange(0, max_pages * self.page_size, self.page_size, device=cu_seq_lens.device)
        return (read_index[firsts.clamp_(max=len(read_index) - 1)] // self.span).int()


class Layer(NamedTuple):
    """A step's tables for one layer. pages: None for a sliding layer, whose keys transformers keeps in a ring.

    block_table: int32 [batch, max_pages] if each request has one new token; otherwise None, and indices say where tokens are:
    write_index int64 [tokens], read_index int64 [keys], or [0] if no request has earlier keys. cu_seq_lens: int32 [batch + 1].
    """

    pages: Pages | None
    cu_seq_lens: Tensor
    max_keys: int
    block_table: Tensor | None
    read_index: Tensor
    write_index: Tensor


def continuous_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kv_dtype: torch.dtype | None = None,
    **step: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface in generate_batch: (out [1, tokens, num_heads, head_dim], None).

    query: [1, num_heads, tokens, head_dim]; key, value: [1, num_kv_heads, tokens, head_dim]. kv_dtype: the type that pages
    store, the model's dtype by default. step: the tokens of all requests, one after another, as continuous batching describes
    them. Rows that pad a step are 0. Nothing synchronises; capturable in a graph after one call.

    Raises Unsupported outside continuous batching, if a layer changes scores or chooses its keys, and if the step or the cache
    lacks a name that is needed here.
    """
    refuse(module, CHOSEN + UNSERVED, step)
    step["cache"] = _cache(key, step)
    layer = _layer(module, step, kv_dtype)
    if layer.pages is None and sliding_window is None:  # a layer like Qwen2-MoE's leaves the window to its mask
        sliding_window = _window_of(step["cache"])
    q = query[0].transpose(0, 1)
    scores: dict[str, Any] = {
        "window_left": None if sliding_window is None else sliding_window - 1,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
        "softmax_scale": getattr(module, "scaling", None) if scaling is None else scaling,
        "layout": "NHD",
    }
    if layer.block_table is not None:
        return _decode(q, key, value, layer, scores)[None], None
    k, v, keys = _stored(module, key, value, layer, step)
    scores["out"] = torch.zeros_like(q, memory_format=torch.contiguous_format)
    rows = _named(step, "max_length_q", "max_seqlen_q")
    rows = 1 if rows == 1 else max(LONG_CHUNK, rounded_rows(rows))
    hint = length_hint(layer.max_keys)
    qo_indptr = _named(step, "cu_seq_lens_q").int()
    paged_attention(q, k, v, page_table=keys, qo_indptr=qo_indptr, max_q_len=rows, max_seq_len=hint, **scores)
    return scores["out"][None], None


def _cache(key: Tensor, step: dict[str, Any]) -> Any:
    """Returns the cache that the step names, or else the one that K carries.

    A layer that takes K and V from an earlier layer calls no `update`: its step names no cache, but its K carries one.
    """
    cache = step.get("cache")
    cache = getattr(key, KEPT, None) if cache is None else cache
    if cache is not None:
        return cache
    if "write_index" in step or "block_table" in step:
        raise moved("a step of continuous batching", "has no cache, and PagedAttentionCache.update was not called with its K")
    raise Unsupported(['attn_implementation = "cute_flash_3": is for continuous batching alone, "cute_kernels" is for both'])


def _decode(q: Tensor, key: Tensor, value: Tensor, layer: Layer, scores: dict[str, Any]) -> Tensor:
    """Attention of one new token per request: [batch, num_heads, head_dim]. A request without keys pads the step."""
    assert layer.pages is not None and layer.block_table is not None
    pages, lengths = layer.pages, layer.cu_seq_lens.diff()
    table = PageTable.dense(pages.ids(layer.block_table), lengths)
    append_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), pages.k, pages.v, table, layout="NHD")
    return paged_attention(q[:, None], pages.k, pages.v, page_table=table, **scores)[0][:, 0]


def _stored(module: Any, key: Tensor, value: Tensor, layer: Layer, step: dict[str, Any]) -> tuple[Tensor, Tensor, PageTable]:
    """Stores new keys and values; returns (K, V, table) with all keys that the step's rows may see: pages, or packed tokens."""
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    pages, packed = layer.pages, PageTable.packed(layer.cu_seq_lens)
    if pages is None:
        return (*_updated(module, key, value, step), packed)
    append_kv(k, v, pages.k, pages.v, pages.slots(layer.write_index), layout="NHD")
    if layer.read_index.numel() == 0:
        return k, v, packed
    max_pages = -(-length_hint(layer.max_keys) // pages.page_size)
    table = pages.table(layer.read_index, layer.cu_seq_lens, max_pages)
    return pages.k, pages.v, PageTable.dense(table, layer.cu_seq_lens.diff())


def _updated(module: Any, key: Tensor, value: Tensor, step: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs transformers' own update of a ring; returns packed K and V, [keys, num_kv_heads, head_dim], in order of position."""
    if hasattr(step["cache"], "layer_to_allocator"):
        k, v = step["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=dict(step))
        return k[0].transpose(0, 1), v[0].transpose(0, 1)
    indices = {name: step[name] for name in ("read_index", "write_index")}
    k, v = step["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
    return k, v


def _layer(module: Any, step: dict[str, Any], kv_dtype: torch.dtype | None) -> Layer:
    cache, layer_idx, block_table = step["cache"], module.layer_idx, step.get("block_table")
    try:
        group, kind, pages = (_allocated if hasattr(cache, "layer_to_allocator") else _grouped)(cache, layer_idx)
    except AttributeError as error:
        raise moved(f"{type(cache).__name__}.{error.name}", "is not there") from error
    cu_seq_lens, max_keys = _named(step, "cu_seq_lens_k"), _named(step, "max_length_k", "max_seqlen_k")
    if isinstance(cu_seq_lens, dict):
        cu_seq_lens, max_keys = cu_seq_lens[kind], max_keys[kind]
    read_index, write_index = _named(step, "read_index")[group], _named(step, "write_index")[group]
    table = None if block_table is None or pages is None else block_table[group]
    pages = None if pages is None else pages.stored_as(kv_dtype)
    return Layer(pages, cu_seq_lens.int(), max_keys, table, read_index, write_index)


def _window_of(cache: Any) -> int:
    """Returns how many keys a row sees in a ring of transformers. The row's own key counts."""
    window: int | None = getattr(getattr(cache, "config", None), "sliding_window", None)
    if window is None:
        raise moved(f"{type(cache).__name__}.config.sliding_window", "is not there, beside a cache of a sliding window")
    return window


def _grouped(cache: Any, layer_idx: int) -> tuple[int, str, Pages | None]:
    """A layer's group, type and pages in transformers 5.17, which has one tensor each for K and V of a layer."""
    group, place = cache.layer_index_to_group_indices[layer_idx]
    if cache.sliding_windows[layer_idx] != 1:
        return group, "sliding_attention", None
    axes = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    pages = Pages(cache.key_cache[place].view(axes), cache.value_cache[place].view(axes), cache.block_size)
    return group, "full_attention", pages


def _allocated(cache: Any, layer_idx: int) -> tuple[int, str, Pages | None]:
    """A layer's group, type and pages in transformers 5.23, whose pages of K and V alternate in one tensor."""
    allocator = cache.layer_to_allocator[layer_idx]
    if allocator.layer_type != "full_attention":
        return allocator.index, allocator.layer_type, None
    k, v = allocator.get_cache_for_block_table(layer_idx)
    return allocator.index, allocator.layer_type, Pages(k[::2], v[::2], 2 * k.shape[1])


def _named(step: dict[str, Any], *names: str) -> Any:
    """The first value that a step has under one of `names`. Raises Unsupported if it has none."""
    for name in names:
        if step.get(name) is not None:
            return step[name]
    raise moved("a step of continuous batching", f"has no {' or '.join(names)}")
