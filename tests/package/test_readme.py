"""What README promises runs: its Python on the CPU, its commands, its links, and its list of what is Unsupported."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels import cli
from cute_kernels.api.attention import UNSERVED
from cute_kernels.attention.checks import MAX_TOKENS
from cute_kernels.attention.reference import decode_paged
from cute_kernels.compile import kernels as compiler
from cute_kernels.planning.variants import VARIANTS
from tests.conftest import asks_for_gpu_tests

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERF = (ROOT / "docs" / "perf.md").read_text(encoding="utf-8")


def blocks(language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for tongue, block in found if tongue == language]


def commands() -> list[str]:
    lines = (line for block in blocks() for line in block.splitlines())
    return [line.split("#")[0].strip() for line in lines]


def test_its_python_runs_and_is_right(capsys) -> None:
    """The blocks one after the other, as a reader would paste them, on the CPU; the results against f64."""
    torch.manual_seed(0)
    first, second, third = (block.replace('"cuda"', '"cpu"') for block in blocks("python"))
    assert "workspace = plan.new_workspace()" in first and "torch.empty" not in README
    names: dict[str, object] = {}
    exec(first, names)
    assert "cpu_reference" in capsys.readouterr().out
    table = ck.PageTable.dense(names["table"], names["seq_lens"])
    right, right_lse = decode_paged(*(names[n] for n in ("q", "k_cache", "v_cache")), table, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(names["out"].double(), right, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(names["lse"].double(), right_lse, rtol=1e-5, atol=1e-5)
        names["out"] = names["lse"] = None
        exec(second, names)
    several, call = third.split("# the same in one call\n")
    for block in (several, call):
        exec(block, names)
        rows = [names[n] for n in ("q", "k_cache", "v_cache", "table", "seq_lens", "qo_indptr")]
        right = windowed(*rows, left=127)
        assert len(right) > 64, "requests of several rows"
        torch.testing.assert_close(names["out"][: len(right)].double(), right, rtol=2**-8, atol=1e-6)
        names["out"] = names["lse"] = None


def windowed(q, k_cache, v_cache, table, seq_lens, qo_indptr, left: int) -> torch.Tensor:
    """Query row by query row, by PyTorch in f64: each over the keys of its request from `left` before its own position to it."""
    outs = []
    for request, (begin, end) in enumerate(pairwise(qo_indptr.tolist())):
        k, v = (cache[table[request].long()].transpose(1, 2).flatten(0, 1).double() for cache in (k_cache, v_cache))
        for row in range(begin, end):
            position = int(seq_lens[request]) - (end - row)
            seen = slice(max(0, position - left), max(0, position + 1))
            grouped = q[row].double().view(k.shape[1], -1, k.shape[2])
            weights = (torch.einsum("hgd,thd->hgt", grouped, k[seen]) / k.shape[2] ** 0.5).softmax(-1)
            outs.append(torch.einsum("hgt,thd->hgd", weights, v[seen]).flatten(0, 1))
    return torch.stack(outs)


def test_its_commands_exist() -> None:
    """make's targets are the Makefile's, and of Python's modules only the package's is named, with its own commands."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = [command for command in commands() if command]
    assert found and all(c.split()[0] in ("make", "python", "source") for c in found), found
    made = {command.split()[1] for command in found if command.startswith("make")} | set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"demo", "test", "gpu-test"} <= made <= targets
    assert "source .venv/bin/activate" in found, "a plain python does not know the package"
    assert found.index("source .venv/bin/activate") < min(i for i, c in enumerate(found) if c.startswith("python"))


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("python")])
def test_its_commands_run(command: str, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """Each in this process, where the compiler is called and its kernel not built again."""
    python, dash_m, package, *arguments = shlex.split(command)
    assert (python, dash_m, package) == ("python", "-m", "cute_kernels")
    compiled: list[object] = []
    monkeypatch.setattr(compiler, "compile_spec", compiled.append)
    monkeypatch.setattr("sys.argv", ["cute_kernels", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code, capfd.readouterr().err
    assert len(compiled) == (arguments[0] == "compile")


def test_its_links_and_pictures_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert {"docs/h200.svg", "docs/h200-e4m3.svg", "docs/h200-prefill.svg"} <= set(links)
    assert all((ROOT / link).is_file() for link in links), links
    for picture, option in (("h200", ""), ("h200-e4m3", "--kv-dtype e4m3"), ("h200-prefill", "--long")):
        assert re.search(rf"^python -m perf\.picture perf/results/h200\.jsonl docs/{picture}\.svg *{option}", PERF, re.MULTILINE)


def test_it_begins_with_what_it_is_then_pictures_then_demo_and_test() -> None:
    pictures = ("docs/h200.svg", "docs/h200-e4m3.svg", "docs/h200-prefill.svg")
    order = ("# cute_kernels\n\nAttention", *pictures, "make demo", "make test", "## Install")
    places = [README.index(text) for text in order]
    assert places == sorted(places)


def test_what_it_says_is_unsupported_is() -> None:
    """Each name in its list, and every capability; the rest of the list is in tests of their own."""
    section = README[README.index("raises `Unsupported`") : README.index("## Read on")]
    named = set(re.findall(r"`([a-z_]+)", section)) - {"quantize_kv"}
    assert named == set(UNSERVED) - {"window", "window_right", "qo_indptr"}, "window_right is served from 0 on"
    q, cache = torch.zeros(1, 1, 8), torch.zeros(1, 1, 4, 8)
    for name in named:
        with pytest.raises(ck.Unsupported, match=name):
            ck.decode_attention(q, cache, cache, **{name: "top_left"})
    capabilities = {f"{major}.{minor}" for variant in VARIANTS for (major, minor), _ in variant.targets}
    assert set(re.findall(r"\d\.\d\b", section[section.index("capability") :].split(";")[0])) == capabilities
    assert MAX_TOKENS == 2**33 and "2^33 tokens" in section
    with pytest.raises(ck.Unsupported, match="float64"):
        ck.decode_attention(q.double(), cache, cache)


@pytest.mark.parametrize(
    ("expression", "alone"),
    [
        ("gpu and not exclusive", True),
        ("gpu and exclusive", True),
        ("gpu", True),
        ("not gpu", False),
        ("not gpu and not browser", False),
        ("gpu or browser", False),
        ("browser", False),
        ("", False),
    ],
)
def test_which_selections_need_a_gpu(expression: str, alone: bool) -> None:
    assert asks_for_gpu_tests(expression) is alone


def test_gpu_tests_without_a_gpu_are_one_line() -> None:
    """As `make gpu-test` runs them, at once and not test by test."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu and not exclusive", "-q", "-p", "no:cacheprovider", "tests/package"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode and done.stdout.strip() == ""
    assert done.stderr.strip() == "ERROR: the GPU tests need a CUDA device; none is here"


def test_the_first_sentence_names_the_package_everywhere() -> None:
    """pyproject, the command line and the dashboard say what README's first sentence says."""
    subject = "Attention over KV caches"
    assert README.split("\n\n")[1].startswith(f"{subject} for Hopper inference backends")
    assert f'description = "{subject} for Hopper inference backends' in (ROOT / "pyproject.toml").read_text()
    assert str(cli.app.info.help).startswith(f"{subject} for Hopper inference backends")
    assert f"<h1>{subject}</h1>" in (ROOT / "perf" / "dashboard" / "page.html.j2").read_text()


def test_setup_shows_its_progress_and_ends_clearly(tmp_path: Path) -> None:
    """A fresh clone: what would run, pip in sight, and a last line that says how to go on."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "setup"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    (install,) = (line for line in lines if "pip install" in line)
    assert not {"-q", "--quiet"} & set(shlex.split(install)) and "--progress-bar on" in install
    assert lines[0].startswith('echo "make setup: ') and "minutes" in lines[0]
    assert lines[-1] == 'echo "make setup: .venv is ready. To use it: source .venv/bin/activate"'
