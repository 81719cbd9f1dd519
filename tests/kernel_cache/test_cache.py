"""Which folder keeps kernels, what is compiled beside it, and what happens where it cannot be used."""

from __future__ import annotations

import errno
import logging
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import cute_kernels as ck
from cute_kernels.compile import cache, disk
from cute_kernels.compile import kernels as compiler
from cute_kernels.compile.cache import ENVIRONMENT, cache_folder
from cute_kernels.compile.key import key_of
from cute_kernels.errors import MissingDependency
from tests.kernel_cache.fakes import APPEND, DECODE, MERGE, SPECS, Compiles, Kernel, code_of, give_away, others
from tests.kernel_cache.mutants import MUTATIONS
from tests.support import harness, inputs


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiles:
    """With the user's cache in tmp_path, and no folder named."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Compiles(monkeypatch)


@pytest.fixture
def default(tmp_path: Path) -> Path:
    return tmp_path / "cute_kernels"


def object_of(folder: Path, spec) -> Path:
    return folder / f"{key_of(spec)}.kernel"


def test_a_second_process_compiles_nothing(compiles: Compiles, default: Path) -> None:
    for spec in SPECS:
        assert isinstance(compiler.compile_spec(spec), Kernel)
    compiles.forget()
    for spec in SPECS:
        assert compiler.compile_spec(spec) == code_of(spec)
        assert compiler.compile_spec(spec) is compiler.compile_spec(spec)
    assert compiles.built == list(SPECS) and compiles.loads == [code_of(spec) for spec in SPECS]
    assert compiler.compiled_specs() == list(SPECS)
    assert len(list(default.glob("*.kernel"))) == 3


def test_an_equal_spec_finds_it_and_another_does_not(compiles: Compiles) -> None:
    compiler.compile_decode(DECODE)
    compiles.forget()
    changed = others(DECODE)
    assert [cache.recall(spec) for spec in changed] == [None] * len(changed)
    assert compiler.compile_decode(replace(DECODE)) == code_of(DECODE)
    assert compiles.built == [DECODE] and compiles.loads == [code_of(DECODE)]


def test_what_a_spec_rejects_is_not_looked_up(compiles: Compiles, default: Path) -> None:
    with pytest.raises(ck.Unsupported, match="columns"):
        compiler.compile_append(replace(APPEND, columns=3))
    assert not default.exists()


@pytest.mark.parametrize("value", ["0", "off"])
def test_it_can_be_switched_off(compiles: Compiles, default: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, value)
    assert cache_folder() is None
    for _ in range(2):
        compiler.compile_merge(MERGE)
        compiles.forget()
    assert compiles.built == [MERGE, MERGE] and not default.exists()


def test_it_can_be_moved(compiles: Compiles, default: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named, place in ((str(tmp_path / "a" / "b"), tmp_path / "a" / "b"), ("~/kernels", tmp_path / "home" / "kernels")):
        compiles.forget()
        monkeypatch.setenv(ENVIRONMENT, named)
        compiler.compile_merge(MERGE)
        assert object_of(place, MERGE).is_file()
    assert not default.exists()
    monkeypatch.setenv(ENVIRONMENT, "")  # names nothing
    monkeypatch.delenv("XDG_CACHE_HOME")
    found = cache_folder()
    assert found and found.path == tmp_path / "home" / ".cache" / "cute_kernels"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_1000_mutated_objects_none_loaded(compiles: Compiles, default: Path, mutate: Callable) -> None:
    compiler.compile_merge(MERGE)
    path, chance = object_of(default, MERGE), random.Random(mutate.__name__)
    whole, count = path.read_bytes(), -(-1000 // len(MUTATIONS))
    for _ in range(count):
        mutant = mutate(whole, chance)
        assert mutant != whole
        path.write_bytes(mutant)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert cache.recall(MERGE) is None
    assert compiles.loads == []
    compiles.forget()
    assert isinstance(compiler.compile_merge(MERGE), Kernel) and path.read_bytes() == whole
    assert cache.recall(MERGE) == code_of(MERGE)


def test_a_damaged_object_is_told_once(compiles: Compiles, default: Path) -> None:
    compiler.compile_merge(MERGE)
    path = object_of(default, MERGE)
    for expected in (1, 0):
        path.write_bytes(b"x")
        compiles.forget()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compiler.compile_merge(MERGE)
        assert len(seen) == expected


@pytest.mark.parametrize("other", [DECODE, APPEND], ids=["decode", "append"])
def test_a_swapped_object_is_not_loaded(compiles: Compiles, default: Path, other) -> None:
    for spec in (MERGE, other):
        compiler.compile_spec(spec)
    object_of(default, other).replace(object_of(default, MERGE))
    compiles.forget()
    with pytest.warns(RuntimeWarning, match="is the object of another key"):
        assert isinstance(compiler.compile_merge(MERGE), Kernel)
    assert compiles.loads == []


@pytest.mark.parametrize("error", [OSError("noexec"), RuntimeError("undefined symbol"), MissingDependency("lib", "get it")])
def test_what_cannot_be_loaded_is_compiled(compiles: Compiles, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(compiled: object) -> None:
        raise error

    compiler.compile_merge(MERGE)
    compiles.forget()
    monkeypatch.setattr(cache, "load", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be loaded, so it is compiled"):
        assert isinstance(compiler.compile_merge(MERGE), Kernel)


def make_writable(path: Path, patch: pytest.MonkeyPatch) -> str:
    path.mkdir()
    path.chmod(0o777)
    return "nobody but its owner may write to it"


def make_link(path: Path, patch: pytest.MonkeyPatch) -> str:
    path.with_name("elsewhere").mkdir()
    path.symlink_to(path.with_name("elsewhere"))
    return "symbolic link"


def make_file(path: Path, patch: pytest.MonkeyPatch) -> str:
    path.write_text("x")
    return os.strerror(errno.ENOTDIR)


def make_foreign(path: Path, patch: pytest.MonkeyPatch) -> str:
    path.mkdir()
    return f"belongs to user {give_away(path, patch)};"


UNUSABLE = pytest.mark.parametrize("make", [make_writable, make_link, make_file, make_foreign], ids=lambda make: make.__name__)


@UNUSABLE
def test_the_users_folder_that_cannot_be_used_costs_compiles_and_one_warning(
    compiles: Compiles, default: Path, make: Callable[..., str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = make(default, monkeypatch)
    with caplog.at_level(logging.WARNING, "cute_kernels"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for spec in (*SPECS, *SPECS):
            assert isinstance(compiler.compile_spec(spec), Kernel)
    assert [rule in str(warning.message) and str(default) in str(warning.message) for warning in seen] == [True]
    assert [rule in message for message in caplog.messages] == [True]
    assert compiles.built == list(SPECS) and not list(default.parent.rglob("*.kernel"))


@UNUSABLE
def test_a_named_folder_that_cannot_be_used_is_a_typed_error(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[..., str]
) -> None:
    named = tmp_path / "named"
    rule = make(named, monkeypatch)
    monkeypatch.setenv(ENVIRONMENT, str(named))
    with pytest.raises(ck.InvalidArgument) as caught:
        compiler.compile_merge(MERGE)
    assert all(part in str(caught.value) for part in (ENVIRONMENT, str(named), rule))
    assert compiles.built == [] and compiler.compiled_specs() == []
    with pytest.raises(ck.InvalidArgument, match="folder"):
        list(compiler.compile_into(disk.Folder(named), [MERGE]))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_costs_one_warning(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default: Path, code: int, named: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if named:
        monkeypatch.setenv(ENVIRONMENT, str(default))
    monkeypatch.setattr(disk, "_write_new", full)
    with pytest.warns(RuntimeWarning, match=f"kernels are not kept: {os.strerror(code)}") as seen:
        got = [compiler.compile_spec(spec) for spec in SPECS]
    assert all(isinstance(kernel, Kernel) for kernel in got)
    assert len(seen) == 1 and compiles.built == list(SPECS) and not list(default.glob("*.kernel"))
    monkeypatch.setattr(compiler, "_object_of", code_of)
    with pytest.raises(ck.InvalidArgument, match=os.strerror(code)):
        list(compiler.compile_into(disk.Folder(default), [MERGE], processes=1))


def test_a_kernel_that_cannot_be_exported_is_used(compiles: Compiles, monkeypatch: pytest.MonkeyPatch, default: Path) -> None:
    def refuse(kernel: object) -> None:
        raise RuntimeError("no linker likes it")

    monkeypatch.setattr(cache, "export", refuse)
    with pytest.warns(RuntimeWarning, match="no linker likes it"):
        assert isinstance(compiler.compile_merge(MERGE), Kernel)
    assert not list(default.glob("*.kernel"))


def test_what_was_compiled_from_other_sources_than_the_key_says_is_not_kept(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, default: Path
) -> None:
    """A file was edited after this process had read it."""
    monkeypatch.setattr(cache, "digest_sources", lambda: "edited")
    compiler.compile_merge(MERGE)
    assert not list(default.glob("*.kernel"))


def test_a_failed_compile_leaves_nothing(compiles: Compiles, monkeypatch: pytest.MonkeyPatch, default: Path) -> None:
    def refuse(operation: object, spec: object) -> None:
        raise RuntimeError("ptxas says no")

    monkeypatch.setattr(compiler.Operation, "build", refuse)
    with pytest.raises(ck.CompileFailed, match="ptxas says no"):
        compiler.compile_merge(MERGE)
    assert not list(default.glob("*.kernel"))


def test_compiling_ahead_takes_what_is_there_and_keeps_the_rest(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, default: Path
) -> None:
    asked: list[object] = []

    def objects_of(specs, processes):
        asked.extend(specs)
        return ((spec, code_of(spec) if spec != APPEND else RuntimeError("no")) for spec in reversed(specs))

    monkeypatch.setattr(compiler, "objects_of", objects_of)
    monkeypatch.setattr(compiler, "load", lambda compiled: compiled)
    compiler.compile_decode(DECODE)
    compiles.forget()
    two = replace(MERGE, lse_base="2")
    assert compiler.compile_ahead([MERGE, DECODE, two, APPEND], processes=2) == 3
    assert asked == [MERGE, two, APPEND]
    compiles.forget()
    assert compiler.compile_ahead([MERGE, DECODE, two], processes=2) == 3
    assert compiles.built == [DECODE] and len(asked) == 3


def test_a_patched_kernel_never_reaches_the_disk(compiles: Compiles, monkeypatch: pytest.MonkeyPatch, default: Path) -> None:
    """What tests plant in device code has the key of the code as it is."""

    class Device:
        function = "real"

    def select(*_: object, **__: object) -> object:
        assert Device.function == "planted"
        return compiler.compile_merge(MERGE)

    monkeypatch.setattr(harness, "select", select)
    compiler.compile_merge(MERGE)
    kept = object_of(default, MERGE).read_bytes()
    for _ in range(2):
        assert isinstance(harness.select_patched(monkeypatch, Device, "function", "planted", inputs.Shape(), "sm90"), Kernel)
    assert compiles.built == [MERGE] * 3 and compiles.loads == []
    assert object_of(default, MERGE).read_bytes() == kept and len(list(default.glob("*.kernel"))) == 1
    assert Device.function == "real"


@pytest.mark.parametrize(("gpu", "patches", "cached"), [(True, False, True), (True, True, False), (False, False, False)])
def test_tests_that_may_patch_device_code_have_no_cache(pytester_run: Callable, gpu: bool, patches: bool, cached: bool) -> None:
    assert pytester_run(gpu, patches) == cached


@pytest.fixture
def pytester_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], bool]:
    """Whether a test with these traits has a cache, by the fixture of tests/conftest.py."""
    (fixture,) = request._fixturemanager.getfixturedefs("cache_of_kernels", request.node)

    def trait(gpu: bool, patches: bool) -> bool:
        class Node:
            @staticmethod
            def get_closest_marker(name: str) -> object:
                return True if gpu else None

        class Request:
            node = Node
            fixturenames = ("tmp_path", *["monkeypatch"][:patches])

        monkeypatch.delenv(ENVIRONMENT, raising=False)
        running = fixture.func(Request)
        next(running)
        found = cache_folder() is not None
        next(running, None)
        return found

    return trait
