"""The compile key of a problem: what its kernel's generated code depends on."""

from __future__ import annotations

from typing import cast

from ..config.decode import Arch, DecodeConfig, ElementType, KernelSpec, Partition, StoredType, Target
from ..kv.scale import scale_form
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
