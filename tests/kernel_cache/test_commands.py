"""`python -m cute_kernels compile --out` and `cache`."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_kernels import cli, options
from cute_kernels.api.kernels_of import Beside, specs_of
from cute_kernels.append.descriptor import KVAppendDescriptor
from cute_kernels.append.variants import explain as explain_append
from cute_kernels.attention.attention_descriptor import PagedAttentionDescriptor
from cute_kernels.attention.descriptors import PagedDecodeDescriptor
from cute_kernels.attention.variants import explain
from cute_kernels.compile import kernels as compiler
from cute_kernels.compile.cache import ENVIRONMENT
from cute_kernels.compile.disk import Folder
from cute_kernels.compile.key import key_of
from cute_kernels.compile.operations import Spec
from cute_kernels.config.append import AppendSpec, RotarySpec
from cute_kernels.config.decode import KernelSpec
from cute_kernels.config.merge import MergeSpec
from cute_kernels.kv.rotary import Rotary
from cute_kernels.kv.types import KVDtype
from cute_kernels.merge.descriptor import MergeStatesDescriptor
from cute_kernels.merge.variants import explain as explain_merge
from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.kernel_cache.fakes import code_of

MODEL = ["--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--page-size", "16", "--gpu", "h200"]
MANY = [*MODEL, "--batch", "1", "--batch", "256", "--kv-dtype", "bf16", "--kv-dtype", "e4m3", "--append"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["cute_kernels", *arguments])
        monkeypatch.setattr(cli, "console", cli.Console(highlight=False, soft_wrap=True, width=400))
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """What is compiled, in this process and for nothing."""
    seen: list[Spec] = []

    def object_of(spec: Spec):
        seen.append(spec)
        return code_of(spec)

    monkeypatch.setattr(compiler, "_object_of", object_of)
    return seen


def planned() -> set[Spec]:
    """What plans would choose for MANY."""
    shape = options.Shape(32, 8, 128, 16, options.Scales.none, "dense", 16)
    each = itertools.product((1, 256), (4096,), (options.Dtype.bf16,), (KVDtype.BF16, KVDtype.E4M3))
    return set(specs_of([shape.problem(*problem) for problem in each], PRETEND["h200"], PlanPreference(), Beside(append=True)))


def test_compile_fills_a_folder_that_plans_then_find(run, built: list[Spec], tmp_path: Path) -> None:
    folder = Folder(tmp_path / "model")
    code, out, _ = run("compile", *MANY, "--out", str(folder.path), "--processes", "1")
    expected = planned()
    assert code == 0 and set(built) == expected and len(built) == len(expected)
    assert {type(spec) for spec in expected} == {KernelSpec, AppendSpec} and len(expected) >= 6
    assert {key_of(spec) for spec in expected} == {entry.key for entry in folder.entries() if entry.header}
    assert out.count("compiled: ") == len(expected) and f"{len(expected)} kernels are in {folder.path}" in out
    code, out, _ = run("compile", *MANY, "--out", str(folder.path), "--processes", "1")
    assert code == 0 and len(built) == len(expected) and out.count("was there: ") == len(expected)


def test_merges_are_compiled_beside(run, built: list[Spec], tmp_path: Path) -> None:
    """By the number of states, of the output's dtype: up to 8 are in flight, more come in chunks."""
    counts = ["--merge", "2", "--merge", "5", "--merge", "8", "--merge", "40"]
    code, _, _ = run("compile", *MODEL, *counts, "--out", str(tmp_path / "model"), "--processes", "1")
    decode, *merges = built
    assert code == 0 and isinstance(decode, KernelSpec)
    assert all(isinstance(spec, MergeSpec) and (spec.element_type, spec.head_dim) == ("bf16", 128) for spec in merges)
    assert [(spec.in_flight, spec.chunked) for spec in merges] == [(2, False), (8, False), (8, True)]
    plan = MergeStatesDescriptor(40, 1, 32, 128, torch.bfloat16)
    assert explain_merge(plan, PRETEND["h200"]).chosen.spec == merges[-1]


def test_several_query_rows_are_compiled_for(run, built: list[Spec], tmp_path: Path) -> None:
    """Their kernel, and beside it what appends and merges as many rows: 256 requests of 16."""
    options = ["--batch", "256", "--max-q-len", "16", "--tree-mask", "--sinks", "--append", "--merge", "2"]
    code, _, _ = run("compile", *MODEL, *options, "--out", str(tmp_path / "model"), "--processes", "1")
    described = PagedAttentionDescriptor(
        256, 32, 8, 128, 16, torch.bfloat16, max_q_len=16, max_seq_len=4096, tree_mask=True, sinks=True
    )
    appends = [KVAppendDescriptor(256 * 16, 8, 128, 16, torch.bfloat16, table_format=form) for form in ("none", "dense")]
    merge = MergeStatesDescriptor(2, 256 * 16, 32, 128, torch.bfloat16)
    h200 = PRETEND["h200"]
    choices = [explain(described.problem, h200), *(explain_append(each, h200) for each in appends), explain_merge(merge, h200)]
    assert code == 0 and built == [choice.chosen.spec for choice in choices]
    assert built[0] != explain(replace(described, sinks=False).problem, h200).chosen.spec
    assert built[1] != explain_append(replace(appends[0], num_tokens=256), h200).chosen.spec


