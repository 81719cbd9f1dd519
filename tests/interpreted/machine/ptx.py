"""PTX as instructions: parses a kernel's text without knowledge of what an opcode does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Operand = str | tuple[str, ...]  # a tuple for a vector in braces; else a name, or an address in brackets as it stands

WIDTHS = {"pred": 1, "b8": 16, "b16": 16, "b32": 32, "b64": 64, "b128": 128, "f32": 32, "f64": 64}
PARAM_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
COMMENT = re.compile(r"//[^\n]*")
ENTRY = re.compile(r"\.visible \.entry (\w+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[bufs](\d+)\s+(\w+)(?:\[(\d+)\])?")
GUARD = re.compile(r"@(!?)(\S+)\s+")
LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
ADDRESS_PARTS = re.compile(r"[%\w.$@]+")
WORD = re.compile(r"(?<![\w.%$])[A-Za-z_][\w]*")


class Param(NamedTuple):
    """One of a kernel's parameters: its place in the bytes that a launch hands over."""

    name: str
    offset: int
    size: int
    align: int


@dataclass
class Instruction:
    """guard: (whether the predicate is negated, its register), or None. pc: its place in the kernel. text: as it was written."""

    pc: int
    opcode: str
    operands: list[Operand]
    guard: tuple[bool, str] | None
    text: str
    scopes: tuple[int, ...]

    @property
    def base(self) -> str:
        """The opcode's first word."""
        return self.opcode.split(".", 1)[0]

    @property
    def parts(self) -> list[str]:
        """The opcode's words after the first."""
        return self.opcode.split(".")[1:]


@dataclass
class Kernel:
    """labels: the pc that each label names. registers: each register's width in bits, 1 for a predicate. threads: per CTA."""

    name: str
    params: list[Param]
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    families: dict[str, int] = field(default_factory=dict)

    def width(self, name: str) -> int | None:
        """A register's width; None if `name` names no register."""
        if (known := self.registers.get(name)) is not None:
            return known
        family = name.rstrip("0123456789")
        if family in self.families and family != name:
            self.registers[name] = self.families[family]
            return self.families[family]
        return None


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX file by name."""
    text = COMMENT.sub("", text)
    found = {}
    for match in ENTRY.finditer(text):
        threads = re.search(r"\.reqntid\s+(\d+)", match[3])
        assert threads, "a kernel without .reqntid"
        kernel = Kernel(match[1], _params(match[2]), int(threads[1]))
        _Body(kernel).read(text[match.end() :])
        found[kernel.name] = kernel
    return found


def _params(text: str) -> list[Param]:
    found, offset = [], 0
    for align, bits, name, count in PARAM.findall(text):
        size = PARAM_BYTES[bits] * int(count or 1)
        alignment = int(align or PARAM_BYTES[bits])
        offset = -(-offset // alignment) * alignment
        found.append(Param(name, offset, size, alignment))
        offset += size
    return found


def statements(text: str) -> Iterator[str]:
    """Yields statements, labels with their colon, and the braces of scopes, up to the end of the scope in which `text` begins."""
    depth, at = 1, 0
    while True:
        while text[at].isspace() or text[at] == ";":
            at += 1
        if text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if not depth:
                return
            yield text[at]
            at += 1
        elif match := LABEL.match(text, at):
            yield match[1] + ":"
            at = match.end()
        else:
            end = text.index(";", at)
            yield " ".join(text[at:end].split())
            at = end + 1


def split_operands(text: str) -> list[str]:
    """The text between commas that stand outside braces and brackets."""
    found, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[") - (char in "}]")
        if char == "," and not depth:
            found.append(text[begin:at].strip())
            begin = at + 1
    rest = text[begin:].strip()
    return [*found, rest] if rest else found


class _Body:
    """Reads a kernel's statements. names: by scope, the names that its local registers have in the whole kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.scopes, self.opened = kernel, (0,), 0
        self.names: dict[int, dict[str, str]] = {0: {}}

    def read(self, text: str) -> None:
        for statement in statements(text):
            if statement == "{":
                self.opened += 1
                self.scopes = (*self.scopes, self.opened)
                self.names[self.opened] = {}
            elif statement == "}":
                self.scopes = self.scopes[:-1]
            elif statement.endswith(":"):
                label = statement[:-1]
                scope = self.scopes[-1]
                self.kernel.labels[f"{label}@{scope}" if scope else label] = len(self.kernel.instructions)
            elif statement.startswith(".reg"):
                self.declare(statement)
            elif not statement.startswith("."):
                self.kernel.instructions.append(self.instruction(statement))

    def declare(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        width = WIDTHS[kind[1:]]
        for name in (part.strip() for part in names.split(",")):
            if match := re.match(r"(%\w+)<\d+>", name):
                self.kernel.families[match[1]] = width
                continue
            unique = f"{name}@{self.scopes[-1]}"
            self.names[self.scopes[-1]][name] = unique
            self.kernel.registers[unique] = width

    def renamed(self, text: str) -> str:
        """The text with local registers under the names that they have in the whole kernel."""

        def unique(match: re.Match[str]) -> str:
            for scope in reversed(self.scopes):
                if match[0] in self.names[scope]:
                    return self.names[scope][match[0]]
            return match[0]

        return WORD.sub(unique, text) if len(self.scopes) > 1 else text

    def instruction(self, statement: str) -> Instruction:
        guard, rest = None, statement
        if match := GUARD.match(statement):
            guard, rest = (bool(match[1]), self.renamed(match[2])), statement[match.end() :]
        opcode, _, tail = rest.partition(" ")
        operands: list[Operand] = []
        for operand in split_operands(tail):
            parts = [operand] if opcode.startswith("bra") else [self.renamed(part) for part in operand.split("|")]
            operands += [tuple(split_operands(part[1:-1])) if part.startswith("{") else part for part in parts]
        return Instruction(len(self.kernel.instructions), opcode, operands, guard, statement, self.scopes)


def target_of(kernel: Kernel, instruction: Instruction) -> int:
    """The pc to which a branch goes."""
    label = instruction.operands[0]
    for scope in reversed(instruction.scopes):
        name = f"{label}@{scope}" if scope else str(label)
        if name in kernel.labels:
            return kernel.labels[name]
    raise ValueError(f"no label {label}")
