"""The attention classes and functions of FlashInfer, as far as its decode tests call them, over the package's plans.

What the plans do not do is `Refused` with a reason: rotary positions inside attention, ALiBi beside a cap (FlashInfer adds the
bias before its cap), ALiBi for keys ahead of their query (its bias goes on growing there, ours counts distance), an lse under
ALiBi (it counts the bias from another position), arbitrary masks, sums in f16, and head_dim 512. FlashInfer's lse has
base 2; its -1 and 0 mean "none".
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck

from .described import Heads, Refused, Scores, refuse_the_rest
from .slopes import alibi_slopes

Cache = Tensor | tuple[Tensor, Tensor]
MAX_HEAD_DIM = 256  # of the variants on a GPU
PAGE_SIZE = 16  # of the pages that single calls put their contiguous K and V into


@lru_cache(maxsize=256)
def plan_of(descriptor: Any, device: torch.device) -> tuple[Any, Tensor]:
    """A plan and its workspace: FlashInfer hands over a buffer that nobody has zeroed."""
    paged_decode = isinstance(descriptor, ck.PagedDecodeDescriptor)
    plan = (ck.PagedDecodePlan if paged_decode else ck.PagedAttentionPlan).select(descriptor, device=str(device))
    return plan, plan.new_workspace()


def pages_of(cache: Cache, kv_layout: str) -> tuple[Tensor, Tensor]:
    """K and V [pages, ...], four axes each: of a combined tensor or of a pair, where three axes stand for pages of one token."""
    k, v = cache.unbind(1) if isinstance(cache, Tensor) else cache
    token_axis = 1 if kv_layout == "NHD" else 2
    return (k, v) if k.dim() == 4 else (k.unsqueeze(token_axis), v.unsqueeze(token_axis))


class Wrapper:
    """What the batch classes share: where tables live, and a run of the plan for what was planned."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool, buffers: dict[str, Tensor | None]) -> None:
        self.device = workspace.device
        self.kv_layout = kv_layout
        self.buffers = buffers if use_cuda_graph else {}
        self.heads: Heads
        self.scores: Scores
        self.default_sinks: Tensor | None = None

    @property
    def layout(self) -> ck.KVLayout:
        return ck.KVLayout.HND if self.kv_layout == "HND" else ck.KVLayout.NHD

    @cached_property
    def slopes(self) -> Tensor:
        return alibi_slopes(self.heads.num_heads).to(self.device)

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """On the device; under a graph in the buffer that its launches read, at its front."""
        buffer = self.buffers.get(name)
        if buffer is None:
            return tensor.to(self.device, torch.int32)
        buffer[: len(tensor)].copy_(tensor)
        return buffer

    def attend(
        self,
        descriptor: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: ck.PageTable,
        *,
        sinks: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        **tables: Tensor,
    ) -> Any:
        """out like q as the test gave it, [rows, num_heads, head_dim], and lse where it is asked for."""
        if return_lse and self.scores.alibi:
            raise Refused("an lse under ALiBi: FlashInfer counts the bias from another position")
        if self.device.type == "cuda" and self.heads.head_dim > MAX_HEAD_DIM:
            raise Refused(f"head_dim {self.heads.head_dim}: no variant on a GPU goes beyond {MAX_HEAD_DIM}")
        plan, workspace = plan_of(descriptor, self.device)
        shape = (-1, *q.shape[-2:])
        got, got_lse = plan.run(
            q,
            k,
            v,
            table,
            alibi_slopes=self.slopes if self.scores.alibi else None,
            sinks=sinks,
            out=None if out is None else out.view(q.shape),
            lse=lse,
            workspace=workspace,
            **tables,
        )
        got = got.view(shape) if out is None else out
        return (got, got_lse) if return_lse else got


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One new token a request through a PagedDecodePlan; q_len_per_req of them, causal, through a PagedAttentionPlan."""

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
        buffers = {
            "indptr": paged_kv_indptr_buffer,
            "indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self.use_tensor_cores = use_tensor_cores

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
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        q_len_per_req: int = 1,
        **options: Any,
    ) -> None:
        refuse_the_rest(options)
        q_dtype = q_data_type or data_type or torch.float16
        self.heads = Heads(num_qo_heads, num_kv_heads, head_dim, q_dtype, kv_data_type or data_type or q_dtype)
        self.scores = Scores(True, window_left, logits_soft_cap, pos_encoding_mode, sm_scale)
        self.batch_size, self.page_size, self.q_len = len(last_page_len), page_size, q_len_per_req
        self.table = ck.PageTable.csr(
            self.place("indptr", indptr), self.place("indices", indices), self.place("last_page_len", last_page_len)
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Any:
        refuse_the_rest(options)
        if q.shape[0] != self.batch_size * self.q_len:
            raise ValueError(f"q has {q.shape[0]} rows, planned are {self.batch_size} x q_len_per_req {self.q_len}")
        k, v = pages_of(paged_kv_cache, self.kv_layout)
        fields = {
            "batch_size": self.batch_size,
            "page_size": self.page_size,
            "layout": self.layout,
            "table_format": "csr",
            **self.heads.fields(),
            **self.scores.fields(sinks is not None),
        }
        if self.q_len == 1:
            descriptor: Any = ck.PagedDecodeDescriptor(**fields)
        else:
            descriptor = ck.PagedAttentionDescriptor(
                **fields, max_q_len=self.q_len, query_format="uniform", causal="bottom_right"
            )
            q = q.unflatten(0, (self.batch_size, self.q_len))
        return self.attend(descriptor, q, k, v, self.table, sinks=sinks, out=out, lse=lse, return_lse=return_lse)

    def run_return_lse(self, q: Tensor, paged_kv_cache: Cache, **options: Any) -> tuple[Tensor, Tensor]:
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def forward(self, q: Tensor, paged_kv_cache: Cache, **scores: Any) -> Tensor:
        """The older verb: what is said of scores here takes the place of what was planned."""
        self.scores = replace(self.scores, **scores)
        return self.run(q, paged_kv_cache)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same over buffers that a graph reads."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
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
        **options: Any,
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr_buf,
            "indptr": paged_kv_indptr_buf,
            "indices": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        refuse_the_rest(options)
        self.heads = Heads(num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type or q_data_type)
        self.scores = Scores(causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale)
        self.max_q_len = int(qo_indptr.diff().max())
        self.qo_indptr = self.place("qo_indptr", qo_indptr)
        self.batch_size, self.page_size = len(paged_kv_last_page_len), page_size
        self.table = ck.PageTable.csr(
            self.place("indptr", paged_kv_indptr),
            self.place("indices", paged_kv_indices),
            self.place("last_page_len", paged_kv_last_page_len),
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Any:
        refuse_the_rest(options)
        k, v = pages_of(paged_kv_cache, self.kv_layout)
        return self.attend(
            ck.PagedAttentionDescriptor(
                batch_size=self.batch_size,
                page_size=self.page_size,
                layout=self.layout,
                table_format="csr",
                max_q_len=self.max_q_len,
                query_format="ragged",
                causal="bottom_right" if self.scores.causal else None,
                **self.heads.fields(),
                **self.scores.fields(sinks is not None),
            ),
            q,
            k,
            v,
            self.table,
            sinks=sinks,
            out=out,
            lse=lse,
            return_lse=return_lse,
            qo_indptr=self.qo_indptr,
        )


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Its run takes the sinks and the scale behind the cache."""

    def run(self, q: Tensor, paged_kv_cache: Cache, sink: Tensor, sm_scale: float, **options: Any) -> Any:
        self.scores = replace(self.scores, sm_scale=sm_scale)
        return super().run(q, paged_kv_cache, sinks=sink, **options)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Ragged query rows over packed K and V, through a PagedAttentionPlan; with jit_args, run takes sinks and the scale."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", jit_args: Any = None, **options: Any) -> None:
        super().__init__(float_workspace_buffer, kv_layout, False, {})
        if kv_layout != "NHD":
            raise Refused(f"packed K and V of layout {kv_layout}")

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        refuse_the_rest(options)
        self.heads = Heads(num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type or q_data_type)
        self.scores = Scores(causal, window_left, logits_soft_cap, pos_encoding_mode, sm_scale)
        self.batch_size, self.max_q_len = len(qo_indptr) - 1, int(qo_indptr.diff().max())
        self.qo_indptr, self.kv_indptr = self.place("qo_indptr", qo_indptr), self.place("kv_indptr", kv_indptr)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None = None,
        sm_scale: float | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        refuse_the_rest(options)
        scores = self.scores if sm_scale is None else replace(self.scores, sm_scale=sm_scale)
        return self.attend(
            ck.PagedAttentionDescriptor(
                batch_size=self.batch_size,
                page_size=None,
                table_format="packed",
                max_q_len=self.max_q_len,
                query_format="ragged",
                causal="bottom_right" if scores.causal else None,
                **self.heads.fields(),
                **scores.fields(sink is not None),
            ),
            q,
            k,
            v,
            ck.PageTable.packed(self.kv_indptr),
            sinks=sink,
            out=out,
            lse=lse,
            return_lse=return_lse,
            qo_indptr=self.qo_indptr,
        )


