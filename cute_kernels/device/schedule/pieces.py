"""Into how many pieces (KV splits) blocks of long queries are cut, so that SMs do not wait for the last of few blocks.

Blocks that are dealt whole end in rounds: 144 of them take 132 SMs as long as 264. So few blocks are cut, all into the number of
pieces with which the rounds are expected to end first; attention/choice/cost_model.py applies the same rule to a plan's longest
queries. Nothing is planned: the warp that finds items reads the lengths. A result then depends on which batch a request is in,
though never on the CTA that computes it; an invariant plan (PlanPreference.batch_invariant) cuts no block.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...config.decode import ITEM_COST, LEAST_PIECE, SLOTS, KernelSpec
from ..attend.query_rows import Row, kv_range, tiles_of
from ..kv.source import Rows, open_lane_row
from ..problem import Problem
from ..ptx.registers import LANES, lane_sum, quotient, remainder, warp_max
from .dealing import items_of

MOST_REQUESTS = 1024  # of more, a warp would read lengths for longer than it could win
MOST_BLOCKS, MOST_TILES, MOST_COST = 2**10, 2**15, 2**25  # that are counted: no sum or product of them wraps


@cute.jit
def pieces_of_blocks(spec: cutlass.Constexpr, problem: Problem) -> tuple[Int32, Int32]:
    """(blocks of this launch, if few; pieces of each). A warp finds them, each lane judging another number of pieces."""
    batch, ctas = problem.batch(spec), cute.arch.grid_dim()[0]
    blocks, longest, tiles = Int32(0), Int32(1), Int32(0)  # tiles: of all blocks
    if batch <= MOST_REQUESTS:
        for begin in cutlass.range(0, batch, LANES, unroll=1):
            row = open_lane_row(spec, problem.rows, begin + cute.arch.lane_idx(), batch)
            own, most, least = blocks_of_row(spec, problem.rows, row)
            blocks = cutlass.min(blocks + lane_sum(own), MOST_BLOCKS)
            longest = cutlass.max(longest, warp_max(cutlass.max(most, least)))
            tiles = cutlass.min(tiles + lane_sum(quotient(own * (most + least), 2)), MOST_BLOCKS * MOST_TILES)
    pieces = cute.arch.lane_idx() + 1
    counted = (blocks > 0) & (blocks < MOST_BLOCKS)
    fits = counted & (blocks * pieces <= SLOTS[spec.partition] * ctas) & (LEAST_PIECE * pieces <= longest)
    cost = rounds_cost(spec, cutlass.max(blocks, 1), ctas, longest, tiles, pieces)
    cost = cutlass.select_(fits | (pieces == 1), cutlass.min(cost, MOST_COST), MOST_COST + 1)
    best = cute.arch.warp_redux_sync(cost * LANES + cute.arch.lane_idx(), "min")
    return blocks, remainder(best, LANES) + 1


def blocks_of_row(spec: KernelSpec, rows: Rows, row: Row) -> tuple[Int32, Int32, Int32]:
    """(blocks of a request and all KV heads, tiles of its last block, and of its first). MOST_BLOCKS and MOST_TILES at most."""
    blocks = items_of(spec, rows, row.queries)
    last = quotient(blocks, Int32(rows.k.shape[1])) - 1
    tiles = [tiles_of(spec, kv_range(spec, rows.queries, row, block)) for block in (cutlass.max(last, 0), Int32(0))]
    return cutlass.min(blocks, MOST_BLOCKS), *(cutlass.min(one, MOST_TILES) for one in tiles)


def rounds_cost(spec: KernelSpec, blocks: Int32, ctas: Int32, longest: Int32, tiles: Int32, pieces: Int32) -> Int32:
    """Tiles that the busiest CTA is expected to attend to, and what items cost it beyond their tiles. tiles: of all blocks."""
    rounds = quotient(blocks * pieces + ctas - 1, ctas)
    mean = quotient(tiles + blocks - 1, blocks)
    attended = quotient(cutlass.max(longest, rounds * mean) + pieces - 1, pieces)
    return attended + rounds * (ITEM_COST + cutlass.select_(pieces > 1, spec.cut_cost, 0))
