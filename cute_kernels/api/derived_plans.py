"""The plans behind append_kv, merge_states, attention_weights and gradients: derived from the tensors, selected once, kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..append.descriptor import MAX_ROWS, KVAppendDescriptor
from ..append.plan import KVAppendPlan
from ..attention.attention_descriptor import PagedAttentionDescriptor
from ..attention.operands import Extras
from ..backward.descriptor import PagedAttentionBackwardDescriptor
from ..backward.plan import PagedAttentionBackwardPlan
from ..config.problem import LseBase, TableFormat
from ..errors import InvalidArgument, InvalidProblem
from ..kv.page_table import PAGED, PageTable
from ..kv.rotary import Pairing, Rotary
from ..kv.scale import KVScale
from ..kv.types import KVDtype
from ..merge.descriptor import AXES as STATE_AXES
from ..merge.descriptor import MergeStatesDescriptor
from ..merge.plan import MergeStatesPlan
from ..weights.descriptor import AttentionWeightsDescriptor
from ..weights.plan import AttentionWeightsPlan
from .plan_cache import (
    KV_DTYPES,
    Options,
    alignment,
    attention_fields,
    cache_extents,
    described_plan,
    layout_of,
    length_hint,
    query_extents,
    query_rows,
    scale_kind_of,
    stored_as,
)
from .workspace_cache import stream_workspace

CACHE_AXES = {"HND": (2, 1), "NHD": (1, 2)}  # of page_size and num_kv_heads, by layout
ANGLE_SHARE = 2  # bytes of a cosine, f32, to those of the 16-bit value beside it


def run_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table0: Tensor,
    table1: Tensor | None,
    table2: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_out: Tensor | None,
    v_scale_out: Tensor | None,
    q: Tensor | None,
    q_out: Tensor | None,
    cos_sin_cache: Tensor | None,
    positions: Tensor | None,
    layout: str,
    pairing: Pairing,
) -> None:
    """Runs the plan of these tensors' problem, writing the caches, k_scale_out and v_scale_out (scales a token), and q_out.

    table0..2: the slots alone, or a PageTable's operands.
    """
    _check_axes("k", k, ("tokens", "num_kv_heads", "head_dim"))
    _check_axes("k_cache", k_cache, ("num_pages", "num_kv_heads", "page_size", "head_dim"))
    _check_axes("v_cache", v_cache, ("num_pages", "num_kv_heads", "page_size", "head_dim"))
    tokens, heads, dim = k.shape
    rotary = _rotary(q, cos_sin_cache, positions, pairing)
    shape = (_rounded_up(tokens, heads + (rotary.num_heads if rotary else 0)), heads, dim, k_cache.shape[CACHE_AXES[layout][0]])
    scales = [given if out is None else out for given, out in ((k_scale, k_scale_out), (v_scale, v_scale_out))]
    k_kind, v_kind = (scale_kind(*one, layout) for one in zip(("k_scale", "v_scale"), scales, (k_cache, v_cache), strict=True))
    slots, table_format, slot_dtype = _slots(table0, table1, table2)
    stored = [_stored(name, cache) for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))]
    widest = max(kind.element_bytes for kind in stored)  # an fp8 cache beside a 16-bit one may be aligned to single bytes
    kept = (layout_of(layout, max(widest, alignment(k_cache, v_cache))), table_format, None, stored[1], k_kind, v_kind)
    aligned = _alignment(cos_sin_cache, *(t for t in (k, v, q, q_out) if t is not None))
    fields = (*shape, k.dtype, stored[0], *kept, slot_dtype, aligned, rotary)
    plan = described_plan(KVAppendPlan, KVAppendDescriptor, fields, k.device)
    given = {"q": q, "q_out": q_out, "cos_sin_cache": cos_sin_cache, "positions": positions}
    plan.run(k, v, k_cache, v_cache, slots, k_scale=scales[0], v_scale=scales[1], **given)


def run_merge(outs: Tensor, lses: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, lse_base: LseBase) -> None:
    """Runs the plan of these tensors' problem, writing out and lse."""
    _check_axes("outs", outs, STATE_AXES)
    _check_axes("out", out, STATE_AXES[1:])
    fields = (*outs.shape, outs.dtype, lse_base, alignment(outs, out), sinks is not None)
    described_plan(MergeStatesPlan, MergeStatesDescriptor, fields, outs.device).run(outs, lses, sinks=sinks, out=out, lse=lse)


