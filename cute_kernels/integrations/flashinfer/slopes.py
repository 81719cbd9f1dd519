"""FlashInfer's ALiBi slopes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache  # a captured graph goes on reading the slopes
def get_alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """f32 [num_heads]: 2^(-8 i / n) for the first n heads, n the largest power of two; then every other slope of 2 n heads."""
    n = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-4 * i / n) for i in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
