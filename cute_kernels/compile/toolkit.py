"""The CUDA toolkit that the DSL compiles with, its runtime library and the host's CPU, found without importing the DSL."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from ..errors import MissingDependency

RUNTIME = "libcute_dsl_runtime.so"
# the levels of the x86-64 psABI: the compiler makes a kernel's host code for the CPU that it runs on
CPU_LEVELS = {
    4: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    3: {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}


@cache
def runtimes() -> dict[int, Path]:
    """The DSL's runtime library for each major version of CUDA whose package is installed."""
    spec = PathFinder.find_spec("nvidia_cutlass_dsl")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = (path for folder in folders for path in folder.glob(f"cu*/lib/{RUNTIME}"))
    return {int(path.parts[-3][2:]): path for path in found if path.parts[-3][2:].isdigit()}


@cache
def cuda_major() -> int | None:
    """CUDA's major version of the DSL's compiler: the newest installed one that the driver, if any, runs; None if none is."""
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        number.value = 0
    return max((major for major in runtimes() if not number.value or major <= number.value // 1000), default=None)


def runtime_library() -> Path:
    """The library that every compiled kernel calls (43 MB): from CUTE_DSL_LIBS, else nvidia-cutlass-dsl-libs-cu12 or -cu13.

    Raises MissingDependency if there is none.
    """
    named = [Path(path) for path in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep) if path.endswith(RUNTIME)]
    if named:
        return named[0]
    major = cuda_major()
    if major is None:
        raise MissingDependency(RUNTIME, "compiled kernels call it: pip install 'nvidia-cutlass-dsl[cu13]'")
    return runtimes()[major]


@cache
def host() -> str:
    """The machine's architecture, and on x86-64 its psABI level: code for one CPU may be illegal on another."""
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return machine
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    level = next((level for level, needed in CPU_LEVELS.items() if needed <= flags and CPU_LEVELS[3] <= flags), 2)
    return f"{machine}-v{level}"
