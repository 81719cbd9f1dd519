"""A balanced schedule without a planning step: each CTA derives its share of all work from the rows' lengths.

A unit is one KV head and one m-tile. CTA i works for unit i % units, so CTAs that read the same pages are neighbours, and on
slice i // units of the batch: rows laid end to end cost their KV tiles plus spec.piece_cost each, and the slices cut that line
into equal parts. So every batch is balanced to a tile however ragged, and a captured graph stays balanced when lengths
change. A row that a cut splits leaves partial states. No slice is smaller than spec.min_share: a small batch uses fewer CTAs.

A cut falls where the line says, but never within MIN_TILES of a row's ends (partition "balanced"); or it falls back to the
start of a block, whose size depends on the row's length only, and every block is a piece of its own ("invariant"); or to the
start of the row ("whole").
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..config import MAX_BLOCKS, MIN_BLOCK, MIN_TILES, TILE_M, KernelSpec
from .kv_source import row_length
from .registers import LANES, quotient, remainder

MOST_COST = 2**30 - 1
FAN = 4  # rows a lane reads at a time, and keeps apart where it has no more


@dataclass(frozen=True)
class Share:
    """One CTA's share, slice `index`: unit `unit` of the rows from (row, tile) to (end_row, end_tile), exclusive.

    prefix: cost of the rows before `row`; cost: of the batch; slices: how many take part; units: of the grid.
    """

    unit: Int32
    index: Int32
    row: Int32
    tile: Int32
    prefix: Int32
    end_row: Int32
    end_tile: Int32
    cost: Int32
    slices: Int32
    units: Int32


@dataclass(frozen=True)
class Piece:
    """KV tiles [first, stop) of one row, for one unit. issued: tiles of the share before it; head: its first query head.

    start: the row as a KV source opened it; heads: rows of the m-tile that hold a query head; tiles: of the whole row;
    end: where the share leaves the row.
    """

    row: Int32
    start: Int32
    length: Int32
    kv_head: Int32
    head: Int32
    heads: Int32
    first: Int32
    stop: Int32
    end: Int32
    tiles: Int32
    issued: Int32


def tiles_of(spec: KernelSpec, length: Int32) -> Int32:
    """KV tiles of a row."""
    return quotient(length + spec.tile_n - 1, spec.tile_n)


def block_of(tiles: Int32) -> Int32:
    """Tiles of a block of a row under the invariant partition: at most MAX_BLOCKS blocks."""
    return cutlass.max(quotient(tiles + MAX_BLOCKS - 1, MAX_BLOCKS), MIN_BLOCK)


def heads_of(spec: KernelSpec, unit: Int32) -> tuple[Int32, Int32, Int32]:
    """(KV head, first query head, query heads) of a unit."""
    kv_head, m_tile = quotient(unit, spec.m_tiles), remainder(unit, spec.m_tiles)
    return kv_head, kv_head * spec.group_size + m_tile * TILE_M, cutlass.min(spec.group_size - m_tile * TILE_M, TILE_M)


def make_piece(spec: KernelSpec, share: Share, row: Int32, start: Int32, length: Int32, first: Int32, issued: Int32) -> Piece:
    """The piece of the share that begins at tile `first` of an opened row."""
    kv_head, head, heads = heads_of(spec, share.unit)
    tiles = tiles_of(spec, length)
    end = cutlass.select_(row == share.end_row, share.end_tile, tiles)
    stop = cutlass.min(first + block_of(tiles), end) if spec.partition == "invariant" else end
    return Piece(row, start, length, kv_head, head, heads, first, stop, end, tiles, issued)


def after(spec: KernelSpec, piece: Piece) -> tuple[Int32, Int32]:
    """(row, tile) at which the share goes on after a piece."""
    if spec.partition != "invariant":
        return piece.row + 1, Int32(0)
    inside = piece.stop < piece.end
    return cutlass.select_(inside, piece.row, piece.row + 1), cutlass.select_(inside, piece.stop, 0)


def unfinished(share: Share, row: Int32, tile: Int32) -> Boolean:
    """Whether (row, tile) lies before the share's end."""
    return (row < share.end_row) | ((row == share.end_row) & (tile < share.end_tile))


