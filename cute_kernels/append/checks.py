"""Real tensors against a described append: each violation is its typed error, raised before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..checks.fields import MAX_EXTENT
from ..checks.overlap import disjoint
from ..checks.tensors import (
    check_shape,
    check_strides,
    check_tensor,
    has_odd_unit_strides,
    overlaps_itself,
    type_name,
    with_unit_strides,
)
from ..errors import InvalidArgument, InvalidProblem, Unsupported
from ..kv.page_table import OPERAND_NAMES
from ..kv.tensors import FLOAT8, as_bytes, check_page_table, check_scale, check_table, scale_view
from .descriptor import KVAppendDescriptor

ROTARY_OPERANDS = ("q", "q_out", "cos_sin_cache", "positions")


class Given(TypedDict, total=False):
    """What a run may be given by name: tensors, or None."""

    k_scale: Tensor | None
    v_scale: Tensor | None
    q: Tensor | None
    q_out: Tensor | None
    cos_sin_cache: Tensor | None
    positions: Tensor | None


class Operands(NamedTuple):
    """What one run is given, in a kernel's order; what the descriptor has not is absent. table0: the slots without a table."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    table0: Any
    table1: Any
    table2: Any
    k_scale: Any
    v_scale: Any
    q: Any
    q_out: Any
    cos_sin_cache: Any
    positions: Any

    def signature(self) -> tuple[object, ...]:
        """All that `check` depends on, as a key. Devices are part of the key: an address may come back on another one."""
        k, v, k_cache, v_cache, slots, *optional = self
        # fmt: off
        return (
            k.shape, k.stride(), k.dtype, k.data_ptr(), k.device,
            v.shape, v.stride(), v.dtype, v.data_ptr(), v.device,
            k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.data_ptr(), k_cache.device,
            v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.data_ptr(), v_cache.device,
            slots.shape, slots.stride(), slots.dtype, slots.data_ptr(), slots.device,
            *[None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr(), t.device) for t in optional],
        )
        # fmt: on


class Views(NamedTuple):
    """What other views of the same memory a kernel wants: aligned strides of extents of one, fp8 as bytes, scales by slot."""

    strides: bool
    caches: bool
    scales: bool


@dataclass(frozen=True)
class AppendRules:
    """What a plan demands of its tensors."""

    descriptor: KVAppendDescriptor
    device: torch.device


def slot_operands(d: KVAppendDescriptor, slots: Any) -> tuple[Any, Any, Any]:
    """What a kernel takes of `slots`. Raises InvalidArgument where they are not a PageTable of the described format."""
    if d.table_format == "none":
        return slots, None, None
    check_page_table(d.table_format, slots, "slots")
    table0, table1, table2 = slots.operands
    return table0, table1, table2


def check(rules: AppendRules, operands: Operands) -> Views | None:
    """Raises the typed error of the first rule that is broken: k, v, caches, slots, scales, q and its kin, then overlap.

    Returns what `normalised` has to do, None where the kernel takes the operands as they are.
    """
    d = rules.descriptor
    _check_incoming(rules, operands)
    _check_caches(rules, operands)
    _check_slots(rules, operands)
    axes = d.scale_axes(operands.k_cache.shape[0])
    check_scale(rules.device, "k_scale", d.k_scale, operands.k_scale, axes)
    check_scale(rules.device, "v_scale", d.v_scale, operands.v_scale, axes)
    _check_rotary(rules, operands)
    _check_overlap(d, operands)
    return _views(d, operands)


def normalised(d: KVAppendDescriptor, operands: Operands, views: Views) -> Operands:
    """The same memory as a kernel wants to see it."""
    changed: dict[str, Any] = {}
    if views.strides:
        names = ("k", "v", "k_cache", "v_cache", *(name for name in ("q", "q_out") if getattr(operands, name) is not None))
        changed |= {name: with_unit_strides(getattr(operands, name), d.head_dim) for name in names}
        if operands.cos_sin_cache is not None:
            changed["cos_sin_cache"] = with_unit_strides(operands.cos_sin_cache, operands.cos_sin_cache.shape[1])
    operands = operands._replace(**changed)
    if views.caches:
        operands = operands._replace(k_cache=as_bytes(operands.k_cache), v_cache=as_bytes(operands.v_cache))
    if views.scales:
        k_shape, v_shape = (scale.kernel_shape(d.scale_axes(-1)) for scale in d.scales)
        k_scale, v_scale = scale_view(operands.k_scale, k_shape), scale_view(operands.v_scale, v_shape)
        operands = operands._replace(k_scale=k_scale, v_scale=v_scale)
    return operands


def _views(d: KVAppendDescriptor, operands: Operands) -> Views | None:
    incoming = d.columns * d.dtype.itemsize
    odd = any(has_odd_unit_strides(t, incoming) for t in (operands.k, operands.v, operands.q, operands.q_out) if t is not None)
    for stored, cache in zip(d.stored, (operands.k_cache, operands.v_cache), strict=True):
        odd = odd or has_odd_unit_strides(cache, d.columns * stored.element_bytes)
    odd = odd or (operands.cos_sin_cache is not None and has_odd_unit_strides(operands.cos_sin_cache, d.angle_bytes))
    byte_views = any(cache.dtype in FLOAT8 for cache in (operands.k_cache, operands.v_cache))
    given = zip(d.scales, (operands.k_scale, operands.v_scale), strict=True)
    scale_views = any(scale and t.dim() != len(scale.kernel_shape(d.scale_axes(1))) for scale, t in given)
    views = Views(odd, byte_views, scale_views)
    return views if any(views) else None


