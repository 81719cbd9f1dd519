"""FlashInfer's batch decode over a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks.fields import check_extent
from ...errors import InvalidArgument, InvalidProblem
from .arguments import Scores, check_window, heads_and_types, preference_of, refuse
from .caches import Cache, PagedCaches
from .single import single_decode_with_kv_cache
from .wrapper import BatchWrapper, all_or_nothing

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]


class BatchDecodeWithPagedKVCacheWrapper(BatchWrapper):
    """One query row per request through a PagedDecodePlan; q_len_per_req causal rows through a PagedAttentionPlan."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        """float_workspace_buffer: names the device.

        With use_cuda_graph, the three buffers are int32 tensors on that device, [batch + 1], [the most pages] and [batch]: plan()
        writes into them the page table that captured launches read.

        use_tensor_cores and backend change nothing. Raises InvalidArgument for a buffer, Unsupported for jit_args.
        """
        refuse(jit_args=jit_args)
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self.use_tensor_cores = use_tensor_cores
        self._pages = PagedCaches(kv_layout)
        self._q_len = 0  # before plan()
        self._row_bounds: dict[tuple[int, int], Tensor] = {}

    @all_or_nothing
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        window_right: int = 0,
    ) -> None:
        """Keeps the page table, int32 on any device, and selects the plan; nothing is read back from the device.

        indptr [batch + 1], indices [pages], last_page_len [batch]: request b has the pages indices[indptr[b] : indptr[b + 1]], of
        page_size tokens each but the last, which holds last_page_len[b]. sm_scale: head_dim ** -0.5 by default. window_left: -1
        for none, logits_soft_cap: None or 0 for none. fixed_split_size, disable_split_kv: if set, a row's bits do not depend on
        the batch. block_tables and seq_lens repeat the page table and are not read; nor are rope_scale and rope_theta.

        Raises Unsupported for an argument without a counterpart, InvalidProblem for a value that breaks a rule, and what `select`
        raises.
        """
        refuse(window_right=window_right)
        if q_data_type is None:
            q_data_type = data_type or "float16"
        kv_data_type = kv_data_type or data_type
        heads = heads_and_types(num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type, o_data_type)
        scores = Scores(True, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        if self.is_cuda_graph_enabled and self._q_len not in (0, q_len_per_req):
            rule = f"must stay {self._q_len} beside use_cuda_graph = True: captured launches have so many"
            raise InvalidProblem("q_len_per_req", q_len_per_req, rule)
        check_extent("q_len_per_req", q_len_per_req)
        table, batch = self._place_pages("", "buffer", indptr, indices, last_page_len, non_blocking)
        fields = {**heads, "batch_size": batch, "page_size": page_size, "table_format": "csr"}
        self._q_len, self._total_q, rows = q_len_per_req, None, None
        if q_len_per_req != 1:  # ragged, though rows are uniform: a view of q with an axis of requests would take 2 us per run
            fields["max_q_len"], rows, self._total_q = q_len_per_req, self._rows(batch), batch * q_len_per_req
        preference = preference_of(fixed_split_size, disable_split_kv)
        self._settle(fields, scores, table, qo_indptr=rows, preference=preference)

    begin_forward = plan

    def _rows(self, batch: int) -> Tensor:
        """int32 [batch + 1], where the query rows of each request begin. Kept, since captured graphs go on reading it."""
        key = (batch, self._q_len)
        kept = self._row_bounds.get(key)
        if kept is None:
            ends = (batch + 1) * self._q_len
            kept = self._row_bounds[key] = torch.arange(0, ends, self._q_len, dtype=torch.int32).to(self.device)
        return kept

    def run(
        self,
        q: Tensor, paged_kv_cache: Cache, *args: Any, q_scale: float | None = None,
        k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None, q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:  # fmt: skip
        """Launches and returns out, or (out, lse) with return_lse; nothing is read back from the device.

        q, out: [batch * q_len_per_req, num_qo_heads, head_dim]; lse: f32 [rows of q, num_qo_heads], to base 2. paged_kv_cache:
        one tensor [pages, 2, ...] or a tuple (K, V), in kv_layout. q_scale, k_scale, v_scale: factors on q, K and V, floats; for
        K and V also f32 tensors [1]. sinks: f32 [num_qo_heads], natural logits. window_left, q_len_per_req: None, or as planned.
        enable_pdl changes nothing.

        Raises Unsupported for an argument without a counterpart, InvalidArgument and InvalidProblem for one that contradicts
        plan(), and what the plan's `run` raises.
        """
        if args or not kv_cache_sf is skip_softmax_threshold_scale_factor is None:
            refuse(args=args, kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if not window_left is q_len_per_req is None:
            self._check_repeated(window_left, q_len_per_req)
        k, v = self._pages(paged_kv_cache)
        return self.attend(q, k, v, out, lse, return_lse, sinks, q_scale, k_scale, v_scale)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
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
        """The older name of `run`: its arguments about scores replace the planned ones."""
        self._score_anew(Scores(True, pos_encoding_mode, window_left, logits_soft_cap, sm_scale))
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def _check_repeated(self, window_left: int | None, q_len_per_req: int | None) -> None:
        check_window(window_left, self._scores)
        if q_len_per_req not in (None, self._q_len):
            raise InvalidArgument("q_len_per_req", f"is {q_len_per_req}, must be None or as planned, {self._q_len}")


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same wrapper over buffers that a captured graph reads."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        """Like BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph."""
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer)


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
    window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    non_blocking: bool = True, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    q_len_per_req: int = 1, global_override_indptr_cpu: Tensor | None = None,
) -> None:  # fmt: skip
    """Calls the wrapper's plan(), which schedules nothing on the host anyway; global_override_indptr_cpu is not read."""
    # fmt: off
    wrapper.plan(
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left,
        logits_soft_cap, q_data_type, kv_data_type, data_type=data_type, sm_scale=sm_scale, non_blocking=non_blocking,
        fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req,
    )
    # fmt: on
