"""The query rows of a request: where they are in q, and which keys they see.

The packed rows (packed GQA) of a request and a KV head are the pairs (query row, query head); the heads of a query row are
neighbours. A unit (head block) holds those packed rows, or a block of them if there may be more than spec.block_rows. If a unit
has two KV heads, its packed rows are those of both, and the query heads of a query row are still neighbours; but each KV head has
m-tiles of its own, of the rows of its own query heads.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...config.decode import KernelSpec
from ..kv.status import QUERY_INDPTR_FAULT, QUERY_LENGTH_FAULT, report
from ..ptx.registers import quotient, remainder


@dataclass(frozen=True)
class Queries:
    """How many query rows each request has, and how far they see.

    indptr: int32 [batch + 1] if query rows are ragged, else None. extent: query rows of q if ragged, else of one request.
    window_left, window_right: how many keys before and after its own position a query row sees.
    """

    indptr: cute.Tensor | None
    extent: Int32
    max_q_len: Int32
    window_left: Int32
    window_right: Int32


@dataclass(frozen=True)
class Row:
    """A request as a warp has opened it. start: its index, or where its tokens begin (kv/source.py); length: its number of keys.

    query: its first query row in q, None unless query rows are ragged; queries: how many it has, None if each request has one.
    """

    start: Int32
    length: Int32
    query: Int32 | None = None
    queries: Int32 | None = None


@dataclass(frozen=True)
class KvRange:
    """The keys [begin, end) that some query row of a unit sees, and [inner_begin, inner_end), which all of them see.

    begin, inner_begin: None where they are 0; inner_end: None where it is the end.
    """

    end: Int32
    begin: Int32 | None = None
    inner_end: Int32 | None = None
    inner_begin: Int32 | None = None


@dataclass(frozen=True)
class QueryBlock:
    """The packed rows of a unit for one request: `rows` of them, from packed row `base` of its KV head on.

    row: the request; head: the first query head; query: as in Row. base and query: None where each request has one query row.
    """

    row: Int32
    head: Int32
    rows: Int32
    query: Int32 | None = None
    base: Int32 | None = None


def open_queries(spec: KernelSpec, queries: Queries | None, row: Int32) -> tuple[Int32 | None, Int32 | None]:
    """(first query row in q, how many) of a request: 0 rows if its indptr is bad, at most max_q_len. None as in Row.

    There are also 0 rows if another phase of the kernel serves the request (spec.q_lens).
    """
    if spec.query == "one":
        return None, None
    if spec.query == "uniform":
        return None, cutlass.min(queries.extent, queries.max_q_len)
    first, stop = queries.indptr[row], queries.indptr[row + 1]
    good = (first >= 0) & (stop >= first) & (stop <= queries.extent)
    count = cutlass.min(stop - first, queries.max_q_len)
    if spec.q_lens is not None:
        good = good & (count >= spec.q_lens.least) & (count <= spec.q_lens.most)
    count = cutlass.select_(good, count, 0)
    return cutlass.select_(good, first, 0), count


def served(spec: KernelSpec, queries: Queries, row: Int32) -> Boolean:
    """Whether this phase of the kernel serves a request of ragged rows, and there is a query row to serve."""
    return open_queries(spec, queries, row)[1] > 0


@cute.jit
def inspect_queries(spec: cutlass.Constexpr, queries: Queries, row: Int32, status: Int64):
    """Reports an indptr that open_queries had to correct."""
    if cutlass.const_expr(spec.query == "ragged"):
        first, stop = queries.indptr[row], queries.indptr[row + 1]
        if first < 0 or stop < first or stop > queries.extent:
            report(status, row, QUERY_INDPTR_FAULT, first)
        elif stop - first > queries.max_q_len:
            report(status, row, QUERY_LENGTH_FAULT, stop - first)


def blocks_of(spec: KernelSpec, queries: Queries | None) -> Int32 | int:
    """Units that share a KV head."""
    if not spec.many_blocks:
        return spec.m_tiles
    return quotient(queries.max_q_len * spec.unit_rows + spec.block_rows - 1, spec.block_rows)


def block_of_unit(spec: KernelSpec, queries: Queries | None, unit: Int32) -> Int32:
    """Which block of the packed rows of its KV head a unit holds: the last blocks, which see most keys, begin first."""
    blocks = blocks_of(spec, queries)
    return blocks - 1 - remainder(unit, blocks) if spec.many_blocks else Int32(0)


def heads_of(spec: KernelSpec, queries: Queries | None, unit: Int32) -> tuple[Int32, Int32, Int32]:
    """(first KV head, first query head, query heads) of a unit; with several query rows, the heads of each row."""
    blocks = blocks_of(spec, queries)
    kv_head = quotient(unit, blocks) * spec.unit_heads
    if spec.several:
        return kv_head, kv_head * spec.group_size, Int32(spec.unit_rows)
    first = remainder(unit, blocks) * spec.unit_m
    return kv_head, kv_head * spec.group_size + first, cutlass.min(spec.unit_rows - first, spec.unit_m)


def query_block(spec: KernelSpec, queries: Queries | None, unit: Int32, heads: tuple, index: Int32, row: Row) -> QueryBlock:
    """The block that a unit holds of request `index`, opened as `row`. heads: heads_of the unit."""
    if not spec.several:
        return QueryBlock(index, heads[1], heads[2])
    return block_of_rows(spec, block_of_unit(spec, queries, unit), heads[1], index, row)


def block_of_rows(spec: KernelSpec, block: Int32, head: Int32, index: Int32, row: Row) -> QueryBlock:
    """Block `block` of the packed rows of request `index`, opened as `row`, and of a KV head whose first query head is `head`."""
    base = block * spec.block_rows
    rows = cutlass.max(cutlass.min(row.queries * spec.unit_rows - base, spec.block_rows), 0)
    return QueryBlock(index, head, rows, row.query, base)


def packed_row_of(spec: KernelSpec, row: Int32) -> Int32:
    """The packed row of a unit in row `row` of its m-tiles: those of its first KV head come first."""
    if spec.tile_heads == 1:
        return row
    head, own = quotient(row, spec.merge_rows), remainder(row, spec.merge_rows)
    return quotient(own, spec.group_size) * spec.unit_rows + head * spec.group_size + remainder(own, spec.group_size)


def row_of_head(spec: KernelSpec, packed: Int32) -> Int32:
    """The number of a packed row of a unit among those of its KV head, if each KV head has m-tiles of its own."""
    if spec.tile_heads == 1:
        return packed
    return quotient(packed, spec.unit_rows) * spec.group_size + remainder(packed, spec.group_size)


def head_of_row(spec: KernelSpec, packed: Int32) -> Int32:
    """Which of its unit's KV heads a packed row belongs to."""
    return quotient(remainder(packed, spec.unit_rows) if spec.several else packed, spec.group_size)


