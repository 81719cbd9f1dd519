"""The plans behind the functional API: derived from the tensors, selected once, kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.attention_descriptor import PagedAttentionDescriptor
from ..attention.attention_plan import PagedAttentionPlan
from ..attention.checks import QUERY_AXES, query_error
from ..attention.descriptors import TREE_WORD_BITS, FlashDecodingDescriptor, PagedDecodeDescriptor
from ..attention.operands import Extras
from ..attention.plan import FlashDecodingPlan, PagedDecodePlan
from ..checks.fields import MAX_EXTENT
from ..config.problem import TableFormat
from ..errors import InvalidArgument, InvalidProblem
from ..kv.page_table import PageTable
from ..kv.scale import KVScale, scale_of
from ..kv.types import KVDtype, KVLayout
from ..planning.base import MAX_PLANS, forgotten_with_plans
from ..planning.variants import PlanPreference
from .workspace_cache import stream_workspace

LEAST_HINT = 64  # tokens: rows up to this length are one to four tiles, and share a plan
LONG_CHUNK = 4096  # least max_q_len that an engine plans for chunks, so that steps with different longest chunks share a kernel
EXACT_ROWS = 16  # query rows per request: up to here each number has a plan of its own, above each power of two
STORED_AS = {kv_dtype.value: kv_dtype for kv_dtype in KVDtype}
KV_DTYPES = {kv_dtype.torch_dtype: kv_dtype for kv_dtype in KVDtype}

layout_of = functools.cache(KVLayout)


class Options(NamedTuple):
    """What a call of paged_attention is given in addition to its tensors. kv_dtype: as run_paged takes it."""

    max_q_len: int | None
    causal: str | None
    window_left: int | None
    window_right: int | None
    softcap: float | None
    softmax_scale: float | None
    layout: str
    lse_base: str
    max_seq_len: int | None = None
    kv_dtype: str | None = None

    @property
    def masks(self) -> tuple[str | None, int | None, int | None, float | None]:
        """causal, window_left, window_right and softcap, in the order of a PagedAttentionDescriptor."""
        return self.causal, self.window_left, self.window_right, self.softcap


def run_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table0: Tensor,
    table1: Tensor,
    table2: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    layout: str,
    lse_base: str,
    max_seq_len: int | None,
    kv_dtype: str | None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    window_left: int | None = None,
    softcap: float | None = None,
    traced: bool = False,
) -> None:
    """Runs the plan of these tensors' problem over a paged cache, writing out and lse.

    table0..2: a PageTable's operands. kv_dtype: the value of a KVDtype; None if the caches' dtypes say it. traced: whether
    this runs as a torch op.
    """
    batch, heads, dim = query_extents(q)
    _check_cache_axes(k_cache)
    page_axis, head_axis = (2, 1) if layout == "HND" else (1, 2)
    page_size = k_cache.shape[page_axis]
    if max_seq_len is None and table2 is None and isinstance(table0, Tensor) and table0.dim() == 2:
        max_seq_len = length_hint(table0.shape[1] * page_size)
    table = PageTable("dense" if table2 is None else "csr", (table0, table1, table2))
    stored, *rest = _storage(k_cache, v_cache, k_scale, v_scale, kv_dtype, k_cache.shape[head_axis])
    cache = (stored, layout_of(layout, alignment(k_cache, v_cache)))
    shape = (batch, heads, k_cache.shape[head_axis], dim, page_size, q.dtype)
    fields = (*shape, *cache, table.format, None, None, max_seq_len, softmax_scale, lse_base, *rest)
    describe: Callable[..., Any] = PagedDecodeDescriptor
    if not window_left is softcap is alibi_slopes is sinks is None:
        describe, fields = _modified(describe, fields, alibi_slopes, sinks, window_left, softcap)
    plan = described_plan(PagedDecodePlan, describe, fields, q.device)
    workspace = stream_workspace(plan.workspace_size(), plan.device, reuse_in_capture=not traced)
    # fmt: off
    plan.run(
        q, k_cache, v_cache, table, k_scale=k_scale, v_scale=v_scale, alibi_slopes=alibi_slopes, sinks=sinks,
        out=out, lse=lse, workspace=workspace,
    )
    # fmt: on


def run_contiguous(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    lse_base: str,
    kv_dtype: str | None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    window_left: int | None = None,
    softcap: float | None = None,
    traced: bool = False,
) -> None:
    """Runs the plan of these tensors' problem over a contiguous cache [batch, num_kv_heads, seq_len, head_dim]."""
    batch, heads, dim = query_extents(q)
    _check_cache_axes(k)
    storage = _storage(k, v, k_scale, v_scale, kv_dtype, k.shape[1])
    shape = (batch, heads, k.shape[1], None, dim, q.dtype)
    fields = (length_hint(k.shape[2]), *shape, softmax_scale, lse_base, alignment(k, v), *storage)
    describe: Callable[..., Any] = _of_any_length
    if not window_left is softcap is alibi_slopes is sinks is None:
        describe, fields = _modified(describe, fields, alibi_slopes, sinks, window_left, softcap)
    plan = described_plan(FlashDecodingPlan, describe, fields, q.device)
    workspace = stream_workspace(plan.workspace_size(), plan.device, reuse_in_capture=not traced)
    # fmt: off
    plan.run(
        q, k, v, k_scale=k_scale, v_scale=v_scale, alibi_slopes=alibi_slopes, sinks=sinks,
        out=out, lse=lse, workspace=workspace,
    )
    # fmt: on


