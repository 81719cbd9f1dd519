"""States to merge, and their merge in f64 and in plain PyTorch: shares nothing with the package but the descriptor."""

from __future__ import annotations

import math

import torch

import cute_kernels as ck
from tests.support.tolerance import check_states

Pair = tuple[torch.Tensor, torch.Tensor]


def make_states(d: ck.MergeStatesDescriptor, device: str, seed: int = 0, spread: float = 3.0, center: float = 0.0) -> Pair:
    """Random outs [num_states, batch, num_heads, head_dim] and lses [num_states, batch, num_heads].

    Narrow outs are positive: with few columns, values of both signs may cancel in all columns.
    """
    generator = torch.Generator(device).manual_seed(seed)
    outs = torch.randn(d.num_states, *d.shape, device=device, generator=generator).to(d.dtype)
    outs = outs.abs() if d.head_dim < 16 else outs
    return outs, torch.randn(outs.shape[:-1], device=device, generator=generator) * spread + center


def exact(outs: torch.Tensor, lses: torch.Tensor, lse_base: str) -> Pair:
    """(out, lse) in f64, sharing nothing with the package."""
    unit = math.log(2.0) if lse_base == "2" else 1.0
    natural = lses.double() * unit
    lse = natural.logsumexp(0)
    weights = (natural - lse).exp().where(lses != -math.inf, 0.0)[..., None]
    return (weights * outs.double()).where(weights != 0.0, 0.0).sum(0), lse / unit


def same_dtype(outs: torch.Tensor, lses: torch.Tensor, lse_base: str) -> torch.Tensor:
    """The out of plain PyTorch in the dtype of outs."""
    weights = (lses * (math.log(2.0) if lse_base == "2" else 1.0)).softmax(0).where(lses != -math.inf, 0.0)
    weights = weights.to(outs.dtype)[..., None]
    return (weights * outs).where(weights != 0.0, 0.0).sum(0)


def assert_close(d: ck.MergeStatesDescriptor, got: Pair, outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Asserts that every head of every row is as near f64 as tolerance.py asks."""
    check_states(got, exact(outs, lses, d.lse_base), same_dtype(outs, lses, d.lse_base))
