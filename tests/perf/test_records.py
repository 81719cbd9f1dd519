"""perf.records: a line is a record that counts, or a problem with file and line; nothing is dropped silently."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from perf.cases import Case, Rows, Spread, append_case, fixed
from perf.correctness import OURS, Tolerance
from perf.dashboard.view import page_of
from perf.export import Format, export
from perf.record import ROOT, case_fields
from perf.records import parse, parse_case, read_records
from tests.support.perf_lines import GATE, record, write

CASE = Case(32, 8, 128, 16, fixed(64, 8192))
SCALED = Case(32, 8, 128, 16, fixed(64, 8192), kv_dtype="int8", kv_scale="token-f16")

BAD_LINES = {
    "truncated": ("truncated", '{"name": "gqa_pa'),
    "blank": ("truncated", ""),
    "not UTF-8": ("truncated", b"\xff"),
    "nested beyond reason": ("truncated", "[" * 100_000),
    "not an object": ("foreign", "[1]"),
    "foreign": ("foreign", '{"results": []}'),
    "another schema": ("foreign", {"schema": 2}),
    "no case": ("malformed", {"lengths": None}),
    "unknown lengths": ("malformed", {"lengths": {"rule": "Zipf"}}),
    "time 0": ("malformed", {"us": {"median": 0, "p20": 1, "p80": 1, "replays": 21}}),
    "time NaN": ("malformed", {"us": {"median": float("nan"), "p20": 1, "p80": 1, "replays": 21}}),
    "time huge": ("malformed", {"us": {"median": 10**400, "p20": 1, "p80": 1, "replays": 21}}),
    "time in words": ("malformed", {"us": "fast"}),
    "a sample below 0": ("malformed", {"us": {"median": 1, "p20": 1, "p80": 1, "replays": 21, "samples": [-1]}}),
    "no time, no reason": ("malformed", {"us": None}),
    "no zone": ("malformed", {"timestamp": "2026-01-02T03:04:05"}),
    "no provider": ("malformed", {"provider": None}),
    "no gate": ("no gate", {"gate": None}),
    "a time in a stream without a gate": ("no gate", {"metric": "in_stream", "gate": None}),
    "a failed gate and a time": ("no gate", {"gate": GATE | {"passed": False}}),
    "a gate that does not say": ("malformed", {"gate": {"error": 1.0}}),
    "no GPU": ("unknown GPU", {"gpu": None}),
    "a GPU without a model": ("unknown GPU", {"gpu": "Graphics Device"}),
    "another file's GPU": ("unknown GPU", {"gpu": "NVIDIA H100 80GB HBM3"}),
}


@pytest.mark.parametrize(("kind", "bad"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_reported_and_the_rest_used(tmp_path: Path, kind: str, bad: str | bytes | dict[str, object]) -> None:
    good = [json.dumps(record(CASE, provider, 500.0, 400.0)).encode() for provider in ("ours", "fa3")]
    text = json.dumps(record(CASE, "ours", 100.0, 400.0) | bad) if isinstance(bad, dict) else bad
    path = tmp_path / "h200.jsonl"
    path.write_bytes(b"\n".join([good[0], text if isinstance(text, bytes) else text.encode(), good[1]]))
    records, problems = read_records([path])
    assert [(entry.provider, entry.us and entry.us.median) for entry in records] == [("ours", 500.0), ("fa3", 500.0)]
    assert [(problem.path, problem.line, problem.kind) for problem in problems] == [(path, 2, kind)]
    assert str(problems[0]).startswith(f"{path}:2: {kind}: ") and len(str(problems[0])) < 400


def test_a_run_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "h200.jsonl", *(record(CASE, "ours", us) for us in (500.0, 600.0)), record(CASE, "read", 1.0))
    other = write(tmp_path / "merged.jsonl", record(CASE, "ours", 500.0, commit="other"), record(CASE, "read", 1.0))
    records, problems = read_records([path, other])
    assert [(entry.provider, entry.us and entry.us.median) for entry in records] == [
        ("ours", 600.0),
        ("ours", 500.0),
        ("read", 1.0),
    ]
    assert [str(problem) for problem in problems] == [
        f"{path}:1: duplicate: the same run again in {path}:2",
        f"{path}:3: duplicate: the same run again in {other}:2",
    ]


def test_times_that_need_no_gate(tmp_path: Path) -> None:
    lines = [record(CASE, "read", 400.0), record(CASE, "ours", 4.0, metric="host.run", gate=None)]
    assert read_records([write(tmp_path / "h200.jsonl", *lines)])[1] == []


def test_gates_of_older_and_newer_records(tmp_path: Path) -> None:
    """The older rule bounds elements of a row; what was recorded of it stays."""
    older = GATE | {"relative_error": 1e-3, "tolerance": {"factor": 4.0, "ulps": 8, "relative": 0.1}}
    newer = GATE | {"used": 0.25, "tolerance": asdict(OURS)}
    lines = [record(CASE, "fa3", 1.0, gate=older), record(CASE, "ours", 1.0, gate=newer), record(CASE, "sdpa", 1.0)]
    records, problems = read_records([write(tmp_path / "h200.jsonl", *lines)])
    assert not problems
    gates = [entry.gate for entry in records]
    assert gates[0].tolerance == Tolerance(math.inf, 0, 4.0, 8, 0.1) and gates[0].relative_error == 1e-3
    assert (gates[0].used, gates[1].used, gates[2].used) == (None, 0.25, None)
    assert gates[1].tolerance == OURS and gates[2].tolerance is None


def test_what_a_run_is(tmp_path: Path) -> None:
    """Records of one run share the device, the state of the checkout, the case and the time."""
    fields = {"machine": {"id": "abc"}}
    lines = [record(CASE, "ours", 1.0, **fields), record(CASE, "fa3", 1.0, **fields), record(CASE, "read", 1.0, **fields)]
    others = [{"timestamp": "2026-01-02T03:04:06+00:00"}, {"commit": "f" * 16}, {"dirty": True}, {"machine": {"id": "def"}}]
    lines += [record(CASE, f"peer {index}", 1.0, **fields | other) for index, other in enumerate(others)]
    lines.append(record(SCALED, "fa3", 1.0, **fields))
    records, problems = read_records([write(tmp_path / "h200.jsonl", *lines)])
    assert not problems and len(records) == 8
    assert len({entry.run for entry in records[:3]}) == 1 and len({entry.run for entry in records}) == 6
    assert [entry.machine for entry in records[-3:]] == ["abc", "def", "abc"]
    assert read_records([write(tmp_path / "older.jsonl", record(CASE, "ours", 1.0))])[0][0].machine is None


def test_why_there_is_no_time(tmp_path: Path) -> None:
    lines = [
        record(CASE, "fa3", not_supported="head_dim 256"),
        record(CASE, "sdpa", error="RuntimeError: no"),
        record(CASE, "ours", gate=GATE | {"passed": False, "reason": "error 1 exceeds 0.1"}),
    ]
    records, problems = read_records([write(tmp_path / "h200.jsonl", *lines)])
    assert not problems
    reasons = ["not supported: head_dim 256", "failed: RuntimeError: no", "wrong result: error 1 exceeds 0.1"]
    assert [entry.reason for entry in records] == reasons


@pytest.mark.parametrize(
    "case", [CASE, Case(8, 1, 64, 0, fixed(2, 100), "f16", "none"), Case(8, 1, 64, 1, Spread("uniform", 3, 1, 9))]
)
def test_a_record_gives_its_case_back(case: Case) -> None:
    assert asdict(parse(json.dumps(record(case, "ours", 1.0, 1.0)).encode()).case) == asdict(case)


def test_a_field_that_older_records_lack_takes_its_default() -> None:
    line = record(CASE, "ours", 1.0)
    del line["layout"]
    assert parse(json.dumps(line).encode()).case == CASE


def test_words_for_a_case() -> None:
    ragged = Case(32, 8, 128, 16, Spread("loguniform", 64, 128, 32768), "bf16", "csr", "NHD")
    mixed = Case(32, 8, 128, 0, Rows(((1, 131072), (31, 4096))), "f16", "none")
    first, second, third = (
        parse(json.dumps(record(case, "ours", 1.0, **more)).encode()) for case, more in ((ragged, {}), (mixed, {}), (SCALED, {}))
    )
    assert (first.rows, first.traits) == ("64 x 128-32k", ("bf16", "pages of 16", "NHD", "CSR", "loguniform"))
    assert (second.rows, second.heads, second.traits) == ("1 x 128k + 31 x 4k", "32/8/128", ("f16", "contiguous"))
    assert third.traits == ("bf16 q, int8 KV, token-f16 scales", "pages of 16")
    assert third.case == SCALED
    assert (first.kv_dtype, first.k_scale, first.v_scale) == ("bf16", "none", "none")


def test_the_committed_records_are_all_used() -> None:
    paths = sorted((ROOT / "perf" / "results").glob("*.jsonl"))
    records, problems = read_records(paths)
    assert problems == []
    assert len(records) == sum(len(path.read_bytes().splitlines()) for path in paths) > 400
    assert Counter(entry.metric for entry in records)["device"] > 400


def test_committed_records_keep_their_cases() -> None:
    """What was recorded of a case is what would be recorded now: cases of 16-bit caches have not changed."""
    lines = (ROOT / "perf/results/h200.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) >= 488
    for entry in found:
        now = json.loads(json.dumps(case_fields(parse_case(entry))))
        assert now == {name: entry[name] for name in now}
        assert now["name"] == parse_case(entry).name


def test_an_append_is_read_back_with_its_floor(tmp_path: Path) -> None:
    """Its copy needs no gate, as a plain read; its ratio is to that copy; its rows say what it is."""
    case = append_case(8192, kv_dtype="int8", kv_scale="token-f16", layout="NHD")
    lines = [record(case, "ours", 20.0, 18.0), record(case, "copy", 18.0, gate=None)]
    records, problems = read_records([write(tmp_path / "h200.jsonl", *lines)])
    assert problems == [] and [entry.case for entry in records] == [case, case]
    ours = records[0]
    assert ours.name == "kv_append_kv8_d128_ps16_bf16_kvint8_token-f16_nhd_t8k" and ours.ratio == pytest.approx(20 / 18)
    assert (ours.rows, ours.heads, ours.dtypes) == ("append 8k", "8/8/128", "bf16, int8 KV, token-f16 scales")
    assert "NHD" in ours.options
    (gpu,) = page_of(records, []).gpus
    shown = gpu.cases[case.name].results
    assert shown["ours"].ratio == pytest.approx(20 / 18) and not gpu.cases[case.name].ragged
    assert json.loads(export(records, ["ours"], Format.workloads))["read_latency_ms"] == pytest.approx(0.018)
