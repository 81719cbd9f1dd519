"""What each variant of a merge serves on which device, and every reason why not."""

from __future__ import annotations

from ..config.merge import MAX_CTAS_PER_ROW, MergeSpec, merge_spec, merge_supports
from ..config.tiling import Target
from ..planning.base import ANY_VARIANT
from ..planning.variants import Candidate, DeviceFacts, Explanation, PlanPreference, Variant, choice, device_reasons, variants_of
from .descriptor import MergeStatesDescriptor

VARIANTS = variants_of("merge")


def explain(descriptor: MergeStatesDescriptor, facts: DeviceFacts, preference: PlanPreference = ANY_VARIANT) -> Explanation:
    """Every variant's answer for `descriptor` on such a device, here or not: nothing is compiled and no GPU is needed."""
    answers = [_evaluate(variant, descriptor, facts) for variant in VARIANTS]
    return choice(answers, str(descriptor), facts, preference)


def _evaluate(variant: Variant, descriptor: MergeStatesDescriptor, facts: DeviceFacts) -> Candidate:
    """One variant's answer."""
    reasons = device_reasons(variant, facts)
    target = variant.target(facts)
    if target is None:
        return Candidate(variant.name, variant.arch, "rejected" if reasons else "fits", tuple(reasons))
    spec = kernel_spec(descriptor, target)
    reasons += merge_supports(spec)
    ctas = spec.ctas_per_row(descriptor.num_heads)
    if ctas > MAX_CTAS_PER_ROW:
        row = f"num_heads = {descriptor.num_heads:,} of head_dim = {descriptor.head_dim:,}"
        reasons.append(f"{row}: a row takes {ctas:,} CTAs, must be at most {MAX_CTAS_PER_ROW:,}")
    if reasons:
        return Candidate(variant.name, variant.arch, "rejected", tuple(reasons))
    knobs = f"columns={spec.columns} in_flight={spec.in_flight} num_warps={spec.num_warps} ({target})"
    return Candidate(variant.name, variant.arch, "fits", (), knobs, spec, ctas * descriptor.batch_size)


def kernel_spec(descriptor: MergeStatesDescriptor, target: Target) -> MergeSpec:
    """The compile key of `descriptor`: what changes generated code, and no more."""
    d = descriptor
    return merge_spec(target, d.element_type, d.columns, d.num_states, d.num_heads, d.head_dim, d.lse_base, d.sinks)
