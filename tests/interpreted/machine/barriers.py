"""Barriers of a CTA: mbarriers in its shared memory, and the named ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .numbers import LANES


class BarrierFault(Exception):
    """A barrier was used before it was made, or met by more than it waits for."""


@dataclass
class Phases:
    """An mbarrier: how many arrivals a phase takes, how many and how many bytes the current one lacks, how many are over."""

    count: int
    pending: int
    missing_bytes: int = 0
    over: int = 0

    def settle(self) -> None:
        """Ends a phase that lacks nothing."""
        if not self.pending and not self.missing_bytes:
            self.pending, self.over = self.count, self.over + 1


def active(mask: np.ndarray | None, *arrays: np.ndarray) -> Iterator[tuple[int, ...]]:
    """The values of each lane that runs."""
    for lane in range(LANES) if mask is None else np.flatnonzero(mask):
        yield tuple(int(array[lane]) for array in arrays)


class Mbarriers:
    """Those of a CTA by their addresses. changed: is called whenever one did."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.made: dict[int, Phases] = {}
        self.changed = changed

    def find(self, address: int) -> Phases:
        if address not in self.made:
            raise BarrierFault(f"no mbarrier at {address}")
        return self.made[address]

    def init(self, address: np.ndarray, count: np.ndarray, mask: np.ndarray | None) -> None:
        for where, number in active(mask, address, count):
            if where in self.made:
                raise BarrierFault(f"the mbarrier at {where} is made twice")
            self.made[where] = Phases(number, number)
        self.changed()

    def arrive(self, address: np.ndarray, count: np.ndarray, mask: np.ndarray | None) -> None:
        for where, number in active(mask, address, count):
            barrier = self.find(where)
            if barrier.pending < number:
                raise BarrierFault(f"the mbarrier at {where} waits for {barrier.pending}, and {number} arrive")
            barrier.pending -= number
            barrier.settle()
        self.changed()

    def expect(self, address: np.ndarray, nbytes: np.ndarray, mask: np.ndarray | None) -> None:
        """Arrives, and makes the phase wait for so many bytes."""
        for where, number in active(mask, address, nbytes):
            self.find(where).missing_bytes += number
        self.arrive(address, np.ones(LANES, np.int64), mask)

    def complete(self, address: int, nbytes: int) -> None:
        """Bytes have come."""
        barrier = self.find(address)
        barrier.missing_bytes -= nbytes
        if barrier.missing_bytes < 0:
            raise BarrierFault(f"more bytes came to the mbarrier at {address} than it expected")
        barrier.settle()
        self.changed()

    def test(self, address: np.ndarray, parity: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """Whether the phase of that parity is over."""
        found = np.zeros(LANES, bool)
        if mask is None and (address == address[0]).all() and (parity == parity[0]).all():
            found[:] = (self.find(int(address[0])).over & 1) != int(parity[0])
            return found
        for lane in range(LANES) if mask is None else np.flatnonzero(mask):
            found[lane] = (self.find(int(address[lane])).over & 1) != int(parity[lane])
        return found


@dataclass
class Meeting:
    """A named barrier that some have met."""

    threads: int
    arrived: int = 0
    waiting: list[Any] = field(default_factory=list)


class NamedBarriers:
    """Those of a CTA by their numbers."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.met: dict[int, Meeting] = {}
        self.changed = changed

    def meet(self, number: int, threads: int, warp: Any, waits: bool) -> None:
        """A warp arrives; where it waits it is blocked until so many threads have."""
        if not 0 <= number < 16 or threads % LANES:
            raise BarrierFault(f"barrier {number} of {threads} threads")
        meeting = self.met.setdefault(number, Meeting(threads))
        if meeting.threads != threads:
            raise BarrierFault(f"barrier {number} is met with {threads} threads, and with {meeting.threads}")
        meeting.arrived += LANES
        if waits:
            warp.blocked = f"barrier {number}"
            meeting.waiting.append(warp)
        if meeting.arrived == threads:
            for other in meeting.waiting:
                other.blocked = ""
            del self.met[number]
        self.changed()
