"""FlashInfer's batch prefill over packed K and V."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import Unsupported
from ...kv.page_table import PageTable
from .. import with_unit_last_stride
from .arguments import Scores, heads_and_types, preference_of, refuse
from .rows import RaggedRows
from .wrapper import all_or_nothing


class BatchPrefillWithRaggedKVCacheWrapper(RaggedRows):
    """Ragged query rows over packed tokens, through a PagedAttentionPlan."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Like BatchPrefillWithPagedKVCacheWrapper, with a buffer [batch + 1] for kv_indptr. Raises Unsupported for HND."""
        refuse(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, jit_args=jit_args, jit_kwargs=jit_kwargs)
        if kv_layout == "HND":
            raise Unsupported(["kv_layout = 'HND': packed K and V are [tokens, num_kv_heads, head_dim], NHD"])
        super().__init__(
            float_workspace_buffer, "HND", use_cuda_graph, {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        )  # a descriptor of packed tokens has this layout

    @all_or_nothing
    def plan(
        self,
        qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        head_dim_vo: int | None = None, custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None, token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, v_indptr: Tensor | None = None, o_indptr: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Like BatchPrefillWithPagedKVCacheWrapper.plan; request b has the tokens kv_indptr[b] : kv_indptr[b + 1] of K and V."""
        refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, use_fp16_qk_reduction=use_fp16_qk_reduction)
        refuse(prefix_len_ptr=prefix_len_ptr, max_item_len_ptr=max_item_len_ptr, v_indptr=v_indptr, o_indptr=o_indptr)
        refuse(token_pos_in_items_ptr=token_pos_in_items_ptr, token_pos_in_items_len=token_pos_in_items_len)
        heads = heads_and_types(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type)
        scores = Scores(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        table = PageTable.packed(self._place("kv_indptr", "kv_indptr_buf", kv_indptr, non_blocking))
        fields = {**heads, "batch_size": max(0, len(kv_indptr) - 1), "page_size": None, "table_format": "packed"}
        preference = preference_of(fixed_split_size, disable_split_kv)
        self._settle_rows(fields, scores, table, qo_indptr, non_blocking, max_token_per_sequence, max_sequence_kv, preference)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Like BatchPrefillWithPagedKVCacheWrapper.run; k, v: [tokens, num_kv_heads, head_dim]."""
        if args or not kv_cache_sf is o_scale is None:
            refuse(args=args, kv_cache_sf=kv_cache_sf, o_scale=None if o_scale == 1 else o_scale)
        k, v = with_unit_last_stride(k), with_unit_last_stride(v)
        return self.attend(q, k, v, out, lse, return_lse, None, q_scale, k_scale, v_scale)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=return_lse)
