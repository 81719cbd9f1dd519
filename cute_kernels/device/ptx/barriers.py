"""The named barriers of a CTA."""

import cutlass.cute as cute

CONSUMERS = 1  # the consumer warps meet
OPENED = 2  # the opening lies in shared memory, and the mbarriers are made (schedule/opening.py)
ALONE = 3  # for one warp alone: racecheck takes warps at a barrier as ordered only if they have met equally often before

PRODUCTS = 4  # from here on, one barrier per warpgroup: it may start its products (mainloop/overlap.py)
ROWS = 8  # from here on, one per warpgroup: its query has come, or may be overwritten (kernels/long_queries.py)
BETWEEN = 12  # all warps that have work meet between the phases of a mixed kernel (kernels/mixed.py)
ATTENDING = 13  # the attending warps among them meet once more
CREWS = 14  # the warps that widen tiles
SEEN = 15  # the share, as it seems to be, lies in shared memory for the warp that looks ahead (schedule/opening.py)
BESIDE = 0  # as OPENED, for warps beside the loop


def arrive(barrier_id: int, warps: int):
    """This warp has come to a barrier, and does not wait."""
    cute.arch.inline_ptx(f"barrier.arrive {barrier_id}, {32 * warps};")


def sync_branches(barrier_id: int, warps: int):
    """A barrier that warps may reach in different branches: "bar.sync" would promise that all execute the same instruction."""
    cute.arch.inline_ptx(f"barrier.sync {barrier_id}, {32 * warps};")
