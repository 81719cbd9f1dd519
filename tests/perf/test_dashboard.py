"""The dashboard's data and its page, without a browser."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from cute_kernels import cli
from cute_kernels.errors import InvalidArgument, MissingDependency
from perf.dashboard import page as page_module
from perf.dashboard.page import data_of, echarts, render
from perf.dashboard.view import Page, page_of
from perf.record import ROOT
from perf.records import read_records
from tests.support.dashboard_records import (
    CASES,
    EIGHT_BIT,
    LARGE,
    RAGGED,
    SMALL,
    SOFTCAP,
    SPREAD,
    VERIFY,
    make_attention_results,
    make_results,
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = make_results(tmp_path_factory.mktemp("results"))
    return page_of(*read_records(sorted(folder.glob("*.jsonl"))))


@pytest.fixture(scope="module")
def text(page: Page) -> str:
    return render(page, "/* charts */")


def test_cards(page: Page) -> None:
    """The GPU with more cases comes first, whatever its file is called."""
    h200, h100 = page.gpus
    assert (h200.slug, h100.slug) == ("nvidia-h200", "nvidia-h100-80gb-hbm3")
    assert [comparison.verdict for comparison in h200.against_best].count("slower") == 1
    assert next(comparison for comparison in h200.against_best if comparison.verdict == "slower").name == LARGE.name
    assert len(h200.barred) == len(CASES)
    assert [case.name for case in h200.barred if not case.bar_met] == [LARGE.name]
    assert h200.best is not None and ratio(h200.best) == pytest.approx(1.05)
    assert h100.against_best == () and h100.changes == ()
    assert LARGE.name not in h200.missing and "gqa_paged_decode_h28_kv4_d128_ps16_bf16_b1_l1k" in h200.missing


def ratio(case) -> float:
    return case.results["ours"].ratio


def test_the_newest_result_beside_its_peers(page: Page) -> None:
    case = page.gpus[0].cases[LARGE.name]
    assert case.results["ours"].us == pytest.approx(105 * 1.05)
    assert case.results["fa3"].faster == pytest.approx(121 / (105 * 1.05))
    assert case.results["fa3"].error_ratio == pytest.approx(3.0)
    assert case.results["flashinfer-xqa"].reason.startswith("not supported: head_dim 256")
    assert case.host == {"cute_kernels run": 2.5, "FlashAttention-3 plan, device": 3.0}
    assert [run.revision for run in case.history["ours"]] == ["first", "second", "third"]
    assert len(case.results["ours"].samples) == 21 and case.results["ours"].source == "h200.jsonl:27"
    assert [(change.base, change.new, change.verdict) for change in case.changes] == [("second", "third", "slower")]


def test_multiples_are_of_one_run(page: Page, text: str) -> None:
    """Ours took 105 us at the first commit and 5% more at the third: 147 us of the first are 1.40 of ours, not 1.33."""
    found = page.gpus[0].cases[LARGE.name].results
    assert found["flashinfer-fa2"].us == 147.0 and found["flashinfer-fa2"].faster == pytest.approx(1.4)
    assert found["vllm-triton"].us == 200.0 and found["vllm-triton"].faster is None
    (row,) = (
        row for row in re.findall(r"<tr data-case.*?</tr>", text, re.S) if f'data-case="{LARGE.name}"' in row and "147.0" in row
    )
    cells = {label: re.sub(r"<[^>]*>", "", cell) for label, cell in re.findall(r'data-label="(.*?)">(.*?)</td>', row, re.S)}
    assert "1.40\N{MULTIPLICATION SIGN} at first" in cells["FlashInfer fa2"]
    assert "ours not measured in this run" in cells["vLLM Triton"] and "\N{MULTIPLICATION SIGN}" not in cells["vLLM Triton"]
    assert "1.10\N{MULTIPLICATION SIGN}" in cells["FlashAttention-3"] and "at third" not in cells["FlashAttention-3"]


def test_every_multiple_of_the_committed_records_is_of_one_run() -> None:
    records, problems = read_records(sorted((ROOT / "perf" / "results").glob("*.jsonl")))
    by_source = {f"{entry.path.name}:{entry.line}": entry for entry in records}
    ours = {entry.run: entry.us.median for entry in records if (entry.provider, entry.metric) == ("ours", "device") and entry.us}
    count = 0
    for view in page_of(records, problems).gpus:
        for case in view.cases.values():
            for shown in case.results.values():
                run = by_source[shown.source].run
                assert shown.faster == (None if shown.us is None or run not in ours else shown.us / ours[run])
                count += shown.provider not in ("ours", "read", "copy") and shown.faster is not None
    assert count > 100


def test_the_time_in_a_stream_stands_beside_the_device_time(page: Page, text: str) -> None:
    found = page.gpus[0].cases[LARGE.name].results
    assert (found["ours"].in_stream, found["fa3"].in_stream) == (115.0, 138.0)
    assert found["fa3"].in_stream_faster == pytest.approx(1.2)
    assert found["flashinfer-fa2"].in_stream is None
    assert (found["ours"].behind_weights, found["fa3"].behind_weights, found["flashinfer-fa2"].behind_weights) == (
        116.0,
        174.0,
        None,
    )
    assert found["fa3"].behind_weights_faster == pytest.approx(1.5)
    assert "in stream 138.0 (1.20\N{MULTIPLICATION SIGN})" in text and "in stream 115.0</span>" in text


def test_an_eight_bit_cache_is_a_column_of_its_own(page: Page) -> None:
    view = page.gpus[0]
    assert ("bf16 q, e4m3 KV, token-f16 scales", "pages of 16") in view.heat_map.columns
    assert view.cases[EIGHT_BIT].options == ""


def test_every_case_is_once_in_the_heat_map(page: Page) -> None:
    for view in page.gpus:
        cells = [case.name for _, cells in view.heat_map.rows for case in cells if case is not None]
        assert sorted(cells) == sorted(view.cases)
        for shape, row in view.heat_map.rows:
            for column, case in zip(view.heat_map.columns, row, strict=True):
                assert case is None or ((case.rows, case.heads, case.options), (case.dtypes, case.pages)) == (shape, column)


def test_a_case_without_a_plain_read_says_so(page: Page, text: str) -> None:
    assert page.gpus[0].cases[SPREAD.name].results["ours"].ratio is None
    assert "read not measured" in text


def test_bad_lines_are_on_the_page(page: Page, text: str) -> None:
    (problem,) = page.problems
    assert (problem.path.name, problem.line, problem.kind) == ("h200.jsonl", 25, "truncated")
    assert "not used: 1<" in text and "<code>h200.jsonl:25: truncated: not one JSON value" in text
    assert str(problem.path.parent) not in text


def test_the_page_needs_no_network_and_runs_nothing_that_a_record_says(text: str) -> None:
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text) and "@import" not in text
    assert "alert(1)</script>" not in text
    assert "not supported: head_dim 256 &lt;script&gt;" in text


def test_the_data_survive_the_page(page: Page, text: str) -> None:
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found is not None
    assert json.loads(found.group(1)) == json.loads(json.dumps(data_of(page)))
    assert set(json.loads(found.group(1))["nvidia-h200"]["cases"]) == {case.name for case in CASES} | {SPREAD.name, EIGHT_BIT}


def test_every_cell_says_something(text: str) -> None:
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text, re.S)
    assert len(cells) > 50
    assert all(re.sub(r"<[^>]*>", "", cell).strip() for cell in cells)


def test_shapes_that_the_filters_know(page: Page) -> None:
    cases = page.gpus[0].cases
    assert cases[RAGGED.name].ragged and not cases[LARGE.name].ragged
    assert (cases[SMALL.name].rows, cases[SMALL.name].pages, cases[SMALL.name].heads) == ("1 x 1k", "pages of 64", "32/8/128")


def test_no_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependency, match="npm: the dashboard inlines ECharts"):
        echarts(tmp_path)


def test_npm_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)

    def fail(command, **options):
        return page_module.subprocess.CompletedProcess(command, 1, "", "npm error: no package-lock.json\n")

    monkeypatch.setattr(page_module.subprocess, "run", fail)
    with pytest.raises(MissingDependency, match=r"echarts: .* failed with 1: npm error: no package-lock\.json"):
        echarts(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no record of device time in its 0"):
        page_module.build(tmp_path)


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cute_kernels", "dashboard", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(page_module, "echarts", lambda: "/* charts */")
    out = tmp_path / "page.html"
    folder = make_results(tmp_path / "results")
    assert run_cli(monkeypatch, "--out", str(out), "--results", str(folder)) == 0
    printed, err = capfd.readouterr()
    assert "9 cases" in printed and err.startswith(f"{folder}/h200.jsonl:25: truncated: ") and err.count("\n") == 1
    assert out.read_text().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(page_module, "echarts", lambda: "/* charts */")
    out = tmp_path / ("x" * 300 + ".html")
    assert run_cli(monkeypatch, "--out", str(out), "--results", str(make_results(tmp_path / "results"))) == 2
    assert capfd.readouterr().err == f"error: InvalidArgument: --out: {out}: File name too long\n"


def test_the_command_without_a_checkout(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    real = builtins.__import__

    def without_perf(name, *rest):
        if name.startswith("perf"):
            raise ModuleNotFoundError("No module named 'perf'", name="perf")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_perf)
    assert run_cli(monkeypatch) == 2
    assert capfd.readouterr().err.startswith("error: MissingDependency: perf: the dashboard is part of the checkout")


def test_several_query_rows_and_modifiers(tmp_path: Path) -> None:
    """Plain decode of ours is a column, and no peer; a bar is met by the times of its run."""
    records, problems = read_records([make_attention_results(tmp_path) / "h200.jsonl"])
    assert problems == []
    (gpu,) = page_of(records, problems).gpus
    verify, softcap = gpu.cases[VERIFY.name], gpu.cases[SOFTCAP.name]
    assert (verify.options, verify.rows, softcap.options, softcap.dtypes) == ("q4", "64 x 8k", "softcap50", "bf16 q, e4m3 KV")
    assert (verify.bar, verify.bar_met) == ("1.05 x ours-plain, flashinfer-fa2", True)
    assert (softcap.bar, softcap.bar_met) == ("1.05 x ours-plain", None)
    assert verify.has_peers and not softcap.has_peers
    assert (
        verify.results["ours-plain"].faster == pytest.approx(100 / 103) and gpu.providers["ours-plain"][0] == "our plain decode"
    )
    assert VERIFY.name not in gpu.missing and len(verify.results) == 4
    text = render(page_of(records, problems), "/* charts */")
    assert "our plain decode" in text and VERIFY.name in text
