"""Instructions as lines of Python. A register R[i] is an array of 32 lanes that is never written in place.

Lines are made for a warp whose lanes all run, or for the lanes of the mask `m`. Tables of handlers, by the opcode's first word,
say which lines an opcode becomes: arithmetic.py, movement.py, together.py. An opcode that is in no table, or has a word that
its handler does not know, raises NotImplementedError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import numbers
from .memory import SHARED_BEGIN
from .numbers import F32, F64, I8, I16, I32, I64, LANES, U8, U16, U32, U64
from .ptx import Instruction, Kernel, Operand

TYPES: dict[str, type] = {
    "b8": U8,
    "b16": U16,
    "b32": U32,
    "b64": U64,
    "u8": U8,
    "u16": U16,
    "u32": U32,
    "u64": U64,
    "s8": I8,
    "s16": I16,
    "s32": I32,
    "s64": I64,
    "f16": numbers.F16,
    "f32": F32,
    "f64": F64,
    "pred": np.bool_,
}
STORED: dict[int, type] = {1: np.bool_, 16: U16, 32: U32, 64: U64}
NAMES = {kind: kind.__name__ for kind in TYPES.values()}
SPECIAL = {
    "%tid.x": "w.tid",
    "%laneid": "w.lane",
    "%ctaid.x": "w.cta.index[0]",
    "%ctaid.y": "w.cta.index[1]",
    "%ctaid.z": "w.cta.index[2]",
    "%nctaid.x": "w.cta.counts[0]",
    "%nctaid.y": "w.cta.counts[1]",
    "%nctaid.z": "w.cta.counts[2]",
}
SHARED_SYMBOL = "__dynamic_shmem__0"
POISON = 0x7FDEAD00_7FDEAD00
ADDRESS = re.compile(r"\[([^\s+\]]+)(?:\+(-?\d+))?\]$")

Handler = Callable[["Emitter", Instruction], None]


def unknown(instruction: Instruction) -> NotImplementedError:
    """The error for an instruction that the interpreter does not know."""
    return NotImplementedError(f"the interpreter does not know {instruction.opcode}: {instruction.text}")


class Emitter:
    """Makes the lines of a kernel's blocks. namespace: the objects that lines name; full: whether all lanes of the warp run."""

    def __init__(self, kernel: Kernel, tables: list[dict[str, Handler]]) -> None:
        self.kernel, self.handlers = kernel, {word: handler for table in tables for word, handler in table.items()}
        self.namespace: dict[str, Any] = {
            **vars(numbers),
            **{name: kind for kind, name in NAMES.items()},
            "np": np,
            "where": np.where,
        }
        self.places: dict[str, int] = {}
        self.constants: dict[tuple[object, type], str] = {}
        self.offsets = {param.name: param.offset for param in kernel.params}
        self.lines: list[str] = []
        self.full, self.mask = True, "None"

    def new_registers(self) -> list[np.ndarray]:
        """A warp's registers, which hold POISON until they are written. Every register must already have its number."""
        poison = {width: np.full(LANES, POISON, U64).astype(dtype) for width, dtype in STORED.items()}
        poison[128] = np.full((2, LANES), POISON, U64)
        return [poison[self.kernel.width(name) or 0] for name in self.places]

    def line(self, text: str) -> None:
        self.lines.append(text)

    def place(self, name: str) -> int:
        """The number of a register."""
        if name not in self.places:
            if self.kernel.width(name) is None:
                raise NotImplementedError(f"the interpreter does not know {name}")
            self.places[name] = len(self.places)
        return self.places[name]

    def constant(self, value: object, dtype: type) -> str:
        """The name of an array whose 32 lanes hold `value`."""
        key = value, dtype
        if key not in self.constants:
            self.constants[key] = f"k{len(self.constants)}"
            self.namespace[self.constants[key]] = np.full(LANES, value, dtype)
        return self.constants[key]

    def immediate(self, text: str, dtype: type) -> str:
        """An expression for 32 lanes of an operand that is a number or a symbol's address."""
        if text == SHARED_SYMBOL:
            return self.constant(SHARED_BEGIN, dtype)
        if text in self.offsets:
            return self.constant(self.offsets[text], dtype)
        if text.startswith("0f"):
            name = self.constant(int(text[2:], 16), U32)
            return name if dtype is U32 else f"{name}.view({NAMES[dtype]})"
        number = number_of(text)
        if dtype is np.bool_:
            return self.constant(bool(number), dtype)
        if np.dtype(dtype).kind == "f":
            raise NotImplementedError(f"the interpreter does not know {text} as a float")
        size = 8 * np.dtype(dtype).itemsize
        number &= (1 << size) - 1
        if np.dtype(dtype).kind == "i" and number >> (size - 1):
            number -= 1 << size
        return self.constant(number, dtype)

    def source(self, operand: Operand, kind: str) -> str:
        """An expression for an operand, as a PTX type."""
        assert isinstance(operand, str), operand
        dtype = TYPES[kind]
        if operand in SPECIAL:
            return SPECIAL[operand] if dtype is U32 else f"{SPECIAL[operand]}.astype({NAMES[dtype]})"
        width = self.kernel.width(operand)
        if width is None:
            return self.immediate(operand, dtype)
        text = f"R[{self.place(operand)}]"
        stored, size = STORED[width], np.dtype(dtype).itemsize
        if dtype is stored:
            return text
        if dtype is np.bool_ or stored is np.bool_ or size > np.dtype(stored).itemsize:
            raise NotImplementedError(f"the interpreter does not know {operand} as {kind}")
        if size < np.dtype(stored).itemsize:
            text = f"{text}.astype(uint{8 * size})"
        return f"{text}.view({NAMES[dtype]})"

    def put(self, operand: Operand, text: str, kind: str) -> None:
        """Adds a line that writes an expression of a PTX type to a register, in the lanes that run."""
        assert isinstance(operand, str), operand
        if operand == "_":
            return
        place, width = self.place(operand), self.kernel.width(operand)
        if width != 128:
            dtype, stored = TYPES[kind], STORED[width]  # type: ignore[index]
            if np.dtype(dtype).itemsize < np.dtype(stored).itemsize:
                kept = f"int{width}" if np.dtype(dtype).kind == "i" else f"uint{width}"
                text, dtype = f"({text}).astype({kept})", TYPES[("s" if kept[0] == "i" else "u") + str(width)]
            if np.dtype(dtype).itemsize > np.dtype(stored).itemsize or (dtype is np.bool_) != (stored is np.bool_):
                raise NotImplementedError(f"the interpreter does not know {operand} as {kind}")
            text = text if dtype is stored else f"({text}).view(uint{width})"
        self.line(f"R[{place}] = {text}" if self.mask == "None" else f"R[{place}] = where({self.mask}, {text}, R[{place}])")

    def address(self, operand: Operand, kind: str) -> str:
        """An expression for the addresses in brackets, u32 or u64."""
        match = ADDRESS.match(operand) if isinstance(operand, str) else None
        if not match:
            raise NotImplementedError(f"the interpreter does not know the address {operand}")
        base = self.source(match[1], kind)
        return f"({base} + {self.immediate(match[2], TYPES[kind])})" if match[2] else base

    def emit(self, instruction: Instruction) -> None:
        """Adds an instruction's lines."""
        handler = self.handlers.get(instruction.base)
        if handler is None:
            raise unknown(instruction)
        if instruction.guard is None:
            handler(self, instruction)
            return
        negated, register = instruction.guard
        outer, begin = self.mask, len(self.lines)
        chosen = f"{'~' if negated else ''}{self.source(register, 'pred')}"
        self.line(f"g = {chosen}" if outer == "None" else f"g = {chosen} & {outer}")
        self.line("if g.any():")
        self.mask, inner = "g", len(self.lines)
        handler(self, instruction)
        self.lines[inner:] = ["    " + line for line in self.lines[inner:]] or ["    pass"]
        self.mask = outer
        assert begin < inner


def number_of(text: str) -> int:
    """An integer as PTX writes it."""
    return int(text.rstrip("U"), 0)
