"""A tile of K or V in shared memory: tile_n tokens x a row of 16-bit units, as swizzled slabs.

A unit is an element of 16 bits or two neighbouring ones of 8. One slab is what one TMA box brings: [column block][row]
[column_block units], with `box_rows` rows of one page. Its rows of 32, 64 or 128 bytes are swizzled over 8 (or fewer) rows so
that ldmatrix reads them without bank conflicts. A tile is tile_n / box_rows slabs in a row, so token `t` lies in slab
t / box_rows: the nested first mode below.
"""

import cutlass.cute as cute

from ...config.decode import RingShape

SWIZZLE_BITS = {64: 3, 32: 2, 16: 1}


def swizzle(shape: RingShape) -> cute.Swizzle:
    """XOR of address bits 4.. with bits 7..: rows of `column_block` units spread over all banks."""
    return cute.make_swizzle(SWIZZLE_BITS[shape.column_block], 4, 3)


def columns(shape: RingShape) -> tuple:
    """The column mode of every tile: (units of a block, blocks)."""
    return (shape.column_block, shape.units // shape.column_block)


def slab_layout(shape: RingShape) -> cute.Layout:
    """(row, (column, block)) -> unit of one slab."""
    block = shape.column_block
    return cute.make_layout((shape.box_rows, columns(shape)), stride=(block, (1, shape.box_rows * block)))


def ring_layout(shape: RingShape) -> cute.Layout:
    """((row, slab), (column, block), stage) -> unit of the whole ring of K (or V) tiles."""
    rows, block = shape.box_rows, shape.column_block
    slab, tile = rows * shape.units, shape.tile_n * shape.units
    return cute.make_layout(
        ((rows, shape.tile_n // rows), columns(shape), shape.num_stages),
        stride=((block, slab), (1, rows * block), tile),
    )


def slab_ring_layout(shape: RingShape) -> cute.Layout:
    """(row, (column, block), slab, stage): the same memory, one TMA box at a time."""
    rows, block = shape.box_rows, shape.column_block
    slab, tile = rows * shape.units, shape.tile_n * shape.units
    return cute.make_layout(
        (rows, columns(shape), shape.tile_n // rows, shape.num_stages),
        stride=(block, (1, rows * block), slab, tile),
    )


def transposed(ring: cute.Tensor) -> cute.Tensor:
    """The ring as (column, token, stage): V as the B operand of P V."""
    return cute.make_tensor(ring.iterator, cute.select(ring.layout, mode=[1, 0, 2]))
