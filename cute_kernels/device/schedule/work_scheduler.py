"""A balanced schedule without a planning step: each CTA derives its share of all work from the rows' lengths.

A unit is one or two KV heads and an m-tile. CTA i works for unit i % units, so CTAs that read the same pages are neighbours, and
on slice i // units of the batch: rows laid end to end cost their KV tiles plus spec.piece_cost each, and the slices cut that line
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

from ...config.decode import MAX_BLOCKS, MIN_BLOCK, MIN_TILES, TILE_M, KernelSpec
from ..kv.source import open_row
from ..ptx.registers import LANES, lane_sum, quotient, remainder

MOST_COST, HALF = 2**30 - 1, 16  # HALF: bits that a sum over a warp takes at a time
FAN = 4  # rows a lane reads at a time, and keeps apart where it has no more


@dataclass(frozen=True)
class Share:
    """One CTA's share, slice `index`: unit `unit` of the rows from (row, tile) to (end_row, end_tile), exclusive.

    prefix: cost of the rows before `row`; step, longer: of all slices (cut_of); units: of the grid.
    """

    unit: Int32
    index: Int32
    row: Int32
    tile: Int32
    prefix: Int32
    end_row: Int32
    end_tile: Int32
    step: Int32
    longer: Int32
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
    """(first KV head, first query head, query heads) of a unit."""
    kv_head, m_tile = quotient(unit, spec.m_tiles) * spec.unit_heads, remainder(unit, spec.m_tiles)
    return kv_head, kv_head * spec.group_size + m_tile * TILE_M, cutlass.min(spec.unit_rows - m_tile * TILE_M, TILE_M)


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


def warp_sum(value: Int32) -> Int32:
    """The sum over the lanes of a warp, capped: known earlier than the last prefix sum."""
    low, high = lane_sum(value & (2**HALF - 1)), lane_sum(value >> HALF)
    high += low >> HALF
    return cutlass.select_(high > MOST_COST >> HALF, Int32(MOST_COST), (high << HALF) + (low & (2**HALF - 1)))


def capped(cost: Int32) -> Int32:
    """Keeps sums of costs from wrapping, whatever lengths the caller's memory holds: what lies past MOST_COST is one slice."""
    return cutlass.min(cost, MOST_COST)


@dataclass(frozen=True)
class LaneRows:
    """What a warp reads of rows [begin, stop), `span` a lane, lane 0 the first ones.

    first: this lane's first row. starts, lengths, costs: of its last FAN rows, Int32 [FAN] each, as open_row has them; a row
    that it lacks costs 0. total: the cost of all its rows, capped.
    """

    first: Int32
    starts: cute.Tensor
    lengths: cute.Tensor
    costs: cute.Tensor
    total: Int32


@cute.jit
def read_rows(
    spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, begin: Int32, stop: Int32, span: Int32, many: cutlass.Constexpr
) -> LaneRows:
    """Reads the rows [begin, stop), `span` a lane. many: whether that may be more than FAN."""
    first, total = begin + cute.arch.lane_idx() * span, Int32(0)
    starts, lengths, costs = (cute.make_rmem_tensor(FAN, Int32) for _ in range(3))
    for values in (starts, lengths, costs):
        values.fill(0)
    for group in cutlass.range(0, span if cutlass.const_expr(many) else FAN, FAN, unroll=1):
        for j in cutlass.range_constexpr(FAN):
            row = cutlass.min(first + group + j, stop - 1)  # no branch: loads go out together
            starts[j], lengths[j] = open_row(spec, tables, k, row)
            held = (group + j < span) & (first + group + j < stop)
            costs[j] = cutlass.select_(held, tiles_of(spec, lengths[j]) + spec.piece_cost, 0)
            total = capped(total + costs[j])
    return LaneRows(first, starts, lengths, costs, total)


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
def from_holder(cut: Int32, inclusive: Int32, *values: Int32) -> tuple:
    """Values of the lane whose rows hold `cut`. inclusive: the cost of the rows up to each lane's last one."""
    lane = cutlass.min(cute.arch.popc(cute.arch.vote_ballot_sync(inclusive <= cut)), LANES - 1)
    return tuple(cute.arch.shuffle_sync(value, lane) for value in values)


