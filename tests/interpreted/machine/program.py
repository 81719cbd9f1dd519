"""A kernel as functions of a warp: one for the instructions from a place on, made when a warp first comes there."""

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

# a warp, its registers, and which lanes run (None: all) -> where it goes on, or where which of its lanes do
Next = int | tuple[int, int, int, int]
Block = Callable[[Any, list[np.ndarray], np.ndarray | None], Next]
EXIT = -1
LONGEST = 400  # instructions of a block
TOGETHER_WORDS = {"shfl", "vote", "redux", "elect", "bar", "barrier", "ldmatrix", "mma", "wgmma", "setmaxnreg"}
MASKED = {"shfl", "vote", "redux", "elect"}  # whose last operand names the lanes that must come
LIVE = "live"
FILE = "<ptx from {}>"


class Program:
    """blocks: of all lanes and of some, by their first instruction. sources: the instruction of each line of a block."""

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
        """Gives every register that an instruction names its number."""
        names = [instruction.guard[1]] if instruction.guard else []
        for operand in instruction.operands:
            for part in operand if isinstance(operand, tuple) else (operand,):
                names += ADDRESS_PARTS.findall(part)
        for name in names:
            if self.kernel.width(name) is not None:
                self.emitter.place(name)

    def members_of(self, instruction: Instruction) -> int | str:
        """The lanes that an instruction waits for: a word of bits, the register that has it, or all that have not ended."""
        named = instruction.base in MASKED or instruction.opcode == "bar.warp.sync"
        if not named:
            return LIVE
        operand = str(instruction.operands[-1])
        return operand if self.kernel.width(operand) else number_of(operand) & FULL

    def block(self, pc: int, full: bool) -> Block:
        """The function of the instructions from `pc` on."""
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
        """Whether a block ends before this instruction: lanes that parted may meet there."""
        if full:
            return length >= LONGEST
        return pc in self.leaders or pc in self.members

    def add(self, instruction: Instruction) -> bool:
        """Adds an instruction to the block; whether the block ends with it."""
        emitter, behind = self.emitter, instruction.pc + 1
        if instruction.base in ("bra", "ret"):
            if instruction.opcode not in ("bra", "bra.uni", "ret"):
                raise unknown(instruction)
            target = EXIT if instruction.base == "ret" else target_of(self.kernel, instruction)
            self.branch(instruction, target, behind)
            return True
        emitter.emit(instruction)
        if instruction.opcode in ("bar.sync", "barrier.sync") or "relaxed" in instruction.parts:  # others may have a turn
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
        """The instruction of a line of a block."""
        return self.kernel.instructions[self.sources[file][line - 2]]
