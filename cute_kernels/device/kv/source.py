"""Where the KV tokens of a row are: the length of the row, and the page that holds a token.

A source is dense (a table row), CSR (a slice of the indices) or contiguous (one page per row). The page of a token past the
row's end is `num_pages`, one past the last: TMA fills such a box with zeros, and no table entry is read for it. Page ids and
lengths come from the caller's device memory and are not trusted: what is out of range is never read, and is reported.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...config.decode import KernelSpec
from ..combine.partials import store_words

LONGEST = 2**31 - 1
PAGE_FAULT, LENGTH_FAULT, INDPTR_FAULT, SLOT_FAULT, POSITION_FAULT, SCALE_FAULT = 1, 2, 3, 4, 5, 6  # kinds in the status words


@dataclass(frozen=True)
class Unsettled:
    """A tensor of a page table that the kernel before this one may yet write to.

    Reads pass by L1, which would keep the old value. Two of them may disagree, so that what one has bounded is past the end
    for the next: an index of a 1-D tensor is clamped.
    """

    tensor: cute.Tensor

    @property
    def shape(self) -> tuple:
        """That of the tensor."""
        return self.tensor.shape

    def __getitem__(self, coord: Int32 | tuple) -> Int32:
        """The entry as it is now."""
        if not isinstance(coord, tuple):
            coord = cutlass.max(0, cutlass.min(coord, Int32(self.shape[0]) - 1))
        return cute.arch.load(self.tensor.iterator + cute.crd2idx(coord, self.tensor.layout), Int32, cop="cg")


def bounded(pages: Int32, page_size: int) -> Int32:
    """Tokens of `pages` pages, at most LONGEST."""
    return Int32(cutlass.min(Int64(pages) * page_size, Int64(LONGEST)))


@cute.jit
def row_length(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, row: Int32) -> Int32:
    """Tokens of a row: a negative length counts as empty, one past the table's capacity as the capacity.

    k [pages, num_kv_heads, page_size, head_dim], or [batch, num_kv_heads, seq_len, head_dim] when contiguous.
    """
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
    return Int32(k.shape[2])


@cute.jit
def open_row(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, row: Int32) -> tuple[Int32, Int32]:
    """(start, length) of a row; start is the row itself, or its first entry of the CSR indices."""
    length, start = row_length(spec, tables, k, row), row
    if cutlass.const_expr(spec.table_format == "csr"):
        start = tables[1][row]
    return start, length


@cute.jit
def open_row_or_nothing(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, row: Int32, batch: Int32) -> tuple[Int32, Int32]:
    """open_row, or an empty row past the batch."""
    start, length = Int32(0), Int32(0)
    if row < batch:
        start, length = open_row(spec, tables, k, row)
    return cute.arch.make_warp_uniform(start), cute.arch.make_warp_uniform(length)


@cute.jit
def find_page(spec: cutlass.Constexpr, tables: tuple, start: Int32, length: Int32, token: Int32, num_pages: Int32) -> Int32:
    """The page that holds `token` of the row opened as (start, length), or num_pages past its end."""
    page = num_pages
    if token < length:
        if cutlass.const_expr(spec.table_format == "dense"):
            page = tables[0][start, token // spec.page_size]
        elif cutlass.const_expr(spec.table_format == "csr"):
            page = tables[0][start + token // spec.page_size]
        else:
            page = start
    return page


def box_pages(spec: KernelSpec, tables: tuple, start: Int32, length: Int32, tile: Int32, num_pages: Int32) -> Int32:
    """Lane l holds the page of box l from `tile` on, of the row opened as (start, length): 32 boxes."""
    return find_page(spec, tables, start, length, token_of_lane(spec, tile), num_pages)


def open_boxes(
    spec: KernelSpec, tables: tuple, k: cute.Tensor, row: Int32, tile: Int32, batch: Int32
) -> tuple[Int32, Int32, Int32]:
    """(start, length) of open_row_or_nothing, and box_pages from `tile` on."""
    start, length = open_row_or_nothing(spec, tables, k, row, batch)
    return start, length, box_pages(spec, tables, start, length, tile, Int32(k.shape[0]))


def token_of_lane(spec: KernelSpec, tile: Int32) -> Int32:
    """The first token of box l from `tile` on, in lane l."""
    return tile * spec.tile_n + cute.arch.lane_idx() * spec.box_rows


@cute.jit
def find_holes(token: Int32, length: Int32, page: Int32, num_pages: Int32, row: Int32, status: Int64) -> Int32:
    """Bit l: the page that lane l looked up for a token of the row is not in the pool. Reports such a page."""
    hole = token < length and (page < 0 or page >= num_pages)
    holes = cute.arch.vote_ballot_sync(hole)
    if hole:
        report(status, row, PAGE_FAULT, page)
    return holes


@cute.jit
def inspect_row(spec: cutlass.Constexpr, tables: tuple, row: Int32, status: Int64):
    """Reports a length or an indptr that row_length had to correct."""
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
        elif stop > start and (length < 0 or last > spec.page_size):
            report(status, row, LENGTH_FAULT, Int32(cutlass.min(length, Int64(LONGEST))))


@cute.jit
def report(status: Int64, row: Int32, kind: cutlass.Constexpr, value: Int32):
    """Writes a plan's status words, 4 int32 at the address `status`: kind, row, value, 0."""
    store_words(status, Int32(kind), row, value, Int32(0))
