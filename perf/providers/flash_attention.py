"""FlashAttention-3, paged: the installed flash_attn_interface, or the extension that vLLM builds, named by FA3_SO.

FA3_VERSION names the extension's origin: "vllm 0.26.0".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from perf.cases import Case, Operation
from perf.correctness import FP8_QUERY, PEERS, Tolerance
from perf.inputs import DTYPES, Inputs, Pages
from perf.providers.base import (
    Candidate,
    NotSupported,
    Result,
    paged,
    require,
    require_scores,
    require_sm90,
    require_storage,
    tokens_first,
)
from perf.record import digest, package_version

NUM_SPLITS = (0, 1, 2, 4, 8, 16, 32)  # 0: FlashAttention-3's own choice
Schedule = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """The arguments that the calls on all input sets share. descale: f32 [batch, num_kv_heads], of q, K and V, if q is e4m3.

    metadata: the scheduler's, int32, which serves every layer of a model step; without it each call makes its own. window: keys
    before and after its own that a query row sees, -1 for all. softcap: 0 for none. sinks: bf16 [num_heads]. rows: for a mixed
    batch, (where the query rows of each request begin and end, int32 [batch + 1]; the most query rows of a request).
    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    num_splits: int
    descale: torch.Tensor | None
    metadata: torch.Tensor | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    rows: tuple[torch.Tensor, int] | None = None


class FlashAttention3:
    """FlashAttention-3's decode with a sweep of num_splits. Over an e4m3 cache it wants an e4m3 q, rounded outside the timing.

    The scheduler's metadata is made beforehand, as vLLM does once per model step, and timed as the step "plan"; a build without
    the operator that makes it makes it in every call.
    """

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
        installed_version = package_version("flash_attn_3")
        if installed_version:
            return f"flash_attn_3 {installed_version}"
        library = Path(os.environ.get("FA3_SO", ""))
        if not library.is_file():
            return "unknown"
        origin = os.environ.get("FA3_VERSION")
        owner = f"{origin}'s " if origin else ""
        return f"{owner}FA3, sha256 of the .so {file_digest(library)}"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        case, pages = inputs.case, paged(inputs)
        require_storage(case, "e4m3")
        require_scores(case, "window_left", "softcap", "sinks")
        table = pages.table.clamp_min(0)
        bind, scheduling = installed, installed_schedule
        if not find_spec("flash_attn_interface"):
            torch.ops.load_library(os.environ["FA3_SO"])
            bind, scheduling = extension, extension_schedule
        operands = [(query(s.q, case), tokens_first(s.k, case), tokens_first(s.v, case)) for s in inputs.sets]
        descale = torch.ones(case.batch_size, case.num_kv_heads, device=table.device) if case.kv_dtype else None
        rounded = {"q_dtype": "e4m3"} if case.kv_dtype else {}
        options = score_options(inputs) | ({"rows": (inputs.qo_indptr(), case.q_rows)} if case.mixed else {})
        candidates = []
        for num_splits in NUM_SPLITS:
            step = Step(table, pages.seq_lens, inputs.softmax_scale, num_splits, descale, **options)
            plan = scheduling(case, pages, step)
            if plan is not None:
                step = replace(step, metadata=plan())
            calls = [bind(step, *qkv) for qkv in operands]
            detail = {"num_splits": num_splits, "scheduler_metadata": "beforehand" if plan else "in the call", **rounded}
            steps = {"plan": plan} if plan else {}
            candidates.append(Candidate(calls, detail, steps, steps, FP8_QUERY if rounded else None))
        return candidates


class FlashAttention3Attention(FlashAttention3):
    """Several query rows, also mixed, windows, soft caps and sinks."""

    operation: ClassVar[Operation] = "attention"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        return refusing(lambda: super(FlashAttention3Attention, self).prepare(inputs))


@cache
def file_digest(path: Path) -> str:
    """Eight hexadecimal digits of the SHA-256 of a file."""
    return digest(path.read_bytes(), 8)


def query(q: torch.Tensor, case: Case) -> torch.Tensor:
    """q as FlashAttention takes it, in the cache's dtype: [batch, q rows, num_heads, head_dim]; for a mixed batch as it is."""
    rows = q if case.mixed else q.view(case.batch_size, case.q_rows, case.num_heads, case.head_dim)
    return rows.to(torch.float8_e4m3fn) if case.kv_dtype else rows


def score_options(inputs: Inputs) -> dict[str, Any]:
    """The fields of a step that modify scores."""
    case, sinks = inputs.case, inputs.operands.sinks
    window = (-1, -1) if case.window_left is None else (case.window_left, 0)
    causal = case.q_rows > 1 or case.window_left is not None
    return {
        "causal": causal,
        "window": window,
        "softcap": case.softcap or 0.0,
        "sinks": None if sinks is None else sinks.bfloat16(),
    }


