"""Kernels that cost nothing to compile, in files that are real."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.compile import cache, disk
from cute_kernels.compile import kernels as compiler
from cute_kernels.compile.cache import ENVIRONMENT
from cute_kernels.compile.key import PACKAGE
from cute_kernels.compile.objects import Compiled
from cute_kernels.compile.operations import Operation
from cute_kernels.config.append import AppendSpec, RotarySpec
from cute_kernels.config.merge import MergeSpec
from tests.support.specs import usual_spec

STORAGE = ("bf16", "bf16", "bf16", "none", "none")
DECODE = usual_spec()
MERGE = MergeSpec("sm_90a", "bf16", 128, 2, 2, False, 4, "e")
APPEND = AppendSpec("sm90", "sm_90a", *STORAGE, 128, 16, "none", "i64", 8, 16, 1, False, RotarySpec(True, 128, True, "i64"))
SPECS = (DECODE, MERGE, APPEND)
NOBODY = 65534


class Kernel:
    """What a compile makes of `spec`."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __tvm_ffi_object__(self) -> None:
        """No GPU: there is no raw function."""


class Compiles:
    """Stands for the compiler, the linker and the loader of this process. loads: what was loaded of an object."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.built: list[Any] = []
        self.loads: list[Compiled] = []
        patch.setattr(compiler, "_kernels", {})
        patch.setattr(cache, "_warned", set())
        patch.setattr(Operation, "build", self._build)
        patch.setattr(cache, "export", lambda kernel: code_of(kernel.spec))
        patch.setattr(cache, "load", self._load)

    def _build(self, spec: Any) -> Kernel:  # as an attribute of the class it is bound to this object, not to the operation
        self.built.append(spec)
        return Kernel(spec)

    def _load(self, compiled: Compiled) -> Compiled:
        self.loads.append(compiled)
        return compiled

    def forget(self) -> None:
        """As if in a new process."""
        compiler._kernels.clear()


def environment(folder: Path) -> dict[str, str]:
    """Of another process whose kernels are in `folder`: it imports this package, and else what this process can import."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(PACKAGE.parent), *([inherited] if inherited else [])])
    return {**os.environ, ENVIRONMENT: str(folder), "PYTHONPATH": path}


def give_away(path: Path, patch: pytest.MonkeyPatch) -> int:
    """Makes a folder another user's, and returns its owner: root gives it away, anybody else pretends to be another user."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        return NOBODY
    owner = os.geteuid()
    patch.setattr(disk.os, "geteuid", lambda: NOBODY)
    return owner


def code_of(spec: Any) -> Compiled:
    """4 KB that no other spec has."""
    return Compiled("shared", str(spec).encode().ljust(4096, b"."))


def others(spec: Any) -> list[Any]:
    """`spec` with each of its fields changed alone."""
    return [replace(spec, **{name: new}) for name, value in vars(spec).items() for new in other_values(value)]


def other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if value is None:
        return ["x"]
    if isinstance(value, str):
        return [value + "x"]
    return [None, *others(value)]
