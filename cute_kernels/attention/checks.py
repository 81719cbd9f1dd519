"""Real tensors against a described problem: each violation is its typed error, raised before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks.fields import MAX_EXTENT
from ..checks.tensors import check_shape, check_strides, check_tensor, has_odd_unit_strides, refuse_overlap, with_unit_strides
from ..errors import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported, WorkspaceTooSmall
from ..kv.page_table import OPERAND_NAMES
from ..kv.scale import Axes
from ..kv.tensors import as_bytes, check_scale, check_table, scale_view
from ..planning.workspace import WORKSPACE_ALIGNMENT
from .descriptors import DecodeProblem

MIN_TILE_N = 16
MAX_TOKENS = MIN_TILE_N * 2**31 // 4  # the device schedule counts a batch's tiles, and 2 more a row, in 32 bits

PAIR_BYTES = 4  # a kernel reads q and writes out two 16-bit elements at a time, one where head_dim is odd

Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of k_scale and v_scale as a kernel takes them
Views = tuple[bool, Shapes]  # whether caches are NHD


class Operands(NamedTuple):
    """What one run is given; scales, out, lse and workspace may be absent. table0..2 are a PageTable's operands."""

    q: Any
    k_cache: Any
    v_cache: Any
    table0: Any
    table1: Any
    table2: Any
    k_scale: Any
    v_scale: Any
    out: Any
    lse: Any
    workspace: Any

    def signature(self) -> tuple[object, ...]:
        """All that `check` depends on, as a key: a checked signature need not be checked again.

        Devices are part of it: an address passes from one to another once it is freed, a tensor without elements has none, and
        pinned memory has one address on both sides. Written flat: a loop over the tensors costs a microsecond more.
        """
        q, k, v, table0, table1, table2, k_scale, v_scale, out, lse, workspace = self
        # fmt: off
        return (
            q.shape, q.stride(), q.dtype, q.data_ptr(), q.device,
            k.shape, k.stride(), k.dtype, k.data_ptr(), k.device,
            v.shape, v.stride(), v.dtype, v.data_ptr(), v.device,
            out.shape, out.stride(), out.dtype, out.data_ptr(), out.device,
            lse.shape, lse.stride(), lse.dtype, lse.data_ptr(), lse.device,
            None if table0 is None else (table0.shape, table0.stride(), table0.dtype, table0.data_ptr(), table0.device),
            None if table1 is None else (table1.shape, table1.stride(), table1.dtype, table1.data_ptr(), table1.device),
            None if table2 is None else (table2.shape, table2.stride(), table2.dtype, table2.data_ptr(), table2.device),
            None if k_scale is None else (k_scale.shape, k_scale.stride(), k_scale.dtype, k_scale.data_ptr(), k_scale.device),
            None if v_scale is None else (v_scale.shape, v_scale.stride(), v_scale.dtype, v_scale.data_ptr(), v_scale.device),
            None if workspace is None else (
                workspace.shape, workspace.stride(), workspace.dtype, workspace.data_ptr(), workspace.device,
            ),
        )
        # fmt: on


class Passage(Enum):
    """How checked operands reach the kernel."""

    DIRECT = auto()  # as they are
    NORMALISED = auto()  # through views: a unit query axis, or odd strides of extents of one
    EMPTY = auto()  # no token anywhere: out = 0, lse = -inf, no kernel
    NOTHING = auto()  # batch 0: nothing to write


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
    def free_axis(self) -> int:
        """The axis of the caches whose extent a run decides: the pages, or the tokens of a contiguous cache's rows."""
        return 2 if self.problem.source == "contiguous" else 0

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes in which a kernel takes k_scale and v_scale; -1 where a run decides. () where there is none."""
        axes = self.scale_axes(-1)
        return self.problem.k_scale.kernel_shape(axes), self.problem.v_scale.kernel_shape(axes)

    def scale_axes(self, extent: int) -> Axes:
        """The axes of scales per token. extent: what a run decides, the caches' pages or, contiguous, their tokens a row."""
        problem = self.problem
        heads = ("num_kv_heads", problem.num_kv_heads)
        if problem.source == "contiguous":
            return (("batch_size", problem.batch_size), heads, ("seq_len", extent))
        return (("num_pages", extent), ("page_size", problem.page_size), heads)


def check(rules: Rules, operands: Operands) -> Passage:
    """Raises the typed error of the first rule that is broken: q, caches, table, scales, out, lse, then overlap."""
    problem = rules.problem
    check_query(rules, operands.q)
    _check_caches(rules, operands)
    _check_table(rules, operands)
    axes = rules.scale_axes(operands.k_cache.shape[rules.free_axis])
    check_scale(rules.device, "k_scale", problem.k_scale, operands.k_scale, axes)
    check_scale(rules.device, "v_scale", problem.v_scale, operands.v_scale, axes)
    if operands.out is not None:
        check_tensor(rules.device, "out", operands.out, problem.q_dtype)
        check_shape("out", operands.out, tuple(operands.q.shape), "q's shape")
        check_strides("out", operands.out, rules.query_alignment)
    if operands.lse is not None:
        check_tensor(rules.device, "lse", operands.lse, torch.float32)
        check_shape("lse", operands.lse, (problem.batch_size, problem.num_heads), "[batch_size, num_heads]")
    _check_overlap(rules, operands)
    return _passage(rules, operands)


def check_run(rules: Rules, workspace_bytes: int, operands: Operands) -> Passage:
    """`check`, and the workspace of at least so many bytes."""
    passage = check(rules, operands)
    check_workspace(rules, operands.workspace, workspace_bytes)
    return passage


