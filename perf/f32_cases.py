"""q, caches and out in f32: decode, compared with the read of its bytes; 4 query rows; and a prompt that products limit."""

from __future__ import annotations

from typing import Any

from perf.cases import Bar, Case, attention_case, fixed

K = 1024
DECODE_BAR = Bar("ratio", 1.15)
PROMPT_TFLOPS = 20
PLACES: tuple[dict[str, Any], ...] = ({"page_size": 16}, {"page_size": 64}, {"page_size": 0, "table_format": "none"})


def f32_cases() -> dict[Case, Bar | None]:
    """Decode of 64 x 4k and a prompt of 8k over pages and contiguous, with their bars; verify has none."""
    found: dict[Case, Bar | None] = {}
    for place in PLACES:
        found[Case(32, 8, 128, lengths=fixed(64, 4 * K), dtype="f32", **place)] = DECODE_BAR
    found[attention_case(fixed(64, 4 * K), q_len=4, dtype="f32")] = None
    for place in PLACES:
        case = attention_case(fixed(1, 8 * K), q_len=8 * K, dtype="f32", **place)
        found[case] = Bar("us", round(1e6 * case.tflop / PROMPT_TFLOPS, 1))
    return found
