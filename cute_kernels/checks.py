"""Real tensors against a described problem: each violation is its typed error, raised before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .config import TableFormat
from .descriptors import MAX_EXTENT, DecodeProblem
from .errors import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported, WorkspaceTooSmall
from .kv_scale import Axes, KVScale
from .overlap import disjoint
from .page_table import OPERAND_NAMES, PageTable
from .workspace import WORKSPACE_ALIGNMENT

MIN_TILE_N = 16
MAX_TOKENS = MIN_TILE_N * 2**31 // 4  # the device schedule counts a batch's tiles, and 2 more a row, in 32 bits

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PAIR_BYTES = 4  # a kernel reads q and writes out two 16-bit elements at a time, one where head_dim is odd


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


def signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table0: Tensor | None,
    table1: Tensor | None,
    table2: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    workspace: Tensor | None,
) -> tuple[object, ...]:
    """All that `check` depends on, as a key: a checked signature need not be checked again.

    Devices are part of it: an address passes from one to another once it is freed, a tensor without elements has none, and pinned
    memory has one address on both sides. Written flat: a loop over the tensors costs a microsecond more.
    """
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
        _check_tensor(rules.device, "out", operands.out, problem.q_dtype)
        _check_shape("out", operands.out, tuple(operands.q.shape), "q's shape")
        _check_strides("out", operands.out, rules.query_alignment)
    if operands.lse is not None:
        _check_tensor(rules.device, "lse", operands.lse, torch.float32)
        _check_shape("lse", operands.lse, (problem.batch_size, problem.num_heads), "[batch_size, num_heads]")
    _check_overlap(rules, operands)
    return _passage(rules, operands)


def check_query(rules: Rules, q: Any) -> None:
    """q alone: what must hold before out can be allocated like it."""
    problem = rules.problem
    _check_tensor(rules.device, "q", q, problem.q_dtype)
    batch, heads, dim = problem.batch_size, problem.num_heads, problem.head_dim
    if tuple(q.shape) not in ((batch, heads, dim), (batch, 1, heads, dim), (batch, heads, 1, dim)):
        rule = f"must be [batch_size, num_heads, head_dim] = {[batch, heads, dim]}, or that with one unit query axis"
        several = q.dim() == 4 and (q.shape[0], q.shape[3]) == (batch, dim) and heads in q.shape[1:3] and 0 not in q.shape
        raise query_error(q.shape, several, rule)
    _check_strides("q", q, rules.query_alignment)


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
    _check_tensor(rules.device, "workspace", workspace, torch.uint8)
    if workspace.dim() != 1 or not workspace.is_contiguous():
        got = f"got shape {tuple(workspace.shape)} with strides {workspace.stride()}"
        raise InvalidArgument("workspace", f"{got}, must be one-dimensional and contiguous")
    if workspace.numel() < needed:
        raise WorkspaceTooSmall(needed, workspace.numel())
    if workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise MisalignedOperand("workspace.data_ptr", workspace.data_ptr(), WORKSPACE_ALIGNMENT)


def check_page_table(table_format: TableFormat, page_table: Any, name: str = "page_table") -> None:
    """A PageTable of the described format."""
    if not isinstance(page_table, PageTable):
        raise InvalidArgument(name, f"got {_kind(page_table)}, must be a PageTable")
    if page_table.format != table_format:
        raise InvalidArgument(name, f"is {page_table.format}, must be {table_format}: the descriptor's table_format")
    if len(page_table.operands) != 3 or (page_table.format == "dense" and page_table.operands[2] is not None):
        raise InvalidArgument(name, "has operands of neither format, must be made by PageTable.dense or PageTable.csr")


def normalised(rules: Rules, operands: Operands) -> Operands:
    """The same memory as `kernel_views` has it, with three axes of q and out, and aligned strides where an extent is one."""
    q, out = _without_query_axis(operands.q, rules.problem), _without_query_axis(operands.out, rules.problem)
    dim = rules.problem.head_dim
    q, out, k, v = (_unit_strides(t, dim) for t in (q, out, operands.k_cache, operands.v_cache))
    k, v, k_scale, v_scale = kernel_views(rules.nhd, rules.scale_shapes, k, v, operands.k_scale, operands.v_scale)
    return operands._replace(q=q, k_cache=k, v_cache=v, k_scale=k_scale, v_scale=v_scale, out=out)


def kernel_views(
    nhd: bool, shapes: tuple[tuple[int, ...], ...], k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(k, v, k_scale, v_scale) as a kernel takes them: caches HND, fp8 as bytes; scales in `shapes`, Rules.scale_shapes."""
    k, v = as_bytes(k), as_bytes(v)
    if nhd:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return k, v, scale_view(k_scale, shapes[0]), scale_view(v_scale, shapes[1])


def as_bytes(cache: Tensor) -> Tensor:
    """A cache as it is, but the bytes (uint8) of one that holds fp8."""
    return cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache


