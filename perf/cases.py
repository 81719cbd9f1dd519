"""The shapes that are measured: named cases, the sets they form, and the bars that some of them have to meet.

A name says everything about its case, in FlashInfer's scheme: gqa_paged_decode_h32_kv8_d128_ps16_bf16_b64_l8k.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Literal

Dtype = Literal["bf16", "f16"]
Layout = Literal["HND", "NHD"]
TableFormat = Literal["dense", "csr", "none"]
DTYPES: tuple[Dtype, ...] = ("bf16", "f16")
LAYOUTS: tuple[Layout, ...] = ("HND", "NHD")
TABLE_FORMATS: tuple[TableFormat, ...] = ("dense", "csr")

ELEMENT_BYTES = {"bf16": 2, "f16": 2}


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
    """One decode step: a query token for each row, over a paged or contiguous cache.

    page_size is 0 and table_format "none" for a contiguous cache, whose rows all have one length.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    lengths: Rows | Spread
    dtype: Dtype = "bf16"
    table_format: TableFormat = "dense"
    layout: Layout = "HND"

    @property
    def source(self) -> str:
        return "paged" if self.page_size else "contiguous"

    @property
    def name(self) -> str:
        page = f"_ps{self.page_size}" if self.page_size else ""
        shape = f"gqa_{self.source}_decode_h{self.num_heads}_kv{self.num_kv_heads}_d{self.head_dim}{page}"
        options = "".join(f"_{o}" for o in (self.layout.lower(), self.table_format) if o in ("nhd", "csr"))
        return f"{shape}_{self.dtype}{options}_{self.lengths.label}"

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each row."""
        return self.lengths.tokens()

    @property
    def batch_size(self) -> int:
        return len(self.tokens())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V vectors that a step has to read: the live tokens only."""
        return 2 * sum(self.tokens()) * self.num_kv_heads * self.head_dim * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Bar:
    """What a case must reach: at most `limit` times the read kernel's time and `plus` us ("ratio"), or `limit` us ("us")."""

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


K = 1024
# heads, KV heads, head_dim, batch, tokens, bar of issue 2; for pages of 16 and 64 and both dtypes
ISSUE2_SHAPES = (
    (32, 8, 128, 64, 8 * K, Bar("ratio", 1.06)),
    (32, 8, 128, 128, 4 * K, Bar("ratio", 1.06)),
    (32, 32, 128, 32, 2 * K, Bar("ratio", 1.08)),
    (16, 8, 256, 32, 4 * K, Bar("ratio", 1.08)),
    (32, 8, 64, 32, 4 * K, Bar("ratio", 1.16)),
    (8, 1, 128, 64, 8 * K, Bar("ratio", 1.16)),
    (32, 8, 128, 8, 8 * K, Bar("ratio", 1.16)),
    (32, 8, 128, 1, 128 * K, Bar("ratio", 1.12)),
    (32, 8, 128, 1, 8 * K, Bar("us", 16.0)),
)
ISSUE2_PAGES = ((1, Bar("ratio", 1.5)), (8, Bar("ratio", 1.15)))  # 32 rows of 4k, 32/8/128

# heads, KV heads, head_dim, batch, tokens, us of issue 3; for bf16, pages of 16 and 64 and contiguous
ISSUE3_SHAPES = (
    (32, 8, 128, 1, K, 6.5),
    (32, 8, 128, 1, 8 * K, 12.5),
    (32, 8, 128, 1, 32 * K, 39.0),
    (32, 8, 128, 1, 128 * K, 126.0),
    (32, 8, 128, 8, 8 * K, 66.0),
    (64, 8, 128, 16, 4 * K, 66.0),
    (32, 8, 128, 64, K, 66.0),
    (8, 1, 128, 64, 8 * K, 66.0),
    (32, 8, 64, 32, 4 * K, 66.0),
)
RAGGED_HEADS = ((32, 8), (8, 1))
RAGGED_BAR = Bar("ratio", 1.08, 3.0)
LOG_UNIFORM_BAR = Bar("ratio", 318 / 304)  # 32/8 heads

HEADS: tuple[tuple[int, int, int], ...] = (
    *((32, 32, 128), (32, 4, 128), (8, 1, 128), (64, 8, 128), (28, 4, 128), (40, 8, 128), (12, 2, 128), (64, 4, 128)),
    *((128, 8, 128), (64, 8, 64), (16, 8, 256), (8, 4, 256)),
)
HEADS_LENGTHS = (fixed(1, K), fixed(1, 32 * K), fixed(16, 4 * K), fixed(64, 4 * K))

