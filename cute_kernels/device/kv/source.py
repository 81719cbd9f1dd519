"""Where the KV tokens of a row are: the length of the row, and the page that holds a token.

A source is dense (a table row), CSR (a slice of the indices), contiguous (one page per row: the whole page, or a length per row),
or packed (all rows end to end in one page). The page of a token that no query row sees is `num_pages`, one past the last page:
TMA fills such a box with zeros, and no table entry is read for it. Page ids and lengths come from the device and are not
trusted: memory that an out-of-range value names is never read, and the value is reported.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...config.decode import KernelSpec
from ..attend.query_rows import KvRange, Queries, Row, inspect_queries, open_queries
from ..ptx.registers import LANES
from .status import INDPTR_FAULT, LENGTH_FAULT, PAGE_FAULT, report
from .unsettled import Unsettled

LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """The tensors that say which keys and query rows each request has.

    tables: the page table's tensors. k [pages, num_kv_heads, page_size, head_dim], contiguous [batch, num_kv_heads, seq_len,
    head_dim], packed [1, num_kv_heads, total_k, head_dim]: for its extents only. queries: None in a plain kernel.
    """

    tables: tuple
    k: cute.Tensor
    queries: Queries | None = None

    @property
    def num_pages(self) -> Int32:
        """Pages of the cache."""
        return Int32(self.k.shape[0])

    def unsettled(self) -> "Rows":
        """These Rows for reads while previous kernels still run."""
        queries = self.queries
        if queries is not None and queries.indptr is not None:
            queries = replace(queries, indptr=Unsettled(queries.indptr))
        return Rows(tuple(Unsettled(table) for table in self.tables), self.k, queries)


def bounded(pages: Int32, page_size: int) -> Int32:
    """Tokens of `pages` pages, at most LONGEST."""
    return Int32(cutlass.min(Int64(pages) * page_size, Int64(LONGEST)))


@cute.jit
def row_length(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, row: Int32) -> Int32:
    """Tokens of a row: a negative length or a bad indptr counts as 0, a length past the row's room as that room."""
    if cutlass.const_expr(spec.table_format == "dense"):
        table, seq_lens = tables
        return cutlass.max(0, cutlass.min(seq_lens[row], bounded(Int32(table.shape[1]), spec.page_size)))
    if cutlass.const_expr(spec.table_format == "csr"):
        indices, indptr, last_page_len = tables
        start, stop = indptr[row], indptr[row + 1]
        pages = stop - start
        full = bounded(pages - 1, spec.page_size)
        length = cutlass.max(0, full + cutlass.min(last_page_len[row], spec.page_size))
        if start < 0 or stop > Int32(indices.shape[0]) or stop <= start:  # not by `pages`, which may have wrapped
            length = Int32(0)
        return length
    if cutlass.const_expr(spec.table_format == "lengths"):
        return cutlass.max(0, cutlass.min(tables[0][row], Int32(k.shape[2])))
    if cutlass.const_expr(spec.table_format == "packed"):
        start, stop = tables[0][row], tables[0][row + 1]
        length = stop - start
        if start < 0 or stop > Int32(k.shape[2]) or stop < start:
            length = Int32(0)
        return length
    return Int32(k.shape[2])


@cute.jit
def find_tokens(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, row: Int32) -> tuple[Int32, Int32]:
    """(start, length) of a row; start is the row's index, its first entry of the CSR indices, or its first packed token."""
    length, start = row_length(spec, tables, k, row), row
    if cutlass.const_expr(spec.table_format == "csr"):
        start = tables[1][row]
    if cutlass.const_expr(spec.table_format == "packed"):
        start = tables[0][row]
    return start, length


def open_row(spec: KernelSpec, rows: Rows, row: Int32) -> Row:
    """Reads a row: its keys and its query rows."""
    return Row(*find_tokens(spec, rows.tables, rows.k, row), *open_queries(spec, rows.queries, row))


@cute.jit
def open_row_or_nothing(spec: cutlass.Constexpr, rows: Rows, row: Int32, batch: Int32) -> Row:
    """open_lane_row of a row that a warp's lanes share."""
    return uniform_row(open_lane_row(spec, rows, row, batch))


@cute.jit
def open_lane_row(spec: cutlass.Constexpr, rows: Rows, row: Int32, batch: Int32) -> Row:
    """open_row, or an empty row past the batch."""
    found = empty_row(spec)
    if row < batch:
        found = open_row(spec, rows, row)
    return found


def empty_row(spec: KernelSpec) -> Row:
    """A row without keys and query rows."""
    return Row(Int32(0), Int32(0), *(None if name not in row_fields(spec) else Int32(0) for name in ("query", "queries")))


def row_fields(spec: KernelSpec) -> tuple[str, ...]:
    """The fields of a Row that are not None."""
    return {"one": ("start", "length"), "uniform": ("start", "length", "queries")}.get(
        spec.query, ("start", "length", "query", "queries")
    )


