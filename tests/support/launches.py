"""What a compiled decode kernel refuses of its operands, by the signature in device/tracing/decode.py: for pretended launches."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.config.decode import KernelSpec

TORCH_TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.uint8,
    "e5m2": torch.uint8,
    "int8": torch.int8,
}
NAMES = ("q", "k", "v", "table0", "table1", "table2", "k_scale", "v_scale", "out", "lse", "workspace")


def refuse(spec: KernelSpec, operands: tuple[Any, ...]) -> None:
    """Raises ValueError as a kernel of `spec` does; tests/attention/test_moved.py holds a real one to the same."""
    given = {name: None if t is None else torch.from_dlpack(t) for name, t in zip(NAMES, operands, strict=False)}
    extents: dict[str, int] = {"head_dim": spec.head_dim}
    if spec.source == "paged":
        extents["page_size"] = spec.page_size
    pages = "batch" if spec.source == "contiguous" else "pages"
    cache = (pages, "kv_heads", "page_size", "head_dim")
    row = ("batch", "heads", "head_dim")
    signature = {
        "q": (spec.element_type, row),
        "k": (spec.k_type, cache),
        "v": (spec.v_type, cache),
        "out": (spec.element_type, row),
        "lse": (torch.float32, row[:2]),
    }
    if spec.table_format == "dense":
        signature |= {"table0": (torch.int32, ("batch", "columns")), "table1": (torch.int32, ("batch",))}
    elif spec.table_format == "csr":
        signature |= {
            "table0": (torch.int32, ("used",)),
            "table1": (torch.int32, ("batch + 1",)),
            "table2": (torch.int32, ("batch",)),
        }
    for name, (dtype, axes) in signature.items():
        tensor, wanted = given[name], TORCH_TYPES.get(dtype, dtype)
        if tensor is None or tensor.dtype != wanted or tensor.dim() != len(axes):
            raise ValueError(f"Mismatched Tensor {name}")
        for axis, extent in zip(axes, tensor.shape, strict=True):
            if extents.setdefault(axis, extent) != extent:
                raise ValueError(f"Mismatched {name}.shape")
    for name, form in (("k_scale", spec.k_scale), ("v_scale", spec.v_scale)):
        if (given[name] is None) != (form == "none"):
            raise ValueError(f"Mismatched type {name}")
    for name in ("k", "v"):
        if given[name].data_ptr() % spec.vector_bytes:
            raise ValueError(f"Misaligned Tensor data {name}")