def test_fewer_sms_are_compiled_for(run, built: list[Spec], tmp_path: Path) -> None:
    """What plans with such a preference would choose."""
    options = ["--batch", "64", "--seq-len", "32768", "--sm-count", "16"]
    code, _, _ = run("compile", *MODEL, *options, "--out", str(tmp_path / "model"), "--processes", "1")
    problem = PagedDecodeDescriptor(64, 32, 8, 128, 16, torch.bfloat16, max_seq_len=32768).problem
    few, all_of_them = (explain(problem, replace(PRETEND["h200"], sm_count=count)).chosen.spec for count in (16, 132))
    assert code == 0 and built == [few] != [all_of_them]


@pytest.mark.parametrize(("pairing", "plain"), [("half", False), ("interleaved", True)])
def test_appends_with_a_rotary_embedding_are_compiled_beside(
    run, built: list[Spec], tmp_path: Path, pairing: str, plain: bool
) -> None:
    """By slots and by a dense table, of K and q; with --append the plain ones too."""
    options = ["--rotary-dim", "64", "--pairing", pairing, *["--append"][:plain]]
    code, _, _ = run("compile", *MODEL, *options, "--out", str(tmp_path / "model"), "--processes", "1")
    appends = [spec for spec in built if isinstance(spec, AppendSpec)]
    embedding = RotarySpec(half=pairing == "half", rotary_dim=64, queries=True, position_type="i64")
    assert code == 0 and [spec.table_format for spec in appends if spec.rotary == embedding] == ["none", "dense"]
    assert [spec.table_format for spec in appends if spec.rotary is None] == ["none", "dense"] * plain
    assert len(appends) == 2 + 2 * plain
    described = KVAppendDescriptor(1, 8, 128, 16, torch.bfloat16, rotary=Rotary(pairing, 64, num_heads=32))
    assert explain_append(described, PRETEND["h200"]).chosen.spec in appends


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rotary-dim", "63"], "InvalidProblem: --rotary-dim = 63: must be an even int"),
        (["--rotary-dim", "256"], "InvalidProblem: --rotary-dim = 256: must be even and at most --head-dim = 128"),
        (["--merge", "0"], "InvalidProblem: --merge = 0"),
    ],
)
def test_what_no_descriptor_takes_is_one_line(run, built: list[Spec], options: list[str], message: str) -> None:
    code, _, err = run("compile", *MODEL, *options)
    assert code == 2 and err.count("\n") == 1 and err.startswith(f"error: {message}"), err
    assert built == []


def test_a_kernel_that_fails_is_named_and_the_others_are_kept(run, monkeypatch, tmp_path: Path) -> None:
    def object_of(spec: Spec):
        if isinstance(spec, AppendSpec):
            raise RuntimeError("ptxas says no")
        return code_of(spec)

    monkeypatch.setattr(compiler, "_object_of", object_of)
    code, out, _ = run("compile", *MANY, "--out", str(tmp_path / "model"), "--processes", "1")
    kept = [spec for spec in planned() if isinstance(spec, KernelSpec)]
    assert code == 1 and "failed: ptxas says no: append" in out
    assert len(Folder(tmp_path / "model").entries()) == len(kept)


def test_several_processes_compile(run, tmp_path: Path) -> None:
    code, out, _ = run("compile", *MODEL, "--append", "--out", str(tmp_path / "model"), "--processes", "3")
    assert code == 0 and "3 kernels are in" in out
    assert [entry.header["form"] for entry in Folder(tmp_path / "model").entries() if entry.header] == ["shared"] * 3


@pytest.mark.parametrize("mode", [0o777, None])
def test_a_folder_that_cannot_be_used_is_one_line(run, built: list[Spec], tmp_path: Path, mode: int | None) -> None:
    named = tmp_path / "model"
    if mode is None:
        named.write_text("a file")
    else:
        named.mkdir()
        named.chmod(mode)
    for command in (["compile", *MODEL, "--out", str(named)], ["cache", "--folder", str(named)]):
        code, _, err = run(*command)
        assert code == 2 and err.count("\n") == 1
        assert err.startswith(f"error: InvalidArgument: {'--out' if '--out' in command else '--folder'}: {named}: ")
    assert built == []


def test_cache_lists_and_clears(run, built: list[Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "kernels")
    monkeypatch.setenv(ENVIRONMENT, str(folder.path))
    assert run("cache")[1] == f"0 kernels, 0.0 of 512 MiB, in {folder.path} (not made yet)\n"
    run("compile", *MODEL, "--append", "--processes", "1")
    keys = [key_of(spec) for spec in built]
    for age, key in enumerate(keys):
        used = folder.path.stat().st_mtime - 7200 * age
        os.utime(folder.path / f"{key}.kernel", (used, used))
    code, out, _ = run("cache")
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[:-1]] == [key[:12] for key in keys]
    whole = run("cache", "--verbose")[1].splitlines()
    for line, all_of_it, spec, age in zip(lines, whole, built, (" s ago", " 2 hours ago", " 4 hours ago"), strict=False):
        assert line.endswith(cli.short_spec(str(spec))) and age in line and "   5 KB " in line
        assert all_of_it.endswith(str(spec))
    (folder.path / f"{keys[0]}.kernel").write_bytes(b"x" * 100)
    code, out, _ = run("cache")
    assert code == 1 and f"{keys[0][:12]}     0 KB" in out and "damaged" in out
    code, out, _ = run("cache", "--clear")
    assert code == 0 and out.startswith("deleted 3 kernels, ") and folder.entries() == []


def test_without_a_cache_nothing_is_kept(run, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Spec] = []
    monkeypatch.setattr(compiler, "compile_spec", compiled.append)
    code, out, _ = run("compile", *MODEL)
    assert code == 0 and len(compiled) == 1 and "nothing is kept" in out
    assert "there is no cache" in run("cache")[1]
