"""Decode as frozen and self-validating values: the descriptors, and the problem that all attention descriptors become."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..checks.fields import check_alignment, check_extent, check_group, check_modifiers, check_softmax
from ..config.modifiers import UNMODIFIED, Modifiers, QueryForm
from ..config.problem import LseBase, Source, TableFormat, padded_head_dim
from ..errors import InvalidProblem
from ..kv.scale import KVScale
from ..kv.types import (
    CACHE_ALIGNMENTS,
    QUERY_DTYPES,
    KVDtype,
    KVLayout,
    StorageFields,
    cache_type,
    check_layout,
    check_query_dtype,
    check_storage,
    vector_bytes,
)

TREE_WORD_BITS = 32  # new tokens that one int32 of a tree mask has a bit for


@dataclass(frozen=True)
class DecodeProblem:
    """What variants, heuristics and tuned plans see of a descriptor: attention of a request's query rows over a cache.

    page_size: 0 if the cache is contiguous. kv_dtype, v_dtype: what K and V are stored as. vector_bytes: the largest power of
    two, at most 16, that divides the bytes of a row of each cache, its strides and its pointers. max_seq_len: a hint for the
    choice of a configuration; None if unknown. query: how many query rows a request has; max_q_len: the most. modifiers: masks
    and functions of scores.
    """

    source: Source
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: KVDtype
    v_dtype: KVDtype
    table_format: TableFormat
    vector_bytes: int
    max_seq_len: int | None
    lse_base: LseBase
    k_scale: KVScale = KVScale.NONE
    v_scale: KVScale = KVScale.NONE
    query: QueryForm = "one"
    max_q_len: int = 1
    modifiers: Modifiers = UNMODIFIED

    @property
    def plain(self) -> bool:
        """Whether every request has one query row and no score is modified: a kernel then takes no further operands."""
        return self.query == "one" and self.modifiers == UNMODIFIED

    @property
    def tree_words(self) -> int:
        """int32 words of a query row's tree mask."""
        return -(-self.max_q_len // TREE_WORD_BITS)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_head_dim(self) -> int:
        """head_dim as the tensor-core variants pad it."""
        return padded_head_dim(self.head_dim, min(self.kv_dtype.element_bytes, self.v_dtype.element_bytes))

    @property
    def has_token_scales(self) -> bool:
        """Whether K or V has a scale per token."""
        return "token" in (self.k_scale.granularity, self.v_scale.granularity)

    @property
    def has_8_bits(self) -> bool:
        """Whether K or V is stored in 8 bits."""
        return 1 in (self.kv_dtype.element_bytes, self.v_dtype.element_bytes)

    @property
    def splits(self) -> bool:
        """Whether q is f32: products take it in parts."""
        return self.q_dtype == torch.float32

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, V and their scales per token, for one token and KV head."""
        scales = sum(scale.dtype.itemsize for scale in (self.k_scale, self.v_scale) if scale.granularity == "token")
        return self.head_dim * (self.kv_dtype.element_bytes + self.v_dtype.element_bytes) + scales

    @property
    def packed_rows(self) -> int:
        """The most packed rows of a request and a KV head: pairs of a query row and a query head."""
        return self.group_size * self.max_q_len

    @property
    def element_type(self) -> str:
        """The short name of q's dtype: "f32", "f16" or "bf16"."""
        return QUERY_DTYPES[self.q_dtype].value

    @property
    def cache_type(self) -> str:
        """The short name of what K and V are stored as: "int8", or "e4m3/f16" where they differ."""
        return cache_type(self.kv_dtype, self.v_dtype)

    def __str__(self) -> str:
        what = "decode" if self.query == "one" else f"attention, {self.query} query rows, at most {self.max_q_len} a request"
        cache = f"page_size {self.page_size}, {self.table_format} table" if self.source == "paged" else "contiguous"
        lengths = {"lengths": " with lengths", "packed": " packed"}.get(self.table_format, "")
        scales = [f", {name} {scale}" for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)) if scale]
        modifiers = f", {self.modifiers}" if str(self.modifiers) else ""
        return (
            f"{what}, batch {self.batch_size}, heads {self.num_heads}/{self.num_kv_heads}, head_dim {self.head_dim}, "
            f"{cache}{lengths}, q {self.element_type}, cache {self.cache_type}{''.join(scales)}, "
            f"{self.vector_bytes}-byte aligned{modifiers}"
        )


