"""Which problems of attention's backward each variant can serve on which device, and every reason why it cannot."""

from __future__ import annotations

from typing import cast

from ..config.backward import NUM_STAGES, SHAPES, WIDE_COLUMNS, BackwardSpec, backward_supports, fitted
from ..config.problem import ElementType, StoredType
from ..config.tiling import Arch, Target
from ..planning.base import ANY_VARIANT
from ..planning.variants import DeviceFacts, Explanation, Offer, PlanPreference, answer, choice, variants_of
from .descriptor import PagedAttentionBackwardDescriptor

VARIANTS = variants_of("backward")


def explain(
    descriptor: PagedAttentionBackwardDescriptor, facts: DeviceFacts, preference: PlanPreference = ANY_VARIANT
) -> Explanation:
    """Every variant's answer for `descriptor` on such a device, here or not: nothing is compiled and no GPU is needed."""
    answers = [answer(variant, facts, lambda arch, target: _offer(descriptor, arch, target)) for variant in VARIANTS]
    return choice(answers, str(descriptor), facts, preference)


def _offer(descriptor: PagedAttentionBackwardDescriptor, arch: Arch, target: Target) -> Offer:
    spec = kernel_spec(descriptor, arch, target)
    reasons = backward_supports(spec)
    for name in ("num_pages", "max_pages"):
        if descriptor.shared_pages and getattr(descriptor.attention, name) is None:
            reasons.append(f"{name} = None: must be given beside shared_pages, whose workspace it sizes")
    knobs = f"mma={spec.mma} num_warps={spec.num_warps} resident_rows={spec.resident_rows} tile_rows={spec.tile_rows} ({target})"
    return Offer(reasons, knobs, spec)


def kernel_spec(descriptor: PagedAttentionBackwardDescriptor, arch: Arch, target: Target) -> BackwardSpec:
    """The compile key of `descriptor`: exactly the fields that change generated code."""
    problem = descriptor.problem
    element = cast(ElementType, problem.element_type)
    num_warps, tile_rows = SHAPES[0]
    spec = BackwardSpec(
        arch=arch,
        target=target,
        source=problem.source,
        table_format=problem.table_format,
        element_type=element,
        k_type=cast(StoredType, element),
        v_type=cast(StoredType, element),
        k_scale="none",
        v_scale="none",
        head_dim=problem.head_dim,
        v_head_dim=problem.head_dim,
        group_size=problem.group_size,
        page_size=problem.page_size,
        vector_bytes=problem.vector_bytes,
        lse_base=problem.lse_base,
        query=problem.query,
        modifiers=problem.modifiers,
        num_warps=num_warps,
        tile_rows=tile_rows,
        num_stages=NUM_STAGES,
        shared_pages=bool(descriptor.shared_pages),
        mma="warpgroup" if arch == "sm90" and problem.head_dim % WIDE_COLUMNS == 0 and not problem.splits else "warp",
    )
    return fitted(spec)
