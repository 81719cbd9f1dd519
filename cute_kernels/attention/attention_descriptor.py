"""Attention of several query rows per request, as a frozen and self-validating value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..checks.fields import MAX_EXTENT, check_choice, check_extent, check_group, check_modifiers, check_softmax
from ..config.modifiers import Modifiers
from ..config.problem import LseBase, TableFormat
from ..errors import InvalidProblem
from ..kv.page_table import OPERAND_NAMES, PAGED
from ..kv.scale import KVScale
from ..kv.types import KVDtype, KVLayout, check_layout, check_query_dtype, check_storage
from .descriptors import AttentionFields, DecodeProblem

MOST_PACKED_ROWS = MAX_EXTENT - 127  # per request and KV head: the device rounds them up to whole blocks, at most 128, in int32


@dataclass(frozen=True)
class PagedAttentionDescriptor(AttentionFields):
    """Attention of up to max_q_len query rows per request, under masks and score modifiers. Frozen and hashable: a cache key.

    query_format: with "ragged", q and out are [total_q, num_heads, head_dim], and request b has the rows qo_indptr[b] :
    qo_indptr[b + 1]; with "uniform", they are [batch_size, q_len, num_heads, head_dim] with 1 <= q_len <= max_q_len. lse is f32
    [total_q, num_heads]; total_q = batch_size * q_len if uniform. max_q_len is at most 2**31 - 128 over the query heads of a KV
    head, num_heads / num_kv_heads.

    table_format: "dense" and "csr" are over pages of page_size tokens. With page_size None, the cache is contiguous: "lengths"
    and "none", [batch_size, num_kv_heads, max_len, head_dim] ("NHD": the middle axes swapped), or "packed", [total_k,
    num_kv_heads, head_dim], which has no other layout. seq_len, the number of keys of a request, counts its new tokens.

    Query row i of n stands at position p = seq_len - n + i, under causal="top_left" at p = i. causal hides the keys past p,
    window_left the keys before p - window_left, window_right (only with causal=None) the keys past p + window_right. n > seq_len
    is legal: under causal="bottom_right" rows with p < 0 see no key. tree_mask: a run is given int32 [total_q, ceil(max_q_len /
    32)], where bit j of a row says whether the row sees the j-th new token of its request. The tree mask replaces
    causal="bottom_right" among the new tokens; a row sees all earlier keys, as far as the window goes. A row that sees no key
    has out = 0 and lse = -inf, or its sink.

    A score is q . k times the scales, then softcap * tanh(score / softcap), then less alibi_slopes[head] * |p - key position|,
    then masked. sinks: f32 [num_heads] natural logits that join the softmax's denominator; lse includes them.

    The other fields are as in PagedDecodeDescriptor. Raises InvalidProblem for the field that breaks its rule, then Unsupported
    for a q_dtype that no variant knows.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int | None
    q_dtype: torch.dtype
    max_q_len: int
    query_format: Literal["ragged", "uniform"] = "ragged"
    kv_dtype: KVDtype | None = None
    layout: KVLayout = KVLayout.HND
    table_format: TableFormat = "dense"
    num_pages: int | None = None
    max_pages: int | None = None
    max_seq_len: int | None = None
    softmax_scale: float | None = None
    lse_base: LseBase = "e"
    v_dtype: KVDtype | None = None
    k_scale: KVScale = KVScale.NONE
    v_scale: KVScale = KVScale.NONE
    causal: Literal["bottom_right", "top_left"] | None = "bottom_right"
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    tree_mask: bool = False

    def __post_init__(self) -> None:
        check_extent("batch_size", self.batch_size, least=0)
        for name in ("num_heads", "num_kv_heads", "head_dim", "max_q_len"):
            check_extent(name, getattr(self, name))
        check_choice("query_format", self.query_format, ("ragged", "uniform"))
        check_group(self.num_heads, self.num_kv_heads)
        most = MOST_PACKED_ROWS // (self.num_heads // self.num_kv_heads)
        if self.max_q_len > most:
            heads = f"num_heads = {self.num_heads} and num_kv_heads = {self.num_kv_heads}"
            raise InvalidProblem("max_q_len", self.max_q_len, f"must be at most {most} with {heads}")
        self._check_cache()
        check_softmax(self.softmax_scale, self.lse_base)
        check_storage(self.kv_dtype, self.v_dtype, self.k_scale, self.v_scale)
        self._check_masks()
        check_query_dtype("q_dtype", self.q_dtype)
        self._settle_storage(self.q_dtype)

    def _check_cache(self) -> None:
        """Checks the layout, the table format, and the page size, numbers of pages and length hint for that format."""
        check_layout(self.layout)
        if not isinstance(self.table_format, str) or self.table_format not in OPERAND_NAMES:
            raise InvalidProblem("table_format", self.table_format, f"must be one of {', '.join(OPERAND_NAMES)}")
        if self.table_format in PAGED:
            check_extent("page_size", self.page_size)
        for name in ("num_pages", "max_pages", "max_seq_len"):
            if getattr(self, name) is not None:
                check_extent(name, getattr(self, name))
        if self.table_format not in PAGED:
            for name in ("page_size", "num_pages", "max_pages"):
                if getattr(self, name) is not None:
                    raise InvalidProblem(name, getattr(self, name), f'must be None beside table_format = "{self.table_format}"')
        if self.table_format == "packed" and self.layout.order != "HND":
            raise InvalidProblem("layout.order", self.layout.order, 'must be "HND": a packed cache has one order of its axes')

    def _check_masks(self) -> None:
        check_choice("causal", self.causal, ("bottom_right", "top_left", None))
        flags = {name: getattr(self, name) for name in ("alibi", "sinks", "tree_mask")}
        check_modifiers(self.window_left, self.window_right, self.softcap, **flags)
        if self.window_right is not None and self.causal is not None:
            raise InvalidProblem("window_right", self.window_right, f'must be None beside causal = "{self.causal}"')
        if self.tree_mask and self.causal != "bottom_right":
            raise InvalidProblem("tree_mask", True, f'must be beside causal = "bottom_right", got {self.causal!r}')

    @property
    def problem(self) -> DecodeProblem:
        """What the choice of a kernel depends on: a problem of decode if each request certainly has one row, at its last key."""
        one = self.query_format == "uniform" and self.max_q_len == 1 and self.causal != "top_left" and not self.tree_mask
        return self._problem_of(one)

    @property
    def general_problem(self) -> DecodeProblem:
        """The problem of several query rows per request, also if each request certainly has one."""
        return self._problem_of(one=False)

    def _problem_of(self, one: bool) -> DecodeProblem:
        return self._problem(
            self.q_dtype,
            self.layout.alignment_bytes,
            source="paged" if self.table_format in PAGED else "contiguous",
            page_size=self.page_size or 0,
            table_format=self.table_format,
            max_seq_len=self.max_seq_len,
            query="one" if one else self.query_format,
            max_q_len=self.max_q_len,
            modifiers=self._one_row_modifiers() if one else self._modifiers(),
        )

    def _modifiers(self) -> Modifiers:
        return Modifiers(
            causal=self.causal or "none",
            window_left=self.window_left is not None,
            window_right=self.window_right is not None,
            tree_mask=self.tree_mask,
            softcap=self.softcap is not None,
            alibi=self.alibi,
            sinks=self.sinks,
        )
