"""Kernels compiled without a GPU, and the code that they became."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any


def dump(build: Callable[[Any, str], object], spec: Any, folder: Path) -> tuple[str, str]:
    """(PTX, SASS) of what build(spec, options) compiles; `folder` is empty or is made."""
    folder.mkdir(exist_ok=True)
    build(spec, f"--keep-ptx --keep-cubin --dump-dir {folder}")
    (ptx,), (cubin,) = folder.glob("*.ptx"), folder.glob("*.cubin")
    assert cubin.read_bytes()[:4] == b"\x7fELF"
    command = [disassembler(), "-c", "-ndf", str(cubin)]  # no data flow: it only names what indirect branches reach, in 0.1 s
    return ptx.read_text(), subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def disassembler() -> str:
    """The path of nvdisasm."""
    import nvidia

    for folder in nvidia.__path__:
        for found in Path(folder).rglob("nvdisasm"):
            return str(found)
    raise FileNotFoundError("nvdisasm: install the package nvidia-cuda-nvdisasm")
