"""The operands of a run, remembered by weak reference: a run with the same tensors again need not be checked again.

Telling tensors apart by identity costs half of describing them (`checks.signature`). A remembered operand passes as the
same when it is the same object at the same address, of the same dtype and number of bytes: what `set_`, `.data =`, a resize
or a freed storage make of it is checked anew. q reaches the launch as it is, and the launch refuses another dtype or shape.

What this does not see is a change of extents or strides in place that keeps all of these (`transpose_`, `as_strided_`). That
stays within memory that was checked, since a storage never shrinks in place: every operand but q counts as it was when it was
remembered.

All but q are remembered in the form that a launch takes (`hold`), since making that anew costs a tenth of a microsecond an
operand, and a whole one for a view. Held is the storage, not the tensor: with the first of the tensors that dies, the
shortcut and all that it holds go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from .checks import kernel_views
from .dispatch import Launch
from .plan_base import LAUNCH_ERRORS

Shortcut = Callable[..., "tuple[Tensor, Tensor] | None"]
ABSENT: Callable[[], None] = type(None)  # the reference to an operand that is None


class Setting(NamedTuple):
    """What all launches of a plan share.

    constants: softmax_scale, num_ctas and status. nhd: the caches are turned to HND first. scale_shapes: those of
    k_scale and v_scale that a kernel takes. device_index: the GPU that must be current, None where there is no choice. hold: a
    detached tensor as the launch takes it.
    """

    constants: tuple[float, int, int | Tensor]
    takes_workspace: bool
    nhd: bool
    scale_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    device_index: int | None
    hold: Callable[[Tensor], Any]


def never(*operands: object) -> None:
    """The shortcut for no operands at all."""


def detached(tensor: Tensor | None) -> Tensor | None:
    """The same memory without the tensor."""
    return None if tensor is None else tensor.detach()


def shortcut(
    launch: Launch,
    setting: Setting,
    forget: Callable[[object], None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Any,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    workspace: Tensor | None,
) -> Shortcut:
    """fn(q, k, v, page_table, k_scale, v_scale, out, lse, workspace): launches and returns (out, lse) for the operands given
    here, else None.

    forget: called when one of them dies. page_table: a PageTable, or its two items where there is none. Keeps no tensor alive.
    A reference to a dead tensor gives None, as ABSENT does, hence the addresses of absent operands, 0. Written flat: loops
    cost a microsecond more.
    """
    (scale, num_ctas, status), takes_workspace, nhd, scale_shapes, device_index, hold = setting
    table_format, table = page_table
    operands = (q, k, v, *table, out, lse, workspace)
    q_, k_, v_, t0_, t1_, t2_, out_, lse_, w_ = [ABSENT if operand is None else ref(operand, forget) for operand in operands]
    at_q, at_k, at_v, at_t0, at_t1, at_t2, at_out, at_lse, at_w = [0 if t is None else t.data_ptr() for t in operands]
    _, by_k, by_v, by_t0, by_t1, by_t2, by_out, by_lse, by_w = [0 if t is None else t.nbytes for t in operands]
    _, of_k, of_v, of_t0, of_t1, of_t2, of_out, of_lse, of_w = [None if t is None else t.dtype for t in operands]
    scaled = k_scale is not None or v_scale is not None
    # detached before a view is made of them: a view keeps the tensor that it is of
    views = kernel_views(nhd, scale_shapes, k.detach(), v.detach(), detached(k_scale), detached(v_scale))
    others = [detached(t) for t in (*table, out, lse, workspace if takes_workspace else None)]
    held = [None if t is None else hold(t) for t in (*views, *others)]
    keys, values, k_scales, v_scales, held_0, held_1, held_2, outs, lses, space = held

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
                and q.data_ptr() == at_q and k.data_ptr() == at_k and k.nbytes == by_k and k.dtype is of_k
                and v.data_ptr() == at_v and v.nbytes == by_v and v.dtype is of_v
                and out.data_ptr() == at_out and out.nbytes == by_out and out.dtype is of_out
                and lse.data_ptr() == at_lse and lse.nbytes == by_lse and lse.dtype is of_lse
                and (t0 is None or (t0.data_ptr() == at_t0 and t0.nbytes == by_t0 and t0.dtype is of_t0))
                and (t1 is None or (t1.data_ptr() == at_t1 and t1.nbytes == by_t1 and t1.dtype is of_t1))
                and (t2 is None or (t2.data_ptr() == at_t2 and t2.nbytes == by_t2 and t2.dtype is of_t2))
                and (workspace is None or (workspace.data_ptr() == at_w and workspace.nbytes == by_w and workspace.dtype is of_w))
                and described == table_format
                and (scaled or (k_scale is None and v_scale is None))
            ):
                return None
        except (AttributeError, TypeError, ValueError):  # no tensor: None where a remembered one has died; or no PageTable
            return None
        # fmt: on
        if device_index is not None and torch.cuda.current_device() != device_index:
            return None
        try:  # q has changed where the launch refuses it: the check names what is wrong
            launch(q, keys, values, held_0, held_1, held_2, k_scales, v_scales, outs, lses, space, scale, num_ctas, status)
        except LAUNCH_ERRORS:
            return None
        return out, lse

    return _with_scales(again, forget, k_scale, v_scale) if scaled else again


def _with_scales(again: Shortcut, forget: Callable[[object], None], k_scale: Tensor | None, v_scale: Tensor | None) -> Shortcut:
    """`again` for these scales only."""
    (k_, at_k, by_k, of_k), (v_, at_v, by_v, of_v) = (
        (ABSENT, 0, 0, None) if t is None else (ref(t, forget), t.data_ptr(), t.nbytes, t.dtype) for t in (k_scale, v_scale)
    )

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
        except AttributeError:  # no tensor: the check names it
            return None
        # fmt: on
        return again(q, k, v, page_table, k_scale, v_scale, *written)

    return again_scaled
