"""The command line and the package's surface."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import cute_kernels as ck
from cute_kernels import cli

SHAPE = ["--batch", "64", "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--page-size", "16", "--dtype", "bf16"]


def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line."""
    monkeypatch.setattr(sys, "argv", ["cute_kernels", *arguments])
    monkeypatch.setattr(cli, "console", cli.Console(highlight=False, soft_wrap=True, width=200))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


def test_explain_on_a_pretended_gpu(capfd, monkeypatch) -> None:
    code, out, _ = run(capfd, monkeypatch, "explain", *SHAPE, "--gpu", "h200")
    assert code == 0
    for part in ("heads 32/8", "sm90_tma", "chosen", "sm80_cp_async", "fits", "cpu_reference", "rejected", "NVIDIA H200"):
        assert part in out


def test_explain_as_data(capfd, monkeypatch) -> None:
    code, out, _ = run(capfd, monkeypatch, "explain", *SHAPE, "--gpu", "a100", "--json")
    assert code == 0
    verdicts = {candidate["variant"]: candidate["verdict"] for candidate in json.loads(out)["candidates"]}
    assert verdicts == {"sm90_tma": "rejected", "sm80_cp_async": "chosen", "cpu_reference": "rejected"}


def test_plan_prints_config_and_workspace(capfd, monkeypatch) -> None:
    code, out, _ = run(capfd, monkeypatch, "plan", "--batch", "1", "--seq-len", "131072", "--gpu", "h200")
    assert code == 0
    for part in ("sm90a", "tile_n=", "ctas_per_sm=", "partial_states", "bytes", "accumulator=f32"):
        assert part in out


def test_8_bit_caches(capfd, monkeypatch) -> None:
    code, out, _ = run(capfd, monkeypatch, "explain", *SHAPE, "--gpu", "h200", "--kv-dtype", "int8", "--scales", "token-f16")
    assert code == 0
    for part in ("cache int8, k_scale token f16, v_scale token f16", "sm90_tma", "chosen"):
        assert part in out
    code, out, _ = run(capfd, monkeypatch, "plan", *SHAPE, "--page-size", "0", "--gpu", "h200", "--kv-dtype", "e4m3", "--json")
    assert code == 0
    assert json.loads(out)["kv_dtype"] == "e4m3"


def test_plan_as_data(capfd, monkeypatch) -> None:
    code, out, _ = run(capfd, monkeypatch, "plan", *SHAPE, "--page-size", "0", "--gpu", "h200", "--json")
    assert code == 0
    assert json.loads(out)["operation"] == "flash_decoding"


def test_plan_on_the_cpu(capfd, monkeypatch) -> None:
    code, out, _ = run(capfd, monkeypatch, "plan", *SHAPE, "--gpu", "cpu")
    assert code == 0
    assert "cpu_reference" in out


def test_doctor(capfd, monkeypatch) -> None:
    """Here all is installed, with or without a GPU: tests/package/test_doctor.py has what may be missing."""
    code, out, _ = run(capfd, monkeypatch, "doctor")
    assert code == 0
    for part in (ck.__version__, "torch", "nvidia-cutlass-dsl", "plans/h200.json", "CUDA 13", "nothing is missing"):
        assert part in out


NO_HEAD_DIM = [
    [command, "--gpu", "h200", "--head-dim", "300", "--page-size", page, *more]
    for command, *more in (["plan"], ["plan", "--json"], ["compile"])
    for page in ("16", "0")
]


@pytest.mark.parametrize("as_json", [False, True])
def test_explain_of_what_nothing_serves(capfd, monkeypatch, as_json: bool) -> None:
    """The table, or the data, then one line of error and its exit code."""
    code, out, err = run(capfd, monkeypatch, "explain", "--gpu", "h200", "--head-dim", "300", *["--json"][:as_json])
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("error: Unsupported: sm90_tma: head_dim=300 is outside 1..256")
    if as_json:
        assert [candidate["verdict"] for candidate in json.loads(out)["candidates"]] == ["rejected"] * 3
    else:
        assert out.count("rejected") == 3


def test_no_folder_is_made_for_the_dashboard(capfd, monkeypatch, tmp_path) -> None:
    code, _, _ = run(capfd, monkeypatch, "dashboard", "--out", str(tmp_path / "new" / "x.html"))
    assert code == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["explain", "--heads", "31"], ["InvalidProblem", "num_heads = 31", "multiple of num_kv_heads = 8"]),
        (["plan", "--gpu", "a100", "--arch", "sm90"], ["Unsupported", "capability 9.0"]),
        (["plan", "--gpu", "h200", "--head-dim", "300"], ["Unsupported", "head_dim=300"]),
        (["plan", "--gpu", "h200", "--kv-dtype", "f16"], ["Unsupported", "kv_dtype = f16: must be q's, bf16"]),
        (["plan", "--arch", "sm7"], ["InvalidArgument", "arch", "'sm7'"]),
        (["plan", "--table", "coo"], ["InvalidProblem", "table_format = 'coo'"]),
        (["compile", "--gpu", "cpu"], ["Unsupported", "nothing to compile"]),
        *((command, ["Unsupported", "head_dim=300 is outside 1..256"]) for command in NO_HEAD_DIM),
        (["demo", "--device", "bogus"], ["InvalidArgument", "device", "'bogus'"]),
        (["demo", "--device", "cuda:77"], ["Unsupported", "device = cuda:77", "CUDA devices"]),
        (["dashboard", "--out", "/no/such/x.html"], ["InvalidArgument", "out", "/no/such/x.html", "does not exist"]),
    ],
)
def test_errors_are_one_line(capfd, monkeypatch, arguments: list[str], fragments: list[str]) -> None:
    code, _, err = run(capfd, monkeypatch, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert all(fragment in err for fragment in fragments), err


def test_an_unknown_gpu_is_a_usage_error(capfd, monkeypatch) -> None:
    code, _, err = run(capfd, monkeypatch, "explain", "--gpu", "b300")
    assert code == 2
    assert "b300" in err


def test_importing_the_package_loads_no_compiler() -> None:
    script = (
        "import sys, cute_kernels as ck; assert 'torch' not in sys.modules; [getattr(ck, n) for n in ck.__all__]; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('cutlass', 'tvm_ffi')]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_public_names() -> None:
    for name in ck.__all__:
        assert getattr(ck, name).__name__ == name
    assert set(ck.__all__) <= set(dir(ck))
    with pytest.raises(AttributeError, match="nothing"):
        _ = ck.nothing
