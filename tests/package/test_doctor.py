"""doctor: what each lack is called and how it is cured; a machine without a GPU lacks nothing by that."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cute_kernels import cli, doctor
from cute_kernels.doctor import COMPILERS, NO_DEVICE, Driver, Setup, variants_on
from cute_kernels.planning.variants import PRETEND

ROOT = Path(__file__).parents[2]
VERSIONS = {
    "torch": "2.13.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "cuda-python": "13.4.4",
    "numpy": "2.4.6",
    "packaging": "26.3",
    "typer": "0.29.2",
    "rich": "15.0.0",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
}
GOOD = Setup(VERSIONS, "13.0", Driver((13, 0), release="580.65.06"), (PRETEND["h200"],))


def lacks(**changes: object) -> list[str]:
    return [str(missing) for missing in replace(GOOD, **changes).missing()]


def versions(**changes: str | None) -> dict[str, str | None]:
    return {**VERSIONS, **{name.replace("_", "-"): version for name, version in changes.items()}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpus": (PRETEND["a100"],)},
        {"gpus": (PRETEND["h200"],) * 2},
        {"driver": None, "gpus": (), "torch_cuda": None},
        {"driver": None, "gpus": ()},
        {"driver": Driver((12, 2), NO_DEVICE), "gpus": (), "torch_cuda": None},
        {"versions": versions(nvidia_cutlass_dsl="4.8.0", nvidia_cutlass_dsl_libs_cu13="4.8.0")},
        {"versions": versions(nvidia_cutlass_dsl_libs_cu12=None)},
    ],
)
def test_nothing_is_missing(changes: dict) -> None:
    assert lacks(**changes) == []


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"versions": versions(numpy=None)}, "numpy is not installed", "pip install 'numpy'"),
        ({"versions": versions(torch="2.10.1")}, "torch is 2.10.1, must be >=2.11", "pip install 'torch>=2.11'"),
        (
            {"versions": versions(apache_tvm_ffi="0.2.0")},
            "apache-tvm-ffi is 0.2.0, must be <0.2,>=0.1.11",
            "pip install 'apache-tvm-ffi>=0.1.11,<0.2'",
        ),
        (
            {"versions": versions(nvidia_cutlass_dsl_libs_cu13=None)},
            "nvidia-cutlass-dsl-libs-cu13 is not installed, so that CUDA 12 compiles the kernels",
            "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'",
        ),
        (
            {"versions": versions(nvidia_cutlass_dsl="4.8.0")},
            "nvidia-cutlass-dsl-libs-cu13 is 4.8.1, must be 4.8.0, as nvidia-cutlass-dsl is",
            "pip install 'nvidia-cutlass-dsl[cu13]==4.8.0'",
        ),
        ({"driver": Driver((12, 8), release="570.1")}, "the NVIDIA driver is 570.1, up to CUDA 12.8", "install release 580"),
        ({"torch_cuda": None, "gpus": ()}, "torch is a CPU build beside a GPU", "pip install --force-reinstall torch"),
        ({"gpus": ()}, "torch, built for CUDA 13.0, does not start on the NVIDIA driver", "install a newer driver"),
        ({"driver": Driver((13, 0), 999), "gpus": ()}, "the NVIDIA driver (release unknown", "nvidia-smi"),
        (
            {"gpus": (PRETEND["h200"], replace(PRETEND["h200"], name="NVIDIA B200", capability=(10, 0)))},
            "cuda:1, NVIDIA B200 (capability 10.0, 132 SMs), has no variant",
            "use a GPU of capability 8.x or 9.0",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_missing_and_how_to_get_it(changes: dict, what: str, remedy: str) -> None:
    (missing,) = lacks(**changes)
    assert missing.startswith(what) and remedy in missing.removeprefix(what)


def test_which_compiler_the_dsl_takes() -> None:
    assert GOOD.compiler == 13
    assert replace(GOOD, driver=None).compiler == 13
    assert replace(GOOD, driver=Driver((12, 8))).compiler == 12
    assert replace(GOOD, versions=versions(nvidia_cutlass_dsl_libs_cu13=None)).compiler == 12
    assert replace(GOOD, versions={**VERSIONS, **dict.fromkeys(COMPILERS.values())}).compiler is None


def test_the_compiler_named_is_the_one_that_is_loaded() -> None:
    from cutlass import CUDA_VERSION

    assert Setup.here().compiler == CUDA_VERSION.major


def test_variants() -> None:
    assert variants_on(PRETEND["h200"]) == ["sm90_tma", "sm80_cp_async"]
    assert variants_on(PRETEND["l40s"]) == ["sm80_cp_async"]
    assert variants_on(PRETEND["cpu"]) == ["cpu_reference"]
    assert variants_on(replace(PRETEND["h200"], capability=(12, 0))) == []


def test_requirements_are_those_of_a_plain_install() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed and tuple(re.findall(r'"(.+?)",', listed.group(1))) == doctor.REQUIREMENTS
    assert any(requirement.startswith("nvidia-cutlass-dsl[cu13]") for requirement in doctor.REQUIREMENTS)


def test_a_table_without_entries_says_who_chooses(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(cli, "console", cli.Console(highlight=False, width=200))
    monkeypatch.setattr("sys.argv", ["cute_kernels", "doctor"])
    for entries, said in ([], "0 entries: the cost model chooses"), ([1], "1 entry\n"), ([1, 2], "2 entries\n"):
        monkeypatch.setattr(cli.tuned, "load", lambda path, entries=entries: entries)
        with pytest.raises(SystemExit):
            cli.main()
        assert said in re.sub(" +\n", "\n", capfd.readouterr().out)


@pytest.mark.parametrize("driver", [None, Driver((13, 1), NO_DEVICE, "590.1")])
def test_the_command_exits_with_the_verdict(driver: Driver | None, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(cli, "console", cli.Console(highlight=False, width=200))
    for setup, code in (
        (replace(GOOD, driver=driver, gpus=()), 0),
        (replace(GOOD, driver=driver, gpus=(), versions=versions(numpy=None, nvidia_cutlass_dsl_libs_cu13=None)), 1),
    ):
        monkeypatch.setattr(Setup, "here", classmethod(lambda cls, setup=setup: setup))
        monkeypatch.setattr("sys.argv", ["cute_kernels", "doctor"])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert (caught.value.code or 0) == code
        out, err = capfd.readouterr()
        assert "none: the CPU reference runs" in out and ("nothing is missing" in out) == (code == 0)
        assert [line.split(" is")[0] for line in err.splitlines()] == ([] if code == 0 else MISSING)


MISSING = ["missing: numpy", "missing: nvidia-cutlass-dsl-libs-cu13"]
