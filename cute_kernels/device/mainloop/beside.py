"""What warps of their own do beside the loop over tiles, so that a turn between two pieces takes the consumers little time.

They bring and settle queries. A query has two buffers: they fill one while the consumers attend with the other. They also store
the pieces whose states the consumers left in the merge buffer (KernelSpec.stores_beside). Each mbarrier says what a barrier of
all consumers says elsewhere: that a query has come, that a query's buffer is free, that a piece can be merged, and that the merge
buffer is free. So a consumer warp that has left its states goes on to the next piece at once. The consumers themselves bring a
share's first query and store its last piece: they have nothing else to do then, and are more. They also store short pieces, which
would be over before these warps had brought the next query and stored the piece before.

Where scales of tokens leave no such warps (KernelSpec.tile_producers), the producers bring a query once a row's tiles are issued.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import KernelSpec
from ..attend.epilogue import Storers, join_state, share_state
from ..attend.pack_gqa import prefetch_query, query_buffer
from ..attend.paired_query import bring_rows
from ..attend.query_rows import QueryBlock, Row, heads_of, query_block
from ..kv.scale import Scaling, open_scaling
from ..problem import Problem
from ..ptx.registers import LANES
from ..schedule.work_scheduler import Piece, Share
from .shared import Shared, left_barrier, mergeable_barrier, merged_barrier, query_barrier, used_barrier

LONG_TURNS = 2  # tiles of each turn in the shortest piece that these warps store: they take some 6 us, 16 tiles of 8 bits 6 to 7


def assistants(spec: KernelSpec, worker: Int32) -> Storers:
    """The threads of the warps beside the loop, of which this is number `worker`: with more columns at once registers spill."""
    return Storers(worker * LANES + cute.arch.lane_idx(), spec.query_warps * LANES, 1, 4)


def make_query_barriers(spec: KernelSpec, shared: Shared):
    """Makes the mbarriers of queries and of the merge buffer. One lane calls it."""
    for buffer in range(spec.query_buffers):
        cute.arch.mbarrier_init(query_barrier(spec, shared, buffer), LANES * spec.query_warps)
        cute.arch.mbarrier_init(used_barrier(spec, shared, buffer), LANES * spec.num_warps)
    storing = spec.query_warps if spec.stores_beside else spec.num_warps
    cute.arch.mbarrier_init(merged_barrier(spec, shared), LANES * storing)
    if spec.stores_beside:
        cute.arch.mbarrier_init(mergeable_barrier(spec, shared), LANES * spec.num_warps)
        for place in range(spec.merge_places):
            cute.arch.mbarrier_init(left_barrier(spec, shared, place), LANES * spec.readers)


def bring_query(spec: KernelSpec, problem: Problem, shared: Shared, block: QueryBlock, turn: Int32, sign: Float32, worker: Int32):
    """A worker, which has a number among query_warps, brings its part of the query of the share's row number `turn`."""
    which, buffer, workers = buffer_of(spec, turn), query_buffer(spec, shared.query, turn), (worker, spec.query_warps)
    cute.arch.mbarrier_wait(used_barrier(spec, shared, which), (turn // spec.query_buffers) % 2 ^ 1)
    bring_rows(spec, problem.q, block, buffer, shared.inverses[None, which], sign, workers)
    cute.arch.mbarrier_arrive(query_barrier(spec, shared, which))


def bring_following(
    spec: KernelSpec, problem: Problem, shared: Shared, share: Share, index: Int32, row: Row, turn: Int32, worker: Int32
):
    """bring_query of a share's row `index`, opened as `row`, for a worker that has not opened the share's heads and scales."""
    kv_head, block = block_of_share(spec, problem, share, index, row)
    sign = open_scaling(spec, problem.scales, kv_head, Float32(1.0)).sign
    bring_query(spec, problem, shared, block, turn, sign, worker)


@cute.jit
def prefetch_following(spec: cutlass.Constexpr, problem: Problem, share: Share, index: Int32, row: Row, there: Boolean):
    """Prefetches into L2 the query of a share's row `index`, opened as `row`, which the consumers fetch between two pieces."""
    if there:
        prefetch_query(spec, problem.q, block_of_share(spec, problem, share, index, row)[1])


def block_of_share(spec: KernelSpec, problem: Problem, share: Share, index: Int32, row: Row) -> tuple[Int32, QueryBlock]:
    """(the first KV head of a share's unit, the block that the unit holds of the share's row `index`, opened as `row`)."""
    queries = problem.rows.queries
    heads = heads_of(spec, queries, share.unit)
    return heads[0], query_block(spec, queries, share.unit, heads, index, row)


def buffer_of(spec: KernelSpec, turn: Int32) -> Int32:
    """The buffer of the query of the share's row number `turn`."""
    return turn % spec.query_buffers


@cute.jit
def await_query(spec: cutlass.Constexpr, shared: Shared, turn: Int32):
    """A consumer warp waits for the query of the share's row number `turn`, if other warps bring it."""
    if turn > 0:
        parity = ((turn - 1) // spec.query_buffers) % 2
        cute.arch.mbarrier_wait(query_barrier(spec, shared, buffer_of(spec, turn)), parity)


@cute.jit
def release_query(spec: cutlass.Constexpr, shared: Shared, turn: Int32, done: Boolean):
    """A consumer warp leaves a query's buffer to the next query, if it is `done` with the row: each lane for its own reads."""
    if done:
        cute.arch.mbarrier_arrive(used_barrier(spec, shared, buffer_of(spec, turn)))


def await_merge(spec: KernelSpec, shared: Shared, pieces: Int32):
    """A consumer warp waits until the `pieces` before this one have been stored."""
    if spec.stores_beside:  # over by now: the consumers' own accesses are ordered without those that stored
        cute.arch.mbarrier_wait(mergeable_barrier(spec, shared), (pieces % 2) ^ 1)
    cute.arch.mbarrier_wait(merged_barrier(spec, shared), (pieces % 2) ^ 1)


def stored_beside(spec: KernelSpec, piece: Piece, more: Boolean) -> Boolean:
    """Whether warps beside the loop store a piece. more: whether another piece follows."""
    if not spec.stores_beside:
        return Boolean(False)
    found = more & (piece.stop - piece.first >= LONG_TURNS * spec.turns)
    return cute.arch.make_warp_uniform(found.to(Int32)) != 0  # held in a uniform register; else ptxas spills 48 others


def await_states(spec: KernelSpec, shared: Shared, pieces: Int32):
    """A worker waits until the merge buffer has the piece that `pieces` others came before."""
    cute.arch.mbarrier_wait(mergeable_barrier(spec, shared), pieces % 2)


def release_merge(spec: KernelSpec, shared: Shared):
    """A warp has stored its part of a piece: each lane says so for what it has read itself."""
    cute.arch.mbarrier_arrive(merged_barrier(spec, shared))


@cute.jit
def fold_states(
    spec: cutlass.Constexpr, shared: Shared, states: list, heads: Int32, order: Int32, pieces: Int32, scaling: Scaling
):
    """A consumer warp's states of its two m-tiles go to a place of the merge, or join those that a warp ahead of it left there.

    order: its place among all turns, of which the later half joins the first. pieces: how many came before.
    """
    first, second = states
    if order < spec.merge_places:
        share_state(spec, shared.merge, first, heads, order)
        share_state(spec, shared.merge, second, heads, order)
        cute.arch.mbarrier_arrive(left_barrier(spec, shared, order))
        cute.arch.mbarrier_arrive(mergeable_barrier(spec, shared))
    else:
        place = order - spec.merge_places
        cute.arch.mbarrier_wait(left_barrier(spec, shared, place), pieces % 2)
        join_state(spec, shared.merge, first, heads, place, scaling)
        join_state(spec, shared.merge, second, heads, place, scaling)
        cute.arch.mbarrier_arrive(mergeable_barrier(spec, shared))
