"""Real tensors of a run of attention's backward against its descriptor: each violation is its typed error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..attention.checks import Rules, check_cache, check_extras, check_query, check_room, check_rows, check_workspace
from ..attention.operands import Extras, Passage, kernel_views
from ..checks.tensors import (
    check_shape,
    check_strides,
    check_tensor,
    check_unit_last,
    has_odd_unit_strides,
    refuse_overlap,
    type_name,
    with_unit_strides,
)
from ..errors import InvalidArgument, InvalidProblem
from ..kv.page_table import OPERAND_NAMES
from .descriptor import PagedAttentionBackwardDescriptor

OUTPUTS = ("dq", "dk_cache", "dv_cache", "dsinks")
QUERY_LIKE, CACHES = ("dout", "q", "out", "dq"), ("k_cache", "v_cache", "dk_cache", "dv_cache")


class Given(TypedDict, total=False):
    """What a run may be given by name: tensors, or None."""

    qo_indptr: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dq: Tensor | None
    dk_cache: Tensor | None
    dv_cache: Tensor | None
    dsinks: Tensor | None


class Operands(NamedTuple):
    """What one run is given, in a kernel's order; what the descriptor has not is None. table0..2 are a PageTable's operands."""

    dout: Any
    q: Any
    k_cache: Any
    v_cache: Any
    out: Any
    lse: Any
    table0: Any
    table1: Any
    table2: Any
    qo_indptr: Any
    alibi_slopes: Any
    sinks: Any
    dq: Any
    dk_cache: Any
    dv_cache: Any
    dsinks: Any
    workspace: Any

    def signature(self) -> tuple[object, ...]:
        """All that `check` depends on, as a key."""
        return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr(), t.device) for t in self)


@dataclass(frozen=True)
class BackwardRules:
    """What a plan demands of its tensors. attention: of those that it shares with attention."""

    descriptor: PagedAttentionBackwardDescriptor
    attention: Rules
    workspace_bytes: int

    @classmethod
    def of(cls, descriptor: PagedAttentionBackwardDescriptor, device: torch.device, workspace_bytes: int) -> BackwardRules:
        """Those of a descriptor's plan on a device."""
        d = descriptor.attention
        limits = {"num_pages": d.num_pages, "max_pages": d.max_pages}
        return cls(descriptor, Rules(descriptor.problem, device, nhd=d.layout.order == "NHD", **limits), workspace_bytes)


def check(rules: BackwardRules, operands: Operands) -> Passage:
    """Raises the typed error of the first rule that is broken: q, caches, table, extras, dout, out, lse, gradients, overlap."""
    attention, problem, q = rules.attention, rules.attention.problem, operands.q
    check_query(attention, q)
    check_strides("q", q, rules.descriptor.row_alignment)
    check_cache(attention, "k_cache", operands.k_cache, problem.kv_dtype)
    _check_like_k(attention, operands.k_cache, "v_cache", operands.v_cache)
    check_room(attention, operands.k_cache)
    check_rows(attention, (operands.table0, operands.table1, operands.table2))
    check_extras(attention, q, Extras(operands.qo_indptr, None, operands.alibi_slopes, operands.sinks))
    total_q = attention.total_q(q)
    if total_q > rules.descriptor.most_rows:
        rule = f"must have at most max_total_q = {rules.descriptor.most_rows} query rows: the workspace has no more"
        raise InvalidProblem("q.shape", tuple(q.shape), rule)
    for name in ("dout", "out", "dq"):
        tensor = getattr(operands, name)
        check_tensor(attention.device, name, tensor, problem.q_dtype)
        check_shape(name, tensor, tuple(q.shape), "q's shape")
        check_strides(name, tensor, rules.descriptor.row_alignment)
    check_tensor(attention.device, "lse", operands.lse, torch.float32)
    check_shape("lse", operands.lse, (total_q, problem.num_heads), "[total_q, num_heads]")
    for name in ("dk_cache", "dv_cache"):
        _check_like_k(attention, operands.k_cache, name, getattr(operands, name))
    _check_sinks(rules, operands.dsinks)
    _check_overlap(rules, operands)
    return _passage(rules, operands)


def check_run(rules: BackwardRules, operands: Operands) -> Passage:
    """`check`, and the workspace."""
    passage = check(rules, operands)
    check_workspace(rules.attention, operands.workspace, rules.workspace_bytes)
    return passage


def _check_like_k(rules: Rules, k_cache: Any, name: str, cache: Any) -> None:
    """Another cache of K's extents."""
    check_cache(rules, name, cache, rules.problem.kv_dtype)
    if cache.shape[rules.free_axis] != k_cache.shape[rules.free_axis]:
        raise InvalidProblem(f"{name}.shape", tuple(cache.shape), f"must be k_cache's, {tuple(k_cache.shape)}")


def _check_sinks(rules: BackwardRules, dsinks: Any) -> None:
    problem = rules.attention.problem
    if not problem.modifiers.sinks:
        if dsinks is not None:
            raise InvalidArgument("dsinks", f"got {type_name(dsinks)}, must be None: the descriptor has no sinks")
        return
    check_tensor(rules.attention.device, "dsinks", dsinks, torch.float32)
    check_shape("dsinks", dsinks, (problem.num_heads,), "[num_heads]")
    check_unit_last("dsinks", dsinks)


def _check_overlap(rules: BackwardRules, operands: Operands) -> None:
    names = dict(zip(("table0", "table1", "table2"), OPERAND_NAMES[rules.attention.problem.table_format], strict=False))
    refuse_overlap({names.get(name, name): t for name, t in operands._asdict().items()}, (*OUTPUTS, "workspace"))


def _passage(rules: BackwardRules, operands: Operands) -> Passage:
    if rules.attention.problem.batch_size == 0 or operands.q.numel() == 0:
        return Passage.NOTHING
    if operands.k_cache.numel() == 0 or (operands.table0 is not None and operands.table0.numel() == 0):
        return Passage.EMPTY
    return Passage.DIRECT


def viewed(rules: BackwardRules, operands: Operands) -> Operands:
    """The same memory as a kernel takes it: caches as HND, lse of uniform rows with an axis of requests, usual unit strides."""
    problem, changes = rules.attention.problem, {}
    for names, alignment in ((QUERY_LIKE, rules.descriptor.row_alignment), (CACHES, problem.vector_bytes)):
        for name in names:
            tensor = getattr(operands, name)
            changes[name] = with_unit_strides(tensor, problem.head_dim) if has_odd_unit_strides(tensor, alignment) else tensor
    order, shapes = rules.attention.views
    for first, second in (("k_cache", "v_cache"), ("dk_cache", "dv_cache")):
        changes[first], changes[second], _, _ = kernel_views(order, shapes, changes[first], changes[second], None, None)
    if problem.query == "uniform":
        changes["lse"] = operands.lse.unflatten(0, operands.q.shape[:2])
    return operands._replace(**changes)
