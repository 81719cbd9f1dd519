"""What is computed, as frozen and self-validating values: the cache layout, the descriptors, and the problem of both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Literal

import torch

from .config import LseBase, Source, TableFormat, m_tiles, padded_head_dim
from .errors import InvalidProblem, Unsupported
from .kv_scale import KVScale

MAX_EXTENT = 2**31 - 1  # extents and lengths are int32 on the device
MAX_VECTOR_BYTES = 16
CACHE_ALIGNMENTS = (1, 2, 4, 8, 16)


class KVDtype(Enum):
    """How one element of a cache is stored."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    INT8 = "int8"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of a torch tensor that holds such elements."""
        return _TORCH_DTYPES[self]

    @property
    def is_float8(self) -> bool:
        """Whether a cache may also be handed over as bytes, torch.uint8."""
        return self in (KVDtype.E4M3, KVDtype.E5M2)

    @property
    def tensor_dtypes(self) -> tuple[torch.dtype, ...]:
        """What a cache of such elements may be handed over as."""
        return (self.torch_dtype, torch.uint8) if self.is_float8 else (self.torch_dtype,)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.torch_dtype.itemsize


_TORCH_DTYPES = {
    KVDtype.F32: torch.float32,
    KVDtype.F16: torch.float16,
    KVDtype.BF16: torch.bfloat16,
    KVDtype.E4M3: torch.float8_e4m3fn,
    KVDtype.E5M2: torch.float8_e5m2,
    KVDtype.INT8: torch.int8,
}
QUERY_DTYPES = {torch.float32: KVDtype.F32, torch.float16: KVDtype.F16, torch.bfloat16: KVDtype.BF16}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_extent(name: str, value: int, least: int = 1) -> None:
    if not _is_int(value) or not least <= value <= MAX_EXTENT:
        raise InvalidProblem(name, value, f"must be an int from {least} to 2**31 - 1")


def _check_group(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise InvalidProblem("num_heads", num_heads, f"must be a multiple of num_kv_heads = {num_kv_heads}")


def _check_softmax(softmax_scale: float | None, lse_base: str) -> None:
    if softmax_scale is not None:
        number = isinstance(softmax_scale, (int, float)) and not isinstance(softmax_scale, bool)
        if not number or not math.isfinite(softmax_scale) or softmax_scale <= 0:
            raise InvalidProblem("softmax_scale", softmax_scale, "must be a finite number above 0, or None")
    if lse_base not in ("e", "2"):
        raise InvalidProblem("lse_base", lse_base, 'must be "e" or "2"')


def _check_alignment(name: str, alignment_bytes: int | None, allowed: tuple[int, ...] = (2, 4, 8, 16)) -> None:
    if alignment_bytes is not None and (not _is_int(alignment_bytes) or alignment_bytes not in allowed):
        raise InvalidProblem(name, alignment_bytes, f"must be {', '.join(map(str, allowed))} or None")


def _check_query_dtype(name: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise InvalidProblem(name, dtype, "must be a torch.dtype")
    if dtype not in QUERY_DTYPES:
        raise Unsupported([f"{name} = {dtype}: must be torch.float16 or torch.bfloat16 (torch.float32 on the CPU)"])


def _check_storage(kv_dtype: KVDtype | None, v_dtype: KVDtype | None, k_scale: KVScale, v_scale: KVScale) -> None:
    for name, dtype in (("kv_dtype", kv_dtype), ("v_dtype", v_dtype)):
        if dtype is not None and not isinstance(dtype, KVDtype):
            raise InvalidProblem(name, dtype, "must be a KVDtype or None")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(scale, KVScale):
            raise InvalidProblem(name, scale, "must be a KVScale")


@dataclass(frozen=True)
class KVLayout:
    """Axis order of a paged cache, and the alignment that its strides and pointers keep.

    order: "HND" [pages, num_kv_heads, page_size, head_dim] or "NHD" [pages, page_size, num_kv_heads, head_dim].
    alignment_bytes: 1, 2, 4, 8 or 16; None stands for what a compact cache has. Strides are otherwise free, the last is 1.
    """

    order: Literal["HND", "NHD"]
    alignment_bytes: int | None = None

    HND: ClassVar[KVLayout]
    NHD: ClassVar[KVLayout]

    def __post_init__(self) -> None:
        if self.order not in ("HND", "NHD"):
            raise InvalidProblem("layout.order", self.order, 'must be "HND" or "NHD"')
        _check_alignment("layout.alignment_bytes", self.alignment_bytes, CACHE_ALIGNMENTS)

    def with_alignment(self, alignment_bytes: int) -> KVLayout:
        """The same order with strides and pointers that are multiples of `alignment_bytes`."""
        return replace(self, alignment_bytes=alignment_bytes)


KVLayout.HND = KVLayout("HND")
KVLayout.NHD = KVLayout("NHD")


@dataclass(frozen=True)
class DecodeProblem:
    """What variants, heuristics and tuned plans see of a descriptor: one query row a request over a cache.

    page_size: 0 when the cache is contiguous. kv_dtype, v_dtype: what K and V are stored as. vector_bytes: the largest
    power of two, at most 16, that divides a row of each cache, its strides and its pointers. max_seq_len: a hint for the
    choice of a configuration; None when unknown.
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

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_head_dim(self) -> int:
        """head_dim as the tensor-core variants pad it."""
        return padded_head_dim(self.head_dim, min(2, self.kv_dtype.element_bytes, self.v_dtype.element_bytes))

    @property
    def has_8_bits(self) -> bool:
        """Whether K or V is stored in 8 bits."""
        return 1 in (self.kv_dtype.element_bytes, self.v_dtype.element_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, and of their scales, of one token and KV head."""
        scales = sum(scale.dtype.itemsize for scale in (self.k_scale, self.v_scale) if scale.granularity == "token")
        return self.head_dim * (self.kv_dtype.element_bytes + self.v_dtype.element_bytes) + scales

    def units(self, unit_heads: int) -> int:
        """Units of work of a row: `unit_heads` KV heads and at most TILE_M of their query heads each."""
        return self.num_kv_heads // unit_heads * m_tiles(self.group_size * unit_heads)

    @property
    def element_type(self) -> str:
        """The short name of q's dtype: "f32", "f16" or "bf16"."""
        return QUERY_DTYPES[self.q_dtype].value

    @property
    def cache_type(self) -> str:
        """The short name of what K and V are stored as: "int8", or "e4m3/f16" where they differ."""
        return cache_type(self.kv_dtype, self.v_dtype)

    def __str__(self) -> str:
        cache = f"page_size {self.page_size}, {self.table_format} table" if self.source == "paged" else "contiguous"
        scales = [f", {name} {scale}" for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)) if scale]
        return (
            f"decode, batch {self.batch_size}, heads {self.num_heads}/{self.num_kv_heads}, head_dim {self.head_dim}, {cache}, "
            f"q {self.element_type}, cache {self.cache_type}{''.join(scales)}, {self.vector_bytes}-byte aligned"
        )


