"""Kernels that run before a call in a stream, as they do in an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

TOKENS = 64  # of an activation that weights are multiplied with: their bytes set the pace


@dataclass(frozen=True)
class Stream:
    """What runs `before` the call of each input set. metric: the name of the time that a call then adds; replays: of it."""

    metric: str
    before: Sequence[Callable[[], object]]
    replays: int


def writer(q: torch.Tensor) -> Callable[[], object]:
    """A small kernel that writes q's own values to q. In a graph, copy_ of a contiguous tensor is a memcpy and no kernel."""
    return partial(torch.mul, q.clone(), 1, out=q)


def reader_of_weights(nbytes: int, device: torch.device) -> Callable[[], object]:
    """A linear layer, bf16 [TOKENS, n] @ [n, n], with at least `nbytes` of weights: more than L2 holds evict what lies there."""
    columns = 8 * math.ceil(math.sqrt(nbytes / 2) / 8)
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, dtype=torch.bfloat16, device=device, generator=generator)
    activation, weights = make(TOKENS, columns), make(columns, columns)
    return partial(torch.mm, activation, weights, out=torch.empty_like(activation))
