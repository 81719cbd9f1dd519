"""Attention of several query rows, and of one row with modified scores: the cases, most important first, and their bars."""

from __future__ import annotations

from itertools import product

from perf.cases import PLAIN, Bar, Case, EightBit, Scale, attention_case, fixed

K = 1024
FA2 = "flashinfer-fa2"
PAGES = (16, 64)
STORAGE: tuple[tuple[EightBit | None, Scale | None], ...] = ((None, None), ("e4m3", None), ("int8", "token-f16"))

# speculative decoding: every request verifies as many new tokens as it has query rows
VERIFY_ROWS = (fixed(64, 8 * K), fixed(8, 8 * K), fixed(64, K), fixed(1, 8 * K))
VERIFY_HEADS = ((32, 8), (8, 1), (64, 8))
VERIFY_LENGTHS = (4, 2, 8, 16, 1)  # query rows per request
FEW_ROWS = 16  # up to so many packed rows should take about as long as one query row
FEW_ROWS_AT = VERIFY_ROWS[:2]
FEW_ROWS_BAR = Bar("ratio", 1.05, beside=PLAIN, peer=FA2)
VERIFY_BAR = Bar("ratio", 1.0, beside=FA2)
# by the bytes of an element: (packed rows, the limit as a factor of one query row plus the read of q's and out's further bytes)
WIDE_LIMITS = {2: ((64, 1.05),), 1: ((32, 1.10), (64, 1.35))}
WIDEST, WIDEST_LIMIT = 128, 1.25  # the same for the longest stream, over 16 bits
SHORTEST_US = 3.0  # for the shortest stream: microseconds more, in place of a factor
RAGGED_LENGTHS = (4, 8, 16)  # query rows per request that are handed over as ragged rows, too: over the first two of VERIFY_ROWS

# batch and tokens of rows of one length, of whose tiles SMs do not get equally many; query rows per request
EQUAL_ROWS = (fixed(4, 1600), fixed(12, K), fixed(6, K), fixed(8, 1000), fixed(5, 2 * K))
EQUAL_LENGTHS = (1, 8, 16)

WINDOW = 1023  # tokens before its own that a row of 32k sees: its time is compared with 1k without a window
WINDOW_BAR = Bar("ratio", 1.15, beside=PLAIN)
LARGE_ROWS = (fixed(64, 8 * K), fixed(128, 4 * K))
ONE_ROW: tuple[dict[str, object], ...] = ({"softcap": 50.0}, {"alibi": True}, {"sinks": True})
ONE_ROW_BARS = {2: Bar("ratio", 1.02, beside=PLAIN), 1: Bar("ratio", 1.05, beside=PLAIN)}  # by the bytes of an element
TREE_ROWS = (fixed(8, 8 * K), fixed(64, K))
TREES = (32, 16)  # new tokens


def verify_cases() -> dict[Case, Bar | None]:
    """Several query rows, causal: first the cases compared with one row, then other heads and lengths; pages of 64 last."""
    found: dict[Case, Bar | None] = {}
    for page, (kv_dtype, kv_scale), heads, rows, q_len in product(PAGES, STORAGE, VERIFY_HEADS, VERIFY_ROWS, VERIFY_LENGTHS):
        shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "page_size": page}
        case = attention_case(rows, **shape, kv_dtype=kv_dtype, kv_scale=kv_scale, q_len=q_len)
        found[case] = verify_bar(case)
    for rows, (kv_dtype, kv_scale), q_len in product(VERIFY_ROWS[:2], STORAGE, RAGGED_LENGTHS):
        case = attention_case(rows, kv_dtype=kv_dtype, kv_scale=kv_scale, q_len=q_len, query="ragged")
        found[case] = verify_bar(case)
    order = sorted(found, key=lambda case: (case.page_size, found[case] != FEW_ROWS_BAR, bool(case.query)))
    return {case: found[case] for case in order}


def equal_cases() -> tuple[Case, ...]:
    """One or several query rows over short rows of one length, whose tiles the SMs cannot share equally; pages of 16."""
    return tuple(
        attention_case(rows, kv_dtype=kv_dtype, kv_scale=kv_scale, q_len=q_len)
        for (kv_dtype, kv_scale), q_len, rows in product(STORAGE, EQUAL_LENGTHS, EQUAL_ROWS)
    )


def verify_bar(case: Case) -> Bar | None:
    """The bar of a verify case: one query row's time if one pass should suffice, and the peer's time; the peer has no int8."""
    peer = None if case.kv_dtype == "int8" else FA2
    if peer and case.packed_rows <= FEW_ROWS and case.lengths in FEW_ROWS_AT:
        return FEW_ROWS_BAR
    limit = wide_limit(case)
    if limit is None:
        return VERIFY_BAR if peer else None
    added = 2 * case.query_bytes * (1 - 1 / case.q_rows) / case.kv_bytes
    if case.lengths == VERIFY_ROWS[-1]:
        return Bar("ratio", 1.0, SHORTEST_US, beside=PLAIN, peer=peer, read_share=added)
    return Bar("ratio", limit, beside=PLAIN, peer=peer, read_share=added)


def wide_limit(case: Case) -> float | None:
    """The factor for a case's packed rows; None if they have none."""
    steps = WIDE_LIMITS[1 if case.kv_dtype else 2]
    if case.kv_dtype is None and case.lengths == VERIFY_ROWS[0]:
        steps = (*steps, (WIDEST, WIDEST_LIMIT))
    return next((limit for rows, limit in steps if case.packed_rows <= rows), None)


def modifier_cases() -> dict[Case, Bar | None]:
    """A window, a soft cap, ALiBi and sinks for one query row, then a tree of drafts; in bf16 and e4m3."""
    kv_dtypes: tuple[EightBit | None, ...] = (None, "e4m3")
    found: dict[Case, Bar | None] = {}
    for page in PAGES:
        for kv_dtype in kv_dtypes:
            stored = {"kv_dtype": kv_dtype, "page_size": page}
            found[attention_case(fixed(64, 32 * K), window_left=WINDOW, **stored)] = WINDOW_BAR
        for rows, modifier, kv_dtype in product(LARGE_ROWS, ONE_ROW, kv_dtypes):
            stored = {"kv_dtype": kv_dtype, "page_size": page}
            found[attention_case(rows, **modifier, **stored)] = ONE_ROW_BARS[1 if kv_dtype else 2]
        for q_len, rows, kv_dtype in product(TREES, TREE_ROWS, kv_dtypes):
            found[attention_case(rows, q_len=q_len, tree_mask=True, kv_dtype=kv_dtype, page_size=page)] = None
    return found
