"""The key of a compiled kernel: another for all that changes code, the same for all that does not, in every process."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from cute_kernels.compile import key, toolkit
from cute_kernels.compile.key import FILES, FOLDERS, PACKAGE, canonical, digest_sources, key_of
from tests.kernel_cache.fakes import DECODE, SPECS, others

SOURCES = [
    *(path.relative_to(PACKAGE).as_posix() for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))),
    *FILES,
]
PRINT_KEYS = (
    "import sys; from kernel_cache.fakes import SPECS; from cute_kernels.compile.key import key_of; "
    "print(*(key_of(spec) for spec in SPECS))"
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_each_field_of_a_spec_changes_the_key(spec) -> None:
    changed = others(spec)
    assert len(changed) >= len(fields(spec))
    keys = [key_of(each) for each in (spec, *changed)]
    assert len(set(keys)) == len(keys)


def test_specs_of_two_operations_never_share_a_key() -> None:
    """Their types are in the key, so that equal fields would not do."""
    assert canonical(SPECS[0])["type"] != canonical(SPECS[1])["type"]
    assert len({key_of(spec) for spec in SPECS}) == 3


def test_equal_specs_have_equal_keys_in_every_process() -> None:
    expected = [key_of(spec) for spec in SPECS]
    for seed in ("0", "1", "4242"):
        paths = os.pathsep.join([str(PACKAGE.parent), str(PACKAGE.parent / "tests")])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, "-c", PRINT_KEYS], env=environment, check=True, capture_output=True, text=True)
        assert done.stdout.split() == expected


@pytest.mark.parametrize("value", [1.5, (1, 2), b"x", object()])
def test_what_may_differ_between_processes_is_no_field(value: object) -> None:
    with pytest.raises(TypeError, match="is no field of a spec"):
        canonical(value)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = tmp_path_factory.mktemp("source") / "cute_kernels"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__", "*.npz", "corpus"))
    return copied


@pytest.mark.parametrize("name", SOURCES)
def test_each_device_source_changes_the_key(package: Path, name: str) -> None:
    before, path = digest_sources(package), package / name
    assert before == digest_sources(PACKAGE)
    kept = path.read_bytes()
    try:
        path.write_bytes(kept + b"\n")
        assert digest_sources(package) != before
    finally:
        path.write_bytes(kept)
    assert digest_sources(package) == before


def test_a_new_or_renamed_device_source_changes_the_key(package: Path) -> None:
    before, new = digest_sources(package), package / "device" / "ptx" / "new.py"
    new.write_text("")
    added = digest_sources(package)
    moved = new.rename(package / "device" / "kv" / "new.py")
    try:
        assert len({before, added, digest_sources(package)}) == 3
    finally:
        moved.unlink()


def test_no_host_code_changes_the_key(package: Path) -> None:
    before = digest_sources(package)
    host = [path for path in package.rglob("*.py") if path.relative_to(package).as_posix() not in SOURCES]
    assert len(host) > 50
    for path in host:
        path.write_bytes(path.read_bytes() + b"\n# changed\n")
    assert digest_sources(package) == before


def test_what_device_code_imports_is_in_the_key() -> None:
    missing = []
    for name in SOURCES:
        if name in FILES:
            continue
        module = name.removesuffix(".py").split("/")
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = "/".join([*module[: -node.level], *(node.module or node.names[0].name).split(".")])
                if target.split("/")[0] not in FOLDERS and f"{target}.py" not in FILES:
                    missing.append((name, target))
    assert missing == []


def test_versions_toolkit_host_and_settings_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(DECODE)]
    for name, value in (
        ("_versions", lambda major: {"nvidia-cutlass-dsl": "4.8.0"}),
        ("_versions", lambda major: {"nvidia-cutlass-dsl": "4.8.0", "apache-tvm-ffi": "0.1.11"}),
        ("cuda_major", lambda: 12),
        ("host", lambda: "aarch64"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(key, name, value)
            keys.append(key_of(DECODE))
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    keys.append(key_of(DECODE))
    monkeypatch.setenv("SOME_OTHER_VARIABLE", "1")
    assert len(set(keys)) == len(keys) and key_of(DECODE) == keys[-1]


def test_every_package_of_the_compiler_has_a_version_here() -> None:
    versions = key.surroundings()["versions"]
    assert len(versions) == 5 and all(versions.values()), versions


def test_the_toolkit_is_the_one_that_the_compiler_takes() -> None:
    from cutlass.cute.runtime import find_runtime_libraries

    assert str(toolkit.runtime_library()) == find_runtime_libraries(enable_tvm_ffi=False)[0]


def test_the_host_is_named_by_what_its_code_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    three, four = toolkit.CPU_LEVELS[3], toolkit.CPU_LEVELS[4]
    expected = {frozenset(): "x86_64-v2", frozenset(three): "x86_64-v3", frozenset(three | four): "x86_64-v4"}
    monkeypatch.setattr(toolkit.platform, "machine", lambda: "x86_64")
    for flags, name in {**expected, frozenset(four): "x86_64-v2"}.items():
        monkeypatch.setattr(Path, "read_text", lambda *_, flags=flags, **__: f"vendor_id : x\nflags : {' '.join(flags)}\n")
        assert toolkit.host.__wrapped__() == name
    monkeypatch.setattr(toolkit.platform, "machine", lambda: "aarch64")
    assert toolkit.host.__wrapped__() == "aarch64"
