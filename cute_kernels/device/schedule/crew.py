"""The crew (reduction group) of a cut row: which CTAs combine it (combine/combine.py), and how each knows whether it may wait.

A CTA may wait for CTAs of a lower index, which the hardware starts no later than itself. It may wait for a CTA of a higher index
only once that CTA has announced its start, or two grids could wait for each other's SMs. A CTA that does not find the row's last
CTA announced declines (hands over its columns), by the mark of its words. The last CTA, which may wait for all, combines those
columns too.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64

from ...config.decode import MOST_PIECES, KernelSpec
from ..attend.pack_gqa import sync_consumers
from ..attend.query_rows import QueryBlock, Row, block_of_unit, heads_of, query_block, tiles_of
from ..combine.combine import Columns, Parts, columns_of, step_of, width_bits
from ..combine.partials import open_workspace
from ..kv.source import Rows
from ..mainloop.shared import Shared, announced_barrier, crew_barrier, crew_words
from ..problem import Problem
from ..ptx.warps import warp_number
from .work_scheduler import Share, first_slice, inside_row, keys_of, last_slice

RUNNING = 1  # an announcement
MOST_READS = 3  # how often the producer reads an announcement while its last tiles come


def announcement(spec: KernelSpec, problem: Problem, cta: Int32) -> Int64:
    """The address of the word, after all states, in which a CTA says that it has started: RUNNING, else 0."""
    states = open_workspace(spec, problem.workspace)
    return Int64((states.iterator + cute.size(states.layout) + cta).toint())


def announce(spec: KernelSpec, problem: Problem, word: Int32):
    """The CTA's first thread writes its announcement. It uses a predicate: after a branch warps are not taken to be converged."""
    address = announcement(spec, problem, cute.arch.block_idx()[0])
    cute.arch.inline_ptx(
        "{ .reg .pred first; setp.eq.s32 first, {$r2}, 0; @first st.relaxed.gpu.global.s32 [{$r0}], {$r1}; }",
        read_only_args=[address, word, cute.arch.thread_idx()[0]],
    )


def is_announced(spec: KernelSpec, problem: Problem, cta: Int32) -> Boolean:
    """Whether a CTA has started and runs."""
    text, address = "ld.relaxed.gpu.global.s32 {$w0}, [{$r0}];", announcement(spec, problem, cta)
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address]) == RUNNING


@dataclass(frozen=True)
class Crew:
    """Which CTAs combine the share's first row. opened: the slot of its first piece; pieces: how many; crew: how many CTAs.

    place: this CTA's place among them; step: words for each CTA; bits: combine.width_bits; last: the row's last CTA.
    rows, query: those of the QueryBlock, if a request may have several query rows.
    """

    opened: Int32
    pieces: Int32
    crew: Int32
    place: Int32
    step: Int32
    bits: Int32
    last: Int32
    rows: Int32 | None = None
    query: Int32 | None = None


def find_crew(spec: KernelSpec, rows: Rows, share: Share, row: Row) -> Crew:
    """The crew of the share's first row, with the row's last CTA always at place 0. row: that row, opened."""
    tiles = tiles_of(spec, keys_of(spec, rows, share.unit, row))
    block = query_block(spec, rows.queries, share.unit, heads_of(spec, rows.queries, share.unit), share.row, row)
    heads = block.rows
    opener, last = first_slice(spec, share, tiles), last_slice(spec, share, tiles)
    pieces = last - opener + 1
    crew = cutlass.select_(pieces <= MOST_PIECES, pieces - 1, 1)
    step, place = step_of(spec, heads, crew), cutlass.select_(inside_row(share), share.index - opener, 0)  # 0: the last CTA
    ends = 2 * (opener * share.units + share.unit) + 1, last * share.units + share.unit
    found = Crew(ends[0], pieces, crew, place, step, width_bits(spec, step, pieces), ends[1])
    return replace(found, rows=block.rows, query=Int32(0) if block.query is None else block.query) if spec.several else found


@cute.jit
def clear_declined(spec: cutlass.Constexpr, shared: Shared):
    """Sets that no CTA has declined yet."""
    for i in cutlass.range(cute.arch.thread_idx()[0], MOST_PIECES, spec.num_warps * 32, unroll=1):
        shared.declined[i] = Int8(0)


