"""A balanced schedule without a planning step: each CTA derives its share (work partition) from the rows' lengths.

A unit (head block) is one or two KV heads and an m-tile, or a KV head and a query block. CTA i works for unit i % units, so CTAs
that read the same pages are neighbours. It works on slice i // units of the batch: each row costs its KV tiles plus
spec.piece_cost, the rows are laid end to end, and the slices cut that line into equal parts. So every batch is balanced to a
tile, however ragged, and a captured graph stays balanced when lengths change. A row that a cut splits leaves partial states. No
slice is smaller than spec.min_share: a small batch uses fewer CTAs. Where rows are as long as each other, other cuts may cost
less (equal_rows).

A cut falls where the line says, but never within MIN_TILES of a row's ends (partition "balanced"); or it falls back to the
start of a block, whose size depends on the row's length only, and every block is a piece (KV split) of its own ("invariant"); or
it falls back to the start of the row ("whole").
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import MAX_BLOCKS, MIN_BLOCK, MIN_TILES, KernelSpec
from ...config.problem import QueryLengths
from ..attend.query_rows import (
    KvRange,
    Queries,
    QueryBlock,
    Row,
    block_of_unit,
    blocks_of,
    heads_of,
    kv_range,
    open_queries,
    query_block,
    served,
    tiles_of,
)
from ..kv.source import Rows, open_row, row_fields
from ..ptx.registers import LANES, lane_sum, quotient, remainder
from .equal_rows import LaneRows, equal_parts, longest_of, slices_of, whole_rows, with_opening

MOST_COST, HALF = 2**30 - 1, 16  # HALF: bits that warp_sum adds at a time
DEALT_ROWS = 128  # packed rows of a block of long queries, as dealt_cost counts them
LEFT = 3  # of so many slices, a phase keeps one if it leaves the others to the phase that deals


@dataclass(frozen=True)
class Share:
    """One CTA's share, slice `index` for unit `unit`: rows from (row, tile) to (end_row, end_tile), exclusive.

    prefix: the cost of all before the first tile of `row`; step, longer: the slices' costs (cut_of); units: the grid's.
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
    """KV tiles [first, stop) of the tiles that one unit sees of one row. issued: the share's tiles before the piece.

    index: the row's index; row: the opened row; keys: the keys that the unit sees; block: the unit's packed rows; kv_head: its
    first KV head; tiles: how many the unit sees of the row; end: the tile at which the share leaves the row.
    """

    index: Int32
    row: Row
    keys: KvRange
    block: QueryBlock
    kv_head: Int32
    first: Int32
    stop: Int32
    end: Int32
    tiles: Int32
    issued: Int32


def block_of(tiles: Int32) -> Int32:
    """Tiles of a block of a row under the invariant partition: at most MAX_BLOCKS blocks."""
    return cutlass.max(quotient(tiles + MAX_BLOCKS - 1, MAX_BLOCKS), MIN_BLOCK)


def keys_of(spec: KernelSpec, rows: Rows, unit: Int32, row: Row) -> KvRange:
    """The keys that a unit sees of an opened row."""
    return kv_range(spec, rows.queries, row, None if spec.plain else block_of_unit(spec, rows.queries, unit))


def make_piece(spec: KernelSpec, rows: Rows, share: Share, index: Int32, row: Row, first: Int32, issued: Int32) -> Piece:
    """The piece of the share that begins at tile `first` of an opened row."""
    heads = heads_of(spec, rows.queries, share.unit)
    keys = keys_of(spec, rows, share.unit, row)
    tiles = tiles_of(spec, keys)
    end = cutlass.select_(index == share.end_row, share.end_tile, tiles)
    stop = cutlass.min(first + block_of(tiles), end) if spec.partition == "invariant" else end
    block = query_block(spec, rows.queries, share.unit, heads, index, row)
    return Piece(index, row, keys, block, heads[0], first, stop, end, tiles, issued)


def after(spec: KernelSpec, piece: Piece) -> tuple[Int32, Int32]:
    """(row, tile) at which the share goes on after a piece."""
    if spec.partition != "invariant":
        return piece.index + 1, Int32(0)
    inside = piece.stop < piece.end
    return cutlass.select_(inside, piece.index, piece.index + 1), cutlass.select_(inside, piece.stop, 0)


@cute.jit
def following(spec: cutlass.Constexpr, rows: Rows, batch: Int32, piece: Piece) -> tuple[Int32, Int32]:
    """As `after`, but past the requests that other phases of the kernel serve. A warp calls it."""
    index, tile = after(spec, piece)
    if cutlass.const_expr(spec.q_lens is not None):
        index = next_served(spec, rows, cutlass.select_(tile == 0, batch, index), index)  # inside a row it stays
    return index, tile


