"""Long queries in the table, the records, the page and the gate: rates, beside that of the WGMMA loop in the same run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from perf.case_sets import select_cases
from perf.cases import PLAIN, attention_case, fixed
from perf.compare import Controls, control
from perf.dashboard.page import data_of, render
from perf.dashboard.view import GpuView, page_of
from perf.history import Key, Revision, revision
from perf.measure import Outcome, beside_the_floor
from perf.picture import share
from perf.record import case_fields, plain
from perf.records import parse, read_records
from perf.report import cell, summary
from perf.timing import Timing
from tests.support.dashboard_records import PROMPT, make_long_results
from tests.support.perf_lines import record

SHORT = attention_case(fixed(64, 8192), q_len=4)
TFLOP = 4 * 32 * 128 * 8192 * 8193 / 2 / 1e12


def outcomes(case, **us: float) -> dict[str, Outcome]:
    """Those of one run by provider, each with its median."""
    blanks = [Outcome(case, who.replace("_", "-"), "1", strict=False, us=Timing(t, t, t, 15, (t,))) for who, t in us.items()]
    return {outcome.provider: outcome for outcome in beside_the_floor(blanks)}


def test_the_table_has_rates_and_ratios_to_the_limit() -> None:
    found = outcomes(PROMPT, wgmma=800.0, ours=1000.0, fa4=1100.0, ours_plain=12.0)
    assert str(cell(found["ours"])) == f"1000.0 ({TFLOP / 1e-3:.0f} TFLOPS, 1.250)"
    assert str(cell(found["wgmma"])) == f"800.0 ({TFLOP / 8e-4:.0f} TFLOPS, 1.000)"
    assert str(cell(found[PLAIN])) == "12.0", "one query row is no rate of the prompt"
    assert str(cell(outcomes(PROMPT, read=9.0, ours=1000.0)["ours"])) == f"1000.0 ({TFLOP / 1e-3:.0f} TFLOPS)"
    assert str(cell(outcomes(SHORT, wgmma=5.0, read=100.0, ours=105.0)["ours"])) == "105.0 (1.050)"
    assert "ratio to wgmma" in str(summary(list(found.values())).title)


def test_a_record_says_what_its_ratio_is_to() -> None:
    """Records of long queries from before the loop have a ratio to read, which is no limit of theirs."""
    long, short = outcomes(PROMPT, wgmma=800.0, ours=1000.0)["ours"], outcomes(SHORT, read=100.0, ours=105.0)["ours"]
    assert (long.fields()["ratio_to_wgmma"], short.fields()["ratio_to_read"]) == (1.25, 1.05)
    assert "ratio_to_read" not in long.fields() and "ratio_to_wgmma" not in short.fields()
    written = record(PROMPT, "ours", 1000.0) | {"ratio_to_wgmma": 1.25, "ratio_to_read": 70.0}
    found = parse(json.dumps(plain(written)).encode(), Path("h200.jsonl"))
    assert found.ratio == 1.25 and share(found) is None, "no share of a read"
    del written["ratio_to_wgmma"]
    assert parse(json.dumps(plain(written)).encode(), Path("h200.jsonl")).ratio is None
    loop = record(PROMPT, "wgmma", 800.0, 800.0)
    assert "gate" not in loop and case_fields(PROMPT)["name"] == loop["name"]
    assert parse(json.dumps(plain(loop)).encode(), Path("h200.jsonl")).ratio == 1.0


@pytest.fixture(scope="module")
def gpu_and_text(tmp_path_factory: pytest.TempPathFactory) -> tuple[GpuView, str]:
    """A prompt with the loop in its run, and an older one with a read."""
    folder = make_long_results(tmp_path_factory.mktemp("results"))
    page = page_of(*read_records([folder / "h200.jsonl"]))
    assert data_of(page)["nvidia-h200"]["providers"]["wgmma"] == "WGMMA loop"
    return page.gpus[0], render(page, "/* charts */")


def test_the_page_has_the_loops_rate_as_the_limit(gpu_and_text: tuple[GpuView, str]) -> None:
    gpu, text = gpu_and_text
    case = gpu.cases[PROMPT.name]
    assert (case.floor, case.long, case.has_peers) == ("wgmma", True, True)
    rates = {who: result.tflops for who, result in case.results.items() if result.tflops is not None}
    assert rates == pytest.approx({"wgmma": TFLOP / 8e-4, "ours": TFLOP / 1e-3, "fa4": TFLOP / 1.1e-3})
    assert [run.ratio for run in case.history["ours"]] == [None, 1.25]
    assert not {"wgmma", "read"} & set(gpu.providers), "the limit has a column of its own"
    row = re.search(r"<tr data-case.*?</tr>", text, re.S)
    assert row is not None
    cells = {label: re.sub(r"<[^>]*>", " ", cell) for label, cell in re.findall(r'data-label="(.*?)">(.*?)</td>', row[0], re.S)}
    assert f"{TFLOP / 8e-4:.0f} TFLOPS" in cells["limit"] and "800.0" in cells["limit"]
    assert all(part in cells["cute_kernels"] for part in (f"{TFLOP / 1e-3:.0f} TFLOPS", "1.250 of wgmma"))
    assert gpu.best is None, "no case has a ratio to read"
    assert "--heat: 0.5" in text


def runs_of(label: str, loop: float, ours: float, *extra: dict) -> Revision:
    """A revision with six prompts and as many short queries: the loop's time, ours, and a read of 100 us."""
    prompts = [case for case in select_cases(["prefill"]) if case.page_size and not case.kv_dtype][:6]
    shorts = [attention_case(fixed(64, 1024 * i), q_len=4) for i in range(1, 7)]
    lines = [record(case, who, us) for case in prompts for who, us in (("wgmma", loop), ("read", 50.0), ("ours", ours))]
    lines += [record(case, who, us) for case in shorts for who, us in (("read", 100.0), ("ours", 110.0))]
    return revision(label, [parse(json.dumps(plain(line)).encode(), Path("h200.jsonl")) for line in (*lines, *extra)])


def test_the_gate_holds_long_queries_against_the_loop() -> None:
    """The clock fell by 4% from one run to the other, and ours with it."""
    base, new = runs_of("a", 800.0, 1000.0), runs_of("b", 832.0, 1040.0)
    of_long, of_short = control(base, new, floor="wgmma"), control(base, new, floor="read")
    assert (of_long.cases, of_long.drift) == (6, pytest.approx(math.log(1.04))) and of_long.peers == 0
    assert (of_short.cases, of_short.drift) == (6, 0.0)
    key = Key(PROMPT.name, "ours")
    controlled = Controls().of(base, new, key)
    assert controlled.floor == "wgmma"
    assert controlled.changed(math.log(1.04)) == pytest.approx((0.0, 0.0), abs=1e-12)
