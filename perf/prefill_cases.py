"""Long queries: whole prompts, and chunks of prompts over tokens that are cached already; the tensor core is their limit."""

from __future__ import annotations

from itertools import product

from perf.cases import WIDE, Bar, Case, EightBit, Rows, Scale, attention_case, fixed

K = 1024
FA3, FA4 = "fa3", "fa4"
LENGTHS = (4 * K, 8 * K, 16 * K)
PAGES = (16, 64, 128)
CONTIGUOUS: dict[str, object] = {"page_size": 0, "table_format": "none"}
PROMPT_BAR = Bar("ratio", 1.0, beside=FA4)
PAGED_BARS = {16: Bar("ratio", 1 / 1.07, beside=FA4), 64: Bar("ratio", 1 / 1.07, beside=FA4), 128: None}
SMALL_PAGE = 1  # no TMA box brings it
OTHER_HEADS = ((64, 8, 64), (32, 8, 96), (16, 8, 256))
EIGHT_BIT_BAR = Bar("ratio", 1 / 0.85, beside=WIDE)
STORAGE: tuple[tuple[EightBit | None, Scale | None], ...] = (("e4m3", None), ("int8", "token-f16"))

# (requests with all their tokens, including those cached before; new tokens of each request)
CHUNKS: tuple[tuple[Rows, int], ...] = ((fixed(1, 64 * K), 512), (fixed(1, 32 * K), 2 * K), (fixed(16, 2 * K), 512))
# (tokens of the one request, new ones among them, query heads, KV heads): their query blocks are no whole number of rounds of SMs
UNEVEN = (
    (64 * K, 384, 32, 8),
    (8 * K, 320, 32, 8),
    (32 * K, 512, 40, 8),
    (8 * K, 512, 40, 8),
    (16 * K, 512, 48, 8),
    (16 * K, 512, 28, 4),
)
CHUNK_BAR = Bar("ratio", 1 / 1.05, beside=FA4, peer=FA3)


def prefill_cases() -> dict[Case, Bar | None]:
    """Prompts of one request, causal: contiguous and over pages, other head_dims, and 8-bit caches.

    Pages of one token have no bar: they are compared with another case of the set.
    """
    found: dict[Case, Bar | None] = {}
    for tokens in LENGTHS:
        found[attention_case(fixed(1, tokens), q_len=tokens, **CONTIGUOUS)] = PROMPT_BAR
        for page in PAGES:
            found[attention_case(fixed(1, tokens), q_len=tokens, page_size=page)] = PAGED_BARS[page]
    found[attention_case(fixed(1, 8 * K), q_len=8 * K, page_size=SMALL_PAGE)] = None
    for heads, kv_heads, head_dim in OTHER_HEADS:
        shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
        found[attention_case(fixed(1, 8 * K), q_len=8 * K, **shape, **CONTIGUOUS)] = PROMPT_BAR
    for tokens, (kv_dtype, kv_scale), page in product(LENGTHS[1:], STORAGE, PAGES[:2]):
        case = attention_case(fixed(1, tokens), q_len=tokens, page_size=page, kv_dtype=kv_dtype, kv_scale=kv_scale)
        found[case] = EIGHT_BIT_BAR
    return found


def chunk_cases() -> dict[Case, Bar | None]:
    """Chunks of prompts over pages: bf16, then 8-bit caches, of which the longest have a bar."""
    found: dict[Case, Bar | None] = {}
    for (kv_dtype, kv_scale), (rows, q_len), page in product(((None, None), *STORAGE), CHUNKS, PAGES[:2]):
        case = attention_case(rows, q_len=q_len, page_size=page, kv_dtype=kv_dtype, kv_scale=kv_scale)
        of_eight_bits = EIGHT_BIT_BAR if rows == CHUNKS[0][0] else None
        found[case] = of_eight_bits if kv_dtype else CHUNK_BAR
    return found


def uneven_cases() -> dict[Case, Bar | None]:
    """Chunks of UNEVEN over pages of 16, in bf16, and the first of them over 8-bit caches, which have no bar."""
    found: dict[Case, Bar | None] = {}
    for tokens, q_len, num_heads, num_kv_heads in UNEVEN:
        found[attention_case(fixed(1, tokens), q_len=q_len, num_heads=num_heads, num_kv_heads=num_kv_heads)] = CHUNK_BAR
    tokens, q_len, *_ = UNEVEN[0]
    for kv_dtype, kv_scale in STORAGE:
        found[attention_case(fixed(1, tokens), q_len=q_len, kv_dtype=kv_dtype, kv_scale=kv_scale)] = None
    return found
