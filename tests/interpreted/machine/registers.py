"""The registers of a CTA, of which warps hand some to other warps (setmaxnreg): how many a lane of each warp has."""

from __future__ import annotations

LANE_REGISTERS = 2048  # of an SM, for one lane of each warp
UNIT = 8  # registers that a lane gets at a time


class RegisterFault(Exception):
    """Warps need registers that the CTA does not have, where the machine would do anything."""


class Registers:
    """Every warp begins with an equal share, as if nothing but the registers limited the compiler."""

    def __init__(self, warps: int) -> None:
        share = min(LANE_REGISTERS // warps // UNIT * UNIT, 255)
        self.counts = [share] * warps

    def hand_over(self, warp: int, count: int) -> None:
        """setmaxnreg.dec: leaves `count` registers to a lane of a warp."""
        if count > self.counts[warp]:
            raise RegisterFault(f"warp {warp} hands over what leaves it {count} of {self.counts[warp]} registers a lane")
        self.counts[warp] = count

    def take(self, warp: int, count: int) -> None:
        """setmaxnreg.inc: gives a lane of a warp `count` registers, once others have handed theirs over.

        The assembler lets no warp begin with more than that.
        """
        self.counts[warp] = count

    def check(self) -> None:
        """Raises RegisterFault if all warps together have more than there are: some would have waited for ever."""
        if sum(self.counts) > LANE_REGISTERS:
            raise RegisterFault(f"{sum(self.counts)} registers for a lane of each warp exceed {LANE_REGISTERS}: {self.counts}")
