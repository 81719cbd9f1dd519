"""Kernels compiled without a GPU, and their PTX and SASS."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any


def dump(build: Callable[[Any, str], object], spec: Any, folder: Path) -> tuple[str, str]:
    """(PTX, SASS) of the kernel that build(spec, options) compiles; `folder` is empty or is made."""
    folder.mkdir(exist_ok=True)
    build(spec, f"--keep-ptx --keep-cubin --dump-dir {folder}")
    (ptx,), (cubin,) = folder.glob("*.ptx"), folder.glob("*.cubin")
    assert cubin.read_bytes()[:4] == b"\x7fELF"
    text = ptx.read_text()
    assert deadlocks(text) == [], "one lane of a warp waits for the others"
    command = [disassembler(), "-c", "-ndf", str(cubin)]  # no data flow: it only names targets of indirect branches, in 0.1 s
    return text, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def deadlocks(ptx: str) -> list[str]:
    """The whole-warp instructions that only an elected lane reaches: the lane would wait for the other lanes for ever."""
    found, elected, inverse, end = [], "", "", ""
    for line in (line.strip() for line in ptx.splitlines()):
        if end and line.startswith((f"{end}:", "bra.uni", "ret;")):
            end = ""
        elif end and re.match(r"(shfl|vote|match|redux|bar\.warp|bar|barrier|elect)\.sync", line):
            found.append(line)
        elif match := re.match(r"elect\.sync\s+%r\d+\|(%p\d+),", line):
            elected = match[1]
        elif match := re.match(rf"not\.pred\s+(%p\d+), {elected};" if elected else r"$.", line):
            inverse = match[1]
        elif match := re.match(rf"@{inverse} bra\s+(\S+);" if inverse else r"$.", line):
            elected, inverse, end = "", "", match[1]
    return found


def loops(sass: str, opcode: str) -> list[str]:
    """The instructions of each loop that has such an opcode; of loops that overlap, the smallest.

    Only conditional jumps end one: code out of line, such as a wait, jumps back without a condition.
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in map(str.strip, sass.splitlines()):
        if match := re.match(r"(\.L_x_\d+):", line):
            labels[match[1]] = len(code)
        elif match := re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*;)", line):
            code.append(match[1])
    found: list[range] = []
    jumps = [
        (labels.get(match[1], at), at) for at, line in enumerate(code) if (match := re.match(r"@.*\bBRA.*(\.L_x_\d+)", line))
    ]
    for first, last in sorted((jump for jump in jumps if jump[0] < jump[1]), key=lambda jump: jump[1] - jump[0]):
        overlaps = any(first < other.stop and other.start <= last for other in found)
        if not overlaps and any(re.search(rf"\b{opcode}", line) for line in code[first : last + 1]):
            found.append(range(first, last + 1))
    return ["\n".join(code[part.start : part.stop]) for part in found]


@functools.cache
def disassembler() -> str:
    """The path of nvdisasm."""
    import nvidia

    for folder in nvidia.__path__:
        for found in Path(folder).rglob("nvdisasm"):
            return str(found)
    raise FileNotFoundError("nvdisasm: install the package nvidia-cuda-nvdisasm")