def _check_incoming(rules: AppendRules, operands: Operands) -> None:
    d = rules.descriptor
    for name, tensor in (("k", operands.k), ("v", operands.v)):
        check_tensor(rules.device, name, tensor, d.dtype)
        check_shape(name, tensor, (None, d.num_kv_heads, d.head_dim), "[tokens, num_kv_heads, head_dim]")
        check_strides(name, tensor, d.columns * d.dtype.itemsize)
        if tensor.shape[0] > d.num_tokens:
            rule = f"must have at most num_tokens = {d.num_tokens} tokens"
            raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), rule)
    if operands.v.shape[0] != operands.k.shape[0]:
        raise InvalidProblem("v.shape", tuple(operands.v.shape), f"must be k's, {tuple(operands.k.shape)}")


def _check_caches(rules: AppendRules, operands: Operands) -> None:
    d = rules.descriptor
    heads, slots = ("num_kv_heads", d.num_kv_heads), ("page_size", d.page_size)
    axes: list[tuple[str, int | None]] = [slots, heads] if d.nhd else [heads, slots]
    names, extents = zip(*[("num_pages", d.num_pages), *axes, ("head_dim", d.head_dim)], strict=True)
    caches = (("k_cache", operands.k_cache), ("v_cache", operands.v_cache))
    for (name, cache), stored in zip(caches, d.stored, strict=True):
        check_tensor(rules.device, name, cache, *stored.tensor_dtypes)
        check_shape(name, cache, extents, f"[{', '.join(names)}]")
        check_strides(name, cache, d.columns * stored.element_bytes)
    pages = operands.k_cache.shape[0]
    if operands.v_cache.shape[0] != pages:
        rule = f"must be k_cache's, {tuple(operands.k_cache.shape)}"
        raise InvalidProblem("v_cache.shape", tuple(operands.v_cache.shape), rule)
    if pages * d.page_size > MAX_EXTENT:
        raise Unsupported([f"k_cache has {pages:,} pages of {d.page_size:,} slots: must be at most 2**31 - 1 slots"])


def _check_slots(rules: AppendRules, operands: Operands) -> None:
    d, tokens = rules.descriptor, operands.k.shape[0]
    if d.table_format != "none":
        check_table(rules.device, d.table_format, tokens, (operands.table0, operands.table1, operands.table2))
        return
    check_tensor(rules.device, "slots", operands.table0, d.slot_dtype)
    check_shape("slots", operands.table0, (tokens,), "[tokens], those of k")


def _check_rotary(rules: AppendRules, operands: Operands) -> None:
    d = rules.descriptor
    wanted = ROTARY_OPERANDS if d.rotary and d.rotary.num_heads else ROTARY_OPERANDS[2:] if d.rotary else ()
    for name in ROTARY_OPERANDS:
        tensor = getattr(operands, name)
        if name not in wanted and tensor is not None:
            raise InvalidArgument(name, f"got {type_name(tensor)}, must be None: the descriptor's rotary has no use for it")
    if d.rotary is None:
        return
    tokens = operands.k.shape[0]
    for name in wanted[:-2]:
        tensor = getattr(operands, name)
        check_tensor(rules.device, name, tensor, d.dtype)
        check_shape(name, tensor, (tokens, d.rotary.num_heads, d.head_dim), "[tokens, rotary.num_heads, head_dim], k's tokens")
        check_strides(name, tensor, d.columns * d.dtype.itemsize)
    check_tensor(rules.device, "cos_sin_cache", operands.cos_sin_cache, torch.float32)
    check_shape("cos_sin_cache", operands.cos_sin_cache, (None, d.rotary.rotary_dim), "[max_position, rotary_dim]")
    check_strides("cos_sin_cache", operands.cos_sin_cache, d.angle_bytes)
    check_tensor(rules.device, "positions", operands.positions, d.rotary.position_dtype)
    check_shape("positions", operands.positions, (tokens,), "[tokens], those of k")


def _check_overlap(d: KVAppendDescriptor, operands: Operands) -> None:
    """What is written shares memory with no other operand, and no two of its elements with each other; q_out may be q."""
    names = dict(zip(("table0", "table1", "table2"), OPERAND_NAMES.get(d.table_format, ("slots",)), strict=False))
    tensors = {names.get(name, name): tensor for name, tensor in operands._asdict().items() if tensor is not None}
    scales = [name for name, scale in (("k_scale", d.k_scale), ("v_scale", d.v_scale)) if scale.granularity == "token"]
    for written in ("k_cache", "v_cache", *scales, *(["q_out"] if operands.q_out is not None else [])):
        tensor = tensors[written]
        for name, other in tensors.items():
            if {name, written} == {"q", "q_out"} and _same(tensor, other):
                continue
            if name != written and not disjoint(tensor, other):
                raise InvalidArgument(written, f"shares memory with {name}, must have memory of its own")
        if overlaps_itself(tensor):
            raise InvalidArgument(written, f"strides {tensor.stride()} make elements share memory, each must have its own")


def _same(first: Tensor, second: Tensor) -> bool:
    return (first.data_ptr(), first.shape, first.stride()) == (second.data_ptr(), second.shape, second.stride())
