"""The compile key of a problem: what its kernel's generated code depends on."""

from __future__ import annotations

from typing import cast

import torch

from ..config.decode import Arch, DecodeConfig, ElementType, KernelSpec, Partition, ScaleForm, StoredType, Target
from ..kv.scale import KVScale
from .descriptors import DecodeProblem


def kernel_spec(problem: DecodeProblem, arch: Arch, target: Target, config: DecodeConfig, *, partition: Partition) -> KernelSpec:
    """The compile key of `problem` with `config`: what changes generated code, and no more."""
    return KernelSpec(
        arch=arch,
        target=target,
        source=problem.source,
        table_format=problem.table_format,
        element_type=cast(ElementType, problem.element_type),
        k_type=cast(StoredType, problem.kv_dtype.value),
        v_type=cast(StoredType, problem.v_dtype.value),
        k_scale=scale_form(problem.k_scale),
        v_scale=scale_form(problem.v_scale),
        head_dim=problem.head_dim,
        group_size=problem.group_size,
        page_size=problem.page_size,
        vector_bytes=problem.vector_bytes,
        tile_n=config.tile_n,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        partition=partition,
        lse_base=problem.lse_base,
        unit_heads=config.unit_heads,
    )


def scale_form(scale: KVScale) -> ScaleForm:
    """How a kernel takes the scales: one for all is read as one a KV head is."""
    if scale.granularity == "token":
        return "token_f16" if scale.dtype == torch.float16 else "token_f32"
    return "head" if scale else "none"