def installed(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Result]:
    """A call of flash_attn_with_kvcache, with q from `query`."""
    from flash_attn_interface import flash_attn_with_kvcache

    require(step.sinks is None, "the package's interface has no sinks")
    options: dict[str, object] = {"cache_seqlens": step.seq_lens, "page_table": step.table}
    options |= {"softmax_scale": step.scale, "num_splits": step.num_splits}
    options |= {f"{name}_descale": step.descale for name in "qkv"}
    if step.metadata is not None:
        options["scheduler_metadata"] = step.metadata
    if step.causal:
        options |= {"causal": True, "window_size": step.window}
    if step.softcap:
        options["softcap"] = step.softcap
    if step.rows is not None:
        options["cu_seqlens_q"], options["max_seqlen_q"] = step.rows
    return lambda: (flash_attn_with_kvcache(q, k, v, **options).flatten(0, -3), None)


def extension(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Result]:
    """A call of the extension's operator `fwd`, whose arguments are positional; the operands are those of `installed`."""
    out = torch.empty(q.shape, dtype=q.dtype if step.descale is None else torch.bfloat16, device=q.device)
    cache = (q, k, v, None, None, None, out)  # k_new, v_new, q_v
    bounds, most = step.rows or (None, None)
    lengths = (bounds, None, None, None, step.seq_lens, most, None)  # cu_seqlens q, k, k_new; seqused q, k; max_seqlen q, k
    placement = (step.table, None, None, None, None, None, *[step.descale] * 3)  # kv_batch_idx, leftpad, 3 rotary; q, k, v
    softmax = (step.scale, step.causal, *step.window, step.softcap, True)  # window left and right; rotary_interleaved
    schedule = (step.metadata, step.num_splits, None, 0, step.sinks, 1, 0, None)  # splits, pack_gqa, sm_margin, s_aux, 3 of cp

    def run() -> Result:
        torch.ops._vllm_fa3_C.fwd(*cache, *lengths, *placement, *softmax, *schedule)
        return out.flatten(0, -3), None

    return run


def refusing(prepare: Callable[[], Sequence[Candidate]]) -> Sequence[Candidate]:
    """The candidates, after one call of one of them. Raises NotSupported with the message of a build that lacks the kernel."""
    try:
        candidates = prepare()
        candidates[0].calls[0]()
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else ""
        if "support" not in said:
            raise
        raise NotSupported(said) from error
    return candidates


def scheduled(case: Case, pages: Pages, step: Step) -> dict[str, object]:
    """The keywords that both makers of metadata share. The lengths' bound is the one that a call takes from its page table."""
    return {
        **({} if step.rows is None else {"cu_seqlens_q": step.rows[0]}),
        "batch_size": case.batch_size,
        "max_seqlen_q": case.q_rows,
        "max_seqlen_k": pages.table.shape[1] * case.page_size,
        "headdim": case.head_dim,
        "qkv_dtype": torch.float8_e4m3fn if case.kv_dtype else DTYPES[case.dtype],
        "page_size": case.page_size,
    }


def installed_schedule(case: Case, pages: Pages, step: Step) -> Schedule | None:
    """A function that makes the metadata with flash_attn_interface; None for a version without one."""
    import flash_attn_interface

    make = getattr(flash_attn_interface, "get_scheduler_metadata", None)
    if make is None:
        return None
    options: dict[str, object] = {"num_heads_q": case.num_heads, "num_heads_kv": case.num_kv_heads}
    if step.causal:
        options |= {"causal": True, "window_size": step.window}
    if step.softcap:
        options["has_softcap"] = True
    return partial(make, **scheduled(case, pages, step), **options, cache_seqlens=pages.seq_lens, num_splits=step.num_splits)


def extension_schedule(case: Case, pages: Pages, step: Step) -> Schedule | None:
    """A function that makes the metadata with the extension's operator, whose arguments have no defaults; None without it."""
    make: Any = getattr(torch.ops._vllm_fa3_C, "get_scheduler_metadata", None)
    if make is None:
        return None
    names = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k", "pack_gqa")
    absent: dict[str, object] = dict.fromkeys(names)
    shape = {"num_heads": case.num_heads, "num_heads_k": case.num_kv_heads, "headdim_v": case.head_dim, "max_seqlen_k_new": 0}
    left, right = step.window
    mask = {"is_causal": step.causal, "window_size_left": left, "window_size_right": right, "has_softcap": bool(step.softcap)}
    fixed = absent | scheduled(case, pages, step) | shape | mask | {"sm_margin": 0}
    return partial(make, seqused_k=pages.seq_lens, num_splits=step.num_splits, **fixed)
