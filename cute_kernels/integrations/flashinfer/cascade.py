"""FlashInfer's merges of attention states, through MergeStatesPlan, and attention over several levels of pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ...api.functional import merge_states as merged
from ...checks.tensors import check_tensor
from ...errors import InvalidProblem
from .caches import Cache
from .prefill import BatchPrefillWithPagedKVCacheWrapper

Levels = Sequence[Tensor]  # one tensor per level


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state of two disjoint parts of the keys, (V, S). Copies its inputs side by side first: merge_states does not.

    v_a, v_b, V: [rows, num_heads, head_dim] of one dtype; s_a, s_b, S: [rows, num_heads], to base 2, S f32. Raises what
    cute_kernels.merge_states raises.
    """
    return merged(torch.stack((v_a, v_b)), torch.stack((s_a.float(), s_b.float())), lse_base="2")


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state of several disjoint parts of the keys, (V, S).

    v: [rows, num_states, num_heads, head_dim]; s: [rows, num_states, num_heads], to base 2; V, S: without the axis of states.
    """
    return merged(v.transpose(0, 1), s.float().transpose(0, 1), lse_base="2")


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """merge_state of both states, written to v and s, which is f32. mask: bool [rows], the rows that are merged; None: all."""
    check_tensor(v.device, "s", s, torch.float32)  # s is written, so no copy of another type may take its place
    s_other = s_other.float()
    if mask is not None:
        s_other = s_other.masked_fill(~mask.bool()[:, None], -math.inf)  # an empty state changes nothing
    merged(torch.stack((v, v_other)), torch.stack((s, s_other)), lse_base="2", out=v, lse=s)


class MultiLevelCascadeAttentionWrapper:
    """Attends over levels of pages, each shared by more requests than the next, and merges the states of the levels."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Levels | None = None,
        paged_kv_indptr_buf_arr: Levels | None = None,
        paged_kv_indices_buf_arr: Levels | None = None,
        paged_kv_last_page_len_buf_arr: Levels | None = None,
    ) -> None:
        """Each level has a BatchPrefillWithPagedKVCacheWrapper, which takes the level's buffers with use_cuda_graph."""
        self.is_cuda_graph_enabled, self._num_levels = use_cuda_graph, num_levels
        given: dict[str, Levels | None] = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        buffers: dict[str, Any] = {name: self._by_level(f"{name}_arr", arr) for name, arr in given.items() if arr is not None}
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, **{name: each[level] for name, each in buffers.items()}
            )
            for level in range(num_levels)
        ]

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: Levels) -> None:
        """Changes nothing, like a level's reset_workspace_buffer. Raises InvalidArgument for a buffer on another device."""
        for level in self._levels:
            level.reset_workspace_buffer(float_workspace_buffer)

    def plan(
        self,
        qo_indptr_arr: Levels, paged_kv_indptr_arr: Levels, paged_kv_indices_arr: Levels,
        paged_kv_last_page_len: Levels, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        causal: bool = False, *scores: Any, **options: Any,
    ) -> None:  # fmt: skip
        """Plans each level as BatchPrefillWithPagedKVCacheWrapper.plan does; the last level alone may be causal.

        The arguments after causal are pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap,
        rope_scale, rope_theta, q_data_type and kv_data_type, in this order. Raises what a level's plan() raises; then no level
        has changed.
        """
        given = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        tables = zip(*(self._by_level(name, arr) for name, arr in given.items()), strict=True)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size, None, None, None)
        with ExitStack() as plans:
            for level, some in zip(self._levels, tables, strict=True):
                arguments: list[Any] = [*some, *sizes, causal and level is self._levels[-1], *scores]
                plans.enter_context(level.planning())
                level.plan(*arguments, **options)

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Cache) -> Tensor:
        """Returns out. q, out: [total_q, num_qo_heads, head_dim]; paged_kv_cache holds the pages of all levels."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        result: Tensor = out
        return result

    forward = run

    def end_forward(self) -> None:
        """Does nothing, like FlashInfer's."""

    def _by_level(self, name: str, given: Levels) -> Levels:
        if len(given) != self._num_levels:
            raise InvalidProblem(f"len({name})", len(given), f"must be num_levels = {self._num_levels}")
        return given
