"""How the elements of a cache are stored, and the axis order and alignment of a paged one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Literal

import torch

from ..checks.fields import check_alignment
from ..errors import InvalidProblem, Unsupported
from .scale import KVScale

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
        """The torch dtypes that a cache of such elements may be handed over as."""
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


@dataclass(frozen=True)
class KVLayout:
    """Axis order of a paged cache, and the alignment that its strides and pointers keep.

    order: "HND" [pages, num_kv_heads, page_size, head_dim] or "NHD" [pages, page_size, num_kv_heads, head_dim].
    alignment_bytes: 1, 2, 4, 8 or 16; None means the alignment of a compact cache. Strides are otherwise free, but the last is
    1. Raises InvalidProblem for any other choice.
    """

    order: Literal["HND", "NHD"]
    alignment_bytes: int | None = None

    HND: ClassVar[KVLayout]
    NHD: ClassVar[KVLayout]

    def __post_init__(self) -> None:
        if self.order not in ("HND", "NHD"):
            raise InvalidProblem("layout.order", self.order, 'must be "HND" or "NHD"')
        check_alignment("layout.alignment_bytes", self.alignment_bytes, CACHE_ALIGNMENTS)

    def with_alignment(self, alignment_bytes: int) -> KVLayout:
        """The same order with strides and pointers that are multiples of `alignment_bytes`."""
        return replace(self, alignment_bytes=alignment_bytes)


KVLayout.HND = KVLayout("HND")
KVLayout.NHD = KVLayout("NHD")


class StorageFields:
    """A base of descriptors with caches: the fields that say what the caches are stored as."""

    kv_dtype: KVDtype | None
    v_dtype: KVDtype | None

    def _settle_storage(self, q_dtype: torch.dtype) -> None:
        """Gives equal problems equal fields: kv_dtype is never None, and v_dtype is None if it equals kv_dtype."""
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", QUERY_DTYPES[q_dtype])
        if self.v_dtype == self.kv_dtype:
            object.__setattr__(self, "v_dtype", None)

    def _stored(self, q_dtype: torch.dtype) -> tuple[KVDtype, KVDtype]:
        """What K and V are stored as, never None."""
        kv_dtype = self.kv_dtype or QUERY_DTYPES[q_dtype]
        return kv_dtype, self.v_dtype or kv_dtype


def check_layout(layout: KVLayout) -> None:
    if not isinstance(layout, KVLayout):
        raise InvalidProblem("layout", layout, "must be a KVLayout")


def check_query_dtype(name: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise InvalidProblem(name, dtype, "must be a torch.dtype")
    if dtype not in QUERY_DTYPES:
        raise Unsupported([f"{name} = {dtype}: must be torch.float16, torch.bfloat16 or torch.float32"])


def check_storage(kv_dtype: KVDtype | None, v_dtype: KVDtype | None, k_scale: KVScale, v_scale: KVScale) -> None:
    for name, dtype in (("kv_dtype", kv_dtype), ("v_dtype", v_dtype)):
        if dtype is not None and not isinstance(dtype, KVDtype):
            raise InvalidProblem(name, dtype, "must be a KVDtype or None")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(scale, KVScale):
            raise InvalidProblem(name, scale, "must be a KVScale")


def cache_type(k_stored: KVDtype, v_stored: KVDtype) -> str:
    """The short name of what K and V are stored as."""
    return k_stored.value if k_stored == v_stored else f"{k_stored.value}/{v_stored.value}"


def vector_bytes(row_bytes: int, alignment_bytes: int | None = None) -> int:
    """Bytes that one load may move: the most that divide a cache row and, if given, the strides' alignment; at most 16."""
    return math.gcd(alignment_bytes or MAX_VECTOR_BYTES, row_bytes)
