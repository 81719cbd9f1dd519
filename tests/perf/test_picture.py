"""perf.picture: its numbers are the records' ratios, and what a record cannot say is said in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from perf.cases import Case, Rows, Spread, attention_case, fixed
from perf.picture import BARS_LEFT, BARS_RIGHT, MAX_CASES, default_cases, main, matching_cases, newest_beside_peers, newest_of
from perf.records import read_records
from tests.support.perf_lines import record, write

SVG = "{http://www.w3.org/2000/svg}"
CASE = Case(32, 8, 128, 16, fixed(64, 8192))


def draw(results: Path, cases: str = "", **options: str) -> ElementTree.Element:
    """The picture of `results`, parsed."""
    out = results.with_suffix(".svg")
    main(results, out, cases, **options)
    return ElementTree.parse(out).getroot()


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def shares(svg: ElementTree.Element) -> list[str]:
    return [text for text in texts(svg) if re.fullmatch(r"\d+\.\d%", text)]


def bar_widths(svg: ElementTree.Element) -> list[float]:
    return [float(bar.get("width", "")) for row in svg.iter(f"{SVG}g") for bar in row.iter(f"{SVG}rect")]


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


def test_rates_are_of_the_newest_run_beside_a_peer(tmp_path: Path) -> None:
    """A later run on another machine has no peer, so its rate says less; without any peer the newest time counts."""
    first, other = (attention_case(fixed(1, n), q_len=n, page_size=64) for n in (8192, 4096))
    path = write(tmp_path / "r.jsonl", record(first, "ours", 1000.0), record(first, "fa4", 2000.0), record(other, "ours", 250.0))
    later = {"timestamp": "2026-01-03T00:00:00+00:00"}
    write(path, record(first, "ours", 1250.0, **later), record(other, "ours", 320.0, **later))
    newest = newest_beside_peers(read_records([path])[0])
    assert [newest[case.name]["ours"].us.median for case in (first, other)] == [1000.0, 320.0]
    assert {"1000.0", "2000.0"} < set(texts(draw(path, long=True)))


def test_faster_than_the_plain_read_stays_inside(tmp_path: Path) -> None:
    svg = draw(write(tmp_path / "r.jsonl", record(CASE, "ours", 200.0, 400.0)))
    assert shares(svg) == ["200.0%"] and bar_widths(svg) == [BARS_RIGHT - BARS_LEFT]
    limit = next(line for line in svg.iter(f"{SVG}line") if line.get("class") == "limit")
    assert float(limit.get("x1", "")) == (BARS_LEFT + BARS_RIGHT) / 2


def test_a_run_without_read_is_not_held_against_the_read_of_another(tmp_path: Path) -> None:
    read = record(CASE, "read", 300.0, 300.0, timestamp="2026-01-01T00:00:00+00:00")
    svg = draw(write(tmp_path / "r.jsonl", read, record(CASE, "ours", 400.0), record(CASE, "fa3", 500.0, 400.0)), "*")
    assert shares(svg) == ["80.0%"] and "cute_kernels: no plain read in its run" in texts(svg)


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


def test_a_bad_line_is_reported_and_the_rest_used(tmp_path: Path, capsys) -> None:
    path = write(tmp_path / "r.jsonl", record(CASE, "ours", 500.0, 400.0))
    with path.open("a") as file:
        file.write('{"name": "gqa_pa\n')
    assert shares(draw(path)) == ["80.0%"]
    report = capsys.readouterr().err.splitlines()
    assert len(report) == 1 and report[0].startswith(f"{path}:2: truncated: ")


def test_default_cases_are_the_most_compared(tmp_path: Path) -> None:
    cases = [Case(32, 8, 128, 16, fixed(batch, 1024)) for batch in range(1, MAX_CASES + 4)]
    others = [Case(32, 8, 128, 16, fixed(64, 1024), "f16"), Case(32, 8, 128, 64, fixed(64, 1024))]
    others.append(attention_case(fixed(64, 1024), q_len=4))
    path = write(tmp_path / "r.jsonl", *(record(case, "ours", 500.0, 400.0) for case in (*others, *cases[:-2])))
    write(path, record(cases[-2], "ours", 500.0, 400.0, bar={"metric": "ratio", "limit": 1.3, "met": True}))
    write(path, record(cases[-1], "ours", 500.0, 400.0), record(cases[-1], "fa3", 500.0, 400.0))
    newest = newest_of(read_records([path])[0])
    assert default_cases(newest) == [case.name for case in (*cases[: MAX_CASES - 2], *cases[-2:])]
    assert default_cases({name: newest[name] for name in (case.name for case in others)}) == [others[1].name]


def test_a_picture_of_8_bit_caches(tmp_path: Path) -> None:
    """Those without scales, the same way; a peer that rounds q is named."""
    stored = [replace(CASE, kv_dtype=dtype) for dtype in (None, "e4m3", "e5m2")]
    stored.append(replace(CASE, kv_dtype="int8", kv_scale="token-f16"))
    ours = [record(case, "ours", us, 400.0) for case, us in zip(stored, (500, 625, 1000, 800), strict=True)]
    path = write(tmp_path / "r.jsonl", *ours)
    write(path, record(stored[1], "fa3", 1600.0, 400.0, q_dtype="e4m3"), record(stored[1], "flashinfer-fa2", 800.0, 400.0))
    svg = draw(path, kv_dtype="e4m3")
    assert shares(svg) == ["64.0%", "25.0%", "50.0%"]
    assert "NVIDIA H200, bf16 q, e4m3 KV, pages of 16, rows x KV tokens, heads / KV heads / head_dim" in texts(svg)
    assert [text for text in texts(svg) if "rounds" in text] == ["FlashAttention-3 rounds q to e4m3."]
    assert shares(draw(path)) == ["80.0%"] and shares(draw(path, kv_dtype="e5m2")) == ["40.0%"]
    with pytest.raises(typer.Exit):
        draw(path, kv_dtype="int8")


def test_a_picture_of_long_queries(tmp_path: Path) -> None:
    """Their rates, from the operations of causal attention, without a line of the read; decode and what no peer has stay out."""
    prompts = [attention_case(fixed(1, n), q_len=n, page_size=page) for n, page in ((8192, 64), (4096, 64), (8192, 16))]
    path = write(tmp_path / "r.jsonl", *(record(case, "ours", 1000.0, 40.0) for case in (*prompts, CASE)))
    write(path, record(prompts[0], "fa4", 2000.0), record(prompts[2], "fa4", 2000.0))
    svg = draw(path, long=True)
    tflops = 4 * 32 * 128 * 8192 * 8193 / 2 / 1e9
    ticks = ["200", "400", "600"]
    assert [text for text in texts(svg) if re.fullmatch(r"\d{3}", text)] == [*ticks, f"{tflops:.0f}", f"{tflops / 2:.0f}"]
    assert bar_widths(svg) == pytest.approx([(BARS_RIGHT - BARS_LEFT) * rate / 600 for rate in (tflops, tflops / 2)], abs=0.01)
    assert "TFLOPS" in texts(svg) and not any("read" in text for text in texts(svg))
    assert shares(svg) == []
    with pytest.raises(typer.Exit):
        draw(write(tmp_path / "decode.jsonl", record(CASE, "ours", 500.0, 400.0)), long=True)


def test_chosen_cases_say_what_they_do_not_share(tmp_path: Path) -> None:
    ragged = Case(32, 8, 128, 16, Spread("loguniform", 64, 128, 32768), "bf16", "csr", "NHD")
    long = Case(32, 8, 128, 16, Rows(((1, 131072), (31, 4096))))
    path = write(tmp_path / "r.jsonl", *(record(case, "ours", 500.0, 400.0) for case in (CASE, long, ragged)))
    svg = draw(path, "*loguniform*, *31x4k")
    assert len(shares(svg)) == 2
    assert {"64 x 128-32k", "NHD, CSR, loguniform", "1 x 128k + 31 x 4k"} < set(texts(svg))
    assert texts(svg)[1].startswith("NVIDIA H200, bf16, pages of 16, rows")
    with pytest.raises(ValueError, match="'\\*nothing\\*' matches no recorded case"):
        matching_cases(newest_of(read_records([path])[0]), ["*nothing*"])


def test_labels_stay_left_of_the_bars(tmp_path: Path) -> None:
    """Traits that do not fit one line take several."""
    ragged = Case(32, 8, 128, 16, Spread("loguniform", 64, 128, 32768), kv_dtype="e4m3")
    path = write(tmp_path / "r.jsonl", *(record(case, "ours", 500.0, 400.0) for case in (CASE, ragged)))
    svg = draw(path, "*")
    assert {"bf16 q, e4m3 KV,", "loguniform"} < set(texts(svg))


@pytest.mark.parametrize("records", [[], [record(CASE, "ours", 500.0)], [record(CASE, "read", 400.0, 400.0)]])
def test_nothing_to_draw(tmp_path: Path, capsys, records: list[dict[str, object]]) -> None:
    path = tmp_path / "r.jsonl"
    path.touch()
    with pytest.raises(typer.Exit) as caught:
        draw(write(path, *records))
    assert caught.value.exit_code == 2 and "no case" in capsys.readouterr().err
    assert not path.with_suffix(".svg").exists()


def test_cases_are_in_reading_order(tmp_path: Path) -> None:
    """By batch, then length, whatever the order of the records; the usual heads first."""
    shapes = [(64, 8192, 32), (1, 8192, 32), (64, 1024, 32), (1, 1024, 16), (1, 1024, 32)]
    cases = [Case(heads, 8, 128, 16, fixed(batch, tokens)) for batch, tokens, heads in shapes]
    path = write(tmp_path / "r.jsonl", *(record(case, "ours", 500.0, 400.0) for case in cases))
    found = re.findall(r"(\d+ x \dk) (\d+)/8/128", " ".join(texts(draw(path))))
    assert found == [("1 x 1k", "32"), ("1 x 1k", "16"), ("1 x 8k", "32"), ("64 x 1k", "32"), ("64 x 8k", "32")]


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("_vllm_fa3_C.abi3.so", "FlashAttention-3 as vLLM builds it"),
        ("FA3, sha256 of the .so ef90b693", "FlashAttention-3 build ef90b693"),
        ("vllm 0.26.0's FA3, sha256 of the .so ef90b693", "FlashAttention-3 as built for vLLM 0.26.0"),
        ("flash_attn_3 3.0.0", "FlashAttention-3 flash_attn_3 3.0.0"),
    ],
)
def test_versions_are_names(tmp_path: Path, version: str, shown: str) -> None:
    lines = [record(CASE, "ours", 500.0, 400.0), record(CASE, "fa3", 500.0, 400.0, version=version)]
    said = texts(draw(write(tmp_path / "r.jsonl", *lines)))
    assert any(shown in text for text in said) and not any(".so" in text for text in said)


def test_times_of_several_runs_are_said_to_be(tmp_path: Path) -> None:
    """A peer of an earlier commit: percentages compare, each of its own run's read, and microseconds do not."""
    ours = record(CASE, "ours", 500.0, 400.0)
    for earlier, said in (({}, False), ({"commit": "earlier", "timestamp": "2026-01-01T00:00:00+00:00"}, True)):
        path = write(tmp_path / f"{said}.jsonl", ours, record(CASE, "fa3", 600.0, 400.0, **earlier))
        notes = [text for text in texts(draw(path)) if "compare percentages" in text]
        assert bool(notes) is said and not any(text.endswith("...") for text in notes)


