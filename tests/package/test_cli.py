"""The command line and the package's surface."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import cute_kernels as ck
from cute_kernels import cli
from cute_kernels.attention.variants import explain
from cute_kernels.planning.variants import PRETEND

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


HEADS = {"batch_size": 64, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
PAGED = {**HEADS, "page_size": 16, "q_dtype": torch.bfloat16, "max_seq_len": 4096}
WHOLE = {**HEADS, "page_size": None, "q_dtype": torch.bfloat16, "max_seq_len": 4096}
SCORES = ["--window-left", "127", "--softcap", "30", "--alibi", "--sinks"]
SCORED = {"window_left": 127, "softcap": 30.0, "alibi": True, "sinks": True}
PLANS = {
    ck.PagedDecodeDescriptor: ck.PagedDecodePlan,
    ck.FlashDecodingDescriptor: ck.FlashDecodingPlan,
    ck.PagedAttentionDescriptor: ck.PagedAttentionPlan,
}
DESCRIBED = [
    ([], ck.PagedDecodeDescriptor(**PAGED)),
    (SCORES, ck.PagedDecodeDescriptor(**PAGED, **SCORED)),
    (["--table", "csr", "--sinks"], ck.PagedDecodeDescriptor(**PAGED, table_format="csr", sinks=True)),
    (
        ["--page-size", "0", *SCORES],
        ck.FlashDecodingDescriptor(**HEADS, seq_len=4096, dtype=torch.bfloat16, alignment_bytes=16, **SCORED),
    ),
    (["--max-q-len", "4"], ck.PagedAttentionDescriptor(**PAGED, max_q_len=4)),
    (["--max-q-len", "4", *SCORES], ck.PagedAttentionDescriptor(**PAGED, max_q_len=4, **SCORED)),
    (
        ["--max-q-len", "9", "--queries", "uniform", "--causal", "top-left", "--table", "csr"],
        ck.PagedAttentionDescriptor(**PAGED, max_q_len=9, query_format="uniform", causal="top_left", table_format="csr"),
    ),
    (
        ["--max-q-len", "4", "--causal", "none", "--window-right", "0"],
        ck.PagedAttentionDescriptor(**PAGED, max_q_len=4, causal=None, window_right=0),
    ),
    (
        ["--max-q-len", "64", "--causal", "bottom-right", "--tree-mask"],
        ck.PagedAttentionDescriptor(**PAGED, max_q_len=64, tree_mask=True),
    ),
    (["--max-q-len", "1", "--queries", "uniform"], ck.PagedAttentionDescriptor(**PAGED, max_q_len=1, query_format="uniform")),
    (["--max-q-len", "4", "--page-size", "0"], ck.PagedAttentionDescriptor(**WHOLE, max_q_len=4, table_format="none")),
    *(
        (
            ["--max-q-len", "4", "--page-size", "0", "--table", table],
            ck.PagedAttentionDescriptor(**WHOLE, max_q_len=4, table_format=table),
        )
        for table in ("lengths", "packed")
    ),
]


@pytest.mark.parametrize(("options", "described"), DESCRIBED, ids=[" ".join(options) or "plain" for options, _ in DESCRIBED])
def test_options_describe_what_plans_do(capfd, monkeypatch, options: list[str], described) -> None:
    code, out, _ = run(capfd, monkeypatch, "explain", *SHAPE, *options, "--gpu", "h200", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(explain(described.problem, PRETEND["h200"]).to_dict()))
    code, out, _ = run(capfd, monkeypatch, "plan", *SHAPE, *options, "--gpu", "cpu", "--json")
    assert code == 0 and json.loads(out)["operation"] == PLANS[type(described)].select(described, "cpu").sku.operation


@pytest.mark.parametrize("rows", [[], ["--max-q-len", "4"]])
def test_the_grid_follows_the_sms(capfd, monkeypatch, rows: list[str]) -> None:
    for count in (8, 16, 64, 132):
        options = ["--gpu", "h200", "--sm-count", str(count), "--json"]
        code, out, _ = run(capfd, monkeypatch, "explain", *SHAPE, *rows, *options)
        data = json.loads(out)
        chosen = data["candidates"][0]
        per_sm = chosen["config"]["ctas_per_sm"]
        assert code == 0 and chosen["verdict"] == "chosen" and f"{count} SMs" in data["device"]
        assert (count - 8) * per_sm < chosen["num_ctas"] <= count * per_sm  # of 8 KV heads, each has as many


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


OF_SEVERAL_ROWS = [
    ["ragged", "--queries", "ragged"],
    ["none", "--causal", "none"],
    ["0", "--window-right", "0"],
    ["True", "--tree-mask", "--page-size", "0"],
]


@pytest.mark.parametrize("as_json", [False, True])
def test_explain_of_what_nothing_serves(capfd, monkeypatch, as_json: bool) -> None:
    """The table, or the data, then one line of error and its exit code. Each reason is said once."""
    code, out, err = run(capfd, monkeypatch, "explain", "--gpu", "h200", "--head-dim", "300", *["--json"][:as_json])
    assert code == 2
    assert err == "error: Unsupported: no variant serves this: the reasons are above\n"
    if as_json:
        assert [candidate["verdict"] for candidate in json.loads(out)["candidates"]] == ["rejected"] * 3
    else:
        assert out.count("rejected") == 3 and out.count("head_dim=300 is outside 1..256") == 2  # of two variants


def test_no_folder_is_made_for_the_dashboard(capfd, monkeypatch, tmp_path) -> None:
    code, _, _ = run(capfd, monkeypatch, "dashboard", "--out", str(tmp_path / "new" / "x.html"))
    assert code == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["explain", "--heads", "31"], ["InvalidProblem: --heads = 31: must be a multiple of --kv-heads = 8"]),
        (["explain", "--seq-len", "0"], ["InvalidProblem: --seq-len = 0: must be an int from 1"]),
        (["explain", "--page-size", "0", "--seq-len", "-1"], ["InvalidProblem: --seq-len = -1"]),
        (["explain", "--alignment", "3"], ["InvalidProblem: --alignment = 3: must be 1, 2, 4, 8, 16 or left out"]),
        (["bench", "--context", "8kb"], ["InvalidArgument: --context: '8kb' is no number of tokens"]),
        (["bench", "--model", "llama"], ["InvalidArgument: --model: 'llama' is not one of"]),
        *(
            (
                ["compile", "--gpu", "h200", "--page-size", "0", *options],
                [f"InvalidArgument: {options[0]}", "--page-size above 0"],
            )
            for options in (["--append"], ["--rotary-dim", "64"])
        ),
        (["compile", "--gpu", "h200", "--out", "/proc/version"], ["InvalidArgument: --out: /proc/version: "]),
        (["dashboard", "--out", "/proc/version"], ["InvalidArgument: --out: /proc/version: "]),
        (["cache", "--folder", "/no/such/folder"], ["InvalidArgument: --folder: /no/such/folder: no such folder"]),
        (["plan", "--gpu", "a100", "--arch", "sm90"], ["Unsupported", "capability 9.0"]),
        (["plan", "--gpu", "h200", "--head-dim", "300"], ["Unsupported", "--head-dim=300"]),
        (["plan", "--gpu", "h200", "--kv-dtype", "f16"], ["Unsupported", "--kv-dtype = f16: must be q's, bf16"]),
        (["plan", "--arch", "sm7"], ["InvalidArgument: --arch: got 'sm7'"]),
        (["plan", "--table", "coo"], ["InvalidProblem: --table = 'coo'"]),
        (
            ["plan", "--page-size", "0", "--table", "csr"],
            ["InvalidProblem: --table = 'csr'", "with --page-size = 0, unless --max-q-len is given"],
        ),
        *(
            (["explain", *options], [f"InvalidArgument: {options[0]}: got {name}", "needs --max-q-len too"])
            for name, *options in OF_SEVERAL_ROWS
        ),
        (["explain", "--max-q-len", "0"], ["InvalidProblem: --max-q-len = 0"]),
        (
            ["explain", "--max-q-len", "4", "--window-right", "1"],
            ['InvalidProblem: --window-right = 1: must be left out beside --causal = "bottom-right"'],
        ),
        (
            ["plan", "--max-q-len", "4", "--tree-mask", "--causal", "none"],
            ["InvalidProblem: --tree-mask = True", '--causal = "bottom-right", got none'],
        ),
        (
            ["compile", "--max-q-len", "4", "--softcap", "0"],
            ["InvalidProblem: --softcap = 0.0: must be a finite number above 0, or left out for no cap"],
        ),
        (["compile", "--window-left", "-1"], ["InvalidProblem: --window-left = -1"]),
        (
            ["plan", "--max-q-len", "4", "--table", "packed"],
            ["InvalidProblem: --page-size = 16: must be 0 beside --table", "packed"],
        ),
        *(
            ([command, "--gpu", "h200", "--sm-count", "133"], ["InvalidArgument: --sm-count: got 133", "at most 132"])
            for command in ("plan", "explain", "compile")
        ),
        (["compile", "--gpu", "cpu"], ["Unsupported", "nothing to compile"]),
        *((command, ["Unsupported", "--head-dim=300 is outside 1..256"]) for command in NO_HEAD_DIM),
        (["demo", "--device", "bogus"], ["InvalidArgument: --device", "'bogus'"]),
        (["demo", "--device", "cuda:77"], ["Unsupported: --device = cuda:77", "CUDA devices"]),
        (["dashboard", "--out", "/no/such/x.html"], ["InvalidArgument: --out: /no/such/x.html", "does not exist"]),
    ],
)
def test_errors_are_one_line(capfd, monkeypatch, arguments: list[str], fragments: list[str]) -> None:
    code, _, err = run(capfd, monkeypatch, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert all(fragment in err for fragment in fragments), err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "--batch", "1.5"], "Invalid value for '--batch': got '1.5', should be a valid integer"),
        (["bench", "--batch", "0"], "Invalid value for '--batch': got '0', should be greater than or equal to 1"),
        (["explain", "--dtype", "f8"], "Invalid value for '--dtype': 'f8' is not one of 'f16', 'bf16', 'f32'"),
        (["bench", "--kv-dtype", "f32"], "Invalid value for '--kv-dtype': 'f32' is not one of 'bf16', 'e4m3', 'e5m2', 'int8'"),
    ],
)
def test_a_usage_error_names_the_value(capfd, monkeypatch, arguments: list[str], said: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, _, err = run(capfd, monkeypatch, *arguments)
    assert code == 2 and said in " ".join(err.split())


def test_a_kernel_is_one_short_line(capfd, monkeypatch, tmp_path) -> None:
    """Or all of its spec, in what compile and cache say."""
    folder = str(tmp_path / "kernels")
    wanted = "attention sm90, bf16, head_dim 128, group 4, pages of 16, dense table, tiles of "
    code, out, _ = run(capfd, monkeypatch, "compile", "--gpu", "h200", "--out", folder)
    assert code == 0 and f"compiled: {wanted}" in out and f"1 kernel is in {folder}" in out and "KernelSpec" not in out
    for options, said in (([], wanted), (["--verbose"], "KernelSpec(source='paged'")):
        code, out, _ = run(capfd, monkeypatch, "cache", "--folder", folder, *options)
        assert code == 0 and said in out and "1 kernel, 0.1 of 512 MiB" in out
    code, out, _ = run(capfd, monkeypatch, "cache", "--folder", folder, "--clear")
    assert code == 0 and out.startswith("deleted 1 kernel, ")
    monkeypatch.setenv("CUTE_KERNELS_CACHE", str(tmp_path / "new"))
    code, out, _ = run(capfd, monkeypatch, "cache")
    assert code == 0 and out == f"0 kernels, 0.0 of 512 MiB, in {tmp_path / 'new'} (not made yet)\n"


SPECS = {
    "AppendSpec(arch='sm90', target='sm_90a', element_type='bf16', k_type='e4m3', v_type='e4m3', k_scale='token f16', "
    "v_scale='token f16', head_dim=128, page_size=16, table_format='dense', slot_type='i32', columns=8, nhd=False, "
    "rotary=RotarySpec(half=True, rotary_dim=128, queries=True, position_type='i64'))": "append sm90, bf16, over e4m3, "
    "scales token f16, head_dim 128, pages of 16, dense table, rotary",
    "MergeSpec(target='sm_90a', element_type='bf16', head_dim=128, columns=2, sinks=True)": "merge sm_90a, bf16, "
    "head_dim 128, sinks",
}


@pytest.mark.parametrize("spec", SPECS)
def test_short_specs(spec: str) -> None:
    assert cli.short_spec(spec) == SPECS[spec]


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
