"""Which appends each variant serves on which device, and every reason why not."""

from __future__ import annotations

from ..config.append import AppendSpec, RotarySpec, append_supports, lanes_of, share_rows
from ..config.tiling import Arch, Target
from ..kv.rotary import Rotary
from ..kv.scale import scale_form
from ..planning.base import ANY_VARIANT
from ..planning.variants import DeviceFacts, Explanation, Offer, PlanPreference, answer, choice, variants_of
from .descriptor import INDEX_TYPES, KVAppendDescriptor

VARIANTS = variants_of("append")


def explain(descriptor: KVAppendDescriptor, facts: DeviceFacts, preference: PlanPreference = ANY_VARIANT) -> Explanation:
    """Every variant's answer for `descriptor` on such a device, here or not: nothing is compiled and no GPU is needed."""
    answers = [answer(variant, facts, lambda arch, target: _offer(descriptor, arch, target)) for variant in VARIANTS]
    return choice(answers, str(descriptor), facts, preference)


def _offer(descriptor: KVAppendDescriptor, arch: Arch, target: Target) -> Offer:
    spec = kernel_spec(descriptor, arch, target)
    heads = (descriptor.num_kv_heads, descriptor.rotary.num_heads if descriptor.rotary else 0)
    ctas = sum(-(-descriptor.num_tokens * count // spec.rows_per_cta) for count in heads)
    knobs = f"columns={spec.columns} lanes={spec.lanes} rounds={spec.rounds} unroll={spec.unroll} ({target})"
    return Offer(append_supports(spec), knobs, spec, ctas)


def kernel_spec(descriptor: KVAppendDescriptor, arch: Arch, target: Target) -> AppendSpec:
    """The compile key of `descriptor`: exactly the fields that change generated code."""
    d = descriptor
    k_stored, v_stored = d.stored
    rotary = rotary_spec(d.rotary)
    spec = AppendSpec(
        arch=arch,
        target=target,
        element_type=d.element_type,
        k_type=k_stored.value,
        v_type=v_stored.value,
        k_scale=scale_form(d.k_scale),
        v_scale=scale_form(d.v_scale),
        head_dim=d.head_dim,
        page_size=d.page_size,
        table_format=d.table_format,
        slot_type=INDEX_TYPES[d.slot_dtype] if d.table_format == "none" else "i32",
        columns=d.columns,
        lanes=lanes_of(d.head_dim // d.columns),
        unroll=1,
        nhd=d.nhd,
        rotary=rotary,
    )
    return share_rows(spec, d.num_tokens * d.num_kv_heads)


def rotary_spec(rotary: Rotary | None) -> RotarySpec | None:
    """The part of the compile key for a settled rotary embedding, if any."""
    if rotary is None or rotary.rotary_dim is None:
        return None
    position_type = INDEX_TYPES[rotary.position_dtype]
    return RotarySpec(rotary.pairing == "half", rotary.rotary_dim, rotary.num_heads > 0, position_type)
