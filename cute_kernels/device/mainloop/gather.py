"""The mainloop of long queries over pages that no TMA box can bring: the producer warps bring tiles token by token, by cp.async.

Warp w of those that gather has the tokens from 32 w on of every tile, one a lane: it looks up their pages a tile ahead, and the
address of each goes to the lanes that copy it by shuffles. A token that no query row sees, or whose page is not in the pool,
becomes zeros. What cp.async has written is ordered before wgmma's reads by a proxy fence of its writer, so a warp arrives at a
full barrier itself, one group behind the copies that it starts.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...config.decode import KernelSpec
from ...config.problem import UNIT_BYTES
from ..kv.source import find_holes, find_page, inspect_requests, is_seen
from ..problem import Problem
from ..ptx.cp_async import copy_async
from ..ptx.registers import LANES, quotient, remainder
from ..schedule.dealing import Found, Item, find_item, meet_all, piece_of, publish_item, take_item
from ..schedule.work_scheduler import Piece
from . import tile
from .dealt import DealtMainloop
from .shared import Shared, full_barrier

VECTOR_BYTES = 16  # of a copy


@dataclass(frozen=True)
class Tokens:
    """32 tokens of a tile, one a lane: where each lies in K and in V, and bit l, whether that of lane l is to be read."""

    sources: tuple[Int64, Int64]
    seen: Int32


class GatherMainloop(DealtMainloop):
    """The consumers of DealtMainloop; `spec.gatherers` warps bring K and V."""

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.arrivals = spec.gatherers, spec.gatherers
        self.zeroes_alone = False  # what no row sees comes as zeros

    def operands(self, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """(K, V) caches [pages, heads, slots, head_dim] in any strides."""
        return (k, v)

    def maps(self, operands: tuple) -> tuple:
        """None: plain pointers."""
        return ()

    @cute.jit
    def gather(self, problem: Problem, shared: Shared, part: Int32, leads: cutlass.Constexpr):
        """A producer warp: its part of every tile of every item, in order. leads: whether it finds the items for all."""
        spec, rows, batch = self.spec, problem.rows, problem.batch(self.spec)
        cute.arch.griddepcontrol_wait()
        meet_all(spec)
        issued, turn, found = Int32(0), Int32(0), Found(Int32(0), Int32(0))
        item, found = self.next_part(problem, shared, turn, found, leads)
        while item.index < batch:
            piece = piece_of(spec, rows, item, issued)
            turn += 1
            item, found = self.next_part(problem, shared, turn, found, leads)  # consumers take it before they attend to this one
            pages = self.lookup(problem, piece, Int32(0), part)
            for i in cutlass.range(piece.tiles, unroll=1):
                upcoming = self.lookup(problem, piece, i + 1, part)
                self.bring_tile(problem, shared, piece, i, part, pages)
                pages = upcoming
            issued += piece.tiles
        if issued > 0:
            self.arrive(shared, issued - 1, 1, 0)
        if cutlass.const_expr(leads):
            inspect_requests(spec, rows, batch, problem.status)

    def next_part(self, problem: Problem, shared: Shared, turn: Int32, found: Found, leads: bool) -> tuple[Item, Found]:
        """The item of a round, and where to search for the next."""
        spec = self.spec
        if leads:
            item, found = find_item(spec, problem.rows, problem.batch(spec), turn, found)
            publish_item(spec, shared, item, turn)
            return item, found
        return take_item(spec, shared, turn), found

    def token_of_lane(self, piece: Piece, i: Int32, part: Int32) -> Int32:
        """The token of the piece's tile i that this lane looks up: past the range where the tile has none for it."""
        within = part * LANES + cute.arch.lane_idx()
        token = self.tile_at(piece, i) * self.spec.tile_n + within
        return token if self.spec.tile_n % LANES == 0 else cutlass.select_(within < self.spec.tile_n, token, piece.keys.end)

    def lookup(self, problem: Problem, piece: Piece, i: Int32, part: Int32) -> Int32:
        """Lane l holds the page of its token of the piece's tile i."""
        rows, token = problem.rows, self.token_of_lane(piece, i, part)
        return find_page(self.spec, rows.tables, piece.row.start, piece.keys, token, 1, rows.num_pages)

    @cute.jit
    def bring_tile(self, problem: Problem, shared: Shared, piece: Piece, i: Int32, part: Int32, pages: Int32):
        """Starts to bring this warp's tokens of the piece's tile i, K then V, and arrives for what it brought before."""
        spec, ordinal = self.spec, piece.issued + i
        token, num_pages = self.token_of_lane(piece, i, part), problem.rows.num_pages
        holes = find_holes(token, piece.keys, 1, pages, num_pages, piece.index, problem.status)
        tokens = self.locate(problem, piece, token, pages)
        for which in cutlass.range_constexpr(2):
            stage = self.await_stage(shared, ordinal, which)
            if cutlass.const_expr(which == 0) and cute.arch.lane_idx() == 0:
                shared.holes[stage * spec.hole_words + part] = holes
            self.copy_tokens(problem, shared, tokens, which, stage, part)
            cute.arch.cp_async_commit_group()
            if ordinal + which > 0:
                self.arrive(shared, ordinal - 1 + which, 1 - which, 1)

    def locate(self, problem: Problem, piece: Piece, token: Int32, pages: Int32) -> Tokens:
        """Where this lane's token lies in both caches."""
        inside = is_seen(piece.keys, token, 1) & (pages >= 0) & (pages < problem.rows.num_pages)
        place = cutlass.select_(inside, pages, 0), piece.kv_head, remainder(token, self.spec.page_size), Int32(0)
        sources = tuple(Int64((cache.iterator + cute.crd2idx(place, cache.layout)).toint()) for cache in problem.caches)
        return Tokens(sources, cute.arch.vote_ballot_sync(inside))

    @cute.jit
    def copy_tokens(self, problem: Problem, shared: Shared, tokens: Tokens, which: cutlass.Constexpr, stage: Int32, part: Int32):
        """Starts the copies of this warp's tokens of K (0) or V (1), 16 bytes a lane."""
        shape = self.spec.rings[which]
        per_token = cutlass.const_expr(shape.units * UNIT_BYTES // VECTOR_BYTES)
        ring, source = shared.rings[which].iterator.toint(), tokens.sources[which]
        for step in cutlass.range(per_token, unroll=4):
            index = step * LANES + cute.arch.lane_idx()
            token, column = quotient(index, per_token), remainder(index, per_token) * VECTOR_BYTES
            begin, within = shuffled(source, token), part * LANES + token
            inside = (tokens.seen >> token) & 1 != 0
            if cutlass.const_expr(self.spec.tile_n % LANES == 0) or within < self.spec.tile_n:
                copy_async(begin + column, ring + tile.swizzled(shape, stage, within, column), VECTOR_BYTES, inside)

    @cute.jit
    def arrive(self, shared: Shared, ordinal: Int32, which: cutlass.Constexpr, under_way: cutlass.Constexpr):
        """This warp's part of K (0) or V (1) of the share's tile `ordinal` is there, but for `under_way` groups started since."""
        cute.arch.cp_async_wait_group(under_way)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(full_barrier(self.spec, shared, self.place_in_ring(ordinal)[0], which))


def shuffled(value: Int64, lane: Int32) -> Int64:
    """The value of another lane."""
    low, high = (cute.arch.shuffle_sync(Int32(value >> shift), lane) for shift in (0, 32))
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