def paged(tokens: Tensor, order: Tensor) -> Tensor:
    """tokens [n, num_kv_heads, head_dim] in NHD pages, the i-th sixteen of them in page order[i]; NaN fills the last page."""
    pages = tokens.new_full((len(order), PAGE_SIZE, *tokens.shape[1:]), torch.nan)
    padded = tokens.new_full((len(order) * PAGE_SIZE, *tokens.shape[1:]), torch.nan)
    padded[: len(tokens)] = tokens
    pages[order.long()] = padded.unflatten(0, (len(order), PAGE_SIZE))
    return pages


def single_decode_with_kv_cache(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any) -> Any:
    """q [num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim]: a batch of one row over shuffled pages."""
    options.setdefault("q_data_type", q.dtype)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(q.new_empty(0))
    num_pages = -(-len(k) // PAGE_SIZE)
    order = torch.randperm(num_pages, device=q.device, dtype=torch.int32)
    counts = torch.tensor([0, num_pages], dtype=torch.int32)
    last = torch.tensor([len(k) - PAGE_SIZE * (num_pages - 1)], dtype=torch.int32)
    wrapper.plan(counts, order, last, len(q), k.shape[1], k.shape[2], PAGE_SIZE, kv_data_type=k.dtype, **options)
    got = wrapper.run(q[None], (paged(k, order), paged(v, order)), return_lse=return_lse)
    return (got[0][0], got[1][0]) if return_lse else got[0]


def single_prefill_with_kv_cache(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any) -> Any:
    """q [rows, num_heads, head_dim], k and v as for decode: a batch of one over shuffled pages."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(q.new_empty(0))
    num_pages = -(-len(k) // PAGE_SIZE)
    order = torch.randperm(num_pages, device=q.device, dtype=torch.int32)
    rows, counts = torch.tensor([0, len(q)], dtype=torch.int32), torch.tensor([0, num_pages], dtype=torch.int32)
    last = torch.tensor([len(k) - PAGE_SIZE * (num_pages - 1)], dtype=torch.int32)
    sizes = (q.shape[1], k.shape[1], k.shape[2], PAGE_SIZE)
    wrapper.plan(rows, counts, order, last, *sizes, q_data_type=q.dtype, kv_data_type=k.dtype, **options)
    return wrapper.run(q, (paged(k, order), paged(v, order)), return_lse=return_lse)
