"""The semantics of a merge in PyTorch, also its CPU variant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config.problem import LseBase
from ..planning.variants import Launch


def reference_merge(outs: Tensor, lses: Tensor, lse_base: LseBase = "e", sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The semantics in plain PyTorch, computed in f32, or in f64 if outs are f64; states are summed in order.

    outs [num_states, ..., head_dim], lses [num_states, ...]. Returns out [..., head_dim] and lse [...], of the inputs' dtypes.
    An empty state (lse = -inf) weighs nothing, whatever its out holds; if all are empty the result is (+0.0, -inf). If one state
    is not empty, and there are no sinks, it is returned bit for bit. Otherwise an lse of NaN or +inf makes the merge NaN. sinks:
    natural logits [num_heads] that join the merged state, each as one more state whose out is 0.
    """
    dtype = torch.promote_types(outs.dtype, torch.float32)
    power, log, unit = (torch.exp2, torch.log2, math.log(2.0)) if lse_base == "2" else (torch.exp, torch.log, 1.0)
    largest, sink = lses.to(dtype).amax(0), None
    if sinks is not None:
        sink = sinks.to(dtype) / unit
        largest = torch.maximum(largest, sink)
    base = largest.where(largest != -math.inf, 0.0)
    weights = power(lses.to(dtype) - base)
    merged = torch.zeros_like(outs[0], dtype=dtype)
    total = torch.zeros_like(largest) if sink is None else power(sink - base)
    for weight, state in zip(weights.unsqueeze(-1), outs, strict=True):
        merged += (weight * state).where(weight != 0.0, 0.0)
        total += weight[..., 0]
    merged, lse = merged / total.where(total != 0.0, 1.0)[..., None], largest + log(total)
    out, lse = merged.to(outs.dtype), lse.to(lses.dtype)
    if sinks is not None:
        return out, lse
    live = lses != -math.inf
    for only, state, state_lse in zip(live & (live.sum(0) == 1), outs, lses, strict=True):
        out, lse = state.where(only[..., None], out), state_lse.where(only, lse)
    return out, lse


def cpu_variant(lse_base: LseBase) -> Launch:
    """The CPU variant, called as a compiled kernel is."""

    def launch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        merged, merged_lse = reference_merge(outs, lses, lse_base, sinks)
        out.copy_(merged)
        lse.copy_(merged_lse)

    return launch
