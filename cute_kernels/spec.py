"""The compile key of a problem: what its kernel's generated code depends on."""

from __future__ import annotations

from typing import cast

from .config import Arch, DecodeConfig, ElementType, KernelSpec, Partition, Target
from .descriptors import DecodeProblem


def kernel_spec(problem: DecodeProblem, arch: Arch, target: Target, config: DecodeConfig, *, partition: Partition) -> KernelSpec:
    """The compile key of `problem` with `config`: what changes generated code, and no more."""
    return KernelSpec(
        arch=arch,
        target=target,
        source=problem.source,
        table_format=problem.table_format,
        element_type=cast(ElementType, problem.element_type),
        head_dim=problem.head_dim,
        group_size=problem.group_size,
        page_size=problem.page_size,
        vector_bytes=problem.vector_bytes,
        tile_n=config.tile_n,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        partition=partition,
        lse_base=problem.lse_base,
    )
