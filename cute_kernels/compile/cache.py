"""The kernels that this user's processes have compiled, on disk: $CUTE_KERNELS_CACHE, else <user's cache folder>/cute_kernels.

Trouble with the folder costs a compile and one warning. But a folder that CUTE_KERNELS_CACHE names raises InvalidArgument if it
cannot be trusted or read; a folder that is full or cannot be written is no reason to stop.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CuteKernelsError, InvalidArgument
from .disk import Folder, Untrusted
from .key import digest_sources, key_of, known_sources, surroundings
from .objects import BadObject, Compiled, export, load
from .operations import OPERATIONS, Spec

ENVIRONMENT = "CUTE_KERNELS_CACHE"
OFF = ("0", "off")
LOAD_ERRORS = (OSError, RuntimeError, CuteKernelsError)  # a folder for copies that forbids execution, a library that is not there

logger = logging.getLogger("cute_kernels")
_warned: set[Path] = set()  # folders that a warning has been given for


def named_folder() -> str:
    """The folder that CUTE_KERNELS_CACHE names, "" if it names none, or one of OFF."""
    return os.environ.get(ENVIRONMENT, "").strip()


def cache_folder() -> Folder | None:
    """Where kernels are kept; None if CUTE_KERNELS_CACHE is "0" or "off", or if the user has no home."""
    named = named_folder()
    if named.lower() in OFF:
        return None
    if named:
        return Folder(Path(os.path.expanduser(named)).absolute())
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return Folder(base / "cute_kernels") if base.is_absolute() else None


def recall(spec: Spec) -> Any | None:
    """The kernel of `spec` on disk, or None. Raises InvalidArgument for a named folder that cannot be used."""
    folder = cache_folder()
    if folder is None:
        return None
    key = key_of(spec)
    try:
        compiled = folder.read(key)
    except BadObject as error:
        _warn(folder, f"{key} {error}; it is compiled again")
        return None
    except (Untrusted, OSError) as error:
        _refuse(folder, error)
        return None
    try:
        kernel = None if compiled is None else load(compiled)
    except LOAD_ERRORS as error:
        _warn(folder, f"{key} cannot be loaded, so it is compiled: {error}")
        return None
    if kernel is not None:
        logger.info("loaded %s from %s", spec, folder.path)
    return kernel


def keep(spec: Spec, kernel: Any) -> None:
    """Writes a kernel that this process compiled to disk."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        compiled = export(kernel)
    except Exception as error:  # of the DSL or of the linker: the kernel itself is there
        logger.debug("export failed", exc_info=True)
        _warn(folder, f"a kernel cannot be kept: {type(error).__name__}: {error}")
        return
    keep_object(spec, compiled)


def keep_object(spec: Spec, compiled: Compiled) -> None:
    """Writes the object compiled from `spec` to disk. Raises InvalidArgument for a named folder that is not trusted."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        write(folder, spec, compiled)
    except Untrusted as error:
        _refuse(folder, error)
    except OSError as error:
        _warn(folder, f"kernels are not kept: {error.strerror or error}")


def write(folder: Folder, spec: Spec, compiled: Compiled) -> None:
    """Writes an object to `folder`, unless sources have changed since this process read them. Raises Untrusted, OSError."""
    if digest_sources() != known_sources():
        return
    about = {"spec": str(spec), "operation": OPERATIONS[type(spec)].name, **surroundings()}
    folder.write(key_of(spec), compiled, about)


@contextmanager
def alone(spec: Spec) -> Iterator[None]:
    """Waits for another process that compiles `spec`, and lets others wait for this one (Folder.locked)."""
    folder = cache_folder()
    if folder is None:
        yield
        return
    with folder.locked(key_of(spec)):
        yield


def _refuse(folder: Folder, error: Untrusted | OSError) -> None:
    reason = getattr(error, "strerror", None) or str(error)
    if named_folder():
        raise InvalidArgument(ENVIRONMENT, f"{folder.path}: {reason}") from error
    _warn(folder, f"not used: {reason}")


def _warn(folder: Folder, what: str) -> None:
    """Warns of the first trouble with a folder; all later trouble only goes to the log."""
    message, first = f"cache of kernels {folder.path}: {what}", folder.path not in _warned
    _warned.add(folder.path)
    logger.log(logging.WARNING if first else logging.INFO, message)
    if first:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
