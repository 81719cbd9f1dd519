"""A launch: the warps of a grid's CTAs run by turns in a random order, to their end or a deadlock."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from .barriers import Mbarriers, NamedBarriers
from .memory import GlobalMemory, SharedMemory
from .numbers import LANES, U32, UINTS
from .program import Program
from .registers import Registers
from .warp import Fault, Warp

TURNS = (1, 4, 16, 64, 256)  # blocks of code that a warp may run before another warp's turn
LATE = 0.05  # probability, per turn of a CTA, that one of its late copies lands although a warp has other work
# probability that a copy lands at once, by the seed: 0 is too late for a reader that did not wait, 1 too early for one that still
# reads the old bytes
EAGER = (0.0, 0.5, 1.0)
LONGEST_SLEEP = 10  # a warp that has looked in vain n times in a row leaves out 2 ** n - 1 turns, with n at most this
IDLE_ROUNDS = 2000  # more rounds than these without a change are a deadlock: a warp may look at many words one by one


class Deadlock(Fault):
    """No warp can go on."""


class Cta:
    """A CTA. late: the copies that have yet to land."""

    def __init__(self, grid: Grid, number: int) -> None:
        self.grid, self.number, self.threads = grid, number, grid.program.kernel.threads
        x, y, z = grid.shape
        place = number % x, number // x % y, number // x // y
        self.index = [np.full(LANES, axis, U32) for axis in place]
        self.counts = [np.full(LANES, axis, U32) for axis in (x, y, z)]
        self.shared = SharedMemory(grid.shared_bytes)
        self.barriers, self.named = Mbarriers(grid.changed), NamedBarriers(grid.changed)
        self.late: list[Callable[[], None]] = []
        self.registers = Registers(self.threads // LANES)
        self.warps = [Warp(self, i, grid.program, grid.picks) for i in range(self.threads // LANES)]
        self.param = grid.param

    def begin(self, copy: Callable[[], None]) -> None:
        """Begins a copy, which lands at once or later."""
        if self.grid.lands_at_once():
            copy()
        else:
            self.late.append(copy)

    def run(self) -> bool:
        """Gives each warp a turn, in a random order; returns whether a warp did more than look."""
        picks, moved = self.grid.picks, False
        picks.shuffle(self.warps)
        for warp in self.warps:
            if warp.sleeps:
                warp.sleeps -= 1
                continue
            went = warp.run(picks.choice(TURNS))
            warp.looks = 0 if went else min(warp.looks + 1, LONGEST_SLEEP)
            warp.sleeps = (1 << warp.looks) - 1
            moved |= went
        if self.late and picks.random() < LATE:
            self.land()
        self.warps = [warp for warp in self.warps if not warp.ended]
        if self.late and not self.warps:
            raise Fault(f"CTA {self.number} ended while copies to its shared memory were under way")
        if not self.warps:
            self.registers.check()
        return moved

    def wake(self) -> None:
        """No warp has moved: each looks again, after a copy has landed if one is under way."""
        for warp in self.warps:
            warp.sleeps = 0
        if self.late:
            self.land()

    def land(self) -> None:
        """Lands a random late copy."""
        self.late.pop(self.grid.picks.randrange(len(self.late)))()
        self.grid.changed()


class Grid:
    """One launch of a kernel. params: its parameters' bytes. resident: how many CTAs run at a time, lower numbers first."""

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        params: bytes,
        shape: tuple[int, int, int],
        shared_bytes: int,
        *,
        seed: int = 0,
        resident: int | None = None,
    ) -> None:
        self.program, self.memory, self.params, self.shape, self.shared_bytes = program, memory, params, shape, shared_bytes
        self.picks, self.changes = random.Random(seed), 0
        self.eager = EAGER[seed % len(EAGER)]
        self.total = shape[0] * shape[1] * shape[2]
        self.resident = resident or self.total
        self.read: dict[tuple[int, int], np.ndarray] = {}

    def changed(self) -> None:
        """Counts an event that other warps may wait for."""
        self.changes += 1

    def lands_at_once(self) -> bool:
        """Draws whether a copy that begins now lands at once."""
        return self.picks.random() < self.eager

    def param(self, offset: int, size: int) -> np.ndarray:
        """A parameter's value in each of 32 lanes."""
        if (offset, size) not in self.read:
            value = int.from_bytes(self.param_bytes(offset, size), "little")
            self.read[offset, size] = np.full(LANES, value, UINTS[size])
        return self.read[offset, size]

    def param_bytes(self, offset: int, size: int) -> bytes:
        if not 0 <= offset <= len(self.params) - size:
            raise Fault(f"parameters at {offset} of {len(self.params)} bytes")
        return self.params[offset : offset + size]

    def run(self) -> None:
        """Runs every CTA to its end."""
        started, running = 0, []
        idle, seen = 0, 0
        with np.errstate(all="ignore"):
            while started < self.total or running:
                while len(running) < self.resident and started < self.total:
                    running.append(Cta(self, started))
                    started += 1
                order = list(running)
                self.picks.shuffle(order)
                moved = [cta.run() for cta in order]
                if not any(moved):
                    for cta in order:
                        cta.wake()
                idle = idle + 1 if self.changes == seen else 0
                seen = self.changes
                if idle > IDLE_ROUNDS:
                    raise Deadlock("no warp can go on:\n" + "\n".join(w.state() for cta in running for w in cta.warps))
                running = [cta for cta in running if cta.warps]