def run_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table0: Tensor | None,
    table1: Tensor | None,
    table2: Tensor | None,
    qo_indptr: Tensor | None,
    tree_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    table_format: TableFormat,
    max_q_len: int | None,
    causal: str | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    softmax_scale: float | None,
    layout: str,
    lse_base: str,
    max_seq_len: int | None,
    kv_dtype: str | None,
    traced: bool = False,
) -> None:
    """Runs the plan of these tensors' problem with several query rows per request, writing out and lse.

    table0..2: the operands of a PageTable of table_format. All else is as in run_paged and PagedAttentionDescriptor.
    """
    table, extras = PageTable(table_format, (table0, table1, table2)), Extras(qo_indptr, tree_mask, alibi_slopes, sinks)
    masks = (causal, window_left, window_right, softcap)
    options = Options(max_q_len, *masks, softmax_scale, layout, lse_base, max_seq_len, kv_dtype)
    plan = attention_plan(q, k_cache, v_cache, table, extras, (k_scale, v_scale), options)
    workspace = stream_workspace(plan.workspace_size(), plan.device, reuse_in_capture=not traced)
    given = extras._asdict()
    plan.run(q, k_cache, v_cache, table, **given, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, workspace=workspace)


def attention_plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: PageTable,
    extras: Extras,
    scales: tuple[Tensor | None, Tensor | None],
    options: Options,
    preference: PlanPreference | None = None,
) -> PagedAttentionPlan:
    """The plan of these tensors' problem, which is kept for later calls. scales: of K and V."""
    fields = attention_fields(q, k_cache, v_cache, table, extras, scales, options)
    plan: PagedAttentionPlan = described_plan(PagedAttentionPlan, PagedAttentionDescriptor, fields, q.device, preference)
    return plan


def attention_fields(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: PageTable,
    extras: Extras,
    scales: tuple[Tensor | None, Tensor | None],
    options: Options,
    pages: tuple[int | None, int | None] = (None, None),
) -> tuple[Any, ...]:
    """The fields of the PagedAttentionDescriptor of these tensors' problem. pages: its num_pages and max_pages."""
    query_rows(q, extras.qo_indptr)
    ragged = extras.qo_indptr is not None
    batch, form = (len(extras.qo_indptr) - 1, "ragged") if ragged else (len(q), "uniform")
    kv_heads, page_size, longest = cache_extents(k_cache, table.format, options.layout, table.operands[0])
    max_q_len, max_seq_len = options.max_q_len, options.max_seq_len
    if max_q_len is None:
        max_q_len = rows_hint(q, extras.tree_mask, ragged)
    if max_seq_len is None and longest is not None:
        max_seq_len = length_hint(longest)
    stored, *rest = _storage(k_cache, v_cache, *scales, options.kv_dtype, kv_heads)
    order = "HND" if table.format == "packed" else options.layout
    cache = (stored, layout_of(order, alignment(k_cache, v_cache)), table.format, *pages, max_seq_len)
    shape = (batch, q.shape[-2], kv_heads, q.shape[-1], page_size, q.dtype, max_q_len, form)
    scores = (*options.masks, extras.alibi_slopes is not None, extras.sinks is not None, extras.tree_mask is not None)
    kinds = rest or (None, KVScale.NONE, KVScale.NONE)
    return (*shape, *cache, options.softmax_scale, options.lse_base, *kinds, *scores)


