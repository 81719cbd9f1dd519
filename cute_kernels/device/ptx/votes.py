"""Reductions over all threads of a CTA, through one word of shared memory per warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .warps import warp_number


@cute.jit
def least_of_all(warps: cutlass.Constexpr, votes: cute.Tensor, value: Int32) -> Int32:
    """The smallest value of all threads of a CTA of `warps` warps, returned to each. votes: Int32 [warps]. A barrier."""
    least, warp = cute.arch.warp_redux_sync(value, "min"), warp_number()  # a shuffle: all lanes take part
    if cute.arch.lane_idx() == 0:
        votes[warp] = least
    cute.arch.sync_threads()
    for other in cutlass.range_constexpr(warps):
        least = cutlass.min(least, votes[other])
    cute.arch.sync_threads()
    return least
