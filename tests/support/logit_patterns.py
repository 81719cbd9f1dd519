"""Logits that follow a pattern from key to key: what a row's weights are relative to moves with each tile, seldom, or far."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.attention_cases import AttentionInputs
from tests.support.scale_patterns import places_of

QUERY = 128.0  # the element of the query that a pattern of logits is made with
FAR = 5e6  # a logit whose base is past the range in which a rounded base serves (device/attend/bases.py)
LOGITS: dict[str, Callable[[Tensor, int], Tensor]] = {  # of token t of n
    "even": lambda t, n: 0.0 * t,
    "rising": lambda t, n: 0.04 * t,
    "steep": lambda t, n: 3.0 * t,
    "falling": lambda t, n: -0.04 * t,
    "steps": lambda t, n: 4.0 * (t // 150),
    "spike": lambda t, n: 25.0 * (t == n * 3 // 4),
    "negative": lambda t, n: -30.0 - (t % 7),
    "negative_rising": lambda t, n: 0.04 * t - 60.0,
    "sparse": lambda t, n: 0.02 * t - 300.0 * (t % 8 > 5),  # one lane of the four that share a row has keys of no weight
    "far_up": lambda t, n: FAR * t / n,
    "far_down": lambda t, n: -FAR * t / n,
}
LARGEST = 127  # an int8


def follow_logits(inputs: AttentionInputs, pattern: str) -> AttentionInputs:
    """Writes a pattern to the first column of q and of K, whose softmax_scale is 1; returns the inputs.

    Beside it is what is random, but where that would be rounded. Over int8 with scales of tokens the scales make the logits.
    """
    q = inputs.rows[: sum(inputs.case.q_lens)]
    q *= 0.0 if "far" in pattern else 0.08
    q[:, :, 0] = QUERY
    keys, scales = inputs.kv.k, inputs.kv.scales["k_scale"]
    for row, length in enumerate(inputs.case.cache.lengths):
        token, pages, slots = places_of(inputs, row)
        values = LOGITS[pattern](token.double(), length)[:, None] / QUERY
        if keys.dtype == torch.int8 and scales is not None:
            scales[pages, slots] = (values.abs() / LARGEST).to(scales.dtype).expand(-1, keys.shape[1])
            values = values.sign() * LARGEST
        keys[pages, :, slots, 0] = values.to(keys.dtype)
    return inputs