def query_rows(q: Tensor, qo_indptr: Tensor | None) -> int:
    """Rows of q of all requests: ragged with a qo_indptr, else uniform. Raises InvalidProblem for other axes, or a q_len of 0."""
    form = "uniform" if qo_indptr is None else "ragged"
    if q.dim() != (4 if qo_indptr is None else 3):
        beside = "without a qo_indptr" if qo_indptr is None else "beside a qo_indptr"
        raise InvalidProblem("q.shape", tuple(q.shape), f"must be {QUERY_AXES[form]} {beside}")
    if qo_indptr is None:
        if q.shape[1] == 0:
            raise InvalidProblem("q.shape", tuple(q.shape), f"must be {QUERY_AXES[form]} with a q_len from 1")
        return q.shape[0] * q.shape[1]
    if qo_indptr.dim() != 1 or qo_indptr.numel() == 0:
        raise InvalidProblem("qo_indptr.shape", tuple(qo_indptr.shape), "must be [batch_size + 1]")
    return q.shape[0]


def rows_hint(q: Tensor, tree_mask: Tensor | None, ragged: bool) -> int:
    """max_q_len if a call gives none: the most rows of q that a request may have, rounded so that plans seldom change.

    A tree mask's width fits one max_q_len alone: the rows of uniform q, or as many as a ragged mask has bits.
    """
    rows = max(1, q.shape[0 if ragged else 1])
    if tree_mask is not None:
        return max(1, tree_mask.shape[-1] * TREE_WORD_BITS) if ragged else rows
    return rounded_rows(rows)


def rounded_rows(rows: int) -> int:
    """max_q_len for at most `rows` query rows per request: `rows` up to EXACT_ROWS, above that the next power of two."""
    rows = max(1, rows)
    return rows if rows <= EXACT_ROWS else min(1 << (rows - 1).bit_length(), MAX_EXTENT)


def cache_extents(
    cache: Tensor, table_format: TableFormat, layout: str, table0: Tensor | None
) -> tuple[int, int | None, int | None]:
    """(num_kv_heads, page_size or None if there are no pages, tokens that a row may have or None if not known)."""
    if table_format == "packed":
        if cache.dim() != 3:
            raise InvalidProblem("k_cache.shape", tuple(cache.shape), "must have three axes beside a packed table")
        return cache.shape[1], None, None
    _check_cache_axes(cache)
    heads, tokens = (cache.shape[1], cache.shape[2]) if layout == "HND" else (cache.shape[2], cache.shape[1])
    if table_format in ("lengths", "none"):
        return heads, None, tokens
    dense = table_format == "dense" and isinstance(table0, Tensor) and table0.dim() == 2
    return heads, tokens, table0.shape[1] * tokens if dense and table0 is not None else None


