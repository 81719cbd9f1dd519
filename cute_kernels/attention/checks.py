"""Real tensors against a described problem: each violation is its typed error, raised before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks.fields import MAX_EXTENT
from ..checks.tensors import (
    check_shape,
    check_strides,
    check_tensor,
    check_unit_last,
    has_odd_unit_strides,
    refuse_overlap,
    type_name,
)
from ..errors import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported, WorkspaceTooSmall
from ..kv.page_table import OPERAND_NAMES
from ..kv.scale import Axes
from ..kv.tensors import check_scale, check_table
from ..kv.types import KVDtype
from ..planning.workspace import WORKSPACE_ALIGNMENT
from .descriptors import DecodeProblem
from .operands import NO_EXTRAS, CacheOrder, Extended, Extras, Operands, Passage, Shapes, Views

MIN_TILE_N = 16
MAX_TOKENS = MIN_TILE_N * 2**31 // 4  # the device schedule counts a batch's tiles, and 2 more a row, in 32 bits

PAIR_BYTES = 4  # a kernel reads q and writes out two 16-bit elements at a time, one where head_dim is odd
QUERY_AXES = {
    "one": "[batch_size, num_heads, head_dim]",
    "uniform": "[batch_size, q_len, num_heads, head_dim]",
    "ragged": "[total_q, num_heads, head_dim]",
}


@dataclass(frozen=True)
class Rules:
    """What a plan demands of its tensors. num_pages, max_pages, and a contiguous cache's seq_len: None when any will do."""

    problem: DecodeProblem
    device: torch.device
    nhd: bool = False
    num_pages: int | None = None
    max_pages: int | None = None
    seq_len: int | None = None

    @property
    def query_alignment(self) -> int:
        """Bytes that pointers and strides of q and out are multiples of."""
        return math.gcd(PAIR_BYTES, self.problem.head_dim * self.problem.q_dtype.itemsize)

    @property
    def order(self) -> CacheOrder:
        """The order of the caches' axes."""
        return "packed" if self.problem.table_format == "packed" else "NHD" if self.nhd else "HND"

    @property
    def views(self) -> Views:
        """How `kernel_views` turns caches and scales into what a kernel takes."""
        return self.order, self.scale_shapes

    @property
    def cache_axes(self) -> tuple[tuple[str, int | None], ...]:
        """The name and extent of each axis of the caches; None where a run decides."""
        problem = self.problem
        heads, dim = ("num_kv_heads", problem.num_kv_heads), ("head_dim", problem.head_dim)
        outer, inner = ("num_pages", self.num_pages), ("page_size", problem.page_size or None)
        if self.order == "packed":
            return ("total_k", None), heads, dim
        if problem.source == "contiguous":
            outer, inner = ("batch_size", problem.batch_size), ("seq_len", self.seq_len)
        return (outer, inner, heads, dim) if self.nhd else (outer, heads, inner, dim)

    @property
    def free_axis(self) -> int:
        """The axis of the caches whose extent a run decides: the pages, or the tokens of a contiguous cache's rows."""
        if self.problem.source == "paged" or self.order == "packed":
            return 0
        return 1 if self.nhd else 2

    @property
    def scale_shapes(self) -> Shapes:
        """The shapes in which `kernel_views` takes k_scale and v_scale; -1 where a run decides. () where there is none."""
        axes = self.scale_axes(-1)
        return self.problem.k_scale.kernel_shape(axes), self.problem.v_scale.kernel_shape(axes)

    def scale_axes(self, extent: int) -> Axes:
        """The axes of scales per token. extent: what a run decides, the caches' pages or, contiguous, their tokens."""
        problem = self.problem
        heads = ("num_kv_heads", problem.num_kv_heads)
        if self.order == "packed":
            return (("total_k", extent), heads)
        if problem.source == "contiguous":
            return (("batch_size", problem.batch_size), heads, ("seq_len", extent))
        return (("num_pages", extent), ("page_size", problem.page_size), heads)

    def total_q(self, q: Tensor) -> int:
        """Query rows of all requests."""
        return q.numel() // (self.problem.num_heads * self.problem.head_dim)