@cute.jit
def next_served(spec: cutlass.Constexpr, rows: Rows, batch: Int32, index: Int32) -> Int32:
    """The first request from `index` up to `batch` that this phase serves, else `batch`. A warp looks at 32 at a time."""
    searching = index < batch
    while searching:
        row, mine = index + cute.arch.lane_idx(), Boolean(False)
        if row < batch:
            mine = served(spec, rows.queries, row)
        lanes = cute.arch.vote_ballot_sync(mine)
        searching = (lanes == 0) & (index + LANES < batch)
        none = cutlass.min(index + LANES, batch)
        index = cutlass.select_(lanes == 0, none, index + cute.arch.popc((lanes & -lanes) - 1))
    return index


def unfinished(spec: KernelSpec, share: Share, row: Int32, tile: Int32) -> Boolean:
    """Whether (row, tile) lies before the share's end. Of one request `row` is a constant, so that nothing can follow row 0."""
    if spec.one_request:
        return (row == 0) & ((share.end_row > 0) | (tile < share.end_tile))
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
    """The sum over the lanes of a warp, capped. It is known earlier than the last prefix sum."""
    low, high = lane_sum(value & (2**HALF - 1)), lane_sum(value >> HALF)
    high += low >> HALF
    return cutlass.select_(high > MOST_COST >> HALF, Int32(MOST_COST), (high << HALF) + (low & (2**HALF - 1)))


def batch_sum(spec: KernelSpec, value: Int32) -> Int32:
    """The sum over a batch of what the lanes have for their requests, capped. All lanes have that of a single request."""
    return value if spec.one_request else warp_sum(value)


def capped(cost: Int32) -> Int32:
    """Keeps sums of costs from wrapping, whatever lengths the caller's memory holds: all work past MOST_COST is in one slice."""
    return cutlass.min(cost, MOST_COST)


def dealt_cost(spec: KernelSpec, rows: Rows, row: Int32, length: Int32) -> Int32:
    """What a request costs the phase that deals blocks of long queries, 0 if this phase serves it; -1 if one between them does.

    It is in tiles of this phase. For a key of a KV head, a block of DEALT_ROWS packed rows takes about as much of the GPU's time
    as a decode row does over 16 bits (docs/notes/kernel-log.md).
    """
    most = 2**15 - 1  # of each factor, as MOST_COST has it
    queries = served_as(spec, rows.queries, row, QueryLengths(spec.q_lens.dealt_from))
    packed = cutlass.min(queries, quotient(MOST_COST, spec.group_size)) * spec.group_size
    tiles = quotient(length - quotient(queries, 2) + spec.tile_n - 1, spec.tile_n)  # a causal row sees half of its own block
    cost = cutlass.min(quotient(packed + DEALT_ROWS - 1, DEALT_ROWS), most) * cutlass.min(cutlass.max(tiles, 0), most)
    if spec.q_lens.most + 1 == spec.q_lens.dealt_from:
        return cost
    between = served_as(spec, rows.queries, row, QueryLengths(spec.q_lens.most + 1, spec.q_lens.dealt_from - 1))
    return cutlass.select_(between > 0, -1, cost)


def served_as(spec: KernelSpec, queries: Queries, row: Int32, q_lens: QueryLengths) -> Int32:
    """The query rows of a request for a phase that serves `q_lens`."""
    return open_queries(replace(spec, q_lens=q_lens), queries, row)[1]


@cute.jit
def read_rows(spec: cutlass.Constexpr, rows: Rows, begin: Int32, stop: Int32, span: Int32, many: cutlass.Constexpr) -> LaneRows:
    """Reads the rows [begin, stop), `span` per lane. many: whether `span` may be more than spec.lane_requests."""
    lane = Int32(0) if cutlass.const_expr(spec.one_request) else cute.arch.lane_idx()
    first, total, dealt = begin + lane * span, Int32(0), Int32(0)
    *words, costs = (cute.make_rmem_tensor(spec.lane_requests, Int32) for _ in range(len(row_fields(spec)) + 1))
    for values in (*words, costs):
        values.fill(0)
    unit = None if cutlass.const_expr(spec.plain) else locate(spec, rows)[0]
    for group in cutlass.range(0, span if cutlass.const_expr(many) else spec.lane_requests, spec.lane_requests, unroll=1):
        for j in cutlass.range_constexpr(spec.lane_requests):
            row = cutlass.min(first + group + j, stop - 1)  # no branch: loads go out together
            opened = open_row(spec, rows, row)
            for values, name in zip(words, row_fields(spec), strict=True):
                values[j] = getattr(opened, name)
            held = (group + j < span) & (first + group + j < stop)
            if cutlass.const_expr(spec.leaves_ctas):
                cost = cutlass.select_(held, dealt_cost(spec, rows, row, opened.length), 0)
                dealt = cutlass.select_((dealt < 0) | (cost < 0), -1, capped(dealt + cost))
            if cutlass.const_expr(spec.q_lens is not None):
                held = held & (opened.queries > 0)
            costs[j] = cutlass.select_(held, tiles_of(spec, keys_of(spec, rows, unit, opened)) + spec.piece_cost, 0)
            total = capped(total + costs[j])
    return LaneRows(first, tuple(words), costs, total, dealt)


