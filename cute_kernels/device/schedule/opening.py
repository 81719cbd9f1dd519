"""How a CTA begins: one warp finds its share and opens its first row, the others take that from shared memory.

Until the kernels before this one are done, lengths and page tables may still change. But the lengths seldom do between two
launches, and finding a share takes longer than reading them: so the warp finds it at once, from lengths as they are, and
after the wait reads at the same time whether they are still the same and the pages of its first boxes.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KernelSpec
from ..attend.pack_gqa import sync_consumers
from ..kv.source import Unsettled, box_pages, open_boxes
from ..mainloop.shared import OPENING_WORDS, Shared
from ..problem import Problem
from ..ptx.barriers import ALONE, OPENED, sync_branches
from ..ptx.registers import LANES
from .work_scheduler import FAN, LaneRows, Share, locate, read_rows, share_of, span_of, take_share


@dataclass(frozen=True)
class Opening:
    """A CTA's share, and its first row as open_row_or_nothing has it."""

    share: Share
    start: Int32
    length: Int32


@cute.jit
def find_opening(spec: cutlass.Constexpr, problem: Problem) -> tuple[Opening, Int32]:
    """(this CTA's opening, box_pages of its first boxes), once the kernels before this one are done."""
    tables, k, batch = problem.tables, problem.k, Int32(problem.q.shape[0])
    few = cutlass.min(batch, LANES * FAN)  # of more rows a lane does not keep all lengths: then nothing is foreseen
    unsettled = tuple(Unsettled(table) for table in tables)
    seen = read_rows(spec, unsettled, k, Int32(0), few, span_of(few), False)
    share = share_of(spec, unsettled, k, few, seen, False)
    start, length = first_row(seen, share.row, few)
    cute.arch.griddepcontrol_wait()
    rows = read_rows(spec, tables, k, Int32(0), few, span_of(few), False)
    pages = box_pages(spec, unsettled, start, length, share.tile, Int32(k.shape[0]))  # past no end, even by an old start
    if not cute.arch.vote_all_sync((batch == few) & same_rows(seen, rows)):
        share = take_share(spec, tables, k, batch)
        start, length, pages = open_boxes(spec, tables, k, share.row, share.tile, batch)
    return Opening(share, start, length), pages


def same_rows(rows: LaneRows, others: LaneRows) -> Boolean:
    """Whether this lane has read the same twice."""
    same = Boolean(True)
    for j in range(FAN):
        same = same & (rows.starts[j] == others.starts[j]) & (rows.lengths[j] == others.lengths[j])
    return same


def first_row(rows: LaneRows, row: Int32, batch: Int32) -> tuple[Int32, Int32]:
    """open_row_or_nothing of a row that a lane of this warp has read. rows: of the batch, at most FAN a lane."""
    span = span_of(batch)  # 1, 2 or 4
    lane, place = row >> (span >> 1), row & (span - 1)
    found = []
    for values in (rows.starts, rows.lengths):
        value = values[0]
        for j in range(1, FAN):
            value = cutlass.select_(place == j, values[j], value)
        value = cute.arch.shuffle_sync(value, lane)
        found.append(cute.arch.make_warp_uniform(cutlass.select_(row < batch, value, 0)))
    return tuple(found)


def comes_late(spec: KernelSpec) -> bool:
    """Whether the last consumer warp looks ahead, which takes it longer than another to find the share."""
    return spec.token_scales > 0 and spec.num_warps > 1


def meet(spec: KernelSpec):
    """Producers and consumers, but for a late one, meet: what one of them wrote before, mbarriers too, the others see."""
    sync_branches(OPENED, spec.num_warps - comes_late(spec) + 1 + (spec.token_scales > 0))


@cute.jit
def meet_consumers(spec: cutlass.Constexpr):
    """The consumers' side: a late one, which would hold up the producers, meets the others at their own barrier."""
    if cutlass.const_expr(comes_late(spec)):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < spec.num_warps - 1:
            meet(spec)
        else:
            sync_branches(ALONE, 1)
        sync_consumers(spec)
    else:
        meet(spec)


@cute.jit
def publish(spec: cutlass.Constexpr, shared: Shared, opening: Opening, pages: Int32):
    """The warp that found an opening leaves it to the others, and meets them."""
    share = opening.share
    ends = share.row, share.tile, share.prefix, share.end_row, share.end_tile
    with cute.arch.elect_one():
        for i, word in enumerate((*ends, share.step, share.longer, opening.start, opening.length)):
            shared.opening[i] = word
    shared.pages[cute.arch.lane_idx()] = pages
    meet(spec)


def read_opening(spec: KernelSpec, problem: Problem, shared: Shared) -> tuple[Opening, Int32]:
    """What `publish` left, to a warp that has met."""
    unit, index, units, _ = locate(spec, problem.k)
    words = [cute.arch.make_warp_uniform(shared.opening[i]) for i in range(OPENING_WORDS)]
    return Opening(Share(unit, index, *words[:7], units), words[7], words[8]), shared.pages[cute.arch.lane_idx()]
