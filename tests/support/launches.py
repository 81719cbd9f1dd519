"""Pretended launches: launches of plans made as on an H200 are recorded; and the operands that a decode kernel refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from cute_kernels.config.decode import KernelSpec
from cute_kernels.planning.variants import PRETEND

TORCH_TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.uint8,
    "e5m2": torch.uint8,
    "int8": torch.int8,
}
NAMES = ("q", "k", "v", "table0", "table1", "table2", "k_scale", "v_scale", "out", "lse", "workspace")


def recorded(monkeypatch: pytest.MonkeyPatch, plans: ModuleType) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """(spec of each plan, operands of each launch) for plans that `plans` makes from now on, on the CPU as on an H200."""
    specs: list[Any] = []
    launches: list[tuple[Any, ...]] = []

    def launch_of(spec: Any, _: object) -> Callable[..., None]:
        specs.append(spec)
        return lambda *operands: launches.append(operands)

    real = plans.explain
    monkeypatch.setattr(plans, "_launch_of", launch_of)
    monkeypatch.setattr(plans, "explain", lambda d, facts, preference: real(d, PRETEND["h200"], preference))
    monkeypatch.setattr(plans.DeviceFacts, "of", lambda device: PRETEND["h200"])
    return specs, launches


def refuse(spec: KernelSpec, operands: tuple[Any, ...]) -> None:
    """Raises ValueError as a kernel of `spec` does; tests/attention/test_moved.py checks that a real kernel does the same."""
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
