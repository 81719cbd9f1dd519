"""flash_attn_with_kvcache: new tokens stored in a cache, and attention over it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import CuteKernelsError, InvalidArgument
from ...kv.page_table import PageTable
from .. import with_unit_last_stride
from .append import New, append, rotary_tables
from .arguments import NO_WINDOW, Scores, check_inference, descales_of, flag, in_callers_words, scores_of, settled
from .attend import attend
from .cache import Cache, cache_of, without_padding

# the arguments that say how k is appended, none of them given
NOTHING_MORE: dict[str, Any] = dict.fromkeys(
    ("cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved")
)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
    cache_seqlens: Tensor | int | None = None, page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = NO_WINDOW, softcap: float = 0.0, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, alibi_slopes: Tensor | None = None, s_aux: Tensor | None = None,
    sm_margin: int = 0, return_softmax_lse: bool = False, out: Tensor | None = None, **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a cache, to which k and v are appended first. Returns out, or (out, lse) with return_softmax_lse.

    q, out: f16 or bf16 [batch, q_len, num_heads, head_dim]; or [total_q, num_heads, head_dim] with cu_seqlens_q int32 [batch + 1]
    and max_seqlen_q, the most rows of a request (rows of q by default). k_cache, v_cache: [batch, max_len, num_kv_heads,
    head_dim]; or pages [num_pages, page_size, num_kv_heads, head_dim] with page_table int32 [batch, max_pages]; of q's type,
    e4m3, e5m2 or int8. cache_seqlens: int32 [batch] or an int, the tokens there before k is appended; None: all. lse: f32
    [batch, num_heads, q_len], ragged [num_heads, total_q], natural log, -inf for a row that sees no key.

    k, v: [batch, seqlen_new, num_kv_heads, head_dim], or [total, num_kv_heads, head_dim] with cu_seqlens_k_new, stored as
    append_kv does. rotary_cos, rotary_sin: [max_position, rotary_dim / 2]; they rotate k and q by positions that start at
    cache_seqlens, or at rotary_seqlens; rotary_interleaved, True by default, says which columns pair. cache_batch_idx: int32
    [batch], each request's row of the cache or of page_table. cache_leftpad: int32 [batch], tokens at the front that no row sees.

    causal: aligned to the bottom right. window_size: (left, right), negative for no bound, None for no window. softcap: 0 for
    none. alibi_slopes, k_descale, v_descale: f32 [heads], or [heads] expanded to [batch, heads]; descales of 16-bit caches are
    ignored. s_aux: sinks [num_heads]. sm_margin: SMs left to other work. others: the options of k (cu_seqlens_k_new, rotary_*),
    block_table for page_table, learnable_sink for s_aux, the names of arguments.IGNORED, which change nothing here, and those of
    UNSERVED. Arguments after v are by name.

    Allocates outputs and tensors that it derives from lengths. Never synchronises; capturable in a graph once a call has selected
    its plans. Raises Unsupported for an argument that is not served, naming it, and what plans and append_kv raise.
    """
    more = NOTHING_MORE
    if others:
        page_table, s_aux, *rest = settled(others, page_table=page_table, s_aux=s_aux, **more)
        more = dict(zip(more, rest, strict=True))
        if k is v is None:
            _refuse_without_k(more)
    check_inference(q, k_cache, v_cache)
    scores = scores_of(causal, window_size, softcap, softmax_scale, sm_margin)
    try:
        if k is v is cache_batch_idx is cache_leftpad is None and isinstance(cache_seqlens, Tensor):
            table = PageTable.lengths(cache_seqlens) if page_table is None else PageTable.dense(page_table, cache_seqlens)
        else:
            batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
            cache = cache_of(k_cache, v_cache, page_table, cache_seqlens, cache_batch_idx, batch)
            if k is not None or v is not None:
                descales = descales_of(k_cache, v_cache, k_descale, v_descale)
                cache, q = _appended(cache, q, k, v, cu_seqlens_q, scores, descales, more)
            if cache_leftpad is not None:
                cache = without_padding(cache, cache_leftpad, batch)
            k_cache, v_cache, table = cache.k, cache.v, cache.page_table
        # fmt: off
        return attend(
            q, k_cache, v_cache, table, scores, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, k_descale=k_descale,
            v_descale=v_descale, alibi_slopes=alibi_slopes, s_aux=s_aux, out=out, return_lse=return_softmax_lse,
        )
        # fmt: on
    except CuteKernelsError as error:
        raise in_callers_words(error, others, **{"page_table.seq_lens": "cache_seqlens"}) from error


def get_scheduler_metadata(*_sizes: Any, **_options: Any) -> None:
    """Returns None for any arguments: a launch schedules itself on the device, and scheduler_metadata is ignored."""


def _appended(
    cache: Cache,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor | None,
    scores: Scores,
    descales: tuple[Tensor | None, Tensor | None],
    more: dict[str, Any],
) -> tuple[Cache, Tensor]:
    """Appends k and v at the ends of their requests; returns (the cache, q, rotated if there is a rotary embedding)."""
    if k is None or v is None:
        raise InvalidArgument("k" if k is None else "v", "is None, must be a tensor beside the other of k and v")
    tables, cos, sin = None, more["rotary_cos"], more["rotary_sin"]
    if cos is not None or sin is not None:
        starts = cache.lengths if more["rotary_seqlens"] is None else more["rotary_seqlens"]
        interleaved = more["rotary_interleaved"]
        interleaved = interleaved is None or flag("rotary_interleaved", interleaved)
        q, tables = with_unit_last_stride(q), rotary_tables(cos, sin, starts, interleaved, q.device)
    return append(cache, New(k, v, more["cu_seqlens_k_new"]), descales, tables, q, cu_seqlens_q, scores.positional)


def _refuse_without_k(more: dict[str, Any]) -> None:
    for name in ("rotary_cos", "rotary_sin"):
        if more[name] is not None:
            raise InvalidArgument(name, "is given without k and v, must be None: it is of the tokens that are appended")
