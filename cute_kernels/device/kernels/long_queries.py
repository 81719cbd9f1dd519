"""The kernel of long queries (prefill): a persistent grid whose CTAs attend to items (work tiles: query blocks with all keys)."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..attend.attend import Attention, make_products, make_state, reset_state
from ..attend.epilogue import SettledRows, lane_state, settle_rows, store_rows
from ..attend.pack_gqa import fetch_query, hold_query, query_buffer, row_tiles_of, settle_query, sync_rows
from ..attend.query_rows import QueryBlock
from ..combine.partials import open_workspace
from ..combine.pieces import join_pieces, leave_piece
from ..kv.scale import merge_scaling, open_scaling
from ..mainloop.shared import Shared
from ..problem import Problem
from ..schedule.dealing import Cut, Item, meet_all, piece_of, take_item
from .attention import AttentionKernel


class LongQueryKernel(AttentionKernel):
    """Launches attention whose items are dealt (schedule/dealing.py)."""

    @cute.jit
    def consume(self, problem: Problem, shared: Shared):
        """The work of the consumer warps: every item of this CTA. Warpgroups meet only to multiply in turn."""
        spec, batch, mainloop = self.spec, problem.batch(self.spec), self.mainloop
        cute.arch.griddepcontrol_wait()
        meet_all(spec)
        products = make_products(spec, shared)
        state, (row_tile,) = make_state(spec, products.thr_mma), row_tiles_of(spec)
        issued, turn, held = Int32(0), Int32(0), hold_query(spec)
        item = take_item(spec, shared, turn)
        if item.index < batch:
            block = piece_of(spec, problem.rows, item, issued).block
            fetch_query(spec, problem.q, block, query_buffer(spec, shared.query, turn))
        mainloop.open_turns()
        while item.index < batch:
            piece = piece_of(spec, problem.rows, item, issued)
            scaling = open_scaling(spec, problem.scales, item.kv_head, problem.scale_log2)
            buffer, factors = query_buffer(spec, shared.query, turn), shared.inverses[None, turn % 2]
            settle_query(spec, buffer, factors, piece.block.rows, scaling.sign, Boolean(True))
            sync_rows(spec)
            row_tiles = self.row_tiles(problem, piece, buffer, factors, held, (state,))
            issued += piece.stop - piece.first
            turn += 1
            cut = item.cut  # of this item, not of the next
            following = query_buffer(spec, shared.query, turn)
            if cutlass.const_expr(not spec.claims):
                item = self.take_and_fetch(problem, shared, turn, batch, following)
            reset_state(spec, state)
            self.mainloop.consume(piece, Attention(products, row_tiles, scaling), problem, shared)
            if cutlass.const_expr(spec.claims):  # not before the last tiles are on their way
                item = self.take_and_fetch(problem, shared, turn, batch, following)
            own = lane_state(spec, products.thr_mma, row_tiles[0], row_tile, scaling)
            settled = settle_rows(spec, own, merge_scaling(spec, scaling))
            sync_rows(spec)
            self.store_item(problem, piece.block, cut, settled, buffer, row_tile)
            if cutlass.const_expr(spec.query_buffers == 1):
                cute.arch.sync_warp()
                self.fetch_item(problem, item, batch, following)
        self.mainloop.close_turns()

    @cute.jit
    def store_item(
        self, problem: Problem, block: QueryBlock, cut: Cut | None, settled: SettledRows, buffer: cute.Tensor, row_tile: Int32
    ):
        """Stores a warp's settled rows of an item: as a result, or as a part of it; the last part to come becomes the result.

        cut: that of the item. buffer: that of its query.
        """
        spec = self.spec
        if cutlass.const_expr(not spec.deals_pieces):
            store_rows(spec, settled, buffer, row_tile, block, problem.out, problem.lse, self.sinks(problem))
        else:
            lses, before = cute.make_rmem_tensor(len(settled.lse), Float32), cut.pieces - 1
            for r in cutlass.range_constexpr(len(settled.lse)):
                lses[r] = settled.lse[r]
            if cut.pieces > 1:
                words = open_workspace(spec, problem.workspace)
                before = leave_piece(spec, settled, block.rows, words, cut, row_tile)
                if before == cut.pieces - 1:
                    join_pieces(spec, settled, lses, block.rows, words, cut, row_tile)
            if before == cut.pieces - 1:
                joined = replace(settled, lse=[lses[r] for r in range(len(settled.lse))])
                store_rows(spec, joined, buffer, row_tile, block, problem.out, problem.lse, self.sinks(problem))

    @cute.jit
    def take_and_fetch(self, problem: Problem, shared: Shared, turn: Int32, batch: Int32, following: cute.Tensor) -> Item:
        """Takes the item of a round, and starts to load its query, if there is a buffer for it beside that of the item before."""
        item = take_item(self.spec, shared, turn)
        if cutlass.const_expr(self.spec.query_buffers > 1):
            self.fetch_item(problem, item, batch, following)
        return item

    @cute.jit
    def fetch_item(self, problem: Problem, item: Item, batch: Int32, buffer: cute.Tensor):
        """Starts to load the query of an item, if there is one."""
        if item.index < batch:
            fetch_query(self.spec, problem.q, piece_of(self.spec, problem.rows, item, Int32(0)).block, buffer)
