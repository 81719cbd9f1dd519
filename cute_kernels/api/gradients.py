"""paged_attention() for torch.autograd: plans compute the forward and the backward of one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention.operands import Extras
from ..config.problem import TableFormat
from ..errors import InvalidArgument, Unsupported
from ..kv.page_table import PageTable
from ..kv.types import KVDtype
from . import derived_plans, plan_cache, torch_ops

WITHOUT = {
    "alibi_slopes": "a slope has no gradient",
    "k_scale": "a scaled cache has no backward",
    "v_scale": "a scaled cache has no backward",
}


class Call(NamedTuple):
    """The arguments of a paged_attention call, except the tensors that have gradients.

    tables: a PageTable's operands; table_format: the table's format; extras: qo_indptr and alibi_slopes.
    """

    tables: tuple[Tensor | None, Tensor | None, Tensor | None]
    extras: tuple[Tensor | None, Tensor | None]
    table_format: TableFormat
    options: plan_cache.Options


def wants_gradients(*tensors: object) -> bool:
    """Whether autograd records, and one of these tensors requires a gradient."""
    return torch.is_grad_enabled() and any_requires(*tensors)


def any_requires(*tensors: object) -> bool:
    """Whether one of these is a tensor that requires a gradient. This loop takes a third of the time of `any`."""
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and getattr(tensor, "requires_grad", False):
            return True
    return False


def refuse_recording(call: str, **tensors: object) -> None:
    """Raises Unsupported if autograd records and a tensor requires a gradient: `call` names a call that has no backward."""
    if not torch.is_grad_enabled():
        return
    rule = f"{call} has no backward, paged_attention has one; torch.no_grad() is what inference wants"
    asking = [name for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.requires_grad]
    if asking:
        raise Unsupported([f"{name}.requires_grad = True: {rule}" for name in asking])


def differentiable_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None, call: Call, **others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of paged_attention. out has gradients, lse has none.

    others: operands that must be absent. Raises Unsupported for operands that have no backward, also if no variant on this
    device serves the backward (a traced call, whose tensors have no addresses, raises this when its backward runs);
    InvalidArgument for outputs that are given.
    """
    for name in ("out", "lse"):
        if others.pop(name) is not None:
            raise InvalidArgument(name, "given beside operands that require gradients, must be None: autograd makes its own")
    caches = (("k_cache", k_cache), ("v_cache", v_cache))
    stored = [plan_cache.stored_as(name, cache, call.options.kv_dtype) for name, cache in caches]
    reasons = [f"{name} is given: {WITHOUT[name]}" for name in ("k_scale", "v_scale") if others[name] is not None]
    reasons += [
        _of_8_bits(name, kind) for name, kind in zip(("k_cache", "v_cache"), stored, strict=True) if kind.element_bytes == 1
    ]
    if others["tree_mask"] is not None:
        reasons.append("tree_mask is given: it has no backward")
    slopes = call.extras[1]
    if slopes is not None and slopes.requires_grad:
        reasons.append(f"alibi_slopes.requires_grad = True: {WITHOUT['alibi_slopes']}")
    if reasons:
        raise Unsupported([f"requires_grad: {reason}" for reason in reasons])
    if not torch_ops.traced(q, k_cache, v_cache, sinks, *call.tables, *call.extras):
        table, extras = PageTable(call.table_format, call.tables), Extras(call.extras[0], None, slopes, sinks)
        derived_plans.backward_plan(q, k_cache, v_cache, table, extras, call.options._replace(max_seq_len=None, kv_dtype=None))
    out, lse = PagedAttention.apply(q, k_cache, v_cache, sinks, *call.tables, *call.extras, call)
    return out, lse


def _of_8_bits(name: str, stored: KVDtype) -> str:
    rule = "a cache of 8 bits holds rounded values, whose gradient is zero almost everywhere"
    return f"{name} is stored as {stored.value}: {rule}; detach q where no gradient is wanted"


class PagedAttention(torch.autograd.Function):
    """Attention and its backward; each runs the plan for the problem that its tensors have."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, *rest: Any) -> Any:
        """(out, lse). rest: Call.tables, Call.extras and the call."""
        table0, table1, table2, indptr, slopes, call = rest
        lse = q.new_empty((plan_cache.query_rows(q, indptr), q.shape[-2]), dtype=torch.float32)
        out = q.new_empty(q.shape)
        operands = (q, k, v, table0, table1, table2, indptr, None, slopes, sinks, None, None, out, lse)
        run: Any = torch_ops.paged_attention if torch_ops.traced(*operands) else plan_cache.run_attention
        run(*operands, call.table_format, *call.options)
        ctx.save_for_backward(q, k, v, out, lse, table0, table1, table2, indptr, slopes, sinks)
        ctx.kinds = (call.table_format, *call.options[:-2])  # a backward has no use for the last two: max_seq_len, kv_dtype
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        """The gradients of q, K, V and sinks; zeros for keys that no query row sees. Gradients of gradients are not supported."""
        q, k, v, out, lse, *tables, indptr, slopes, sinks = ctx.saved_tensors
        dq, dk, dv = q.new_zeros(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        dsinks = None if sinks is None else torch.empty_like(sinks)
        operands = (dout, q, k, v, out, lse, *tables, indptr, slopes, sinks, dq, dk, dv, dsinks)
        run: Any = torch_ops.paged_attention_backward if torch_ops.traced(*operands) else derived_plans.run_backward
        run(*operands, *ctx.kinds)
        return dq, dk, dv, dsinks, None, None, None, None, None, None
