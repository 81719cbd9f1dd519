"""The descriptor of an append: which values are written, where, and how they are stored. Frozen and self-validating."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch

from ..checks.fields import check_alignment, check_extent, check_group
from ..config.append import MAX_HEAD_DIM, IndexType, angle_columns
from ..config.problem import ElementType, TableFormat
from ..errors import InvalidProblem, Unsupported
from ..kv.quantize import EIGHT_BIT
from ..kv.rotary import Rotary, rotated_columns
from ..kv.scale import Axes, KVScale
from ..kv.types import QUERY_DTYPES, KVDtype, KVLayout, StorageFields, cache_type, check_layout, check_storage, vector_bytes

APPEND_DTYPES = (torch.float16, torch.bfloat16)
INDEX_TYPES: dict[torch.dtype, IndexType] = {torch.int32: "i32", torch.int64: "i64"}
ANGLE_BYTES = 4  # cosines and sines are f32
MAX_ROWS = 2**31 - 1024  # (token, head) rows of a launch are counted in int32, with the surplus rows of its last CTAs


@dataclass(frozen=True)
class KVAppendDescriptor(StorageFields):
    """An append of K and V of at most `num_tokens` tokens to a paged cache. Frozen and hashable: it is a cache key.

    num_tokens is a maximum: a run appends as many tokens as its tensors have, since an engine's count differs from step to
    step. dtype: f16 or bf16, of the incoming K and V. kv_dtype, v_dtype, k_scale, v_scale, layout and num_pages are those of a
    PagedDecodeDescriptor that reads the caches. kv_dtype is the type that the caches store: `dtype` itself (the default), e4m3,
    e5m2 or int8; v_dtype is V's type if it differs. Real value = stored * scale. Without scales fp8 saturates; per "tensor" and
    "head", values are divided by the scales that a run is given; per "token", scales are computed from the values and written.
    16-bit caches take no scales, int8 caches must have scales.

    table_format: with "none" a run is given one slot per token, int32 or int64 as slot_dtype says; with "dense" or "csr" it is
    given a PageTable, and each row's last token is appended. rotary: the embedding of K, and of q in the same launch.
    alignment_bytes: 2, 4, 8 or 16; strides and pointers of the incoming K, V and q are multiples of it, and None stands for the
    alignment of compact tensors. The caches' alignment is in `layout`, and is at least 2 for a cache of 16 bits.

    Raises InvalidProblem for an extent or a choice that breaks its rule, then Unsupported for a dtype, a pair of
    dtypes, a head_dim above 256 or too many (token, head) rows.
    """

    num_tokens: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: KVDtype | None = None
    layout: KVLayout = KVLayout.HND
    table_format: TableFormat = "none"
    num_pages: int | None = None
    v_dtype: KVDtype | None = None
    k_scale: KVScale = KVScale.NONE
    v_scale: KVScale = KVScale.NONE
    slot_dtype: torch.dtype = torch.int64
    alignment_bytes: int | None = None
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        check_extent("num_tokens", self.num_tokens, least=0)
        for name in ("num_kv_heads", "head_dim", "page_size"):
            check_extent(name, getattr(self, name))
        if self.num_pages is not None:
            check_extent("num_pages", self.num_pages)
        check_layout(self.layout)
        if self.table_format not in ("none", "dense", "csr"):
            raise InvalidProblem("table_format", self.table_format, 'must be "none", "dense" or "csr"')
        check_storage(self.kv_dtype, self.v_dtype, self.k_scale, self.v_scale)
        check_alignment("alignment_bytes", self.alignment_bytes)
        self._settle_rotary()
        self._check_dtypes()
        self._settle_storage(self.dtype)
        for (name, stored), (scale_name, scale) in zip(self._storages(), self._scales(), strict=True):
            _check_conversion(name, stored, self.dtype, scale_name, scale)
            _check_alignment(name, stored, self.layout.alignment_bytes)
        if self.head_dim > MAX_HEAD_DIM:
            raise Unsupported([f"head_dim = {self.head_dim}: must be at most {MAX_HEAD_DIM}"])
        rows = self.num_tokens * (self.num_kv_heads + (self.rotary.num_heads if self.rotary else 0))
        if rows > MAX_ROWS:
            heads = "num_kv_heads" if rows == self.num_tokens * self.num_kv_heads else "(num_kv_heads + rotary.num_heads)"
            raise Unsupported([f"num_tokens * {heads} = {rows:,}: must be at most 2**31 - 1,024"])

    def _settle_rotary(self) -> None:
        if self.rotary is None:
            return
        if not isinstance(self.rotary, Rotary):
            raise InvalidProblem("rotary", self.rotary, "must be a Rotary or None")
        rotary_dim = rotated_columns(self.rotary, self.head_dim)
        if self.rotary.num_heads:
            check_group(self.rotary.num_heads, self.num_kv_heads)
        object.__setattr__(self, "rotary", replace(self.rotary, rotary_dim=rotary_dim))

    def _check_dtypes(self) -> None:
        choices = (("dtype", APPEND_DTYPES), ("slot_dtype", tuple(INDEX_TYPES)))
        for name, _ in choices:
            if not isinstance(getattr(self, name), torch.dtype):
                raise InvalidProblem(name, getattr(self, name), "must be a torch.dtype")
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise Unsupported([f"{name} = {getattr(self, name)}: must be {' or '.join(map(str, allowed))}"])

    def _storages(self) -> tuple[tuple[str, KVDtype], ...]:
        k_stored, v_stored = self.stored
        return ("kv_dtype", k_stored), ("kv_dtype" if self.v_dtype is None else "v_dtype", v_stored)

    def _scales(self) -> tuple[tuple[str, KVScale], ...]:
        return ("k_scale", self.k_scale), ("v_scale", self.v_scale)

    @property
    def stored(self) -> tuple[KVDtype, KVDtype]:
        """The types that K and V are stored as, never None."""
        return self._stored(self.dtype)

    @property
    def scales(self) -> tuple[KVScale, KVScale]:
        """The scales of K and of V."""
        return self.k_scale, self.v_scale

    @property
    def element_type(self) -> ElementType:
        """The short name of dtype."""
        return cast(ElementType, QUERY_DTYPES[self.dtype].value)

    @property
    def cache_type(self) -> str:
        """The short name of the type that the caches store: "int8", or "e4m3/f16" if K's and V's differ."""
        return cache_type(*self.stored)

    @property
    def columns(self) -> int:
        """Neighbouring columns that one access of a kernel moves, at most 8.

        The alignment of K, V, q and the caches allows these columns, and a rotary embedding treats them alike.
        """
        incoming = vector_bytes(self.head_dim * self.dtype.itemsize, self.alignment_bytes) // self.dtype.itemsize
        sizes = [stored.element_bytes for stored in self.stored]
        columns = min(incoming, *(vector_bytes(self.head_dim * n, self.layout.alignment_bytes) // n for n in sizes))
        if self.rotary is None or self.rotary.rotary_dim is None:
            return columns
        return math.gcd(columns, self.rotary.rotary_dim // (2 if self.rotary.pairing == "half" else 1))

    @property
    def angle_bytes(self) -> int:
        """Bytes that strides and pointer of the cos_sin_cache are multiples of, if there is a rotary embedding."""
        half = self.rotary is not None and self.rotary.pairing == "half"
        return min(16, ANGLE_BYTES * angle_columns(self.columns, half))

    @property
    def nhd(self) -> bool:
        """Whether the caches are [pages, page_size, num_kv_heads, head_dim]."""
        return self.layout.order == "NHD"

    def scale_axes(self, num_pages: int) -> Axes:
        """The axes of scales per token."""
        return (("num_pages", num_pages), ("page_size", self.page_size), ("num_kv_heads", self.num_kv_heads))

    def __str__(self) -> str:
        scales = [f", {name} {scale}" for name, scale in self._scales() if scale]
        slots = "slots" if self.table_format == "none" else f"{self.table_format} table"
        rotary = "" if self.rotary is None else f", rotary {self.rotary.pairing} {self.rotary.rotary_dim}"
        return (
            f"append of {self.num_tokens} tokens by {slots}, KV heads {self.num_kv_heads}, head_dim {self.head_dim}, "
            f"page_size {self.page_size} {self.layout.order}, {self.element_type} to {self.cache_type}{''.join(scales)}{rotary}"
        )


def _check_conversion(name: str, stored: KVDtype, dtype: torch.dtype, scale_name: str, scale: KVScale) -> None:
    """Raises Unsupported if values of `dtype` cannot be stored as `stored` with this scale."""
    if stored not in EIGHT_BIT:
        if stored != QUERY_DTYPES[dtype]:
            raise Unsupported([f"{name} = {stored.value}: must be dtype's, {QUERY_DTYPES[dtype].value}, or have 8 bits"])
        if scale:
            raise Unsupported([f"{scale_name} = {scale}: must be none where {name} = {stored.value}"])
    if stored is KVDtype.INT8 and not scale:
        raise Unsupported([f"{scale_name} = none: must be per tensor, head or token where {name} = int8"])


def _check_alignment(name: str, stored: KVDtype, alignment_bytes: int | None) -> None:
    """Checks that the caches' alignment is no less than an element: a kernel moves whole elements."""
    if alignment_bytes is not None and alignment_bytes < stored.element_bytes:
        rule = f"must be at least {stored.element_bytes}, the bytes of an element, where {name} = {stored.value}"
        raise InvalidProblem("layout.alignment_bytes", alignment_bytes, rule)
