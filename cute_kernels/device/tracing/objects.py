"""Compiled kernels as object files: one process compiles a kernel, another loads it."""

from pathlib import Path

import cutlass.cute as cute


def export(kernel, path: Path, name: str) -> None:
    """Writes the object file of a compiled kernel, under the function name `name`; needs no GPU."""
    kernel.export_to_c(str(path), function_name=name)


def load(path: Path, name: str):
    """The kernel in an object file, which the DSL links; the kernel keeps what it needs."""
    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[name]