def run_weights(
    q: Tensor,
    k_cache: Tensor,
    table0: Tensor | None,
    table1: Tensor | None,
    table2: Tensor | None,
    k_scale: Tensor | None,
    lse: Tensor,
    alibi_slopes: Tensor | None,
    weights: Tensor | None,
    mean: Tensor | None,
    page_mass: Tensor | None,
    table_format: TableFormat,
    max_seq_len: int,
    window_left: int | None,
    softcap: float | None,
    softmax_scale: float | None,
    layout: str,
    lse_base: LseBase,
    kv_dtype: str | None,
) -> None:
    """Runs the plan of these tensors' problem, writing weights, mean and page_mass, those that are there.

    table0..2: the operands of a PageTable of table_format. kv_dtype: as run_paged takes it.
    """
    batch, heads, dim = query_extents(q)
    kv_heads, page_size, _ = cache_extents(k_cache, table_format, layout, table0)
    cache = (stored_as("k_cache", k_cache, kv_dtype), layout_of(layout, alignment(k_cache)), table_format, None)
    scores = (scale_kind_of("k_scale", k_scale, kv_heads, k_cache), window_left, softcap, alibi_slopes is not None)
    wanted = (None if weights is None else weights.dtype, mean is not None, page_mass is not None)
    shape = (batch, heads, kv_heads, dim, page_size, q.dtype, max_seq_len)
    fields: tuple[Any, ...] = (*shape, *cache, softmax_scale, lse_base, *scores, *wanted)
    plan = described_plan(AttentionWeightsPlan, AttentionWeightsDescriptor, fields, q.device)
    outputs = {"weights": weights, "mean": mean, "page_mass": page_mass}
    table = PageTable(table_format, (table0, table1, table2))
    plan.run(q, k_cache, lse, table, k_scale=k_scale, alibi_slopes=alibi_slopes, **outputs)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor,
    table0: Tensor | None,
    table1: Tensor | None,
    table2: Tensor | None,
    qo_indptr: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dq: Tensor,
    dk_cache: Tensor,
    dv_cache: Tensor,
    dsinks: Tensor | None,
    table_format: TableFormat,
    max_q_len: int | None,
    causal: str | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    softmax_scale: float | None,
    layout: str,
    lse_base: str,
    traced: bool = False,
) -> None:
    """Runs the plan of these tensors' problem, writing dq, dk_cache, dv_cache and dsinks. The others as run_attention.

    q and dout may have any strides and any address, and are copied where the plan does not take them: attention takes a q that
    its backward does not, and autograd makes some gradients by expanding them and some as views.
    """
    table, extras = PageTable(table_format, (table0, table1, table2)), Extras(qo_indptr, None, alibi_slopes, sinks)
    options = Options(max_q_len, causal, window_left, window_right, softcap, softmax_scale, layout, lse_base)
    plan: Any = backward_plan(q, k_cache, v_cache, table, extras, options)
    q, dout = (_aligned(t, plan.descriptor.row_alignment) for t in (q, dout.contiguous()))
    workspace = stream_workspace(plan.workspace_size(), plan.device, reuse_in_capture=not traced)
    gradients = {"dq": dq, "dk_cache": dk_cache, "dv_cache": dv_cache, "dsinks": dsinks}
    given = {"qo_indptr": qo_indptr, "alibi_slopes": alibi_slopes, "sinks": sinks, "workspace": workspace}
    plan.run(dout, q, k_cache, v_cache, out, lse, table, **given, **gradients)


