"""python -m cute_kernels bench: what it counts and computes, and what it says where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import cute_kernels as ck
from cute_kernels.bench import run as bench_run
from cute_kernels.bench.jobs import Bench, Size
from cute_kernels.bench.models import MODELS, Layers, Model, Stored, model_named, tokens_of
from cute_kernels.kv.types import KVDtype

CPU = torch.device("cpu")


def test_bytes_and_operations_of_a_known_shape() -> None:
    """2 requests of 40 keys, 4 heads over 2, 16 columns: counted by hand."""
    model = Model(4, 2, 16, (Layers(3), Layers(2, 8)))
    append, full, sliding, prompt, sliding_prompt = Bench(model, Size(2, 40, 10), 16, None, CPU).jobs()
    assert [job.count for job in (append, full, sliding, prompt, sliding_prompt)] == [5, 3, 2, 3, 2]
    assert append.nbytes == 2 * (2 * 2 * 16 * 2) * 2  # K and V, read and written
    assert full.nbytes == 2 * (2 * 40 * 2 * 16) * 2 + 2 * (2 * 4 * 16) * 2 and full.flops == 2 * 2 * (2 * 4 * 40 * 16)
    assert sliding.nbytes == 2 * (2 * 8 * 2 * 16) * 2 + 2 * (2 * 4 * 16) * 2 and sliding.flops == 2 * 2 * (2 * 4 * 8 * 16)
    assert prompt.flops == 2 * 2 * 4 * 16 * 55 and sliding_prompt.flops == 2 * 2 * 4 * 16 * (8 * 9 // 2 + 2 * 8)
    assert sliding.name == "decode, window 8" and prompt.name == "prompt of 10"


@pytest.mark.parametrize("kv_dtype", [None, KVDtype.E4M3, KVDtype.INT8])
def test_decode_is_over_the_pages_of_its_table(kv_dtype: KVDtype | None) -> None:
    model = Model(4, 2, 16, (Layers(1, 8),), softcap=5.0, sinks=True)
    bench = Bench(model, Size(2, 40, 10), 16, kv_dtype, CPU)
    _, decode, _ = bench.jobs()
    assert len(decode.calls) == bench.sets > 1
    call = decode.calls[1]
    out, _ = call()
    k, v = (
        cache[bench.tables[1].long()].transpose(2, 3).flatten(1, 2)[:, 32:40].double() for cache in (bench.k_cache, bench.v_cache)
    )
    q = call.args[0].double().view(2, 2, 2, 16)
    scores = 5 * torch.tanh(torch.einsum("bhgd,bthd->bhgt", q, k) / 4 / 5)
    sinks = bench.sinks.double().view(1, 2, 2, 1).expand(2, -1, -1, -1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    wanted = torch.einsum("bhgt,bthd->bhgd", weights, v).flatten(1, 2)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=2**-6)


def test_appends_are_at_the_rows_ends() -> None:
    bench = Bench(Model(4, 2, 16, (Layers(1),)), Size(2, 40, 10), 16, None, CPU)
    before = bench.k_cache.clone()
    append = next(bench.jobs())
    append.calls[0]()
    changed = (bench.k_cache != before).any(-1).any(1).nonzero().tolist()
    assert sorted(changed) == sorted([int(row[2]), 7] for row in bench.tables[0])  # the 40th token of pages of 16
    assert torch.equal(bench.k_cache[bench.tables[0][1, 2], :, 7], append.calls[0].args[0][1])


@pytest.mark.parametrize(("text", "tokens"), [("8k", 8192), ("128K", 131072), ("1m", 1 << 20), ("777", 777)])
def test_lengths(text: str, tokens: int) -> None:
    assert tokens_of(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "0", "-1", "8kb", "1.5k", "4000000000"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ck.InvalidArgument, match="context"):
        tokens_of(text)


def test_models() -> None:
    assert model_named("Llama-3-8B") is MODELS["llama-3-8b"]
    with pytest.raises(ck.InvalidArgument, match="gpt-oss-20b"):
        model_named("llama")


def test_what_does_not_fit_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**11))
    with pytest.raises(ck.InvalidArgument, match=r"64 x 8,192 tokens of a layer take 2\.1 GB, and 1\.0 GB are free"):
        Bench(MODELS["llama-3-8b"], Size(64, 8192, 1), 16, None, torch.device("cuda"))


def test_the_command_as_data() -> None:
    """In a folder without perf: the command is in the wheel."""
    asked = ["--model", "gpt-oss-20b", "--batch", "64", "--context", "32", "--json"]
    run = subprocess.run([sys.executable, "-m", "cute_kernels", "bench", *asked], capture_output=True, text=True, check=True)
    data = json.loads(run.stdout)
    assert data["model"] == "gpt-oss-20b" and (data["batch"], data["context"]) == (2, 32)
    assert [job["layers"] for job in data["jobs"]] == [24, 12, 12, 12, 12] and all(job["us"] > 0 for job in data["jobs"])


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (Size(2, 256, 64), "runs on the CPU. The times"),
        (Size(1, 256, 64), "runs on the CPU. The times"),
        (Size(1, 256, 256), "runs on the CPU with a prompt of 64 in place of 256. The times"),
        (Size(1, 8192, 64), "with 1 request of 256 tokens in place of 1 of 8,192. The times"),
    ],
)
def test_only_what_was_reduced_is_said(size: Size, said: str) -> None:
    less = Size(*map(min, vars(size).values(), vars(bench_run.ON_CPU).values()))
    assert said in bench_run._on_cpu(less, size)


def test_what_is_offered_is_served(capsys) -> None:
    for stored in Stored:
        Bench(Model(4, 2, 16, (Layers(1),)), Size(2, 40, 10), 16, stored.eight_bit, CPU).jobs().__next__().calls[0]()


def test_a_cpu_says_what_it_did(monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench_run, "ON_CPU", Size(2, 16, 16))
    monkeypatch.setattr(bench_run, "seconds_of", lambda calls, device, advance: 1e-3)
    bench_run.run_bench("llama-3-8b", 64, 8192, 16, None, False, Console(width=200))
    said = capsys.readouterr().out
    assert "2 requests of 16 tokens in place of 64 of 8,192 and a prompt of 16 in place of 8,192" in said
    assert "not how fast a GPU is" in said
    assert "decode" in said and "1,000.0" in said and "tokens/s" not in said
