"""A KV tile in shared memory: tile_n tokens x padded head_dim, as swizzled slabs.

One slab is what one TMA box brings: [column block][row][column_block elements], with `box_rows` rows of one page. Its rows of
32, 64 or 128 bytes are swizzled over 8 (or fewer) rows so that ldmatrix reads them without bank conflicts. A tile is
tile_n / box_rows slabs in a row, so token `t` lies in slab t / box_rows: the nested first mode below.
"""

import cutlass.cute as cute

from ..config import KernelSpec

SWIZZLE_BITS = {64: 3, 32: 2, 16: 1}


def swizzle(spec: KernelSpec) -> cute.Swizzle:
    """XOR of address bits 4.. with bits 7..: rows of `column_block` elements spread over all banks."""
    return cute.make_swizzle(SWIZZLE_BITS[spec.column_block], 4, 3)


def columns(spec: KernelSpec) -> tuple:
    """The column mode of every tile: (elements of a block, blocks)."""
    return (spec.column_block, spec.padded_head_dim // spec.column_block)


def slab_layout(spec: KernelSpec) -> cute.Layout:
    """(row, (column, block)) -> element of one slab."""
    block = spec.column_block
    return cute.make_layout((spec.box_rows, columns(spec)), stride=(block, (1, spec.box_rows * block)))


def ring_layout(spec: KernelSpec) -> cute.Layout:
    """((row, slab), (column, block), stage) -> element of the whole ring of K (or V) tiles."""
    rows, block = spec.box_rows, spec.column_block
    slab, tile = rows * spec.padded_head_dim, spec.tile_n * spec.padded_head_dim
    return cute.make_layout(
        ((rows, spec.tile_n // rows), columns(spec), spec.num_stages),
        stride=((block, slab), (1, rows * block), tile),
    )


def slab_ring_layout(spec: KernelSpec) -> cute.Layout:
    """(row, (column, block), slab, stage): the same memory, one TMA box at a time."""
    rows, block = spec.box_rows, spec.column_block
    slab, tile = rows * spec.padded_head_dim, spec.tile_n * spec.padded_head_dim
    return cute.make_layout(
        (rows, columns(spec), spec.tile_n // rows, spec.num_stages),
        stride=(block, (1, rows * block), slab, tile),
    )


def transposed(ring: cute.Tensor) -> cute.Tensor:
    """The ring as (column, token, stage): V as the B operand of P V."""
    return cute.make_tensor(ring.iterator, cute.select(ring.layout, mode=[1, 0, 2]))
