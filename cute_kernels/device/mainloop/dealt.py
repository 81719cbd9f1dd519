"""The mainloop of long queries: OverlapMainloop on the items that a CTA is dealt, one after the other (schedule/dealing.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import ITEMS
from ..kv.source import empty_row, inspect_requests
from ..problem import Problem
from ..ptx.registers import LANES
from ..schedule.dealing import Found, Item, find_item, helpers, meet_all, pages_of, piece_of, publish_item, take_item
from ..schedule.work_scheduler import Piece
from .overlap import OverlapMainloop
from .shared import Shared, item_barrier, taken_barrier


class DealtMainloop(OverlapMainloop):
    """Its producers and those that widen go from item to item by themselves."""

    @cute.jit
    def prepare(self, operands: tuple, shared: Shared):
        """As TmaMainloop, with the mbarriers of items."""
        takers = LANES * (self.spec.num_warps + helpers(self.spec))
        with cute.arch.elect_one():
            for slot in cutlass.range_constexpr(ITEMS):
                cute.arch.mbarrier_init(item_barrier(self.spec, shared, slot), 1)
                cute.arch.mbarrier_init(taken_barrier(self.spec, shared, slot), takers)
        OverlapMainloop.prepare(self, operands, shared)  # super() of traced code is that of the object's own class

    def look_ahead(self, problem: Problem, shared: Shared):
        """Nothing: what a CTA begins with is small beside what follows."""

    @cute.jit
    def produce(self, problem: Problem, shared: Shared, scales: cutlass.Constexpr):
        """A producer warp: every item, in order. scales: whether it brings the tokens' scales; K and V, and items, otherwise."""
        spec, rows, batch, issued, turn = self.spec, problem.rows, problem.batch(self.spec), Int32(0), Int32(0)
        cute.arch.griddepcontrol_wait()
        meet_all(spec)
        item, found, pages = self.next_item(problem, shared, turn, Found(Int32(0), Int32(0)), scales)
        while item.index < batch:
            piece = piece_of(spec, rows, item, issued)
            issued += piece.tiles
            turn += 1
            where = shared, turn, found
            item, found, pages = self.issue(problem, shared, where, piece, pages, Boolean(True), scales)
        if cutlass.const_expr(not scales and spec.q_lens is None):
            inspect_requests(spec, rows, batch, problem.status)

    def no_next(self, problem: Problem, pages: Int32) -> tuple:
        """What issue begins with: it always finds an item."""
        return Item(Int32(0), Int32(0), Int32(0), empty_row(self.spec)), Found(Int32(0), Int32(0)), pages

    def open_next(self, problem: Problem, where: tuple, piece: Piece, scales: bool) -> tuple:
        """The item behind a piece's. where: (shared memory, its round, Found before)."""
        return self.next_item(problem, *where, scales)

    def next_item(self, problem: Problem, shared: Shared, turn: Int32, found: Found, scales: bool) -> tuple[Item, Found, Int32]:
        """(the item of a round, where to search for the next, pages_of it)."""
        item, found = self.find_or_take(problem, shared, turn, found, leads=not scales)
        return item, found, pages_of(self.spec, problem.rows, item)

    def find_or_take(self, problem: Problem, shared: Shared, turn: Int32, found: Found, leads: bool) -> tuple[Item, Found]:
        """(the item of a round, where to search for the next). leads: whether this warp finds it for all."""
        spec = self.spec
        if not leads:
            return take_item(spec, shared, turn), found
        item, found = find_item(spec, problem.rows, problem.batch(spec), turn, found)
        publish_item(spec, shared, item, turn)
        return item, found

    @cute.jit
    def widen(self, problem: Problem, shared: Shared, warp: Int32):
        """The warps that widen 8-bit tiles: every item, in order, all warps together. warp: which of them."""
        spec, batch, issued, turn = self.spec, problem.batch(self.spec), Int32(0), Int32(0)
        cute.arch.griddepcontrol_wait()
        meet_all(spec)
        item = take_item(spec, shared, turn)
        while item.index < batch:
            piece = piece_of(spec, problem.rows, item, issued)
            for i in cutlass.range(piece.tiles, unroll=1):
                self.widen_stage(shared, piece, i, warp)
            issued += piece.tiles
            turn += 1
            item = take_item(spec, shared, turn)