def query_row_of(spec: KernelSpec, block: QueryBlock, packed: Int32) -> Int32:
    """Which of its request's query rows a packed row of a block belongs to."""
    return quotient(block.base + packed, spec.unit_rows) if spec.several else Int32(0)


def place_in(spec: KernelSpec, block: QueryBlock, packed: Int32) -> tuple:
    """Where a packed row of a block is in q, out and lse: all their coordinates but the column."""
    if not spec.several:
        return block.row, block.head + packed
    query_row, head = query_row_of(spec, block, packed), block.head + remainder(block.base + packed, spec.unit_rows)
    return (block.row, query_row, head) if spec.query == "uniform" else (block.query + query_row, head)


def block_view(spec: KernelSpec, tensor: cute.Tensor, block: QueryBlock) -> cute.Tensor:
    """The view of q or out that place_in_view indexes: with one query row per request, the packed rows of the block alone."""
    return tensor if spec.several else cute.domain_offset((block.head, 0), tensor[block.row, None, None])


def place_in_view(spec: KernelSpec, block: QueryBlock, packed: Int32) -> tuple:
    """Where a packed row of a block is in its block_view: all coordinates but the column."""
    return place_in(spec, block, packed) if spec.several else (packed,)


def position_of(spec: KernelSpec, row: Row, query_row: Int32) -> Int32:
    """The position of a query row among its request's keys; it may be below 0 if the request has more query rows than keys."""
    if not spec.several:
        return row.length - 1
    return query_row if spec.modifiers.causal == "top_left" else row.length - row.queries + query_row