@cute.jit
def find_cuts(
    spec: cutlass.Constexpr,
    tables: tuple,
    k: cute.Tensor,
    batch: Int32,
    cuts: tuple,
    rows: LaneRows,
    many: cutlass.Constexpr,
):
    """The rows at the costs of two cuts, each placed. rows: of the batch; many: read_rows.

    A warp narrows the rows down by a factor of 32 at a time, for both cuts at once: their loads overlap.
    """
    (lower, upper), span = cuts, span_of(batch)
    inclusive_0 = inclusive_1 = warp_prefix(rows.total)
    before_0 = before_1 = before_lane(inclusive_0)
    first_0 = first_1 = rows.first
    costs_0, costs_1 = cute.make_rmem_tensor(FAN, Int32), cute.make_rmem_tensor(FAN, Int32)
    for j in cutlass.range_constexpr(FAN):
        costs_0[j] = costs_1[j] = rows.costs[j]
    if cutlass.const_expr(many):
        while span > FAN:
            begin_0, base_0 = from_holder(lower, inclusive_0, first_0, before_0)
            begin_1, base_1 = from_holder(upper, inclusive_1, first_1, before_1)
            stop_0, stop_1 = cutlass.min(begin_0 + span, batch), cutlass.min(begin_1 + span, batch)
            span = quotient(span + LANES - 1, LANES)
            rows_0 = read_rows(spec, tables, k, begin_0, stop_0, span, True)
            rows_1 = read_rows(spec, tables, k, begin_1, stop_1, span, True)
            first_0, first_1 = rows_0.first, rows_1.first
            inclusive_0, inclusive_1 = warp_prefix(rows_0.total), warp_prefix(rows_1.total)
            before_0, before_1 = capped(base_0 + before_lane(inclusive_0)), capped(base_1 + before_lane(inclusive_1))
            inclusive_0, inclusive_1 = capped(base_0 + inclusive_0), capped(base_1 + inclusive_1)
            for j in cutlass.range_constexpr(FAN):
                costs_0[j], costs_1[j] = rows_0.costs[j], rows_1.costs[j]
    lower_row = place(spec, lower, *pick(lower, first_0, before_0, costs_0))
    upper_row = place(spec, upper, *pick(upper, first_1, before_1, costs_1))
    return *from_holder(lower, inclusive_0, *lower_row), *from_holder(upper, inclusive_1, *upper_row)


def before_lane(inclusive: Int32) -> Int32:
    """The cost of the rows before this lane's: inclusive of the lane below."""
    below = cute.arch.shuffle_sync_up(inclusive, offset=1)
    return cutlass.select_(cute.arch.lane_idx() > 0, below, 0)


def locate(spec: KernelSpec, k: cute.Tensor) -> tuple[Int32, Int32, Int32, Int32]:
    """(unit, slice, units, slices that the grid has room for) of this CTA: what does not depend on lengths."""
    units, cta = quotient(Int32(k.shape[1]), spec.unit_heads) * spec.m_tiles, cute.arch.block_idx()[0]
    return remainder(cta, units), quotient(cta, units), units, quotient(cute.arch.grid_dim()[0], units)


def span_of(batch: Int32) -> Int32:
    """Rows a lane of a warp that takes all of a batch: a power of two up to FAN."""
    span = quotient(batch + LANES - 1, LANES)
    return cutlass.select_(span == 3, 4, span)


def take_share(spec: KernelSpec, tables: tuple, k: cute.Tensor, batch: Int32) -> Share:
    """This CTA's share, found by a warp. A CTA beyond the last slice gets an empty one."""
    rows = read_rows(spec, tables, k, Int32(0), batch, span_of(batch), True)
    return share_of(spec, tables, k, batch, rows, True)


@cute.jit
def share_of(
    spec: cutlass.Constexpr,
    tables: tuple,
    k: cute.Tensor,
    batch: Int32,
    rows: LaneRows,
    many: cutlass.Constexpr,
) -> Share:
    """take_share of rows that the warp has read. many: read_rows."""
    unit, index, units, most = locate(spec, k)
    cost = warp_sum(rows.total)
    slices = cutlass.max(cutlass.min(quotient(cost, spec.min_share), most), 1)
    step = quotient(cost, slices)
    longer = cost - step * slices
    row, tile, prefix, end_row, end_tile = batch, Int32(0), cost, batch, Int32(0)
    if index < slices:
        lower, upper = cut_of(step, longer, index), cut_of(step, longer, index + 1)
        row, tile, prefix, end_row, end_tile, _ = find_cuts(spec, tables, k, batch, (lower, upper), rows, many)
        if index + 1 == slices:
            end_row, end_tile = batch, Int32(0)
    uniform = cute.arch.make_warp_uniform
    ends = uniform(row), uniform(tile), uniform(prefix), uniform(end_row), uniform(end_tile)
    return Share(unit, index, *ends, uniform(step), uniform(longer), units)


def cut_of(step: Int32, longer: Int32, index: Int32) -> Int32:
    """Where slice `index` begins: slices cost `step`, the first `longer` of them one more."""
    return index * step + cutlass.min(index, longer)


def first_cut_from(step: Int32, longer: Int32, position: Int32) -> Int32:
    """The least index whose cut_of is at least `position`."""
    beyond = position - longer * (step + 1)
    before = beyond <= 0
    index = quotient(cutlass.select_(before, position, beyond - 1) + step, cutlass.select_(before, step + 1, step))
    return index + cutlass.select_(before, 0, longer)


def first_slice(spec: KernelSpec, share: Share, tiles: Int32) -> Int32:
    """The slice that opens the share's first row, of `tiles`, if cuts fall inside: the one before the first of those cuts."""
    nearest = block_of(tiles) if spec.partition == "invariant" else MIN_TILES
    return first_cut_from(share.step, share.longer, share.prefix + spec.piece_cost + nearest) - 1


def last_slice(spec: KernelSpec, share: Share, tiles: Int32) -> Int32:
    """The slice that ends that row, under the balanced partition: the one that begins with the last of those cuts."""
    return first_cut_from(share.step, share.longer, share.prefix + spec.piece_cost + tiles - MIN_TILES + 1) - 1