RAGGED_LENGTHS: tuple[Rows | Spread, ...] = (
    fixed(64, 512),
    Rows(((32, 128), (32, 4 * K))),
    Rows(((1, 16 * K), (15, 64))),
    Rows(((1, 64 * K), (31, 4 * K))),
    Rows(((2, 32 * K), (30, 4 * K))),
    Rows(((1, 128 * K), (31, 4 * K))),
    Spread("uniform", 64, 1, 8 * K),
    Spread("loguniform", 64, 128, 32 * K),
)


def issue2_cases() -> dict[Case, Bar]:
    """The cases of issue 2 with their bars."""
    cases = {
        Case(heads, kv_heads, dim, page, fixed(batch, tokens), dtype): bar
        for dtype in DTYPES
        for page in (16, 64)
        for heads, kv_heads, dim, batch, tokens, bar in ISSUE2_SHAPES
    }
    for dtype in DTYPES:
        cases |= {Case(32, 8, 128, page, fixed(32, 4 * K), dtype): bar for page, bar in ISSUE2_PAGES}
    return cases


def issue3_cases() -> dict[Case, Bar]:
    """The cases of issue 3 with their bars."""
    cases = {
        Case(heads, kv_heads, dim, page, fixed(batch, tokens), table_format="dense" if page else "none"): Bar("us", limit)
        for page in (16, 64, 0)
        for heads, kv_heads, dim, batch, tokens, limit in ISSUE3_SHAPES
    }
    for page in (16, 64):
        cases |= {Case(*heads, 128, page, rows): RAGGED_BAR for heads in RAGGED_HEADS for rows in RAGGED_LENGTHS}
        cases[Case(32, 8, 128, page, RAGGED_LENGTHS[-1])] = LOG_UNIFORM_BAR
    return cases


@functools.cache
def all_bars() -> dict[Case, Bar]:
    """The newest bar of each case that has one."""
    return issue2_cases() | issue3_cases()


def bar_of(case: Case) -> Bar | None:
    """What a case must reach, if anything."""
    return all_bars().get(case)


def case_sets() -> dict[str, tuple[Case, ...]]:
    """Every set of cases by its name."""
    batches, lengths = (1, 8, 32, 64, 128, 256), (512, K, 4 * K, 8 * K, 16 * K, 32 * K)
    core = [fixed(batch, tokens) for batch, tokens in product(batches, lengths)] + [fixed(1, 128 * K), fixed(8, 128 * K)]
    gqa = Case(32, 8, 128, 16, fixed(1, K))
    contiguous = ((64, 8 * K), (32, 4 * K), (8, 8 * K), (1, 8 * K), (1, 128 * K))
    return {
        "issue2": tuple(issue2_cases()),
        "issue3": tuple(issue3_cases()),
        "core": tuple(replace(gqa, page_size=page, lengths=rows) for page, rows in product((16, 64), core)),
        "heads": tuple(Case(*heads, 16, rows) for heads, rows in product(HEADS, HEADS_LENGTHS)),
        "pages": tuple(
            replace(gqa, page_size=2**p, lengths=rows) for p, rows in product(range(9), (fixed(32, 4 * K), fixed(1, 16 * K)))
        ),
        "ragged": tuple(Case(*heads, 128, 16, rows) for heads, rows in product(RAGGED_HEADS, RAGGED_LENGTHS)),
        "contiguous": tuple(
            replace(gqa, page_size=0, table_format="none", lengths=fixed(batch, tokens)) for batch, tokens in contiguous
        ),
        "tables": tuple(
            replace(gqa, layout=layout, table_format=table, lengths=fixed(32, 4 * K))
            for layout, table in product(LAYOUTS, TABLE_FORMATS)
        ),
    }


def select_cases(patterns: Iterable[str]) -> list[Case]:
    """The cases that the patterns name, each once: a pattern is a set's name or a glob over the names of all cases.

    Raises ValueError for a pattern that names nothing.
    """
    sets = case_sets()
    everything = {case.name: case for cases in sets.values() for case in cases}
    chosen: dict[str, Case] = {}
    for pattern in patterns:
        matches = sets.get(pattern) or [case for name, case in everything.items() if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(f"cases: {pattern!r} is neither a set ({', '.join(sets)}) nor a glob that matches a case's name")
        chosen |= {case.name: case for case in matches}
    return list(chosen.values())
