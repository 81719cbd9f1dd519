"""SM90 mainloop of warpgroups that all attend to the same tiles: products and softmax overlap inside a warpgroup.

As in FlashAttention-3 (Shah et al. 2024, section 3.2), a step starts Q K^T of tile i, then P V of tile i - 1, and waits only for
Q K^T before softmax: while a warpgroup weighs the scores of tile i, its tensor cores still add tile i - 1 to the output. K and V
of a stage have full and empty barriers of their own, so two stages keep both products fed.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KernelSpec
from ...config.tiling import WARPGROUP
from ..attend.attend import Attention, columns_of, hide_scores, is_cut, pack_probabilities, row_scales, weights_up
from ..attend.bases import follow_bases, weigh_row
from ..attend.interleaved import weigh_interleaved
from ..attend.lazy import settle_bases
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
    """The producers of TmaMainloop, with consumers that each attend to every tile."""

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.warpgroups = spec.readers // WARPGROUP  # that attend to the same tiles

    @cute.jit
    def consume(self, piece: Piece, attention: Attention, problem: Problem, shared: Shared):
        """Attends with this warp's m-tile to every tile of a piece, or to those of its turn: every turns-th from `first` on."""
        acc_s, tiles = attention.products.make_scores(), piece.stop - piece.first
        p = cute.make_rmem_tensor(acc_s.shape, ELEMENT_TYPES[self.spec.v_math])
        turns, first = cutlass.const_expr(self.spec.turns), self.order(piece)
        if tiles > first:
            come = Boolean(False)
            for i in cutlass.range(first, tiles, turns, unroll=1):
                stage, holes = self.operand(shared, piece, i, 0, come), self.holes_of(piece, i, shared)
                cut = is_cut(self.spec, attention.row_tiles[0], self.place(piece, i))
                scales = self.read_scales(piece, i, attention, shared)
                self.await_turn()
                attention.products.start_scores(acc_s, attention.row_tiles[0].query, stage)
                if i > first:
                    self.start_values(piece, i - turns, attention, shared, p)
                    self.pass_turn()
                    wait_for_products(1)
                else:
                    self.pass_turn()
                    wait_for_products(0)
                moves = self.weigh(piece, i, attention, shared, (acc_s, p), scales, (holes, cut))
                if cutlass.const_expr(turns == 1):  # in turns it is too early to ask
                    come = self.has_come(shared, piece, i + 1)
                follow_bases(attention.row_tiles[0].state.acc_o, *moves)
            last = tiles - 1 - remainder(tiles - 1 - first, turns)
            self.start_values(piece, last, attention, shared, p)
            wait_for_products(0)
            self.release_values(piece, last, shared)

    def place(self, piece: Piece, i: Int32) -> TilePlace:
        """Where the piece's tile i is in its row."""
        return place_of_tile(self.spec, piece.keys, piece.first + i)

    def place_of_operand(self, shared: Shared, piece: Piece, i: Int32, which: int) -> tuple[Int32, cute.Pointer, Int32]:
        """(stage, barrier, parity) of K (0) or V (1) of the piece's tile i in the ring that wgmma reads, narrow or wide."""
        spec, ordinal = self.spec, piece.issued + i
        if spec.wide[which] is None:
            stage, parity = self.place_in_ring(ordinal)
            return stage, full_barrier(spec, shared, stage, which), parity
        stage, parity = self.place_in_wide(ordinal)
        return stage, widened_barrier(spec, shared, stage, which), parity

    @cute.jit
    def operand(self, shared: Shared, piece: Piece, i: Int32, which: cutlass.Constexpr, come: Boolean | bool = False) -> Int32:
        """Waits for K (0) or V (1) of the piece's tile i, unless it is known to have come; returns its stage."""
        stage, barrier, parity = self.place_of_operand(shared, piece, i, which)
        if not come:
            cute.arch.mbarrier_wait(barrier, parity)
        return stage

    def has_come(self, shared: Shared, piece: Piece, i: Int32) -> Boolean:
        """Whether K of the piece's tile i has come: asked among exponentials of the tile before, the answer is there in time."""
        _, barrier, parity = self.place_of_operand(shared, piece, i, 0)
        return cute.arch.mbarrier_test_wait(barrier, parity)

    @cute.jit
    def await_turn(self):
        """Waits for this warpgroup's turn to multiply: one weighs while another multiplies (FlashAttention-3, section 3.1)."""
        if cutlass.const_expr(self.warpgroups > 1):
            cute.arch.barrier(barrier_id=PRODUCTS + warpgroup_of(), number_of_threads=2 * WARPGROUP * LANES)

    @cute.jit
    def pass_turn(self):
        """Lets the next warpgroup start its products: this one has started its own."""
        if cutlass.const_expr(self.warpgroups > 1):
            following = remainder(warpgroup_of() + 1, self.warpgroups)
            cute.arch.barrier_arrive(barrier_id=PRODUCTS + following, number_of_threads=2 * WARPGROUP * LANES)

    @cute.jit
    def open_turns(self):
        """Begins the turns, before the first piece: the last warpgroup passes its turn to the first."""
        if warpgroup_of() == self.warpgroups - 1:
            self.pass_turn()

    @cute.jit
    def close_turns(self):
        """Ends the turns, after the last piece: the first warpgroup awaits the turn that nobody uses."""
        if warpgroup_of() == 0:
            self.await_turn()

    def holes_of(self, piece: Piece, i: Int32, shared: Shared) -> tuple[Int32, ...]:
        """The words of holes of the piece's tile i, whose K has come: read early, so that nothing waits for them."""
        first = self.place_of_holes(piece.issued + i)
        return tuple(read_holes(self.spec, shared, first + word) for word in range(self.spec.hole_words))

    def read_scales(self, piece: Piece, i: Int32, attention: Attention, shared: Shared) -> tuple:
        """(rings and stage of the tile's scales, K's of this lane's columns, weights_up), read before the warpgroup's turn."""
        spec, state, ordinal = self.spec, attention.row_tiles[0].state, piece.issued + i
        if spec.widens_tiles and spec.wide[0] is None and spec.token_scales:  # nothing else waits for the widened scales
            wide, turn = self.place_in_wide(ordinal)
            cute.arch.mbarrier_wait(widened_barrier(spec, shared, wide), turn)
        token_scales = self.token_scales(shared, ordinal)
        peak = settle_scales(spec, *token_scales)
        return token_scales, columns_of(spec, token_scales, 0), weights_up(spec, state, peak)

    @cute.jit
    def weigh(self, piece: Piece, i: Int32, attention: Attention, shared: Shared, registers: tuple, scales: tuple, hidden: tuple):
        """Turns the scores of the piece's tile i into weights times V's scales of tokens, in P's registers.

        registers: (the scores, P); scales: read_scales of the tile; hidden: (its holes, is_cut). Returns the further arguments of
        follow_bases.

        The wait for P V of the previous tile stands among the exponentials, so that they hide the conversion of P, and no branch
        stands between them. Code that moves bases does not wait: each warp moves its own bases, but a wait is for a warpgroup.
        """
        spec, stage, (rows,) = self.spec, self.place_in_ring(piece.issued + i)[0], attention.row_tiles
        (acc_s, p), (token_scales, columns, up) = registers, scales
        hide_scores(spec, attention, shared, [acc_s], stage, columns, self.place(piece, i), *hidden)
        factors = row_scales(rows, attention.scaling)
        if cutlass.const_expr(not self.all_release):  # otherwise V's scales are still to be read
            self.release_keys(piece, i, shared)
        offsets, *moves = settle_bases(spec, acc_s, rows.state, factors)
        if cutlass.const_expr(spec.interleaves_weights):
            values, free = columns_of(spec, token_scales, 1), partial(self.end_values, piece, i, shared)
            weigh_interleaved(spec, p, acc_s, rows.state, factors, offsets, up, values, free)
        else:
            for r in cutlass.range_constexpr(len(factors)):
                weigh_row(acc_s, rows.state, r, factors[r], offsets[r], up)
                if cutlass.const_expr(r == 0):
                    self.end_values(piece, i, shared)
            if cutlass.const_expr(spec.scales_weights):
                scale_columns(acc_s, spec.lane_rows, columns_of(spec, token_scales, 1))
            pack_probabilities(spec, p, acc_s)
        if cutlass.const_expr(self.all_release):
            self.release_keys(piece, i, shared)
        return *moves, up

    def end_values(self, piece: Piece, i: Int32, shared: Shared):
        """Waits for P V of the tile before the piece's tile i, and releases its V."""
        wait_for_products(0)
        self.release_values(piece, i - self.spec.turns, shared, i > self.order(piece))

    @cute.jit
    def start_values(self, piece: Piece, i: Int32, attention: Attention, shared: Shared, p: cute.Tensor):
        """Starts to add P V of the piece's tile i, once its V has come and is zero for tokens that no query row sees."""
        stage = self.operand(shared, piece, i, 1)
        if cutlass.const_expr(self.zeroes_alone):
            parity = self.place_in_ring(piece.issued + i)[1]
            self.zero_for_readers(shared, stage, parity, self.place(piece, i))
        attention.products.start_values(attention.row_tiles[0].state.acc_o, fragments(p), stage)

    def release_keys(self, piece: Piece, i: Int32, shared: Shared):
        """Releases K of the piece's tile i in the ring that wgmma reads, with which this warp is done, or widened scales."""
        spec, (stage, _) = self.spec, self.place_in_ring(piece.issued + i)
        if spec.wide[0] is None:
            self.release(empty_barrier(spec, shared, stage), self.all_release)
        if spec.widens_tiles:
            self.release(narrow_barrier(spec, shared, self.place_in_wide(piece.issued + i)[0]), self.lanes_read > 1)

    def release_values(self, piece: Piece, i: Int32, shared: Shared, there: Boolean | bool = True):
        """Releases V of the piece's tile i, with which this warp is done. there: whether there is such a tile."""
        spec, (stage, _) = self.spec, self.place_in_ring(piece.issued + i)
        if spec.wide[1] is None:
            self.release(empty_barrier(spec, shared, stage, 1), False, there)
        if spec.widens_tiles:
            self.release(narrow_barrier(spec, shared, self.place_in_wide(piece.issued + i)[0], 1), False, there)

    @cute.jit
    def release(self, barrier: cute.Pointer, by_lane: cutlass.Constexpr, there: Boolean | bool = True):
        """Arrives at a barrier, as this warp is done with its stage. by_lane: every lane arrives, for what it has read itself."""
        cute.arch.sync_warp()
        if cutlass.const_expr(not by_lane):
            there = there & (cute.arch.lane_idx() == 0)  # a predicate: an elected lane takes a vote and a branch
        if there:
            cute.arch.mbarrier_arrive(barrier)