@cute.jit
def pick(spec: cutlass.Constexpr, cut: Int32, row: Int32, before: Int32, costs: cute.Tensor):
    """The row that holds `cut`, of this lane's rows from `row` on: (row, cost of the rows before it, its cost).

    Rows that a phase of a mixed kernel does not serve cost nothing, and hold no cut.
    """
    first, cost = row, costs[0]
    for j in cutlass.range_constexpr(1, spec.lane_requests):
        further = before + cost <= cut and costs[j] > 0
        passed = first + j if cutlass.const_expr(spec.q_lens is not None) else row + 1
        row = passed if further else row
        before = before + cost if further else before
        cost = costs[j] if further else cost
    return row, before, cost


@cute.jit
def place(spec: cutlass.Constexpr, opening: Int32, cut: Int32, row: Int32, prefix: Int32, cost: Int32):
    """Where a cut inside (or at the start of) a row of `cost` falls: (row, tile, cost before that row's first tile).

    opening: what a row costs beyond its tiles.
    """
    prefix += opening
    tiles, tile = cost - opening, cutlass.max(cut - prefix, 0)
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
    """Values of the lane whose rows hold `cut`. inclusive: the cost of all rows up to each lane's last row."""
    lane = cutlass.min(cute.arch.popc(cute.arch.vote_ballot_sync(inclusive <= cut)), LANES - 1)
    return tuple(cute.arch.shuffle_sync(value, lane) for value in values)


@cute.jit
def find_cuts(
    spec: cutlass.Constexpr, rows: Rows, batch: Int32, cuts: tuple, opening: Int32, lanes: LaneRows, many: cutlass.Constexpr
):
    """Where two cuts fall, for each as `place` returns it. lanes: the batch as the warp has read it; many: as in read_rows.

    A warp narrows the rows down by a factor of 32 at a time, for both cuts at once: their loads overlap.
    """
    (lower, upper), span = cuts, span_of(batch)
    if cutlass.const_expr(spec.one_request):
        ends = [place(spec, opening, cut, Int32(0), Int32(0), lanes.total) for cut in cuts]
        return *ends[0], *ends[1]
    inclusive_0 = inclusive_1 = warp_prefix(lanes.total)
    before_0 = before_1 = before_lane(inclusive_0)
    first_0 = first_1 = lanes.first
    costs_0, costs_1 = (cute.make_rmem_tensor(spec.lane_requests, Int32) for _ in range(2))
    for j in cutlass.range_constexpr(spec.lane_requests):
        costs_0[j] = costs_1[j] = lanes.costs[j]
    if cutlass.const_expr(many):
        while span > spec.lane_requests:
            begin_0, base_0 = from_holder(lower, inclusive_0, first_0, before_0)
            begin_1, base_1 = from_holder(upper, inclusive_1, first_1, before_1)
            stop_0, stop_1 = cutlass.min(begin_0 + span, batch), cutlass.min(begin_1 + span, batch)
            span = quotient(span + LANES - 1, LANES)
            lanes_0 = read_rows(spec, rows, begin_0, stop_0, span, True)
            lanes_1 = read_rows(spec, rows, begin_1, stop_1, span, True)
            first_0, first_1 = lanes_0.first, lanes_1.first
            inclusive_0, inclusive_1 = warp_prefix(lanes_0.total), warp_prefix(lanes_1.total)
            before_0, before_1 = capped(base_0 + before_lane(inclusive_0)), capped(base_1 + before_lane(inclusive_1))
            inclusive_0, inclusive_1 = capped(base_0 + inclusive_0), capped(base_1 + inclusive_1)
            for j in cutlass.range_constexpr(spec.lane_requests):
                costs_0[j], costs_1[j] = lanes_0.costs[j], lanes_1.costs[j]
    lower_row = place(spec, opening, lower, *pick(spec, lower, first_0, before_0, costs_0))
    upper_row = place(spec, opening, upper, *pick(spec, upper, first_1, before_1, costs_1))
    return *from_holder(lower, inclusive_0, *lower_row), *from_holder(upper, inclusive_1, *upper_row)


