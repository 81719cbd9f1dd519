"""What a KV cache stores of a value: the semantics of quantisation in plain PyTorch. real value = stored * scale."""

from __future__ import annotations

import torch
from torch import Tensor

from .descriptors import KVDtype
from .errors import InvalidArgument, Unsupported
from .kv_scale import KVScale

EIGHT_BIT = {KVDtype.E4M3: 448.0, KVDtype.E5M2: 57344.0, KVDtype.INT8: 127.0}  # and the largest value that each stores
LEAST_AMAX = 1e-8  # what the largest magnitude of a row of zeros counts as
FP8_NAN = 0x7F  # of either encoding: the one that conversion by instruction gives


def quantize_kv(
    x: Tensor, kv_dtype: KVDtype, kv_scale: KVScale = KVScale.NONE, *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(stored, scale) of x [..., num_kv_heads, head_dim], f16 or bf16; stored has x's shape and kv_dtype's torch dtype.

    Without scales, fp8 rounds to nearest even and saturates, and 16 bits are copied. Per "tensor" and "head": x / `scale`, f32 of
    one element or [num_kv_heads], which is returned. Per "token": the scale [..., num_kv_heads] is the largest magnitude of
    head_dim, at least 1e-8, over the largest value of kv_dtype (127, 448 or 57344); x is divided by it in f32, and it is
    returned rounded to kv_scale.dtype.

    Quotients are f32, rounded to nearest even and saturated (int8 to [-127, 127]). NaN stays NaN (0x7f) in fp8 and is 0 in
    int8; the token's scale of a row with a NaN is NaN, so the row reads as NaN.

    Raises Unsupported for a kv_dtype that x or `kv_scale` does not have, InvalidArgument for a `scale` that does not belong.
    """
    if kv_dtype not in EIGHT_BIT:
        if kv_dtype.torch_dtype != x.dtype or kv_scale:
            raise Unsupported([f"kv_dtype = {kv_dtype.value}: must be x's, {x.dtype}, without scales, or have 8 bits"])
        return x.clone(), None
    if kv_dtype is KVDtype.INT8 and not kv_scale:
        raise Unsupported(["kv_scale = none: must be per tensor, head or token where kv_dtype = int8"])
    given = kv_scale.granularity in ("tensor", "head")
    if (scale is not None) != given:
        raise InvalidArgument("scale", f"is {'None' if scale is None else 'given'} where the scale is {_described(kv_scale)}")
    values = x.float()
    if kv_scale.granularity == "token":
        amax = values.abs().amax(-1).clamp(min=LEAST_AMAX)
        exact = amax / torch.full_like(amax, EIGHT_BIT[kv_dtype])  # CUDA multiplies by the inverse of a plain number
        return encode(values / exact[..., None], kv_dtype), exact.to(kv_scale.dtype)
    if scale is not None:
        if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), (x.shape[-2],)):
            raise InvalidArgument("scale", f"is {scale.dtype} {tuple(scale.shape)}, must be torch.float32 [] or [num_kv_heads]")
        values = values / scale.reshape(-1, 1)
    return encode(values, kv_dtype), scale


def _described(kv_scale: KVScale) -> str:
    return {"none": "none", "token": "computed for each token"}.get(kv_scale.granularity, f"per {kv_scale}")


def encode(values: Tensor, kv_dtype: KVDtype) -> Tensor:
    """f32 values as 8-bit ones, rounded to nearest even and saturated."""
    largest = EIGHT_BIT[kv_dtype]
    if kv_dtype is KVDtype.INT8:
        return values.round().clamp(-largest, largest).nan_to_num(0.0).to(torch.int8)
    stored = values.clamp(-largest, largest).to(kv_dtype.torch_dtype).view(torch.uint8)
    return stored.masked_fill(values.isnan(), FP8_NAN).view(kv_dtype.torch_dtype)