def check(rules: Rules, operands: Operands, extras: Extras = NO_EXTRAS) -> Passage:
    """Raises the typed error of the first rule that is broken: q, caches, table, scales, extras, out, lse, then overlap."""
    problem = rules.problem
    check_query(rules, operands.q)
    _check_caches(rules, operands)
    check_rows(rules, (operands.table0, operands.table1, operands.table2))
    axes = rules.scale_axes(operands.k_cache.shape[rules.free_axis])
    check_scale(rules.device, "k_scale", problem.k_scale, operands.k_scale, axes)
    check_scale(rules.device, "v_scale", problem.v_scale, operands.v_scale, axes)
    check_extras(rules, operands.q, extras)
    if operands.out is not None:
        check_tensor(rules.device, "out", operands.out, problem.q_dtype)
        check_shape("out", operands.out, tuple(operands.q.shape), "q's shape")
        check_strides("out", operands.out, rules.query_alignment)
    if operands.lse is not None:
        check_tensor(rules.device, "lse", operands.lse, torch.float32)
        axis = "batch_size" if problem.query == "one" else "total_q"
        check_shape("lse", operands.lse, (rules.total_q(operands.q), problem.num_heads), f"[{axis}, num_heads]")
    _check_overlap(rules, operands, extras)
    return _passage(rules, operands)


def check_run(rules: Rules, workspace_bytes: int, run: Operands | Extended) -> Passage:
    """`check`, and the workspace of at least so many bytes."""
    operands, extras = run if isinstance(run, Extended) else (run, NO_EXTRAS)
    passage = check(rules, operands, extras)
    check_workspace(rules, operands.workspace, workspace_bytes)
    return passage


def check_query(rules: Rules, q: Any) -> None:
    """q alone: what must hold before out can be allocated like it."""
    problem = rules.problem
    check_tensor(rules.device, "q", q, problem.q_dtype)
    batch, heads, dim = problem.batch_size, problem.num_heads, problem.head_dim
    shape, with_axis = (batch, heads, dim), ((batch, 1, heads, dim), (batch, heads, 1, dim))
    if problem.query == "one" and q.shape != shape and q.shape not in with_axis:
        rule = f"must be {QUERY_AXES['one']} = {[batch, heads, dim]}, or that with one unit query axis"
        several = q.dim() == 4 and (q.shape[0], q.shape[3]) == (batch, dim) and heads in q.shape[1:3] and 0 not in q.shape
        raise query_error(q.shape, several, rule)
    if problem.query == "uniform":
        check_shape("q", q, (batch, None, heads, dim), QUERY_AXES["uniform"])
        if not 1 <= q.shape[1] <= problem.max_q_len:
            raise InvalidProblem("q.shape", tuple(q.shape), f"must have a q_len from 1 to max_q_len = {problem.max_q_len}")
    if problem.query == "ragged":
        check_shape("q", q, (None, heads, dim), QUERY_AXES["ragged"])
        if len(q) > MAX_EXTENT:
            raise InvalidProblem("q.shape", tuple(q.shape), "must have at most 2**31 - 1 rows")
    check_strides("q", q, rules.query_alignment)


def query_error(shape: torch.Size, several: bool, rule: str) -> InvalidProblem | Unsupported:
    """For a q whose shape is refused: Unsupported where it has several query rows a request."""
    if several:
        return Unsupported([f"q.shape = {tuple(shape)}: several query rows a request are not served, {rule}"])
    return InvalidProblem("q.shape", tuple(shape), rule)


def check_workspace(rules: Rules, workspace: Any, needed: int) -> None:
    """A workspace: uint8, 1-D, dense, on the plan's device, of at least `needed` bytes, 16-byte aligned."""
    if workspace is None:
        if needed:
            raise WorkspaceTooSmall(needed, 0)
        return
    check_tensor(rules.device, "workspace", workspace, torch.uint8)
    if workspace.dim() != 1 or not workspace.is_contiguous():
        got = f"got shape {tuple(workspace.shape)} with strides {workspace.stride()}"
        raise InvalidArgument("workspace", f"{got}, must be one-dimensional and contiguous")
    if workspace.numel() < needed:
        raise WorkspaceTooSmall(needed, workspace.numel())
    if workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise MisalignedOperand("workspace.data_ptr", workspace.data_ptr(), WORKSPACE_ALIGNMENT)


def check_cache(rules: Rules, name: str, cache: Any, stored: KVDtype) -> None:
    """One cache by itself: its type, its axes in the rules' order, and its strides."""
    names, extents = zip(*rules.cache_axes, strict=True)
    check_tensor(rules.device, name, cache, *stored.tensor_dtypes)
    check_shape(name, cache, extents, f"[{', '.join(names)}]")
    check_strides(name, cache, rules.problem.vector_bytes)
    if any(stride == 0 for extent, stride in zip(cache.shape, cache.stride(), strict=True) if extent > 1):
        raise Unsupported([f"{name}.stride = {cache.stride()}: an axis of stride 0 (expanded) is not read, make it physical"])


def check_room(rules: Rules, k_cache: Tensor) -> None:
    """The tokens that a contiguous cache has room for."""
    if rules.problem.source == "paged":
        return
    extent = k_cache.shape[rules.free_axis]
    if extent > MAX_EXTENT:
        raise InvalidProblem("k_cache.shape", tuple(k_cache.shape), "must have a seq_len of at most 2**31 - 1")
    rows = 1 if rules.order == "packed" else rules.problem.batch_size
    _check_tokens("k_cache", k_cache, rows * extent, rules.problem.batch_size)


