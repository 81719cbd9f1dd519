"""What the warps do that bring scales of tokens: copies beside a tile, or converted beside a widened one (kv/wide_scales.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...config.decode import KernelSpec
from ..kv.scale import SMALLEST_UNIT, fetch_scales, find_scales
from ..kv.source import is_seen, slot_start, token_of_lane
from ..kv.wide_scales import read_scales, store_scales
from ..problem import Problem
from ..ptx.policies import prefetch
from ..ptx.registers import remainder
from ..schedule.work_scheduler import Piece
from .boxes import arrive_after_copies
from .shared import Shared, factor_barrier, full_barrier, narrow_barrier, widened_barrier

LINE_TOKENS = 8  # whose f16 scales of 8 KV heads fill a line of L2


class TokenScales:
    """The part of a mainloop that brings scales of tokens. boxes: TMA boxes of a tile."""

    spec: KernelSpec
    boxes: int

    def token_scales(self, shared: Shared, ordinal: Int32) -> tuple[tuple, Int32]:
        """(rings, stage) of tokens' scales as readers find those of the share's tile `ordinal`: widened, or as they came."""
        if self.spec.widens_tiles:
            return shared.wide_scales, remainder(ordinal, self.spec.wide_scale_stages)
        return shared.scales, self.place_in_ring(ordinal)[0]

    @cute.jit
    def issue_scales(
        self, problem: Problem, shared: Shared, piece: Piece, i: Int32, head: Int32 | int, place: tuple[Int32, Int32]
    ):
        """Issues the scales of the piece's tile i, one token per lane, found before its stage is free. place: see issue_boxes."""
        found = self.find_scales(problem, piece, i, head, *place)
        stage = self.await_stage(shared, self.ordinal(piece, i, head))
        fetch_scales(shared.scales, found, stage)
        arrive_after_copies(full_barrier(self.spec, shared, stage))
        if cute.arch.lane_idx() == 0:  # for what this lane stored itself
            cute.arch.mbarrier_arrive(full_barrier(self.spec, shared, stage))

    @cute.jit
    def pass_scales(self, problem: Problem, shared: Shared, piece: Piece, i: Int32, place: tuple[Int32, Int32], coming: tuple):
        """Reads the scales of the piece's tile i, if it has one, and stores those of the tile before for its readers.

        They are stored once K's wide stage is free: then all tiles whose scales lay in that place have been attended to.
        place: see issue_boxes. coming: registers for the scales of both tiles and for the unit of V's (make_coming).
        """
        spec, ordinal, (later, earlier, unit) = self.spec, piece.issued + i - 1, coming
        earlier.store(later.load())
        if i < piece.stop - piece.first:
            read_scales(spec, self.find_scales(problem, piece, i, 0, *place), later)
        if i > 0:
            wide, turn = self.place_in_wide(ordinal)
            cute.arch.mbarrier_wait(narrow_barrier(spec, shared, wide), turn ^ 1)
            if i == 1:
                unit[0] = Int32(SMALLEST_UNIT)
            rings, wide_stage = self.token_scales(shared, ordinal)
            store_scales(spec, rings, wide_stage, earlier, unit, problem.scale_log2)
            if cutlass.const_expr(spec.scales_values):
                cute.arch.mbarrier_arrive(factor_barrier(spec, shared, wide_stage))
            cute.arch.mbarrier_arrive(widened_barrier(spec, shared, wide))

    @cute.jit
    def prefetch_scales(self, problem: Problem, piece: Piece, page: Int32):
        """Prefetches scales of a piece's first 32 boxes into L2, one box a lane: a line for 8 tokens. page: of the lane's box."""
        spec, of_tokens = self.spec, (self.spec.k_token_scale, self.spec.v_token_scale)
        if (page >= 0) & (page < problem.rows.num_pages):
            slot = remainder(token_of_lane(spec, self.tile_at(piece, Int32(0))), spec.page_size)
            for one in [scales for scales, each in zip(problem.scales, of_tokens, strict=True) if each]:
                for token in cutlass.range_constexpr(0, spec.box_rows, LINE_TOKENS):
                    prefetch((one.iterator + cute.crd2idx((page, slot + token, piece.kv_head), one.layout)).toint())

    def find_scales(self, problem: Problem, piece: Piece, i: Int32, head: Int32 | int, pages: Int32, lane: Int32) -> list:
        """Where the scales of the piece's tile i are: [K's, V's] per 32 tokens. Lanes from `lane` on hold the tile's pages."""
        spec, num_pages, found = self.spec, problem.rows.num_pages, []
        for token in range(0, spec.tile_n, 32):
            token += cute.arch.lane_idx()
            page = cute.arch.shuffle_sync(pages, lane + cutlass.min(token // spec.box_rows, self.boxes - 1))
            position = self.tile_at(piece, i) * spec.tile_n + token
            inside = is_seen(piece.keys, position, 1) & (page >= 0) & (page < num_pages)
            position = slot_start(spec, piece.row) + position
            found.append(find_scales(spec, problem.scales, page, position, piece.kv_head + head, inside))
        return found
