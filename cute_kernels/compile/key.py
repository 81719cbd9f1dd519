"""The key of a compiled kernel: a digest of all that its code depends on, and of nothing else."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .operations import Spec
from .toolkit import cuda_major, host

FORMAT = 1  # version of the objects' format
PACKAGE = Path(__file__).parents[1]
FOLDERS = ("device", "config")
FILES = ("kv/quantize.py",)  # whose constants device code takes
DSL_ENVIRONMENT = "CUTE_DSL_"  # variables of this prefix change code (CUTE_DSL_LINEINFO, CUTE_DSL_COMPILER_OPT)


def key_of(spec: Spec) -> str:
    """64 hexadecimal digits, equal in every process for equal specs, sources, versions, DSL settings and hosts."""
    depends = {"format": FORMAT, "spec": canonical(spec), "sources": known_sources(), **surroundings()}
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def canonical(value: Any) -> Any:
    """A spec as JSON can hold it: a dataclass as its type's name and its fields by name. Raises TypeError for anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, "fields": {f.name: canonical(getattr(value, f.name)) for f in fields(value)}}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"{value!r} is no field of a spec: its key would not be the same in every process")


def digest_sources(package: Path = PACKAGE) -> str:
    """A digest of every source file that may change generated code, names and contents."""
    paths = [path for folder in FOLDERS for path in (package / folder).rglob("*.py")] + [package / name for name in FILES]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in paths):
        content = path.read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def known_sources() -> str:
    """digest_sources as of this process's first call: from before it imported the sources, if only compile/ imports them."""
    return digest_sources()


def surroundings() -> dict[str, Any]:
    """What generated code depends on in addition to the spec and the sources."""
    return {"versions": _versions(cuda_major()), "cuda": cuda_major(), "host": host(), "settings": dsl_settings()}


def dsl_settings() -> dict[str, str]:
    """The DSL's environment variables."""
    return {name: value for name, value in os.environ.items() if name.startswith(DSL_ENVIRONMENT)}


@cache
def _versions(major: int | None) -> dict[str, str | None]:
    dsl = "nvidia-cutlass-dsl"
    names = (dsl, f"{dsl}-libs-base", f"{dsl}-libs-core", f"{dsl}-libs-cu{major}", "apache-tvm-ffi")
    return {name: _version(name) for name in names}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
