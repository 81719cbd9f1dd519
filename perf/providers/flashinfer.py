"""FlashInfer: its FlashAttention-2 paged decode on tensor cores, and XQA. Both want the package flashinfer-python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from cute_kernels import KVDtype
from perf.cases import Case, Operation
from perf.correctness import FP8_QUERY, PEERS, Tolerance
from perf.inputs import DTYPES, Inputs
from perf.providers.base import Candidate, Result, paged, require, require_sm90, require_storage
from perf.record import package_version

WORKSPACE_BYTES = 512 * 2**20  # zeroed once: FlashInfer asks for that
XQA_PAGES = (16, 32, 64, 128)
BUILDS = 6  # at a time: each is a few compilers of up to 2 GB


class _FlashInfer(ABC):
    operation: ClassVar[Operation] = "decode"
    tolerance: ClassVar[Tolerance | None] = PEERS
    reads_unused: ClassVar[bool] = True

    def available(self) -> str | None:
        return require_sm90() or (None if find_spec("flashinfer") else "package flashinfer is not installed")

    def version(self) -> str:
        return package_version("flashinfer-python") or "unknown"

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """As CompilesAhead."""
        with ThreadPoolExecutor(BUILDS) as pool:
            wait([pool.submit(build) for build in self.builds([case for case in cases if case.page_size])])

    @abstractmethod
    def builds(self, cases: Sequence[Case]) -> Iterable[Callable[[], object]]:
        """What compiles and loads each module that `prepare` would ask for, once."""


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

    def builds(self, cases: Sequence[Case]) -> Iterable[Callable[[], object]]:
        from flashinfer.prefill import get_batch_prefill_module  # what a wrapper with tensor cores plans with

        fixed: tuple[Any, ...] = (0, False, False, False)  # positions, window, softcap, f16 scores
        keys = {(DTYPES[c.dtype], cache_dtype(c), c.head_dim) for c in cases if c.kv_dtype != "int8"}
        for q_dtype, kv_dtype, head_dim in keys:
            yield partial(get_batch_prefill_module, "fa2", q_dtype, kv_dtype, q_dtype, torch.int32, head_dim, head_dim, *fixed)


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

    def builds(self, cases: Sequence[Case]) -> Iterable[Callable[[], object]]:
        from flashinfer.xqa import get_xqa_module

        keys = {
            (DTYPES[c.dtype], cache_dtype(c), c.page_size, c.head_dim, c.num_heads // c.num_kv_heads)
            for c in cases
            if c.kv_dtype in (None, "e4m3") and c.page_size in XQA_PAGES and c.head_dim % 16 == 0
        }
        for key in keys:
            yield partial(get_xqa_module, *key, False, key[0], 1, False)  # window, out, query tokens, ragged


def cache_dtype(case: Case) -> torch.dtype:
    """The dtype of a case's cache tensors."""
    return KVDtype(case.kv_dtype or case.dtype).torch_dtype
