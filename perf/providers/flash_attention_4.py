"""FlashAttention-4 on Hopper: the SM90 kernels of flash-attn-4, written in the CuTe DSL. Its keys are 16-bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from perf.cases import Operation
from perf.correctness import PEERS, Tolerance
from perf.inputs import Inputs, InputSet
from perf.providers.base import (
    Candidate,
    Result,
    require,
    require_scores,
    require_sm90,
    require_storage,
    tokens_first,
    try_once,
)
from perf.record import package_version


class FlashAttention4:
    """Several query rows, causal, over pages or contiguous keys. It compiles on a case's first call, outside the timing."""

    name: ClassVar[str] = "fa4"
    operation: ClassVar[Operation] = "attention"
    tolerance: ClassVar[Tolerance | None] = PEERS
    reads_unused: ClassVar[bool] = True

    def available(self) -> str | None:
        reason = require_sm90()
        if reason or find_spec("flash_attn.cute"):
            return reason
        return "package flash_attn.cute (flash-attn-4) is not installed"

    def version(self) -> str:
        return f"flash-attn-4 {package_version('flash-attn-4') or 'of unknown version'}"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        case = inputs.case
        require_storage(case)
        require_scores(case)
        require(case.q_len is not None, "one query row is decode")
        lengths = set(case.tokens())
        require(case.page_size > 0 or len(lengths) == 1, "contiguous rows of different lengths are not passed to it")
        bind = self.paged if case.page_size else self.contiguous
        calls = [bind(inputs, s) for s in inputs.sets]
        try_once(calls[0], AssertionError, NotImplementedError)
        return [Candidate(calls)]

    def paged(self, inputs: Inputs, s: InputSet) -> Callable[[], Result]:
        """A call over a page table. On Hopper FlashAttention-4 splits the keys of no row."""
        from flash_attn.cute.interface import flash_attn_varlen_func

        case, pages = inputs.case, inputs.pages
        assert pages is not None
        options: dict[str, Any] = {
            "cu_seqlens_q": inputs.qo_indptr(),
            "max_seqlen_q": case.q_rows,
            "page_table": pages.table.clamp_min(0),
            "seqused_k": pages.seq_lens,
            "softmax_scale": inputs.softmax_scale,
            "causal": True,
        }
        q = s.q.flatten(0, -3)
        return partial(first_of, flash_attn_varlen_func, q, tokens_first(s.k, case), tokens_first(s.v, case), options)

    def contiguous(self, inputs: Inputs, s: InputSet) -> Callable[[], Result]:
        """A call over contiguous keys, [batch, num_kv_heads, tokens, head_dim] here."""
        from flash_attn.cute.interface import flash_attn_func

        options = {"softmax_scale": inputs.softmax_scale, "causal": True}
        return partial(first_of, flash_attn_func, s.q, s.k.transpose(1, 2), s.v.transpose(1, 2), options)


def first_of(function: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Result:
    """The output alone of a function that may also return an lse."""
    found = function(q, k, v, **options)
    return found[0] if isinstance(found, tuple) else found, None