def uniform_row(row: Row) -> Row:
    """`row`, marked for the compiler as equal in all lanes of a warp."""
    return Row(*(None if word is None else cute.arch.make_warp_uniform(word) for word in vars(row).values()))


def page_of(spec: KernelSpec, tables: tuple, start: Int32, token: Int32) -> Int32:
    """The page that a row's table names for a token, unchecked. All rows of a packed source lie in page 0."""
    if spec.table_format == "dense":
        return tables[0][start, token // spec.page_size]
    if spec.table_format == "csr":
        return tables[0][start + token // spec.page_size]
    return Int32(0) if spec.table_format == "packed" else start


def is_seen(keys: KvRange, token: Int32, tokens: int) -> Boolean:
    """Whether the range `keys` reaches into the `tokens` neighbouring tokens that begin at `token`."""
    seen = token < keys.end
    return seen if keys.begin is None else seen & (token + tokens > keys.begin)


@cute.jit
def find_page(
    spec: cutlass.Constexpr, tables: tuple, start: Int32, keys: KvRange, token: Int32, tokens: cutlass.Constexpr, num_pages: Int32
) -> Int32:
    """The page that holds the `tokens` tokens of a row from `token` on, or num_pages if no query row sees any of them."""
    page = num_pages
    if is_seen(keys, token, tokens):
        page = page_of(spec, tables, start, token)
    return page


def box_pages(spec: KernelSpec, rows: Rows, start: Int32, keys: KvRange, tile: Int32) -> Int32:
    """Lane l holds the page of box l from tile `tile` on, of the row opened at `start`: 32 boxes."""
    return find_page(spec, rows.tables, start, keys, token_of_lane(spec, tile), spec.box_rows, rows.num_pages)


def token_of_lane(spec: KernelSpec, tile: Int32) -> Int32:
    """Lane l holds the first token of box l from tile `tile` on."""
    return tile * spec.tile_n + cute.arch.lane_idx() * spec.box_rows


def slot_start(spec: KernelSpec, row: Row) -> Int32 | int:
    """The slot in its page at which a contiguous row begins."""
    return row.start if spec.table_format == "packed" else 0


@cute.jit
def find_holes(
    token: Int32, keys: KvRange, tokens: cutlass.Constexpr, page: Int32, num_pages: Int32, row: Int32, status: Int64
) -> Int32:
    """Bit l: the page that lane l looked up, for `tokens` tokens from `token` on, is not in the pool. Reports such a page."""
    hole = is_seen(keys, token, tokens) and (page < 0 or page >= num_pages)
    holes = cute.arch.vote_ballot_sync(hole)
    if hole:
        report(status, row, PAGE_FAULT, page)
    return holes


@cute.jit
def inspect_row(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor | None, row: Int32, status: Int64):
    """Reports a length or an indptr that row_length had to correct. k: the cache, if it is contiguous."""
    if cutlass.const_expr(spec.table_format == "dense"):
        length = tables[1][row]
        if length < 0 or length > bounded(Int32(tables[0].shape[1]), spec.page_size):
            report(status, row, LENGTH_FAULT, length)
    if cutlass.const_expr(spec.table_format == "csr"):
        indices, indptr, last_page_len = tables
        start, stop, last = indptr[row], indptr[row + 1], last_page_len[row]
        length = (Int64(stop) - start - 1) * spec.page_size + last
        if start < 0 or stop < start or stop > Int32(indices.shape[0]):
            report(status, row, INDPTR_FAULT, start)
        elif stop > start and (last < 0 or last > spec.page_size):
            shown = Int32(cutlass.min(length, Int64(LONGEST)))
            report(status, row, LENGTH_FAULT, cutlass.select_((last < 0) & (length >= 0), last, shown))
    if cutlass.const_expr(spec.table_format == "lengths"):
        length = tables[0][row]
        if length < 0 or length > Int32(k.shape[2]):
            report(status, row, LENGTH_FAULT, length)
    if cutlass.const_expr(spec.table_format == "packed"):
        start, stop = tables[0][row], tables[0][row + 1]
        if start < 0 or stop < start or stop > Int32(k.shape[2]):
            report(status, row, INDPTR_FAULT, start)


@cute.jit
def inspect_requests(spec: cutlass.Constexpr, rows: Rows, batch: Int32, status: Int64):
    """inspect_request for all requests: one warp of each CTA takes its part of the batch."""
    first = cute.arch.block_idx()[0] * LANES + cute.arch.lane_idx()
    for row in cutlass.range(first, batch, cute.arch.grid_dim()[0] * LANES, unroll=1):
        inspect_request(spec, rows, row, status)


@cute.jit
def inspect_request(spec: cutlass.Constexpr, rows: Rows, row: Int32, status: Int64):
    """Reports the metadata of a request that open_row had to correct."""
    inspect_row(spec, rows.tables, rows.k, row, status)
    if cutlass.const_expr(not spec.plain):
        inspect_queries(spec, rows.queries, row, status)
