"""Mixed batches: decode rows, verify rows and a chunk of a prompt in one run, and decode rows alone through such a plan."""

from __future__ import annotations

from itertools import product

from perf.cases import PARTS, PLAIN, Bar, Case, EightBit, attention_case, fixed, mixed_case

K = 1024
STORAGE: tuple[tuple[int, EightBit | None], ...] = ((16, None), (16, "e4m3"), (64, None), (64, "e4m3"))  # page size, KV dtype
CHUNK = (1, 8 * K, 2 * K)  # one request, its tokens, and how many of them are new
DECODE_BATCH = ((60, 4 * K, 1), CHUNK)
VERIFY_BATCH = ((60, 4 * K, 4), CHUNK)
THREE_KINDS = ((40, 4 * K, 1), (20, 4 * K, 4), CHUNK)
PARTS_BAR = Bar("ratio", 1.0, beside=PARTS)

# requests, tokens: one query row each, through a plan for as many query rows as a chunk has
DECODE_ROWS = ((60, 4 * K), (64, 8 * K), (64, K), (8, 8 * K), (1, 8 * K))
LARGE_PAGES_TOO = (DECODE_ROWS[1], DECODE_ROWS[-1])
ALONE_BAR = Bar("ratio", 1.0, 1.5, beside=PLAIN)


def mixed_cases() -> dict[Case, Bar | None]:
    """Batches with a chunk, compared with their parts; decode rows alone, with plain decode; the chunk alone, without a bar."""
    found: dict[Case, Bar | None] = {}
    for batch, (page, kv_dtype) in product((DECODE_BATCH, VERIFY_BATCH, THREE_KINDS), STORAGE):
        if batch != THREE_KINDS or page == 16:
            found[mixed_case(*batch, page_size=page, kv_dtype=kv_dtype)] = PARTS_BAR
    for (page, kv_dtype), rows in product(STORAGE[:3], DECODE_ROWS):
        if page == 16 or rows in LARGE_PAGES_TOO:
            found[mixed_case((*rows, 1), max_q_len=CHUNK[2], page_size=page, kv_dtype=kv_dtype)] = ALONE_BAR
    for page, kv_dtype in STORAGE[:2]:
        found[attention_case(fixed(*CHUNK[:2]), q_len=CHUNK[2], page_size=page, kv_dtype=kv_dtype)] = None
    return found
