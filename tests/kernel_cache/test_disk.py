"""The folder of compiled kernels: what is read is what was written there by this user, whole; all else is refused."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cute_kernels.compile import disk
from cute_kernels.compile.disk import Folder, Untrusted
from cute_kernels.compile.objects import EXTENSIONS, BadObject, Compiled, seal, unseal
from cute_kernels.errors import InvalidArgument
from tests.kernel_cache.fakes import NOBODY, give_away

KEY, OTHER = "ab" * 32, "cd" * 32
CODE = Compiled("shared", bytes(range(256)) * 16)
ABOUT = {"spec": "a kernel", "cuda": 13}
ROOT = os.geteuid() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """With one kernel, under KEY."""
    made = Folder(tmp_path / "new" / "kernels")
    made.write(KEY, CODE, ABOUT)
    return made


def files(folder: Folder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


@pytest.mark.parametrize("form", EXTENSIONS)
def test_what_is_written_is_read(folder: Folder, form) -> None:
    compiled = Compiled(form, b"\0\n{" * 1000)
    folder.write(OTHER, compiled, ABOUT)
    assert folder.read(OTHER) == compiled and folder.read(KEY) == CODE
    assert folder.read("00" * 32) is None
    assert files(folder) == [f"{KEY}.kernel", f"{OTHER}.kernel"]
    assert folder.path.stat().st_mode & 0o7777 == 0o700
    assert {path.stat().st_mode & 0o7777 for path in folder.path.iterdir()} == {0o600}
    assert {entry.key: entry.header["spec"] for entry in folder.entries() if entry.header} == {KEY: "a kernel", OTHER: "a kernel"}


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "none")
    assert folder.read(KEY) is None and folder.entries() == [] and folder.clear() == (0, 0)
    assert not folder.path.exists()


@pytest.mark.parametrize(
    "key", ["", "../" + KEY[3:], "/etc/passwd", KEY.upper(), KEY + "\n", KEY[:-1], KEY + "0", KEY[:-1] + "/"]
)
def test_a_key_is_never_a_path(folder: Folder, key: str) -> None:
    for use in (lambda: folder.read(key), lambda: folder.write(key, CODE, ABOUT)):
        with pytest.raises(InvalidArgument, match="64 hexadecimal digits"):
            use()
    assert files(folder) == [f"{KEY}.kernel"]


def test_every_byte_is_covered() -> None:
    whole = seal(KEY, CODE, ABOUT)
    for at in range(len(whole) - len(CODE.code) + 1):  # all before the code
        with pytest.raises(BadObject):
            unseal(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :], KEY)


def test_a_form_that_is_not_known_is_no_kernel() -> None:
    with pytest.raises(BadObject, match="unknown form"):
        unseal(seal(KEY, Compiled("script", b"x"), ABOUT), KEY)  # type: ignore[arg-type]


def uses(folder: Folder) -> list[Callable[[], object]]:
    return [lambda: folder.read(KEY), lambda: folder.write(KEY, CODE, ABOUT), folder.entries, folder.clear]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(folder: Folder, mode: int) -> None:
    folder.path.chmod(mode)
    for use in uses(folder):
        with pytest.raises(Untrusted, match="nobody but its owner may write"):
            use()
    folder.path.chmod(0o755)
    assert folder.read(KEY) == CODE


def test_a_symbolic_link_is_not_used(folder: Folder, tmp_path: Path) -> None:
    linked = Folder(tmp_path / "link")
    linked.path.symlink_to(folder.path)
    for use in uses(linked):
        with pytest.raises(Untrusted, match="symbolic link"):
            use()
    assert files(folder) == [f"{KEY}.kernel"]


def test_a_folder_of_another_user_is_not_used(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = give_away(folder.path, monkeypatch)
    for use in uses(folder):
        with pytest.raises(Untrusted, match=f"belongs to user {owner}; must belong to user"):
            use()


def test_a_folder_of_root_is_used(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an image has it: whoever may write as root may also change this package."""
    if not ROOT:
        stat = os.fstat
        monkeypatch.setattr(disk.os, "fstat", lambda file: os.stat_result((*stat(file)[:4], 0, *stat(file)[5:])))
    monkeypatch.setattr(disk.os, "geteuid", lambda: NOBODY)
    assert folder.read(KEY) == CODE


