"""What the documents say of cases, sets and providers is what the package has, and README's count of wins is the records'."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from perf.case_sets import case_sets
from perf.measure import DEVICE
from perf.providers import PROVIDER_NAMES
from perf.record import ROOT
from perf.records import Record, read_records

PERF = (ROOT / "docs" / "perf.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMED = re.compile(r"\b(?:gqa|kv_append)_[a-z0-9_+-]*_[bt]\d[a-z0-9_+-]*")  # up to its rows: a name, no part or glob of one
RIVALS = ("fa3", "flashinfer-fa2", "flashinfer-xqa")


def test_counts_of_sets() -> None:
    said = {name: int(count) for name, count in re.findall(r"^- `(\w+)`, (\d+) cases", PERF, re.MULTILINE)}
    assert {"verify", "mqa", "prefill", "chunks", "mixed", "f32", "modifiers"} <= set(said)
    assert said == {name: len(case_sets()[name]) for name in said}


def test_every_set_is_named() -> None:
    assert [name for name in case_sets() if f"`{name}`" not in PERF] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_full_names_of_cases_exist(document) -> None:
    known = {case.name for case in chain.from_iterable(case_sets().values())}
    assert set(NAMED.findall(document.read_text(encoding="utf-8"))) <= known


def test_some_document_names_cases() -> None:
    assert len(NAMED.findall(PERF)) >= 5


def test_every_provider_has_a_row() -> None:
    table = PERF[PERF.index("| provider | what it is |") :].split("\n\n")[0]
    first = chain.from_iterable(re.findall(r"`([\w-]+)`", line.split("|")[1]) for line in table.splitlines()[2:])
    assert sorted(first) == sorted(PROVIDER_NAMES)


def newest_run_with(names: tuple[str, ...], records: list[Record]) -> dict[str, float] | None:
    """Device times by provider, of the newest run that timed all of `names`; None where there is none."""
    runs: dict[tuple[object, ...], dict[str, float]] = {}
    for record in sorted(records, key=lambda record: record.time):
        if record.metric == DEVICE and record.us is not None:
            runs.setdefault(record.run, {})[record.provider] = record.us.median
    return next((run for run in reversed(runs.values()) if set(names) <= set(run)), None)


def test_readme_counts_the_wins_of_the_records() -> None:
    records, _ = read_records(sorted((ROOT / "perf" / "results").glob("*.jsonl")))
    by_case: dict[str, list[Record]] = {case.name: [] for case in case_sets()["peers"]}
    for record in records:
        if record.name in by_case:
            by_case[record.name].append(record)
    runs = {name: run for name, of in by_case.items() if (run := newest_run_with(("ours", *RIVALS), of)) is not None}
    lost = {name: run["ours"] / min(run[rival] for rival in RIVALS) for name, run in runs.items()}
    slower = {name: ratio for name, ratio in lost.items() if ratio > 1}
    said = re.search(r"the (\d+) cases of the set `peers`.*?(\d+) are fastest here", README, re.DOTALL)
    assert said and said.groups() == (str(len(runs)), str(len(runs) - len(slower)))
    assert all("_d256_" in name and "_kve4m3_" in name for name in slower)
