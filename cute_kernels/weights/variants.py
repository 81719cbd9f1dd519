"""Which problems of attention weights each variant can serve on which device, and every reason why it cannot."""

from __future__ import annotations

from typing import cast

import torch

from ..config.problem import ElementType, StoredType
from ..config.tiling import Arch, Target
from ..config.weights import (
    MAX_CTAS,
    MAX_KEYS,
    STAGES,
    TILE_N,
    WeightsSpec,
    chunk_of,
    fitted,
    weights_supports,
)
from ..kv.scale import scale_form
from ..kv.types import QUERY_DTYPES
from ..planning.base import ANY_VARIANT
from ..planning.variants import DeviceFacts, Explanation, Offer, PlanPreference, answer, choice, variants_of
from .descriptor import AttentionWeightsDescriptor

VARIANTS = variants_of("weights")


def explain(descriptor: AttentionWeightsDescriptor, facts: DeviceFacts, preference: PlanPreference = ANY_VARIANT) -> Explanation:
    """Every variant's answer for `descriptor` on such a device, here or not: nothing is compiled and no GPU is needed."""
    answers = [
        answer(variant, facts, lambda arch, target: _offer(descriptor, arch, target, facts.sm_count)) for variant in VARIANTS
    ]
    return choice(answers, str(descriptor), facts, preference)


def _offer(descriptor: AttentionWeightsDescriptor, arch: Arch, target: Target, sm_count: int) -> Offer:
    unread = _dtype_reasons(descriptor)
    if unread:
        return Offer(unread)
    spec = kernel_spec(descriptor, arch, target, sm_count)
    reasons, ctas = weights_supports(spec), descriptor.batch_size * -(-descriptor.max_seq_len // spec.chunk)
    if descriptor.max_seq_len > MAX_KEYS:
        reasons.append(f"max_seq_len = {descriptor.max_seq_len:,}: must be at most {MAX_KEYS:,}")
    if ctas > MAX_CTAS:
        rows = f"batch_size = {descriptor.batch_size:,} of max_seq_len = {descriptor.max_seq_len:,}"
        reasons.append(f"{rows}: takes {ctas:,} CTAs of {spec.chunk} keys, must be at most {MAX_CTAS:,}")
    knobs = f"chunk={spec.chunk} tile_n={spec.tile_n} num_warps={spec.num_warps} num_stages={spec.num_stages} ({target})"
    return Offer(reasons, knobs, spec, ctas)


def _dtype_reasons(descriptor: AttentionWeightsDescriptor) -> list[str]:
    problem = descriptor.problem
    if problem.q_dtype == torch.float32:
        return ["q_dtype = torch.float32: the tensor-core variants take torch.float16 and torch.bfloat16"]
    if problem.kv_dtype.element_bytes > 1 and problem.kv_dtype != QUERY_DTYPES[problem.q_dtype]:
        return [f"kv_dtype = {problem.kv_dtype.value}: must be q's, {problem.element_type}, or an 8-bit one"]
    return []


def kernel_spec(descriptor: AttentionWeightsDescriptor, arch: Arch, target: Target, sm_count: int) -> WeightsSpec:
    """The compile key of `descriptor` on sm_count SMs: exactly the fields that change generated code."""
    d, problem = descriptor, descriptor.problem
    stored: StoredType = problem.kv_dtype.value
    spec = WeightsSpec(
        arch=arch,
        target=target,
        source=problem.source,
        table_format=problem.table_format,
        element_type=cast(ElementType, problem.element_type),
        k_type=stored,
        v_type=stored,
        k_scale=scale_form(d.k_scale),
        v_scale="none",
        head_dim=d.head_dim,
        v_head_dim=d.head_dim,
        group_size=d.group_size,
        page_size=problem.page_size,
        vector_bytes=problem.vector_bytes,
        lse_base=d.lse_base,
        modifiers=problem.modifiers,
        tile_n=TILE_N,
        num_warps=1,
        num_stages=STAGES[0],
        num_kv_heads=d.num_kv_heads,
        chunk=chunk_of(problem.page_size, 1, d.page_mass),
        weights_type=d.weights_type,
        mean=d.mean,
        page_mass=d.page_mass,
        store_bytes=d.store_bytes,
    )
    return fitted(spec, d.batch_size, d.max_seq_len, sm_count)