def check_query(rules: Rules, q: Any) -> None:
    """q alone: what must hold before out can be allocated like it."""
    problem = rules.problem
    check_tensor(rules.device, "q", q, problem.q_dtype)
    batch, heads, dim = problem.batch_size, problem.num_heads, problem.head_dim
    if tuple(q.shape) not in ((batch, heads, dim), (batch, 1, heads, dim), (batch, heads, 1, dim)):
        rule = f"must be [batch_size, num_heads, head_dim] = {[batch, heads, dim]}, or that with one unit query axis"
        several = q.dim() == 4 and (q.shape[0], q.shape[3]) == (batch, dim) and heads in q.shape[1:3] and 0 not in q.shape
        raise query_error(q.shape, several, rule)
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


def normalised(rules: Rules, operands: Operands) -> Operands:
    """The same memory as `kernel_views` has it, with three axes of q and out, and aligned strides where an extent is one."""
    q, out = _without_query_axis(operands.q, rules.problem), _without_query_axis(operands.out, rules.problem)
    dim = rules.problem.head_dim
    q, out, k, v = (with_unit_strides(t, dim) for t in (q, out, operands.k_cache, operands.v_cache))
    return viewed((rules.nhd, rules.scale_shapes), operands._replace(q=q, k_cache=k, v_cache=v, out=out))


def viewed(views: Views, operands: Operands) -> Operands:
    """The operands with caches and scales as `kernel_views` has them."""
    k, v, k_scale, v_scale = kernel_views(*views, operands.k_cache, operands.v_cache, operands.k_scale, operands.v_scale)
    return operands._replace(k_cache=k, v_cache=v, k_scale=k_scale, v_scale=v_scale)


def kernel_views(
    nhd: bool, shapes: Shapes, k: Any, v: Any, k_scale: Any, v_scale: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(k, v, k_scale, v_scale) as a kernel takes them: caches HND, fp8 as bytes; scales in `shapes`, Rules.scale_shapes."""
    k, v = as_bytes(k), as_bytes(v)
    if nhd:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return k, v, scale_view(k_scale, shapes[0]), scale_view(v_scale, shapes[1])


def _check_caches(rules: Rules, operands: Operands) -> None:
    problem = rules.problem
    axes: list[tuple[str, int | None]]
    pages, heads, slots = ("num_pages", rules.num_pages), ("num_kv_heads", problem.num_kv_heads), ("page_size", problem.page_size)
    if problem.source == "contiguous":
        axes = [("batch_size", problem.batch_size), heads, ("seq_len", rules.seq_len)]
    else:
        axes = [pages, slots, heads] if rules.nhd else [pages, heads, slots]
    names, extents = zip(*axes, ("head_dim", problem.head_dim), strict=True)
    stored = (("k_cache", operands.k_cache, problem.kv_dtype), ("v_cache", operands.v_cache, problem.v_dtype))
    for name, cache, dtype in stored:
        check_tensor(rules.device, name, cache, *dtype.tensor_dtypes)
        check_shape(name, cache, extents, f"[{', '.join(names)}]")
        check_strides(name, cache, problem.vector_bytes)
        if any(stride == 0 for extent, stride in zip(cache.shape, cache.stride(), strict=True) if extent > 1):
            raise Unsupported([f"{name}.stride = {cache.stride()}: an axis of stride 0 (expanded) is not read, make it physical"])
    extent = operands.k_cache.shape[rules.free_axis]
    if operands.v_cache.shape[rules.free_axis] != extent:
        raise InvalidProblem(
            "v_cache.shape", tuple(operands.v_cache.shape), f"must be k_cache's, {tuple(operands.k_cache.shape)}"
        )
    if problem.source == "contiguous":
        if extent > MAX_EXTENT:
            raise InvalidProblem("k_cache.shape", tuple(operands.k_cache.shape), "must have a seq_len of at most 2**31 - 1")
        _check_tokens("k_cache", operands.k_cache, problem.batch_size * extent, problem.batch_size)


def _check_table(rules: Rules, operands: Operands) -> None:
    batch = rules.problem.batch_size
    if rules.problem.table_format == "none":
        return
    check_table(rules.device, rules.problem.table_format, batch, (operands.table0, operands.table1, operands.table2))
    name = OPERAND_NAMES[rules.problem.table_format][0]
    _check_max_pages(rules, name, operands.table0)
    _check_tokens(name, operands.table0, operands.table0.numel() * rules.problem.page_size, batch)


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


def _check_overlap(rules: Rules, operands: Operands) -> None:
    table_names = OPERAND_NAMES.get(rules.problem.table_format, ())
    names = dict(zip(("table0", "table1", "table2"), table_names, strict=False))
    refuse_overlap({names.get(n, n): t for n, t in operands._asdict().items()}, ("out", "lse", "workspace"))


def _passage(rules: Rules, operands: Operands) -> Passage:
    if rules.problem.batch_size == 0:
        return Passage.NOTHING
    if operands.k_cache.numel() == 0 or (operands.table0 is not None and operands.table0.numel() == 0):
        return Passage.EMPTY
    rows, caches = (operands.q, operands.out), (operands.k_cache, operands.v_cache)
    odd = any(has_odd_unit_strides(t, rules.query_alignment) for t in rows if t is not None)
    odd = odd or any(has_odd_unit_strides(t, rules.problem.vector_bytes) for t in caches)
    return Passage.NORMALISED if odd or operands.q.dim() == 4 else Passage.DIRECT


def _without_query_axis(tensor: Tensor, problem: DecodeProblem) -> Tensor:
    if tensor.dim() == 3:
        return tensor
    return tensor.select(1 if tuple(tensor.shape[1:3]) == (1, problem.num_heads) else 2, 0)
