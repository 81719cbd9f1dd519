"""Rotary position embedding: what an append may apply to K and q on their way, and the same in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .descriptors import _check_extent, _is_int
from .errors import InvalidProblem

Pairing = Literal["half", "interleaved"]
PAIRINGS = ("half", "interleaved")


@dataclass(frozen=True)
class Rotary:
    """Each pair (a, b) of the first rotary_dim columns becomes (a cos - b sin, b cos + a sin); other columns stay.

    pairing: "half" pairs column i with i + rotary_dim / 2 (GPT-NeoX), "interleaved" 2 i with 2 i + 1 (GPT-J). rotary_dim:
    even, at most head_dim, which None stands for. num_heads: of the q that is rotated in the same launch, a multiple of
    num_kv_heads, 0 where K alone is. position_dtype: torch.int32 or torch.int64. Raises InvalidProblem.
    """

    pairing: Pairing = "half"
    rotary_dim: int | None = None
    num_heads: int = 0
    position_dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise InvalidProblem("rotary.pairing", self.pairing, 'must be "half" or "interleaved"')
        dim = self.rotary_dim
        if dim is not None and (not _is_int(dim) or dim < 2 or dim % 2):
            raise InvalidProblem("rotary.rotary_dim", dim, "must be an even int from 2 to head_dim, or None for head_dim")
        _check_extent("rotary.num_heads", self.num_heads, least=0)
        if self.position_dtype not in (torch.int32, torch.int64):
            raise InvalidProblem("rotary.position_dtype", self.position_dtype, "must be torch.int32 or torch.int64")


def apply_rotary(x: Tensor, cos_sin_cache: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """x [tokens, heads, head_dim], f16 or bf16, rotated; a new tensor.

    cos_sin_cache: f32 [max_position, rotary_dim], the cosines first. positions [tokens]: rows of it; a token whose position is
    none keeps its values. Products and sums are f32, each rounded by itself, and the result is rounded once to x's dtype.
    """
    width = cos_sin_cache.shape[1]
    known = (positions >= 0) & (positions < len(cos_sin_cache))
    rows = cos_sin_cache[positions.masked_fill(~known, 0).long(), None] if len(cos_sin_cache) else cos_sin_cache[:0, None]
    out = x.clone()
    if not known.any():
        return out
    cos, sin = rows.split(width // 2, -1)
    shape = (*x.shape[:2], 2, width // 2) if rotary.pairing == "half" else (*x.shape[:2], width // 2, 2)
    axis = 2 if rotary.pairing == "half" else 3
    first, second = x[..., :width].float().reshape(shape).unbind(axis)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], axis)
    out[..., :width] = torch.where(known[:, None, None], turned.reshape(*x.shape[:2], width).to(x.dtype), x[..., :width])
    return out
