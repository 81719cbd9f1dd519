"""A compiled kernel as bytes: linked where it was compiled, sealed under its key, loaded without the compiler.

A shared library needs TVM FFI and the DSL's runtime library, and loads in 3 ms. If no linker is found, the object file itself is
kept: the DSL links it when it is loaded, which imports the DSL's compiler (0.45 s).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

from .toolkit import runtime_library

MAGIC = b"cute_kernels object\n"
DIGEST_BYTES = 32
LENGTH_BYTES = 4
LINKERS = ("ld", "ld.lld")
# every symbol is resolved when it is linked, and again when it is loaded
FLAGS = ("-shared", "--build-id=none", "-z", "defs", "-z", "now", "-z", "noexecstack")

KERNEL = "kernel"  # the name of a compiled kernel in its object

Form = Literal["shared", "object"]
EXTENSIONS: dict[Form, str] = {"shared": "so", "object": "o"}


class BadObject(Exception):
    """Bytes that are not the object of a key."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. form: "shared", a shared library, or "object", an ELF object file."""

    form: Form
    code: bytes


def export(kernel: Any) -> Compiled:
    """A compiled kernel as bytes: a shared library if a linker is found, else the object file."""
    from ..device.tracing.objects import export as export_object

    with TemporaryDirectory() as folder:
        source, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        export_object(kernel, source, KERNEL)
        linker = next((found for name in LINKERS if (found := shutil.which(name))), None)
        if linker is None:
            return Compiled("object", source.read_bytes())
        libraries = [str(runtime_library()), _ffi_library()]
        subprocess.run([linker, *FLAGS, "-o", str(linked), str(source), *libraries], check=True, capture_output=True)
        return Compiled("shared", linked.read_bytes())


def load(compiled: Compiled) -> Any:
    """The kernel, ready to be called.

    It is loaded from a private copy of the bytes that were checked. The copy has a new path: the system's loader takes a path
    that it knows for a library that it already has.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"kernel.{EXTENSIONS[compiled.form]}"
        path.write_bytes(compiled.code)
        if compiled.form == "object":
            from ..device.tracing.objects import load as load_object

            return load_object(path, KERNEL)
        import tvm_ffi

        _load_runtime()
        return tvm_ffi.load_module(str(path))[KERNEL]


def seal(key: str, compiled: Compiled, about: dict[str, Any]) -> bytes:
    """An object: MAGIC, a digest of all that follows, a header (its length, then key, form and `about` as JSON), the code."""
    header = json.dumps({**about, "key": key, "form": compiled.form}, sort_keys=True).encode()
    rest = len(header).to_bytes(LENGTH_BYTES, "little") + header + compiled.code
    return MAGIC + hashlib.sha256(rest).digest() + rest


def unseal(data: bytes, key: str) -> tuple[Compiled, dict[str, Any]]:
    """The code of an object, and its header. Raises BadObject unless each byte is as `seal` wrote it under this key."""
    start = len(MAGIC) + DIGEST_BYTES
    rest = data[start:]
    if len(rest) < LENGTH_BYTES or data[: len(MAGIC)] != MAGIC:
        raise BadObject("is no object of this package")
    if hashlib.sha256(rest).digest() != data[len(MAGIC) : start]:
        raise BadObject("is truncated or changed: its digest is another")
    end = LENGTH_BYTES + int.from_bytes(rest[:LENGTH_BYTES], "little")
    try:
        header = json.loads(rest[LENGTH_BYTES:end])
        owner, form = header["key"], header["form"]
    except (ValueError, TypeError, KeyError) as error:
        raise BadObject("has no header") from error
    if owner != key:
        raise BadObject(f"is the object of another key, {owner}")
    if form not in EXTENSIONS:
        raise BadObject(f"has an unknown form, {form!r}")
    return Compiled(cast(Form, form), rest[end:]), header


@cache
def _load_runtime() -> ctypes.CDLL:
    """The DSL's runtime library, which kernels then find by its name."""
    return ctypes.CDLL(str(runtime_library()))


def _ffi_library() -> str:
    import tvm_ffi

    return str(tvm_ffi.libinfo.find_libtvm_ffi())
