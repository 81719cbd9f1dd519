"""K and V of FlashInfer's paged cache: one tensor or a pair, with four axes each."""

from __future__ import annotations

from weakref import ref

from torch import Tensor

from ...errors import InvalidArgument, InvalidProblem

Cache = Tensor | tuple[Tensor, Tensor]
Pages = tuple[Tensor, Tensor]  # K and V, four axes each


class PagedCaches:
    """K and V of the caches that a wrapper is given.

    The K and V halves of one tensor are kept as long as it lives: a plan knows tensors by identity, and two views take 3 us.
    """

    def __init__(self, kv_layout: str) -> None:
        self._token_axis = 1 if kv_layout == "NHD" else 2
        self._kept: dict[int, tuple[ref[Tensor], int, int, Pages]] = {}

    def __call__(self, cache: Cache) -> Pages:
        """The pages of a tensor [pages, 2, ...] or of a tuple (K, V); without an axis of tokens, a page holds one token.

        Raises InvalidArgument for a cache that is neither, InvalidProblem for other axes.
        """
        if isinstance(cache, Tensor):
            kept = self._kept.get(id(cache))
            if kept is not None and kept[0]() is cache and kept[1] == cache.data_ptr() and kept[2] == cache.nbytes:
                return kept[3]
            return self._split(cache)
        k, v = cache if isinstance(cache, tuple) and len(cache) == 2 else (None, None)
        if not isinstance(k, Tensor) or not isinstance(v, Tensor):
            raise InvalidArgument("paged_kv_cache", "must be one tensor [pages, 2, ...] or a tuple of two, K and V")
        if k.dim() == v.dim() == 4:
            return cache
        return self._page("K of paged_kv_cache", k), self._page("V of paged_kv_cache", v)

    def _split(self, cache: Tensor) -> Pages:
        if cache.dim() not in (4, 5) or cache.shape[1] != 2:
            raise InvalidProblem("paged_kv_cache.shape", tuple(cache.shape), "must be [pages, 2, ...], with 4 or 5 axes")
        k, v = (self._page("paged_kv_cache", half) for half in cache.detach().unbind(1))  # a view of `cache` would keep it alive
        key = id(cache)
        self._kept[key] = (ref(cache, lambda _: self._kept.pop(key, None)), cache.data_ptr(), cache.nbytes, (k, v))
        return k, v

    def _page(self, name: str, half: Tensor) -> Tensor:
        if half.dim() not in (3, 4):
            raise InvalidProblem(f"{name}.shape", tuple(half.shape), "must have 4 axes, or 3 where a page holds one token")
        return half if half.dim() == 4 else half.unsqueeze(self._token_axis)
