"""Brings a query to warps of two m-tiles each: rows pass through registers, rescaled, to the fragments that these warps read.

A warp brings four rows together, two of each half of an m-tile: then a lane has whole fragments of theirs, and the four chains of
loads, maxima and products hide each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...config.decode import KernelSpec
from ...config.tiling import HALF_TILE_M, TILE_M
from ..ptx.registers import LANES, quotient, remainder
from ..ptx.warps import warp_number
from .pack_gqa import PAIR_BYTES, place_of
from .query_range import rescale
from .query_rows import QueryBlock, block_view, place_in_view

COLUMNS = 4  # neighbouring columns of a row that a lane brings: two pairs
GROUPS = TILE_M // 4  # groups of four rows of an m-tile


@cute.jit
def bring_rows(
    spec: cutlass.Constexpr,
    q: cute.Tensor,
    block: QueryBlock,
    shared: cute.Tensor,
    inverses: cute.Tensor,
    sign: Float32,
    workers: tuple[Int32, int] | None = None,
):
    """Warps bring the query of a block of packed rows to shared memory as the products read it.

    shared: a buffer [element, lane, k16 step]; inverses, sign: as in settle_query; workers: which of the warps that share the
    work this one is, and how many they are, None for the consumer warps. Rows not in use are zeros: a NaN of what shared memory
    held would move bases of a warp at each tile (lazy.weigh_lazily). Other warps see the result after a barrier.
    """
    source, words = block_view(spec, q, block), cute.recast_tensor(shared, Int32)
    begin, step = (warp_number(), spec.num_warps) if cutlass.const_expr(workers is None) else workers
    for group in cutlass.range(begin, spec.row_tiles * GROUPS, step, unroll=1):
        first = quotient(group, GROUPS) * TILE_M + remainder(group, GROUPS) * 2
        rows = [first, first + HALF_TILE_M, first + 1, first + 1 + HALF_TILE_M]
        pairs = [load_row(spec, source, block, row) for row in rows]
        if cutlass.const_expr(spec.rescales_query):
            found = [rescale(spec, of_row, sign) for of_row in pairs]
            if cute.arch.lane_idx() == 0:
                for row, inverse in zip(rows, found, strict=True):
                    inverses[row] = inverse
        for i in cutlass.range_constexpr(0, len(rows), 2):
            store_fragments(spec, words, rows[i], pairs[i : i + 2])


def columns_of_lane(spec: KernelSpec) -> list[Int32]:
    """The first of each COLUMNS neighbouring columns of a row that this lane brings; they may lie past padded_head_dim."""
    return [first + COLUMNS * cute.arch.lane_idx() for first in range(0, spec.padded_head_dim, COLUMNS * LANES)]


def load_row(spec: KernelSpec, source: cute.Tensor, block: QueryBlock, row: Int32) -> cute.Tensor:
    """This lane's pairs of columns of a packed row; zeros for columns past head_dim, or of a row not in use.

    head_dim is a multiple of 16, as TMA brings the tiles that paired warps read.
    """
    columns = columns_of_lane(spec)
    pairs = cute.make_rmem_tensor(2 * len(columns), Int32)
    start = source.iterator.toint() + Int64(cute.crd2idx((*place_in_view(spec, block, row), 0), source.layout)) * spec.q_bytes
    for i, column in enumerate(columns):
        inside = (row < block.rows) & (column < spec.head_dim)
        pairs[2 * i], pairs[2 * i + 1] = load_pairs(start + column * spec.q_bytes, inside)
    return pairs


def load_pairs(address: Int64, inside: Boolean) -> tuple[Int32, Int32]:
    """Two neighbouring pairs, by one load if the address allows it; zeros if they are not `inside`."""
    text = (
        "{ .reg .b32 first, second; .reg .pred both, apart; mov.b32 first, 0; mov.b32 second, 0; "
        "and.pred both, {$r1}, {$r2}; xor.pred apart, {$r1}, both; @both ld.global.v2.b32 {first, second}, [{$r0}]; "
        "@apart ld.global.b32 first, [{$r0}]; @apart ld.global.b32 second, [{$r0}+4]; "
        "mov.b32 {$w0}, first; mov.b32 {$w1}, second; }"
    )
    together = address % (2 * PAIR_BYTES) == 0
    found = cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[address, inside, together])
    return found[0], found[1]


@cute.jit
def store_fragments(spec: cutlass.Constexpr, words: cute.Tensor, row: Int32, pairs: list):
    """Writes a lane's pairs of a packed row and of the row HALF_TILE_M further on, which share fragments."""
    for i, column in enumerate(columns_of_lane(spec)):
        if column < spec.padded_head_dim:
            if cutlass.const_expr(spec.k_bytes == 1):  # neighbouring columns are neighbours in the codec's order too
                _, lane, step = place_of(spec, row, column)
                fragment = cute.make_rmem_tensor(4, Int32)
                for half in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        fragment[2 * half + which] = pairs[which][2 * i + half]
                cute.autovec_copy(fragment, words[None, lane, step])
            else:
                for half in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        words[place_of(spec, row + which * HALF_TILE_M, column + 2 * half)] = pairs[which][2 * i + half]
