"""FlashInfer's classes that its tests of sinks compile for themselves: run takes the sinks and the scale after the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from cute_kernels.integrations import flashinfer
from cute_kernels.integrations.flashinfer.caches import Cache


class BatchAttentionWithAttentionSinkWrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Attends over pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **_kernel: Any) -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def run(self, q: Tensor, paged_kv_cache: Cache, *sink_and_scale: Any, **options: Any) -> Any:
        sinks, sm_scale = sink_and_scale
        assert self._scores is not None
        self._rescore(replace(self._scores, sm_scale=sm_scale))
        return super().run(q, paged_kv_cache, sinks=sinks, **options)


class BatchPrefillWithRaggedKVCacheWrapper(flashinfer.BatchPrefillWithRaggedKVCacheWrapper):
    """Attends over packed tokens; without jit_args as the package's own."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", jit_args: Any = None, **kernel: Any) -> None:
        super().__init__(float_workspace_buffer, kv_layout, **({} if jit_args is not None else kernel))
        self.takes_sinks = jit_args is not None

    def run(self, q: Tensor, k: Tensor, v: Tensor, *sink_and_scale: Any, **options: Any) -> Any:
        if not self.takes_sinks:
            return super().run(q, k, v, *sink_and_scale, **options)
        sinks, sm_scale = sink_and_scale
        assert self._scores is not None
        self._rescore(replace(self._scores, sm_scale=sm_scale))
        return self.attend(q, k, v, sinks=sinks, **options)