def test_a_file_that_another_may_have_written_is_not_read(folder: Folder, tmp_path: Path) -> None:
    path = folder.path / f"{KEY}.kernel"
    path.chmod(0o666)
    with pytest.raises(BadObject, match="mode 666"):
        folder.read(KEY)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadObject, match="symbolic link"):
        folder.read(KEY)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(BadObject, match="no regular file"):
        folder.read(KEY)
    path.unlink()
    if ROOT:
        (tmp_path / "elsewhere").rename(path)
        path.chmod(0o600)
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(BadObject, match=f"belongs to user {NOBODY}"):
            folder.read(KEY)
        folder.write(KEY, CODE, ABOUT)
        assert folder.read(KEY) == CODE


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = len(seal(KEY, CODE, ABOUT))
    folder = Folder(tmp_path / "kernels", max_bytes=4 * size)
    keys = [f"{i:064x}" for i in range(4)]
    for age, key in enumerate(keys):
        folder.write(key, CODE, ABOUT)
        os.utime(folder.path / f"{key}.kernel", (1e9 + age, 1e9 + age))
    assert folder.read(keys[0]) == CODE  # which is a use
    folder.write(KEY, CODE, ABOUT)
    assert {entry.key for entry in folder.entries()} == {keys[0], keys[2], keys[3], KEY}
    assert {entry.key for entry in folder.entries()[:2]} == {keys[0], KEY}
    assert folder.clear() == (4, 4 * size)


def test_clear_deletes_nothing_else(folder: Folder) -> None:
    for name in ("notes.txt", ".hidden", "x.kernel"):
        (folder.path / name).write_text("kept")
    (folder.path / f".tmp-{'0' * 32}").write_text("left by a writer")
    assert folder.clear()[0] == 1
    assert files(folder) == [".hidden", "notes.txt", "x.kernel"]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A write of this process fails behind 1,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_write_that_fails_half_way_leaves_what_was_there(folder: Folder, full_disk: None) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        folder.write(KEY, Compiled("shared", b"new" * 5000), ABOUT)
    assert folder.read(KEY) == CODE
    assert files(folder) == [f"{KEY}.kernel"]


def test_100_kills_during_writes_leave_no_partial_object(tmp_path: Path) -> None:
    """The child's kernels are of one byte value each, so that a mixture would show, and large, so that kills meet the writes."""
    folder, chance = Folder(tmp_path / "kernels"), random.Random(0)
    folder.write(KEY, CODE, ABOUT)
    keys, left, unfinished = [f"{i:064x}" for i in range(4)], 0, 0
    for _ in range(100):
        child = os.fork()
        if not child:
            write_for_ever(folder, keys)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        temporaries = [name for name in files(folder) if name.startswith(".tmp-")]
        unfinished += len(temporaries) > left
        left = len(temporaries)
        for key in keys:
            found = folder.read(key)  # raises BadObject for a partial one
            assert found is None or (len(found.code) == 1 << 20 and len(set(found.code)) == 1)
    assert unfinished >= 10, "kills that met a write"
    for name in files(folder):
        if name.startswith(".tmp-"):
            os.utime(folder.path / name, (1e9, 1e9))
    folder.write(KEY, CODE, ABOUT)
    assert not [name for name in files(folder) if name.startswith(".tmp-")]


def write_for_ever(folder: Folder, keys: list[str]) -> None:
    """In a child, which never returns."""
    try:
        for value in range(256):
            folder.write(keys[value % len(keys)], Compiled("shared", bytes([value]) * (1 << 20)), ABOUT)
    finally:
        os._exit(1)


def test_a_write_of_another_process_is_left_alone(folder: Folder) -> None:
    young = folder.path / f".tmp-{'0' * 32}"
    young.write_bytes(b"half")
    folder.write(OTHER, CODE, ABOUT)
    assert young.exists()


def test_a_lock_is_waited_for_by_key_and_not_for_ever(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_PATIENCE", 0.2)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with folder.locked(KEY):
            os.write(writer, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    waits = {}
    for key in (OTHER, KEY):
        started = time.monotonic()
        with folder.locked(key):
            waits[key] = time.monotonic() - started
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    monkeypatch.setattr(disk, "LOCK_PATIENCE", 60.0)
    started = time.monotonic()
    with folder.locked(KEY):  # a killed process holds nothing
        waits["free"] = time.monotonic() - started
    assert waits[OTHER] < 0.15 and 0.2 <= waits[KEY] < 5 and waits["free"] < 5
