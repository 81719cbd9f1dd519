"""FlashInfer: its FlashAttention-2 paged decode on tensor cores, and XQA. Both want the package flashinfer-python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import ClassVar

import torch

from perf.correctness import FP8_QUERY, PEERS, Tolerance
from perf.inputs import DTYPES, Inputs
from perf.providers.base import Candidate, Result, paged, require, require_sm90, require_storage
from perf.record import package_version

WORKSPACE_BYTES = 512 * 2**20  # zeroed once: FlashInfer asks for that
XQA_PAGES = (16, 32, 64, 128)


class _FlashInfer:
    tolerance: ClassVar[Tolerance | None] = PEERS
    reads_unused: ClassVar[bool] = True

    def available(self) -> str | None:
        return require_sm90() or (None if find_spec("flashinfer") else "package flashinfer is not installed")

    def version(self) -> str:
        return package_version("flashinfer-python") or "unknown"


class FlashInferFa2(_FlashInfer):
    """BatchDecodeWithPagedKVCacheWrapper with tensor cores; its plan step, a copy to the host, is outside the timing."""

    name: ClassVar[str] = "flashinfer-fa2"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        case, pages = inputs.case, paged(inputs)
        require_storage(case, "e4m3", "e5m2")
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.table.device),
            kv_layout=case.layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=pages.indptr.clone(),
            paged_kv_indices_buffer=pages.indices.clone(),
            paged_kv_last_page_len_buffer=pages.last_page_len.clone(),
            backend="fa2",
        )
        shape = (case.num_heads, case.num_kv_heads, case.head_dim, case.page_size)
        table = (pages.indptr, pages.indices, pages.last_page_len)
        plan = partial(wrapper.plan, *table, *shape, q_data_type=DTYPES[case.dtype], kv_data_type=inputs.sets[0].k.dtype)
        plan()
        out = torch.empty_like(inputs.sets[0].q)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Result]:
            return lambda: (wrapper.run(q, (k, v), out=out), None)

        calls = [call(s.q, s.k, s.v) for s in inputs.sets]
        return [Candidate(calls, host={"run": calls[0], "plan": plan})]


class FlashInferXqa(_FlashInfer):
    """xqa_batch_decode_with_kv_cache. Over an e4m3 cache it rounds q and P to e4m3 on its way."""

    name: ClassVar[str] = "flashinfer-xqa"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        case, pages = inputs.case, paged(inputs)
        require_storage(case, "e4m3")
        require(case.page_size in XQA_PAGES, f"page_size {case.page_size} is not one of {XQA_PAGES}")
        require(case.head_dim % 16 == 0, f"head_dim {case.head_dim} is not a multiple of 16")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.table.device)
        table = pages.table.clamp_min(0)
        seq_lens = pages.seq_lens.view(torch.uint32)
        max_seq_len = max(case.tokens())
        out = torch.empty_like(inputs.sets[0].q)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Result]:
            def run() -> Result:
                xqa_batch_decode_with_kv_cache(
                    q,
                    (k, v),
                    workspace,
                    table,
                    seq_lens,
                    max_seq_len=max_seq_len,
                    bmm1_scale=inputs.softmax_scale,
                    kv_layout=case.layout,
                    out=out,
                )
                return out, None

            return run

        calls = [call(s.q, s.k, s.v) for s in inputs.sets]
        return [Candidate(calls, {"q_dtype": "e4m3"}, tolerance=FP8_QUERY) if case.kv_dtype else Candidate(calls)]
