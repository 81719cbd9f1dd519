"""The contents of a test's caches: 8-bit elements and scales made from random values, poison for both, and their real values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck

SCALES = (0.03, 7.0)  # smallest and largest scale, times the stored value of a usual element
INT8_UNIT, UNSCALED_INT8_UNIT = 40, 2  # the stored value of a usual element: most of the range, and a reasonable logit
DEAD_INT8 = 127
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STORAGES: dict[str, dict[str, Any]] = {  # fields of a Shape: the storage that tests of other features run with
    "16 bits": {},
    "e4m3": {"kv_dtype": ck.KVDtype.E4M3},
    "int8 token": {"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16},
}


def stored(values: Tensor, dtype: ck.KVDtype | None, scaled: bool) -> Tensor:
    """Normal `values` as a cache of `dtype` stores them; unchanged if dtype is None."""
    if dtype is None:
        return values
    if dtype == ck.KVDtype.INT8:
        return (values.float() * (INT8_UNIT if scaled else UNSCALED_INT8_UNIT)).round().clamp(-127, 127).to(torch.int8)
    return values.to(dtype.torch_dtype)


def make_scale(
    scale: ck.KVScale, dtype: ck.KVDtype | None, token_axes: tuple[int, ...], num_kv_heads: int, seed: int
) -> Tensor | None:
    """Random scales on the CPU, log-uniform in SCALES."""
    shapes = {"tensor": (1,), "head": (num_kv_heads,), "token": token_axes}
    if scale.granularity == "none":
        return None
    low, high = map(math.log, SCALES)
    generator = torch.Generator().manual_seed(seed)
    exponents = low + (high - low) * torch.rand(shapes[scale.granularity], generator=generator)
    return (exponents.exp() / (INT8_UNIT if dtype == ck.KVDtype.INT8 else 1)).to(scale.dtype)


def magnitudes(cache: Tensor) -> Tensor:
    """|cache|, in any storage."""
    return (cache.view(torch.uint8) & 0x7F).view(cache.dtype) if cache.dtype in FLOAT8 else cache.abs()


def fill(cache: Tensor, where: Tensor, value: float) -> None:
    """Writes `value`, in int8 DEAD_INT8, to the elements that the broadcast mask `where` selects."""
    if cache.dtype == torch.int8:
        cache.masked_fill_(where, DEAD_INT8)
    elif cache.dtype.itemsize == 1:
        byte = torch.tensor(value).to(cache.dtype).view(torch.uint8).item()
        cache.view(torch.uint8).masked_fill_(where, byte)
    else:
        cache.masked_fill_(where, value)
