"""Where the KV tokens of a row are: the length of the row, and the page that holds a token.

A source is read once per CTA. `paged` follows a dense or CSR page table; `contiguous` is one page per row. The page of a
token past the row's end is `num_pages`, one past the last: TMA fills such a box with zeros and no table entry is read.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class RowSource:
    """One row of the batch: its pages and length (tokens). `entries` is None when the cache is contiguous."""

    entries: object
    row: Int32
    length: Int32
    num_pages: Int32


@cute.jit
def find_page(source: RowSource, token: Int32, page_size: cutlass.Constexpr) -> Int32:
    """The page that holds `token`, or num_pages past the row's end; the table is not read there."""
    page = source.num_pages
    if token < source.length:
        page = source.row if cutlass.const_expr(source.entries is None) else source.entries[token // page_size]
    return page


@cute.jit
def open_row(spec: cutlass.Constexpr, tables: tuple, k: cute.Tensor, row: Int32) -> RowSource:
    """Reads the row's length: negative counts as empty, and a length past the table's capacity as the capacity.

    k [pages, num_kv_heads, page_size, head_dim], or [batch, num_kv_heads, kv_len, head_dim] when contiguous.
    """
    num_pages = Int32(k.shape[0])
    if cutlass.const_expr(spec.table_format == "dense"):
        table, seq_lens = tables[0], tables[1]
        entries = table[row, None]
        capacity = Int32(table.shape[1]) * spec.page_size
        length = cutlass.max(0, cutlass.min(seq_lens[row], capacity))
        return RowSource(entries, row, length, num_pages)
    if cutlass.const_expr(spec.table_format == "csr"):
        indices, indptr, last_page_len = tables
        start = indptr[row]
        pages = indptr[row + 1] - start
        length = Int32(0)
        if pages > 0:
            length = (pages - 1) * spec.page_size + last_page_len[row]
        entries = cute.domain_offset(start, indices)
        return RowSource(entries, row, length, num_pages)
    return RowSource(None, row, Int32(k.shape[2]), num_pages)
