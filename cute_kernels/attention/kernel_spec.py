"""The compile key of a problem: what its kernel's generated code depends on."""

from __future__ import annotations

from typing import cast

from ..config.decode import KEPT_REQUESTS, DecodeConfig, KernelSpec, Partition, grid_ctas
from ..config.problem import ElementType
from ..config.tiling import HALF_TILE_M, TILE_M, WARPGROUP_M, Arch, Target, most_warp_tiles
from ..kv.scale import scale_form
from .descriptors import DecodeProblem


def kernel_spec(problem: DecodeProblem, arch: Arch, target: Target, config: DecodeConfig, *, partition: Partition) -> KernelSpec:
    """The compile key of `problem` with `config`: what changes generated code, and no more."""
    rows = block_rows(problem, arch, config)
    return KernelSpec(
        arch=arch,
        target=target,
        source=problem.source,
        table_format=problem.table_format,
        element_type=cast(ElementType, problem.element_type),
        k_type=problem.kv_dtype.value,
        v_type=problem.v_dtype.value,
        k_scale=scale_form(problem.k_scale),
        v_scale=scale_form(problem.v_scale),
        head_dim=problem.head_dim,
        v_head_dim=problem.head_dim,
        group_size=problem.group_size,
        page_size=problem.page_size,
        vector_bytes=problem.vector_bytes,
        tile_n=config.tile_n,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        partition=partition,
        kept_requests=kept_requests_of(problem.batch_size, partition),
        lse_base=problem.lse_base,
        unit_heads=config.unit_heads,
        query=problem.query,
        block_rows=rows,
        many_blocks=problem.query != "one" and problem.packed_rows * config.unit_heads > rows,
        modifiers=problem.modifiers,
        mma=config.mma,
    )


def kept_requests_of(batch_size: int, partition: Partition) -> int:
    """spec.kept_requests: the least that the batch needs; a constant unless shares are balanced: invariant plans see no batch."""
    if partition != "balanced":
        return KEPT_REQUESTS[-1]
    return next((kept for kept in KEPT_REQUESTS if batch_size <= kept), KEPT_REQUESTS[-1])


def block_rows(problem: DecodeProblem, arch: Arch, config: DecodeConfig) -> int:
    """Packed rows of a unit: a power of two, as many as a request may need; 0 if it has one query row and warps multiply.

    At most as many m-tiles as the warps attend to; only one if each warp reads its own tiles, on sm80 from two stages per warp.
    """
    needed = 1 << (problem.packed_rows * config.unit_heads - 1).bit_length()
    if config.mma == "warpgroup":
        return min(TILE_M * config.num_warps, max(WARPGROUP_M, needed))
    if problem.query == "one":
        return 0
    tiles = most_warp_tiles(config.num_warps, problem.padded_head_dim, problem.splits)
    alone = arch == "sm80" and config.num_stages >= 2 * config.num_warps
    most = TILE_M * (1 if alone else config.num_warps * tiles)
    return min(most, max(HALF_TILE_M, needed))


def units_of(problem: DecodeProblem, spec: KernelSpec) -> int:
    """Units of a row (head blocks): its KV heads, spec.unit_heads at a time, times the blocks of their packed rows."""
    blocks = -(-problem.packed_rows * spec.unit_heads // spec.block_rows) if spec.several else spec.m_tiles
    return problem.num_kv_heads // spec.unit_heads * blocks


def grid_ctas_of(problem: DecodeProblem, spec: KernelSpec, sm_count: int, ctas_per_sm: int) -> int:
    """CTAs of the persistent grid: as many slices of the batch as fit, at least one, for each unit; one per SM if dealt."""
    if spec.dealt:
        return sm_count
    return grid_ctas(units_of(problem, spec), sm_count, ctas_per_sm)
