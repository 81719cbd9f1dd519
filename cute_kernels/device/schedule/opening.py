"""How a CTA begins: one warp finds its share (work partition) and opens its first row; the others read both from shared memory.

Until the kernels before this one are done, lengths and page tables may still change. But the lengths seldom change between two
launches, and finding a share takes longer than reading them. So the warp finds the share at once, from the lengths as they are.
After the wait it reads at the same time whether the lengths are still the same and the pages of its first boxes. What it finds
before the wait is also what the warp that looks ahead needs: values read early serve prefetches.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KernelSpec
from ..attend.pack_gqa import sync_consumers
from ..attend.query_rows import Row, first_tile
from ..kv.source import Rows, box_pages, open_row_or_nothing, row_fields
from ..mainloop.shared import SHARE_WORDS, Shared
from ..problem import Problem
from ..ptx.barriers import ALONE, BESIDE, OPENED, SEEN, arrive, sync_branches
from ..ptx.warps import warp_number
from .equal_rows import LaneRows
from .work_scheduler import Share, keys_of, locate, read_rows, share_of, span_of, take_share, unfinished


@dataclass(frozen=True)
class Opening:
    """A CTA's share, and its first row as open_row_or_nothing returns it."""

    share: Share
    row: Row


@cute.jit
def find_opening(spec: cutlass.Constexpr, problem: Problem, shared: Shared) -> tuple[Opening, Int32]:
    """(this CTA's opening, box_pages of its first boxes), once the kernels before this one are done."""
    rows, batch = problem.rows, problem.batch(spec)
    few = cutlass.min(batch, spec.kept_requests)  # lanes do not keep the lengths of more: the share is found anew then
    unsettled = rows.unsettled()
    seen = read_rows(spec, unsettled, Int32(0), few, span_of(few), False)
    share = share_of(spec, unsettled, few, seen, False)
    row = first_row(spec, seen, share.row, few)
    if cutlass.const_expr(spec.hears_share):
        leave_opening(spec, shared.seen, Opening(share, row))
        arrive(SEEN, 2)
    cute.arch.griddepcontrol_wait()
    settled = read_rows(spec, rows, Int32(0), few, span_of(few), False)
    pages = first_pages(spec, unsettled, share, row)  # reads past no end, even from an outdated start
    if not cute.arch.vote_all_sync((batch == few) & same_rows(seen, settled)):
        share = take_share(spec, rows, batch)
        row = open_row_or_nothing(spec, rows, share.row, batch)
        pages = first_pages(spec, rows, share, row)
    return Opening(share, row), pages


def open_following(spec: KernelSpec, problem: Problem, share: Share, index: Int32, first: Int32) -> Row:
    """The row at which the share goes on, or nothing past its end."""
    limit = cutlass.select_(unfinished(spec, share, index, first), problem.batch(spec), 0)
    return open_row_or_nothing(spec, problem.rows, index, limit)


def first_pages(spec: KernelSpec, rows: Rows, share: Share, row: Row) -> Int32:
    """box_pages of the first boxes of a share. row: its first row, opened."""
    keys = keys_of(spec, rows, share.unit, row)
    return box_pages(spec, rows, row.start, keys, first_tile(spec, keys) + share.tile)


def same_rows(rows: LaneRows, others: LaneRows) -> Boolean:
    """Whether this lane has read the same values twice."""
    same = rows.dealt == others.dealt
    for j in range(cute.size(rows.costs)):
        for values, other in zip(rows.words, others.words, strict=True):
            same = same & (values[j] == other[j])
    return same


def first_row(spec: KernelSpec, rows: LaneRows, row: Int32, batch: Int32) -> Row:
    """As open_row_or_nothing, for a row that a lane of this warp has read. rows: of the batch, few per lane."""
    if spec.one_request:  # every lane has it
        return Row(**{name: cute.arch.make_warp_uniform(one[0]) for name, one in zip(row_fields(spec), rows.words, strict=True)})
    span = span_of(batch)  # 1, 2 or 4
    lane, place = row >> (span >> 1), row & (span - 1)
    found = {}
    for name, values in zip(row_fields(spec), rows.words, strict=True):
        value = values[0]
        for j in range(1, spec.lane_requests):
            value = cutlass.select_(place == j, values[j], value)
        value = cute.arch.shuffle_sync(value, lane)
        found[name] = cute.arch.make_warp_uniform(cutlass.select_(row < batch, value, 0))
    return Row(**found)


def comes_late(spec: KernelSpec) -> bool:
    """Whether the last consumer warp looks ahead: it needs longer for that than another warp for the share."""
    return spec.looks_ahead and spec.token_scales > 0 and spec.num_warps > 1


def meet(spec: KernelSpec):
    """Producers and consumers, except a late consumer, meet: each sees what the others wrote before, mbarriers included."""
    sync_branches(OPENED, spec.num_warps - comes_late(spec) + spec.producers + spec.widening_warps)


@cute.jit
def meet_consumers(spec: cutlass.Constexpr):
    """The consumers' side of `meet`: a late consumer, which would hold up producers, meets the others at their own barrier."""
    if cutlass.const_expr(comes_late(spec)):
        if cute.arch.make_warp_uniform(warp_number()) < spec.num_warps - 1:
            meet(spec)
        else:
            sync_branches(ALONE, 1)
        sync_consumers(spec)
    else:
        meet(spec)


@cute.jit
def publish(spec: cutlass.Constexpr, shared: Shared, opening: Opening, pages: Int32):
    """The warp that found an opening leaves it to the other warps, and meets them."""
    leave_opening(spec, shared.opening, opening)
    shared.pages[cute.arch.lane_idx()] = pages
    meet(spec)
    if cutlass.const_expr(spec.assistants > 0):
        arrive(BESIDE, 1 + spec.assistants)


def meet_beside(spec: KernelSpec):
    """As `meet`, for warps beside the loop, which hold nobody up: one of them may still look ahead."""
    sync_branches(BESIDE, 1 + spec.assistants)


@cute.jit
def leave_opening(spec: cutlass.Constexpr, words: cute.Tensor, opening: Opening):
    """One lane writes an opening to shared memory."""
    share = opening.share
    ends = share.row, share.tile, share.prefix, share.end_row, share.end_tile
    with cute.arch.elect_one():
        row = [getattr(opening.row, name) for name in row_fields(spec)]
        for i, word in enumerate((*ends, share.step, share.longer, *row)):
            words[i] = word


def take_opening(spec: KernelSpec, problem: Problem, words: cute.Tensor) -> Opening:
    """The opening that leave_opening wrote."""
    unit, index, units, _ = locate(spec, problem.rows)
    fields = row_fields(spec)
    found = [cute.arch.make_warp_uniform(words[i]) for i in range(SHARE_WORDS + len(fields))]
    row = Row(**dict(zip(fields, found[SHARE_WORDS:], strict=True)))
    if spec.one_request:
        found[0] = Int32(0)  # a constant, not its word
    return Opening(Share(unit, index, *found[:SHARE_WORDS], units), row)


def read_opening(spec: KernelSpec, problem: Problem, shared: Shared) -> tuple[Opening, Int32]:
    """(opening, pages) that `publish` left, for a warp that has met the others."""
    return take_opening(spec, problem, shared.opening), shared.pages[cute.arch.lane_idx()]


def hear_share(spec: KernelSpec, problem: Problem, shared: Shared) -> Opening:
    """The opening as it seemed to be before the wait, for the warp that looks ahead."""
    sync_branches(SEEN, 2)
    return take_opening(spec, problem, shared.seen)
