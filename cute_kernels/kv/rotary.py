"""Rotary position embedding: what an append may apply to K and q on their way, and the same in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..checks.fields import check_extent, is_int
from ..checks.tensors import check_beside, check_shape
from ..errors import InvalidArgument, InvalidProblem

Pairing = Literal["half", "interleaved"]
PAIRINGS = ("half", "interleaved")


@dataclass(frozen=True)
class Rotary:
    """Each pair (a, b) of the first rotary_dim columns becomes (a cos - b sin, b cos + a sin); other columns stay.

    pairing: "half" pairs column i with i + rotary_dim / 2 (GPT-NeoX), "interleaved" 2 i with 2 i + 1 (GPT-J). rotary_dim:
    even and at most head_dim; None means head_dim. num_heads: query heads of a q that is rotated in the same launch, a multiple
    of num_kv_heads; 0 if K alone is rotated. position_dtype: torch.int32 or torch.int64. Raises InvalidProblem.
    """

    pairing: Pairing = "half"
    rotary_dim: int | None = None
    num_heads: int = 0
    position_dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise InvalidProblem("rotary.pairing", self.pairing, 'must be "half" or "interleaved"')
        dim = self.rotary_dim
        if dim is not None and (not is_int(dim) or dim < 2 or dim % 2):
            raise InvalidProblem("rotary.rotary_dim", dim, "must be an even int from 2 to head_dim, or None for head_dim")
        check_extent("rotary.num_heads", self.num_heads, least=0)
        if self.position_dtype not in (torch.int32, torch.int64):
            raise InvalidProblem("rotary.position_dtype", self.position_dtype, "must be torch.int32 or torch.int64")


def apply_rotary(x: Tensor, cos_sin_cache: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """x [tokens, heads, head_dim], f16 or bf16, with its first rotary_dim columns rotated; a new tensor.

    cos_sin_cache: f32 [max_position, rotary_dim], the cosines first. positions: int32 or int64 [tokens], rows of cos_sin_cache;
    a token whose position is no such row keeps its values. Products and sums are f32, each rounded by itself, and the result is
    rounded once to x's dtype. Only pairing and rotary_dim of `rotary` count.

    Raises InvalidArgument for a type, dtype or device, InvalidProblem for a shape or a rotary_dim that x does not have.
    """
    width = _check_rotary(x, cos_sin_cache, positions, rotary)
    out = x.clone()
    if not len(cos_sin_cache):
        return out
    known = (positions >= 0) & (positions < len(cos_sin_cache))
    cos, sin = cos_sin_cache[positions.masked_fill(~known, 0).long(), None].split(width // 2, -1)
    shape = (*x.shape[:2], 2, width // 2) if rotary.pairing == "half" else (*x.shape[:2], width // 2, 2)
    axis = 2 if rotary.pairing == "half" else 3
    first, second = x[..., :width].float().reshape(shape).unbind(axis)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], axis)
    out[..., :width] = torch.where(known[:, None, None], turned.reshape(*x.shape[:2], width).to(x.dtype), x[..., :width])
    return out


def rotated_columns(rotary: Rotary, head_dim: int) -> int:
    """rotary_dim, or head_dim if that is None. Raises InvalidProblem if the result is odd or above head_dim."""
    rotary_dim = rotary.rotary_dim or head_dim
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise InvalidProblem("rotary.rotary_dim", rotary_dim, f"must be even and at most head_dim = {head_dim}")
    return rotary_dim


def _check_rotary(x: Any, cos_sin_cache: Any, positions: Any, rotary: Any) -> int:
    """Checks the operands against x, and returns rotated_columns."""
    if not isinstance(rotary, Rotary):
        raise InvalidArgument("rotary", f"got {type(rotary).__name__}, must be a Rotary")
    check_beside("x", x, x, torch.float16, torch.bfloat16)
    check_shape("x", x, (None, None, None), "[tokens, heads, head_dim]")
    width = rotated_columns(rotary, x.shape[2])
    check_beside("cos_sin_cache", cos_sin_cache, x, torch.float32)
    check_shape("cos_sin_cache", cos_sin_cache, (None, width), "[max_position, rotary_dim]")
    check_beside("positions", positions, x, torch.int32, torch.int64)
    check_shape("positions", positions, (x.shape[0],), "[tokens], those of x")
    return width