class _StorageFields:
    """What a descriptor with caches derives from what they are stored as."""

    kv_dtype: KVDtype | None
    v_dtype: KVDtype | None

    def _settle_storage(self, q_dtype: torch.dtype) -> None:
        """One form for equal problems: kv_dtype is never None, and v_dtype always where it is kv_dtype."""
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", QUERY_DTYPES[q_dtype])
        if self.v_dtype == self.kv_dtype:
            object.__setattr__(self, "v_dtype", None)

    def _stored(self, q_dtype: torch.dtype) -> tuple[KVDtype, KVDtype]:
        """What K and V are stored as, never None."""
        kv_dtype = self.kv_dtype or QUERY_DTYPES[q_dtype]
        return kv_dtype, self.v_dtype or kv_dtype


class _DecodeFields(_StorageFields):
    """What both decode descriptors derive from their fields."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float | None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The factor on q . k: softmax_scale, or head_dim ** -0.5."""
        return self.head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)

    def _storage(self, q_dtype: torch.dtype, alignment_bytes: int | None) -> tuple[KVDtype, KVDtype, int]:
        """(kv_dtype, v_dtype, vector_bytes) of the problem."""
        kv_dtype, v_dtype = self._stored(q_dtype)
        row_bytes = self.head_dim * math.gcd(kv_dtype.element_bytes, v_dtype.element_bytes)
        return kv_dtype, v_dtype, vector_bytes(row_bytes, alignment_bytes)


