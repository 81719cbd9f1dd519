"""The sets of cases that are measured, and the bars of the cases that have one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product

from perf.attention_cases import equal_cases, modifier_cases, verify_cases
from perf.backward import backward_cases
from perf.cases import DTYPES, LAYOUTS, TABLE_FORMATS, Bar, Case, EightBit, Rows, Scale, Spread, append_case, fixed
from perf.f32_cases import f32_cases
from perf.mixed_cases import mixed_cases
from perf.prefill_cases import chunk_cases, prefill_cases, uneven_cases
from perf.weights import weights_cases

K = 1024
LOG_UNIFORM = Spread("loguniform", 64, 128, 32 * K)
# heads, KV heads, head_dim, batch, tokens, bar; for pages of 16 and 64 and both dtypes
THROUGHPUT_SHAPES = (
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
SMALL_PAGES = ((1, Bar("ratio", 1.5)), (8, Bar("ratio", 1.15)))  # 32 rows of 4k, 32/8/128

# heads, KV heads, head_dim, batch, tokens, most us; for bf16, pages of 16 and 64 and contiguous
LATENCY_SHAPES = (
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

# heads, KV heads, head_dim, rows, bar; for a bf16 q, pages of 16 and 64 and each of STORAGE
EIGHT_BIT_SHAPES: tuple[tuple[int, int, int, Rows | Spread, Bar], ...] = (
    (32, 8, 128, fixed(64, 8 * K), Bar("ratio", 1.06)),
    (32, 8, 128, fixed(128, 4 * K), Bar("ratio", 1.06)),
    (32, 32, 128, fixed(32, 2 * K), Bar("ratio", 1.08)),
    (16, 8, 256, fixed(32, 4 * K), Bar("ratio", 1.06)),
    (32, 8, 128, fixed(8, 8 * K), Bar("us", 36.0)),
    (64, 8, 128, fixed(16, 4 * K), Bar("us", 36.0)),
    (32, 8, 128, fixed(64, K), Bar("us", 36.0)),
    (8, 1, 128, fixed(64, 8 * K), Bar("us", 36.0)),
    (32, 8, 128, fixed(1, 8 * K), Bar("us", 9.5)),
    (32, 8, 128, fixed(1, 128 * K), Bar("us", 67.0)),
    (32, 8, 128, LOG_UNIFORM, Bar("ratio", 166 / 154)),  # relative to the read of the lengths it was measured with
)
STORAGE: tuple[tuple[EightBit, Scale | None], ...] = (("e4m3", None), ("e5m2", None), ("int8", "token-f16"))

# tokens and bar of an append with 8 heads of 128; for each of APPEND_STORAGE, HND and NHD
APPEND_TOKENS = ((64, Bar("us", 4.0)), (8 * K, Bar("ratio", 1 / 0.85)))
APPEND_STORAGE: tuple[tuple[EightBit | None, Scale | None], ...] = ((None, None), ("e4m3", None), ("int8", "token-f16"))

# heads, KV heads, head_dim, rows: shapes on which FlashAttention-3, FlashInfer and XQA were measured, in bf16 and e4m3
PEERS_SHAPES: tuple[tuple[int, int, int, Rows | Spread], ...] = (
    *((32, 8, 128, rows) for rows in (fixed(1, 8 * K), fixed(1, 128 * K), fixed(8, 8 * K))),
    (64, 8, 128, fixed(16, 4 * K)),
    *((32, 8, 128, rows) for rows in (fixed(64, K), fixed(64, 8 * K), fixed(128, 4 * K))),
    (32, 32, 128, fixed(32, 2 * K)),
    (8, 1, 128, fixed(64, 8 * K)),
    (32, 8, 64, fixed(32, 4 * K)),
    (16, 8, 256, fixed(32, 4 * K)),
    (32, 8, 128, LOG_UNIFORM),
)

# heads, KV heads, head_dim, rows, bar in bf16: many query heads on a KV head
MQA_SHAPES: tuple[tuple[int, int, int, Rows | Spread, Bar], ...] = (
    (71, 1, 64, fixed(32, 2560), Bar("us", 13.0)),
    (64, 1, 128, fixed(16, 8 * K), Bar("ratio", 1.6)),
    (128, 1, 128, fixed(16, 8 * K), Bar("ratio", 1.6)),
    (24, 2, 128, fixed(9, 20 * K), Bar("ratio", 1.07, 1.5)),
    (64, 4, 128, fixed(16, 9 * K), Bar("ratio", 1.07, 1.5)),
)

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
    LOG_UNIFORM,
)


def throughput_cases() -> dict[Case, Bar]:
    """Rows of one length, compared with the read of their bytes."""
    cases = {
        Case(heads, kv_heads, dim, page, fixed(batch, tokens), dtype): bar
        for dtype in DTYPES
        for page in (16, 64)
        for heads, kv_heads, dim, batch, tokens, bar in THROUGHPUT_SHAPES
    }
    for dtype in DTYPES:
        cases |= {Case(32, 8, 128, page, fixed(32, 4 * K), dtype): bar for page, bar in SMALL_PAGES}
    return cases


def latency_cases() -> dict[Case, Bar]:
    """Short steps of rows of one length, in microseconds: pages of 16 and 64, and contiguous."""
    return {
        Case(heads, kv_heads, dim, page, fixed(batch, tokens), table_format="dense" if page else "none"): Bar("us", limit)
        for page in (16, 64, 0)
        for heads, kv_heads, dim, batch, tokens, limit in LATENCY_SHAPES
    }


def ragged_cases() -> dict[Case, Bar]:
    """Rows of unequal lengths, and short rows, compared with the read of their bytes."""
    cases: dict[Case, Bar] = {}
    for page in (16, 64):
        cases |= {Case(*heads, 128, page, rows): RAGGED_BAR for heads in RAGGED_HEADS for rows in RAGGED_LENGTHS}
        cases[Case(32, 8, 128, page, LOG_UNIFORM)] = LOG_UNIFORM_BAR
    return cases


def eight_bit_cases() -> dict[Case, Bar]:
    """Caches of 8 bits under a 16-bit query."""
    return {
        Case(heads, kv_heads, dim, page, rows, kv_dtype=kv_dtype, kv_scale=kv_scale): bar
        for kv_dtype, kv_scale in STORAGE
        for page in (16, 64)
        for heads, kv_heads, dim, rows, bar in EIGHT_BIT_SHAPES
    }


def mqa_cases() -> dict[Case, Bar | None]:
    """Groups of 12 to 128 query heads per KV head, over 16 bits and over e4m3, which has no bar."""
    kv_dtypes: tuple[EightBit | None, ...] = (None, "e4m3")
    return {
        Case(heads, kv_heads, dim, 16, rows, kv_dtype=kv_dtype): None if kv_dtype else bar
        for kv_dtype, (heads, kv_heads, dim, rows, bar) in product(kv_dtypes, MQA_SHAPES)
    }


def append_cases() -> dict[Case, Bar]:
    """The appends with their bars: 64 tokens in 4 us, 8,192 at 85% of a copy's bandwidth."""
    return {
        append_case(tokens, kv_dtype=kv_dtype, kv_scale=kv_scale, layout=layout): bar
        for (kv_dtype, kv_scale), layout, (tokens, bar) in product(APPEND_STORAGE, LAYOUTS, APPEND_TOKENS)
    }


