"""FlashAttention-3, paged: the installed flash_attn_interface, or the extension that vLLM builds, named by FA3_SO."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch

from perf.correctness import PEERS, Tolerance
from perf.inputs import Inputs
from perf.providers.base import Candidate, Result, paged, require_sm90
from perf.record import package_version

NUM_SPLITS = (0, 1, 2, 4, 8, 16, 32)  # 0: its own choice


class FlashAttention3:
    """One query token a row, num_splits swept."""

    name: ClassVar[str] = "fa3"
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
        pages = paged(inputs)
        table = pages.table.clamp_min(0)
        bind = installed
        if not find_spec("flash_attn_interface"):
            torch.ops.load_library(os.environ["FA3_SO"])
            bind = extension
        candidates = []
        for num_splits in NUM_SPLITS:
            step = partial(bind, table, pages.seq_lens, inputs.softmax_scale, num_splits)
            calls = [step(s.q[:, None], tokens_first(s.k, inputs), tokens_first(s.v, inputs)) for s in inputs.sets]
            candidates.append(Candidate(calls, {"num_splits": num_splits}))
        return candidates


def tokens_first(cache: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """A cache as FlashAttention takes it: a view [pages, page_size, num_kv_heads, head_dim]."""
    return cache.transpose(1, 2) if inputs.case.layout == "HND" else cache


def installed(
    table: torch.Tensor, seq_lens: torch.Tensor, scale: float, num_splits: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Result]:
    """A call of flash_attn_with_kvcache: q [batch, 1, num_heads, head_dim]."""
    from flash_attn_interface import flash_attn_with_kvcache

    options = {"cache_seqlens": seq_lens, "page_table": table, "softmax_scale": scale, "num_splits": num_splits}
    return lambda: (flash_attn_with_kvcache(q, k, v, **options)[:, 0], None)


def extension(
    table: torch.Tensor, seq_lens: torch.Tensor, scale: float, num_splits: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Result]:
    """A call of the extension's operator `fwd`, whose arguments are positional: q [batch, 1, num_heads, head_dim]."""
    out = torch.empty_like(q)
    cache = (q, k, v, None, None, None, out)  # k_new, v_new, q_v
    lengths = (None, None, None, None, seq_lens, None, None)  # cu_seqlens q, k, k_new; seqused q, k; max_seqlen q, k
    placement = (table, None, None, None, None, None, None, None, None)  # kv_batch_idx, leftpad, 3 rotary, 3 descale
    softmax = (scale, False, -1, -1, 0.0, True)  # causal, window left and right, softcap, rotary_interleaved
    schedule = (None, num_splits, None, 0, None, 1, 0, None)  # metadata, splits, pack_gqa, sm_margin, s_aux, 3 of cp

    def run() -> Result:
        torch.ops._vllm_fa3_C.fwd(*cache, *lengths, *placement, *softmax, *schedule)
        return out[:, 0], None

    return run
