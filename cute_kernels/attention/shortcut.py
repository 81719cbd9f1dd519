"""The operands of a run, remembered by weak reference: a later run with the same tensors need not be checked again.

To compare tensors by identity costs half as much as to describe them (`Operands.signature`). An operand that a kernel takes as
it is reaches the launch as it is. The launch refuses another dtype, shape, alignment or device, whatever `set_`, `.data =`,
`resize_` or `transpose_` have made of the operand; a refused run is checked anew, which names what is wrong. The other operands
(8-bit and NHD caches, scales, the workspace) are held in the form that a launch takes, since to make a view anew costs a
microsecond. Held operands, out and lse must keep their addresses, and held operands their dtype and number of bytes.

A shortcut does not see two changes in place: other strides of a held operand, which stays within memory that was checked, and an
input that has been moved onto an output. A shortcut holds storage, not tensors: when the first of the tensors dies, the shortcut
is dropped with all that it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..compile.kernels import as_operand
from ..config.problem import TableFormat
from ..planning.base import LAUNCH_ERRORS
from ..planning.variants import Launch
from .operands import Operands, Views, kernel_views

Shortcut = Callable[..., "tuple[Tensor, Tensor] | None"]
ABSENT: Callable[[], None] = type(None)  # the reference to an operand that is None


class Setting(NamedTuple):
    """What all launches of a plan share.

    constants: softmax_scale, num_ctas and status. views: how `kernel_views` turns caches and scales into what a kernel takes;
    None if it takes them as they are. device_index: the GPU that must be current; None if there is no choice.
    """

    constants: tuple[float, int, int | Tensor]
    takes_workspace: bool
    table_format: TableFormat
    views: Views | None
    device_index: int | None


def never(*operands: object) -> None:
    """The shortcut that serves no operands."""


def shortcut(launch: Launch, setting: Setting, forget: Callable[[object], None], operands: Operands) -> Shortcut:
    """fn(q, k, v, page_table, k_scale, v_scale, out, lse, workspace): launches and returns (out, lse) for `operands`, else None.

    page_table: a PageTable, or a pair of its two items. forget: called when one of the operands dies; the shortcut keeps none
    alive. A reference to a dead tensor gives None, as ABSENT does. The code is flat: loops cost a microsecond more.
    """
    (scale, num_ctas, status), takes_workspace, table_format, views, device_index = setting
    q, k, v, t0, t1, t2, k_scale, v_scale, out, lse, workspace = operands
    compared = (q, k, v, t0, t1, t2, out, lse, workspace)
    q_, k_, v_, t0_, t1_, t2_, out_, lse_, w_ = [ABSENT if operand is None else ref(operand, forget) for operand in compared]
    at_out, at_lse, by_t1 = out.data_ptr(), lse.data_ptr(), 0 if t1 is None else t1.nbytes
    at_w, by_w, of_w = _form(workspace)
    space = as_operand(workspace.detach()) if takes_workspace and workspace is not None else None
    viewed = None if views is None else held_views(views, operands)

    def again(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        page_table: Any,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        out: Tensor,
        lse: Tensor,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        # fmt: off
        try:
            described, (t0, t1, t2) = page_table
            if not (
                q_() is q and k_() is k and v_() is v and out_() is out and lse_() is lse
                and t0_() is t0 and t1_() is t1 and t2_() is t2 and w_() is workspace
                and out.data_ptr() == at_out and lse.data_ptr() == at_lse and described == table_format
                and (workspace is None or (workspace.data_ptr() == at_w and workspace.nbytes == by_w and workspace.dtype is of_w))
                and (t1 is None or t2 is None or t1.nbytes == by_t1)  # an indptr: a launch cannot ask for batch + 1 entries
            ):
                return None
            if viewed is not None:
                found = viewed(k, v, k_scale, v_scale)
                if found is None:
                    return None
                k, v, k_scale, v_scale = found
        except (AttributeError, TypeError, ValueError):  # not a tensor (None equals a dead one's reference), or no PageTable
            return None
        # fmt: on
        if device_index is not None and torch.cuda.current_device() != device_index:
            return None
        try:
            launch(q, k, v, t0, t1, t2, k_scale, v_scale, out, lse, space, scale, num_ctas, status)
        except LAUNCH_ERRORS:
            return None
        return out, lse

    return _with_scales(again, forget, k_scale, v_scale) if k_scale is not None or v_scale is not None else again


def held_views(views: Views, operands: Operands) -> Callable[..., tuple[Any, ...] | None]:
    """fn(k, v, k_scale, v_scale): caches and scales as a launch takes them; None if k or v is not as it was.

    `_with_scales` compares the scales. Tensors are detached before a view is made: a view keeps its base tensor alive.
    """
    k, v, k_scale, v_scale = operands.k_cache, operands.v_cache, operands.k_scale, operands.v_scale
    at_k, by_k, of_k, at_v, by_v, of_v = (*_form(k), *_form(v))
    detached = (None if t is None else t.detach() for t in (k, v, k_scale, v_scale))
    held = tuple(None if t is None else as_operand(t) for t in kernel_views(*views, *detached))
    scaled = k_scale is not None or v_scale is not None

    def viewed(k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[Any, ...] | None:
        same = k.data_ptr() == at_k and k.nbytes == by_k and k.dtype is of_k
        same = same and v.data_ptr() == at_v and v.nbytes == by_v and v.dtype is of_v
        return held if same and (scaled or (k_scale is None and v_scale is None)) else None

    return viewed


def _form(tensor: Tensor | None) -> tuple[int, int, torch.dtype | None]:
    """(address, bytes, dtype) of a tensor that is held."""
    return (0, 0, None) if tensor is None else (tensor.data_ptr(), tensor.nbytes, tensor.dtype)


def _with_scales(again: Shortcut, forget: Callable[[object], None], k_scale: Tensor | None, v_scale: Tensor | None) -> Shortcut:
    """`again` for these scales only."""
    k_, v_ = (ABSENT if t is None else ref(t, forget) for t in (k_scale, v_scale))
    at_k, by_k, of_k, at_v, by_v, of_v = (*_form(k_scale), *_form(v_scale))

    def again_scaled(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        page_table: Any,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        *written: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        # fmt: off
        try:
            if not (
                k_() is k_scale and v_() is v_scale
                and (k_scale is None or (k_scale.data_ptr() == at_k and k_scale.nbytes == by_k and k_scale.dtype is of_k))
                and (v_scale is None or (v_scale.data_ptr() == at_v and v_scale.nbytes == by_v and v_scale.dtype is of_v))
            ):
                return None
        except AttributeError:  # not a tensor: the full check names it
            return None
        # fmt: on
        return again(q, k, v, page_table, k_scale, v_scale, *written)

    return again_scaled
