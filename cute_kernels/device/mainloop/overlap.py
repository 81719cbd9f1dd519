"""SM90 mainloop of warpgroups that all attend to the same tiles: products and softmax overlap inside a warpgroup.

While a warpgroup weighs the scores of tile i, its tensor cores add tile i - 1 to the output and make the scores of tile i, as in
FlashAttention-3 (Shah et al. 2024, section 3.2): a step starts Q K^T of tile i, then P V of tile i - 1, and waits for the first
alone before softmax. K and V of a stage come and go by barriers of their own, so that two stages keep both products fed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KernelSpec
from ...config.tiling import WARPGROUP
from ..attend.attend import Attention, columns_of, hide_scores, is_cut, pack_probabilities, row_scales, scales_of, weights_up
from ..attend.bases import follow_bases, settle_bases, weigh_row
from ..attend.pack_gqa import fragments, warpgroup_of
from ..attend.query_rows import TilePlace, place_of_tile
from ..attend.warpgroup_mma import wait_for_products
from ..elements import ELEMENT_TYPES
from ..kv.scale import scale_columns, settle_scales
from ..problem import Problem
from ..ptx.barriers import PRODUCTS
from ..ptx.registers import LANES, remainder
from ..schedule.work_scheduler import Piece
from .shared import Shared, empty_barrier, full_barrier, narrow_barrier, read_holes, widened_barrier
from .tma import TmaMainloop


class OverlapMainloop(TmaMainloop):
    """The producers of TmaMainloop; consumers that each attend to every tile."""

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.warpgroups = spec.num_warps // WARPGROUP

    @cute.jit
    def consume(self, piece: Piece, attention: Attention, problem: Problem, shared: Shared):
        """This warp's m-tile and every tile of a piece."""
        acc_s, tiles = attention.products.make_scores(), piece.stop - piece.first
        p = cute.make_rmem_tensor(acc_s.shape, ELEMENT_TYPES[self.spec.v_math])
        if tiles > 0:
            for i in cutlass.range(0, tiles, unroll=1):
                stage, holes = self.operand(shared, piece, i, 0), self.read_holes(piece, i, shared)
                cut = is_cut(self.spec, attention.row_tiles[0], self.place(piece, i))
                scales = self.read_scales(piece, i, attention, shared)
                if cutlass.const_expr(self.spec.wide[0] is not None):  # of what came, holes were left to read
                    self.release(empty_barrier(self.spec, shared, self.place_in_ring(piece.issued + i)[0]), False)
                self.await_turn()
                attention.products.start_scores(acc_s, attention.row_tiles[0].query, stage)
                if i > 0:
                    self.start_values(piece, i - 1, attention, shared, p)
                    self.pass_turn()
                    wait_for_products(1)
                else:
                    self.pass_turn()
                    wait_for_products(0)
                moves = self.weigh(piece, i, attention, shared, acc_s, scales, (holes, cut))
                pack_probabilities(self.spec, p, acc_s)
                follow_bases(attention.row_tiles[0].state.acc_o, *moves)
            self.start_values(piece, tiles - 1, attention, shared, p)
            wait_for_products(0)
            self.release_values(piece, tiles - 1, shared)

    def place(self, piece: Piece, i: Int32) -> TilePlace:
        """Where the piece's tile i is in its row."""
        return place_of_tile(self.spec, piece.keys, piece.first + i)

    @cute.jit
    def operand(self, shared: Shared, piece: Piece, i: Int32, which: cutlass.Constexpr) -> Int32:
        """Waits for K (0) or V (1) of the piece's tile i; returns its stage in what is multiplied: a ring, or a wide one."""
        spec, ordinal = self.spec, piece.issued + i
        if cutlass.const_expr(spec.wide[which] is None):
            stage, parity = self.place_in_ring(ordinal)
            cute.arch.mbarrier_wait(full_barrier(spec, shared, stage, which), parity)
        else:
            stage, parity = self.place_in_wide(ordinal)
            cute.arch.mbarrier_wait(widened_barrier(spec, shared, stage, which), parity)
        return stage

    @cute.jit
    def await_turn(self):
        """This warpgroup may start its products: in turn, so that one weighs while another multiplies (FlashAttention-3, 3.1)."""
        if cutlass.const_expr(self.warpgroups > 1):
            cute.arch.barrier(barrier_id=PRODUCTS + warpgroup_of(), number_of_threads=2 * WARPGROUP * LANES)

    @cute.jit
    def pass_turn(self):
        """This warpgroup has started its products: the next may."""
        if cutlass.const_expr(self.warpgroups > 1):
            following = remainder(warpgroup_of() + 1, self.warpgroups)
            cute.arch.barrier_arrive(barrier_id=PRODUCTS + following, number_of_threads=2 * WARPGROUP * LANES)

    @cute.jit
    def open_turns(self):
        """Before the first piece: the last warpgroup has had its turn."""
        if warpgroup_of() == self.warpgroups - 1:
            self.pass_turn()

    @cute.jit
    def close_turns(self):
        """Behind the last piece: the turn that nobody takes."""
        if warpgroup_of() == 0:
            self.await_turn()

    @cute.jit
    def read_holes(self, piece: Piece, i: Int32, shared: Shared) -> tuple[Int32, ...]:
        """The words of holes of the piece's tile i, whose K has come: read ahead of what would wait for them."""
        spec, (stage, parity) = self.spec, self.place_in_ring(piece.issued + i)
        if cutlass.const_expr(spec.wide[0] is not None):  # they came with what was widened
            cute.arch.mbarrier_wait(full_barrier(spec, shared, stage), parity)
        return tuple(read_holes(spec, shared, stage * spec.hole_words + word) for word in range(spec.hole_words))

    def read_scales(self, piece: Piece, i: Int32, attention: Attention, shared: Shared) -> tuple:
        """(scales_of the piece's tile i, K's of this lane's columns, weights_up), read while the warpgroup waits for its turn."""
        spec, state, ordinal = self.spec, attention.row_tiles[0].state, piece.issued + i
        wide, turn = self.place_in_wide(ordinal) if spec.widens_tiles else (0, 0)
        if spec.widens_tiles and spec.wide[0] is None and spec.token_scales:  # nothing else waits for what comes with K
            cute.arch.mbarrier_wait(widened_barrier(spec, shared, wide), turn)
        token_scales = scales_of(spec, shared, self.place_in_ring(ordinal)[0], wide)
        peak = settle_scales(spec, *token_scales)
        return token_scales, columns_of(spec, token_scales, 0), weights_up(spec, state, peak)

    @cute.jit
    def weigh(
        self, piece: Piece, i: Int32, attention: Attention, shared: Shared, acc_s: cute.Tensor, scales: tuple, hidden: tuple
    ):
        """The scores of the piece's tile i, in place, as weights times V's scales of tokens.

        scales: read_scales of the tile; hidden: (its holes, is_cut).

        P V of the tile before is waited for among the exponentials, so that they hide the conversion of P, and no branch stands
        between them. Where bases move nothing is waited for: that is a warp's own affair, a wait is its warpgroup's. Returns what
        follow_bases takes.
        """
        spec, stage, (rows,) = self.spec, self.place_in_ring(piece.issued + i)[0], attention.row_tiles
        token_scales, columns, up = scales
        hide_scores(spec, attention, shared, [acc_s], stage, columns, self.place(piece, i), *hidden)
        factors = row_scales(rows, attention.scaling)
        reads_again = cutlass.const_expr(self.all_release or spec.v_token_scale)
        if cutlass.const_expr(not reads_again):
            self.release_keys(piece, i, shared)
        offsets, *moves = settle_bases(spec, acc_s, rows.state, factors)
        for r in cutlass.range_constexpr(len(factors)):
            weigh_row(acc_s, rows.state, r, factors[r], offsets[r], up)
            if cutlass.const_expr(r == 0):
                wait_for_products(0)
                self.release_values(piece, i - 1, shared, i > 0)
        if cutlass.const_expr(spec.v_token_scale):
            scale_columns(acc_s, spec.lane_rows, columns_of(spec, token_scales, 1))
        if cutlass.const_expr(reads_again):
            self.release_keys(piece, i, shared)
        return *moves, up

    @cute.jit
    def start_values(self, piece: Piece, i: Int32, attention: Attention, shared: Shared, p: cute.Tensor):
        """Starts to add P V of the piece's tile i, once its V has come and holds zeros where nothing is seen."""
        stage = self.operand(shared, piece, i, 1)
        if cutlass.const_expr(self.zeroes_alone):
            parity = self.place_in_ring(piece.issued + i)[1]
            self.zero_for_readers(shared, stage, parity, self.place(piece, i))
        attention.products.start_values(attention.row_tiles[0].state.acc_o, fragments(p), stage)

    def release_keys(self, piece: Piece, i: Int32, shared: Shared):
        """This warp is done with K of the piece's tile i as it is multiplied, and with its scales."""
        spec, (stage, _) = self.spec, self.place_in_ring(piece.issued + i)
        if spec.wide[0] is None:
            self.release(empty_barrier(spec, shared, stage), self.all_release)
        if spec.widens_tiles:
            self.release(narrow_barrier(spec, shared, self.place_in_wide(piece.issued + i)[0]), self.lanes_widen > 1)

    def release_values(self, piece: Piece, i: Int32, shared: Shared, there: Boolean | bool = True):
        """This warp is done with V of the piece's tile i, if it is there."""
        spec, (stage, _) = self.spec, self.place_in_ring(piece.issued + i)
        if spec.wide[1] is None:
            self.release(empty_barrier(spec, shared, stage, 1), False, there)
        if spec.widens_tiles:
            self.release(narrow_barrier(spec, shared, self.place_in_wide(piece.issued + i)[0], 1), False, there)

    @cute.jit
    def release(self, barrier: cute.Pointer, by_lane: cutlass.Constexpr, there: Boolean | bool = True):
        """This warp is done with what a barrier stands for. by_lane: every lane arrives, for what it has read itself."""
        cute.arch.sync_warp()
        if cutlass.const_expr(not by_lane):
            there = there & (cute.arch.lane_idx() == 0)  # a predicate: an elected lane takes a vote and a branch
        if there:
            cute.arch.mbarrier_arrive(barrier)
