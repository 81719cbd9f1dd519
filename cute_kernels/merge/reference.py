"""The semantics of a merge in PyTorch, also its CPU variant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config.decode import LseBase
from ..planning.variants import Launch


def reference_merge(outs: Tensor, lses: Tensor, lse_base: LseBase = "e") -> tuple[Tensor, Tensor]:
    """The semantics in plain PyTorch, computed in f32, or in f64 where outs are; in state order.

    outs [num_states, ..., head_dim], lses [num_states, ...]. Returns out [..., head_dim] and lse [...], of the inputs' dtypes.
    An empty state (lse = -inf) weighs nothing, whatever its out holds; without others the result is (+0.0, -inf). One state that
    is not empty is returned bit for bit. Otherwise an lse of NaN or +inf makes the merge NaN.
    """
    dtype = torch.promote_types(outs.dtype, torch.float32)
    power, log = (torch.exp2, torch.log2) if lse_base == "2" else (torch.exp, torch.log)
    largest = lses.to(dtype).amax(0)
    weights = power(lses.to(dtype) - largest.where(largest != -math.inf, 0.0))
    merged, total = torch.zeros_like(outs[0], dtype=dtype), torch.zeros_like(largest)
    for weight, state in zip(weights.unsqueeze(-1), outs, strict=True):
        merged += (weight * state).where(weight != 0.0, 0.0)
        total += weight[..., 0]
    out = (merged / total.where(total != 0.0, 1.0)[..., None]).to(outs.dtype)
    lse = (largest + log(total)).to(lses.dtype)
    live = lses != -math.inf
    for only, state, state_lse in zip(live & (live.sum(0) == 1), outs, lses, strict=True):
        out, lse = state.where(only[..., None], out), state_lse.where(only, lse)
    return out, lse


def cpu_variant(lse_base: LseBase) -> Launch:
    """The CPU variant, called as a compiled kernel is."""

    def launch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        merged, merged_lse = reference_merge(outs, lses, lse_base)
        out.copy_(merged)
        lse.copy_(merged_lse)

    return launch
