"""Slices of a batch, and how equal rows are cut: into equal parts, or not at all.

Where rows are as long as each other, and each is cut into as many parts, each part costs an opening, so rows do not. Then they
cost their tiles, and what these lack to make parts of one size: so no part lies in two rows, whose second opening takes as long
as several tiles. CTAs that are left over for that stay without work, unless two openings in some CTAs cost less. Where a unit has
two KV heads, a slice may also take a few whole rows.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KEPT_REQUESTS, KernelSpec
from ..ptx.registers import quick_quotient, quotient

MOST_EVEN = 2**20  # tiles of a batch past which it does not pay to leave slices without work
# cost of a row of so few that a warp keeps the cost of each: its product with their number
MOST_ALIKE = 2**30 // KEPT_REQUESTS[-1]


@dataclass(frozen=True)
class LaneRows:
    """What a warp reads of rows [begin, stop): `span` rows per lane, of which lane 0 has the first.

    first: this lane's first row. words: for each field of a Row (kv/source.py), its values in the lane's last rows; costs: the
    costs of these rows; Int32 [spec.lane_requests] each. A row that the lane lacks costs 0. total: the cost of all the lane's
    rows, capped; dealt: the dealt_cost of them all, capped, or -1 if that of any row is.
    """

    first: Int32
    words: tuple
    costs: cute.Tensor
    total: Int32
    dealt: Int32


def slices_of(spec: KernelSpec, cost: Int32, most: Int32) -> Int32:
    """Slices of a batch of this cost, up to `most`."""
    return cutlass.max(cutlass.min(quotient(cost, spec.min_share), most), 1)


def equal_parts(spec: KernelSpec, longest: tuple, cost: Int32, batch: Int32, most: Int32) -> tuple[Int32, Int32]:
    """(what a row costs beyond its tiles, most slices): as many for each row, if rows are cut into equal parts.

    So are rows of one length, if parts of one piece each make up for the slices that are left without work. A row then costs what
    its tiles lack to make parts of one size. longest: longest_of the batch. cost: of the batch, with spec.piece_cost for each
    row. most: as in slices_of. The answer does not depend on how a warp has read the rows, only on what it has read. All CTAs
    wait for it, and execute it once: so there is no division, and no branch, around which ptxas spills registers.
    """
    top, alike = longest
    if spec.one_request:
        return cutlass.select_(alike, Int32(0), Int32(spec.piece_cost)), most
    several, tiles = batch > 1, cost - spec.piece_cost * batch
    parts, row = quick_quotient(most, batch), top - spec.piece_cost
    even = parts * batch
    sooner, part = parts_pay(spec, parts, row, tiles, most)
    fit = ((even == most) | sooner) & (even > 0) & (slices_of(spec, tiles, even) == even)
    equal = alike & ((several == Boolean(False)) | fit)
    padding = cutlass.select_(several & sooner, part * parts - row, 0)
    return cutlass.select_(equal, padding, Int32(spec.piece_cost)), cutlass.select_(equal, even, most)


def longest_of(spec: KernelSpec, lanes: LaneRows, cost: Int32, batch: Int32) -> tuple[Int32, Boolean]:
    """(the cost of the longest row, whether it is that of all rows). cost: of the batch."""
    top = lanes.costs[0]
    for j in range(1, spec.lane_requests):
        top = cutlass.max(top, lanes.costs[j])
    if not spec.one_request:
        top = cute.arch.warp_redux_sync(top, "max")
    return top, (top * batch == cost) & (top > spec.piece_cost) & (top < MOST_ALIKE) & (batch <= spec.kept_requests)


def whole_rows(spec: KernelSpec, longest: tuple, cost: Int32, batch: Int32, most: Int32, otherwise: tuple) -> tuple:
    """(what a row costs beyond its tiles, most slices, tiles of a slice) if each slice takes a few whole rows of one length.

    So it does if there are more rows than slices, unless what the last slices lack costs more than to cut rows. Otherwise the
    first two are `otherwise`, and the third is 0. longest, cost, most: as in equal_parts. Only where a unit has two KV heads,
    whose 33 slices on 132 SMs would cut 64 rows; those of one head are 16.
    """
    (top, alike), (opening, slices) = longest, otherwise
    rows, row = quotient(batch + most - 1, most), top - spec.piece_cost
    pays, _ = parts_pay(spec, Int32(1), rows * row, cost - spec.piece_cost * batch, most)
    whole = alike & (rows > 1) & (rows * row >= spec.min_share) & pays
    found = (Int32(0), opening), (quotient(batch + rows - 1, rows), slices), (rows * row, Int32(0))
    return tuple(cutlass.select_(whole, *pair) for pair in found)


def parts_pay(spec: KernelSpec, parts: Int32, row: Int32, tiles: Int32, slices: Int32) -> tuple[Boolean, Int32]:
    """(whether `parts` of each row, one piece each, end sooner than all `slices` of a batch, tiles of the largest part).

    row, tiles: those of a row and of the batch. The slices would open second pieces: one takes as long as spec.piece_cost tiles,
    or half as many if warps have one m-tile each, found by measurement (docs/notes/kernel-log.md). Rows that stay whole are not
    combined either.
    """
    part = quick_quotient(row + parts - 1, parts)
    halves = spec.piece_cost * (2 if spec.by_warpgroup or spec.paired else 1)
    opening = halves * cutlass.select_(parts == 1, Int32(2), Int32(1))
    return (tiles <= MOST_EVEN) & (2 * (part * slices - tiles) <= opening * slices), part


def with_opening(spec: KernelSpec, lanes: LaneRows, opening: Int32) -> LaneRows:
    """The rows with another cost beyond their tiles than spec.piece_cost, or the same; another one if a warp holds all costs."""
    costs, total, less = cute.make_rmem_tensor(spec.lane_requests, Int32), Int32(0), spec.piece_cost - opening
    for j in range(spec.lane_requests):
        costs[j] = cutlass.select_(lanes.costs[j] > 0, lanes.costs[j] - less, 0)
        total = total + costs[j]
    return replace(lanes, costs=costs, total=cutlass.select_(less == 0, lanes.total, total))
