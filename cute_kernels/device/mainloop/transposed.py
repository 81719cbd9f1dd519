"""SM90 mainloop of warpgroups that take tiles of 8 bits in turn, with transposed products (attend/transposed_mma.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..attend.attend import Attention
from ..attend.column_softmax import (
    hide_columns,
    hide_holes,
    own_rows,
    read_scales,
    reset_columns,
    scale_scores,
    sync_group,
    weigh_columns,
)
from ..attend.mask import make_row_mask
from ..attend.query_rows import place_of_tile
from ..attend.warpgroup_mma import wait_for_products
from ..problem import Problem
from ..schedule.work_scheduler import Piece
from .shared import Shared, empty_barrier, full_barrier, read_holes
from .tma import TmaMainloop
from ..attend.pack_gqa import turn_of
from ..ptx.registers import quotient


class TransposedMainloop(TmaMainloop):
    """The producers of TmaMainloop, with warpgroups that attend to their tiles from registers."""

    @cute.jit
    def consume(self, piece: Piece, attention: Attention, problem: Problem, shared: Shared):
        """Attends to this warpgroup's tiles of one piece."""
        spec, (rows,) = self.spec, attention.row_tiles
        first, acc_s = self.order(piece), attention.products.make_scores()
        reset_columns(spec, shared, rows.state, rows.inverses, piece.block.rows, attention.scaling)
        for i in cutlass.range(first, piece.stop - piece.first, spec.turns, unroll=1):
            stage, parity = self.place_in_ring(piece.issued + i)
            cute.arch.mbarrier_wait(full_barrier(spec, shared, stage), parity)
            place = place_of_tile(spec, piece.keys, piece.first + i)
            holes = read_holes(spec, shared, stage)
            scales = read_scales(spec, shared, rows.state, stage)
            attention.products.start_scores(acc_s, rows.query, stage)
            wait_for_products(0)  # also for V^T P^T of the tile before
            values = attention.products.read_values(stage, place)
            self.release(shared, stage)
            scale_scores(spec, acc_s, scales)
            self.hide(piece, problem, shared, acc_s, place, holes)
            weights = weigh_columns(spec, shared, acc_s, rows.state, scales)
            buffer = 2 * turn_of(spec) + (quotient(i, spec.turns) & 1)  # a warp may still read those of the tile before
            attention.products.store_weights(weights, buffer)
            decoded = attention.products.decode_values(values)
            cute.arch.fence_proxy("async.shared", space="cta")
            sync_group()
            attention.products.start_values(rows.state.acc_o, decoded, buffer)
        wait_for_products(0)

    @cute.jit
    def hide(self, piece: Piece, problem: Problem, shared: Shared, acc_s: cute.Tensor, place, holes: Int32):
        """Scores of what a row does not see become -inf."""
        spec, keys = self.spec, piece.keys
        cut = place.token + spec.tile_n > keys.inner_end
        if cutlass.const_expr(keys.inner_begin is not None):
            cut = cut | (place.token < keys.inner_begin)
        if cut:
            mask = make_row_mask(spec, problem.rows.queries, piece.row, keys, piece.block, None, own_rows(spec))
            hide_columns(spec, acc_s, mask, place)
        if holes != 0:
            hide_holes(spec, acc_s, holes)

    @cute.jit
    def release(self, shared: Shared, stage: Int32):
        """This warp is done with a stage."""
        cute.arch.sync_warp()
        if cutlass.const_expr(self.all_release):
            cute.arch.mbarrier_arrive(empty_barrier(self.spec, shared, stage))
        elif cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty_barrier(self.spec, shared, stage))
