"""perf.picture: its numbers are the records' ratios, and what a record cannot say is said in words."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from perf.cases import Case, Rows, Spread, fixed
from perf.picture import (
    BARS_LEFT,
    BARS_RIGHT,
    MAX_CASES,
    bars,
    default_cases,
    main,
    matching_cases,
    parse,
    parse_case,
    read_records,
    traits,
)
from perf.record import append, case_fields

SVG = "{http://www.w3.org/2000/svg}"
CASE = Case(32, 8, 128, 16, fixed(64, 8192))


def record(case: Case, provider: str, us: float | None = None, read_us: float | None = None, **more: object) -> dict[str, object]:
    """A record as perf.run writes it; read_us: what `read` took in the same run."""
    times = {} if us is None else {"us": {"median": us, "p20": us, "p80": us, "replays": 21}}
    ratio = {} if us is None or read_us is None else {"ratio_to_read": us / read_us}
    facts = {"schema": 1, "commit": "0123456789abcdef", "dirty": False, "gpu": "NVIDIA H200"}
    facts["timestamp"] = "2026-01-02T03:04:05+00:00"
    return {**case_fields(case), "provider": provider, "version": "1.2", "metric": "device", **times, **ratio, **facts, **more}


def write(path: Path, *records: dict[str, object]) -> Path:
    for entry in records:
        append(path, entry)
    return path


def draw(results: Path, cases: str = "") -> ElementTree.Element:
    """The picture of `results`, parsed."""
    out = results.with_suffix(".svg")
    main(results, out, cases)
    return ElementTree.parse(out).getroot()


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def shares(svg: ElementTree.Element) -> list[str]:
    return [text for text in texts(svg) if re.fullmatch(r"\d+\.\d%", text)]


def bar_widths(svg: ElementTree.Element) -> list[float]:
    return [float(bar.get("width", "")) for row in svg.iter(f"{SVG}g") for bar in row.iter(f"{SVG}rect")]


def test_committed_records_keep_their_cases() -> None:
    """What was recorded of a case is what would be recorded now: cases of 16-bit caches have not changed."""
    lines = (Path(__file__).parents[2] / "perf" / "results" / "h200.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) >= 488
    for entry in found:
        now = json.loads(json.dumps(case_fields(parse_case(entry))))
        assert now == {name: entry[name] for name in now}
        assert now["name"] == parse_case(entry).name


def test_8_bit_cases_are_read_back_and_told_apart() -> None:
    case = Case(32, 8, 128, 16, fixed(64, 8192), kv_dtype="int8", kv_scale="token-f16")
    assert parse_case(json.loads(json.dumps(case_fields(case)))) == case
    assert traits(case) == ("bf16", "int8 cache", "token-f16 scales", "pages of 16")
    assert traits(CASE) == ("bf16", "pages of 16")


def test_numbers_are_the_ratios(tmp_path: Path) -> None:
    svg = draw(
        write(
            tmp_path / "h200.jsonl",
            record(CASE, "sdpa", 800.0, 400.0),
            record(CASE, "read", 400.0, 400.0),
            record(CASE, "ours", 420.0, 400.0),
            record(CASE, "ours", 9.9, metric="host.run"),
        )
    )
    assert shares(svg) == ["95.2%", "50.0%"]  # ours first
    assert {"420.0", "800.0"} < set(texts(svg)) and "9.9" not in texts(svg)
    assert bar_widths(svg) == pytest.approx([(BARS_RIGHT - BARS_LEFT) * share for share in (400 / 420, 0.5)], abs=0.01)
    assert {"64 x 8k", "32/8/128", "plain read of the same bytes"} < set(texts(svg))
    assert any("NVIDIA H200, commit 012345678, 2026-01-02" in text for text in texts(svg))


def test_faster_than_the_plain_read_stays_inside(tmp_path: Path) -> None:
    svg = draw(write(tmp_path / "r.jsonl", record(CASE, "ours", 200.0, 400.0)))
    assert shares(svg) == ["200.0%"] and bar_widths(svg) == [BARS_RIGHT - BARS_LEFT]
    limit = next(line for line in svg.iter(f"{SVG}line") if line.get("class") == "limit")
    assert float(limit.get("x1", "")) == (BARS_LEFT + BARS_RIGHT) / 2


def test_a_run_without_read_is_held_against_the_newest_read(tmp_path: Path) -> None:
    read = [record(CASE, "read", us, us) for us in (100.0, 300.0)]
    assert shares(draw(write(tmp_path / "r.jsonl", *read, record(CASE, "ours", 400.0)))) == ["75.0%"]


@pytest.mark.parametrize("newest_first", [False, True])
def test_newest_record_wins(tmp_path: Path, newest_first: bool) -> None:
    old = record(CASE, "ours", 800.0, 400.0, timestamp="2026-01-01T23:00:00+00:00", commit="older")
    new = record(CASE, "ours", 500.0, 400.0, timestamp="2026-01-02T00:00:00+00:00", dirty=True)
    svg = draw(write(tmp_path / "r.jsonl", *([new, old] if newest_first else [old, new])))
    assert shares(svg) == ["80.0%"]
    assert any("012345678-dirty, 2026-01-02" in text for text in texts(svg))


def test_of_equal_times_the_later_line_wins(tmp_path: Path) -> None:
    twice = [record(CASE, "ours", us, 400.0) for us in (800.0, 500.0)]
    assert shares(draw(write(tmp_path / "r.jsonl", *twice))) == ["80.0%"]


def test_a_newer_failure_is_not_hidden_by_an_older_time(tmp_path: Path) -> None:
    other = Case(32, 8, 128, 16, fixed(1, 8192))
    failure = record(CASE, "fa3", error="RuntimeError: a <b> &\x00c")
    times = [record(CASE, "fa3", 500.0, 400.0), record(other, "fa3", 500.0, 400.0)]
    ours = [record(case, "ours", 500.0, 400.0) for case in (CASE, other)]
    svg = draw(write(tmp_path / "r.jsonl", *times, *ours, failure))
    assert shares(svg) == ["80.0%"] * 3
    assert "FlashAttention-3: failed: RuntimeError: a <b> & c" in texts(svg)


def test_missing_times_are_stated(tmp_path: Path) -> None:
    other = Case(16, 8, 256, 16, fixed(1, 8192))
    svg = draw(
        write(
            tmp_path / "r.jsonl",
            *(record(case, "ours", 500.0, 400.0) for case in (CASE, other)),
            record(CASE, "flashinfer-xqa", 500.0, 400.0),
            record(other, "flashinfer-xqa", not_supported="head_dim 256"),
            record(CASE, "flashinfer-fa2", 500.0, 400.0),
            record(other, "flashinfer-fa2", gate={"error": 1.0, "passed": False, "reason": "error 1.0 is too large"}),
            *(record(case, "fa3", not_supported="flash_attn_interface is not installed") for case in (CASE, other)),
        )
    )
    assert "FlashInfer XQA: not supported: head_dim 256" in texts(svg)
    assert "FlashInfer fa2: wrong result: error 1.0 is too large" in texts(svg)
    assert texts(svg).count("FlashAttention-3: not supported: flash_attn_interface is not installed") == 1
    assert "FlashAttention-3" not in texts(svg)  # no legend for bars that are not there


BAD_LINES = {
    "truncated": '{"name": "gqa_pa',
    "blank": "",
    "not an object": "[1]",
    "not UTF-8": b"\xff",
    "nested beyond reason": "[" * 100_000,
    "foreign": '{"results": []}',
    "another schema": {"schema": 2},
    "no case": {"lengths": None},
    "unknown lengths": {"lengths": {"rule": "Zipf"}},
    "time 0": {"us": {"median": 0}},
    "time NaN": {"us": {"median": float("nan")}},
    "time huge": {"us": {"median": 10**400}},
    "time in words": {"us": "fast"},
    "no time, no reason": {"us": None},
    "no zone": {"timestamp": "2026-01-02T03:04:05"},
    "no provider": {"provider": None},
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_reported_and_the_rest_used(tmp_path: Path, capsys, bad: str | bytes | dict[str, object]) -> None:
    good = json.dumps(record(CASE, "ours", 500.0, 400.0)).encode()
    text = json.dumps(record(CASE, "ours", 100.0, 400.0) | bad) if isinstance(bad, dict) else bad
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join([good, text if isinstance(text, bytes) else text.encode(), good]))
    assert shares(draw(path)) == ["80.0%"]
    report = capsys.readouterr().err.splitlines()
    assert len(report) == 1 and report[0].startswith(f"{path}:2: not a record: ")


def test_default_cases_are_the_most_compared(tmp_path: Path) -> None:
    cases = [Case(32, 8, 128, 16, fixed(batch, 1024)) for batch in range(1, MAX_CASES + 4)]
    others = [Case(32, 8, 128, 16, fixed(64, 1024), "f16"), Case(32, 8, 128, 64, fixed(64, 1024))]
    path = write(tmp_path / "r.jsonl", *(record(case, "ours", 500.0, 400.0) for case in (*others, *cases[:-2])))
    write(path, record(cases[-2], "ours", 500.0, 400.0, bar={"metric": "ratio", "limit": 1.3, "met": True}))
    write(path, record(cases[-1], "ours", 500.0, 400.0), record(cases[-1], "fa3", 500.0, 400.0))
    newest, _ = read_records(path)
    assert default_cases(newest) == [case.name for case in (*cases[: MAX_CASES - 2], *cases[-2:])]
    assert default_cases({name: newest[name] for name in (others[0].name, others[1].name)}) == [others[1].name]


def test_chosen_cases_say_what_they_do_not_share(tmp_path: Path) -> None:
    ragged = Case(32, 8, 128, 16, Spread("loguniform", 64, 128, 32768), "bf16", "csr", "NHD")
    long = Case(32, 8, 128, 16, Rows(((1, 131072), (31, 4096))))
    path = write(tmp_path / "r.jsonl", *(record(case, "ours", 500.0, 400.0) for case in (CASE, long, ragged)))
    svg = draw(path, "*loguniform*, *31x4k")
    assert len(shares(svg)) == 2
    assert {"64 x 128-32k", "NHD, CSR, loguniform", "1 x 128k + 31 x 4k"} < set(texts(svg))
    assert texts(svg)[1].startswith("NVIDIA H200, bf16, pages of 16, rows")
    with pytest.raises(ValueError, match="'\\*nothing\\*' matches no recorded case"):
        matching_cases(read_records(path)[0], ["*nothing*"])


@pytest.mark.parametrize("records", [[], [record(CASE, "ours", 500.0)], [record(CASE, "read", 400.0, 400.0)]])
def test_nothing_to_draw(tmp_path: Path, capsys, records: list[dict[str, object]]) -> None:
    path = tmp_path / "r.jsonl"
    path.touch()
    with pytest.raises(typer.Exit) as caught:
        draw(write(path, *records))
    assert caught.value.exit_code == 2 and "no case" in capsys.readouterr().err
    assert not path.with_suffix(".svg").exists()


@pytest.mark.parametrize(
    "case", [CASE, Case(8, 1, 64, 0, fixed(2, 100), "f16", "none"), Case(8, 1, 64, 1, Spread("uniform", 3, 1, 9))]
)
def test_a_record_gives_its_case_back(case: Case) -> None:
    parsed = parse(json.dumps(record(case, "ours", 1.0, 1.0)).encode())
    assert parsed is not None and asdict(parsed.case) == asdict(case)
    assert bars({"ours": parsed})[0].share == 100