class AttentionFields(StorageFields):
    """A base of the attention descriptors: what they derive from their fields."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float | None
    lse_base: LseBase
    window_left: int | None
    window_right: int | None = None  # None if a request has one query row, which stands at the last key
    softcap: float | None
    alibi: bool
    sinks: bool
    k_scale: KVScale
    v_scale: KVScale

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The factor on q . k: softmax_scale, or head_dim ** -0.5."""
        return self.head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)

    @property
    def launch_values(self) -> tuple[int, int, float]:
        """window_left, window_right and softcap as a launch takes them: 0 for None."""
        return self.window_left or 0, self.window_right or 0, float(self.softcap or 0.0)

    def _one_row_modifiers(self) -> Modifiers:
        """The modifiers of one query row at its request's last key, from which causal and window_right hide nothing."""
        windowed, capped = self.window_left is not None, self.softcap is not None
        return Modifiers(window_left=windowed, softcap=capped, alibi=self.alibi, sinks=self.sinks)

    def _problem(self, q_dtype: torch.dtype, alignment_bytes: int | None, **own: Any) -> DecodeProblem:
        """The problem of these fields. own: the fields of a DecodeProblem that each descriptor fills in its own way."""
        kv_dtype, v_dtype = self._stored(q_dtype)
        row_bytes = self.head_dim * math.gcd(kv_dtype.element_bytes, v_dtype.element_bytes)
        return DecodeProblem(
            batch_size=self.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            v_dtype=v_dtype,
            vector_bytes=vector_bytes(row_bytes, alignment_bytes),
            lse_base=self.lse_base,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            **own,
        )


