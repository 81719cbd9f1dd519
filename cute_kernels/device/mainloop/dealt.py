"""The mainloop of long queries: OverlapMainloop on the items (work tiles) that a CTA is dealt in turn (schedule/dealing.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import ITEMS, KernelSpec
from ..kv.source import empty_row, inspect_requests
from ..problem import Problem
from ..ptx.registers import LANES
from ..schedule.dealing import (
    Cut,
    Found,
    Item,
    end_claims,
    find_item,
    helpers,
    meet_all,
    nothing_found,
    pages_of,
    piece_of,
    publish_item,
    take_item,
)
from ..schedule.pieces import pieces_of_blocks
from ..schedule.work_scheduler import Piece
from .overlap import OverlapMainloop
from .shared import Shared, item_barrier, taken_barrier


class DealtMainloop(OverlapMainloop):
    """OverlapMainloop whose producers and widening warps go from item to item by themselves."""

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.opens_late = spec.claims  # no other CTA could attend to an item that is claimed earlier

    @cute.jit
    def prepare(self, operands: tuple, shared: Shared):
        """As TmaMainloop.prepare, with the mbarriers of items."""
        takers = LANES * (self.spec.num_warps + helpers(self.spec))
        with cute.arch.elect_one():
            for slot in cutlass.range_constexpr(ITEMS):
                cute.arch.mbarrier_init(item_barrier(self.spec, shared, slot), 1)
                cute.arch.mbarrier_init(taken_barrier(self.spec, shared, slot), takers)
        OverlapMainloop.prepare(self, operands, shared)  # in traced code super() is relative to the object's own class

    def look_ahead(self, problem: Problem, shared: Shared):
        """Does nothing: a CTA's first loads are small compared with all that follow."""

    @cute.jit
    def produce(self, problem: Problem, shared: Shared, part: Int32, load: cutlass.Constexpr):
        """A producer warp: every item, in order. load: what it brings; the one that leads finds the items."""
        spec, rows, batch, issued, turn = self.spec, problem.rows, problem.batch(self.spec), Int32(0), Int32(0)
        cute.arch.griddepcontrol_wait()
        meet_all(spec)
        item, found, pages = self.next_item(problem, shared, turn, self.begin_search(problem, load.leads), load.leads)
        while item.index < batch:
            piece = piece_of(spec, rows, item, issued)
            issued += piece.stop - piece.first
            turn += 1
            where = shared, turn, found
            item, found, pages = self.issue(problem, shared, where, piece, pages, Boolean(True), part, load)
        if cutlass.const_expr(load.leads):
            self.end(problem, found)

    def begin_search(self, problem: Problem, leads: bool) -> Found:
        """The beginning of a search for items. leads: whether this warp searches."""
        return nothing_found(self.spec, pieces_of_blocks(self.spec, problem) if self.spec.deals_pieces and leads else None)

    def end(self, problem: Problem, found: Found):
        """What the warp that finds the items does last. found: that of the item past the last one."""
        if self.spec.claims:  # in a mixed kernel another warp inspects all requests
            end_claims(problem.claims, found)
        else:
            inspect_requests(self.spec, problem.rows, problem.batch(self.spec), problem.status)

    def no_next(self, problem: Problem, pages: Int32) -> tuple:
        """The value with which `issue` begins; it always finds an item."""
        cut = Cut(*(Int32(0) for _ in range(4))) if self.spec.deals_pieces else None
        return Item(Int32(0), Int32(0), Int32(0), empty_row(self.spec), cut), nothing_found(self.spec), pages

    def open_next(self, problem: Problem, where: tuple, piece: Piece, leads: bool) -> tuple:
        """The item after a piece's. where: (shared memory, the item's round, Found of the previous one)."""
        return self.next_item(problem, *where, leads)

    def next_item(self, problem: Problem, shared: Shared, turn: Int32, found: Found, leads: bool) -> tuple[Item, Found, Int32]:
        """(the item of a round, where to search for the next, pages_of it)."""
        item, found = self.find_or_take(problem, shared, turn, found, leads)
        return item, found, pages_of(self.spec, problem.rows, item)

    def find_or_take(self, problem: Problem, shared: Shared, turn: Int32, found: Found, leads: bool) -> tuple[Item, Found]:
        """(the item of a round, where to search for the next). leads: whether this warp finds it for all."""
        spec = self.spec
        if not leads:
            return take_item(spec, shared, turn), found
        item, found = find_item(spec, problem, turn, found)
        publish_item(spec, shared, item, turn)
        return item, found

    @cute.jit
    def widen(self, problem: Problem, shared: Shared, warp: Int32):
        """The warps that widen 8-bit tiles: together, every item in order. warp: this warp's number."""
        spec, batch, issued, turn = self.spec, problem.batch(self.spec), Int32(0), Int32(0)
        cute.arch.griddepcontrol_wait()
        meet_all(spec)
        self.open_factors(shared, warp)
        item = take_item(spec, shared, turn)
        while item.index < batch:
            piece = piece_of(spec, problem.rows, item, issued)
            for i in cutlass.range(piece.stop - piece.first, unroll=1):
                self.widen_stage(problem, shared, piece, i, warp)
            issued += piece.stop - piece.first
            turn += 1
            item = take_item(spec, shared, turn)
