"""A kernel as functions of a warp (blocks): each runs the instructions from a place on, made when a warp first comes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import ARITHMETIC
from .emitter import Emitter, number_of, unknown
from .movement import MOVEMENT
from .numbers import FULL
from .ptx import ADDRESS_PARTS, Instruction, Kernel, target_of
from .together import TOGETHER

# A block maps a warp, its registers and the lanes that run (None: all) to the pc where they go on, or to (pc, lanes, pc, lanes)
Next = int | tuple[int, int, int, int]
Block = Callable[[Any, list[np.ndarray], np.ndarray | None], Next]
EXIT = -1
LONGEST = 400  # instructions per block of all lanes
TOGETHER_WORDS = {"shfl", "vote", "redux", "elect", "bar", "barrier", "ldmatrix", "mma", "wgmma", "setmaxnreg"}
MASKED = {"shfl", "vote", "redux", "elect"}  # their last operand names the lanes that must come
LIVE = "live"
FILE = "<ptx from {}>"


class Program:
    """blocks: for all lanes (True) or some (False), by first instruction. sources: each block line's instruction."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.emitter = Emitter(kernel, [ARITHMETIC, MOVEMENT, TOGETHER])
        self.leaders = set(kernel.labels.values())
        self.blocks: dict[bool, dict[int, Block]] = {True: {}, False: {}}
        self.sources: dict[str, list[int]] = {}
        for instruction in kernel.instructions:
            self.place_registers(instruction)
        self.members = {i.pc: self.members_of(i) for i in kernel.instructions if i.base in TOGETHER_WORDS}

    def place_registers(self, instruction: Instruction) -> None:
        """Gives a number to every register that an instruction names."""
        names = [instruction.guard[1]] if instruction.guard else []
        for operand in instruction.operands:
            for part in operand if isinstance(operand, tuple) else (operand,):
                names += ADDRESS_PARTS.findall(part)
        for name in names:
            if self.kernel.width(name) is not None:
                self.emitter.place(name)

    def members_of(self, instruction: Instruction) -> int | str:
        """The lanes that an instruction waits for: a word of bits, the register that has it, or all lanes that have not ended."""
        named = instruction.base in MASKED or instruction.opcode == "bar.warp.sync"
        if not named:
            return LIVE
        operand = str(instruction.operands[-1])
        return operand if self.kernel.width(operand) else number_of(operand) & FULL

    def block(self, pc: int, full: bool) -> Block:
        """The function that runs the instructions from `pc` on."""
        found = self.blocks[full].get(pc)
        if found is None:
            found = self.blocks[full][pc] = self.make(pc, full)
        return found

    def make(self, pc: int, full: bool) -> Block:
        emitter = self.emitter
        emitter.lines, emitter.full, emitter.mask = [], full, "None" if full else "m"
        sources: list[int] = []
        at, ended = pc, False
        while not ended:
            ended = at > pc and self.stops(at, at - pc, full)
            if ended:
                emitter.line(f"return {at}")
            else:
                ended = self.add(self.kernel.instructions[at])
            sources += [at] * (len(emitter.lines) - len(sources))
            at += 1
        name = FILE.format(f"{pc}{'' if full else ' (some lanes)'} of {self.kernel.name}")
        text = "def block(w, R, m):\n" + "\n".join("    " + line for line in emitter.lines)
        exec(compile(text, name, "exec"), emitter.namespace)
        self.sources[name] = sources
        return emitter.namespace.pop("block")

    def stops(self, pc: int, length: int, full: bool) -> bool:
        """Whether a block ends before this instruction: it is long, or parted lanes may meet there."""
        if full:
            return length >= LONGEST
        return pc in self.leaders or pc in self.members

    def add(self, instruction: Instruction) -> bool:
        """Adds an instruction to the block; returns whether that ends the block."""
        emitter, behind = self.emitter, instruction.pc + 1
        if instruction.base in ("bra", "ret"):
            if instruction.opcode not in ("bra", "bra.uni", "ret"):
                raise unknown(instruction)
            target = EXIT if instruction.base == "ret" else target_of(self.kernel, instruction)
            self.branch(instruction, target, behind)
            return True
        emitter.emit(instruction)
        if instruction.opcode in ("bar.sync", "barrier.sync") or "relaxed" in instruction.parts:  # other warps may have a turn
            emitter.line(f"return {behind}")
            return True
        return False

    def branch(self, instruction: Instruction, target: int, behind: int) -> None:
        emitter = self.emitter
        if instruction.guard is None:
            emitter.line(f"return {target}")
            return
        negated, register = instruction.guard
        chosen = f"{'~' if negated else ''}{emitter.source(register, 'pred')}"
        every = str(FULL)
        if not emitter.full:
            chosen, every = f"{chosen} & m", "a"
            emitter.line("a = bits_of(m)")
        emitter.line(f"b = bits_of({chosen})")
        emitter.line(f"return {target} if b == {every} else {behind} if not b else ({target}, b, {behind}, {every} & ~b)")

    def place_of(self, file: str, line: int) -> Instruction:
        """The instruction from which a block's line was made."""
        return self.kernel.instructions[self.sources[file][line - 2]]
