"""FlashInfer: its FlashAttention-2 paged decode on tensor cores, and XQA. Both need the package flashinfer-python."""

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
from perf.providers.base import Candidate, Result, paged, require, require_scores, require_sm90, require_storage
from perf.record import package_version
from perf.scores import chain_rows, packed

WORKSPACE_BYTES = 512 * 2**20  # zeroed once: FlashInfer asks for that
XQA_PAGES = (16, 32, 64, 128)
ALIBI = 2  # its number in FlashInfer's PosEncodingMode
BUILDS = 6  # builds at a time: each runs a few compilers of up to 2 GB


class FlashInfer(ABC):
    """The base of FlashInfer's providers: the package, and modules that are compiled for several cases at once."""

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
        """For each module that `prepare` would ask for, one function that compiles and loads it."""


class FlashInferFa2(FlashInfer):
    """BatchDecodeWithPagedKVCacheWrapper with tensor cores; its plan step, a copy to the host, is outside the timing."""

    name: ClassVar[str] = "flashinfer-fa2"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        case, pages = inputs.case, paged(inputs)
        require_storage(case, "e4m3", "e5m2")
        require_scores(case, "window_left", "softcap", "alibi")
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
        types = {"q_data_type": DTYPES[case.dtype], "kv_data_type": inputs.sets[0].k.dtype}
        return planned(inputs, wrapper, partial(wrapper.plan, *table, *shape, **types, **plan_options(case)))

    def builds(self, cases: Sequence[Case]) -> Iterable[Callable[[], object]]:
        keys = {
            (DTYPES[c.dtype], cache_dtype(c), c.head_dim, ALIBI if c.alibi else 0, c.window_left is not None, bool(c.softcap))
            for c in cases
            if c.kv_dtype != "int8" and not c.sinks
        }
        for key in keys:
            yield prefill_module("fa2", *key)


class FlashInferXqa(FlashInfer):
    """xqa_batch_decode_with_kv_cache. Over an e4m3 cache it rounds q and P to e4m3 internally."""

    name: ClassVar[str] = "flashinfer-xqa"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        case, pages = inputs.case, paged(inputs)
        require_storage(case, "e4m3")
        require(case.page_size in XQA_PAGES, f"page_size {case.page_size} is not one of {XQA_PAGES}")
        require(case.head_dim % 16 == 0, f"head_dim {case.head_dim} is not a multiple of 16")
        require_scores(case, "window_left", "sinks", "tree_mask")
        require(case.tree_mask is None or case.window_left is None, "no tree of drafts under a window")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.table.device)
        table = pages.table.clamp_min(0)
        seq_lens = pages.seq_lens.view(torch.uint32)
        max_seq_len = max(case.tokens())
        out = torch.empty_like(inputs.sets[0].q)
        options = xqa_options(inputs)

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
                    **options,
                )
                return out, None

            return run

        calls = [call(s.q.flatten(0, -3), s.k, s.v) for s in inputs.sets]
        return [Candidate(calls, {"q_dtype": "e4m3"}, tolerance=FP8_QUERY) if case.kv_dtype else Candidate(calls)]

    def builds(self, cases: Sequence[Case]) -> Iterable[Callable[[], object]]:
        from flashinfer.xqa import get_xqa_module

        keys = {
            (
                DTYPES[c.dtype],
                cache_dtype(c),
                c.page_size,
                c.head_dim,
                c.num_heads // c.num_kv_heads,
                c.window_left is not None,
                c.q_rows,
            )
            for c in cases
            if c.kv_dtype in (None, "e4m3") and c.page_size in XQA_PAGES and c.head_dim % 16 == 0 and not (c.softcap or c.alibi)
        }
        for *key, q_rows in keys:
            yield partial(get_xqa_module, *key, key[0], q_rows, False)  # window; out, query tokens, ragged


def prefill_module(
    backend: str, q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, *scores: int
) -> Callable[[], object]:
    """A function that compiles and loads the module of prefill wrappers, and of decode wrappers with tensor cores.

    scores: the number of the PosEncodingMode, whether there is a window, whether there is a soft cap.
    """
    from flashinfer.prefill import get_batch_prefill_module

    shape = (backend, q_dtype, kv_dtype, q_dtype, torch.int32, head_dim, head_dim)
    return partial(get_batch_prefill_module, *shape, *scores, False)  # f16 scores


def plan_options(case: Case) -> dict[str, object]:
    """The options of fa2's decode plan for query rows and scores; none for plain decode."""
    options: dict[str, object] = {}
    if case.q_rows > 1:
        options["q_len_per_req"] = case.q_rows
    if case.window_left is not None:
        options["window_left"] = case.window_left
    if case.softcap is not None:
        options["logits_soft_cap"] = case.softcap
    if case.alibi:
        options["pos_encoding_mode"] = "ALIBI"  # FlashInfer's own slopes: 2 ** (-8 / num_heads * head), head from 1 on
    return options


def planned(inputs: Inputs, wrapper: Any, plan: Callable[[], object], *more: object) -> Sequence[Candidate]:
    """The calls of a wrapper after its plan. more: the arguments of its run after the caches."""
    plan()
    out = torch.empty_like(inputs.sets[0].q.flatten(0, -3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Result]:
        return lambda: (wrapper.run(q, (k, v), *more, out=out), None)

    calls = [call(s.q.flatten(0, -3), s.k, s.v) for s in inputs.sets]
    return [Candidate(calls, host={"run": calls[0], "plan": plan})]


def xqa_options(inputs: Inputs) -> dict[str, object]:
    """XQA's options for query rows and scores; none for plain decode. Drafts, even a chain, need a mask of 16-bit words."""
    case, operands = inputs.case, inputs.operands
    options: dict[str, object] = {}
    if case.window_left is not None:
        options["window_left"] = case.window_left
    if operands.sinks is not None:
        options["sinks"] = operands.sinks
    if case.q_rows > 1:
        chain = torch.tensor(packed(chain_rows(case.q_rows)), dtype=torch.int32, device=inputs.sets[0].q.device)
        words = chain.repeat(case.batch_size, 1) if operands.tree_mask is None else operands.tree_mask
        mask = words.view(case.batch_size, case.q_rows, -1).view(torch.uint16)
        options |= {"q_len_per_req": case.q_rows, "mask": mask}
    return options


def cache_dtype(case: Case) -> torch.dtype:
    """The dtype of a case's cache tensors."""
    return KVDtype(case.kv_dtype or case.dtype).torch_dtype
