"""decode_attention() and paged_attention(): describe, select and run in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, is_grad_enabled

from ..checks.fields import check_choice, check_extent, check_modifiers
from ..checks.tensors import MALFORMED_ERRORS, refuse_unplain
from ..config.problem import LseBase
from ..errors import InvalidArgument, InvalidProblem, Unsupported
from ..kv.page_table import OPERAND_NAMES, PAGED, PageTable
from ..kv.tensors import check_made
from ..kv.types import KVDtype
from . import gradients, plan_cache, torch_ops

ONE_ROW = "the one query row stands at its row's last token"
# what attention over several query rows is asked for, and what of it changes nothing for one query row
UNSERVED = {
    "causal": f'None, False and "bottom_right" are served: {ONE_ROW}, paged_attention has top_left',
    "window": "None is served: its bounds are window_left and window_right",
    "window_right": f"None and any int from 0 are served: {ONE_ROW}",
    "alibi": "None and False are served: the slopes are alibi_slopes",
    "tree_mask": "None and False are served: paged_attention takes one",
    "qo_indptr": "None is served, for one query row a request: paged_attention takes several",
}


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: PageTable | Tensor | None = None,
    seq_lens: Tensor | int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dtype: KVDtype | None = None,
    softmax_scale: float | None = None,
    layout: Literal["HND", "NHD"] = "HND",
    lse_base: LseBase = "e",
    max_seq_len: int | None = None,
    window_left: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **masks: object,
) -> tuple[Tensor, Tensor]:
    """Decode attention of one query row a request; selects and keeps the plan and its workspace. Returns (out, lse).

    q, out: [batch, num_heads, head_dim], also with one unit query axis. page_table: a PageTable, or an int32 table [batch,
    max_pages] with `seq_lens` (int32 [batch] or an int); then the caches are pages in `layout`. Without a page_table
    they are contiguous, [batch, num_kv_heads, seq_len, head_dim] ("NHD": the middle axes swapped). lse: f32 [batch,
    num_heads] in `lse_base`. k_scale, v_scale: [] or [1], [num_kv_heads], or one for each token and KV head, [num_pages,
    page_size, num_kv_heads] (contiguous: the cache's axes but head_dim). kv_dtype: what the caches are stored as, where their
    dtype does not say it (uint8). softmax_scale: head_dim ** -0.5 by default. max_seq_len: a hint for the choice of a
    configuration over a paged cache. A contiguous cache may have another seq_len in each call, with the same plan for all
    up to a power of two.

    window_left, softcap, alibi_slopes (f32 [num_heads]) and sinks (f32 [num_heads]): as in PagedAttentionDescriptor, None for
    none. masks: the names of UNSERVED. A value that cannot change the result of one query row is taken, as
    causal="bottom_right"; any other raises Unsupported.

    Where tensors are traced (torch.compile, torch.export, FakeTensorMode), this is a torch op: nothing is launched, and
    fake tensors give fake ones.

    out and lse have no gradients. An input that requires one where autograd records is Unsupported: paged_attention has a
    backward, and torch.no_grad() is what inference wants.

    Raises what the descriptors, `select` and `run` raise, and Unsupported for several query rows a request.
    """
    if masks:
        _refuse_masks(masks)
    modifiers: tuple[Any, ...] = ()
    if not window_left is softcap is alibi_slopes is sinks is None:
        check_modifiers(window_left, None, softcap)
        modifiers = (alibi_slopes, sinks, window_left, softcap)
    encoding = _check_caches(q, k_cache, v_cache, layout, kv_dtype)
    if is_grad_enabled() and (
        q.requires_grad
        or k_cache.requires_grad
        or v_cache.requires_grad
        or (modifiers and gradients.any_requires(alibi_slopes, sinks))
        or (not k_scale is v_scale is None and gradients.any_requires(k_scale, v_scale))
    ):
        others = {"k_scale": k_scale, "v_scale": v_scale, "alibi_slopes": alibi_slopes, "sinks": sinks}
        gradients.refuse_recording("decode_attention", q=q, k_cache=k_cache, v_cache=v_cache, **others)
    try:
        if lse is None:
            lse = q.new_empty(plan_cache.query_extents(q)[:2], dtype=torch.float32)
        if out is None:
            out = q.new_empty(q.shape)
        if page_table is None:
            if seq_lens is not None:
                raise InvalidArgument("seq_lens", "given without a page_table, must be None: a contiguous cache has one length")
            if layout == "NHD":
                k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
                k_scale, v_scale = head_major(k_scale), head_major(v_scale)
            operands: tuple[Any, ...] = (q, k_cache, v_cache, k_scale, v_scale, out, lse)
            contiguous = _route(operands, modifiers, torch_ops.flash_decoding, plan_cache.run_contiguous)
            contiguous(*operands, softmax_scale, lse_base, encoding, *modifiers)
            return out, lse
        table = _table(page_table, seq_lens)
        table0, table1, table2 = operands_of_pages(table, "page_table", ": paged_attention serves the others")
        operands = (q, k_cache, v_cache, table0, table1, table2, k_scale, v_scale, out, lse)
        paged = _route(operands, modifiers, torch_ops.paged_decode, plan_cache.run_paged)
        paged(*operands, softmax_scale, layout, lse_base, max_seq_len, encoding, *modifiers)
        return out, lse
    except MALFORMED_ERRORS:
        others = {"k_scale": k_scale, "v_scale": v_scale, "alibi_slopes": alibi_slopes, "sinks": sinks, "out": out, "lse": lse}
        refuse_malformed(page_table, seq_lens, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **others})
        raise


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: PageTable | Tensor | None = None,
    seq_lens: Tensor | int | None = None,
    qo_indptr: Tensor | None = None,
    max_q_len: int | None = None,
    causal: Literal["bottom_right", "top_left"] | None = "bottom_right",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dtype: KVDtype | None = None,
    softmax_scale: float | None = None,
    layout: Literal["HND", "NHD"] = "HND",
    lse_base: LseBase = "e",
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of several query rows a request; selects and keeps the plan and its workspace. Returns (out, lse).

    q, out: [total_q, num_heads, head_dim] beside qo_indptr (int32 [batch + 1]), else [batch, q_len, num_heads, head_dim]. lse:
    f32 [total_q, num_heads], or [batch * q_len, num_heads]. Rows past qo_indptr[batch] are padding, and stay as they are:
    uninitialised where out and lse are not given. max_q_len: the most query rows of a request, by default the rows of q,
    rounded up; a smaller one may choose a faster kernel, and a tree mask has ceil(max_q_len / 32) words a row.

    page_table: a PageTable, or an int32 table [batch, max_pages] with `seq_lens` (int32 [batch] or an int). Without one the
    caches are contiguous, [batch, num_kv_heads, max_len, head_dim] ("NHD": the middle axes swapped), all full or with
    `seq_lens` (int32 [batch]). Packed caches, [total_k, num_kv_heads, head_dim] whatever the layout, take PageTable.packed.

    The masks and modifiers are as in PagedAttentionDescriptor, and the rest as in decode_attention. Scales a token of a
    contiguous cache have the cache's axes but head_dim. A torch op where tensors are traced, as decode_attention is.

    Where q, k_cache, v_cache or sinks require gradients, out has them (PagedAttentionBackwardPlan), lse has none; out and lse
    must not be given. Caches of 8 bits or with scales, tree_mask and slopes have no backward. On a GPU, neither have a head_dim
    that is no multiple of 8 (in f32 of 4) and caches that are aligned to less than 4 bytes. They raise Unsupported in this call,
    or in the backward of a traced one.
    """
    check_choice("causal", causal, ("bottom_right", "top_left", None))
    check_modifiers(window_left, window_right, softcap)
    if max_q_len is not None:
        check_extent("max_q_len", max_q_len)
    encoding = _check_caches(q, k_cache, v_cache, layout, kv_dtype)
    for name, tensor in (("qo_indptr", qo_indptr), ("tree_mask", tree_mask)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InvalidArgument(name, f"got {type(tensor).__name__}, must be a tensor or None")
    if tree_mask is not None and tree_mask.dim() != 2:
        raise InvalidProblem("tree_mask.shape", tuple(tree_mask.shape), "must be [total_q, ceil(max_q_len / 32)]")
    try:
        total_q = plan_cache.query_rows(q, qo_indptr)
        table, masks = table_of(page_table, seq_lens), (causal, window_left, window_right, softcap)
        options = plan_cache.Options(max_q_len, *masks, softmax_scale, layout, lse_base, max_seq_len, encoding)
        if gradients.wants_gradients(q, k_cache, v_cache, sinks, alibi_slopes, k_scale, v_scale):
            call = gradients.Call(table.operands, (qo_indptr, alibi_slopes), table.format, options)
            others = {"tree_mask": tree_mask, "k_scale": k_scale, "v_scale": v_scale, "out": out, "lse": lse}
            return gradients.differentiable_attention(q, k_cache, v_cache, sinks, call, **others)
        if lse is None:
            lse = q.new_empty((total_q, q.shape[-2]), dtype=torch.float32)
        if out is None:
            out = q.new_empty(q.shape)
        if table.format in ("lengths", "none") and layout == "NHD":
            k_scale, v_scale = head_major(k_scale), head_major(v_scale)
        extras = (qo_indptr, tree_mask, alibi_slopes, sinks)
        operands = (q, k_cache, v_cache, *table.operands, *extras, k_scale, v_scale, out, lse)
        run: Any = torch_ops.paged_attention if torch_ops.traced(*operands) else plan_cache.run_attention
        run(*operands, table.format, *options)
        return out, lse
    except MALFORMED_ERRORS:
        optional = {"qo_indptr": qo_indptr, "tree_mask": tree_mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
        others = {"k_scale": k_scale, "v_scale": v_scale, "out": out, "lse": lse}
        refuse_malformed(page_table, seq_lens, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **optional, **others})
        raise


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: str, kv_dtype: KVDtype | None) -> str | None:
    """Raises the typed error of what is no tensor, layout or KVDtype; returns the KVDtype's value."""
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)):
        tensors = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
        name, found = next((name, found) for name, found in tensors if not isinstance(found, Tensor))
        raise InvalidArgument(name, f"got {type(found).__name__}, must be a tensor")
    if not isinstance(layout, str) or layout not in ("HND", "NHD"):
        raise InvalidProblem("layout", layout, 'must be "HND" or "NHD"')
    if kv_dtype is not None and not isinstance(kv_dtype, KVDtype):
        raise InvalidProblem("kv_dtype", kv_dtype, "must be a KVDtype or None")
    return None if kv_dtype is None else kv_dtype.value


