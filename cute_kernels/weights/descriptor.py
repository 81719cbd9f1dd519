"""The descriptor of attention weights: which of them are asked for, as a frozen and self-validating value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..attention.descriptors import AttentionFields, DecodeProblem
from ..checks.fields import check_extent, check_group, check_modifiers, check_softmax
from ..config.problem import LseBase
from ..config.weights import WeightsType
from ..errors import InvalidProblem
from ..kv.page_table import PAGED
from ..kv.scale import KVScale
from ..kv.types import QUERY_DTYPES, KVDtype, KVLayout, check_layout, check_query_dtype, check_storage

FORMATS = ("dense", "csr", "lengths", "none")
STORE_BYTES = 16  # bytes of weights that one store writes at most


@dataclass(frozen=True)
class AttentionWeightsDescriptor(AttentionFields):
    """The softmax weights of one query row per request, from q, K and the lse that decode returned. Frozen and hashable.

    The weight of a key is exp(score - lse): softmax_scale, k_scale, softcap, alibi and window_left make the score as in decode,
    and lse is f32 [batch_size, num_heads] in lse_base. Sinks need no operand here, since lse includes them: the weights of a row
    and head then sum to 1 minus the sink's weight.

    Every run fully writes the outputs that are asked for here:

    - weights_dtype f32 or q's dtype: weights [batch_size, num_heads, max_seq_len]; None: not written.
    - mean: f32 [batch_size, max_seq_len], the mean of the unrounded weights over the heads.
    - page_mass: f32 [batch_size, max_pages], that mean summed over the keys of each page of a row's table. Needs a paged cache.

    A key at or past a row's length, or before its window, has weight 0. max_seq_len bounds the rows: keys at and past it are
    left out, and a row that has such keys is recorded as a fault of its length. max_pages: the pages of max_seq_len keys.

    table_format: "dense" and "csr" over pages of page_size tokens; with page_size None "lengths" and "none" over a contiguous
    cache [batch_size, num_kv_heads, seq_len, head_dim] ("NHD": the middle axes swapped). num_pages, kv_dtype, layout and k_scale
    are as in PagedDecodeDescriptor. batch_size may be 0.

    Raises InvalidProblem for the field that breaks its rule, then Unsupported for a q_dtype that no variant knows.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int | None
    q_dtype: torch.dtype
    max_seq_len: int
    kv_dtype: KVDtype | None = None
    layout: KVLayout = KVLayout.HND
    table_format: Literal["dense", "csr", "lengths", "none"] = "dense"
    num_pages: int | None = None
    softmax_scale: float | None = None
    lse_base: LseBase = "e"
    k_scale: KVScale = KVScale.NONE
    window_left: int | None = None
    softcap: float | None = None
    alibi: bool = False
    weights_dtype: torch.dtype | None = torch.float32
    mean: bool = False
    page_mass: bool = False

    v_dtype = None  # V is not read
    v_scale = KVScale.NONE
    sinks = False  # lse includes them

    def __post_init__(self) -> None:
        check_extent("batch_size", self.batch_size, least=0)
        for name in ("num_heads", "num_kv_heads", "head_dim", "max_seq_len"):
            check_extent(name, getattr(self, name))
        check_group(self.num_heads, self.num_kv_heads)
        self._check_cache()
        check_softmax(self.softmax_scale, self.lse_base)
        check_storage(self.kv_dtype, None, self.k_scale, KVScale.NONE)
        check_modifiers(self.window_left, None, self.softcap, alibi=self.alibi, mean=self.mean, page_mass=self.page_mass)
        check_query_dtype("q_dtype", self.q_dtype)
        self._check_outputs()
        self._settle_storage(self.q_dtype)

    def _check_cache(self) -> None:
        check_layout(self.layout)
        if self.table_format not in FORMATS:
            raise InvalidProblem("table_format", self.table_format, f"must be one of {', '.join(FORMATS)}")
        if self.table_format in PAGED:
            check_extent("page_size", self.page_size)
            if self.num_pages is not None:
                check_extent("num_pages", self.num_pages)
            return
        for name in ("page_size", "num_pages"):
            if getattr(self, name) is not None:
                raise InvalidProblem(name, getattr(self, name), f'must be None beside table_format = "{self.table_format}"')

    def _check_outputs(self) -> None:
        if self.weights_dtype not in (None, torch.float32, self.q_dtype):
            rule = f"must be torch.float32, q_dtype = {self.q_dtype}, or None where no weights are wanted"
            raise InvalidProblem("weights_dtype", self.weights_dtype, rule)
        if self.page_mass and self.page_size is None:
            raise InvalidProblem(
                "page_mass", True, f'must be False beside table_format = "{self.table_format}": there are no pages'
            )
        if self.weights_dtype is None and not self.mean and not self.page_mass:
            raise InvalidProblem("weights_dtype", None, "must be a dtype where neither mean nor page_mass is asked for")

    @property
    def problem(self) -> DecodeProblem:
        """The problem that the checks of q and K depend on: a decode problem whose V is stored as K is."""
        return self._problem(
            self.q_dtype,
            self.layout.alignment_bytes,
            source="paged" if self.page_size else "contiguous",
            page_size=self.page_size or 0,
            table_format=self.table_format,
            max_seq_len=self.max_seq_len,
            modifiers=self._one_row_modifiers(),
        )

    @property
    def weights_type(self) -> WeightsType:
        """The short name of weights_dtype."""
        names: dict[torch.dtype, WeightsType] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
        return "none" if self.weights_dtype is None else names[self.weights_dtype]

    @property
    def store_bytes(self) -> int:
        """Bytes that strides and pointers of weights are multiples of: the alignment of a compact tensor, at most 16.

        If page_mass is asked for, a CTA writes whole pages, so these bytes also divide a page's weights.
        """
        if self.weights_dtype is None:
            return STORE_BYTES
        pages = self.page_size if self.page_mass and self.page_size else STORE_BYTES
        return math.gcd(STORE_BYTES, self.max_seq_len * self.weights_dtype.itemsize, pages * self.weights_dtype.itemsize)

    def output_dtype(self, name: str) -> torch.dtype:
        """The dtype of an output in `shapes`: weights_dtype for weights, f32 for the sums over heads or keys."""
        return self.weights_dtype if name == "weights" and self.weights_dtype is not None else torch.float32

    @property
    def max_pages(self) -> int:
        """Pages of max_seq_len keys; 0 if the cache has no pages."""
        return -(-self.max_seq_len // self.page_size) if self.page_size else 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The outputs that are asked for, and their shapes."""
        wanted = {
            "weights": (self.weights_dtype is not None, (self.batch_size, self.num_heads, self.max_seq_len)),
            "mean": (self.mean, (self.batch_size, self.max_seq_len)),
            "page_mass": (self.page_mass, (self.batch_size, self.max_pages)),
        }
        return {name: shape for name, (asked, shape) in wanted.items() if asked}

    def __str__(self) -> str:
        of = self.problem
        cache = f"page_size {self.page_size}, {self.table_format} table" if self.page_size else f"contiguous, {self.table_format}"
        outputs = {"weights": f"weights {self.weights_type}", "mean": "mean", "page_mass": "page mass"}
        scale = f", k_scale {self.k_scale}" if self.k_scale else ""
        modifiers = f", {of.modifiers}" if str(of.modifiers) else ""
        return (
            f"attention weights, batch {self.batch_size}, heads {self.num_heads}/{self.num_kv_heads}, head_dim {self.head_dim}, "
            f"up to {self.max_seq_len} keys, {cache}, q {QUERY_DTYPES[self.q_dtype].value}, cache {of.cache_type}{scale}, "
            f"{of.vector_bytes}-byte aligned{modifiers}; {', '.join(outputs[name] for name in self.shapes)}"
        )
