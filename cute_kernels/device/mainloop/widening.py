"""What warps do that widen tiles of 8 bits for wgmma: a crew for K and one for V, into rings of their own."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KernelSpec
from ..attend.query_rows import place_of_tile
from ..attend.widen import scale_in_f32, widen_tile, zero_widened
from ..kv.source import open_row_or_nothing
from ..kv.value_scales import is_far, open_keys
from ..kv.wide_scales import load_scales, widen_scales
from ..problem import Problem
from ..ptx.barriers import CREWS, sync_branches
from ..ptx.registers import LANES, quotient, remainder
from ..schedule.opening import meet, read_opening
from ..schedule.work_scheduler import Piece, following, make_piece, unfinished
from .shared import Shared, empty_barrier, factor_barrier, full_barrier, narrow_barrier, widened_barrier


class Widening:
    """The part of a mainloop that widens tiles.

    lanes_widen: lanes of a warp that arrive for a widened K, and for a widened V. lanes_read: once they have attended with a K.

    A lane that has read scales, or factors of them, arrives itself: racecheck takes no order from one lane for its warp.
    """

    spec: KernelSpec
    lanes_widen: tuple[int, int]
    lanes_read: int

    def place_in_wide(self, ordinal: Int32) -> tuple[Int32, Int32]:
        """(stage, parity of its widened barrier) of the share's tile `ordinal` in the wide rings."""
        return remainder(ordinal, self.spec.wide_stages), quotient(ordinal, self.spec.wide_stages) & 1

    @cute.jit
    def widen(self, problem: Problem, shared: Shared, warp: Int32):
        """The work of a warp that widens 8-bit tiles: its crew's part of every tile, in order. warp: its number among them."""
        spec, rows, issued = self.spec, problem.rows, Int32(0)
        cute.arch.griddepcontrol_wait()
        meet(spec)
        self.open_factors(shared, warp)
        opening, pages = read_opening(spec, problem, shared)
        share, row = opening.share, opening.row
        index, tile = share.row, share.tile
        if cutlass.const_expr(spec.prefetches_scales) and warp == spec.widening_crews[1].start:  # V comes behind K
            self.prefetch_scales(problem, make_piece(spec, rows, share, index, row, tile, issued), pages)
        while unfinished(spec, share, index, tile):
            piece = make_piece(spec, rows, share, index, row, tile, issued)
            index, tile = following(spec, rows, problem.batch(spec), piece)
            row = open_row_or_nothing(spec, rows, index, problem.batch(spec))
            for i in cutlass.range(piece.stop - piece.first, unroll=1):
                self.widen_stage(problem, shared, piece, i, warp)
            issued += piece.stop - piece.first

    @cute.jit
    def widen_stage(self, problem: Problem, shared: Shared, piece: Piece, i: Int32, warp: Int32):
        """Widens K, V or both of the piece's tile i. warp: as in widen."""
        crews = self.spec.widening_crews
        if cutlass.const_expr(self.spec.widens_alike):
            which = cutlass.select_(warp < crews[1].start, Int32(0), Int32(1))
            self.widen_part(problem, shared, piece, i, which, 0, warp - which * crews[1].start)
        else:
            for like in cutlass.range_constexpr(2):
                if cutlass.const_expr(len(crews[like]) > 0) and warp >= crews[like].start and warp < crews[like].stop:
                    self.widen_part(problem, shared, piece, i, Int32(like), like, warp - crews[like].start)

    @cute.jit
    def widen_part(
        self,
        problem: Problem,
        shared: Shared,
        piece: Piece,
        i: Int32,
        which: Int32,
        like: cutlass.Constexpr,
        warp: Int32,
    ):
        """Widens K (0) or V (1) of the piece's tile i, once it has come and a wide stage is free. warp: its number in its crew.

        like: the one of them whose shapes this code is for. Where both have these, one code serves both crews: an SM's cache of
        code is small (docs/notes/kernel-log.md).
        """
        spec, ordinal = self.spec, piece.issued + i
        scales = cutlass.const_expr(like == 0 and spec.brings_scales)  # by one crew, whose code for K is its own
        (stage, parity), (wide, turn) = self.place_in_ring(ordinal), self.place_in_wide(ordinal)
        place = place_of_tile(spec, piece.keys, piece.first + i)
        cute.arch.mbarrier_wait(full_barrier(spec, shared, stage, which), parity)
        cute.arch.mbarrier_wait(narrow_barrier(spec, shared, wide, which), turn ^ 1)
        if cutlass.const_expr(scales):
            found = load_scales(spec, shared.scales, stage, warp)
        if cutlass.const_expr(spec.wide[like] is not None):
            thread, threads = warp * LANES + cute.arch.lane_idx(), LANES * len(spec.widening_crews[like])
            shapes = (spec.rings[like], spec.wide[like], threads)
            types = ((spec.k_type, spec.k_math), (spec.v_type, spec.v_math))[like]
            source, target = (address_of(tiles, which) for tiles in (shared.rings, shared.wide))
            source, target = source + stage * shapes[0].tile_bytes, target + wide * shapes[1].tile_bytes
            if cutlass.const_expr(spec.scales_values and (like == 1 or spec.scales_keys)):
                self.scale_tile(shared, ordinal, which, shapes, (source, target), thread)
            else:
                widen_tile(types, shapes, source, target, thread)
            if which == 1:
                zero_widened(shapes, target, place, thread)
        if cutlass.const_expr(scales):
            wide_scales = self.token_scales(shared, ordinal)
            widen_scales(spec, shared.scales, stage, *wide_scales, warp, found, problem.scale_log2)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        first = (cute.arch.lane_idx() == 0) | ((which == 0) & (self.lanes_widen[0] > 1))
        if first:
            cute.arch.mbarrier_arrive(empty_barrier(spec, shared, stage, which))
        if first | ((which == 1) & (self.lanes_widen[1] > 1)):
            cute.arch.mbarrier_arrive(widened_barrier(spec, shared, wide, which))

    @cute.jit
    def scale_tile(
        self,
        shared: Shared,
        ordinal: Int32,
        which: Int32,
        shapes: cutlass.Constexpr,
        places: tuple[Int32, Int32],
        thread: Int32,
    ):
        """widen_tile of V, times its tokens' scales, once the factors of the share's tile `ordinal` are there; or of K.

        places: (source, target).
        """
        spec, stages, (of_keys, ring) = self.spec, self.spec.wide_scale_stages, shared.wide_scales
        stage, far = remainder(ordinal, stages), Boolean(False)
        factors = Int32((ring.factors.iterator + cute.crd2idx((0, stage), ring.factors.layout)).toint())
        if which == 1:
            cute.arch.mbarrier_wait(factor_barrier(spec, shared, stage), quotient(ordinal, stages) & 1)
            far = is_far(ring.upper[0, stage])
        elif cutlass.const_expr(spec.scales_keys):
            factors = Int32(of_keys.factors.iterator.toint())
        if far:
            scale_in_f32(spec.v_type, shapes, *places, thread, ring.words[None, stage])
        else:
            widen_tile((spec.v_type, spec.v_math), shapes, *places, thread, factors)

    @cute.jit
    def open_factors(self, shared: Shared, warp: Int32):
        """The widening warps store the constant factors of K's tokens. warp: as in widen."""
        if cutlass.const_expr(self.spec.scales_keys):
            warps = self.spec.widening_warps
            open_keys(self.spec, shared.wide_scales[0], warp * LANES + cute.arch.lane_idx(), LANES * warps)
            sync_branches(CREWS, warps)


def address_of(tiles: tuple, which: Int32) -> Int32:
    """The shared-memory address of the ring of K's tiles (0) or V's (1); 0 where `tiles` has None."""
    keys, values = (Int32(0) if ring is None else Int32(ring.iterator.toint()) for ring in tiles)
    return cutlass.select_(which == 0, keys, values)