def _refuse_masks(masks: dict[str, object]) -> None:
    """Raises TypeError for a name that is not in UNSERVED, Unsupported for values that may change a result."""
    unknown = [name for name in masks if name not in UNSERVED]
    if unknown:
        raise TypeError(f"decode_attention() got an unexpected keyword argument {unknown[0]!r}")
    reasons = [
        f"{name} = {_shown(value)}: {UNSERVED[name]}" for name, value in masks.items() if not _changes_nothing(name, value)
    ]
    if reasons:
        raise Unsupported(reasons)


def _changes_nothing(name: str, value: object) -> bool:
    """Whether a mask hides no key from one query row at its row's last token, and leaves its scores as they are."""
    if value is None or (value is False and name in ("causal", "alibi", "tree_mask")):
        return True
    if name == "window_right":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return name == "causal" and isinstance(value, str) and value == "bottom_right"


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _route(
    operands: tuple[Any, ...], modifiers: tuple[Any, ...], op: Callable[..., None], run: Callable[..., None]
) -> Callable[..., None]:
    """The torch op where the call is traced, else what it runs, which checks q itself."""
    if not torch_ops.traced(*operands) and not (modifiers and torch_ops.traced(*modifiers)):
        return run
    plan_cache.query_extents(operands[0])
    return op


