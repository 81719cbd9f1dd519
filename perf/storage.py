"""The contents of a case's 8-bit caches: normal values, quantised as the package does it, and fill values in unused slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels import KVScale
from cute_kernels.kv.quantize import EIGHT_BIT, quantize_kv
from cute_kernels.kv.scale import NAMED_SCALES
from cute_kernels.kv.types import KVDtype
from perf.cases import Case

INT8_RANGE = 4.0  # standard deviations that int8 holds if one scale serves many tokens
DEAD_INT8 = 127  # int8 has no NaN: this value shows in a result that uses it
CHUNK = 2**26  # elements that are quantised at once, in f32


def scale_of(case: Case) -> KVScale:
    """The KVScale of a case's K and V."""
    return NAMED_SCALES[case.kv_scale or "none"]


def storage(case: Case) -> dict[str, Any]:
    """The fields of a descriptor that say how the caches store K and V."""
    scale = scale_of(case)
    return {"kv_dtype": case.kv_dtype and KVDtype(case.kv_dtype), "k_scale": scale, "v_scale": scale}


def quantize_normal(
    slots: torch.Tensor, kv_dtype: KVDtype, kv_scale: KVScale, normal: Callable[..., torch.Tensor]
) -> torch.Tensor | None:
    """Fills a cache, as a view [pages, page_size, num_kv_heads, head_dim], with 16-bit normal(*shape) values, quantised.

    Returns the random scales: f32 [1] or [num_kv_heads], per token [pages, page_size, num_kv_heads], or None for none.
    """
    static = static_scale(kv_dtype, kv_scale, slots.shape[2], normal)
    per_token = kv_scale.granularity == "token"
    scales = torch.empty(slots.shape[:3], dtype=kv_scale.dtype, device=slots.device) if per_token else static
    step = max(1, CHUNK // math.prod(slots.shape[1:]))
    for first in range(0, len(slots), step):
        part = slots[first : first + step]
        values = normal(*part.shape)
        if per_token:
            values *= spread(normal(*part.shape[:3], 1))
        stored, scale = quantize_kv(values, kv_dtype, kv_scale, scale=static)
        raw(part).copy_(raw(stored))
        if per_token and scales is not None and scale is not None:
            scales[first : first + step] = scale
    return scales


def static_scale(
    kv_dtype: KVDtype, kv_scale: KVScale, num_kv_heads: int, normal: Callable[..., torch.Tensor]
) -> torch.Tensor | None:
    """One random scale for many tokens: [1] or [num_kv_heads], None for other granularities."""
    counts = {"tensor": 1, "head": num_kv_heads}
    if kv_scale.granularity not in counts:
        return None
    unit = INT8_RANGE / EIGHT_BIT[kv_dtype] if kv_dtype is KVDtype.INT8 else 1.0
    return spread(normal(counts[kv_scale.granularity])).float() * unit


def spread(normal: torch.Tensor) -> torch.Tensor:
    """Random factors from 1/2 to 2."""
    return normal.clamp(-1, 1).exp2()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit elements as bytes, which every operation of torch takes; other elements as they are."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def fill(slots: torch.Tensor, where: torch.Tensor, value: float) -> None:
    """Writes `value`, in int8 DEAD_INT8 for NaN, to the slots that the mask `where` over the first two axes selects."""
    if slots.dtype == torch.int8:
        slots[where] = DEAD_INT8 if math.isnan(value) else round(value)
    elif slots.dtype.itemsize == 1:
        raw(slots)[where] = int(raw(torch.tensor(value).to(slots.dtype)))
    else:
        slots[where] = value
