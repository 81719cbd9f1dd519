"""Which merges each variant can serve on which device, and every reason why it cannot."""

from __future__ import annotations

from ..config.merge import MAX_CTAS_PER_ROW, MergeSpec, merge_spec, merge_supports
from ..config.tiling import Target
from ..planning.base import ANY_VARIANT
from ..planning.variants import DeviceFacts, Explanation, Offer, PlanPreference, answer, choice, variants_of
from .descriptor import MergeStatesDescriptor

VARIANTS = variants_of("merge")


def explain(descriptor: MergeStatesDescriptor, facts: DeviceFacts, preference: PlanPreference = ANY_VARIANT) -> Explanation:
    """Every variant's answer for `descriptor` on such a device, here or not: nothing is compiled and no GPU is needed."""
    answers = [answer(variant, facts, lambda _, target: _offer(descriptor, target)) for variant in VARIANTS]
    return choice(answers, str(descriptor), facts, preference)


def _offer(descriptor: MergeStatesDescriptor, target: Target) -> Offer:
    spec = kernel_spec(descriptor, target)
    reasons, ctas = merge_supports(spec), spec.ctas_per_row(descriptor.num_heads)
    if ctas > MAX_CTAS_PER_ROW:
        row = f"num_heads = {descriptor.num_heads:,} of head_dim = {descriptor.head_dim:,}"
        reasons.append(f"{row}: a row takes {ctas:,} CTAs, must be at most {MAX_CTAS_PER_ROW:,}")
    knobs = f"columns={spec.columns} in_flight={spec.in_flight} num_warps={spec.num_warps} ({target})"
    return Offer(reasons, knobs, spec, ctas * descriptor.batch_size)


def kernel_spec(descriptor: MergeStatesDescriptor, target: Target) -> MergeSpec:
    """The compile key of `descriptor`: exactly the fields that change generated code."""
    d = descriptor
    return merge_spec(target, d.element_type, d.columns, d.num_states, d.num_heads, d.head_dim, d.lse_base, d.sinks)
