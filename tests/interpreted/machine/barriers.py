"""Barriers of a CTA: mbarriers in its shared memory, and named barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .numbers import LANES


class BarrierFault(Exception):
    """A barrier was used before it was made, made twice, or met by more than it waits for."""


@dataclass
class Phases:
    """An mbarrier: the arrivals per phase, the arrivals and bytes that the current phase lacks, the phases that are over."""

    count: int
    pending: int
    missing_bytes: int = 0
    over: int = 0

    def settle(self) -> None:
        """Ends a phase that lacks nothing."""
        if not self.pending and not self.missing_bytes:
            self.pending, self.over = self.count, self.over + 1


def active(mask: np.ndarray | None, *arrays: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Yields the values of each lane that runs."""
    for lane in range(LANES) if mask is None else np.flatnonzero(mask):
        yield tuple(int(array[lane]) for array in arrays)


class Mbarriers:
    """A CTA's mbarriers by their addresses. changed: is called whenever one changed."""

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
        """Makes the phase wait for `nbytes` more bytes, then arrives."""
        for where, number in active(mask, address, nbytes):
            self.find(where).missing_bytes += number
        self.arrive(address, np.ones(LANES, np.int64), mask)

    def complete(self, address: int, nbytes: int) -> None:
        """Counts bytes that have come."""
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
    """A named barrier that some warps have met."""

    threads: int
    arrived: int = 0
    waiting: list[Any] = field(default_factory=list)


class NamedBarriers:
    """A CTA's named barriers by their numbers."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.met: dict[int, Meeting] = {}
        self.changed = changed

    def meet(self, number: int, threads: int, warp: Any, waits: bool) -> None:
        """A warp arrives; if it waits, it is blocked until `threads` threads have."""
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
