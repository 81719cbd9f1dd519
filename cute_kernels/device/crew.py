"""The CTAs that combine a cut row together (combine.py), and how one of them knows that it may wait for the others.

A CTA may wait for those of a lower index, which the hardware starts no later than itself; for one of a higher index only once
that has announced its start, or two grids could wait for each other's SMs. A CTA that does not find the row's last one
announced declines, by the sign of its words' tags, and the last, which may wait for all, combines those columns too.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64

from ..config import MOST_PIECES, KernelSpec
from .combine import Columns, Parts, columns_of, step_of, width_bits
from .kv_source import row_length
from .pack_gqa import sync_consumers
from .partials import open_workspace
from .problem import Problem
from .shared import Shared
from .work_scheduler import Share, first_slice, heads_of, inside_row, last_slice, tiles_of

MOST_READS = 3  # of an announcement by the producer while its first tiles come

# Shared.schedule: the slot of the row's first piece, its pieces, the CTAs that combine, this one's place among them, pairs of
# columns of each, their bits (combine.width_bits), the row's last CTA, whether this one combines
OPENED, PIECES, CREW, PLACE, STEP, BITS, LAST, COMBINES = range(8)


def announcement(spec: KernelSpec, problem: Problem, cta: Int32) -> Int64:
    """The address of the word, behind all states, in which a CTA says that it has started: the tag while it runs."""
    states = open_workspace(spec, problem.workspace)
    return Int64((states.iterator + cute.size(states.layout) + cta).toint())


def announce(spec: KernelSpec, problem: Problem, word: Int32):
    """The CTA's first thread writes its announcement. By a predicate: behind a branch warps are not taken to be converged."""
    address = announcement(spec, problem, cute.arch.block_idx()[0])
    cute.arch.inline_ptx(
        "{ .reg .pred first; setp.eq.s32 first, {$r2}, 0; @first st.relaxed.gpu.global.s32 [{$r0}], {$r1}; }",
        read_only_args=[address, word, cute.arch.thread_idx()[0]],
    )


def is_announced(spec: KernelSpec, problem: Problem, cta: Int32) -> Boolean:
    """Whether a CTA has started and runs."""
    text, address = "ld.relaxed.gpu.global.s32 {$w0}, [{$r0}];", announcement(spec, problem, cta)
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address]) == problem.status[1]


@cute.jit
def find_crew(spec: cutlass.Constexpr, shared: Shared, share: Share, length: Int32):
    """Leaves in shared memory who combines the share's first row, of `length` tokens, while its first tile comes."""
    for i in cutlass.range(cute.arch.thread_idx()[0], MOST_PIECES, spec.num_warps * 32, unroll=1):
        shared.declined[i] = Int8(0)
    if cute.arch.thread_idx()[0] == 0 and share.tile > 0:
        found, tiles, heads = shared.schedule, tiles_of(spec, length), heads_of(spec, share.unit)[2]
        opener, last = first_slice(spec, share, tiles), last_slice(spec, share, tiles)
        found[OPENED], found[PIECES] = 2 * (opener * share.units + share.unit) + 1, last - opener + 1
        found[CREW] = cutlass.select_(last - opener < MOST_PIECES, last - opener, 1)
        found[PLACE] = cutlass.select_(inside_row(share), share.index - opener, 0)  # the last CTA always has columns
        found[STEP] = step_of(spec, heads, found[CREW])
        found[BITS] = width_bits(spec, found[STEP], found[PIECES])
        found[LAST], found[COMBINES] = last * share.units + share.unit, Int32(1)


@cute.jit
def watch_last(spec: cutlass.Constexpr, problem: Problem, shared: Shared, share: Share, filled: Boolean):
    """The producer, its ring filled, waits a little for the announcement that `settle` needs: under load a read is slow."""
    if filled and inside_row(share):
        tiles = tiles_of(spec, row_length(spec, problem.tables, problem.k, share.row))
        last = last_slice(spec, share, tiles) * share.units + share.unit
        announced, reads = Boolean(False), Int32(0)
        while not announced and reads < MOST_READS:
            announced, reads = is_announced(spec, problem, last), reads + 1
        if announced:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(announced_barrier(spec, shared))


def announced_barrier(spec: KernelSpec, shared: Shared) -> cute.Pointer:
    """The mbarrier behind those of the ring."""
    return shared.barriers + 2 * spec.num_stages


@cute.jit
def settle(spec: cutlass.Constexpr, problem: Problem, shared: Shared, share: Share):
    """The first thread settles whether this CTA combines, before it stores a piece of a row that it neither opens nor ends."""
    if cute.arch.thread_idx()[0] == 0 and inside_row(share):
        known = Boolean(False)
        if cutlass.const_expr(spec.arch == "sm90"):
            known = cute.arch.mbarrier_test_wait(announced_barrier(spec, shared), 0)
        if not known:
            known = is_announced(spec, problem, shared.schedule[LAST])
        shared.schedule[COMBINES] = Int32(1) if known else Int32(0)


def declines(shared: Shared, share: Share) -> Boolean:
    """Whether this CTA leaves its columns to the row's last one."""
    return inside_row(share) & (shared.schedule[COMBINES] == 0)


def crew_parts(shared: Shared, share: Share, tag: Int32) -> Parts:
    """The row's pieces."""
    opened, stride = shared.schedule[OPENED], 2 * share.units
    return Parts(shared.schedule[PIECES], opened, opened - 1 + stride, stride, tag)


def crew_columns(spec: KernelSpec, shared: Shared, share: Share, place: Int32) -> Columns:
    """The columns at a place in the crew."""
    _, head, heads = heads_of(spec, share.unit)
    return columns_of(spec, share.row, head, heads, place, shared.schedule[STEP], shared.schedule[BITS])


@cute.jit
def next_place(spec: cutlass.Constexpr, shared: Shared, share: Share, place: Int32) -> Int32:
    """The next place in the crew after `place` whose columns this CTA combines, or that of nobody.

    The row's last CTA has those that were declined, which it knows once it has combined its own.
    """
    crew = shared.schedule[CREW]
    if crew == 1 or inside_row(share):
        place = crew
    else:
        sync_consumers(spec)
        place = place + 1 if shared.declined[0] != 0 else crew
        while place < crew and shared.declined[place] == 0:
            place += 1
    return place
