"""FlashInfer for several query rows, masks and score modifiers: by the same kernels, by two more wrappers, and by its fa3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from perf.cases import Case, Operation
from perf.inputs import DTYPES, Inputs
from perf.providers.base import Candidate, paged, require, require_scores, require_storage, served
from perf.providers.flashinfer import (
    WORKSPACE_BYTES,
    FlashInfer,
    FlashInferFa2,
    FlashInferXqa,
    cache_dtype,
    planned,
    prefill_module,
)
from perf.scores import visible

MASK_SLACK = 64  # bytes after a packed mask that a kernel may read
FA3_HEAD_DIMS = (64, 128, 256)
FA3_SOURCE = Path("data", "csrc", "batch_prefill_sm90.cu")  # in the package; a package without this file cannot compile fa3


class Fa2Attention(FlashInferFa2):
    """The decode wrapper; for a mixed batch and a tree of drafts the prefill wrapper, and for sinks the wrapper with sinks."""

    operation: ClassVar[Operation] = "attention"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        if inputs.case.sinks:
            return self.with_sinks(inputs)
        if inputs.case.mixed:
            require_storage(inputs.case, "e4m3", "e5m2")
            require_scores(inputs.case)
            return causal_prefill(inputs, "fa2")
        return self.with_tree(inputs) if inputs.case.tree_mask else super().prepare(inputs)

    def with_sinks(self, inputs: Inputs) -> Sequence[Candidate]:
        """BatchAttentionWithAttentionSinkWrapper, which is compiled for q's and the cache's dtype, but named by q's alone."""
        from flashinfer import BatchAttentionWithAttentionSinkWrapper

        case = inputs.case
        require_scores(case, "window_left", "sinks")
        require(case.kv_dtype is None, "its kernel with sinks is named by q's dtype alone: one cache dtype a process")
        dtype = DTYPES[case.dtype]
        window = -1 if case.window_left is None else case.window_left
        types = {"q_data_type": dtype, "kv_data_type": dtype}
        wrapper = BatchAttentionWithAttentionSinkWrapper(
            **buffers(inputs), **types, head_dim_qk=case.head_dim, head_dim_vo=case.head_dim, window_left=window
        )
        plan = partial(wrapper.plan, *table(inputs), causal=True, window_left=window, **types)
        return planned(inputs, wrapper, plan, inputs.operands.sinks, inputs.softmax_scale)

    def with_tree(self, inputs: Inputs) -> Sequence[Candidate]:
        """BatchPrefillWithPagedKVCacheWrapper with a mask over all keys of each request."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        case = inputs.case
        require_storage(case, "e4m3", "e5m2")
        require_scores(case, "tree_mask")
        device = inputs.sets[0].q.device
        masks = [visible(case, inputs.operands, [row], tokens, device).flatten() for row, tokens in enumerate(case.tokens())]
        packed_bytes = sum(-(-mask.numel() // 8) for mask in masks)
        mask_buffers = {
            "custom_mask_buf": torch.zeros(packed_bytes + MASK_SLACK, dtype=torch.uint8, device=device),
            "mask_indptr_buf": torch.zeros(case.batch_size + 1, dtype=torch.int32, device=device),
        }
        wrapper = BatchPrefillWithPagedKVCacheWrapper(**buffers(inputs), **mask_buffers)
        types = {"q_data_type": DTYPES[case.dtype], "kv_data_type": inputs.sets[0].k.dtype}
        mask = torch.cat(masks)
        return planned(
            inputs, wrapper, partial(wrapper.plan, *table(inputs), custom_mask=mask, uniform_q_len=case.q_rows, **types)
        )


class Fa3Attention(FlashInfer):
    """BatchPrefillWithPagedKVCacheWrapper by its FlashAttention-3 template: causal rows over 16-bit pages."""

    name: ClassVar[str] = "flashinfer-fa3"
    operation: ClassVar[Operation] = "attention"

    def available(self) -> str | None:
        return super().available() or (None if has_fa3_source() else f"the package flashinfer has no {FA3_SOURCE.name}")

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        require_fa3(inputs.case)
        return causal_prefill(inputs, "fa3")

    def builds(self, cases: Sequence[Case]) -> Iterable[Callable[[], object]]:
        for key in {(DTYPES[c.dtype], cache_dtype(c), c.head_dim) for c in cases if served(require_fa3, c)}:
            yield prefill_module("fa3", *key, 0, False, False)


class XqaAttention(FlashInferXqa):
    """Drafts with their mask, windows and sinks."""

    operation: ClassVar[Operation] = "attention"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        require(not inputs.case.mixed, "every request must have as many query rows")
        return super().prepare(inputs)

    def builds(self, cases: Sequence[Case]) -> Iterable[Callable[[], object]]:
        return super().builds([case for case in cases if not case.mixed])


def causal_prefill(inputs: Inputs, backend: str) -> Sequence[Candidate]:
    """BatchPrefillWithPagedKVCacheWrapper over query rows that may differ by the request."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(**buffers(inputs) | {"backend": backend})
    types = {"q_data_type": DTYPES[inputs.case.dtype], "kv_data_type": inputs.sets[0].k.dtype}
    return planned(inputs, wrapper, partial(wrapper.plan, *table(inputs), causal=True, **types))


def require_fa3(case: Case) -> None:
    """Raises NotSupported for cases that FlashInfer's fa3 is not measured on."""
    require(case.page_size > 0, "its cache is paged")
    require_storage(case)
    require_scores(case)
    require(case.q_rows > 1, "one query row is decode")
    require(case.head_dim in FA3_HEAD_DIMS, f"head_dim {case.head_dim} is not one of {FA3_HEAD_DIMS}")


def has_fa3_source() -> bool:
    """Whether the installed package carries the source of fa3's batch prefill, which it compiles on first use."""
    package = find_spec("flashinfer")
    folders = package.submodule_search_locations if package else None
    return any((Path(folder) / FA3_SOURCE).is_file() for folder in folders or ())


def table(inputs: Inputs) -> tuple[object, ...]:
    """The arguments of a prefill plan for the query rows, the page table and the shape."""
    case, pages = inputs.case, paged(inputs)
    shape = (case.num_heads, case.num_kv_heads, case.head_dim, case.page_size)
    return inputs.qo_indptr(), pages.indptr, pages.indices, pages.last_page_len, *shape


def buffers(inputs: Inputs) -> dict[str, Any]:
    """The buffers that a prefill wrapper in a CUDA graph keeps."""
    pages = paged(inputs)
    return {
        "float_workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.table.device),
        "kv_layout": inputs.case.layout,
        "use_cuda_graph": True,
        "qo_indptr_buf": inputs.qo_indptr(),
        "paged_kv_indptr_buf": pages.indptr.clone(),
        "paged_kv_indices_buf": pages.indices.clone(),
        "paged_kv_last_page_len_buf": pages.last_page_len.clone(),
        "backend": "fa2",
    }
