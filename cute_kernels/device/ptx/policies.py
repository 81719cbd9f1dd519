"""L2 policies of single accesses: what createpolicy.fractional.L2 makes for all of an access, as sm_90 encodes it."""

EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000
