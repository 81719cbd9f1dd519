"""append_kv(), merge_states() and attention_weights(): describe, select and run in one call."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..checks.fields import check_choice, check_extent, check_modifiers
from ..checks.tensors import MALFORMED_ERRORS, check_tensors, check_tensors_or_none, refuse_unplain
from ..config.problem import LseBase
from ..errors import InvalidArgument, InvalidProblem
from ..kv.page_table import PageTable
from ..kv.rotary import PAIRINGS, Pairing
from ..kv.types import KVDtype
from ..weights.plan import AttentionWeights
from . import derived_plans, gradients, plan_cache, torch_ops
from .attention import head_major, operands_of_pages, refuse_malformed, table_of


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor | PageTable,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Literal["HND", "NHD"] = "HND",
    q: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    pairing: Pairing = "half",
) -> Tensor | None:
    """Appends K and V of new tokens to a paged cache; selects and keeps the plan. Returns q rotated, None without q.

    k, v: [tokens, num_kv_heads, head_dim], f16 or bf16. k_cache, v_cache: [num_pages, num_kv_heads, page_size, head_dim] ("NHD":
    the middle axes swapped), of k's dtype, torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8; view bytes as one of them.
    slots: int32 or int64 [tokens], page * page_size + slot, negative for a token that is skipped; or a PageTable, whose lengths
    count the new token, which is appended at its row's end. k_scale, v_scale: [] or [1], or [num_kv_heads], f32, which are
    read; or one for each token and KV head, f32 or f16 [num_pages, page_size, num_kv_heads], which are computed and written.

    cos_sin_cache f32 [max_position, rotary_dim], the cosines first, and positions [tokens]: K is rotated on its way, and so is q
    [tokens, num_heads, head_dim], into a new tensor. pairing: as in Rotary.

    What is stored and what is skipped is as KVAppendPlan.run says. Raises what KVAppendDescriptor, `select` and `run` raise.
    Where tensors are traced (torch.compile, torch.export, FakeTensorMode), this is a torch op that declares what it writes.

    What is written has no gradient. An input that requires one where autograd records is Unsupported: paged_attention has a
    backward, and torch.no_grad() is what inference wants.
    """
    check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check_tensors_or_none(q=q, cos_sin_cache=cos_sin_cache, positions=positions)
    inputs = {"k_scale": k_scale, "v_scale": v_scale, "q": q, "cos_sin_cache": cos_sin_cache}
    gradients.refuse_recording("append_kv", k=k, v=v, k_cache=k_cache, v_cache=v_cache, **inputs)
    check_choice("layout", layout, ("HND", "NHD"))
    check_choice("pairing", pairing, PAIRINGS)
    if not isinstance(slots, (Tensor, PageTable)):
        raise InvalidArgument("slots", f"got {type(slots).__name__}, must be a tensor or a PageTable")
    try:
        table = (slots, None, None) if isinstance(slots, Tensor) else operands_of_pages(slots, "slots")
        k_given, k_written = _read_or_written("k_scale", k_scale, k_cache, layout)
        v_given, v_written = _read_or_written("v_scale", v_scale, v_cache, layout)
        q_out = None if q is None else q.new_empty(q.shape)
        scales = (k_given, v_given, k_written, v_written)
        operands = (k, v, k_cache, v_cache, *table, *scales, q, q_out, cos_sin_cache, positions)
        run: Any = torch_ops.append_kv if torch_ops.traced(*operands) else derived_plans.run_append
        run(*operands, layout, pairing)
        return q_out
    except MALFORMED_ERRORS:
        caches = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
        others = {"slots": slots, "q": q, "cos_sin_cache": cos_sin_cache, "positions": positions}
        refuse_malformed(slots if isinstance(slots, PageTable) else None, None, {**caches, **others}, "slots")
        raise


def merge_states(
    outs: Tensor,
    lses: Tensor,
    *,
    sinks: Tensor | None = None,
    lse_base: LseBase = "e",
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges states of attention over disjoint parts of the KV; selects and keeps the plan. Returns (out, lse).

    outs: [num_states, batch, num_heads, head_dim], f32, f16 or bf16; lses: f32 [num_states, batch, num_heads] in `lse_base`. out:
    [batch, num_heads, head_dim] of outs' dtype; lse: f32 [batch, num_heads]; both are made where they are not given. sinks: f32
    [num_heads], natural logits that join the softmax's denominator once, of states that were made without them.

    As MergeStatesPlan.run. Raises what MergeStatesDescriptor, `select` and `run` raise. Where tensors are traced (torch.compile,
    torch.export, FakeTensorMode), this is a torch op that declares what it writes. out and lse have no gradients: an input that
    requires one where autograd records is Unsupported, as in append_kv.
    """
    check_tensors(outs=outs, lses=lses)
    check_tensors_or_none(sinks=sinks, out=out, lse=lse)
    gradients.refuse_recording("merge_states", outs=outs, lses=lses, sinks=sinks)
    check_choice("lse_base", lse_base, ("e", "2"))
    try:
        if out is None:
            out = outs.new_empty(outs.shape[1:])
        if lse is None:
            lse = outs.new_empty(outs.shape[1:3], dtype=torch.float32)
        run: Any = torch_ops.merge_states if torch_ops.traced(outs, lses, sinks, out, lse) else derived_plans.run_merge
        run(outs, lses, sinks, out, lse, lse_base)
        return out, lse
    except MALFORMED_ERRORS:
        refuse_unplain({"outs": outs, "lses": lses, "sinks": sinks, "out": out, "lse": lse})
        raise