def scale_view(scale: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The same scales in the kernel's shape: of a 0-d tensor or a flat one."""
    return scale if scale is None or scale.dim() == len(shape) else scale.view(shape)


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
        _check_tensor(rules.device, name, cache, *dtype.tensor_dtypes)
        _check_shape(name, cache, extents, f"[{', '.join(names)}]")
        _check_strides(name, cache, problem.vector_bytes)
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


def check_table(device: torch.device, table_format: TableFormat, batch: int, operands: tuple[Any, ...]) -> None:
    """The operands of a dense or a CSR PageTable of `batch` rows."""
    names = OPERAND_NAMES[table_format]
    tensors = operands[: len(names)]
    for name, tensor in zip(names, tensors, strict=True):
        _check_tensor(device, name, tensor, torch.int32)
    if table_format == "dense":
        _check_shape(names[0], tensors[0], (batch, None), "[batch_size, max_pages]")
        _check_shape(names[1], tensors[1], (batch,), "[batch_size]")
    else:
        _check_shape(names[0], tensors[0], (None,), "[used_pages]")
        _check_shape(names[1], tensors[1], (batch + 1,), "[batch_size + 1]")
        _check_shape(names[2], tensors[2], (batch,), "[batch_size]")
    for name, tensor in zip(names, tensors, strict=True):
        _check_unit_last(name, tensor)


def check_scale(device: torch.device, name: str, scale: KVScale, tensor: Any, axes: Axes) -> None:
    """A tensor of the described granularity and dtype, with any strides; None where there are no scales."""
    if not scale:
        if tensor is not None:
            raise InvalidArgument(name, f"got {_kind(tensor)}, must be None: the descriptor has no {name}")
        return
    _check_tensor(device, name, tensor, scale.dtype)
    if tuple(tensor.shape) not in scale.shapes(axes):
        raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must be {scale.meaning(axes)}: the scale is per {scale}")
    if tensor.data_ptr() % tensor.element_size():
        raise MisalignedOperand(f"{name}.data_ptr", tensor.data_ptr(), tensor.element_size())


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


def _check_tensor(device: torch.device, name: str, tensor: Any, *dtypes: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(name, f"got {_kind(tensor)}, must be a tensor")
    if isinstance(tensor, FakeTensor):
        raise InvalidArgument(name, "is a FakeTensor, must have memory: trace decode_attention, which is a torch op there")
    if tensor.device != device:
        raise InvalidArgument(name, f"is on {tensor.device}, must be on the plan's device, {device}")
    if tensor.dtype not in dtypes:
        raise InvalidArgument(name, f"has dtype {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    fits = tensor.dim() == len(shape) and all(want in (None, got) for got, want in zip(tensor.shape, shape, strict=True))
    if not fits:
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must be {meaning} = [{wanted}]")


def _check_unit_last(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise Unsupported([f"{name}.stride = {tensor.stride()}: the last must be 1"])


def _check_strides(name: str, tensor: Tensor, alignment: int) -> None:
    """A unit last stride; the other strides and the pointer are multiples of `alignment` bytes."""
    _check_unit_last(name, tensor)
    if tensor.numel() == 0:
        return
    for axis in range(tensor.dim() - 1):
        nbytes = tensor.stride(axis) * tensor.element_size()
        if tensor.shape[axis] > 1 and nbytes % alignment:
            raise MisalignedOperand(f"{name}.stride({axis})", nbytes, alignment)
    if tensor.data_ptr() % alignment:
        raise MisalignedOperand(f"{name}.data_ptr", tensor.data_ptr(), alignment)


def _check_overlap(rules: Rules, operands: Operands) -> None:
    table_names = OPERAND_NAMES.get(rules.problem.table_format, ())
    names = dict(zip(("table0", "table1", "table2"), table_names, strict=False))
    refuse_overlap({names.get(n, n): t for n, t in operands._asdict().items()}, ("out", "lse", "workspace"))


def refuse_overlap(operands: dict[str, Any], written: tuple[str, ...]) -> None:
    """No written tensor shares bytes with another operand, or, but for the workspace, with itself; they may interleave."""
    tensors = {name: t for name, t in operands.items() if isinstance(t, Tensor) and t.numel()}
    for name in (name for name in written if name in tensors):
        for other, tensor in tensors.items():
            if other != name and not disjoint(tensors[name], tensor):
                low, high = _span(tensors[name])
                raise InvalidArgument(name, f"bytes [{low:#x}, {high:#x}) overlap {other}'s, must be memory of its own")
    for name in (name for name in written if name in tensors and name != "workspace"):
        if _overlaps_itself(tensors[name]):
            strides = tensors[name].stride()
            raise InvalidArgument(name, f"strides {strides} make elements share memory, each must have its own")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first to its last element: [low, high)."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlaps_itself(tensor: Tensor) -> bool:
    axes = sorted((stride, extent) for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1)
    reach = 0  # the largest offset that the axes so far can make
    for stride, extent in axes:
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def _passage(rules: Rules, operands: Operands) -> Passage:
    if rules.problem.batch_size == 0:
        return Passage.NOTHING
    if operands.k_cache.numel() == 0 or (operands.table0 is not None and operands.table0.numel() == 0):
        return Passage.EMPTY
    rows, caches = (operands.q, operands.out), (operands.k_cache, operands.v_cache)
    odd = any(_odd_unit_strides(t, rules.query_alignment) for t in rows if t is not None)
    odd = odd or any(_odd_unit_strides(t, rules.problem.vector_bytes) for t in caches)
    return Passage.NORMALISED if odd or operands.q.dim() == 4 else Passage.DIRECT


def _odd_unit_strides(tensor: Tensor, alignment: int) -> bool:
    """Whether an extent of one has a stride that a kernel's signature would refuse, though it is never used."""
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    odd = any(extent == 1 and (stride * tensor.element_size() % alignment or stride == 0) for extent, stride in outer)
    return odd or last[1] != 1


def _unit_strides(tensor: Tensor, head_dim: int) -> Tensor:
    """The same elements; an extent of one gets a row's stride, or 1 when it is the last."""
    strides = [head_dim if extent == 1 else stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, (*strides[:-1], 1))


def _without_query_axis(tensor: Tensor, problem: DecodeProblem) -> Tensor:
    if tensor.dim() == 3:
        return tensor
    return tensor.select(1 if tuple(tensor.shape[1:3]) == (1, problem.num_heads) else 2, 0)


def _kind(value: object) -> str:
    return type(value).__name__