def first_seen(spec: KernelSpec, queries: Queries, position: Int32) -> Int32:
    """The first key that the left window lets a query row at `position` see."""
    position = cutlass.max(position, 0)
    return position - cutlass.min(queries.window_left, position)


def end_seen(spec: KernelSpec, queries: Queries, row: Row, position: Int32) -> Int32:
    """One past the last key that causality and the right window let a query row see. New tokens that a tree hides count too."""
    if spec.modifiers.causal != "none" and not spec.modifiers.tree_mask:
        return cutlass.min(position + 1, row.length)
    if spec.modifiers.window_right:
        behind = cutlass.max(row.length - 1 - position, 0)
        return cutlass.min(position + 1 + cutlass.min(queries.window_right, behind), row.length)
    return row.length


def kv_range(spec: KernelSpec, queries: Queries | None, row: Row, block: Int32 | None) -> KvRange:
    """The keys that a unit's block of the query rows of an opened request sees. block: block_of_unit, None in a plain kernel."""
    if spec.plain:
        return KvRange(row.length)
    first, last, some = Int32(0), Int32(0), Boolean(True)
    if spec.several:
        packed, count = block * spec.block_rows, row.queries * spec.unit_rows
        some = packed < count
        first = quotient(packed, spec.unit_rows)
        last = quotient(cutlass.max(cutlass.min(packed + spec.block_rows, count) - 1, 0), spec.unit_rows)
    positions = position_of(spec, row, first), position_of(spec, row, last)
    end = cutlass.max(cutlass.select_(some, end_seen(spec, queries, row, positions[1]), 0), 0)
    inner_end = end_seen(spec, queries, row, positions[0])
    if spec.modifiers.tree_mask:
        inner_end = cutlass.min(inner_end, row.length - row.queries)
    if not spec.modifiers.window_left:
        return KvRange(end, None, inner_end)
    begin = cutlass.min(first_seen(spec, queries, positions[0]), end)
    return KvRange(end, begin, inner_end, first_seen(spec, queries, positions[1]))


def first_tile(spec: KernelSpec, keys: KvRange) -> Int32 | int:
    """The KV tile in which a range begins."""
    return 0 if keys.begin is None else quotient(keys.begin, spec.tile_n)


def tiles_of(spec: KernelSpec, keys: KvRange) -> Int32:
    """KV tiles of a range."""
    tiles = quotient(keys.end + spec.tile_n - 1, spec.tile_n)
    return tiles if keys.begin is None else cutlass.max(tiles - first_tile(spec, keys), 0)


@dataclass(frozen=True)
class TilePlace:
    """A KV tile in its row. token: its first token; valid: how many from it on lie before the range's end (may exceed tile_n).

    skip: how many tokens lie before the range, None if the range begins at 0.
    """

    token: Int32
    valid: Int32
    skip: Int32 | None


def place_of_tile(spec: KernelSpec, keys: KvRange, tile: Int32) -> TilePlace:
    """Where the tile `tile` of a range is."""
    token = (first_tile(spec, keys) + tile) * spec.tile_n
    return TilePlace(token, keys.end - token, None if keys.begin is None else keys.begin - token)