def _check_caches(rules: Rules, operands: Operands) -> None:
    problem, k, v = rules.problem, operands.k_cache, operands.v_cache
    check_cache(rules, "k_cache", k, problem.kv_dtype)
    check_cache(rules, "v_cache", v, problem.v_dtype)
    if v.shape[rules.free_axis] != k.shape[rules.free_axis]:
        raise InvalidProblem("v_cache.shape", tuple(v.shape), f"must be k_cache's, {tuple(k.shape)}")
    check_room(rules, k)


def check_rows(rules: Rules, tables: tuple[Any, Any, Any]) -> None:
    """A PageTable's operands, and the tokens that a paged cache's has room for."""
    batch = rules.problem.batch_size
    check_table(rules.device, rules.problem.table_format, batch, tables)
    if rules.problem.source == "contiguous":
        return
    name = OPERAND_NAMES[rules.problem.table_format][0]
    _check_max_pages(rules, name, tables[0])
    _check_tokens(name, tables[0], tables[0].numel() * rules.problem.page_size, batch)


def _check_tokens(name: str, holder: Tensor, tokens: int, batch: int) -> None:
    """`holder`, a table or a contiguous cache, has room for `tokens` in all rows: as many as the device schedule counts."""
    if tokens + batch * MIN_TILE_N >= MAX_TOKENS:
        shape = tuple(holder.shape)
        raise Unsupported([f"{name}.shape = {shape} has room for {tokens:,} tokens: a batch must stay below {MAX_TOKENS:,}"])


def _check_max_pages(rules: Rules, name: str, table: Tensor) -> None:
    """A dense table has at most max_pages columns, the indices of a CSR table as many for each row."""
    if rules.max_pages is None:
        return
    if rules.problem.table_format == "dense":
        most, rule = rules.max_pages, f"must have at most max_pages = {rules.max_pages} columns"
    else:
        most = rules.problem.batch_size * rules.max_pages
        rule = f"must hold at most batch_size * max_pages = {most} entries"
    if table.shape[-1] > most:
        raise InvalidProblem(f"{name}.shape", tuple(table.shape), rule)


def check_extras(rules: Rules, q: Tensor, extras: Extras) -> None:
    """The tensors of several query rows and of modifiers: those that are described, and no others."""
    problem, modifiers = rules.problem, rules.problem.modifiers
    wanted: dict[str, tuple[bool, torch.dtype, tuple[int, ...], str]] = {
        "qo_indptr": (problem.query == "ragged", torch.int32, (problem.batch_size + 1,), "[batch_size + 1]"),
        "tree_mask": (
            modifiers.tree_mask,
            torch.int32,
            (rules.total_q(q), problem.tree_words),
            "[total_q, ceil(max_q_len / 32)]",
        ),
        "alibi_slopes": (modifiers.alibi, torch.float32, (problem.num_heads,), "[num_heads]"),
        "sinks": (modifiers.sinks, torch.float32, (problem.num_heads,), "[num_heads]"),
    }
    for (name, (described, dtype, shape, meaning)), tensor in zip(wanted.items(), extras, strict=True):
        if not described:
            if tensor is not None:
                raise InvalidArgument(name, f"got {type_name(tensor)}, must be None: the descriptor has no {name}")
            continue
        check_tensor(rules.device, name, tensor, dtype)
        check_shape(name, tensor, shape, meaning)
        check_unit_last(name, tensor)


def _check_overlap(rules: Rules, operands: Operands, extras: Extras) -> None:
    names = dict(zip(("table0", "table1", "table2"), OPERAND_NAMES[rules.problem.table_format], strict=False))
    given = {names.get(n, n): t for n, t in operands._asdict().items()}
    refuse_overlap({**given, **extras._asdict()}, ("out", "lse", "workspace"))


def _passage(rules: Rules, operands: Operands) -> Passage:
    if rules.problem.batch_size == 0 or operands.q.numel() == 0:
        return Passage.NOTHING
    if operands.k_cache.numel() == 0 or (operands.table0 is not None and operands.table0.numel() == 0):
        return Passage.EMPTY
    rows, caches = (operands.q, operands.out), (operands.k_cache, operands.v_cache)
    odd = any(has_odd_unit_strides(t, rules.query_alignment) for t in rows if t is not None)
    odd = odd or any(has_odd_unit_strides(t, rules.problem.vector_bytes) for t in caches)
    unit_axis = rules.problem.query == "one" and operands.q.dim() == 4
    return Passage.NORMALISED if odd or unit_axis else Passage.DIRECT
