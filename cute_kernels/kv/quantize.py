"""What a KV cache stores of a value: the semantics of quantisation in plain PyTorch. real value = stored * scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks.tensors import check_beside
from ..errors import InvalidArgument, InvalidProblem, Unsupported
from .scale import KVScale
from .types import KVDtype

EIGHT_BIT = {KVDtype.E4M3: 448.0, KVDtype.E5M2: 57344.0, KVDtype.INT8: 127.0}  # and the largest value that each stores
LEAST_AMAX = 1e-8  # what the largest magnitude of a row of zeros counts as
FP8_NAN = 0x7F  # of either encoding: the one that conversion by instruction gives
LEAST_HALF, LEAST_NORMAL_HALF, LARGEST_HALF = 2.0**-24, 2.0**-14, 65504.0  # of f16, above zero
HALF_TO_ZERO, HALF_TO_INF = 2.0**-25, 65520.0  # up to the one f16 rounds to 0, from the other on to infinity


def quantize_kv(
    x: Tensor, kv_dtype: KVDtype, kv_scale: KVScale = KVScale.NONE, *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(stored, scale) of x [..., num_kv_heads, head_dim], f16 or bf16; stored has x's shape and kv_dtype's torch dtype.

    Without scales, fp8 rounds to nearest even and saturates, and 16 bits are copied. Per "tensor" and "head": x / `scale`, f32
    [] or [1], and [num_kv_heads], which is returned. Per "token": x / scale [..., num_kv_heads], which is returned, the
    largest magnitude of head_dim, at least 1e-8, over the largest value of kv_dtype (127, 448 or 57344), rounded to
    kv_scale.dtype (`rounded_scale`) before x is divided by it.

    Quotients are f32, rounded to nearest even and saturated (int8 to [-127, 127]). NaN stays NaN (0x7f) in fp8 and is 0 in
    int8; the token's scale of a row with a NaN or an infinity is NaN or infinity, so what it scales reads as NaN.

    Raises InvalidArgument for a type, dtype or device, or a `scale` that does not belong; InvalidProblem for a shape;
    Unsupported for a kv_dtype that x or `kv_scale` does not have.
    """
    _check_choices(x, kv_dtype, kv_scale)
    if kv_dtype not in EIGHT_BIT:
        return x.clone(), None
    _check_scale(x, kv_scale, scale)
    values = x.float()
    if kv_scale.granularity == "token":
        divisor = rounded_scale(exact_scale(x, kv_dtype), kv_scale.dtype)
        return encode(values / divisor[..., None].float(), kv_dtype), divisor
    if scale is not None:
        values = values / scale.reshape(-1, 1)
    return encode(values, kv_dtype), scale


def exact_scale(x: Tensor, kv_dtype: KVDtype) -> Tensor:
    """f32 [...]: what a row of x [..., head_dim] is divided by, before it is rounded to the dtype in which it is stored."""
    amax = x.float().abs().amax(-1).clamp(min=LEAST_AMAX)
    return amax / torch.full_like(amax, EIGHT_BIT[kv_dtype])  # CUDA multiplies by the inverse of a plain number


def rounded_scale(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """An exact_scale as it is stored, in f32 or f16.

    f16: to nearest even, and up where that is subnormal (a row's largest values would saturate: of 1.49 x 2**-24, nearest is two
    thirds). What is finite is stored as at most the largest f16.
    """
    if dtype != torch.float16:
        return exact
    up = (exact / LEAST_HALF).ceil() * LEAST_HALF
    largest = torch.where(exact.isfinite(), exact.clamp(max=LARGEST_HALF), exact)
    return torch.where(exact < LEAST_NORMAL_HALF, up, largest).to(dtype)


def beyond_half(x: Tensor, kv_dtype: KVDtype) -> Tensor:
    """bool [...]: whether f16 has no place for the scale of a row of x [..., head_dim], which is then stored saturated.

    It would round to infinity, or to zero; but a row with NaN or infinity has no scale, and one of at most LEAST_AMAX
    counts as zeros.
    """
    exact, amax = exact_scale(x, kv_dtype), x.float().abs().amax(-1)
    return ((exact >= HALF_TO_INF) & (exact < math.inf)) | ((exact <= HALF_TO_ZERO) & (amax > LEAST_AMAX))


def _check_choices(x: Any, kv_dtype: Any, kv_scale: Any) -> None:
    """x, kv_dtype and kv_scale by themselves, and that each goes with the others."""
    check_beside("x", x, x, torch.float16, torch.bfloat16)
    if x.dim() < 2 or not x.shape[-1]:
        raise InvalidProblem("x.shape", tuple(x.shape), "must be [..., num_kv_heads, head_dim], head_dim at least 1")
    if not isinstance(kv_dtype, KVDtype):
        raise InvalidProblem("kv_dtype", kv_dtype, "must be a KVDtype")
    if not isinstance(kv_scale, KVScale):
        raise InvalidProblem("kv_scale", kv_scale, "must be a KVScale")
    if kv_dtype not in EIGHT_BIT and (kv_dtype.torch_dtype != x.dtype or kv_scale):
        raise Unsupported([f"kv_dtype = {kv_dtype.value}: must be x's, {x.dtype}, without scales, or have 8 bits"])
    if kv_dtype is KVDtype.INT8 and not kv_scale:
        raise Unsupported(["kv_scale = none: must be per tensor, head or token where kv_dtype = int8"])


def _check_scale(x: Tensor, kv_scale: KVScale, scale: Any) -> None:
    """`scale` is given per tensor and head alone, in a shape of that granularity."""
    given = kv_scale.granularity in ("tensor", "head")
    if (scale is not None) != given:
        described = {"none": "none", "token": "computed for each token"}.get(kv_scale.granularity, f"per {kv_scale}")
        raise InvalidArgument("scale", f"is {'None' if scale is None else 'given'} where the scale is {described}")
    if not given:
        return
    check_beside("scale", scale, x, torch.float32)
    axes = (("num_kv_heads", x.shape[-2]),)
    if tuple(scale.shape) not in kv_scale.shapes(axes):
        raise InvalidProblem("scale.shape", tuple(scale.shape), f"must be {kv_scale.meaning(axes)}: the scale is per {kv_scale}")


def encode(values: Tensor, kv_dtype: KVDtype) -> Tensor:
    """f32 values as 8-bit ones, rounded to nearest even and saturated."""
    largest = EIGHT_BIT[kv_dtype]
    if kv_dtype is KVDtype.INT8:
        return values.round().clamp(-largest, largest).nan_to_num(0.0).to(torch.int8)
    stored = values.clamp(-largest, largest).to(kv_dtype.torch_dtype).view(torch.uint8)
    return stored.masked_fill(values.isnan(), FP8_NAN).view(kv_dtype.torch_dtype)
