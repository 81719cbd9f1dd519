"""Where the keys of a call's requests are: in rows of a contiguous cache or in pages, past a left padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...checks.fields import MAX_EXTENT
from ...checks.tensors import check_shape, check_tensor
from ...errors import InvalidProblem, Unsupported
from ...kv.page_table import PageTable
from .arguments import whole


class Cache(NamedTuple):
    """A cache of pages, or of one contiguous row per request.

    k, v: [num_pages, page_size, num_kv_heads, head_dim] with table int32 [batch, max_pages]; or, if table is None, [batch,
    max_len, num_kv_heads, head_dim]. lengths: int32 [batch], None if every row is full.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None
    lengths: Tensor | None

    @property
    def page_table(self) -> PageTable:
        """The PageTable that attention plans take."""
        if self.table is not None:
            return PageTable.dense(self.table, self.room if self.lengths is None else self.lengths)
        return PageTable.whole() if self.lengths is None else PageTable.lengths(self.lengths)

    @property
    def room(self) -> int:
        """The most tokens that a request may have."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def pages(self, batch: int) -> Tensor:
        """The table, int32 [batch, max_pages]; each row of a contiguous cache counts as one page."""
        if self.table is not None:
            return self.table
        return torch.arange(batch, dtype=torch.int32, device=self.k.device)[:, None]


def cache_of(
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    batch: int,
) -> Cache:
    """The cache of `batch` requests. Raises InvalidProblem for a shape or a length, InvalidArgument for a non-int32 tensor."""
    if k_cache.dim() != 4:
        raise InvalidProblem("k_cache.shape", tuple(k_cache.shape), "must have the axes of [.., tokens, num_kv_heads, head_dim]")
    if page_table is not None:
        check_tensor(k_cache.device, "page_table", page_table, torch.int32)
        check_shape("page_table", page_table, (None, None), "[batch, max_pages]")
    if cache_batch_idx is not None:
        check_tensor(k_cache.device, "cache_batch_idx", cache_batch_idx, torch.int32)
        check_shape("cache_batch_idx", cache_batch_idx, (batch,), "[batch]")
        page_table = cache_batch_idx[:, None] if page_table is None else page_table.index_select(0, cache_batch_idx)
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        rule = "must be an int32 tensor [batch], an int from 0 on, or None"
        length = whole("cache_seqlens", cache_seqlens, rule)
        if not 0 <= length <= MAX_EXTENT:
            raise InvalidProblem("cache_seqlens", length, rule)
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)
    if cache_seqlens is not None:
        check_tensor(k_cache.device, "cache_seqlens", cache_seqlens, torch.int32)
        check_shape("cache_seqlens", cache_seqlens, (batch,), "[batch]")
    return Cache(k_cache, v_cache, page_table, cache_seqlens)


def without_padding(cache: Cache, cache_leftpad: Tensor, batch: int) -> Cache:
    """The same cache without the first cache_leftpad[b] keys of each request b, as pages of one token.

    Raises Unsupported for a cache whose tokens are not all one stride apart, or are too many for int32.
    """
    check_tensor(cache.k.device, "cache_leftpad", cache_leftpad, torch.int32)
    check_shape("cache_leftpad", cache_leftpad, (batch,), "[batch]")
    page_size, pages, room = cache.k.shape[1], cache.pages(batch), cache.room
    if cache.k.shape[0] * page_size > MAX_EXTENT:
        raise Unsupported([f"cache_leftpad beside k_cache of {cache.k.shape[0] * page_size:,} tokens: must be at most 2**31 - 1"])
    k, v = (_pages_of_one("k_cache", cache.k), _pages_of_one("v_cache", cache.v))
    tokens = torch.arange(room, dtype=torch.int32, device=cache.k.device) + cache_leftpad[:, None]
    places = (tokens // page_size).clamp_(0, max(0, pages.shape[1] - 1))
    table = pages.gather(1, places.long()) * page_size + tokens % page_size
    lengths = room - cache_leftpad if cache.lengths is None else cache.lengths - cache_leftpad
    return Cache(k, v, table, lengths)


def _pages_of_one(name: str, cache: Tensor) -> Tensor:
    if 1 not in cache.shape[:2] and cache.stride(0) != cache.shape[1] * cache.stride(1):
        rule = "with a cache_leftpad the first must be the second times the tokens of a row or page"
        raise Unsupported([f"{name}.stride = {cache.stride()}: {rule}"])
    return cache.flatten(0, 1)[:, None]
