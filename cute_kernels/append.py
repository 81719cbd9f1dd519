"""Appending to a paged KV cache: K and V of new tokens are converted, or quantised, and stored where a slot mapping says."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from . import dispatch
from .append_checks import AppendRules, Operands, Views, check, normalised
from .append_descriptor import SLOT_TYPES, KVAppendDescriptor
from .append_spec import AppendSpec, append_supports
from .config import Arch, Target
from .dispatch import Candidate, DeviceFacts, Explanation, Launch, PlanPreference, Variant, choice
from .errors import InvalidArgument
from .faults import first_bad_slot, record
from .plan_base import ANY_VARIANT, LAUNCH_ERRORS, SKU_ARCH, FlaggingPlan, PrecisionGuarantee, Sku, selected
from .plan_parts import Checked, refuse_compile_in_capture
from .quantize import quantize_kv

NAMES = {"sm90": "sm90_append", "sm80": "sm80_append", "cpu": "cpu_reference"}
VARIANTS = tuple(replace(variant, name=NAMES[variant.arch]) for variant in dispatch.VARIANTS)  # decode's devices and targets


def explain(descriptor: KVAppendDescriptor, facts: DeviceFacts, preference: PlanPreference = ANY_VARIANT) -> Explanation:
    """Every variant's answer for `descriptor` on such a device, here or not: nothing is compiled and no GPU is needed."""
    answers = [_evaluate(variant, descriptor, facts) for variant in VARIANTS]
    return choice(answers, str(descriptor), facts, preference)