@dataclass(frozen=True)
class PagedDecodeDescriptor(AttentionFields):
    """Decode attention of one query row per request over a paged cache. Frozen and hashable: it is a cache key.

    q and out are [batch_size, num_heads, head_dim] of q_dtype; lse is f32 [batch_size, num_heads] in `lse_base`. kv_dtype
    is what K and V are stored as, q's dtype by default; v_dtype is given if V's differs. k_scale, v_scale: which scale tensors
    a run is given. num_pages, if given, is the number of pages of both caches. max_pages, if given, bounds a row's table: a
    dense table has at most max_pages columns, a CSR table at most batch_size * max_pages indices. max_seq_len is a hint for the
    choice of a configuration, never a bound on correctness. softmax_scale defaults to head_dim ** -0.5. batch_size 0 is legal.

    window_left, softcap, alibi, sinks: as in PagedAttentionDescriptor, for a query row at its request's last token.

    Raises, in this order: InvalidProblem (extents, then divisibility, then the other choices), Unsupported for a q_dtype that
    no variant knows.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: KVDtype | None = None
    layout: KVLayout = KVLayout.HND
    table_format: Literal["dense", "csr"] = "dense"
    num_pages: int | None = None
    max_pages: int | None = None
    max_seq_len: int | None = None
    softmax_scale: float | None = None
    lse_base: LseBase = "e"
    v_dtype: KVDtype | None = None
    k_scale: KVScale = KVScale.NONE
    v_scale: KVScale = KVScale.NONE
    window_left: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        check_extent("batch_size", self.batch_size, least=0)
        for name in ("num_heads", "num_kv_heads", "head_dim", "page_size"):
            check_extent(name, getattr(self, name))
        for name in ("num_pages", "max_pages", "max_seq_len"):
            if getattr(self, name) is not None:
                check_extent(name, getattr(self, name))
        check_group(self.num_heads, self.num_kv_heads)
        check_layout(self.layout)
        if self.table_format not in ("dense", "csr"):
            raise InvalidProblem("table_format", self.table_format, 'must be "dense" or "csr"')
        check_softmax(self.softmax_scale, self.lse_base)
        check_storage(self.kv_dtype, self.v_dtype, self.k_scale, self.v_scale)
        check_modifiers(self.window_left, None, self.softcap, alibi=self.alibi, sinks=self.sinks)
        check_query_dtype("q_dtype", self.q_dtype)
        self._settle_storage(self.q_dtype)

    @property
    def problem(self) -> DecodeProblem:
        """What the choice of a kernel depends on."""
        return self._problem(
            self.q_dtype,
            self.layout.alignment_bytes,
            source="paged",
            page_size=self.page_size,
            table_format=self.table_format,
            max_seq_len=self.max_seq_len,
            modifiers=self._one_row_modifiers(),
        )


@dataclass(frozen=True)
class FlashDecodingDescriptor(AttentionFields):
    """Decode attention of one query row per request over a contiguous cache. Frozen and hashable: it is a cache key.

    q and out are [batch_size, num_heads, head_dim] of `dtype`, k and v [batch_size, num_kv_heads, seq_len, head_dim], of any
    strides with a last stride of 1; lse is f32 [batch_size, num_heads]. seq_len, if given, is the number of tokens of both
    caches in every run. None lets it differ from run to run; max_seq_len is then a hint for the choice of a configuration, never
    a bound on correctness. alignment_bytes: as in KVLayout. kv_dtype, v_dtype, k_scale, v_scale and the modifiers are as in
    PagedDecodeDescriptor. batch_size 0 and seq_len 0 are legal.

    Raises, in this order: Unsupported (dtype), InvalidProblem (extents, then divisibility, then the other choices). A
    head_dim that no variant serves is Unsupported when a plan is selected.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    seq_len: int | None
    head_dim: int
    dtype: torch.dtype
    softmax_scale: float | None = None
    lse_base: LseBase = "e"
    alignment_bytes: int | None = None
    kv_dtype: KVDtype | None = None
    v_dtype: KVDtype | None = None
    k_scale: KVScale = KVScale.NONE
    v_scale: KVScale = KVScale.NONE
    max_seq_len: int | None = None
    window_left: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        check_query_dtype("dtype", self.dtype)
        for name, least in (("batch_size", 0), ("num_heads", 1), ("num_kv_heads", 1), ("seq_len", 0), ("head_dim", 1)):
            if name != "seq_len" or self.seq_len is not None:
                check_extent(name, getattr(self, name), least)
        if self.max_seq_len is not None:
            if self.seq_len is not None:
                raise InvalidProblem("max_seq_len", self.max_seq_len, f"must be None beside seq_len = {self.seq_len}")
            check_extent("max_seq_len", self.max_seq_len)
        check_group(self.num_heads, self.num_kv_heads)
        check_softmax(self.softmax_scale, self.lse_base)
        check_alignment("alignment_bytes", self.alignment_bytes, CACHE_ALIGNMENTS)
        check_storage(self.kv_dtype, self.v_dtype, self.k_scale, self.v_scale)
        check_modifiers(self.window_left, None, self.softcap, alibi=self.alibi, sinks=self.sinks)
        self._settle_storage(self.dtype)

    @classmethod
    def new(
        cls, batch_size: int, num_heads: int, seq_len: int | None, head_dim: int, dtype: torch.dtype
    ) -> FlashDecodingDescriptor:
        """Multi-head attention: each query head has its own KV head."""
        return cls(batch_size, num_heads, num_heads, seq_len, head_dim, dtype)

    @classmethod
    def new_gqa(
        cls, batch_size: int, num_heads: int, num_kv_heads: int, seq_len: int | None, head_dim: int, dtype: torch.dtype
    ) -> FlashDecodingDescriptor:
        """Grouped-query attention: num_heads / num_kv_heads query heads share a KV head."""
        return cls(batch_size, num_heads, num_kv_heads, seq_len, head_dim, dtype)

    def with_scale(self, softmax_scale: float) -> FlashDecodingDescriptor:
        """The same problem with another factor on q . k."""
        return replace(self, softmax_scale=softmax_scale)

    @property
    def problem(self) -> DecodeProblem:
        """What the choice of a kernel depends on."""
        return self._problem(
            self.dtype,
            self.alignment_bytes,
            source="contiguous",
            page_size=0,
            table_format="none",
            max_seq_len=self.max_seq_len if self.seq_len is None else self.seq_len,
            modifiers=self._one_row_modifiers(),
        )
