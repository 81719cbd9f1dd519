"""A tile of K or V in shared memory: tile_n tokens x a row of 16-bit units, as swizzled slabs.

A unit is one 16-bit element, two neighbouring 8-bit elements, or half of an f32. One TMA box brings one slab: [column block][row]
[column_block units], with `box_rows` rows of one page. Its rows of 32, 64 or 128 bytes are swizzled over 8 (or fewer) rows so
that ldmatrix reads them without bank conflicts. A tile is tile_n / box_rows slabs in a row, so token `t` lies in slab
t / box_rows: the nested first mode below. If wgmma reads the tile (`by_block`), its column blocks lie one after the other,
[column block][token][column_block units], and a box brings `box_rows` tokens of one block.
"""

import cutlass.cute as cute
from cutlass import Int32

from ...config.problem import UNIT_BYTES
from ...config.tiling import RingShape

SWIZZLE_BITS = {64: 3, 32: 2, 16: 1}
SWIZZLE_ROWS = 8  # a swizzle repeats after this many rows


def swizzle(shape: RingShape) -> cute.Swizzle:
    """XOR of address bits 4.. with bits 7..: rows of `column_block` units spread over all banks."""
    return cute.make_swizzle(SWIZZLE_BITS[shape.column_block], 4, 3)


def columns(shape: RingShape) -> tuple:
    """The column mode of every tile: (units of a block, blocks)."""
    return (shape.column_block, shape.units // shape.column_block)


def slab_layout(shape: RingShape) -> cute.Layout:
    """(row, (column, block)) -> unit of one slab; (row, column) -> unit of one column block, if a box brings only that."""
    block = shape.column_block
    if shape.by_block:
        return cute.make_layout((shape.box_rows, block), stride=(block, 1))
    return cute.make_layout((shape.box_rows, columns(shape)), stride=(block, (1, shape.box_rows * block)))


def ring_layout(shape: RingShape) -> cute.Layout:
    """((row, slab), (column, block), stage) -> unit of the whole ring of K (or V) tiles."""
    block, (slab, between) = shape.column_block, distances(shape)
    return cute.make_layout(
        ((shape.box_rows, shape.tile_n // shape.box_rows), columns(shape), shape.num_stages),
        stride=((block, slab), (1, between), shape.tile_n * shape.units),
    )


def distances(shape: RingShape) -> tuple[int, int]:
    """(units from one slab of a tile to the next, units from one column block to the next)."""
    rows = shape.tile_n if shape.by_block else shape.box_rows
    return shape.box_rows * (shape.column_block if shape.by_block else shape.units), rows * shape.column_block


def box_columns(shape: RingShape) -> tuple | int:
    """The columns that one TMA box brings."""
    return shape.column_block if shape.by_block else columns(shape)


def boxes_across(shape: RingShape) -> int:
    """Boxes that bring all columns of a slab."""
    return shape.units // shape.column_block if shape.by_block else 1


def slab_ring_layout(shape: RingShape) -> cute.Layout:
    """(row, column, slab, column block, stage) -> unit: the memory of ring_layout, one TMA box at a time."""
    block, (slab, between) = shape.column_block, distances(shape)
    across = (1, between) if not shape.by_block else 1
    return cute.make_layout(
        (shape.box_rows, box_columns(shape), shape.tile_n // shape.box_rows, boxes_across(shape), shape.num_stages),
        stride=(block, across, slab, between, shape.tile_n * shape.units),
    )


def transposed(ring: cute.Tensor) -> cute.Tensor:
    """The ring as (column, token, stage): V as the B operand of P V."""
    return cute.make_tensor(ring.iterator, cute.select(ring.layout, mode=[1, 0, 2]))


def swizzled(shape: RingShape, stage: Int32 | int, token: Int32, column: Int32) -> Int32:
    """Byte offset in a ring of a token's byte `column`: ring_layout with the swizzle applied."""
    row_bytes = shape.column_block * UNIT_BYTES
    rows, before = shape.tile_n, 0
    if not shape.by_block and shape.box_rows < shape.tile_n and shape.units > shape.column_block:
        rows, before = shape.box_rows, token // shape.box_rows * (shape.box_rows * shape.units * UNIT_BYTES)
        token = token % rows
    offset = before + (column // row_bytes * rows + token) * row_bytes + column % row_bytes
    return stage * shape.tile_bytes + spread(shape, offset)


def address(ring: cute.Tensor, shape: RingShape, stage: Int32) -> Int32:
    """The shared-memory address of a stage's tile."""
    return Int32(ring.iterator.toint()) + stage * shape.tile_bytes


def spread(shape: RingShape, offset: Int32) -> Int32:
    """A byte offset in a tile, swizzled."""
    return offset ^ ((offset >> 3) & ((2 ** SWIZZLE_BITS[shape.column_block] - 1) << 4))
