"""The descriptor of an append: what is written where, and how it is stored. Frozen and self-validating."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from .append_spec import MAX_HEAD_DIM, ScaleKind, ScaleType, SlotType
from .config import ElementType, StoredType
from .descriptors import QUERY_DTYPES, KVDtype, KVLayout, _check_alignment, _check_extent, vector_bytes
from .errors import InvalidProblem, Unsupported
from .quantize import EIGHT_BIT

APPEND_DTYPES = (torch.float16, torch.bfloat16)
SCALE_KINDS = ("none", "tensor", "head", "token_dynamic")
SCALE_TYPES: dict[torch.dtype, ScaleType] = {torch.float16: "f16", torch.float32: "f32"}
SLOT_TYPES: dict[torch.dtype, SlotType] = {torch.int32: "i32", torch.int64: "i64"}
MAX_ROWS = 2**31 - 128  # (token, head) rows of a launch are counted in int32, with those that its last CTA lacks


@dataclass(frozen=True)
class KVAppendDescriptor:
    """An append of K and V of at most `num_tokens` tokens to a paged cache. Frozen and hashable: it is a cache key.

    num_tokens is a maximum: a run appends as many tokens as its tensors have, since engines append another number each
    step. dtype: of the incoming K and V, f16 or bf16. kv_dtype: how the cache stores them, `dtype` itself (the default), e4m3,
    e5m2 or int8. num_pages, when given, is what both caches must have.

    scales: real value = stored * scale. "none": stored as they are, fp8 saturating. "tensor", "head": divided by a given
    f32 scale, one, or one a KV head. "token_dynamic": one a token and head, computed from it and stored in scale_dtype, f16
    or f32. 16-bit caches take "none" only, int8 any but "none". slot_dtype: of the slot mapping, int32 or int64.
    alignment_bytes: 2, 4, 8 or 16, what strides and pointers of the incoming K and V are multiples of, None for what compact
    ones have; those of the caches are in `layout`.

    Raises InvalidProblem for an extent or a choice that breaks its rule, then Unsupported for a dtype, a pair of
    them or a head_dim above 256.
    """

    num_tokens: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: KVDtype | None = None
    layout: KVLayout = KVLayout.HND
    num_pages: int | None = None
    scales: ScaleKind = "none"
    scale_dtype: torch.dtype = torch.float16
    slot_dtype: torch.dtype = torch.int64
    alignment_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_extent("num_tokens", self.num_tokens, least=0)
        for name in ("num_kv_heads", "head_dim", "page_size"):
            _check_extent(name, getattr(self, name))
        if self.num_pages is not None:
            _check_extent("num_pages", self.num_pages)
        if not isinstance(self.layout, KVLayout):
            raise InvalidProblem("layout", self.layout, "must be a KVLayout")
        if self.scales not in SCALE_KINDS:
            raise InvalidProblem("scales", self.scales, 'must be "none", "tensor", "head" or "token_dynamic"')
        _check_alignment("alignment_bytes", self.alignment_bytes)
        if self.kv_dtype is not None and not isinstance(self.kv_dtype, KVDtype):
            raise InvalidProblem("kv_dtype", self.kv_dtype, "must be a KVDtype or None")
        self._check_dtypes()
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", QUERY_DTYPES[self.dtype])
        self._check_stored()
        rows = self.num_tokens * self.num_kv_heads
        if rows > MAX_ROWS:
            raise Unsupported([f"num_tokens * num_kv_heads = {rows:,}: must be at most 2**31 - 128"])

    def _check_dtypes(self) -> None:
        choices = (("dtype", APPEND_DTYPES), ("scale_dtype", tuple(SCALE_TYPES)), ("slot_dtype", tuple(SLOT_TYPES)))
        for name, _ in choices:
            if not isinstance(getattr(self, name), torch.dtype):
                raise InvalidProblem(name, getattr(self, name), "must be a torch.dtype")
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise Unsupported([f"{name} = {getattr(self, name)}: must be {' or '.join(map(str, allowed))}"])

    def _check_stored(self) -> None:
        """That there is such a conversion, and a kernel's head_dim."""
        if self.stored not in EIGHT_BIT:
            if self.stored != QUERY_DTYPES[self.dtype]:
                raise Unsupported([f"kv_dtype = {self.stored.value}: must be dtype's, {self.element_type}, or have 8 bits"])
            if self.scales != "none":
                raise Unsupported([f'scales = "{self.scales}": must be "none" where kv_dtype = {self.stored.value}'])
        if self.stored is KVDtype.INT8 and self.scales == "none":
            raise Unsupported(['scales = "none": must be "tensor", "head" or "token_dynamic" where kv_dtype = int8'])
        if self.head_dim > MAX_HEAD_DIM:
            raise Unsupported([f"head_dim = {self.head_dim}: must be at most {MAX_HEAD_DIM}"])

    @property
    def stored(self) -> KVDtype:
        """kv_dtype, never None."""
        return self.kv_dtype or QUERY_DTYPES[self.dtype]

    @property
    def element_type(self) -> ElementType:
        """The short name of dtype."""
        return cast(ElementType, QUERY_DTYPES[self.dtype].value)

    @property
    def stored_type(self) -> StoredType:
        """The short name of kv_dtype."""
        return cast(StoredType, self.stored.value)

    @property
    def scale_type(self) -> ScaleType:
        """The short name of the scales' dtype; those that are given are f32."""
        return SCALE_TYPES[self.scale_dtype] if self.scales == "token_dynamic" else "f32"

    @property
    def columns(self) -> int:
        """Neighbouring columns that one access of a kernel moves: what the alignment of K, V and the caches allows, at most 8."""
        incoming = vector_bytes(self.head_dim * self.dtype.itemsize, self.alignment_bytes) // self.dtype.itemsize
        nbytes = self.stored.element_bytes
        return min(incoming, vector_bytes(self.head_dim * nbytes, self.layout.alignment_bytes) // nbytes)

    @property
    def nhd(self) -> bool:
        """Whether the caches are [pages, page_size, num_kv_heads, head_dim]."""
        return self.layout.order == "NHD"

    def __str__(self) -> str:
        return (
            f"append of {self.num_tokens} tokens, KV heads {self.num_kv_heads}, head_dim {self.head_dim}, "
            f"page_size {self.page_size} {self.layout.order}, {self.element_type} to {self.stored_type}, scales {self.scales}"
        )