def before_lane(inclusive: Int32) -> Int32:
    """The cost of the rows before this lane's rows: the value of `inclusive` in the lane below."""
    below = cute.arch.shuffle_sync_up(inclusive, offset=1)
    return cutlass.select_(cute.arch.lane_idx() > 0, below, 0)


def locate(spec: KernelSpec, rows: Rows) -> tuple[Int32, Int32, Int32, Int32]:
    """(unit, slice, units, slices that the grid has room for) of this CTA: none depends on lengths."""
    units = quotient(Int32(rows.k.shape[1]), spec.unit_heads) * blocks_of(spec, rows.queries)
    cta = cute.arch.block_idx()[0]
    return remainder(cta, units), quotient(cta, units), units, quotient(cute.arch.grid_dim()[0], units)


def span_of(batch: Int32) -> Int32:
    """Rows per lane, if a warp takes all of a batch: 1, 2 or 4 unless the warp searches."""
    span = quotient(batch + LANES - 1, LANES)
    return cutlass.select_(span == 3, 4, span)


def take_share(spec: KernelSpec, rows: Rows, batch: Int32) -> Share:
    """This CTA's share, found by a warp. A CTA beyond the last slice gets an empty one."""
    lanes = read_rows(spec, rows, Int32(0), batch, span_of(batch), True)
    return share_of(spec, rows, batch, lanes, True)


@cute.jit
def share_of(spec: cutlass.Constexpr, rows: Rows, batch: Int32, lanes: LaneRows, many: cutlass.Constexpr) -> Share:
    """take_share, from rows that the warp has already read. many: as in read_rows."""
    unit, index, units, most = locate(spec, rows)
    cost = batch_sum(spec, lanes.total)
    if cutlass.const_expr(spec.leaves_ctas):
        most = cutlass.select_(leaves(spec, lanes, cost), quotient(most + LEFT - 1, LEFT), most)
    opening, whole = Int32(spec.piece_cost), Int32(0)
    if cutlass.const_expr(spec.partition == "balanced" and spec.q_lens is None):
        longest, every = longest_of(spec, lanes, cost, batch), most
        opening, most = equal_parts(spec, longest, cost, batch, every)
        if cutlass.const_expr(spec.tile_heads > 1):
            opening, most, whole = whole_rows(spec, longest, cost, batch, every, (opening, most))
        lanes, cost = with_opening(spec, lanes, opening), cost - (spec.piece_cost - opening) * batch
    slices = slices_of(spec, cost, most)
    step = quotient(cost, slices)
    longer = cost - step * slices
    if cutlass.const_expr(spec.tile_heads > 1):
        step, longer = cutlass.select_(whole > 0, whole, step), cutlass.select_(whole > 0, 0, longer)
    past = Int32(0) if cutlass.const_expr(spec.one_request) else batch
    row, tile, prefix, end_row, end_tile = past, Int32(0), cost, past, Int32(0)
    if cutlass.const_expr(spec.q_lens is not None):
        slices = cutlass.select_(cost > 0, slices, 0)  # this phase serves no request
    if index < slices:
        lower, upper = cut_of(step, longer, index), cut_of(step, longer, index + 1)
        row, tile, prefix, end_row, end_tile, _ = find_cuts(spec, rows, batch, (lower, upper), opening, lanes, many)
        if index + 1 == slices:
            end_row, end_tile = batch, Int32(0)
    uniform = cute.arch.make_warp_uniform
    if cutlass.const_expr(spec.one_request):
        row = Int32(0)  # no slice is so small that it would begin behind the row
    ends = uniform(row), uniform(tile), uniform(prefix), uniform(end_row), uniform(end_tile)
    return Share(unit, index, *ends, uniform(step), uniform(longer), units)


def leaves(spec: KernelSpec, lanes: LaneRows, cost: Int32) -> Boolean:
    """Whether a phase of this cost leaves most CTAs to the phase that deals: if the blocks there cost at least a third as much.

    A third of the SMs read nearly as fast as all, so that the others had better attend to long queries meanwhile.
    """
    between = cute.arch.vote_any_sync(lanes.dealt < 0)  # its shares are of all CTAs: none may come late
    return (between == Boolean(False)) & (batch_sum(spec, cutlass.max(lanes.dealt, 0)) >= quotient(cost, 3)) & (cost > 0)


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
    """The slice that opens the share's first row, of `tiles`, if cuts fall inside: the slice before the first of those cuts."""
    nearest = block_of(tiles) if spec.partition == "invariant" else MIN_TILES
    return first_cut_from(share.step, share.longer, share.prefix + nearest) - 1


def last_slice(spec: KernelSpec, share: Share, tiles: Int32) -> Int32:
    """The slice that ends the share's first row, under the balanced partition: it begins at the last cut inside the row."""
    return first_cut_from(share.step, share.longer, share.prefix + tiles - MIN_TILES + 1) - 1