@dataclass(frozen=True)
class PagedDecodeDescriptor(_DecodeFields):
    """Decode attention of one query row a request over a paged cache. Frozen and hashable: it is a cache key.

    q and out are [batch_size, num_heads, head_dim] of q_dtype; lse is f32 [batch_size, num_heads] in `lse_base`. kv_dtype
    is what K and V are stored as, q's dtype by default; v_dtype is V's where it differs. k_scale, v_scale: what scale tensors
    a run is given. num_pages, when given, is what both caches must have; max_pages, when given, is what a row's table
    may have: the most columns of a dense table, and batch_size * max_pages the most indices of a CSR table. max_seq_len is
    a hint for the choice of a configuration, never a bound on correctness. softmax_scale defaults to head_dim ** -0.5.
    batch_size 0 is legal.

    Raises InvalidProblem for an extent, a divisibility, a scale or a choice that breaks its rule, in this order, then
    Unsupported for a q_dtype that no variant knows.
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

    def __post_init__(self) -> None:
        _check_extent("batch_size", self.batch_size, least=0)
        for name in ("num_heads", "num_kv_heads", "head_dim", "page_size"):
            _check_extent(name, getattr(self, name))
        for name in ("num_pages", "max_pages", "max_seq_len"):
            if getattr(self, name) is not None:
                _check_extent(name, getattr(self, name))
        _check_group(self.num_heads, self.num_kv_heads)
        if not isinstance(self.layout, KVLayout):
            raise InvalidProblem("layout", self.layout, "must be a KVLayout")
        if self.table_format not in ("dense", "csr"):
            raise InvalidProblem("table_format", self.table_format, 'must be "dense" or "csr"')
        _check_softmax(self.softmax_scale, self.lse_base)
        _check_storage(self.kv_dtype, self.v_dtype, self.k_scale, self.v_scale)
        _check_query_dtype("q_dtype", self.q_dtype)
        self._settle_storage(self.q_dtype)

    @property
    def problem(self) -> DecodeProblem:
        """What the choice of a kernel depends on."""
        kv_dtype, v_dtype, vector = self._storage(self.q_dtype, self.layout.alignment_bytes)
        return DecodeProblem(
            source="paged",
            batch_size=self.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            q_dtype=self.q_dtype,
            kv_dtype=kv_dtype,
            v_dtype=v_dtype,
            table_format=self.table_format,
            vector_bytes=vector,
            max_seq_len=self.max_seq_len,
            lse_base=self.lse_base,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


@dataclass(frozen=True)
class FlashDecodingDescriptor(_DecodeFields):
    """Decode attention of one query row a request over a contiguous cache.

    q and out are [batch_size, num_heads, head_dim] of `dtype`, k and v [batch_size, num_kv_heads, seq_len, head_dim], any
    strides with a unit last one. seq_len is what both caches of every run must have; None lets each run have another, and
    max_seq_len is then a hint for the choice of a configuration, never a bound on correctness. kv_dtype, v_dtype, k_scale and
    v_scale are as in PagedDecodeDescriptor. batch_size 0 and seq_len 0 are legal.

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

    def __post_init__(self) -> None:
        _check_query_dtype("dtype", self.dtype)
        for name, least in (("batch_size", 0), ("num_heads", 1), ("num_kv_heads", 1), ("seq_len", 0), ("head_dim", 1)):
            if name != "seq_len" or self.seq_len is not None:
                _check_extent(name, getattr(self, name), least)
        if self.max_seq_len is not None:
            if self.seq_len is not None:
                raise InvalidProblem("max_seq_len", self.max_seq_len, f"must be None beside seq_len = {self.seq_len}")
            _check_extent("max_seq_len", self.max_seq_len)
        _check_group(self.num_heads, self.num_kv_heads)
        _check_softmax(self.softmax_scale, self.lse_base)
        _check_alignment("alignment_bytes", self.alignment_bytes, CACHE_ALIGNMENTS)
        _check_storage(self.kv_dtype, self.v_dtype, self.k_scale, self.v_scale)
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
        kv_dtype, v_dtype, vector = self._storage(self.dtype, self.alignment_bytes)
        return DecodeProblem(
            source="contiguous",
            batch_size=self.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=0,
            q_dtype=self.dtype,
            kv_dtype=kv_dtype,
            v_dtype=v_dtype,
            table_format="none",
            vector_bytes=vector,
            max_seq_len=self.max_seq_len if self.seq_len is None else self.seq_len,
            lse_base=self.lse_base,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


def cache_type(k_stored: KVDtype, v_stored: KVDtype) -> str:
    """The short name of what K and V are stored as."""
    return k_stored.value if k_stored == v_stored else f"{k_stored.value}/{v_stored.value}"


def vector_bytes(row_bytes: int, alignment_bytes: int | None = None) -> int:
    """Bytes that one load may move: what divides a cache row and, when given, the strides' alignment; at most 16."""
    return math.gcd(alignment_bytes or MAX_VECTOR_BYTES, row_bytes)
