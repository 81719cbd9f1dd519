"""Where each request's tokens are, in pages or contiguous, and how many tokens there are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..config.problem import TableFormat
from ..errors import InvalidArgument, InvalidProblem

OPERAND_NAMES: dict[TableFormat, tuple[str, ...]] = {
    "dense": ("page_table.table", "page_table.seq_lens"),
    "csr": ("page_table.indices", "page_table.indptr", "page_table.last_page_len"),
    "lengths": ("page_table.seq_lens",),
    "packed": ("page_table.kv_indptr",),
    "none": (),
}
HELD = {name: tuple(place < len(names) for place in range(3)) for name, names in OPERAND_NAMES.items()}  # which are not None
PAGED: tuple[TableFormat, ...] = ("dense", "csr")  # over pages; all other formats are over contiguous caches


class PageTable(NamedTuple):
    """A table's format and its int32 tensors, as a kernel takes them. Make one with a class method.

    Over pages: "dense" holds (table, seq_lens, None), "csr" (indices, indptr, last_page_len). Over contiguous caches: "lengths"
    holds (seq_lens, None, None), "packed" (kv_indptr, None, None), and "none" three times None. Plans check shapes, dtypes and
    devices.
    """

    format: TableFormat
    operands: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    @classmethod
    def dense(cls, table: torch.Tensor, seq_lens: torch.Tensor | int) -> PageTable:
        """A table int32 [batch, max_pages] of page ids, and seq_lens int32 [batch]; an int is the length of every row.

        A row's entries from ceil(seq_len / page_size) on may hold anything. An int raises InvalidProblem outside 0 to 2**31 - 1,
        and InvalidArgument if the table is not a tensor of two axes.
        """
        if isinstance(seq_lens, torch.Tensor):
            return cls("dense", (table, seq_lens, None))
        if not isinstance(table, torch.Tensor) or table.dim() != 2:
            raise InvalidArgument("page_table.table", f"got {_describe(table)}, must be an int32 tensor [batch, max_pages]")
        if not isinstance(seq_lens, int) or isinstance(seq_lens, bool) or not 0 <= seq_lens < 2**31:
            raise InvalidProblem("page_table.seq_lens", seq_lens, "must be an int32 tensor [batch] or an int from 0 to 2**31 - 1")
        lengths = table.new_full((table.shape[0],), seq_lens, dtype=torch.int32)
        return cls("dense", (table, lengths, None))

    @classmethod
    def csr(cls, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> PageTable:
        """Row b has pages indices[indptr[b]:indptr[b + 1]], all full but the last, which holds last_page_len[b] tokens.

        indptr int32 [batch + 1], indices int32 [used pages], last_page_len int32 [batch].
        """
        return cls("csr", (indices, indptr, last_page_len))

    @classmethod
    def lengths(cls, seq_lens: torch.Tensor) -> PageTable:
        """For a contiguous cache [batch, num_kv_heads, max_len, head_dim]: row b holds seq_lens[b] tokens; int32 [batch]."""
        return cls("lengths", (seq_lens, None, None))

    @classmethod
    def packed(cls, kv_indptr: torch.Tensor) -> PageTable:
        """For a cache [total_k, num_kv_heads, head_dim]: row b is kv_indptr[b]:kv_indptr[b + 1]; int32 [batch + 1]."""
        return cls("packed", (kv_indptr, None, None))

    @classmethod
    def whole(cls) -> PageTable:
        """For a contiguous cache [batch, num_kv_heads, max_len, head_dim]: every row is full."""
        return cls("none", (None, None, None))


def is_made(page_table: PageTable) -> bool:
    """Whether a PageTable is as its class methods make it: its format is known, and it has that format's operands, no others."""
    try:
        first, second, third = page_table.operands
        return HELD.get(page_table.format) == (first is not None, second is not None, third is not None)
    except (TypeError, ValueError):  # it has not three operands, or its format has no hash
        return False


def held(page_table: PageTable, operand: int) -> torch.Tensor:
    """An operand that the table's format has. Raises InvalidArgument if that operand is None."""
    tensor = page_table.operands[operand]
    if tensor is None:
        raise InvalidArgument(
            OPERAND_NAMES[page_table.format][operand], f"is None, must be a tensor in a {page_table.format} table"
        )
    return tensor


def row_lengths(page_table: PageTable, page_size: int, like: torch.Tensor) -> torch.Tensor:
    """Tokens of each row, int64 [batch], with bad metadata masked: at most what the row's part of the table can hold.

    page_size: for a contiguous cache, the tokens that a row has room for; if packed, all tokens. like: any int64 [batch].
    """
    if page_table.format == "none":
        return torch.full_like(like, page_size)
    first = held(page_table, 0)
    if page_table.format == "lengths":
        return first.long().clamp(0, page_size)
    if page_table.format == "dense":
        return held(page_table, 1).long().clamp(0, first.shape[1] * page_size)
    indptr = first if page_table.format == "packed" else held(page_table, 1)
    entries = page_size if page_table.format == "packed" else len(first)
    begin, end = indptr[:-1].long(), indptr[1:].long()
    count = (end - begin).masked_fill(outside(begin, end, entries), 0)
    if page_table.format == "packed":
        return count
    last_page_len = held(page_table, 2)
    return ((count - 1) * page_size + last_page_len).clamp(min=0).minimum(count * page_size)


def outside(begin: torch.Tensor, end: torch.Tensor, entries: int) -> torch.Tensor:
    """bool [batch]: whether [begin, end), a row of an indptr, is not a slice of so many entries."""
    return (begin < 0) | (end < begin) | (end > entries)


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
