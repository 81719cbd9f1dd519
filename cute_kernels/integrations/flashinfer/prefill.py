"""FlashInfer's batch prefill over a paged cache: several query rows per request, ragged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import Scores, check_window, heads_and_types, preference_of, refuse
from .caches import Cache, PagedCaches
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .rows import RaggedRows
from .single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from .wrapper import all_or_nothing

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


class BatchPrefillWithPagedKVCacheWrapper(RaggedRows):
    """Ragged query rows over pages, through a PagedAttentionPlan."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Like BatchDecodeWithPagedKVCacheWrapper, with a buffer [batch + 1] for qo_indptr. Raises Unsupported for masks."""
        refuse(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, jit_args=jit_args, jit_kwargs=jit_kwargs)
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._pages = PagedCaches(kv_layout)

    @all_or_nothing
    def plan(
        self,
        qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True, prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None, seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None, block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        """Like BatchDecodeWithPagedKVCacheWrapper.plan; request b has the rows qo_indptr[b] : qo_indptr[b + 1] of q.

        causal: the last row of a request is at its last token. max_token_per_sequence: the most rows of a request; a qo_indptr
        on the host says this too, and without either, every request may have all rows of q. A qo_indptr on the host is checked
        against max_token_per_sequence, and against the rows of a run's q. With a qo_indptr on the device, a request's rows past
        max_token_per_sequence are not computed, nor are rows of q outside qo_indptr. max_sequence_kv: a hint, the most tokens of
        a request.
        """
        refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, use_fp16_qk_reduction=use_fp16_qk_reduction)
        refuse(prefix_len_ptr=prefix_len_ptr, max_item_len_ptr=max_item_len_ptr)
        refuse(token_pos_in_items_ptr=token_pos_in_items_ptr, token_pos_in_items_len=token_pos_in_items_len)
        heads = heads_and_types(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type)
        scores = Scores(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        tables = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        table, batch = self._place_pages("paged_kv_", "buf", *tables, non_blocking)
        fields = {**heads, "batch_size": batch, "page_size": page_size, "table_format": "csr"}
        preference = preference_of(fixed_split_size, disable_split_kv)
        self._settle_rows(fields, scores, table, qo_indptr, non_blocking, max_token_per_sequence, max_sequence_kv, preference)

    begin_forward = plan

    def run(
        self,
        q: Tensor, paged_kv_cache: Cache, *args: Any, q_scale: float | None = None,
        k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:  # fmt: skip
        """Like BatchDecodeWithPagedKVCacheWrapper.run; q, out: [total_q, num_qo_heads, head_dim], lse: [total_q, num_qo_heads].

        q has qo_indptr[batch] rows. If qo_indptr is on the device, rows at and past qo_indptr[batch] are padding: nothing is read
        or written there.
        """
        if args or not kv_cache_sf is skip_softmax_threshold_scale_factor is use_fp16_softmax is uses_spcompress is None:
            refuse(args=args, kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
            refuse(use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress)
        if window_left is not None:
            check_window(window_left, self._scores)
        k, v = self._pages(paged_kv_cache)
        return self.attend(q, k, v, out, lse, return_lse, sinks, q_scale, k_scale, v_scale)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """The older name of `run`: its arguments about scores replace the planned ones."""
        refuse(use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._score_anew(Scores(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale))
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
