"""A folder of compiled kernels, one file each: only a file that this user or root put there, unchanged, is executed.

A folder is used if it is no symbolic link, belongs to this user or root, and nobody else may write to it (one made here has mode
0700). Each operation opens the folder once and does everything else relative to it. A file appears whole, by a rename; readers
check its owner, its digest and the key within. If the folder outgrows its bound, the least recently used files are deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from .objects import BadObject, Compiled, seal, unseal

MAX_BYTES = 512 << 20  # about 5,000 kernels
MAX_OBJECT = 64 << 20
SUFFIX = ".kernel"
KEY = re.compile(r"[0-9a-f]{64}")
TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")
ABANDONED_AFTER = 600.0  # seconds; a write takes milliseconds
LOCK = ".lock"
LOCK_PATIENCE = 60.0  # seconds; a compile takes two to four
LOCK_OFFSETS = 1 << 60
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A folder that is a symbolic link, belongs to another user, or may be written by others."""


@dataclass(frozen=True)
class Entry:
    """A file of the folder. header: as sealed; None if the file is not its key's object. used: seconds since the epoch."""

    key: str
    nbytes: int
    used: float
    header: dict[str, Any] | None


@dataclass(frozen=True)
class Folder:
    """A folder of compiled kernels, which `write` or `locked` creates. max_bytes: the most bytes of all objects."""

    path: Path
    max_bytes: int = MAX_BYTES

    def read(self, key: str) -> Compiled | None:
        """The kernel of a key, or None. Raises Untrusted, OSError, and BadObject for a file that is not the key's object."""
        try:
            with self._opened() as folder:
                return unseal(_content(folder, file_name(key)), key)[0]
        except FileNotFoundError:
            return None

    def write(self, key: str, compiled: Compiled, about: dict[str, Any]) -> None:
        """Writes a kernel, whole or not at all, then deletes old files past max_bytes. Raises Untrusted and OSError."""
        name, data = file_name(key), seal(key, compiled, about)
        with self._opened(make=True) as folder:
            temporary = f".tmp-{secrets.token_hex(16)}"
            try:
                _write_new(folder, temporary, data)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            with suppress(OSError):  # a folder that cannot be synchronised still has the file
                os.fsync(folder)
            self._evict(folder)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Holds a key's lock, after waiting for another process at most LOCK_PATIENCE. No lock if the folder gives none."""
        try:
            with self._opened(make=True) as folder:
                held = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except (OSError, Untrusted):
            yield
            return
        try:
            _lock(held, int(key, 16) % LOCK_OFFSETS)
            yield
        finally:
            os.close(held)  # which unlocks

    def entries(self) -> list[Entry]:
        """All objects, the most recently used first. Raises Untrusted, OSError."""
        found = []
        try:
            with self._opened() as folder:
                for name, status in _files(folder):
                    found.append(Entry(name.removesuffix(SUFFIX), status.st_size, status.st_mtime, _header(folder, name)))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> tuple[int, int]:
        """Deletes all objects, and files that a killed writer left; returns (objects, their bytes). Raises Untrusted, OSError."""
        count = nbytes = 0
        try:
            with self._opened() as folder:
                for name, status in _files(folder):
                    os.unlink(name, dir_fd=folder)
                    count, nbytes = count + 1, nbytes + status.st_size
                _drop_abandoned(folder, before=time.time())
        except FileNotFoundError:
            return 0, 0
        return count, nbytes

    @contextmanager
    def _opened(self, make: bool = False) -> Iterator[int]:
        if make:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
        if self.path.is_symlink():
            raise Untrusted("is a symbolic link; must be the folder itself")
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(os.fstat(folder))
            yield folder
        finally:
            os.close(folder)

    def _evict(self, folder: int) -> None:
        _drop_abandoned(folder, before=time.time() - ABANDONED_AFTER)
        files = sorted(_files(folder), key=lambda file: file[1].st_mtime)
        excess = sum(status.st_size for _, status in files) - self.max_bytes
        for name, status in files:
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            excess -= status.st_size


def file_name(key: str) -> str:
    """The file name of a key. Raises InvalidArgument for anything but 64 hexadecimal digits, such as a path."""
    if not KEY.fullmatch(key):
        raise InvalidArgument("key", f"{key!r}: must be 64 hexadecimal digits")
    return key + SUFFIX


def _check(status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"belongs to user {status.st_uid}; must belong to user {os.geteuid()} or root")
    if status.st_mode & OTHERS_MAY_WRITE:
        raise Untrusted(f"has mode {stat.S_IMODE(status.st_mode):o}; nobody but its owner may write to it")


def _content(folder: int, name: str, touch: bool = True) -> bytes:
    """The bytes of a regular file that no other user can have written, else BadObject. touch: whether this counts as a use."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadObject("is a symbolic link") from error
        raise
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        try:
            _check(status)
        except Untrusted as error:
            raise BadObject(str(error)) from error
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_OBJECT:
            raise BadObject("is no regular file, or too large for a kernel")
        data = opened.read(MAX_OBJECT + 1)
        if touch:
            with suppress(OSError):  # a folder of root is read-only
                os.utime(file)
    return data


def _header(folder: int, name: str) -> dict[str, Any] | None:
    with suppress(OSError, BadObject):
        return unseal(_content(folder, name, touch=False), name.removesuffix(SUFFIX))[1]
    return None


def _write_new(folder: int, name: str, data: bytes) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with os.fdopen(file, "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(file)


def _files(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """The name and status of each file in the folder that is named after a key."""
    for name in os.listdir(folder):
        if name.endswith(SUFFIX) and KEY.fullmatch(name.removesuffix(SUFFIX)):
            with suppress(FileNotFoundError):
                yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


def _drop_abandoned(folder: int, before: float) -> None:
    """Deletes temporary files that killed writers left."""
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            if TEMPORARY.fullmatch(name) and os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < before:
                os.unlink(name, dir_fd=folder)


def _lock(file: int, offset: int) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE
    while not _try_lock(file, offset) and time.monotonic() < deadline:
        time.sleep(0.02)


def _try_lock(file: int, offset: int) -> bool:
    """Whether there is nothing to wait for."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks: several processes may compile one kernel
    return True
