"""Real tensors of a run of attention weights against its descriptor: each violation is its typed error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..attention.checks import Rules, check_cache, check_extras, check_query, check_room, check_rows
from ..attention.operands import Extras, Passage, Views, kernel_views, without_query_axis
from ..checks.tensors import (
    check_shape,
    check_strides,
    check_tensor,
    has_odd_unit_strides,
    refuse_overlap,
    type_name,
    with_unit_strides,
)
from ..errors import InvalidArgument, InvalidProblem
from ..kv.page_table import OPERAND_NAMES
from ..kv.tensors import check_scale
from .descriptor import AttentionWeightsDescriptor

MEANINGS = {
    "weights": "[batch_size, num_heads, max_seq_len]",
    "mean": "[batch_size, max_seq_len]",
    "page_mass": "[batch_size, max_pages]",
}
OUTPUTS = tuple(MEANINGS)


class Given(TypedDict, total=False):
    """What a run may be given by name: tensors, or None."""

    k_scale: Tensor | None
    alibi_slopes: Tensor | None
    weights: Tensor | None
    mean: Tensor | None
    page_mass: Tensor | None


class Operands(NamedTuple):
    """What one run is given, in a kernel's order; what the descriptor has not is None. table0..2 are a PageTable's operands."""

    q: Any
    k_cache: Any
    table0: Any
    table1: Any
    table2: Any
    k_scale: Any
    lse: Any
    alibi_slopes: Any
    weights: Any
    mean: Any
    page_mass: Any

    def signature(self) -> tuple[object, ...]:
        """All that `check` depends on, as a key."""
        return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr(), t.device) for t in self)


@dataclass(frozen=True)
class WeightsRules:
    """What a plan demands of its tensors. cache: of q, K, its scales and its table. outputs: the shapes of those asked for."""

    descriptor: AttentionWeightsDescriptor
    cache: Rules
    outputs: dict[str, tuple[int, ...]]
    views: Views

    @classmethod
    def of(cls, descriptor: AttentionWeightsDescriptor, device: torch.device) -> WeightsRules:
        """Those of a descriptor's plan on a device."""
        nhd = descriptor.layout.order == "NHD"
        cache = Rules(descriptor.problem, device, nhd=nhd, num_pages=descriptor.num_pages)
        return cls(descriptor, cache, descriptor.shapes, cache.views)


def check(rules: WeightsRules, operands: Operands) -> Passage:
    """Raises the typed error of the first rule that is broken: q, K, table, scale, slopes, lse, the outputs, then overlap."""
    d, cache, q, k = rules.descriptor, rules.cache, operands.q, operands.k_cache
    check_query(cache, q)
    check_cache(cache, "k_cache", k, cache.problem.kv_dtype)
    check_room(cache, k)
    extent = k.shape[cache.free_axis]
    if d.table_format == "none" and extent > d.max_seq_len:
        raise InvalidProblem("k_cache.shape", tuple(k.shape), f"must have a seq_len of at most max_seq_len = {d.max_seq_len}")
    check_rows(cache, (operands.table0, operands.table1, operands.table2))
    check_scale(cache.device, "k_scale", d.k_scale, operands.k_scale, cache.scale_axes(extent))
    check_extras(cache, q, Extras(alibi_slopes=operands.alibi_slopes))
    check_tensor(cache.device, "lse", operands.lse, torch.float32)
    check_shape("lse", operands.lse, (d.batch_size, d.num_heads), "[batch_size, num_heads]")
    for name in OUTPUTS:
        _check_output(rules, name, getattr(operands, name))
    _check_overlap(d, operands)
    return _passage(rules, operands)


def _check_output(rules: WeightsRules, name: str, tensor: Any) -> None:
    """An output that is asked for, of its dtype and shape; None where it is not."""
    d = rules.descriptor
    if name not in rules.outputs:
        if tensor is not None:
            raise InvalidArgument(name, f"got {type_name(tensor)}, must be None: the descriptor does not ask for it")
        return
    check_tensor(rules.cache.device, name, tensor, d.output_dtype(name))
    check_shape(name, tensor, rules.outputs[name], MEANINGS[name])
    if name == "weights":
        check_strides(name, tensor, d.store_bytes)


def _check_overlap(d: AttentionWeightsDescriptor, operands: Operands) -> None:
    names = dict(zip(("table0", "table1", "table2"), OPERAND_NAMES[d.table_format], strict=False))
    refuse_overlap({names.get(name, name): t for name, t in operands._asdict().items()}, OUTPUTS)


def _passage(rules: WeightsRules, operands: Operands) -> Passage:
    d, rows = rules.descriptor, rules.cache
    if d.batch_size == 0:
        return Passage.NOTHING
    if operands.k_cache.numel() == 0 or (operands.table0 is not None and operands.table0.numel() == 0):
        return Passage.EMPTY
    aligned = [(operands.q, rows.query_alignment), (operands.k_cache, d.problem.vector_bytes), (operands.weights, d.store_bytes)]
    odd = any(tensor is not None and has_odd_unit_strides(tensor, alignment) for tensor, alignment in aligned)
    return Passage.NORMALISED if odd or operands.q.dim() == 4 else Passage.DIRECT


def viewed(rules: WeightsRules, operands: Operands, passage: Passage) -> Operands:
    """The same memory as a kernel takes it: K as HND, fp8 as bytes, scales by slot. NORMALISED: extents of one get strides."""
    problem, q, k, weights = rules.cache.problem, operands.q, operands.k_cache, operands.weights
    if passage is Passage.NORMALISED:
        q = with_unit_strides(without_query_axis(q, problem), problem.head_dim)
        k = with_unit_strides(k, problem.head_dim)
        weights = None if weights is None else with_unit_strides(weights, weights.shape[-1])
    k, _, k_scale, _ = kernel_views(*rules.views, k, k, operands.k_scale, None)
    return operands._replace(q=q, k_cache=k, k_scale=k_scale, weights=weights)
