"""Compiled decode kernels as object files: what one process compiles, another loads."""

from pathlib import Path

import cutlass.cute as cute

from ...config.decode import KernelSpec
from .decode import build

NAME = "decode"


def export(spec: KernelSpec, path: Path) -> None:
    """Compiles `spec` and writes its object file; needs no GPU."""
    build(spec).export_to_c(str(path), function_name=NAME)


def load(path: Path) -> tuple[object, object]:
    """(the kernel in an object file, what must live as long as it)."""
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return module[NAME], module
