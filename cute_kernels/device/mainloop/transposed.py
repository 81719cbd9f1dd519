"""SM90 mainloop of warpgroups that take tiles of 8 bits in turn, with transposed products (attend/transposed_mma.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..attend.attend import Attention
from ..attend.column_softmax import (
    FACTORS,
    OFFSETS,
    copy_numbers,
    lane_count,
    make_scales,
    numbers_of,
    read_numbers,
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
        first, tiles, acc_s = self.order(piece), piece.stop - piece.first, attention.products.make_scores()
        reset_columns(spec, shared, rows.state, rows.inverses, piece.block.rows, attention.scaling)
        numbers, scales, early = numbers_of(spec, shared), make_scales(spec), cutlass.const_expr(lane_count(spec) <= 8)
        if tiles > first:
            stage = self.await_tile(piece, first, shared)
            keys, holes = attention.products.read_keys(attention.products.keys_at(stage)), read_holes(spec, shared, stage)
            read_scales(spec, shared, rows.state, scales, stage)
            attention.products.start_scores(acc_s, rows.query, attention.products.decode_keys(keys))
            factors, offsets = read_numbers(spec, numbers, FACTORS), read_numbers(spec, numbers, OFFSETS)
            wait_for_products(0)
            for i in cutlass.range(first, tiles, spec.turns, unroll=1):
                stage, place = self.place_in_ring(piece.issued + i)[0], place_of_tile(spec, piece.keys, piece.first + i)
                values = attention.products.read_values(stage, place)
                self.release(shared, stage)
                scale_scores(spec, acc_s, scales)
                self.hide(piece, problem, shared, acc_s, place, holes)
                if cutlass.const_expr(not early):
                    copy_numbers(spec, numbers, (factors, offsets))
                weights = weigh_columns(spec, shared, acc_s, rows.state, scales, (factors, offsets))
                buffer = 2 * turn_of(spec) + (quotient(i, spec.turns) & 1)  # a warp may still read those of the tile before
                attention.products.store_weights(weights, buffer)
                following = Int32(rows.query.iterator.toint())  # past the last tile any bytes serve: nobody reads their scores
                if i + spec.turns < tiles:
                    stage = self.await_tile(piece, i + spec.turns, shared)
                    following = attention.products.keys_at(stage)
                    holes = read_holes(spec, shared, stage)
                    read_scales(spec, shared, rows.state, scales, stage)
                keys = attention.products.read_keys(following)
                decoded = attention.products.decode_values(values)
                cute.arch.fence_proxy("async.shared", space="cta")
                sync_group()
                attention.products.start_values(rows.state.acc_o, decoded, buffer)
                attention.products.start_scores(acc_s, rows.query, attention.products.decode_keys(keys))
                if cutlass.const_expr(early):
                    copy_numbers(spec, numbers, (factors, offsets))
                wait_for_products(0)

    @cute.jit
    def await_tile(self, piece: Piece, i: Int32, shared: Shared) -> Int32:
        """Waits for the piece's tile i and returns its stage."""
        stage, parity = self.place_in_ring(piece.issued + i)
        cute.arch.mbarrier_wait(full_barrier(self.spec, shared, stage), parity)
        return stage

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
