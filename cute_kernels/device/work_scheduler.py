"""A balanced schedule without a planning step: each CTA derives its share of all work from the rows' lengths.

A unit is one KV head and one m-tile. CTA i works for unit i % units, so CTAs that read the same pages are neighbours, and on
slice i // units of the batch: rows laid end to end cost their KV tiles plus PIECE_COST each, and the slices cut that line
into equal parts. So every batch is balanced to a tile however ragged, and a captured graph stays balanced when lengths
change. A row that a cut splits leaves partial states. A cut closer than MIN_TILES to a row's end moves there, and no slice is
smaller than min_share: a small batch uses fewer CTAs.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..config import MIN_SHARE, MIN_TILES, PIECE_COST, TILE_M, KernelSpec
from .kv_source import row_length


@dataclass(frozen=True)
class Share:
    """One CTA's share: unit `unit` of the rows from (row, tile) to (end_row, end_tile), exclusive.

    prefix: cost of the rows before `row`; cost: of the batch; slices: how many take part; units: of the grid.
    """

    unit: Int32
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

    start: the row as a KV source opened it; heads: rows of the m-tile that hold a query head; tiles: of the whole row.
    """

    row: Int32
    start: Int32
    length: Int32
    kv_head: Int32
    head: Int32
    heads: Int32
    first: Int32
    stop: Int32
    tiles: Int32
    issued: Int32


def min_share(spec: KernelSpec) -> int:
    """Tiles of the smallest slice: a piece's state grows with its rows, and reading states must not outweigh reading KV."""
    return max(MIN_SHARE, spec.packed_rows)


def tiles_of(spec: KernelSpec, length: Int32) -> Int32:
    """KV tiles of a row."""
    return (length + spec.tile_n - 1) // spec.tile_n


def make_piece(spec: KernelSpec, share: Share, row: Int32, start: Int32, length: Int32, first: Int32, issued: Int32) -> Piece:
    """The piece of the share that begins at tile `first` of an opened row."""
    kv_head, m_tile = share.unit // spec.m_tiles, share.unit % spec.m_tiles
    head = kv_head * spec.group_size + m_tile * TILE_M
    heads = cutlass.min(spec.group_size - m_tile * TILE_M, TILE_M)
    tiles = tiles_of(spec, length)
    stop = cutlass.select_(row == share.end_row, share.end_tile, tiles)
    return Piece(row, start, length, kv_head, head, heads, first, stop, tiles, issued)


def unfinished(share: Share, row: Int32, tile: Int32) -> Boolean:
    """Whether (row, tile) lies before the share's end."""
    return (row < share.end_row) | ((row == share.end_row) & (tile < share.end_tile))


@cute.jit
def warp_prefix(value: Int32) -> Int32:
    """Inclusive prefix sum over the lanes of a warp."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=2**step)
        value += below if lane >= 2**step else 0
    return value


@cute.jit
def row_cost(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, row: Int32, batch: Int32) -> Int32:
    """Cost of a row; 0 past the batch."""
    cost = Int32(0)
    if row < batch:
        cost = tiles_of(spec, row_length(spec, tables, k, row)) + PIECE_COST
    return cost


@cute.jit
def find_cut(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, batch: Int32, cut: Int32, cost: Int32, inclusive: Int32):
    """(row, tile, cost of the rows before) at cost `cut`. A warp scans 32 rows at a time, from the first 32 as given."""
    lane, row, before = cute.arch.lane_idx(), Int32(0), Int32(0)
    chunk = cute.arch.shuffle_sync(inclusive, 31)
    while before + chunk <= cut:
        before += chunk
        row += 32
        cost = row_cost(spec, tables, k, row + lane, batch)
        inclusive = warp_prefix(cost)
        chunk = cute.arch.shuffle_sync(inclusive, 31)
    found = cute.arch.popc(cute.arch.vote_ballot_sync(before + inclusive <= cut))
    cost = cute.arch.shuffle_sync(cost, found)
    prefix = before + cute.arch.shuffle_sync(inclusive, found) - cost
    row, tile = row + found, cut - prefix - PIECE_COST
    if tile > cost - PIECE_COST - MIN_TILES and tile >= MIN_TILES:
        row, tile, prefix = row + 1, Int32(0), prefix + cost
    if tile < MIN_TILES or cutlass.const_expr(not spec.split):
        tile = Int32(0)
    return row, tile, prefix


@cute.jit
def take_share(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, batch: Int32) -> Share:
    """This CTA's share, computed by each warp for itself. A CTA beyond the last slice gets an empty one."""
    lane = cute.arch.lane_idx()
    first_cost = row_cost(spec, tables, k, lane, batch)
    units = Int32(k.shape[1]) * spec.m_tiles
    unit, index = cute.arch.block_idx()[0] % units, cute.arch.block_idx()[0] // units
    most = cute.arch.grid_dim()[0] // units
    inclusive = warp_prefix(first_cost)
    cost = Int32(0)
    for row in cutlass.range(lane + 32, batch, 32):
        cost += row_cost(spec, tables, k, row, batch)
    cost = cute.arch.shuffle_sync(inclusive, 31) + cute.arch.warp_reduction_sum(cost)
    slices = cutlass.max(cutlass.min(cost // min_share(spec), most), 1)
    row, tile, prefix, end_row, end_tile = batch, Int32(0), cost, batch, Int32(0)
    if index < slices:
        row, tile, prefix = find_cut(spec, tables, k, batch, cut_of(cost, slices, index), first_cost, inclusive)
        if index + 1 < slices:
            cut = cut_of(cost, slices, index + 1)
            end_row, end_tile, _ = find_cut(spec, tables, k, batch, cut, first_cost, inclusive)
    uniform = cute.arch.make_warp_uniform
    ends = uniform(row), uniform(tile), uniform(prefix), uniform(end_row), uniform(end_tile)
    return Share(unit, *ends, uniform(cost), uniform(slices), units)


def cut_of(cost: Int32, slices: Int32, index: Int32) -> Int32:
    """Where slice `index` begins: the first cost % slices slices are one longer."""
    return index * (cost // slices) + cutlass.min(index, cost % slices)


@cute.jit
def first_cut_from(cost: Int32, slices: Int32, position: Int32) -> Int32:
    """The least index whose cut_of is at least `position`."""
    step, longer = cost // slices, cost % slices
    index = (position + step) // (step + 1)
    if position > longer * (step + 1):
        index = longer + (position - longer * (step + 1) + step - 1) // step
    return index


def contributors(schedule: cute.Tensor, tiles: Int32) -> tuple[Int32, Int32]:
    """(first slice, number of slices) of a cut row: those whose cuts fall inside it, and the one before.

    schedule: (cost of the rows before this one, cost of the batch, slices).
    """
    opening, cost, slices = schedule[0] + PIECE_COST, schedule[1], schedule[2]
    first = first_cut_from(cost, slices, opening + MIN_TILES)
    after = first_cut_from(cost, slices, opening + tiles - MIN_TILES + 1)
    return first - 1, after - first + 1
