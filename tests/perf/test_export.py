"""perf.export: what other tools read holds the records' numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from perf.cases import Case, fixed
from perf.export import Format, main
from tests.support.dashboard_records import LARGE, line
from tests.support.perf_lines import record, write

CONTIGUOUS = Case(32, 8, 128, 0, fixed(2, 1000), "f16", "none")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    lines = [line(LARGE, "read", 100.0, 100.0, "first"), line(LARGE, "ours", 110.0, 100.0, "first")]
    lines += [line(LARGE, "ours", 105.0, 100.0, "second"), line(LARGE, "fa3", 120.0, 100.0, "second")]
    lines += [record(CONTIGUOUS, "ours", 9.0), record(CONTIGUOUS, "fa3", not_supported="its cache is paged")]
    return write(tmp_path / "h200.jsonl", *lines)


def test_github_action_benchmark(results: Path, capsys) -> None:
    main(results, Format.github, "ours,fa3", None)
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["name"], entry["unit"], entry["value"]) for entry in entries] == [
        (f"{LARGE.name} (ours)", "us", 105.0),
        (f"{LARGE.name} (fa3)", "us", 120.0),
        (f"{CONTIGUOUS.name} (ours)", "us", 9.0),
    ]
    assert entries[0]["range"] == "± 0.315"  # half of 105 * 0.006
    assert entries[0]["extra"] == "NVIDIA H200\nsecond\nours 1.2\n1.0500 of a plain read"


def test_workloads(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "workloads.jsonl"
    main(results, Format.workloads, "ours", out)
    large, contiguous = (json.loads(text) for text in out.read_text().splitlines())
    assert large["definition"] == "gqa_paged_decode_h32_kv8_d128_ps16" and large["workload"] == LARGE.name
    assert large["axes"] == {"batch_size": 64, "num_kv_tokens": 524288, "max_seq_len": 8192, "num_pages": 32768}
    assert (large["latency_ms"], large["read_latency_ms"]) == pytest.approx((0.105, 0.1))
    assert contiguous["definition"] == "gqa_contiguous_decode_h32_kv8_d128"
    assert contiguous["axes"] == {"batch_size": 2, "num_kv_tokens": 2000, "max_seq_len": 1000}
    assert contiguous["read_latency_ms"] is None


def test_nothing_to_export(results: Path, capsys) -> None:
    with results.open("a") as file:
        file.write("{\n")
    with pytest.raises(typer.Exit) as caught:
        main(results, Format.github, "sdpa", None)
    assert caught.value.exit_code == 2
    err = capsys.readouterr().err
    assert f"{results}:7: truncated: " in err and "'sdpa' has no recorded time" in err
