"""Which pages hold each request's tokens, and how many tokens there are."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ..errors import InvalidArgument, InvalidProblem

OPERAND_NAMES = {
    "dense": ("page_table.table", "page_table.seq_lens"),
    "csr": ("page_table.indices", "page_table.indptr", "page_table.last_page_len"),
}


class PageTable(NamedTuple):
    """A table on the device, as the operands that a kernel takes. Make one with `dense` or `csr`.

    dense: (table, seq_lens, None); csr: (indices, indptr, last_page_len). Plans check shapes, dtypes and devices.
    """

    format: Literal["dense", "csr"]
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

    @classmethod
    def dense(cls, table: torch.Tensor, seq_lens: torch.Tensor | int) -> PageTable:
        """A table int32 [batch, max_pages] with seq_lens int32 [batch]; an int stands for the same length everywhere.

        Entries beyond ceil(seq_len / page_size) of a row may hold anything.
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


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
