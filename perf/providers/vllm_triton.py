"""vLLM's Triton kernel, if vllm is installed: the least that a serving engine brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import ClassVar

import torch

from perf.cases import Case, Operation
from perf.correctness import PEERS, Tolerance
from perf.inputs import Inputs, InputSet, Pages
from perf.providers.base import Candidate, Result, paged, require_sm90, require_storage, tokens_first
from perf.record import package_version

SPLIT_GRID = 128  # below so many rows x KV heads, vLLM cuts every row into SEGMENTS
SEGMENTS = 16


class VllmTriton:
    """unified_attention, as vLLM's Triton backend calls it for decode."""

    name: ClassVar[str] = "vllm-triton"
    operation: ClassVar[Operation] = "decode"
    tolerance: ClassVar[Tolerance | None] = PEERS
    reads_unused: ClassVar[bool] = True

    def available(self) -> str | None:
        return require_sm90() or (None if find_spec("vllm") else "package vllm is not installed")

    def version(self) -> str:
        return package_version("vllm") or "unknown"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        case, pages = inputs.case, paged(inputs)
        require_storage(case, "e4m3")
        options = fixed_operands(inputs, pages) | split_buffers(case, pages.table.device)
        return [Candidate([call(case, layer, options) for layer in inputs.sets])]


def fixed_operands(inputs: Inputs, pages: Pages) -> dict[str, object]:
    """The arguments that the calls on all input sets share."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    case, device = inputs.case, pages.table.device
    one = torch.ones(1, device=device) if case.kv_dtype else None
    return {
        "cu_seqlens_q": torch.arange(case.batch_size + 1, dtype=torch.int32, device=device),
        "max_seqlen_q": 1,
        "seqused_k": pages.seq_lens,
        "max_seqlen_k": max(case.tokens()),
        "softmax_scale": inputs.softmax_scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": pages.table.clamp_min(0),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": one,
        "v_descale": one,
        "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR if case.kv_dtype else KVQuantMode.NONE,
    }


def split_buffers(case: Case, device: torch.device) -> dict[str, object]:
    """Buffers of rows' segments, f32 [rows, num_heads, SEGMENTS(, head_dim up to a power of two)], and when rows are cut."""
    rows = SPLIT_GRID // case.num_kv_heads
    states = (max(rows, 1), case.num_heads, SEGMENTS)
    return {
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty(*states, 1 << (case.head_dim - 1).bit_length(), device=device),
        "softmax_segm_max": torch.empty(states, device=device),
        "softmax_segm_expsum": torch.empty(states, device=device),
    }


def call(case: Case, layer: InputSet, options: dict[str, object]) -> Callable[[], Result]:
    """A call on one input set; the caches are taken as [pages, page_size, num_kv_heads, head_dim]."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    k, v = (tokens_first(cache, case) for cache in (layer.k, layer.v))
    out = torch.empty_like(layer.q)

    def run() -> Result:
        unified_attention(q=layer.q, k=k, v=v, out=out, **options)
        return out, None

    return run
