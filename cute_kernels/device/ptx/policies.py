"""What L2 is told: the policy of an access, as sm_90 encodes what createpolicy.fractional.L2 makes for all of it; prefetches."""

import cutlass.cute as cute
from cutlass import Int64

EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


def prefetch(address: Int64):
    """Starts to bring the line of an address in global memory into L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
