"""Scales of tokens that follow a pattern from token to token."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.attention_cases import AttentionInputs

EXPONENTS = {  # of what the scale of token t of n is multiplied by, to base 2
    "as_made": lambda t, n: 0.0 * t,
    "rising": lambda t, n: 10.0 * t / n - 8.0,
    "falling": lambda t, n: 2.0 - 10.0 * t / n,
    "steps": lambda t, n: 3.0 * (t // 150 % 3) - 6.0,
    "spread": lambda t, n: -(t * 37 % 11) * 1.0,
    "bursts": lambda t, n: -8.0 * ((t // 150 % 2 == 1) & (t % 2 == 1)),
}
WIDE = 2.0  # times as far where V's scales are f32: a tile's may differ by 2**28 before bits are lost (device/kv/scale.py)


def places_of(inputs: AttentionInputs, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """(number, page, slot) of each token of a request."""
    cache, table = inputs.case.cache, inputs.kv.rows[row].long()
    token = torch.arange(cache.lengths[row], device=table.device)
    return token, table[token // cache.page_size], token % cache.page_size


def follow_pattern(inputs: AttentionInputs, pattern: str) -> AttentionInputs:
    """Multiplies the scales of tokens in place, if there are any; returns the inputs."""
    for which in ("k", "v"):
        scales = inputs.kv.scales[f"{which}_scale"]
        if scales is None or scales.dim() < 3:
            continue
        far = WIDE if which == "v" and scales.dtype == torch.float32 else 1.0
        for row, length in enumerate(inputs.case.cache.lengths):
            token, pages, slots = places_of(inputs, row)
            factors = torch.exp2((EXPONENTS[pattern](token.double(), length) * far).round())
            scales[pages, slots] = (scales[pages, slots].double() * factors[:, None]).to(scales.dtype)
    return inputs