def _modified(
    describe: Callable[..., Any],
    fields: tuple[Any, ...],
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    window_left: int | None,
    softcap: float | None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that describes decode with these modifiers, and the fields that it takes."""
    return _with_modifiers, (describe, (window_left, softcap, alibi_slopes is not None, sinks is not None), *fields)


def _with_modifiers(describe: Callable[..., Any], modifiers: tuple[Any, ...], *fields: Any) -> Any:
    return describe(*fields, **dict(zip(("window_left", "softcap", "alibi", "sinks"), modifiers, strict=True)))


def length_hint(tokens: int) -> int:
    """max_seq_len for rows of at most `tokens`: a power of two from LEAST_HINT on, so that growing rows seldom change plans."""
    return min(max(LEAST_HINT, 1 << max(0, tokens - 1).bit_length()), MAX_EXTENT)


def alignment(*tensors: Tensor) -> int:
    """The largest power of two, at most 16, that divides every pointer and every used stride but the last, in bytes."""
    aligned = 16
    for tensor in tensors:
        strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        used = (stride * tensor.element_size() for extent, stride in strides if extent > 1)
        aligned = math.gcd(aligned, tensor.data_ptr(), *used)
    return aligned


def _of_any_length(max_seq_len: int, *fields: Any, **modifiers: Any) -> FlashDecodingDescriptor:
    """The descriptor of a contiguous cache whose seq_len each run decides."""
    describe: Callable[..., FlashDecodingDescriptor] = FlashDecodingDescriptor
    return describe(*fields, max_seq_len=max_seq_len, **modifiers)


@forgotten_with_plans
@functools.lru_cache(maxsize=MAX_PLANS)
def plan_of(
    kind: Any,
    describe: Callable[..., Any],
    fields: tuple[Any, ...],
    device: torch.device,
    preference: PlanPreference | None,
) -> Any:
    """The plan of `describe(*fields)`: `select` keeps it too, but this cache spares a call to make the descriptor.

    Raises TypeError for a field that has no hash, such as a list or an array; `described_plan` says which one that is.
    """
    return kind.select(describe(*fields), device, preference)


def described_plan(
    kind: Any,
    describe: Callable[..., Any],
    fields: tuple[Any, ...],
    device: torch.device,
    preference: PlanPreference | None = None,
) -> Any:
    """The plan that `plan_of` gives. A field without a hash raises the typed error of the rule that it breaks."""
    try:
        return plan_of(kind, describe, fields, device, preference)
    except TypeError:
        describe(*fields)
        raise


def query_extents(q: Tensor) -> tuple[int, int, int]:
    """(batch, num_heads, head_dim) of q, also with a unit query axis before or after the heads.

    Raises Unsupported for several query rows per request, InvalidProblem for any other shape.
    """
    if q.dim() == 3:
        return q.shape[0], q.shape[1], q.shape[2]
    if q.dim() == 4 and 1 in q.shape[1:3]:
        return q.shape[0], q.shape[1] * q.shape[2], q.shape[3]
    rule = "must be [batch, num_heads, head_dim], or that with one unit query axis"
    raise query_error(q.shape, q.dim() == 4 and 0 not in q.shape, rule)


def _check_cache_axes(cache: Tensor) -> None:
    if cache.dim() != 4:
        raise InvalidProblem("k_cache.shape", tuple(cache.shape), "must have four axes")


def _storage(
    k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, kv_dtype: str | None, num_kv_heads: int
) -> tuple[Any, ...]:
    """The descriptor's kv_dtype, and its v_dtype, k_scale and v_scale unless all three are the default."""
    stored = stored_as("k_cache", k, kv_dtype)
    same = kv_dtype is not None or v.dtype is k.dtype
    if same and k_scale is None and v_scale is None:
        return (stored,)
    v_dtype = stored if same else stored_as("v_cache", v, None)
    kinds = (scale_kind_of(name, s, num_kv_heads, k) for name, s in (("k_scale", k_scale), ("v_scale", v_scale)))
    return (stored, v_dtype, *kinds)


def stored_as(name: str, cache: Tensor, kv_dtype: str | None) -> KVDtype:
    """What a cache is stored as: kv_dtype, the value of a KVDtype, or by its dtype. Raises InvalidArgument, InvalidProblem."""
    if kv_dtype is not None:
        if kv_dtype not in STORED_AS:
            raise InvalidProblem("kv_dtype", kv_dtype, f"must be one of {', '.join(STORED_AS)}")
        return STORED_AS[kv_dtype]
    stored = KV_DTYPES.get(cache.dtype)
    if stored is not None:
        return stored
    if cache.dtype == torch.uint8:
        raise InvalidArgument(name, "has dtype torch.uint8: kv_dtype must say what the bytes hold, KVDtype.E4M3 or KVDtype.E5M2")
    raise InvalidArgument(name, f"has dtype {cache.dtype}, must be one of {', '.join(map(str, KV_DTYPES))}")


def scale_kind_of(name: str, scale: Any, num_kv_heads: int, cache: Tensor) -> KVScale:
    """The KVScale that a cache's scale tensor stands for; NONE without a tensor. Raises InvalidArgument, InvalidProblem."""
    if scale is None:
        return KVScale.NONE
    if not isinstance(scale, Tensor):
        raise InvalidArgument(name, f"got {type(scale).__name__}, must be a tensor or None")
    return scale_of(name, scale, num_kv_heads, cache.shape[:-1])
