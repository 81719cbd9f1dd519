"""Decode attention as three nested loops in f64: shares nothing with the package."""

from __future__ import annotations

import math

from torch import Tensor


def naive_row(q: Tensor, keys: list[list[list[float]]], values: list[list[list[float]]], scale: float) -> tuple[list, list]:
    """One row: q [num_heads, head_dim], keys and values [token][kv_head][dim] -> out [head][dim], lse [head] (natural)."""
    num_heads, head_dim = q.shape
    outs, lses = [], []
    for head in range(num_heads):
        if not keys:
            outs.append([0.0] * head_dim)
            lses.append(-math.inf)
            continue
        kv_head = head // (num_heads // len(keys[0]))
        query = q[head].double().tolist()
        logits = [scale * math.fsum(a * b for a, b in zip(query, token[kv_head], strict=True)) for token in keys]
        top = max(logits)
        weights = [math.exp(logit - top) for logit in logits]
        total = math.fsum(weights)
        column = [
            math.fsum(w * token[kv_head][d] for w, token in zip(weights, values, strict=True)) / total for d in range(head_dim)
        ]
        outs.append(column)
        lses.append(top + math.log(total))
    return outs, lses
