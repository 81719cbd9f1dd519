"""FlashInfer's ALiBi slopes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """f32 [num_heads]: 2^(-8 i / n) for the n heads up to a power of two, then every other one of twice as many."""
    n = 1 << int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-4 * i / n) for i in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor(slopes)