def peers_cases() -> tuple[Case, ...]:
    """Our kernels next to the peers: over a 16-bit cache and an e4m3 cache without scales."""
    kv_dtypes: tuple[EightBit | None, ...] = (None, "e4m3")
    return tuple(Case(*shape[:3], page, shape[3], kv_dtype=d) for shape, d, page in product(PEERS_SHAPES, kv_dtypes, (16, 64)))


@functools.cache
def all_bars() -> dict[Case, Bar]:
    """The newest bar of each case that has one."""
    some = {
        **verify_cases(),
        **modifier_cases(),
        **mqa_cases(),
        **prefill_cases(),
        **chunk_cases(),
        **uneven_cases(),
        **mixed_cases(),
        **weights_cases(),
        **f32_cases(),
        **backward_cases(),
    }
    attention = {case: bar for case, bar in some.items() if bar is not None}
    return throughput_cases() | latency_cases() | ragged_cases() | eight_bit_cases() | append_cases() | attention


def bar_of(case: Case) -> Bar | None:
    """The bar of a case, if it has one."""
    return all_bars().get(case)


def case_sets() -> dict[str, tuple[Case, ...]]:
    """Every set of cases by its name."""
    batches, lengths = (1, 8, 32, 64, 128, 256), (512, K, 4 * K, 8 * K, 16 * K, 32 * K)
    core = [fixed(batch, tokens) for batch, tokens in product(batches, lengths)] + [fixed(1, 128 * K), fixed(8, 128 * K)]
    gqa = Case(32, 8, 128, 16, fixed(1, K))
    contiguous = ((64, 8 * K), (32, 4 * K), (8, 8 * K), (1, 8 * K), (1, 128 * K))
    return {
        "throughput": tuple(throughput_cases()),
        "latency": tuple(latency_cases()),
        "ragged": tuple(ragged_cases()),
        "eight_bit": tuple(eight_bit_cases()),
        "append": tuple(append_cases()),
        "verify": tuple(verify_cases()),
        "equal": equal_cases(),
        "modifiers": tuple(modifier_cases()),
        "mqa": tuple(mqa_cases()),
        "f32": tuple(f32_cases()),
        "prefill": tuple(prefill_cases()),
        "chunks": tuple(chunk_cases()),
        "uneven": tuple(uneven_cases()),
        "mixed": tuple(mixed_cases()),
        "weights": tuple(weights_cases()),
        "backward": tuple(backward_cases()),
        "peers": peers_cases(),
        "core": tuple(
            replace(gqa, page_size=page, lengths=rows, kv_dtype=kv_dtype, kv_scale=kv_scale)
            for (kv_dtype, kv_scale), page, rows in product(((None, None), *STORAGE), (16, 64), core)
        ),
        "heads": tuple(Case(*heads, 16, rows) for heads, rows in product(HEADS, HEADS_LENGTHS)),
        "pages": tuple(
            replace(gqa, page_size=2**p, lengths=rows) for p, rows in product(range(9), (fixed(32, 4 * K), fixed(1, 16 * K)))
        ),
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
