"""Attention of one layer: new tokens are stored in its pages, and query rows attend to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...api.functional import append_kv
from ...errors import InvalidProblem
from ...kv.page_table import PageTable
from ..flash_attn.arguments import Scores, scores_of
from ..flash_attn.attend import attend
from .cache import Cache, cache_of, stored_as
from .step import Step


class LayerAttention:
    """Arguments are as vLLM gives them to a layer, None for none. kv_cache_dtype: a name of cache.STORED.

    alibi_slopes: [num_heads] numbers. sliding_window: the keys that a row sees, its own included. sinks: [num_heads], of any
    float type. Raises Unsupported for a cache that is not served, InvalidProblem for sinks of another shape.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        kv_cache_dtype: str,
        alibi_slopes: Sequence[float] | None,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        sinks: Tensor | None,
    ) -> None:
        self.stored, self.head_size = stored_as(kv_cache_dtype), head_size
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise InvalidProblem("sinks.shape", tuple(sinks.shape), f"must be [num_heads] = [{num_heads}]")
        self._slopes = None if alibi_slopes is None else torch.as_tensor(alibi_slopes, dtype=torch.float32)
        self._given_sinks = self._sinks = sinks
        left = -1 if sliding_window is None else sliding_window - 1
        shared = (logits_soft_cap or 0.0, float(scale), 0)
        self._scores: dict[bool, Scores] = {  # without a causal mask, a window reaches as far to the right as to the left
            True: scores_of(True, (left, 0), *shared),
            False: scores_of(False, (left, left), *shared),
        }
        self._cache: tuple[Tensor, Cache] | None = None

    def load_sinks(self) -> None:
        """Converts the sinks to f32, from a parameter that weights have been loaded into; may be called again after a reload."""
        given, kept = self._given_sinks, self._sinks
        if given is None or given.dtype == torch.float32:
            return
        if kept is given:
            self._sinks = given.detach().float()
        elif kept is not None:  # in place: a captured graph reads this tensor
            kept.copy_(given.detach())

    def store(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores tokens [tokens, num_kv_heads, head_dim] in their slots; a token with a negative slot is not stored.

        Tokens past the slots, or slots past the tokens, pad the step. layer: has _k_scale and _v_scale, f32 on the device.
        """
        cache, tokens = self._cache_of(kv_cache), min(len(key), len(slot_mapping))
        k_scale, v_scale = self._scales(layer, cache)
        if len(key) > tokens:
            key, value = key[:tokens], value[:tokens]
        append_kv(key, value, cache.k, cache.v, slot_mapping[:tokens], k_scale=k_scale, v_scale=v_scale, layout="NHD")

    def attend(self, layer: Any, query: Tensor, kv_cache: Tensor, step: Step, output: Tensor) -> None:
        """Writes the step's rows of output; it and query are [tokens, num_heads, head_dim]. Padding rows may stay unwritten."""
        tokens = step.num_actual_tokens
        if query.shape[0] != tokens:
            query, output = query[:tokens], output[:tokens]
        cache = self._cache_of(kv_cache)
        k_scale, v_scale = self._scales(layer, cache)
        if self._slopes is not None and self._slopes.device != query.device:
            self._slopes = self._slopes.to(query.device)
        starts: Tensor | None = step.query_start_loc
        if step.one_each:
            query, output, starts = query.unsqueeze(1), output.unsqueeze(1), None
        # fmt: off
        attend(
            query, cache.k, cache.v, PageTable.dense(step.block_table, step.seq_lens), self._scores[step.causal],
            cu_seqlens_q=starts, max_seqlen_q=step.max_query_len,
            k_descale=k_scale, v_descale=v_scale, alibi_slopes=self._slopes, s_aux=self._sinks, out=output,
        )
        # fmt: on

    def _cache_of(self, kv_cache: Tensor) -> Cache:
        if self._cache is None or self._cache[0] is not kv_cache:
            self._cache = kv_cache, cache_of(kv_cache, self.stored, self.head_size)
        return self._cache[1]

    def _scales(self, layer: Any, cache: Cache) -> tuple[Tensor | None, Tensor | None]:
        if self.stored.scales == "tensor":
            return layer._k_scale, layer._v_scale
        return cache.k_scale, cache.v_scale
