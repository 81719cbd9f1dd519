"""The decode kernel: a persistent grid in which each CTA attends to its share (work partition) of all (row, KV head, KV tile).

It composes modules that know nothing of each other: schedule/work_scheduler decides which CTA works on what, kv/source finds a
tile, a mainloop/ moves the tile to shared memory, attend/ computes on it, and results stores what comes of it, which combine/
completes if the row was cut. A piece is a KV split of a row; a crew: the CTAs that combine a cut row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...config.decode import LOG2_E, KernelSpec
from ..attend.attend import Attention, RowTile, make_products, make_state, reset_state
from ..attend.epilogue import LaneState, SettledRows, all_consumers, lane_state, settle_rows, share_states
from ..attend.mask import make_row_mask
from ..attend.pack_gqa import (
    fetch_query,
    hold_query,
    lane_rows_of,
    query_buffer,
    read_inverses,
    read_query,
    row_tiles_of,
    settle_query,
    sync_consumers,
)
from ..attend.paired_query import bring_rows
from ..attend.query_rows import Row, heads_of, query_block
from ..attend.score import make_modifier
from ..attend.turns import settle_turns, share_halves
from ..kv.scale import Scaling, merge_scaling, open_scaling
from ..kv.source import Rows
from ..mainloop.beside import (
    assistants,
    await_merge,
    await_query,
    await_states,
    bring_query,
    fold_states,
    release_merge,
    release_query,
    stored_beside,
)
from ..mainloop.block import BlockMainloop
from ..mainloop.cp_async import CpAsyncMainloop
from ..mainloop.dealt import DealtMainloop
from ..mainloop.gather import GatherMainloop
from ..mainloop.overlap import OverlapMainloop
from ..mainloop.shared import Shared, allocate
from ..mainloop.tma import TmaMainloop
from ..problem import Problem
from ..ptx.warps import warp_number
from ..schedule.crew import RUNNING, announce, settle
from ..schedule.opening import meet_beside, open_following, read_opening
from ..schedule.work_scheduler import Piece, Share, following, make_piece, unfinished
from .results import PieceResults, is_part


def mainloop_of(spec: KernelSpec) -> TmaMainloop | CpAsyncMainloop:
    """The mainloop of a spec: how tiles reach shared memory."""
    if spec.arch == "sm80":
        return BlockMainloop(spec) if spec.shares_ring else CpAsyncMainloop(spec)
    if spec.dealt:
        return GatherMainloop(spec) if spec.gathers else DealtMainloop(spec)
    return OverlapMainloop(spec) if spec.overlaps else TmaMainloop(spec)


class DecodeKernel(PieceResults):
    """Launches decode for one kernel spec."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.mainloop = mainloop_of(spec)
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch: starts while the previous kernel drains
        self.divides = spec.divides_combine
        self.counts_turns = spec.q_lens is not None or spec.query_warps > 0
        read_late = spec.by_warpgroup or spec.splits or spec.shares_ring or spec.tile_heads > 1
        self.opens_early = spec.several and spec.tile_heads == 1
        self.fetches_late = spec.query_buffers == 1 and read_late  # the warps read it from shared memory, tile by tile

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor,
        table0: cute.Tensor | None, table1: cute.Tensor | None, table2: cute.Tensor | None,
        k_scale: cute.Tensor | None, v_scale: cute.Tensor | None,
        out: cute.Tensor, lse: cute.Tensor, workspace: cute.Tensor | None,
        softmax_scale: Float32, num_ctas: Int32, status: Int64,
        stream,
    ):  # fmt: skip
        """q, out [batch, num_heads, head_dim]; k, v [pages, num_kv_heads, page_size, head_dim] (contiguous: one page per row).

        k_scale, v_scale: [1], [num_kv_heads], or one scale per token (kv/scale.find_scale), or None. workspace: zeros, as each
        launch leaves it, or None if no row is cut. status: address of the plan's 4 int32 status words.
        """
        tables = tuple(t for t in (table0, table1, table2) if t is not None)
        caches, scales = self.mainloop.operands(k, v), (k_scale, v_scale)
        self.launch(q, k, caches, scales, tables, out, lse, workspace, softmax_scale, num_ctas, status, (), stream)

    def launch(self, q, k, caches, scales, tables, out, lse, workspace, softmax_scale, num_ctas, status, further, stream):
        """Starts the grid. further: the further operands of AttentionKernel, () in a plain kernel."""
        self.decode(q, k, caches, scales, tables, out, lse, workspace, softmax_scale * LOG2_E, status, further).launch(
            grid=(num_ctas, 1, 1),
            block=(32 * self.spec.warps, 1, 1),
            smem=self.spec.smem_bytes,
            min_blocks_per_mp=self.spec.min_ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def decode(
        self, q, k, caches, scales: tuple, tables: tuple, out, lse, workspace, scale_log2: Float32, status: Int64, further: tuple
    ):
        """One CTA's share: a producer warp runs ahead, consumer warps attend, merge and store piece by piece."""
        shared = allocate(self.spec, cutlass.memory.SmemAllocator())
        queries, scores = self.name_further(q, further)
        problem = Problem(q, caches, scales, Rows(tables, k, queries), out, lse, workspace, scale_log2, status, scores)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.mainloop.producer_warps > 0):
            self.divide(problem, shared, self.spec.register_shares, (0, self.spec.warps))
        else:
            self.consume(problem, shared)

    @cute.jit
    def divide(self, problem: Problem, shared: Shared, registers: cutlass.Constexpr, warps: cutlass.Constexpr):
        """Gives each warp of a range its work: to attend, or to bring tiles.

        registers: of a thread that attends and of another, or None if all keep theirs. warps: (first, one past the last).
        """
        spec, warp = self.spec, cute.arch.make_warp_uniform(warp_number())
        if cutlass.const_expr(spec.opens_kernel and warps[0] == 0) and warp == 0:
            self.mainloop.prepare(problem.caches, shared)
        ahead = cutlass.const_expr(spec.looks_ahead and self.mainloop.ahead_warp in range(*warps))
        if cutlass.const_expr(ahead and not spec.hears_share) and warp == self.mainloop.ahead_warp:
            self.mainloop.look_ahead(problem, shared)
        if cutlass.const_expr(warps[1] <= spec.num_warps):
            self.consume(problem, shared)
        elif cutlass.const_expr(warps[0] >= spec.num_warps):
            self.supply(problem, shared, warp - spec.num_warps)
        elif cutlass.const_expr(spec.hears_share) and warp == spec.num_warps:
            # a branch of its own, ahead of the others: its code is near the kernel's start (e4m3, 32 rows, 64 x 1k 40.5 -> 39.3)
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_decrease(registers[1])
            self.supply(problem, shared, Int32(0))
        elif warp < spec.num_warps:
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_increase(registers[0])
            self.consume(problem, shared)
        else:
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_decrease(registers[1])
            if cutlass.const_expr(spec.hears_share) and warp == self.mainloop.ahead_warp:  # its registers are handed over
                self.mainloop.look_ahead(problem, shared)
            self.supply(problem, shared, warp - spec.num_warps)

    @cute.jit
    def supply(self, problem: Problem, shared: Shared, role: Int32):
        """The warps that bring tiles, widen them or assist the consumers.

        role: 0, or below `gatherers` or tile_producers: K and V, and tokens' scales if `brings_scales`; else 1 brings the scales,
        or V (Load). The last ones widen, or assist.
        """
        spec, (tiles, other) = self.spec, self.mainloop.loads
        if cutlass.const_expr(spec.gathers):
            if role == 0:
                self.mainloop.gather(problem, shared, role, leads=True)
            elif role < spec.gatherers:
                self.mainloop.gather(problem, shared, role, leads=False)
        elif role < spec.tile_producers:
            self.mainloop.produce(problem, shared, role, tiles)
        elif cutlass.const_expr(spec.widens_tiles):
            if role >= spec.first_widening:
                self.mainloop.widen(problem, shared, role - spec.first_widening)
            elif role == 1 and cutlass.const_expr(spec.token_scales > 0 and not spec.brings_scales):
                self.mainloop.produce(problem, shared, role, other)
        elif cutlass.const_expr(spec.assistants > 0):
            if role >= spec.producers:
                self.assist(problem, shared, role - spec.producers)
            elif cutlass.const_expr(spec.token_scales > 0 and not spec.brings_scales):
                self.mainloop.produce(problem, shared, role, other)
        elif role == 1 and cutlass.const_expr(spec.producers > 1):  # other warps may only have registers to hand over
            self.mainloop.produce(problem, shared, role, other)

    @cute.jit
    def assist(self, problem: Problem, shared: Shared, worker: Int32):
        """The work of a warp beside the loop: it brings all queries but a share's first, and stores pieces (stored_beside)."""
        spec, queries = self.spec, problem.rows.queries
        cute.arch.griddepcontrol_wait()
        meet_beside(spec)
        opening = read_opening(spec, problem, shared)[0]
        share, row = opening.share, opening.row
        heads = heads_of(spec, queries, share.unit)
        storers = assistants(spec, worker)
        scaling = open_scaling(spec, problem.scales, heads[0], problem.scale_log2)
        index, first, turn, pieces = share.row, share.tile, Int32(0), Int32(0)  # turn: as consumers count rows
        more = unfinished(spec, share, index, first)
        while more:
            piece = make_piece(spec, problem.rows, share, index, row, first, Int32(0))
            next_index, next_first = following(spec, problem.rows, problem.batch(spec), piece)
            row = open_following(spec, problem, share, next_index, next_first)
            more = unfinished(spec, share, next_index, next_first)
            if more and next_index > index:  # a row may have several pieces
                turn += 1
                block = query_block(spec, queries, share.unit, heads, next_index, row)
                bring_query(spec, problem, shared, block, turn, scaling.sign, worker)
            if cutlass.const_expr(spec.stores_beside):
                beside = stored_beside(spec, piece, more)
                if beside:
                    await_states(spec, shared, pieces)
                    self.store(problem, shared, share, piece, Int32(0), merge_scaling(spec, scaling), (None, None), storers)
                    release_merge(spec, shared)
                    pieces += 1
            index, first = next_index, next_first

    @cute.jit
    def consume(self, problem: Problem, shared: Shared):
        """The consumer warps: every piece of the share, in order, then the columns that this CTA combines."""
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.divides):
            announce(self.spec, problem, Int32(RUNNING))
        opening = self.mainloop.open_share(problem, shared)
        share = opening.share
        spec, queries = self.spec, problem.rows.queries
        products = make_products(spec, shared)
        thr_mma = products.thr_mma
        held, states = hold_query(spec), tuple(make_state(spec, thr_mma) for _ in range(spec.warp_tiles))
        heads = heads_of(spec, queries, share.unit)
        scaling = open_scaling(spec, problem.scales, heads[0], problem.scale_log2)
        index, row, first, issued, settled = share.row, opening.row, share.tile, Int32(0), Int32(-1)  # settled: the query's row
        turn, pieces = Int32(0), Int32(0)  # how many rows (if a row's index does not say it) and pieces came before
        self.open_query(problem, shared, share, heads, opening.row, scaling.sign)
        self.open_combine(problem, shared, share, opening.row)
        if cutlass.const_expr(spec.overlaps):
            self.mainloop.open_turns()
        while unfinished(spec, share, index, first):
            piece = make_piece(spec, problem.rows, share, index, row, first, issued)
            next_index, next_first = following(spec, problem.rows, problem.batch(spec), piece)
            beside = stored_beside(spec, piece, unfinished(spec, share, next_index, next_first))
            now, then = self.turn_of(index, turn), self.turn_of(next_index, turn + 1)
            buffer, factors = query_buffer(spec, shared.query, now), shared.inverses[None, now % 2]
            next_buffer = query_buffer(spec, shared.query, then)
            if cutlass.const_expr(spec.query_warps > 0):
                await_query(spec, shared, now)
            else:
                settle_query(spec, buffer, factors, piece.block.rows, scaling.sign, index != settled)
                sync_consumers(spec)
            settled = index
            row_tiles = self.row_tiles(problem, piece, buffer, factors, held, states)
            if cutlass.const_expr(spec.query_buffers == 1 and not self.fetches_late):
                sync_consumers(spec)  # all warps have read their query rows
            if cutlass.const_expr(self.opens_early):  # the next row says which query rows to fetch
                row = open_following(spec, problem, share, next_index, next_first)
            if cutlass.const_expr(not self.fetches_late and spec.query_warps == 0):
                self.fetch_next(problem, next_buffer, share, heads, index, (next_index, next_first), row)
            for state in states:
                reset_state(spec, state)
            self.mainloop.consume(piece, Attention(products, row_tiles, scaling), problem, shared)
            if cutlass.const_expr(not self.opens_early):
                row = open_following(spec, problem, share, next_index, next_first)
            if cutlass.const_expr(self.divides):
                settle(spec, problem, shared, share)
            if cutlass.const_expr(spec.query_warps > 0):
                release_query(spec, shared, now, next_index > index)
                await_merge(spec, shared, pieces)
            order = self.mainloop.order(piece)
            merging = merge_scaling(spec, scaling)
            if cutlass.const_expr(spec.stores_beside):
                more = unfinished(spec, share, next_index, next_first)
                place, scalings = (order, pieces, beside, more), (scaling, merging)
                self.end_beside(problem, shared, share, piece, (row_tiles, thr_mma), place, scalings)
            else:
                outcome = self.settle(shared, piece, row_tiles, thr_mma, order, (scaling, merging))
                sync_consumers(spec)
                if cutlass.const_expr(self.fetches_late and not spec.settles_alone):  # all warps have read this query
                    self.fetch_next(problem, next_buffer, share, heads, index, (next_index, next_first), row)
                self.store(problem, shared, share, piece, order, merging, (outcome, buffer), all_consumers(spec))
            if cutlass.const_expr(self.fetches_late and spec.settles_alone):  # the output went through the query's buffer
                sync_consumers(spec)
                self.fetch_next(problem, next_buffer, share, heads, index, (next_index, next_first), row)
            if cutlass.const_expr(spec.query_warps > 0 and not spec.stores_beside):
                release_merge(spec, shared)
            if cutlass.const_expr(spec.query_warps > 0):
                pieces += Int32(beside) if cutlass.const_expr(spec.stores_beside) else 1
            issued += piece.stop - piece.first
            if cutlass.const_expr(self.counts_turns):
                turn += Int32(next_index > index)
            index, first = next_index, next_first
        if cutlass.const_expr(spec.overlaps):
            self.mainloop.close_turns()
        if cutlass.const_expr(spec.split):
            self.finish(problem, shared, share)
        if cutlass.const_expr(self.divides):
            announce(spec, problem, Int32(0))

    @cute.jit
    def open_query(self, problem: Problem, shared: Shared, share: Share, heads: tuple, row: Row, sign: Float32):
        """Starts to load the query of the share's first row; settles it as well, if other warps settle those of later rows."""
        spec = self.spec
        if unfinished(spec, share, share.row, share.tile):
            block = query_block(spec, problem.rows.queries, share.unit, heads, share.row, row)
            number = self.turn_of(share.row, Int32(0))
            buffer = query_buffer(spec, shared.query, number)
            if cutlass.const_expr(spec.query_warps > 0):
                bring_rows(spec, problem.q, block, buffer, shared.inverses[None, number % 2], sign)
                sync_consumers(spec)
            else:
                fetch_query(spec, problem.q, block, buffer)

    @cute.jit
    def end_beside(
        self, problem: Problem, shared: Shared, share: Share, piece: Piece, attended: tuple, place: tuple, scalings: tuple
    ):
        """Ends a piece that warps beside the loop may store: they do so if it is `beside`, else the warps that attended.

        attended: the warp's m-tiles, and how it multiplied. place: its place in the merge, how many pieces came before, whether
        this one is stored `beside`, and whether `more` follow. scalings: that of the loop, and merge_scaling.
        """
        spec, (row_tiles, thr_mma), (order, pieces, beside, more), (scaling, merging) = self.spec, attended, place, scalings
        states = [lane_state(spec, thr_mma, *both, scaling) for both in zip(row_tiles, row_tiles_of(spec), strict=True)]
        if beside:
            fold_states(spec, shared, states, piece.block.rows, order, pieces, merging)
        else:
            share_states(spec, shared.merge, states, piece.block.rows, order, merging)
            sync_consumers(spec)
            self.store(problem, shared, share, piece, order, merging, (None, None), all_consumers(spec))
            if more:
                sync_consumers(spec)  # the merge buffer is free

    @cute.jit
    def settle(
        self, shared: Shared, piece: Piece, row_tiles: tuple, thr_mma, order: Int32, scalings: tuple[Scaling, Scaling]
    ) -> SettledRows | LaneState | None:
        """Ends a piece: the warps' states meet in shared memory, or each is settled in its registers and returned.

        If two warpgroups attended in turn to a part of a row, each settles half of the columns in `store`; returns the state.
        order: the warp's place in the merge. scalings: that of the loop, and merge_scaling.
        """
        spec, settled, (scaling, merging) = self.spec, None, scalings
        states = [lane_state(spec, thr_mma, *both, scaling) for both in zip(row_tiles, row_tiles_of(spec), strict=True)]
        if cutlass.const_expr(spec.settles_alone):
            settled = settle_rows(spec, states[0], merging)
        elif cutlass.const_expr(spec.by_warpgroup):
            if cutlass.const_expr(spec.settles_halves):
                settled = states[0]
            if cutlass.const_expr(spec.settles_halves and spec.split) and is_part(piece):
                share_halves(spec, shared.merge, states[0], piece.block.rows, order)
            else:
                settle_turns(spec, shared.merge, states[0], piece.block.rows, order, merging)
        else:
            share_states(spec, shared.merge, states, piece.block.rows, order, merging)
        return settled

    @cute.jit
    def fetch_next(self, problem: Problem, buffer, share: Share, heads: tuple, index: Int32, following: tuple, row: Row):
        """Starts to load the query of the row after `index`. heads: of the unit; following: where the share goes on, in `row`."""
        spec, queries = self.spec, problem.rows.queries
        if following[0] > index and unfinished(spec, share, *following):
            block = query_block(spec, queries, share.unit, heads, following[0], row)
            fetch_query(spec, problem.q, block, buffer)

    def turn_of(self, index: Int32, turn: Int32) -> Int32:
        """A number that grows by one per row: the row's index, or how many rows came before if the phase skips some."""
        return turn if self.counts_turns else index

    def name_further(self, q, further: tuple) -> tuple:
        """(Queries, ScoreOperands) of a launch, None in a plain kernel."""
        return None, None

    def row_tiles(self, problem: Problem, piece: Piece, buffer, factors, held, states: tuple) -> tuple[RowTile, ...]:
        """The m-tiles with which a warp attends to a piece: their settled query and their states."""
        spec, found = self.spec, []
        for row_tile, state in zip(row_tiles_of(spec), states, strict=True):
            query, inverses = read_query(spec, buffer, held, row_tile), read_inverses(spec, factors, row_tile)
            mask = modifier = None
            if not spec.plain:
                lane_rows, tree_mask = lane_rows_of(spec, row_tile), problem.scores.tree_mask
                mask = make_row_mask(spec, problem.rows.queries, piece.row, piece.keys, piece.block, tree_mask, lane_rows)
                modifier = make_modifier(spec, problem.scores, piece.block, lane_rows, mask)
            found.append(RowTile(query, inverses, state, mask, modifier))
        return tuple(found)
