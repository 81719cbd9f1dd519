"""The mainloop of long queries over pages that no TMA box can bring: the producer warps bring tiles token by token, by cp.async.

Gathering warp w has the tokens from 32 w on of every tile, one token per lane: it looks up their pages one tile ahead, and
shuffles give the address of each token to the lanes that copy it. A token that no query row sees, or whose page is not in the
pool, becomes zeros. A proxy fence by the warp that issued the cp.async orders its writes before wgmma's reads, so the warp itself
arrives at the full barrier, one group of copies later: it owes the arrival until then.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...config.decode import KernelSpec
from ...config.problem import UNIT_BYTES
from ..kv.source import find_holes, find_page, is_seen
from ..problem import Problem
from ..ptx.cp_async import copy_async
from ..ptx.registers import LANES, quotient, remainder
from ..schedule.dealing import meet_all, piece_of
from ..schedule.work_scheduler import Piece
from . import tile
from .dealt import DealtMainloop
from .shared import Shared, full_place

VECTOR_BYTES = 16  # bytes of one copy
NOTHING = -1  # no arrival is owed; otherwise `owed` is the index of a full barrier (shared.full_place)


class GatherMainloop(DealtMainloop):
    """The consumers of DealtMainloop; `spec.gatherers` warps bring K and V."""

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.arrivals = spec.gatherers, spec.gatherers
        self.zeroes_alone = False  # tokens that no row sees arrive as zeros

    def operands(self, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """(K, V) caches [pages, heads, slots, head_dim] in any strides."""
        return (k, v)

    def maps(self, operands: tuple) -> tuple:
        """No tensor maps: the caches are read through plain pointers."""
        return ()

    @cute.jit
    def gather(self, problem: Problem, shared: Shared, part: Int32, leads: cutlass.Constexpr):
        """The work of a producer warp: its part of every tile, item by item. leads: whether it finds the items for all warps."""
        spec, rows, batch = self.spec, problem.rows, problem.batch(self.spec)
        cute.arch.griddepcontrol_wait()
        meet_all(spec)
        issued, turn, found, owed = Int32(0), Int32(0), self.begin_search(problem, leads), Int32(NOTHING)
        item, found = self.find_or_take(problem, shared, turn, found, leads)
        while item.index < batch:
            piece = piece_of(spec, rows, item, issued)
            turn += 1
            item, found = self.find_or_take(
                problem, shared, turn, found, leads
            )  # consumers take it before they attend to this one
            if piece.stop == piece.first:  # consumers take this item only after the last V of the previous item
                owed = self.pay(shared, owed, 0)
            owed = self.bring(problem, shared, piece, part, owed)
            issued += piece.stop - piece.first
        self.pay(shared, owed, 0)
        if cutlass.const_expr(leads):
            self.end(problem, found)

    def token_of_lane(self, piece: Piece, i: Int32, part: Int32) -> Int32:
        """The token of the piece's tile i that this lane looks up; a token past the range if the tile has none for this lane."""
        within = part * LANES + cute.arch.lane_idx()
        token = self.tile_at(piece, i) * self.spec.tile_n + within
        return token if self.spec.tile_n % LANES == 0 else cutlass.select_(within < self.spec.tile_n, token, piece.keys.end)

    def lookup(self, problem: Problem, piece: Piece, i: Int32, part: Int32) -> Int32:
        """Lane l holds the page of its token of the piece's tile i."""
        rows, token = problem.rows, self.token_of_lane(piece, i, part)
        return find_page(self.spec, rows.tables, piece.row.start, piece.keys, token, 1, rows.num_pages)

    @cute.jit
    def bring(self, problem: Problem, shared: Shared, piece: Piece, part: Int32, owed: Int32) -> Int32:
        """Brings this warp's tokens of all tiles of a piece: V of a tile after K of the next, the order of OverlapMainloop."""
        rows, tiles = problem.rows, piece.stop - piece.first
        pages = self.lookup(problem, piece, Int32(0), part)
        values, seen_values = Int64(0), Int32(0)  # of the previous tile
        for i in cutlass.range(tiles + cutlass.min(tiles, 1), unroll=1):
            upcoming, token = self.lookup(problem, piece, i + 1, part), self.token_of_lane(piece, i, part)
            (keys, following), seen = self.locate(problem, piece, token, pages)
            if i < tiles:
                stage = self.await_stage(shared, piece.issued + i, 0)
                holes = find_holes(token, piece.keys, 1, pages, rows.num_pages, piece.index, problem.status)
                if cute.arch.lane_idx() == 0:
                    shared.holes[self.place_of_holes(piece.issued + i) + part] = holes
                owed = self.copy_tokens(shared, (keys, seen), 0, stage, part, owed)
            if i > 0:
                stage = self.await_stage(shared, piece.issued + i - 1, 1)
                owed = self.copy_tokens(shared, (values, seen_values), 1, stage, part, owed)
            pages, values, seen_values = upcoming, following, seen
        return owed

    def locate(self, problem: Problem, piece: Piece, token: Int32, pages: Int32) -> tuple[tuple[Int64, Int64], Int32]:
        """((address of this lane's token in K, in V), mask whose bit l says whether lane l's token is read)."""
        inside = is_seen(piece.keys, token, 1) & (pages >= 0) & (pages < problem.rows.num_pages)
        place = cutlass.select_(inside, pages, 0), piece.kv_head, remainder(token, self.spec.page_size), Int32(0)
        sources = tuple(Int64((cache.iterator + cute.crd2idx(place, cache.layout)).toint()) for cache in problem.caches)
        return sources, cute.arch.vote_ballot_sync(inside)

    @cute.jit
    def copy_tokens(
        self, shared: Shared, tokens: tuple, which: cutlass.Constexpr, stage: Int32, part: Int32, owed: Int32
    ) -> Int32:
        """Starts to copy this warp's tokens to a stage of K (0) or V (1) and pays the arrival owed; returns the one owed now.

        tokens: (address of this lane's token, mask of the tokens that are read). Lanes share a token's row of a column block, so
        one shuffle serves all blocks, and the distances between blocks are immediate operands.
        """
        spec, shape, lane = self.spec, self.spec.rings[which], cute.arch.lane_idx()
        row_bytes = cutlass.const_expr(shape.column_block * UNIT_BYTES)
        lanes = cutlass.const_expr(row_bytes // VECTOR_BYTES)  # per token
        at_once = cutlass.const_expr(LANES // lanes)
        first, column = quotient(lane, lanes), remainder(lane, lanes) * VECTOR_BYTES
        ring, source, seen = shared.rings[which].iterator.toint(), tokens[0], tokens[1] >> first
        for token in cutlass.range_constexpr(0, LANES, at_once):
            begin, inside = shuffled(source, token + first) + column, (seen >> token) & 1 != 0
            repeats = cutlass.const_expr(token // tile.SWIZZLE_ROWS * tile.SWIZZLE_ROWS)
            target = ring + tile.swizzled(shape, stage, part * LANES + first + (token - repeats), column) + repeats * row_bytes
            if cutlass.const_expr(spec.tile_n % LANES == 0) or part * LANES + first + token < spec.tile_n:
                for block in cutlass.range_constexpr(shape.units // shape.column_block):
                    across = cutlass.const_expr(block * row_bytes)
                    copy_async(begin + across, target + across * shape.tile_n, VECTOR_BYTES, inside)
        cute.arch.cp_async_commit_group()
        self.pay(shared, owed, 1)
        return full_place(spec, stage, which)

    @cute.jit
    def pay(self, shared: Shared, owed: Int32, under_way: cutlass.Constexpr) -> Int32:
        """Arrives at the full barrier that this warp owes, once all but the last `under_way` groups of copies have landed."""
        if owed != NOTHING:
            cute.arch.cp_async_wait_group(under_way)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(shared.barriers + owed)
        return Int32(NOTHING)


def shuffled(value: Int64, lane: Int32) -> Int64:
    """`value` of lane `lane`."""
    low, high = (cute.arch.shuffle_sync(Int32(value >> shift), lane) for shift in (0, 32))
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
