"""The status words of a plan, in which a kernel reports bad metadata."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..combine.partials import store_words

PAGE_FAULT, LENGTH_FAULT, INDPTR_FAULT, SLOT_FAULT, POSITION_FAULT, SCALE_FAULT = 1, 2, 3, 4, 5, 6  # kinds
QUERY_INDPTR_FAULT, QUERY_LENGTH_FAULT = 7, 8


@cute.jit
def report(status: Int64, row: Int32, kind: cutlass.Constexpr, value: Int32):
    """Writes a plan's status words, 4 int32 at the address `status`: kind, row, value, 0."""
    store_words(status, Int32(kind), row, value, Int32(0))