def inside_row(share: Share) -> Boolean:
    """Whether the share begins and ends inside one row."""
    return (share.tile > 0) & (share.end_row == share.row)


@cute.jit
def warp_prefix(value: Int32) -> Int32:
    """Inclusive prefix sum over the lanes of a warp, capped."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=2**step)
        value = capped(value + (below if lane >= 2**step else 0))
    return value


def capped(cost: Int32) -> Int32:
    """Keeps sums of costs from wrapping, whatever lengths the caller's memory holds: what lies past MOST_COST is one slice."""
    return cutlass.min(cost, MOST_COST)


@cute.jit
def lane_costs(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, begin: Int32, stop: Int32, span: Int32) -> tuple:
    """(cost of the lanes' rows up to this one's, cost of each of this lane's last FAN rows).

    A lane has `span` rows of [begin, stop), lane 0 the first ones.
    """
    first, total, costs = begin + cute.arch.lane_idx() * span, Int32(0), cute.make_rmem_tensor(FAN, Int32)
    costs.fill(0)
    for group in cutlass.range(0, span, FAN, unroll=1):
        for j in cutlass.range_constexpr(FAN):
            row = first + group + j
            tiles = tiles_of(spec, row_length(spec, tables, k, cutlass.min(row, stop - 1)))  # no branch: loads go out together
            costs[j] = cutlass.select_((group + j < span) & (row < stop), tiles + spec.piece_cost, 0)
            total = capped(total + costs[j])
    return warp_prefix(total), costs


@cute.jit
def narrow(cut: Int32, begin: Int32, stop: Int32, before: Int32, span: Int32, own: tuple):
    """The lane whose rows hold `cut`: (its first row, the row after them, cost before them, its last FAN costs).

    before: cost of the rows before `begin`. own: lane_costs of [begin, stop).
    """
    inclusive, costs = own
    lane = cutlass.min(cute.arch.popc(cute.arch.vote_ballot_sync(before + inclusive <= cut)), LANES - 1)
    below = cute.arch.shuffle_sync(inclusive, cutlass.max(lane - 1, 0))
    before += cutlass.select_(lane > 0, below, 0)
    found = cute.make_rmem_tensor(FAN, Int32)
    for j in cutlass.range_constexpr(FAN):
        found[j] = cute.arch.shuffle_sync(costs[j], lane)
    begin += lane * span
    return begin, cutlass.min(begin + span, stop), before, found


@cute.jit
def pick(cut: Int32, row: Int32, before: Int32, costs: cute.Tensor):
    """The one of at most FAN rows that holds `cut`: (row, cost of the rows before, its cost)."""
    cost = costs[0]
    for j in cutlass.range_constexpr(1, FAN):
        further = before + cost <= cut and costs[j] > 0
        row = row + 1 if further else row
        before = before + cost if further else before
        cost = costs[j] if further else cost
    return row, before, cost


@cute.jit
def place(spec: cutlass.Constexpr, cut: Int32, row: Int32, prefix: Int32, cost: Int32):
    """Where a cut inside (or at the start of) a row of `cost` falls: (row, tile, cost of the rows before)."""
    tiles, tile = cost - spec.piece_cost, cutlass.max(cut - prefix - spec.piece_cost, 0)
    if cutlass.const_expr(spec.partition == "invariant"):
        tile -= remainder(tile, block_of(tiles))
    elif cutlass.const_expr(spec.partition == "whole"):
        tile = Int32(0)
    else:
        if tile < MIN_TILES:
            tile = Int32(0)
        elif tile > tiles - MIN_TILES:
            row, tile, prefix = row + 1, Int32(0), prefix + cost
    return row, tile, prefix


