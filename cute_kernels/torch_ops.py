"""Decode attention as torch ops: what a graph traced by torch.compile calls. They write out and lse and return nothing."""

from __future__ import annotations

import torch

from .plan_cache import run_contiguous, run_paged

# `define` and `impl` dispatch in 2.5 us, `custom_op` in 25
_library = torch.library.Library("cute_kernels", "DEF")
_library.define(
    "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor table0, Tensor table1, Tensor? table2, "
    "Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, Tensor(b!) lse, float? softmax_scale, str layout, str lse_base, "
    "int? max_seq_len, str? kv_dtype) -> ()"
)
_library.define(
    "flash_decoding(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, Tensor(b!) lse, "
    "float? softmax_scale, str lse_base, str? kv_dtype) -> ()"
)


def _writes_only(*operands: object) -> None:
    """The shape function of an op that returns nothing."""


for _name, _run in (("paged_decode", run_paged), ("flash_decoding", run_contiguous)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"cute_kernels::{_name}", _writes_only, lib=_library)

paged_decode = torch.ops.cute_kernels.paged_decode.default
flash_decoding = torch.ops.cute_kernels.flash_decoding.default