def attention_weights(
    q: Tensor,
    k_cache: Tensor,
    lse: Tensor,
    *,
    page_table: PageTable | Tensor | None = None,
    seq_lens: Tensor | int | None = None,
    max_seq_len: int | None = None,
    weights_dtype: torch.dtype | None = torch.float32,
    mean: bool = False,
    page_mass: bool = False,
    k_scale: Tensor | None = None,
    kv_dtype: KVDtype | None = None,
    softmax_scale: float | None = None,
    layout: Literal["HND", "NHD"] = "HND",
    lse_base: LseBase = "e",
    window_left: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> AttentionWeights:
    """The softmax weights of one query row a request, from q, K and the lse of decode_attention; selects and keeps the plan.

    Returns (weights, mean, page_mass), new tensors, None for what is not asked for: weights [batch, num_heads, max_seq_len] of
    weights_dtype, f32 or q's dtype, or None; mean f32 [batch, max_seq_len]; page_mass f32 [batch, ceil(max_seq_len / page_size)].
    They are as AttentionWeightsDescriptor says. max_seq_len: by default the keys that the table's width or a contiguous cache has
    room for; a CSR table needs it. A row of more keys has the weights of its first ones.

    The other arguments are those of the call that gave lse, as decode_attention takes them; over a contiguous cache seq_lens may
    be int32 [batch]. Sinks need no argument: lse includes them. Raises what AttentionWeightsDescriptor, `select` and `run` raise.
    Where tensors are traced (torch.compile, torch.export, FakeTensorMode), this is a torch op that declares what it writes.
    Weights have no gradients: an input that requires one where autograd records is Unsupported, as in append_kv.
    """
    check_tensors(q=q, k_cache=k_cache, lse=lse)
    check_tensors_or_none(k_scale=k_scale, alibi_slopes=alibi_slopes)
    gradients.refuse_recording("attention_weights", q=q, k_cache=k_cache, lse=lse, k_scale=k_scale, alibi_slopes=alibi_slopes)
    check_choice("layout", layout, ("HND", "NHD"))
    if kv_dtype is not None and not isinstance(kv_dtype, KVDtype):
        raise InvalidProblem("kv_dtype", kv_dtype, "must be a KVDtype or None")
    if weights_dtype is not None and not isinstance(weights_dtype, torch.dtype):
        raise InvalidProblem("weights_dtype", weights_dtype, "must be a torch.dtype or None")
    check_modifiers(window_left, None, softcap, mean=mean, page_mass=page_mass)
    try:
        table = table_of(page_table, seq_lens)
        batch, heads, _ = plan_cache.query_extents(q)
        _, page_size, longest = plan_cache.cache_extents(k_cache, table.format, layout, table.operands[0])
        keys = longest if max_seq_len is None else max_seq_len
        if keys is None:
            raise InvalidArgument("max_seq_len", f"is None, must be an int beside a {table.format} table")
        check_extent("max_seq_len", keys)
        if page_size is None and layout == "NHD":
            k_scale = head_major(k_scale)
        outputs = AttentionWeights(
            None if weights_dtype is None else q.new_empty((batch, heads, keys), dtype=weights_dtype),
            q.new_empty((batch, keys), dtype=torch.float32) if mean else None,
            q.new_empty((batch, -(-keys // (page_size or 1))), dtype=torch.float32) if page_mass else None,
        )
        operands = (q, k_cache, *table.operands, k_scale, lse, alibi_slopes, *outputs)
        run: Any = torch_ops.attention_weights if torch_ops.traced(*operands) else derived_plans.run_weights
        scores = (window_left, softcap, softmax_scale, layout, lse_base)
        run(*operands, table.format, keys, *scores, None if kv_dtype is None else kv_dtype.value)
        return outputs
    except MALFORMED_ERRORS:
        given = {"q": q, "k_cache": k_cache, "lse": lse, "k_scale": k_scale, "alibi_slopes": alibi_slopes}
        refuse_malformed(page_table, seq_lens, given)
        raise


def _read_or_written(name: str, scale: Tensor | None, cache: Tensor, layout: str) -> tuple[Tensor | None, Tensor | None]:
    """(scale, None) where an append reads it, (None, scale) where it is written, one a token."""
    if scale is None or cache.dim() != 4:
        return scale, None
    written = derived_plans.scale_kind(name, scale, cache, layout).granularity == "token"
    return (None, scale) if written else (scale, None)