def _evaluate(variant: Variant, descriptor: KVAppendDescriptor, facts: DeviceFacts) -> Candidate:
    """One variant's answer; the reasons of one that fits say what it would run."""
    reasons = dispatch._device_reasons(variant, facts)
    target = variant.target(facts)
    if target is None:
        return Candidate(variant.name, variant.arch, "rejected" if reasons else "fits", tuple(reasons) or ("plain PyTorch",))
    spec = kernel_spec(descriptor, cast(Arch, variant.arch), target)
    reasons += append_supports(spec)
    if reasons:
        return Candidate(variant.name, variant.arch, "rejected", tuple(reasons))
    ctas = -(-descriptor.num_tokens * descriptor.num_kv_heads // spec.rows_per_cta)
    knobs = f"columns={spec.columns} lanes={spec.lanes} rounds={spec.rounds} ({target})"
    return Candidate(variant.name, variant.arch, "fits", (knobs,), num_ctas=ctas)


def kernel_spec(descriptor: KVAppendDescriptor, arch: Arch, target: Target) -> AppendSpec:
    """The compile key of `descriptor`: what changes generated code, and no more."""
    d = descriptor
    return AppendSpec(
        arch=arch,
        target=target,
        element_type=d.element_type,
        stored_type=d.stored_type,
        head_dim=d.head_dim,
        page_size=d.page_size,
        columns=d.columns,
        nhd=d.nhd,
        scales=d.scales,
        scale_type=d.scale_type,
        slot_type=SLOT_TYPES[d.slot_dtype],
    )


class KVAppendPlan(FlaggingPlan):
    """Appends K and V of new tokens to a paged cache. Needs no workspace."""

    descriptor: KVAppendDescriptor

    def __init__(self, descriptor: KVAppendDescriptor, device: torch.device, preference: PlanPreference) -> None:
        facts = DeviceFacts.of(device)
        explanation = explain(descriptor, facts, preference)
        chosen = explanation.chosen
        target = next(variant.target(facts) for variant in VARIANTS if variant.name == chosen.variant)
        spec = None if target is None else kernel_spec(descriptor, cast(Arch, chosen.arch), target)
        dtypes = (descriptor.element_type, descriptor.stored_type, descriptor.stored_type)
        guarantee = PrecisionGuarantee(batch_invariant=True, error_ratio=1.0, error_ulps=0)
        sku = Sku("kv_append", *dtypes, SKU_ARCH[chosen.arch], chosen.variant, spec, guarantee)
        super().__init__(device, facts.sm_count, sku, explanation)
        self.descriptor = descriptor
        rules = AppendRules(descriptor, device)
        self._check: Checked[Operands, Views | None] = Checked(lambda operands: check(rules, operands))
        self._validate = preference.validate
        self._status = self._words.data_ptr() if spec else self._words  # the CPU variant writes the words themselves
        self._launch = _launch_of(spec, descriptor)

    @classmethod
    def select(
        cls,
        descriptor: KVAppendDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> KVAppendPlan:
        """The first variant that serves `descriptor` on `device` (default: the current GPU, else the CPU), compiled.

        Raises Unsupported with every reason when none does, or not the one that `preference` forces; CompileFailed when
        it cannot be compiled, also inside a graph capture.
        """
        return selected(cls, KVAppendDescriptor, descriptor, device, preference)

    def can_implement(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        self._check.now(Operands(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale))

    def run(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Launches on the current or the given stream; writes the tokens' slots of both caches, and nothing else of them.

        k, v: [tokens, num_kv_heads, head_dim] of the descriptor's dtype, at most num_tokens tokens, any strides with a unit
        last one. k_cache, v_cache: 4-D in the descriptor's layout, any strides with a unit last one, also interleaved in one
        allocation; uint8 or torch's fp8 for fp8. slot_mapping: [tokens] of slot_dtype, any stride, flat positions
        page * page_size + slot; a negative one skips its token, one at or past num_pages * page_size too, and is recorded for
        `status`, or raises InvalidArgument under PlanPreference(validate=True), which synchronises. Slots that are not
        skipped must differ: where two tokens share one, either may win, K and V apart.
        k_scale, v_scale: None ("none"); f32 [] or [1] ("tensor"), [num_kv_heads] ("head"), read; of scale_dtype
        [num_pages, page_size, num_kv_heads], any strides, or flat ("token_dynamic"), written.

        What is stored is what `quantize_kv` gives, bit for bit but for the payload of a NaN scale. Allocates nothing, does not
        synchronise. Raises, before anything is written, InvalidProblem (an extent), InvalidArgument (type, dtype, device,
        overlap, a slot), MisalignedOperand, Unsupported (strides); then LaunchFailed.
        """
        operands = Operands(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        if stream is None and not self._elsewhere():
            self._run(operands)
            return
        with self._on(stream):
            self._run(operands)

    def _run(self, operands: Operands) -> None:
        views = self._check(operands)
        if views is not None:
            operands = normalised(self.descriptor, operands, views)
        if not operands.k.shape[0]:
            return
        if self._validate:
            self._check_slots(operands)
        try:
            self._launch(*operands, self._tag, self._status)
        except LAUNCH_ERRORS as error:
            raise self._launch_failed(error) from error

    def _check_slots(self, operands: Operands) -> None:
        self._refuse_capture("validate")
        fault = first_bad_slot(operands.slot_mapping, operands.k_cache.shape[0] * self.descriptor.page_size)
        if fault is not None:
            raise InvalidArgument("slot_mapping", str(fault))


def _launch_of(spec: AppendSpec | None, descriptor: KVAppendDescriptor) -> Launch:
    """The callable behind a chosen variant, compiled now; the CPU variant where there is no spec."""
    if spec is None:
        return cpu_variant(descriptor)
    from .compile import compile_append

    refuse_compile_in_capture(spec)
    return compile_append(spec)


def cpu_variant(descriptor: KVAppendDescriptor) -> Launch:
    """The CPU variant, called as a compiled kernel is, but with the status words themselves, not their address."""
    d = descriptor

    def launch(
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        tag: int,
        status: Tensor,
    ) -> None:
        num_slots = k_cache.shape[0] * d.page_size
        fault = first_bad_slot(slot_mapping, num_slots)
        if fault is not None:
            record(status, tag, fault)
        kept = (slot_mapping >= 0) & (slot_mapping < num_slots)
        slot = slot_mapping[kept].long()
        place = (slot // d.page_size, slot % d.page_size)
        for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            dynamic = scale is not None and d.scales == "token_dynamic"
            given = None if dynamic else scale
            stored, found = quantize_kv(x[kept], d.stored, d.scales, scale=given, scale_dtype=d.scale_dtype)
            by_token = cache if d.nhd else cache.transpose(1, 2)
            by_token[place] = stored.view(cache.dtype)
            if dynamic and scale is not None and found is not None:
                scale[place] = found

    return launch
