"""Merging attention states: (out, lse) of several calls over disjoint parts of the KV become (out, lse) of the whole KV.

Serves a prefix that requests share (cascade) and a KV cache spread over devices (context parallelism): each part is attended
to on its own, and attention over the whole is a weighted sum of the parts, out = sum_s exp(lse_s - lse) out_s with
lse = log sum_s exp(lse_s) (Milakov and Gimelshein 2018; the merge of FlashInfer's cascade inference).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config.merge import MergeSpec
from ..config.problem import LseBase
from ..planning.base import LAUNCH_ERRORS, SKU_ARCH, Plan, PrecisionGuarantee, Sku, selected
from ..planning.checked import Checked, refuse_compile_in_capture
from ..planning.variants import DeviceFacts, Launch, PlanPreference
from .checks import MergeRules, Operands, check
from .descriptor import MergeStatesDescriptor
from .reference import cpu_variant
from .variants import explain


class MergeStatesPlan(Plan):
    """Merges the states of several attention calls over disjoint parts of the KV. Needs no workspace."""

    descriptor: MergeStatesDescriptor

    def __init__(self, descriptor: MergeStatesDescriptor, device: torch.device, preference: PlanPreference) -> None:
        facts = preference.part_of(DeviceFacts.of(device))
        explanation = explain(descriptor, facts, preference)
        chosen = explanation.chosen
        spec = chosen.spec
        dtypes = (descriptor.element_type,) * 3
        guarantee = PrecisionGuarantee.of(descriptor.dtype, batch_invariant=True)
        sku = Sku("merge_states", *dtypes, SKU_ARCH[chosen.arch], chosen.variant, spec, guarantee)
        super().__init__(device, facts.sm_count, sku, explanation)
        self.descriptor = descriptor
        rules = MergeRules(descriptor, device)
        self._check: Checked[Operands, None] = Checked(lambda operands: check(rules, operands))
        self._launch = _launch_of(spec, descriptor.lse_base)

    @classmethod
    def select(
        cls,
        descriptor: MergeStatesDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> MergeStatesPlan:
        """The first variant that serves `descriptor` on `device` (default: the current GPU, else the CPU), compiled.

        Raises Unsupported with every reason when no variant does, or when the one that `preference` forces does not;
        CompileFailed when the variant cannot be compiled, also inside a graph capture.
        """
        return selected(cls, MergeStatesDescriptor, descriptor, device, preference)

    def can_implement(
        self,
        outs: Tensor,
        lses: Tensor,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        self._check.now(Operands(outs, lses, out, lse, sinks))

    def run(
        self,
        outs: Tensor,
        lses: Tensor,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Launches on the current or the given stream and returns (out, lse), both fully written.

        outs: [num_states, batch, num_heads, head_dim] of the descriptor's dtype, any strides with a unit last one; lses: f32
        [num_states, batch, num_heads], any strides. out: [batch, num_heads, head_dim]; lse: f32 [batch, num_heads]. out and
        lse may not overlap an input. Allocates only the outputs that are not given. No host-device synchronisation.

        States are merged in f32 in their order. An empty state (lse = -inf) changes nothing, whatever its out holds; if all are
        empty, the result is (+0.0, -inf); if only one is not, that one is returned bit for bit, unless there are sinks. Otherwise
        an lse of NaN or +inf makes its merge NaN.

        sinks: f32 [num_heads], natural logits, given if the descriptor says so. Each head's sink joins its merged state once: out
        shrinks and lse includes the sink. If all states are empty or negligible next to the sink, the result is (+0.0, the sink).

        Raises, before anything is written, InvalidProblem (an extent), InvalidArgument (type, dtype, device, overlap),
        MisalignedOperand, Unsupported (strides); then LaunchFailed.
        """
        if stream is None and not self._elsewhere():
            return self._run(outs, lses, sinks, out, lse)
        with self._on(stream):
            return self._run(outs, lses, sinks, out, lse)

    def _run(
        self, outs: Tensor, lses: Tensor, sinks: Tensor | None, out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shape = self.descriptor.shape
        if out is None:
            out = torch.empty(shape, dtype=self.descriptor.dtype, device=self.device)
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
        self._check(Operands(outs, lses, out, lse, sinks))
        if shape[0]:
            try:
                self._launch(outs, lses, out, lse, sinks)
            except LAUNCH_ERRORS as error:
                raise self._launch_failed(error) from error
        return out, lse


def _launch_of(spec: MergeSpec | None, lse_base: LseBase) -> Launch:
    """The callable that launches a chosen variant, compiled now; the CPU variant if there is no spec."""
    if spec is None:
        return cpu_variant(lse_base)
    from ..compile.kernels import compile_merge

    refuse_compile_in_capture(spec)
    return compile_merge(spec)
