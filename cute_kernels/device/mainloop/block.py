"""SM80 mainloop of long queries: the warps of a CTA fill one ring by cp.async together, and each attends to every tile of it.

As in FlashAttention-2 (Dao 2023) a warp has m-tiles of its own, so a tile that is read once from L2 serves all packed rows of the
unit (query block). One CTA barrier per tile says that the tile has come and that the previous one is free. No load runs ahead of
a piece (KV split), so the states of its end may lie in the ring's memory (shared.allocate).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KernelSpec
from ..attend.attend import Attention, attend_tile
from ..attend.pack_gqa import sync_consumers
from ..attend.query_rows import place_of_tile
from ..kv.source import inspect_request
from ..problem import Problem
from ..ptx.registers import remainder
from ..schedule.work_scheduler import Piece
from .cp_async import CpAsyncMainloop
from .shared import Shared, read_holes


class BlockMainloop(CpAsyncMainloop):
    """CpAsyncMainloop with one ring for all warps."""

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.depth, self.parts = spec.num_stages, spec.num_warps

    def order(self, piece: Piece) -> Int32:
        """This warp's place in the merge: 0, as all warps attend to every tile."""
        return Int32(0)

    def leads(self) -> Boolean:
        """As CpAsyncMainloop.leads: one thread of the CTA."""
        return cute.arch.thread_idx()[0] == 0

    @cute.jit
    def consume(self, piece: Piece, attention: Attention, problem: Problem, shared: Shared):
        """Attends to every tile of the piece, with `depth` - 1 tiles in flight."""
        spec, depth, tables = self.spec, self.depth, problem.rows.tables
        num_pages = problem.rows.num_pages
        pages = self.lookup(tables, piece, piece.first, num_pages)
        for ahead in cutlass.range_constexpr(depth - 1):
            upcoming = self.lookup(tables, piece, piece.first + ahead + 1, num_pages)
            self.fetch(problem, shared, piece, piece.first + ahead, Int32(ahead), pages)
            pages = upcoming
        for i in cutlass.range(piece.stop - piece.first, unroll=1):
            cute.arch.cp_async_wait_group(depth - 2)
            sync_consumers(spec)
            later = piece.first + i + depth - 1
            upcoming = self.lookup(tables, piece, later + 1, num_pages)
            self.fetch(problem, shared, piece, later, remainder(i + depth - 1, depth), pages)
            pages = upcoming
            stage, place = remainder(i, depth), place_of_tile(spec, piece.keys, piece.first + i)
            holes = read_holes(spec, shared, stage)
            attend_tile(spec, attention, shared, stage, place, holes)
        cute.arch.cp_async_wait_group(0)
        sync_consumers(spec)
        if piece.first == 0 and cute.arch.thread_idx()[0] == 0:
            inspect_request(spec, problem.rows, piece.index, problem.status)
