"""One case: a shape, the lengths of its rows, what its caches store, and the bar that it may have to meet.

A name says everything about its case, in FlashInfer's scheme: gqa_paged_decode_h32_kv8_d128_ps16_bf16_kve4m3_b64_l8k. That of
an append is kv_append_kv8_d128_ps16_bf16_kve4m3_t8k.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Literal

Operation = Literal["decode", "append"]
Dtype = Literal["bf16", "f16"]
Layout = Literal["HND", "NHD"]
TableFormat = Literal["dense", "csr", "none"]
EightBit = Literal["e4m3", "e5m2", "int8"]
Scale = Literal["tensor", "head", "token", "token-f16"]
DTYPES: tuple[Dtype, ...] = ("bf16", "f16")
LAYOUTS: tuple[Layout, ...] = ("HND", "NHD")
OPERATIONS: tuple[Operation, ...] = ("decode", "append")
READ, COPY = "read", "copy"  # the providers that compute nothing
FLOORS: dict[Operation, str] = {"decode": READ, "append": COPY}  # the one whose time others are divided by
SLOT_BYTES = 8  # of a token's slot
TABLE_FORMATS: tuple[TableFormat, ...] = ("dense", "csr")

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "int8": 1}
SCALE_BYTES = {"tensor": 4, "head": 4, "token": 4, "token-f16": 2}


@dataclass(frozen=True)
class Rows:
    """Lengths given as groups of (rows, tokens), in an order shuffled by `seed`: ((1, 131072), (31, 4096))."""

    groups: tuple[tuple[int, int], ...]
    seed: int = 0

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each row."""
        lengths = [tokens for rows, tokens in self.groups for _ in range(rows)]
        random.Random(self.seed).shuffle(lengths)
        return tuple(lengths)

    @property
    def label(self) -> str:
        if len(self.groups) == 1:
            rows, tokens = self.groups[0]
            return f"b{rows}_l{short(tokens)}"
        return f"b{sum(rows for rows, _ in self.groups)}_" + "+".join(f"{rows}x{short(tokens)}" for rows, tokens in self.groups)


@dataclass(frozen=True)
class Spread:
    """Random lengths of `batch` rows in low..high, both included: uniform, or uniform in the logarithm."""

    kind: Literal["uniform", "loguniform"]
    batch: int
    low: int
    high: int
    seed: int = 0

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each row."""
        draw = random.Random(self.seed)
        if self.kind == "uniform":
            return tuple(draw.randint(self.low, self.high) for _ in range(self.batch))
        return tuple(round(math.exp(draw.uniform(math.log(self.low), math.log(self.high)))) for _ in range(self.batch))

    @property
    def label(self) -> str:
        return f"b{self.batch}_{self.kind}{short(self.low)}-{short(self.high)}"


@dataclass(frozen=True)
class Case:
    """One decode step: a query token for each row, over a paged or contiguous cache. Or one append to a paged cache.

    operation: an append stores one token a row, so that batch_size is the number of tokens; its num_heads is num_kv_heads.
    page_size is 0 and table_format "none" for a contiguous cache, whose rows all have one length. kv_dtype: what K and V are
    stored as where that is not q's dtype. kv_scale: the scales of both, one for the tensor, each KV head, or each token and
    KV head (f32, or f16 where it says so); None: the stored values are the real ones.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    lengths: Rows | Spread
    dtype: Dtype = "bf16"
    table_format: TableFormat = "dense"
    layout: Layout = "HND"
    kv_dtype: EightBit | None = None
    kv_scale: Scale | None = None
    operation: Operation = "decode"

    @property
    def floor(self) -> str:
        """The provider that moves as many bytes and computes nothing."""
        return FLOORS[self.operation]

    @property
    def source(self) -> str:
        return "paged" if self.page_size else "contiguous"

    @property
    def name(self) -> str:
        page = f"_ps{self.page_size}" if self.page_size else ""
        shape = f"kv{self.num_kv_heads}_d{self.head_dim}{page}"
        shape = f"kv_append_{shape}" if self.operation == "append" else f"gqa_{self.source}_decode_h{self.num_heads}_{shape}"
        storage = f"_kv{self.kv_dtype}" if self.kv_dtype else ""
        scale = f"_{self.kv_scale}" if self.kv_scale else ""
        options = "".join(f"_{o}" for o in (self.layout.lower(), self.table_format) if o in ("nhd", "csr"))
        rows = f"t{short(self.batch_size)}" if self.operation == "append" else self.lengths.label
        return f"{shape}_{self.dtype}{storage}{scale}{options}_{rows}"

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each row."""
        return self.lengths.tokens()

    @property
    def batch_size(self) -> int:
        return len(self.tokens())

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, V and their scales that a step has to read: of the live tokens only.

        Of an append: those that it has to read and to write.
        """
        vectors = sum(self.tokens()) * self.num_kv_heads
        scales = {None: 0, "tensor": 1, "head": self.num_kv_heads}.get(self.kv_scale, vectors)
        scale_bytes = scales * SCALE_BYTES[self.kv_scale] if self.kv_scale else 0
        stored = 2 * (vectors * self.head_dim * ELEMENT_BYTES[self.kv_dtype or self.dtype] + scale_bytes)
        if self.operation == "decode":
            return stored
        return stored + 2 * vectors * self.head_dim * ELEMENT_BYTES[self.dtype] + SLOT_BYTES * self.batch_size


@dataclass(frozen=True)
class Bar:
    """What a case must reach: at most `limit` times the time of its floor and `plus` us ("ratio"), or `limit` us ("us")."""

    metric: Literal["ratio", "us"]
    limit: float
    plus: float = 0.0

    def met(self, us: float, read_us: float | None) -> bool | None:
        """Whether `us` meets the bar; None when that needs a time of the read kernel and there is none."""
        if self.metric == "us":
            return us <= self.limit
        return None if read_us is None else us <= self.limit * read_us + self.plus

    def __str__(self) -> str:
        if self.metric == "us":
            return f"{self.limit:g} us"
        return f"{self.limit:g} + {self.plus:g} us" if self.plus else f"{self.limit:g}"


def short(tokens: int) -> str:
    """A length as people write it: 8192 -> "8k", 100 -> "100"."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def fixed(batch: int, tokens: int) -> Rows:
    """`batch` rows of one length."""
    return Rows(((batch, tokens),))


def append_case(tokens: int, **changes: Any) -> Case:
    """An append of so many tokens with 8 heads of 128, bf16, to pages of 16."""
    shape: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "table_format": "none"}
    return Case(**shape | changes, lengths=fixed(tokens, 1), operation="append")