def test_the_axis_has_a_title(tmp_path: Path) -> None:
    prompt = attention_case(fixed(1, 8192), q_len=8192, page_size=64)
    decode = write(tmp_path / "r.jsonl", record(CASE, "ours", 500.0, 400.0))
    assert any("% of that of a plain read" in text for text in texts(draw(decode)))
    long = write(tmp_path / "l.jsonl", record(prompt, "ours", 1000.0), record(prompt, "fa4", 1000.0))
    assert any(text.startswith("TFLOPS, over") for text in texts(draw(long, long=True)))


def test_what_a_provider_runs_over_pages_only_is_not_called_unsupported(tmp_path: Path) -> None:
    case = Case(32, 8, 128, 0, fixed(64, 8192), table_format="none")
    lines = [record(case, "ours", 500.0, 400.0), record(case, "fa3", not_supported="its cache is paged")]
    lines += [record(CASE, who, 500.0, 400.0) for who in ("ours", "fa3")]
    said = texts(draw(write(tmp_path / "r.jsonl", *lines), "*"))
    assert "FlashAttention-3: not measured here: this provider runs it over pages only" in said


def test_bad_requests_are_named_before_anything_is_drawn(tmp_path: Path, capsys) -> None:
    path = write(tmp_path / "r.jsonl", record(CASE, "ours", 500.0, 400.0))
    for options, said in (
        ({"kv_dtype": "foo"}, "kv_dtype: 'foo' is none of bf16, e4m3, e5m2, int8"),
        ({"out": tmp_path / "missing" / "x.svg"}, f"the folder {tmp_path / 'missing'} does not exist"),
        ({"out": Path("/proc/version")}, "OUT: /proc/version: "),
    ):
        with pytest.raises(typer.Exit) as caught:
            main(path, **{"out": tmp_path / "x.svg", "cases": "", **options})
        assert caught.value.exit_code == 2 and said in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["r.jsonl"]
