"""Many processes and one folder; and a kernel that is really compiled in one process and loaded in another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.compile import objects
from cute_kernels.compile.disk import Folder
from cute_kernels.compile.kernels import compile_into
from cute_kernels.compile.key import PACKAGE, key_of
from tests.kernel_cache.fakes import MERGE, SPECS, code_of, environment

COLD = PACKAGE.parent / "tests" / "kernel_cache" / "cold.py"
# a first use that could not compile: prints what the kernel says to a call without arguments
FIRST_USE = """
import sys
from tests.kernel_cache.fakes import MERGE
from cute_kernels.compile import kernels
from cute_kernels.compile.operations import Operation
def refuse(operation, spec):
    raise AssertionError(f"compiled: {spec}")
Operation.build = refuse
kernel = kernels.compile_spec(MERGE)
try:
    kernel()
except Exception as error:
    print(error)
print("cutlass" in sys.modules)
"""


def test_64_cold_processes_leave_one_object_a_key(tmp_path: Path) -> None:
    """And compile each once, where the file system has locks."""
    folder, log = Folder(tmp_path / "kernels"), tmp_path / "log"
    command = [sys.executable, str(COLD), str(log)]
    started = [
        subprocess.Popen(command, env=environment(folder.path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(64)
    ]
    done = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * 64, [error for _, error in done if error][:1]
    assert [error for _, error in done if error] == []
    assert sorted(log.read_text().split()) == ["append", "decode", "merge"]
    assert sorted("".join(out for out, _ in done).split()) == ["compiled"] * 3 + ["loaded"] * (64 * 3 - 3)
    assert {entry.key for entry in folder.entries() if entry.header} == {key_of(spec) for spec in SPECS}
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", *sorted(f"{key_of(spec)}.kernel" for spec in SPECS)]
    assert [folder.read(key_of(spec)) for spec in SPECS] == [code_of(spec) for spec in SPECS]


@pytest.mark.parametrize(("form", "imports_the_compiler"), [("shared", False), ("object", True)])
def test_a_real_kernel_is_loaded_by_a_process_that_compiles_nothing(
    form: str, imports_the_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is refused by the compiled code itself, which so proves that it runs. "object": where there is no linker."""
    if form == "object":
        monkeypatch.setattr(objects, "LINKERS", ())
    folder = Folder(tmp_path / "kernels")
    assert list(compile_into(folder, [MERGE], processes=1)) == [(MERGE, "compiled")]
    assert list(compile_into(folder, [MERGE], processes=1)) == [(MERGE, "was there")]
    kept = folder.read(key_of(MERGE))
    assert kept and kept.form == form
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_USE], env=environment(folder.path), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "5 parameters" in done.stdout and "outs: Tensor(" in done.stdout
        assert done.stdout.split()[-1] == str(imports_the_compiler)
        assert done.stderr == ""


@pytest.mark.parametrize("inherited", [None, "one folder", "two folders"])
def test_another_process_imports_this_package_and_what_this_process_can(
    inherited: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where packages come through PYTHONPATH, the compiler does too; the repository stands before them."""
    folders = {None: [], "one folder": ["first"], "two folders": ["first", "second"]}[inherited]
    for name in folders:
        (tmp_path / name / "cute_kernels").mkdir(parents=True)  # one that must not win
        (tmp_path / name / "cute_kernels" / "__init__.py").write_text("")
        (tmp_path / name / f"only_in_{name}.py").write_text("")
    if folders:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(tmp_path / name) for name in folders))
    else:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    wanted = ", ".join(["cute_kernels", *(f"only_in_{name}" for name in folders)])
    program = f"import {wanted}; print(cute_kernels.__file__)"
    command, env = [sys.executable, "-c", program], environment(tmp_path / "kernels")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()) == PACKAGE / "__init__.py"
