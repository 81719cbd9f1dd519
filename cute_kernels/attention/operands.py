"""What a run of attention is given, and the views of the same memory that a kernel takes."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Literal, NamedTuple, TypedDict

from torch import Tensor

from ..checks.tensors import with_unit_strides
from ..kv.tensors import as_bytes, scale_view
from .descriptors import DecodeProblem

Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of k_scale and v_scale as a kernel takes them
CacheOrder = Literal["HND", "NHD", "packed"]  # packed: [total_k, num_kv_heads, head_dim]
Views = tuple[CacheOrder, Shapes]


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

        Devices are part of the key: a freed address may come back on another device, a tensor without elements has no address,
        and pinned memory has one address on both sides. The code is flat: a loop over the tensors costs a microsecond more.
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


class Extras(NamedTuple):
    """Further operands of a run with several query rows or with modifiers; each may be absent."""

    qo_indptr: Any = None
    tree_mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None


NO_EXTRAS = Extras()


class Given(TypedDict, total=False):
    """What a run may be given by name in addition to q, the caches and the page table: tensors, or None."""

    qo_indptr: Tensor | None
    tree_mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor | None
    lse: Tensor | None


class Extended(NamedTuple):
    """The operands of a run that is given extras."""

    operands: Operands
    extras: Extras

    def signature(self) -> tuple[object, ...]:
        """As Operands.signature."""
        extras = (None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr(), t.device) for t in self.extras)
        return *self.operands.signature(), *extras


class Passage(Enum):
    """How checked operands reach the kernel."""

    DIRECT = auto()  # as they are
    NORMALISED = auto()  # through views, because of a unit query axis or odd strides of axes of extent one
    EMPTY = auto()  # no key anywhere: out = 0, lse = -inf or the sinks, no kernel
    NOTHING = auto()  # no query row: nothing to write


def kernel_views(
    order: CacheOrder, shapes: Shapes, k: Any, v: Any, k_scale: Any, v_scale: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(k, v, k_scale, v_scale) as a kernel takes them: caches HND, fp8 as bytes; scales in `shapes` (Rules.scale_shapes)."""
    k, v, k_scale, v_scale = as_bytes(k), as_bytes(v), scale_view(k_scale, shapes[0]), scale_view(v_scale, shapes[1])
    if order == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if order == "packed":
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        k_scale, v_scale = (scale.T[None] if scale is not None and scale.dim() == 2 else scale for scale in (k_scale, v_scale))
    return k, v, k_scale, v_scale


def viewed(views: Views, operands: Operands) -> Operands:
    """The operands with caches and scales as `kernel_views` has them."""
    k, v, k_scale, v_scale = kernel_views(*views, operands.k_cache, operands.v_cache, operands.k_scale, operands.v_scale)
    return operands._replace(k_cache=k, v_cache=v, k_scale=k_scale, v_scale=v_scale)


def normalised(problem: DecodeProblem, views: Views, operands: Operands) -> Operands:
    """The same memory as `kernel_views` has it, without a unit query axis, and with aligned strides on axes of extent one."""
    q, out = without_query_axis(operands.q, problem), without_query_axis(operands.out, problem)
    q, out, k, v = (with_unit_strides(t, problem.head_dim) for t in (q, out, operands.k_cache, operands.v_cache))
    return viewed(views, operands._replace(q=q, k_cache=k, v_cache=v, out=out))


def by_request(operands: Operands, extras: Extras) -> tuple[Operands, Extras]:
    """Operands of uniform query rows, with lse and tree_mask viewed as [batch, q_len, ...], as a kernel takes them."""
    batch, q_len, *_ = operands.q.shape
    lse, mask = operands.lse, extras.tree_mask
    operands = operands._replace(lse=lse.view(batch, q_len, lse.shape[1]))
    return operands, extras if mask is None else extras._replace(tree_mask=mask.view(batch, q_len, mask.shape[1]))


def without_query_axis(tensor: Tensor, problem: DecodeProblem) -> Tensor:
    """q or out as [batch, num_heads, head_dim] if a request has one query row; else the tensor as it is."""
    if problem.query != "one" or tensor.dim() == 3:
        return tensor
    return tensor.select(1 if tuple(tensor.shape[1:3]) == (1, problem.num_heads) else 2, 0)
