"""Attention for a call's tensors: the plan, kept under a key of everything that its choice depends on, and the workspace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.plan_cache import Options, attention_plan, length_hint, rounded_rows
from ...api.workspace_cache import stream_workspace
from ...attention.attention_plan import PagedAttentionPlan
from ...attention.operands import Extras
from ...errors import InvalidProblem
from ...kv.page_table import PageTable
from .arguments import Scores, descales_of, for_all_requests, length_of, preference_of

MAX_KEYS = 1024  # the most plans under keys; one more drops them all here, but `plan_of` keeps them too

_plans: dict[tuple[Any, ...], PagedAttentionPlan] = {}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: PageTable,
    scores: Scores,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns out, or (out, lse), with the axes that flash-attention gives them.

    q, out: [batch, q_len, num_heads, head_dim], or [total_q, num_heads, head_dim] with cu_seqlens_q. k, v: pages or contiguous
    caches with heads next to last, or packed. lse: a view, f32 [batch, num_heads, q_len], ragged [num_heads, total_q].
    """
    if k_descale is not None or v_descale is not None:
        k_descale, v_descale = descales_of(k, v, k_descale, v_descale)
    if alibi_slopes is not None:
        alibi_slopes = for_all_requests("alibi_slopes", alibi_slopes)
    if s_aux is not None:
        s_aux = s_aux.float()
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        max_seqlen_q = length_of("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        max_seqlen_k = length_of("max_seqlen_k", max_seqlen_k)
    if q.stride(-1) != 1:
        q = q.contiguous()
    first, given = table.operands[0], out
    # fmt: off
    key = (
        q.shape if cu_seqlens_q is None else (cu_seqlens_q.shape, q.shape[1:], max_seqlen_q), q.dtype, q.device,
        k.shape[1:] if table.format == "packed" else k.shape, k.stride(), k.dtype, v.stride(), v.dtype,
        (k.data_ptr() | v.data_ptr()) & 15,
        table.format, None if first is None else first.shape, scores, alibi_slopes is None, s_aux is None, max_seqlen_k,
        None if k_descale is None else k_descale.shape, None if v_descale is None else v_descale.shape,
    )
    # fmt: on
    plan = _plans.get(key)
    if plan is None:
        if cu_seqlens_q is None and q.dim() == 4 and not q.shape[1]:
            return _no_rows(q, given, return_lse)
        extras = Extras(cu_seqlens_q, None, alibi_slopes, s_aux)
        plan = _select(q, k, v, table, scores, extras, (k_descale, v_descale), max_seqlen_q, max_seqlen_k)
        if len(_plans) >= MAX_KEYS:
            _plans.clear()
        _plans[key] = plan
    one = cu_seqlens_q is None and q.shape[1] == 1
    if one:  # a plan's run takes a shorter path without a query axis
        q, out = q.select(1, 0), None if given is None else given.select(1, 0)
    # fmt: off
    made, lse = plan.run(
        q, k, v, table, qo_indptr=cu_seqlens_q, alibi_slopes=alibi_slopes, sinks=s_aux, k_scale=k_descale, v_scale=v_descale,
        out=out, workspace=stream_workspace(plan.workspace_size(), plan.device),
    )
    # fmt: on
    if given is not None:
        made = given
    elif one:
        made = made.unsqueeze(1)
    return (made, _with_their_axes(lse, q, cu_seqlens_q)) if return_lse else made


def _with_their_axes(lse: Tensor, q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """An lse [rows, num_heads] as [num_heads, total_q] or [batch, num_heads, q_len]. q: as the plan was given it."""
    if cu_seqlens_q is not None:
        return lse.T
    return lse.unsqueeze(2) if q.dim() == 3 else lse.view(q.shape[:3]).transpose(1, 2)


def _no_rows(q: Tensor, out: Tensor | None, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the empty results of a q [batch, 0, num_heads, head_dim]. Raises InvalidProblem for an out of another shape."""
    if out is not None and out.shape != q.shape:
        raise InvalidProblem("out.shape", tuple(out.shape), f"must be q's, {tuple(q.shape)}")
    made = q.new_empty(q.shape) if out is None else out
    return (made, q.new_empty((q.shape[0], q.shape[2], 0), dtype=torch.float32)) if return_lse else made


def forget_plans() -> None:
    """Drops every plan that is kept under a key."""
    _plans.clear()


def _select(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: PageTable,
    scores: Scores,
    extras: Extras,
    descales: tuple[Tensor | None, Tensor | None],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> PagedAttentionPlan:
    """The plan of a call. Raises InvalidProblem for lengths below 0, and what the descriptor and `select` raise."""
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and longest < 0:
            raise InvalidProblem(name, longest, "must be an int from 0 on, or None")
    rows = None if max_seqlen_q is None or extras.qo_indptr is None else rounded_rows(max_seqlen_q)
    hint = None if max_seqlen_k is None else length_hint(max_seqlen_k)
    options = Options(rows, *scores.masks, scores.softmax_scale, "NHD", "e", hint)
    return attention_plan(q, k, v, table, extras, descales, options, preference_of(scores.sm_margin, q.device))
