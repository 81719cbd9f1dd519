"""A warp's number in its CTA, which decides what the warp does: the same in all lanes, and known to be."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import cutlass.cute as cute
from cutlass import Int32

_number: ContextVar[Int32 | None] = ContextVar("the warp's number in the code that is being traced", default=None)


def warp_number() -> Int32:
    """The number of this warp. It may shuffle: all lanes take part."""
    found = _number.get()
    return cute.arch.warp_idx() if found is None else found


@contextmanager
def numbered_anew() -> Iterator[None]:
    """What is traced within has a number of its own, found by REDUX, not the one that all of the kernel has.

    In a kernel of several phases ptxas keeps the latter in local memory. To ptxas a number from there may differ between lanes,
    and so may all that follows from it: the loop over tiles then takes up to 72 moves to uniform registers (read from SASS).
    """
    token = _number.set(cute.arch.warp_redux_sync(warp_number(), "max"))
    try:
        yield
    finally:
        _number.reset(token)
