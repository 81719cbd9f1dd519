"""A warp: its registers, and its lanes as fragments that run from different places and join where they meet."""

from __future__ import annotations

import random
import traceback
from typing import Any

import numpy as np

from .copies import LaneCopies, TensorMap, land_box
from .matrix import Steps, load_matrices, warp_product
from .memory import PARAM_BASE, MemoryFault, as_registers, from_registers
from .numbers import FULL, I32, LANE, LANES, U32, U64, mask_of
from .program import EXIT, LIVE


class Fault(Exception):
    """A kernel did something forbidden; the message says where, and in which lanes."""


class Warp:
    """fragments: the lanes at each place. blocked: the barrier that the warp waits at. spin: the warp found nothing new to do."""

    def __init__(self, cta: Any, number: int, program: Any, picks: random.Random) -> None:
        self.cta, self.number, self.program, self.picks = cta, number, program, picks
        self.tid = (LANE + LANES * number).astype(U32)
        self.lane = LANE.astype(U32)
        self.registers = program.emitter.new_registers()
        self.fragments: dict[int, int] = {0: FULL}
        self.blocked, self.spin, self.pc = "", False, 0
        self.looks, self.sleeps = 0, 0  # looks in vain in a row, and turns to leave out
        self.looked_at: set[int] = set()  # the places of loads that have looked in this turn
        self.copies = LaneCopies(self)
        self.steps = Steps(cta.shared, 16 * (number % 4))

    @property
    def ended(self) -> bool:
        return not self.fragments

    def run(self, blocks: int) -> bool:
        """Runs at most `blocks` blocks; returns whether the warp did more than look for something new."""
        before = self.cta.grid.changes
        self.looked_at.clear()
        for done in range(blocks):
            if self.blocked or not self.fragments or not self.step():
                return done > 0
            if self.spin:
                self.spin = False
                return self.cta.grid.changes > before
        return not self.looked_at or self.cta.grid.changes > before

    def step(self) -> bool:
        """Runs one block of a fragment; False if all fragments wait for each other."""
        pc = self.choose()
        if pc is None:
            return False
        bits = self.fragments.pop(pc)
        self.pc = pc
        full = bits == FULL
        block = self.program.block(pc, full)
        try:
            result = block(self, self.registers, None if full else mask_of(bits))
        except NotImplementedError:
            raise
        except Exception as error:
            self.fragments[pc] = bits
            raise self.fault(error, bits) from error
        if type(result) is int:
            self.go(result, bits)
        else:
            self.go(result[0], result[1])
            self.go(result[2], result[3])
        return True

    def go(self, pc: int, bits: int) -> None:
        if pc != EXIT:
            self.fragments[pc] = self.fragments.get(pc, 0) | bits
        else:
            self.cta.grid.changed()

    def choose(self) -> int | None:
        """The place of the fragment that runs next: the first in the code, so that late lanes catch up; now and then, any."""
        if len(self.fragments) == 1:
            (pc,) = self.fragments
            return pc if self.fragments[pc] == FULL or self.ready(pc) else None
        places = sorted(self.fragments)
        if self.picks.random() < 0.02:  # a fragment that waits for another one must not starve the other one
            self.picks.shuffle(places)
        return next((pc for pc in places if self.ready(pc)), None)

    def ready(self, pc: int) -> bool:
        """Whether all lanes for which the instruction at `pc` waits have come."""
        members = self.program.members.get(pc)
        if members is None:
            return True
        bits, live = self.fragments[pc], 0
        for others in self.fragments.values():
            live |= others
        if members == LIVE:
            return bits == live
        if isinstance(members, str):
            words = self.registers[self.program.emitter.place(members)][mask_of(bits)]
            if (words != words[0]).any():
                raise NotImplementedError(f"lanes with different members at {self.program.kernel.instructions[pc].text}")
            members = int(words[0])
        if bits & ~members:
            raise Fault(f"lanes {bits & ~members:#x} are no members of {self.program.kernel.instructions[pc].text}")
        return bits == members & live

    def fault(self, error: Exception, bits: int) -> Fault:
        """The error with the place that it came from."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in self.program.sources]
        where = self.program.place_of(frames[-1].filename, frames[-1].lineno or 2) if frames else None
        place = f"instruction {where.pc}, {where.text}" if where else f"from instruction {self.pc} on"
        return Fault(f"{error}\n  at {place}\n  CTA {self.cta.number}, warp {self.number}, lanes {bits:#010x}")

    def state(self) -> str:
        """The places of the lanes."""
        lines = [
            f"lanes {bits:#010x} at {pc}: {self.program.kernel.instructions[pc].text}"
            for pc, bits in sorted(self.fragments.items())
        ]
        return f"CTA {self.cta.number}, warp {self.number} {self.blocked}: " + "; ".join(lines)

    # the methods that blocks call

    def whole(self, mask: np.ndarray | None) -> None:
        if mask is not None and not mask.all():
            raise Fault("an instruction of whole warps is run by some lanes")

    def look(self, pc: int) -> None:
        """Notes a load of words that others may change: its second time in a turn ends the turn."""
        self.spin |= pc in self.looked_at
        self.looked_at.add(pc)

    def first(self, mask: np.ndarray | None) -> int:
        return 0 if mask is None else int(mask.argmax())

    def load_shared(self, address: np.ndarray, size: int, count: int, dtype: type, mask: np.ndarray | None) -> list[np.ndarray]:
        parts = self.cta.shared.load(address if mask is None else address[mask], size * count)
        return as_registers(parts, dtype, count, mask)

    def load_global(self, address: np.ndarray, size: int, count: int, dtype: type, mask: np.ndarray | None) -> list[np.ndarray]:
        parts = self.cta.grid.memory.load(address if mask is None else address[mask], size * count)
        return as_registers(parts, dtype, count, mask)

    def load_wide(self, address: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        return np.stack(self.load_global(address, 8, 2, U64, mask))

    def store_shared(self, address: np.ndarray, nbytes: int, values: tuple, mask: np.ndarray | None) -> None:
        address = address if mask is None else address[mask]
        self.cta.shared.store(address, nbytes, from_registers(values, nbytes, mask))
        self.cta.grid.changed()

    def store_global(self, address: np.ndarray, nbytes: int, values: tuple, mask: np.ndarray | None) -> None:
        address = address if mask is None else address[mask]
        self.cta.grid.memory.store(address, nbytes, from_registers(values, nbytes, mask))
        self.cta.grid.changed()

    def store_wide(self, address: np.ndarray, word: np.ndarray, mask: np.ndarray | None) -> None:
        self.store_global(address, 16, (word[0], word[1]), mask)

    def prefetch(self, address: np.ndarray, mask: np.ndarray | None) -> None:
        self.cta.grid.memory.prefetch(address if mask is None else address[mask])

    def atomic(self, operation: np.ufunc, address: np.ndarray, value: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        found, memory = np.zeros(LANES, I32), self.cta.grid.memory
        for lane in range(LANES) if mask is None else np.flatnonzero(mask):
            where = address[lane : lane + 1]
            found[lane] = memory.load(where, 4).view(I32)[0, 0]
            memory.store(where, 4, operation(found[lane : lane + 1], value[lane : lane + 1]).view(U32)[:, None])
        self.cta.grid.changed()
        return found

    def test(self, address: np.ndarray, parity: np.ndarray, mask: np.ndarray | None, waits: bool) -> np.ndarray:
        found = self.cta.barriers.test(address, parity, mask)
        if waits and not (found if mask is None else found[mask]).all():
            self.spin = True
        return found

    def meet(self, number: int, threads: int, waits: bool, mask: np.ndarray | None) -> None:
        self.cta.named.meet(number, threads, self, waits)

    def copy_box(
        self, to: np.ndarray, tensor_map: np.ndarray, corner: tuple, barrier: np.ndarray, mask: np.ndarray | None
    ) -> None:
        for lane in range(LANES) if mask is None else np.flatnonzero(mask):
            box = TensorMap.unpack(self.cta.grid.param_bytes(int(tensor_map[lane]) - PARAM_BASE, 128))
            if len(corner) != len(box.extents):
                raise MemoryFault(f"a box at {len(corner)} coordinates of a tensor of {len(box.extents)}")
            where = tuple(int(axis[lane]) for axis in corner)
            self.copy_one_box(box, int(to[lane]), where, int(barrier[lane]))

    def copy_one_box(self, box: TensorMap, to: int, corner: tuple[int, ...], barrier: int) -> None:
        cta = self.cta
        cta.barriers.find(barrier)
        cta.begin(lambda: cta.barriers.complete(barrier, land_box(cta, box, to, corner)))

    def load_matrix(self, address: np.ndarray, transposed: bool) -> np.ndarray:
        return load_matrices(self.cta.shared, address, transposed)

    def product(self, kind: str, a: tuple, b: tuple, c: tuple) -> np.ndarray:
        return warp_product(kind, a, b, c)
