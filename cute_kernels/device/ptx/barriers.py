"""The named barriers of a CTA."""

import cutlass.cute as cute

CONSUMERS = 1  # the consumer warps meet
OPENED = 2  # the opening lies in shared memory, and the mbarriers are made (schedule/opening.py)
ALONE = 3  # of one warp: racecheck takes warps at a barrier to be ordered where they have met equally often before

PRODUCTS = 4  # and on, one of each warpgroup: it may start its products (mainloop/overlap.py)
ROWS = 8  # and on, one of each warpgroup: its query has come, or may be overwritten (kernels/long_queries.py)
BETWEEN = 12  # all warps that have work meet between the phases of a mixed kernel (kernels/mixed.py)
ATTENDING = 13  # those of them that attend


def sync_branches(barrier_id: int, warps: int):
    """Barrier of warps that come to it in different branches: "bar.sync" promises that all execute the same instruction."""
    cute.arch.inline_ptx(f"barrier.sync {barrier_id}, {32 * warps};")
