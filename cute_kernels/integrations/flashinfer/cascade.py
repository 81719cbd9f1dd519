"""FlashInfer's merges of attention states, through MergeStatesPlan."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...api.functional import merge_states as merged


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state of two disjoint parts of the keys, (V, S). Copies its inputs side by side first: merge_states does not.

    v_a, v_b, V: [rows, num_heads, head_dim] of one dtype; s_a, s_b, S: [rows, num_heads], to base 2, S f32. Raises what
    cute_kernels.merge_states raises.
    """
    return merged(torch.stack((v_a, v_b)), torch.stack((s_a.float(), s_b.float())), lse_base="2")


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state of several disjoint parts of the keys, (V, S).

    v: [rows, num_states, num_heads, head_dim]; s: [rows, num_states, num_heads], to base 2; V, S: without the axis of states.
    """
    return merged(v.transpose(0, 1), s.float().transpose(0, 1), lse_base="2")


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """merge_state of both states, written to v and s, which is f32. mask: bool [rows], the rows that are merged; None: all."""
    s_other = s_other.float()
    if mask is not None:
        s_other = s_other.masked_fill(~mask.bool()[:, None], -math.inf)  # an empty state changes nothing
    merged(torch.stack((v, v_other)), torch.stack((s, s_other)), lse_base="2", out=v, lse=s)
