"""The providers of attention's gradients: this package, and FlashAttention-4 in its deterministic mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

import cute_kernels as ck
from cute_kernels.planning.variants import VariantArch
from perf.backward import Gradients, backward_descriptor, dout_of
from perf.cases import Operation
from perf.correctness import PEERS, Tolerance
from perf.inputs import Inputs, InputSet
from perf.providers.base import Candidate, require, require_storage, try_once
from perf.providers.flash_attention_4 import FlashAttention4
from perf.providers.ours import OurPlan, descriptor, table_of


class OursBackward(OurPlan):
    """The variant that a plan selects by itself. Attention makes out and lse beforehand."""

    operation: ClassVar[Operation] = "backward"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        attention = descriptor(inputs.case)
        require(isinstance(attention, ck.PagedAttentionDescriptor), "one query row is decode")
        described = backward_descriptor(inputs, attention)  # type: ignore[arg-type]
        plan = self.make(ck.PagedAttentionBackwardPlan, described, inputs.sets[0].q.device)
        first, (table,) = inputs.sets[0], table_of(inputs)
        made = {"dq": first.q, "dk_cache": first.k, "dv_cache": first.v}
        kept = {name: torch.empty_like(like) for name, like in made.items()} | {"workspace": plan.new_workspace()}
        calls: list[Callable[[], Any]] = [gradients_of(plan, inputs, index, table, kept) for index in range(len(inputs.sets))]
        return [self.candidate(plan, calls)]


class OursSm80Backward(OursBackward):
    """The SM80 variant, forced."""

    name: ClassVar[str] = "ours-sm80"
    arch: ClassVar[VariantArch | None] = "sm80"


class FlashAttention4Backward(FlashAttention4):
    """FlashAttention-4's deterministic gradients over contiguous keys. It compiles on a case's first call, outside the timing."""

    operation: ClassVar[Operation] = "backward"
    tolerance: ClassVar[Tolerance | None] = PEERS

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        require_storage(inputs.case)
        require(not inputs.case.page_size, "its backward takes no pages")
        calls: list[Callable[[], Any]] = []

        def make() -> None:
            calls.extend(self.gradients(inputs, index, s) for index, s in enumerate(inputs.sets))
            calls[0]()

        try_once(make, AssertionError, NotImplementedError, TypeError)
        return [Candidate(calls)]

    def gradients(self, inputs: Inputs, index: int, s: InputSet) -> Callable[[], Gradients]:
        """A call on set `index`; its forward is made here."""
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        operands = s.q, s.k.transpose(1, 2), s.v.transpose(1, 2)
        options: dict[str, Any] = {"softmax_scale": inputs.softmax_scale, "causal": True}
        out, lse, *_ = _flash_attn_fwd(*operands, return_lse=True, **options)
        dout = dout_of(inputs, index)

        def call() -> Gradients:
            dq, dk, dv, *_ = _flash_attn_bwd(*operands, out, dout, lse, deterministic=True, **options)
            return Gradients(dq, dk.transpose(1, 2), dv.transpose(1, 2))

        return call


def gradients_of(plan: Any, inputs: Inputs, index: int, table: ck.PageTable, kept: dict[str, Any]) -> Callable[[], Gradients]:
    """A call on set `index`; its forward is made here."""
    s = inputs.sets[index]
    out, lse = ck.paged_attention(s.q, s.k, s.v, page_table=table, layout=inputs.case.layout)
    run = partial(plan.run, dout_of(inputs, index), s.q, s.k, s.v, out, lse, table, **kept)

    def call() -> Gradients:
        return Gradients(*run()[:3])

    return call