def leave_crew(shared: Shared, crew: Crew):
    """One lane writes the crew to shared memory, so that it takes no registers until the end of the share."""
    for i, word in enumerate(word for word in vars(crew).values() if word is not None):
        shared.crew[i] = word
    shared.combines[0] = Int32(1)


def take_crew(spec: KernelSpec, shared: Shared) -> Crew:
    """The crew that leave_crew wrote. A warp may wait only after the share's last tile: a producer writes the crew then."""
    if spec.arch == "sm90":
        cute.arch.mbarrier_wait(crew_barrier(spec, shared), 0)
    return Crew(*(shared.crew[i] for i in range(crew_words(spec))))


@cute.jit
def begin_crew(spec: cutlass.Constexpr, problem: Problem, shared: Shared, share: Share, row: Row):
    """Without a producer the first thread finds the crew of the share's first row."""
    if cute.arch.thread_idx()[0] == 0 and share.tile > 0:
        leave_crew(shared, find_crew(spec, problem.rows, share, row))


@cute.jit
def prepare_end(spec: cutlass.Constexpr, problem: Problem, shared: Shared, share: Share, row: Row):
    """The producer, after issuing all its tiles, finds the crew and waits a little for the announcement that `settle` needs.

    Under load a read of it is slow. row: the share's first row.
    """
    if share.tile > 0:
        crew = find_crew(spec, problem.rows, share, row)
        with cute.arch.elect_one():
            leave_crew(shared, crew)
            cute.arch.mbarrier_arrive(crew_barrier(spec, shared))
        if inside_row(share):
            announced, reads = Boolean(False), Int32(0)
            while not announced and reads < MOST_READS:
                announced, reads = is_announced(spec, problem, crew.last), reads + 1
            if announced:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(announced_barrier(spec, shared))


@cute.jit
def settle(spec: cutlass.Constexpr, problem: Problem, shared: Shared, share: Share):
    """The first warp settles whether this CTA combines, before it stores a piece of a row that it neither opens nor ends."""
    if cute.arch.make_warp_uniform(warp_number()) == 0 and inside_row(share):
        crew, known = take_crew(spec, shared), Boolean(False)
        if cutlass.const_expr(spec.arch == "sm90"):
            known = cute.arch.mbarrier_test_wait(announced_barrier(spec, shared), 0)
        if not known:
            known = is_announced(spec, problem, crew.last)
        if cute.arch.lane_idx() == 0:
            shared.combines[0] = cutlass.select_(known, Int32(1), 0)


@cute.jit
def declines(shared: Shared, share: Share) -> Boolean:
    """Whether this CTA leaves its columns to the row's last CTA."""
    declined = Boolean(False)
    if inside_row(share):
        declined = shared.combines[0] == 0
    return declined


def crew_parts(crew: Crew, share: Share) -> Parts:
    """The states of the row's pieces."""
    stride = 2 * share.units
    return Parts(crew.pieces, crew.opened, crew.opened - 1 + stride, stride)


def crew_columns(spec: KernelSpec, problem: Problem, crew: Crew, share: Share, place: Int32) -> Columns:
    """The columns of the CTA at a place in the crew."""
    queries = problem.rows.queries
    _, head, heads = heads_of(spec, queries, share.unit)
    block = QueryBlock(share.row, head, heads)
    if spec.several:
        base = block_of_unit(spec, queries, share.unit) * spec.block_rows
        block = QueryBlock(share.row, head, crew.rows, crew.query, base)
    return columns_of(spec, block, place, crew.step, crew.bits)


@cute.jit
def next_place(spec: cutlass.Constexpr, shared: Shared, share: Share, crew: Int32, place: Int32) -> Int32:
    """The next place after `place`, in a crew of `crew` CTAs, whose columns this CTA combines; `crew` if there is none.

    The row's last CTA has the columns that were declined, which it knows once it has combined its own columns.
    """
    if crew == 1 or inside_row(share):
        place = crew
    else:
        sync_consumers(spec)
        place = place + 1 if shared.declined[0] != 0 else crew
        while place < crew and shared.declined[place] == 0:
            place += 1
    return place
