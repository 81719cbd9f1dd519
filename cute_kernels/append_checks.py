"""Real tensors against a described append: each violation is its typed error, raised before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .append_descriptor import KVAppendDescriptor
from .checks import (
    _check_shape,
    _check_strides,
    _check_tensor,
    _kind,
    _odd_unit_strides,
    _overlaps_itself,
    _unit_strides,
)
from .descriptors import MAX_EXTENT, KVDtype
from .errors import InvalidArgument, InvalidProblem, Unsupported
from .overlap import disjoint

FP8 = (KVDtype.E4M3, KVDtype.E5M2)


class Operands(NamedTuple):
    """What one run is given; the scales may be absent."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    slot_mapping: Any
    k_scale: Any
    v_scale: Any

    def signature(self) -> tuple[object, ...]:
        """All that `check` depends on, as a key. Devices are left out: a pointer belongs to one device."""
        k, v, k_cache, v_cache, slots, k_scale, v_scale = self
        scales: tuple[object, ...] = ()
        if k_scale is not None or v_scale is not None:  # one that lacks is named by the check
            scales = (_described(k_scale), _described(v_scale))
        # fmt: off
        return (
            k.shape, k.stride(), k.dtype, k.data_ptr(),
            v.shape, v.stride(), v.dtype, v.data_ptr(),
            k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.data_ptr(),
            v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.data_ptr(),
            slots.shape, slots.stride(), slots.dtype, slots.data_ptr(),
            *scales,
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


def check(rules: AppendRules, operands: Operands) -> Views | None:
    """Raises the typed error of the first rule that is broken: k, v, caches, slot_mapping, scales, then overlap.

    Returns what `normalised` has to do, None where the kernel takes the operands as they are.
    """
    d = rules.descriptor
    _check_incoming(rules, operands)
    _check_caches(rules, operands)
    _of(rules, "slot_mapping", operands.slot_mapping, d.slot_dtype)
    _check_shape("slot_mapping", operands.slot_mapping, (operands.k.shape[0],), "[tokens], those of k")
    _check_scales(rules, operands)
    _check_overlap(d, operands)
    incoming, stored = d.columns * d.dtype.itemsize, d.columns * d.stored.element_bytes
    odd = any(_odd_unit_strides(t, incoming) for t in (operands.k, operands.v))
    odd = odd or any(_odd_unit_strides(t, stored) for t in (operands.k_cache, operands.v_cache))
    byte_views = d.stored in FP8 and any(t.dtype != torch.uint8 for t in (operands.k_cache, operands.v_cache))
    scale_views = d.scales != "none" and any(t.dim() != _scale_axes(d) for t in (operands.k_scale, operands.v_scale))
    views = Views(odd, byte_views, scale_views)
    return views if any(views) else None


def normalised(d: KVAppendDescriptor, operands: Operands, views: Views) -> Operands:
    """The same memory as a kernel wants to see it."""
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = operands
    if views.strides:
        k, v, k_cache, v_cache = (_unit_strides(t, d.head_dim) for t in (k, v, k_cache, v_cache))
    if views.caches:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if views.scales:
        k_scale, v_scale = (_by_slot(d, t, k_cache.shape[0]) for t in (k_scale, v_scale))
    return Operands(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _of(rules: AppendRules, name: str, tensor: Any, dtype: torch.dtype) -> None:
    _check_tensor(rules.device, name, tensor, dtype)


def _check_incoming(rules: AppendRules, operands: Operands) -> None:
    d = rules.descriptor
    for name, tensor in (("k", operands.k), ("v", operands.v)):
        _of(rules, name, tensor, d.dtype)
        _check_shape(name, tensor, (None, d.num_kv_heads, d.head_dim), "[tokens, num_kv_heads, head_dim]")
        _check_strides(name, tensor, d.columns * d.dtype.itemsize)
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
    for name, cache in (("k_cache", operands.k_cache), ("v_cache", operands.v_cache)):
        as_bytes = d.stored in FP8 and isinstance(cache, Tensor) and cache.dtype == torch.uint8
        _of(rules, name, cache, torch.uint8 if as_bytes else d.stored.torch_dtype)
        _check_shape(name, cache, extents, f"[{', '.join(names)}]")
        _check_strides(name, cache, d.columns * d.stored.element_bytes)
    pages = operands.k_cache.shape[0]
    if operands.v_cache.shape[0] != pages:
        rule = f"must be k_cache's, {tuple(operands.k_cache.shape)}"
        raise InvalidProblem("v_cache.shape", tuple(operands.v_cache.shape), rule)
    if pages * d.page_size > MAX_EXTENT:
        raise Unsupported([f"k_cache has {pages:,} pages of {d.page_size:,} slots: must be at most 2**31 - 1 slots"])


def _check_scales(rules: AppendRules, operands: Operands) -> None:
    d = rules.descriptor
    for name, scale in (("k_scale", operands.k_scale), ("v_scale", operands.v_scale)):
        if d.scales == "none":
            if scale is not None:
                raise InvalidArgument(name, f'got {_kind(scale)}, must be None: the descriptor\'s scales are "none"')
            continue
        _of(rules, name, scale, d.scale_dtype if d.scales == "token_dynamic" else torch.float32)
        if d.scales == "tensor":
            if tuple(scale.shape) not in ((), (1,)):
                raise InvalidProblem(f"{name}.shape", tuple(scale.shape), "must be one f32, [] or [1]")
        elif d.scales == "head":
            _check_shape(name, scale, (d.num_kv_heads,), "[num_kv_heads]")
        else:
            pages = operands.k_cache.shape[0]
            by_slot = (pages, d.page_size, d.num_kv_heads)
            if scale.dim() == 1:
                flat = pages * d.page_size * d.num_kv_heads
                _check_shape(name, scale, (flat,), "[num_pages * page_size * num_kv_heads]")
            else:
                _check_shape(name, scale, by_slot, "[num_pages, page_size, num_kv_heads]")


def _check_overlap(d: KVAppendDescriptor, operands: Operands) -> None:
    """What is written shares memory with no other operand, and no two of its elements with each other."""
    tensors = {name: tensor for name, tensor in operands._asdict().items() if tensor is not None}
    for written in ("k_cache", "v_cache", "k_scale", "v_scale") if d.scales == "token_dynamic" else ("k_cache", "v_cache"):
        tensor = tensors[written]
        for name, other in tensors.items():
            if name != written and not disjoint(tensor, other):
                raise InvalidArgument(written, f"shares memory with {name}, must have memory of its own")
        if _overlaps_itself(tensor):
            raise InvalidArgument(written, f"strides {tensor.stride()} make elements share memory, each must have its own")


def _described(scale: Any) -> object:
    return None if scale is None else (scale.shape, scale.stride(), scale.dtype, scale.data_ptr())


def _scale_axes(d: KVAppendDescriptor) -> int:
    """Axes of a scale as a kernel takes it."""
    return 3 if d.scales == "token_dynamic" else 1


def _by_slot(d: KVAppendDescriptor, scale: Tensor, pages: int) -> Tensor:
    if scale.dim() == _scale_axes(d):
        return scale
    if d.scales == "token_dynamic":
        step = scale.stride(0)
        strides = (d.page_size * d.num_kv_heads * step, d.num_kv_heads * step, step)
        return scale.as_strided((pages, d.page_size, d.num_kv_heads), strides)
    return scale.reshape(1)
