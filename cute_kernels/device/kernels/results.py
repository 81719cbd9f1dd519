"""What becomes of a piece (a KV split): the result of a whole row, or a part of a cut row, which CTAs combine at the end."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import MAX_BLOCKS, KernelSpec
from ..attend.epilogue import Storers, send_rows, store_final, store_partial, store_rows
from ..attend.pack_gqa import row_tiles_of
from ..attend.query_rows import Row, tiles_of
from ..attend.turns import send_halves
from ..combine.combine import Columns, Parts, all_columns, combine_columns
from ..combine.merging import merge_buffer
from ..combine.partials import DECLINED, WRITTEN, open_workspace
from ..kv.scale import Scaling
from ..kv.source import open_row
from ..mainloop.shared import Shared
from ..problem import Problem
from ..ptx.registers import quotient
from ..schedule.crew import begin_crew, clear_declined, crew_columns, crew_parts, declines, next_place, take_crew
from ..schedule.work_scheduler import Piece, Share, block_of, first_slice, keys_of, make_piece, unfinished


def is_part(piece: Piece) -> Boolean:
    """Whether a piece is a part of a row."""
    return (piece.first > 0) | (piece.stop < piece.tiles)


class PieceResults:
    """The half of a kernel that stores what its warps found, and combines. divides: KernelSpec.divides_combine."""

    spec: KernelSpec
    divides: bool

    @cute.jit
    def open_combine(self, problem: Problem, shared: Shared, share: Share, row: Row):
        """Leaves in shared memory what the combine of the share's first row begins with. row: that row."""
        if cutlass.const_expr(self.divides):
            clear_declined(self.spec, shared)
            if cutlass.const_expr(self.spec.arch == "sm80"):
                begin_crew(self.spec, problem, shared, share, row)
        elif cutlass.const_expr(self.spec.split):
            self.find_opener(problem, shared, share, row)

    @cute.jit
    def find_opener(self, problem: Problem, shared: Shared, share: Share, row: Row):
        """Leaves in shared memory the slice that opened the share's first row."""
        if cute.arch.thread_idx()[0] == 0 and share.tile > 0:
            tiles = tiles_of(self.spec, keys_of(self.spec, problem.rows, share.unit, row))
            shared.opener[0] = first_slice(self.spec, share, tiles)

    @cute.jit
    def store(
        self,
        problem: Problem,
        shared: Shared,
        share: Share,
        piece: Piece,
        order: Int32,
        scaling: Scaling,
        outcome: tuple,
        storers: Storers,
    ):
        """Stores the result of a whole row, or writes a part of a cut row to the workspace.

        outcome: what `settle` returned, and the query's buffer, which may be overwritten.
        """
        spec, (settled, buffer) = self.spec, outcome
        if is_part(piece):
            if cutlass.const_expr(spec.split):
                words, mark = open_workspace(spec, problem.workspace), Int32(WRITTEN)
                slot = self.slot_of(shared, share, piece)
                if cutlass.const_expr(self.divides):
                    mark = cutlass.select_(declines(shared, share), DECLINED, mark)
                if cutlass.const_expr(settled is None):
                    store_partial(spec, shared.merge, piece, words, slot, mark, scaling, storers)
                elif cutlass.const_expr(not spec.settles_alone):
                    send_halves(spec, shared.merge, settled, piece.block.rows, order, scaling, words, slot, mark)
                else:
                    send_rows(spec, settled, piece.block.rows, words, slot, mark)
                if cutlass.const_expr(spec.partition == "invariant"):
                    self.combine_alone(problem, shared, share, piece, slot)
        elif cutlass.const_expr(not spec.settles_alone):
            store_final(spec, shared.merge, piece.block, problem.out, problem.lse, scaling, self.sinks(problem), storers)
        else:
            rows = row_tiles_of(spec)[0]
            store_rows(spec, settled, buffer, rows, piece.block, problem.out, problem.lse, self.sinks(problem))

    @cute.jit
    def combine_alone(self, problem: Problem, shared: Shared, share: Share, piece: Piece, slot: Int32):
        """Combines the blocks of a row that this CTA works on alone, after the row's last block."""
        if piece.stop == piece.tiles and not self.continued(share, piece):
            parts = self.blocks(slot, piece)
            self.combine(problem, shared, parts, all_columns(self.spec, piece, parts))

    @cute.jit
    def combine(self, problem: Problem, shared: Shared, parts: Parts, columns: Columns):
        """Combines columns of a row."""
        words = open_workspace(self.spec, problem.workspace)
        scratch = merge_buffer(self.spec, shared.merge[0].iterator), shared.declined
        combine_columns(self.spec, words, parts, columns, scratch, problem.out, problem.lse, self.sinks(problem))

    def sinks(self, problem: Problem):
        """The sinks, or None."""
        return problem.scores.sinks if self.spec.modifiers.sinks else None

    def continued(self, share: Share, piece: Piece) -> Boolean:
        """Whether the piece is of a row that an earlier CTA opened."""
        return (piece.index == share.row) & (share.tile > 0)

    def slot_of(self, shared: Shared, share: Share, piece: Piece) -> Int32:
        """The slot to which the state of a piece goes (partials.open_workspace)."""
        cta = cute.arch.block_idx()[0]
        if self.spec.partition == "balanced":
            return 2 * cta + (piece.first == 0)
        others = self.continued(share, piece)
        owner = cutlass.select_(others, shared.opener[0] * share.units + share.unit, cta)
        region = 2 * owner + (others | (piece.end < piece.tiles))
        return region * MAX_BLOCKS + quotient(piece.first, block_of(piece.tiles))

    def blocks(self, last: Int32, piece: Piece) -> Parts:
        """All blocks of a row whose last block is in slot `last`."""
        count = quotient(piece.tiles + block_of(piece.tiles) - 1, block_of(piece.tiles))
        first = last - count + 1
        return Parts(count, first, first + 1, Int32(1))

    @cute.jit
    def finish(self, problem: Problem, shared: Shared, share: Share):
        """Combines the row inside which this share began: this CTA's columns, or all of it (invariant) if this share ended it."""
        if share.tile > 0 and unfinished(self.spec, share, share.row, share.tile):
            if cutlass.const_expr(self.divides):
                self.finish_columns(problem, shared, share)
            else:
                self.finish_blocks(problem, shared, share)

    @cute.jit
    def finish_columns(self, problem: Problem, shared: Shared, share: Share):
        """Combines this CTA's columns of the row, and, if it is the row's last CTA, the columns of CTAs that decline."""
        crew = take_crew(self.spec, shared)
        parts, place = crew_parts(crew, share), crew.place
        if declines(shared, share):
            place = crew.crew
        while place < crew.crew:
            self.combine(problem, shared, parts, crew_columns(self.spec, problem, crew, share, place))
            place = next_place(self.spec, shared, share, crew.crew, place)

    @cute.jit
    def finish_blocks(self, problem: Problem, shared: Shared, share: Share):
        """Combines the whole row, under the invariant partition, if this share ended the row."""
        spec = self.spec
        row = open_row(spec, problem.rows, share.row)
        piece = make_piece(spec, problem.rows, share, share.row, row, share.tile, Int32(0))
        if piece.end == piece.tiles:
            slot, block = self.slot_of(shared, share, piece), block_of(piece.tiles)
            last = slot - quotient(piece.first, block) + quotient(piece.tiles - 1, block)
            parts = self.blocks(last, piece)
            self.combine(problem, shared, parts, all_columns(spec, piece, parts))
