"""Queries that warps of their own bring and settle beside the loop over tiles, so that a turn between two pieces has less to do.

A query has two buffers. These warps fill one while the consumers attend with the other, and each mbarrier says what a barrier of
all consumers says elsewhere: that a query has come, that a buffer is free, and that the merge buffer is. So a consumer warp that
has stored its part of a piece goes on to the next piece at once. The consumers bring a share's first query: they have nothing
else to do, and are more.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import KernelSpec
from ..attend.pack_gqa import fetch_query, query_buffer, settle_query
from ..attend.query_rows import heads_of
from ..kv.scale import open_scaling
from ..problem import Problem
from ..ptx.registers import LANES
from ..schedule.opening import meet, open_following, read_opening
from ..schedule.work_scheduler import following, make_piece, unfinished
from .shared import Shared, merged_barrier, query_barrier, used_barrier


def make_query_barriers(spec: KernelSpec, shared: Shared):
    """Makes the mbarriers of queries and of the merge buffer. One lane calls it."""
    for buffer in range(spec.query_buffers):
        cute.arch.mbarrier_init(query_barrier(spec, shared, buffer), LANES * spec.query_warps)
        cute.arch.mbarrier_init(used_barrier(spec, shared, buffer), spec.num_warps)
    cute.arch.mbarrier_init(merged_barrier(spec, shared), spec.num_warps)


@cute.jit
def bring_queries(spec: cutlass.Constexpr, problem: Problem, shared: Shared, worker: Int32):
    """The work of a warp that brings queries: those of every row of a share but the first. worker: which of them it is."""
    cute.arch.griddepcontrol_wait()
    meet(spec)
    opening = read_opening(spec, problem, shared)[0]
    share, row, workers = opening.share, opening.row, (worker, spec.query_warps)
    sign = open_scaling(spec, problem.scales, heads_of(spec, problem.rows.queries, share.unit)[0], Float32(1.0)).sign
    index, first, turn, settled = share.row, share.tile, Int32(0), share.row  # turn: as consumers count rows
    while unfinished(share, index, first):
        piece = make_piece(spec, problem.rows, share, index, row, first, Int32(0))
        upcoming = following(spec, problem.rows, problem.batch(spec), piece)
        if index > settled:  # a row may have several pieces
            turn += 1
            which, buffer = buffer_of(spec, turn), query_buffer(spec, shared.query, turn)
            cute.arch.mbarrier_wait(used_barrier(spec, shared, which), (turn // spec.query_buffers) % 2 ^ 1)
            fetch_query(spec, problem.q, piece.block, buffer, workers)
            settle_query(spec, buffer, shared.inverses[None, which], piece.block.rows, sign, Boolean(True), workers)
            cute.arch.mbarrier_arrive(query_barrier(spec, shared, which))
        settled = index
        index, first = upcoming
        row = open_following(spec, problem, share, *upcoming)


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
    """A consumer warp leaves a query's buffer to the next query, if it is `done` with the row."""
    cute.arch.sync_warp()
    if done:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(used_barrier(spec, shared, buffer_of(spec, turn)))


def await_merge(spec: KernelSpec, shared: Shared, pieces: Int32):
    """A consumer warp waits until all have stored their parts of the `pieces` before this one."""
    cute.arch.mbarrier_wait(merged_barrier(spec, shared), (pieces % 2) ^ 1)


@cute.jit
def release_merge(spec: cutlass.Constexpr, shared: Shared):
    """A consumer warp has stored its part of a piece."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(merged_barrier(spec, shared))