def backward_plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: PageTable, extras: Extras, options: Options
) -> PagedAttentionBackwardPlan:
    """Returns the plan of the backward of these tensors' attention, which is kept.

    options: they lack max_seq_len and kv_dtype, for which a backward has no use. Raises Unsupported with every reason where no
    variant serves it.
    """
    table0, table1, _ = table.operands
    pages: tuple[int | None, int | None] = (None, None)
    if table.format in PAGED and isinstance(table0, Tensor):
        entries = table0.shape[-1] if table0.dim() == 2 else -(-len(table0) // max(1, len(table1) - 1))  # type: ignore[arg-type]
        pages = (len(k_cache) or None, length_hint(entries))
    fields = attention_fields(q, k_cache, v_cache, table, extras, (None, None), options, pages)
    shared_pages = None if len(k_cache) else False  # a pool without pages has none to share
    limits = (shared_pages, length_hint(query_rows(q, extras.qo_indptr)))
    plan: PagedAttentionBackwardPlan = described_plan(PagedAttentionBackwardPlan, _backward_of, (fields, *limits), q.device)
    return plan


def _backward_of(fields: tuple[Any, ...], shared_pages: bool | None, max_total_q: int) -> PagedAttentionBackwardDescriptor:
    """The descriptor of the backward of attention with these fields."""
    return PagedAttentionBackwardDescriptor(PagedAttentionDescriptor(*fields), shared_pages, max_total_q=max_total_q)


def _aligned(tensor: Tensor, nbytes: int) -> Tensor:
    """Returns a tensor of query rows as it is, or a compact copy of it.

    It is copied unless its last stride is 1, and its other strides and its address are multiples of `nbytes` bytes.
    """
    unit = tensor.shape[-1] < 2 or tensor.stride(-1) == 1
    return tensor if unit and alignment(tensor) % nbytes == 0 else tensor.clone(memory_format=torch.contiguous_format)


def scale_kind(name: str, scale: Any, cache: Tensor, layout: str) -> KVScale:
    """The KVScale that a tensor beside a cache stands for; NONE without one. Raises InvalidArgument, InvalidProblem."""
    return scale_kind_of(name, scale, cache.shape[CACHE_AXES[layout][1]], cache)


def _check_axes(name: str, tensor: Tensor, axes: tuple[str, ...]) -> None:
    if tensor.dim() != len(axes):
        raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must have the axes of [{', '.join(axes)}]")


def _stored(name: str, cache: Tensor) -> KVDtype:
    stored = KV_DTYPES.get(cache.dtype)
    if stored is None:
        raise InvalidArgument(name, f"has dtype {cache.dtype}, must be one of {', '.join(map(str, KV_DTYPES))} (a view of bytes)")
    return stored


def _slots(table0: Tensor, table1: Tensor | None, table2: Tensor | None) -> tuple[Tensor | PageTable, str, torch.dtype]:
    """(what a plan is given as slots, its table_format and slot_dtype)."""
    if table1 is None:
        return table0, "none", table0.dtype
    table = PageTable("dense" if table2 is None else "csr", (table0, table1, table2))
    return table, table.format, torch.int64


def _rotary(q: Tensor | None, cos_sin_cache: Tensor | None, positions: Tensor | None, pairing: Pairing) -> Rotary | None:
    """The rotary embedding that the tensors say, None without a cos_sin_cache."""
    if cos_sin_cache is None:
        return None
    if positions is None:
        raise InvalidArgument("positions", "is None, must be a tensor beside a cos_sin_cache")
    _check_axes("cos_sin_cache", cos_sin_cache, ("max_position", "rotary_dim"))
    if q is not None:
        _check_axes("q", q, ("tokens", "num_heads", "head_dim"))
    return Rotary(pairing, cos_sin_cache.shape[1], 0 if q is None else q.shape[1], positions.dtype)


def _rounded_up(tokens: int, heads: int) -> int:
    """num_tokens of a plan for `tokens`: a power of two, so that another number of tokens seldom asks for another plan."""
    return max(tokens, min(1 << max(0, tokens - 1).bit_length(), MAX_ROWS // max(1, heads)))


def _alignment(cos_sin_cache: Tensor | None, *incoming: Tensor) -> int:
    """alignment_bytes of the incoming K, V and q, no more than the angles of as many columns have."""
    aligned = alignment(*incoming)
    if cos_sin_cache is None:
        return aligned
    angles = alignment(cos_sin_cache)
    return aligned if angles == 16 else min(aligned, max(2, angles // ANGLE_SHARE))