def head_major(scale: Tensor | None) -> Tensor | None:
    """Scales per token of a contiguous NHD cache as [batch, num_kv_heads, seq_len]."""
    return scale.transpose(1, 2) if isinstance(scale, Tensor) and scale.dim() == 3 else scale


def table_of(page_table: PageTable | Tensor | None, seq_lens: Tensor | int | None) -> PageTable:
    """What a call is given as a PageTable, of pages or of a contiguous cache."""
    if page_table is not None:
        return _table(page_table, seq_lens)
    if seq_lens is None:
        return PageTable.whole()
    if not isinstance(seq_lens, Tensor):
        raise InvalidArgument("seq_lens", f"got {type(seq_lens).__name__}, must be an int32 tensor [batch] without a page_table")
    return PageTable.lengths(seq_lens)


def _table(page_table: PageTable | Tensor, seq_lens: Tensor | int | None) -> PageTable:
    if isinstance(page_table, PageTable):
        if seq_lens is not None:
            raise InvalidArgument("seq_lens", "given beside a PageTable, must be None: the PageTable holds the lengths")
        return page_table
    if not isinstance(page_table, Tensor):
        raise InvalidArgument("page_table", f"got {type(page_table).__name__}, must be a PageTable, a tensor or None")
    if seq_lens is None:
        raise InvalidArgument("seq_lens", "is None, must be given with a table tensor")
    return PageTable.dense(page_table, seq_lens)


def operands_of_pages(table: PageTable, name: str, hint: str = "") -> tuple[Any, Any, Any]:
    """The operands of a table of pages. Raises InvalidArgument for another format, and for operands of another format."""
    table_format, (table0, table1, table2) = table
    if table_format != ("dense" if table2 is None else "csr"):
        check_made(table, name)
        raise InvalidArgument(name, f"is a {table_format} table, must be one of pages, {' or '.join(PAGED)}{hint}")
    return table0, table1, table2


def refuse_malformed(page_table: object, seq_lens: object, tensors: dict[str, Any], name: str = "page_table") -> None:
    """Raises InvalidArgument for a PageTable that no class method has made, and for a tensor without a plain address.

    Only a call that has failed asks this, so that the check costs other calls nothing. name: the call's word for its page table.
    """
    operands: dict[str, object] = dict(zip(OPERAND_NAMES["dense"], (page_table, seq_lens), strict=True))
    if isinstance(page_table, PageTable):
        check_made(page_table, name)
        operands = dict(zip(OPERAND_NAMES[page_table.format], page_table.operands, strict=False))
    refuse_unplain({**tensors, **operands})
