"""Attention whose query, caches and result are fp8, each with a scale: paged_attention between two conversions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks.tensors import type_name
from ..errors import InvalidArgument, Unsupported
from ..kv.quantize import encode
from ..kv.types import KVDtype
from .attention import paged_attention

FP8 = {torch.float8_e4m3fn: KVDtype.E4M3, torch.float8_e5m2: KVDtype.E5M2}


def fp8_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    o_scale: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` of a q, caches and a result that are all e4m3 or all e5m2. Returns (out like q, lse f32).

    A real value is what is stored times its scale: q_scale, k_scale, v_scale and o_scale, f32 tensors of one element on q's
    device; a scale that is None is 1. given: other parameters of `paged_attention`, except out. q becomes bf16, which holds it
    exactly; the result is rounded to bf16, divided by o_scale, and rounded to nearest even and saturated. No step synchronises.

    Raises Unsupported if q is not fp8, InvalidArgument for caches of another type than q's and for a scale that is no such
    tensor, and what `paged_attention` raises.
    """
    if not isinstance(q, Tensor) or q.dtype not in FP8:
        found = q.dtype if isinstance(q, Tensor) else type_name(q)
        raise Unsupported([f"q.dtype = {found}: must be torch.float8_e4m3fn or torch.float8_e5m2"])
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, Tensor) or cache.dtype != q.dtype:
            found = cache.dtype if isinstance(cache, Tensor) else type_name(cache)
            raise InvalidArgument(name, f"got {found}, must be q's type, {q.dtype}")
    if "out" in given:
        raise InvalidArgument("out", "is given, must not be: the result is a new tensor")
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "o_scale": o_scale}
    of_q, of_k, of_v, of_out = (_scale(name, scale, q) for name, scale in scales.items())
    of_scores = of_k if of_q is None else of_q if of_k is None else of_q * of_k
    out, lse = paged_attention(q.to(torch.bfloat16), k_cache, v_cache, k_scale=of_scores, v_scale=of_v, **given)
    values = out.float() if of_out is None else out.float() / of_out
    return encode(values, FP8[q.dtype]), lse


def _scale(name: str, scale: Any, q: Tensor) -> Tensor | None:
    """A scale as f32 [1], or None."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != q.device:
        shown = f"{scale.dtype} {tuple(scale.shape)} on {scale.device}" if isinstance(scale, Tensor) else type_name(scale)
        raise InvalidArgument(name, f"got {shown}, must be a torch.float32 tensor of one element on {q.device}, or None")
    return scale.reshape(1)
