"""Where an append stores a token: in a given slot, or at the end of the token's row of a page table."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...config.append import AppendSpec
from ..attend.query_rows import KvRange
from ..kv.source import find_page, find_tokens, inspect_row
from ..kv.status import PAGE_FAULT, SLOT_FAULT, report

INT32_MAX = 2**31 - 1


def given_slot(spec: AppendSpec, tables: tuple, token: Int32) -> Int32 | Int64:
    """The slot that is given for a token; a dummy 0 if the slot comes from a page table."""
    return tables[0][token] if spec.table_format == "none" else Int32(0)


@cute.jit
def find_slot(
    spec: cutlass.Constexpr, tables: tuple, slot: Int32 | Int64, token: Int32, num_pages: Int32, speaks: Boolean, status: Int64
) -> Int32:
    """page * page_size + slot of a token; negative if the token is skipped or its slot, page or length is out of range.

    tables: (slots,), or the tensors of a page table. slot: given_slot. speaks: whether this thread reports faults. The host
    bounds slots by 2**31.
    """
    place = Int32(-1)
    if cutlass.const_expr(spec.table_format == "none"):
        if slot < num_pages * spec.page_size:
            place = Int32(cutlass.max(slot, -1))
        elif speaks:
            report(status, token, SLOT_FAULT, Int32(cutlass.min(slot, INT32_MAX)))
    else:
        start, length = find_tokens(spec, tables, None, token)
        if cutlass.const_expr(spec.table_format == "dense"):
            within = tables[1][token] == length
        else:
            within = (tables[2][token] >= 0) & (tables[2][token] <= spec.page_size)
        if length > 0 and within:
            last = length - 1
            page = find_page(spec, tables, start, KvRange(length), last, 1, num_pages)
            if page >= 0 and page < num_pages:
                place = page * spec.page_size + last % spec.page_size
            elif speaks:
                report(status, token, PAGE_FAULT, page)
        if speaks:
            inspect_row(spec, tables, None, token, status)
    return place
