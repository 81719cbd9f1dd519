"""FlashAttention-3, paged: the installed flash_attn_interface, or the extension that vLLM builds, named by FA3_SO."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch

from perf.cases import Case, Operation
from perf.correctness import FP8_QUERY, PEERS, Tolerance
from perf.inputs import Inputs
from perf.providers.base import Candidate, Result, paged, require_sm90, require_storage, tokens_first
from perf.record import package_version

NUM_SPLITS = (0, 1, 2, 4, 8, 16, 32)  # 0: its own choice


@dataclass(frozen=True)
class Step:
    """What the calls on all input sets share. descale: f32 [batch, num_kv_heads], of q, K and V, where q is e4m3."""

    table: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    num_splits: int
    descale: torch.Tensor | None


class FlashAttention3:
    """One query token a row, num_splits swept. Over an e4m3 cache it wants an e4m3 q, which is rounded outside the timing."""

    name: ClassVar[str] = "fa3"
    operation: ClassVar[Operation] = "decode"
    tolerance: ClassVar[Tolerance | None] = PEERS
    reads_unused: ClassVar[bool] = True

    def available(self) -> str | None:
        reason = require_sm90()
        if reason or find_spec("flash_attn_interface"):
            return reason
        library = os.environ.get("FA3_SO")
        if not library:
            return "package flash_attn_interface is not installed and FA3_SO is not set"
        return None if Path(library).is_file() else f"FA3_SO={library} is not a file"

    def version(self) -> str:
        return package_version("flash_attn_3") or Path(os.environ.get("FA3_SO", "unknown")).name

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        case, pages = inputs.case, paged(inputs)
        require_storage(case, "e4m3")
        table = pages.table.clamp_min(0)
        bind = installed
        if not find_spec("flash_attn_interface"):
            torch.ops.load_library(os.environ["FA3_SO"])
            bind = extension
        operands = [(query(s.q, case), tokens_first(s.k, case), tokens_first(s.v, case)) for s in inputs.sets]
        descale = torch.ones(case.batch_size, case.num_kv_heads, device=table.device) if case.kv_dtype else None
        rounded = {"q_dtype": "e4m3"} if case.kv_dtype else {}
        candidates = []
        for num_splits in NUM_SPLITS:
            step = Step(table, pages.seq_lens, inputs.softmax_scale, num_splits, descale)
            calls = [bind(step, *qkv) for qkv in operands]
            detail = {"num_splits": num_splits, **rounded}
            candidates.append(Candidate(calls, detail, tolerance=FP8_QUERY if rounded else None))
        return candidates


def query(q: torch.Tensor, case: Case) -> torch.Tensor:
    """q as FlashAttention takes it: [batch, 1, num_heads, head_dim], of the cache's dtype."""
    return q[:, None].to(torch.float8_e4m3fn) if case.kv_dtype else q[:, None]


def installed(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Result]:
    """A call of flash_attn_with_kvcache: q [batch, 1, num_heads, head_dim]."""
    from flash_attn_interface import flash_attn_with_kvcache

    options: dict[str, object] = {"cache_seqlens": step.seq_lens, "page_table": step.table}
    options |= {"softmax_scale": step.scale, "num_splits": step.num_splits}
    options |= {f"{name}_descale": step.descale for name in "qkv"}
    return lambda: (flash_attn_with_kvcache(q, k, v, **options)[:, 0], None)


def extension(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Result]:
    """A call of the extension's operator `fwd`, whose arguments are positional; the operands are those of `installed`."""
    out = torch.empty(q.shape, dtype=q.dtype if step.descale is None else torch.bfloat16, device=q.device)
    cache = (q, k, v, None, None, None, out)  # k_new, v_new, q_v
    lengths = (None, None, None, None, step.seq_lens, None, None)  # cu_seqlens q, k, k_new; seqused q, k; max_seqlen q, k
    placement = (step.table, None, None, None, None, None, *[step.descale] * 3)  # kv_batch_idx, leftpad, 3 rotary; q, k, v
    softmax = (step.scale, False, -1, -1, 0.0, True)  # causal, window left and right, softcap, rotary_interleaved
    schedule = (None, step.num_splits, None, 0, None, 1, 0, None)  # metadata, splits, pack_gqa, sm_margin, s_aux, 3 of cp

    def run() -> Result:
        torch.ops._vllm_fa3_C.fwd(*cache, *lengths, *placement, *softmax, *schedule)
        return out[:, 0], None

    return run
