"""A small folder of results with everything that the dashboard must show, for tests of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from perf.attention_cases import FEW_ROWS_BAR
from perf.cases import PLAIN, READ, WGMMA, Bar, Case, Rows, Spread, attention_case, fixed
from tests.support.perf_lines import GATE, record, write

LARGE = Case(32, 8, 128, 16, fixed(64, 8192))
SMALL = Case(32, 8, 128, 64, fixed(1, 1024))
RAGGED = Case(8, 1, 128, 16, Rows(((1, 131072), (31, 4096))))
HALF = Case(32, 8, 128, 16, fixed(64, 8192), "f16")
QUANTISED = replace(LARGE, kv_dtype="e4m3", kv_scale="token-f16")
EIGHT_BIT = QUANTISED.name
SPREAD = Case(8, 1, 128, 16, Spread("uniform", 64, 1, 8192))
VERIFY = attention_case(fixed(64, 8192), q_len=4)
SOFTCAP = attention_case(fixed(64, 8192), softcap=50.0, kv_dtype="e4m3")
PROMPT = attention_case(fixed(1, 8192), q_len=8192)
CASES = (LARGE, SMALL, RAGGED, HALF, replace(LARGE, num_kv_heads=4), replace(LARGE, num_heads=64))
TIMES = {"first": "2026-01-01T00:00:00+00:00", "second": "2026-01-02T00:00:00+00:00", "third": "2026-01-03T00:00:00+00:00"}
LATER = "2026-01-03T01:00:00+00:00"  # another run of the third commit
SCRIPT = "head_dim 256 <script>alert(1)</script>"


def line(case: Case, provider: str, us: float, read_us: float, commit: str, **more: object) -> dict[str, object]:
    """A record with 21 samples around `us`, their median exactly."""
    samples = [round(us * (1 + 0.0005 * step), 4) for step in np.random.default_rng(0).permutation(np.arange(-10, 11)).tolist()]
    times = {"median": us, "p20": us * 0.997, "p80": us * 1.003, "replays": 21, "samples": samples}
    return record(case, provider, us, read_us, commit=commit, timestamp=TIMES[commit], **more) | {"us": times}


def revision(commit: str, factor: float) -> list[dict[str, object]]:
    """The records of one commit, whose times on LARGE are `factor` times the first commit's."""
    lines = []
    for index, case in enumerate(CASES):
        read_us = 100.0 * (index + 1)
        ours = 1.05 * read_us * (factor if case is LARGE else 1.0)
        bar = {"metric": "ratio", "limit": 1.06, "plus": 0.0, "met": Bar("ratio", 1.06).met(ours, read_us)}
        lines += [line(case, READ, read_us, read_us, commit), line(case, "ours", ours, read_us, commit, bar=bar)]
    return lines


def make_results(folder: Path) -> Path:
    """Fills a folder: three commits with a regression of LARGE at the last, peers, and lines that are no records.

    One peer was measured next to ours at the first commit only, another in a run that holds nothing of ours.
    """
    first = [*revision("first", 1.0), *revision("second", 1.0)]
    last = [
        *revision("third", 1.05),
        line(LARGE, "fa3", 121.0, 100.0, "third", gate=GATE | {"error": 4.8e-4}),
        record(LARGE, "flashinfer-xqa", commit="third", timestamp=TIMES["third"], not_supported=SCRIPT),
        line(LARGE, "ours", 2.5, 0.0 + 1, "third", metric="host.run", gate=None),
        record(SPREAD, "ours", 50.0, commit="third", timestamp=TIMES["third"]),
        line(QUANTISED, "ours", 62.0, 50.0, "third", gate=GATE | {"relative_error": 1.7e-3, "used": 0.6}),
        line(QUANTISED, "fa3", 80.0, 50.0, "third", gate=GATE | {"relative_error": 2.3e-2}),
        line(QUANTISED, READ, 50.0, 50.0, "third"),
        line(LARGE, "flashinfer-fa2", 147.0, 100.0, "first"),
        line(LARGE, "vllm-triton", 200.0, 100.0, "third") | {"timestamp": LATER},
        line(LARGE, "ours", 115.0, 104.0, "third", metric="in_stream"),
        line(LARGE, "fa3", 138.0, 104.0, "third", metric="in_stream"),
        line(LARGE, "fa3", 3.0, 1.0, "third", metric="device.plan", gate=None),
        line(LARGE, "ours", 7.0, 1.0, "third", metric="a new one"),
        line(LARGE, "ours", 116.0, 105.0, "third", metric="behind_weights"),
        line(LARGE, "fa3", 174.0, 105.0, "third", metric="behind_weights"),
    ]
    path = write(folder / "h200.jsonl", *first)
    with path.open("a") as file:
        file.write('{"truncated": \n')
    write(path, *last)
    write(folder / "h100.jsonl", *(record(SMALL, who, 20.0, 10.0, gpu="NVIDIA H100 80GB HBM3") for who in ("ours", READ)))
    return folder


def make_attention_results(folder: Path) -> Path:
    """Fills a folder: four query rows next to plain decode and a peer, and a soft cap whose bar lacks a time."""
    met = FEW_ROWS_BAR.fields() | {"met": True}
    unknown = Bar("ratio", 1.05, beside=PLAIN).fields() | {"met": None}
    write(
        folder / "h200.jsonl",
        line(VERIFY, "ours", 103.0, 98.0, "third", bar=met, ratio_to_plain=1.03),
        line(VERIFY, PLAIN, 100.0, 98.0, "third", ratio_to_plain=1.0),
        line(VERIFY, "flashinfer-fa2", 104.0, 98.0, "third"),
        line(VERIFY, READ, 98.0, 98.0, "third"),
        line(SOFTCAP, "ours", 53.0, 49.0, "third", bar=unknown),
        line(SOFTCAP, PLAIN, 52.0, 49.0, "third"),
    )
    return folder


def old(entry: dict[str, object]) -> dict[str, object]:
    """A record of a long query that is older than the WGMMA loop: its ratio is to a read."""
    return {"ratio_to_read" if name == "ratio_to_wgmma" else name: value for name, value in entry.items()}


def make_long_results(folder: Path) -> Path:
    """Fills a folder: a prompt next to the WGMMA loop, a peer and plain decode, after a run whose floor was a read."""
    times = {WGMMA: 800.0, "ours": 1000.0, "fa4": 1100.0, PLAIN: 12.0}
    write(
        folder / "h200.jsonl",
        *(old(line(PROMPT, who, us, 9.0, "first")) for who, us in ((READ, 9.0), ("ours", 1050.0))),
        *(line(PROMPT, who, us, 800.0, "second") for who, us in times.items()),
    )
    return folder
