"""The meaning of corrupt lengths and page tables, in plain Python: the tests' reference for masking and for faults."""

from __future__ import annotations

from dataclasses import replace

import torch

import cute_kernels as ck
from tests.support.inputs import INT_MAX, Inputs

Fault = tuple[int, str, int]  # row, kind, value


def survivors(table: ck.PageTable, row: int, num_pages: int, page_size: int) -> tuple[list[int], int, set[Fault]]:
    """(pages of the pool, tokens on them, faults) of a row of a table on the CPU.

    The tokens of a page outside the pool are excluded. A negative length counts as 0, and a length past the row's entries as
    all tokens of the entries; a row whose indptr is no slice of the indices is empty.
    """
    pages, length, faults = (_dense if table.format == "dense" else _csr)(table, row, page_size)
    length = max(0, min(length, len(pages) * page_size))
    kept, tokens = [], 0
    for index, page in enumerate(pages[: -(-length // page_size)]):
        if 0 <= page < num_pages:
            kept.append(page)
            tokens += min(page_size, length - index * page_size)
        else:
            faults.add((row, "page", page))
    return kept, tokens, faults


def _dense(table: ck.PageTable, row: int, page_size: int) -> tuple[list[int], int, set[Fault]]:
    pages, length = table.operands[0][row].tolist(), int(table.operands[1][row])
    fits = 0 <= length <= len(pages) * page_size
    return pages, length, set() if fits else {(row, "length", length)}


def _csr(table: ck.PageTable, row: int, page_size: int) -> tuple[list[int], int, set[Fault]]:
    indices, indptr, last_page_len = table.operands
    start, stop, last = int(indptr[row]), int(indptr[row + 1]), int(last_page_len[row])
    if not 0 <= start <= stop <= len(indices):
        return [], 0, {(row, "indptr", start)}
    if start == stop:
        return [], 0, set()
    length = (stop - start - 1) * page_size + last
    shown = last if last < 0 <= length else min(length, INT_MAX)
    return indices[start:stop].tolist(), length, set() if 0 <= last <= page_size else {(row, "length", shown)}


def equivalent(inputs: Inputs, table: ck.PageTable, rows: list[int] | None = None) -> tuple[Inputs, set[Fault]]:
    """(well-formed inputs with the same results as `table`, every fault of it); other rows than `rows` stay as they are."""
    lengths, pages, faults = list(inputs.shape.lengths), list(inputs.rows), set()
    on_host = to_device(table, "cpu")
    for row in range(len(lengths)) if rows is None else rows:
        kept, lengths[row], found = survivors(on_host, row, inputs.k.shape[0], inputs.shape.page_size)
        pages[row] = torch.tensor(kept, dtype=torch.int32, device=inputs.q.device)
        faults |= found
    return replace(inputs, shape=replace(inputs.shape, lengths=tuple(lengths)), rows=pages), faults


def copied(table: ck.PageTable) -> ck.PageTable:
    """The same table in tensors of its own."""
    return table._replace(operands=tuple(t if t is None else t.clone() for t in table.operands))


def to_device(table: ck.PageTable, device: torch.device | str) -> ck.PageTable:
    """The same table on `device`."""
    return table._replace(operands=tuple(t if t is None else t.to(device) for t in table.operands))
