"""What warps do that widen tiles of 8 bits for wgmma: a crew for K and one for V, into rings of their own."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...config.decode import KernelSpec
from ..attend.query_rows import TilePlace, place_of_tile
from ..attend.widen import widen_tile, zero_widened
from ..kv.scale import load_scales, widen_scales
from ..kv.source import open_row_or_nothing
from ..problem import Problem
from ..ptx.registers import LANES, quotient, remainder
from ..schedule.opening import meet, read_opening
from ..schedule.work_scheduler import Piece, following, make_piece, unfinished
from . import tile
from .shared import Shared, empty_barrier, full_barrier, narrow_barrier, widened_barrier


class Widening:
    """The part of a mainloop that widens tiles. lanes_widen: lanes of a warp that arrive for a widened K."""

    spec: KernelSpec
    lanes_widen: int

    def place_in_wide(self, ordinal: Int32) -> tuple[Int32, Int32]:
        """(stage, parity of its widened barrier) of the share's tile `ordinal` in the wide rings."""
        return remainder(ordinal, self.spec.wide_stages), quotient(ordinal, self.spec.wide_stages) & 1

    @cute.jit
    def widen(self, problem: Problem, shared: Shared, warp: Int32):
        """The work of a warp that widens 8-bit tiles: its crew's part of every tile, in order. warp: its number among them."""
        spec, rows, issued = self.spec, problem.rows, Int32(0)
        cute.arch.griddepcontrol_wait()
        meet(spec)
        opening = read_opening(spec, problem, shared)[0]
        share, row = opening.share, opening.row
        index, tile = share.row, share.tile
        while unfinished(share, index, tile):
            piece = make_piece(spec, rows, share, index, row, tile, issued)
            index, tile = following(spec, rows, problem.batch(spec), piece)
            row = open_row_or_nothing(spec, rows, index, problem.batch(spec))
            for i in cutlass.range(piece.stop - piece.first, unroll=1):
                self.widen_stage(shared, piece, i, warp)
            issued += piece.stop - piece.first

    @cute.jit
    def widen_stage(self, shared: Shared, piece: Piece, i: Int32, warp: Int32):
        """Widens K, V or both of the piece's tile i, each once it has come and a wide stage is free. warp: as in widen."""
        spec, ordinal = self.spec, piece.issued + i
        (stage, parity), (wide, turn) = self.place_in_ring(ordinal), self.place_in_wide(ordinal)
        place = place_of_tile(spec, piece.keys, piece.first + i)
        for which in cutlass.range_constexpr(2):
            crew = cutlass.const_expr(spec.widening_crews[which])
            if warp >= crew.start and warp < crew.stop:
                cute.arch.mbarrier_wait(full_barrier(spec, shared, stage, which), parity)
                cute.arch.mbarrier_wait(narrow_barrier(spec, shared, wide, which), turn ^ 1)
                found = load_scales(spec, shared.scales, stage, warp) if cutlass.const_expr(which == 0) else []
                self.widen_part(shared, which, stage, wide, place, warp - crew.start)
                if cutlass.const_expr(which == 0):
                    widen_scales(spec, shared.scales, stage, *self.token_scales(shared, ordinal), warp, found)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if (cute.arch.lane_idx() == 0) | (which == 0 and self.lanes_widen > 1):
                    cute.arch.mbarrier_arrive(empty_barrier(spec, shared, stage, which))
                    cute.arch.mbarrier_arrive(widened_barrier(spec, shared, wide, which))

    def widen_part(self, shared: Shared, which: int, stage: Int32, wide: Int32, place: TilePlace, warp: Int32):
        """Widens K (0) or V (1) of a tile, if its elements have 8 bits. warp: this warp's number in its crew."""
        narrow, target = self.spec.rings[which], self.spec.wide[which]
        if target is not None:
            stored, into = (self.spec.k_type, self.spec.v_type)[which], tile.address(shared.wide[which], target, wide)
            thread, threads = warp * LANES + cute.arch.lane_idx(), LANES * len(self.spec.widening_crews[which])
            places = narrow, target, threads
            widen_tile(stored, places, tile.address(shared.rings[which], narrow, stage), into, thread)
            if which == 1:
                zero_widened(places, into, place, thread)