@cute.jit
def find_cuts(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, batch: Int32, lower: Int32, upper: Int32, span: Int32, own):
    """The rows at costs `lower` and `upper`, each placed. own: lane_costs of the batch, `span` rows a lane.

    A warp narrows the rows down by a factor of 32 at a time, for both cuts at once: their loads overlap.
    """
    begin_0, stop_0, before_0, costs_0 = narrow(lower, Int32(0), batch, Int32(0), span, own)
    begin_1, stop_1, before_1, costs_1 = narrow(upper, Int32(0), batch, Int32(0), span, own)
    while span > FAN:
        span = quotient(span + LANES - 1, LANES)
        own_0 = lane_costs(spec, tables, k, begin_0, stop_0, span)
        own_1 = lane_costs(spec, tables, k, begin_1, stop_1, span)
        begin_0, stop_0, before_0, found_0 = narrow(lower, begin_0, stop_0, before_0, span, own_0)
        begin_1, stop_1, before_1, found_1 = narrow(upper, begin_1, stop_1, before_1, span, own_1)
        for j in cutlass.range_constexpr(FAN):
            costs_0[j], costs_1[j] = found_0[j], found_1[j]
    lower_row = place(spec, lower, *pick(lower, begin_0, before_0, costs_0))
    return *lower_row, *place(spec, upper, *pick(upper, begin_1, before_1, costs_1))


def locate(spec: KernelSpec, k: cute.Tensor) -> tuple[Int32, Int32, Int32, Int32]:
    """(unit, slice, units, slices that the grid has room for) of this CTA: what does not depend on lengths."""
    units, cta = Int32(k.shape[1]) * spec.m_tiles, cute.arch.block_idx()[0]
    return remainder(cta, units), quotient(cta, units), units, quotient(cute.arch.grid_dim()[0], units)


@cute.jit
def take_share(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, batch: Int32, located: tuple) -> Share:
    """This CTA's share, computed by each warp for itself. A CTA beyond the last slice gets an empty one."""
    unit, index, units, most = located
    span = quotient(batch + LANES - 1, LANES)
    own = lane_costs(spec, tables, k, Int32(0), batch, span)
    cost = cute.arch.shuffle_sync(own[0], LANES - 1)
    slices = cutlass.max(cutlass.min(quotient(cost, spec.min_share), most), 1)
    row, tile, prefix, end_row, end_tile = batch, Int32(0), cost, batch, Int32(0)
    if index < slices:
        lower, upper = cut_of(cost, slices, index), cut_of(cost, slices, index + 1)
        row, tile, prefix, end_row, end_tile, _ = find_cuts(spec, tables, k, batch, lower, upper, span, own)
        if index + 1 == slices:
            end_row, end_tile = batch, Int32(0)
    uniform = cute.arch.make_warp_uniform
    ends = uniform(row), uniform(tile), uniform(prefix), uniform(end_row), uniform(end_tile)
    return Share(unit, index, *ends, uniform(cost), uniform(slices), units)


def cut_of(cost: Int32, slices: Int32, index: Int32) -> Int32:
    """Where slice `index` begins: the first cost % slices slices are one longer."""
    return index * quotient(cost, slices) + cutlass.min(index, remainder(cost, slices))


@cute.jit
def first_cut_from(cost: Int32, slices: Int32, position: Int32) -> Int32:
    """The least index whose cut_of is at least `position`."""
    step, longer = quotient(cost, slices), remainder(cost, slices)
    index = quotient(position + step, step + 1)
    if position > longer * (step + 1):
        index = longer + quotient(position - longer * (step + 1) + step - 1, step)
    return index


def first_slice(spec: KernelSpec, share: Share, tiles: Int32) -> Int32:
    """The slice that opens the share's first row, of `tiles`, if cuts fall inside: the one before the first of those cuts."""
    nearest = block_of(tiles) if spec.partition == "invariant" else MIN_TILES
    return first_cut_from(share.cost, share.slices, share.prefix + spec.piece_cost + nearest) - 1


def last_slice(spec: KernelSpec, share: Share, tiles: Int32) -> Int32:
    """The slice that ends that row, under the balanced partition: the one that begins with the last of those cuts."""
    return first_cut_from(share.cost, share.slices, share.prefix + spec.piece_cost + tiles - MIN_TILES + 1) - 1
