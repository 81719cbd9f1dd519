"""perf.gate and perf.compare: a planted regression is called, reruns of the same code are not, and machines may drift."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import typer
from perf_lines import record, write

from perf import gate
from perf.cases import READ, Case, fixed
from perf.compare import FLOOR, NOISE_FACTOR, Comparison, compare_revisions, control, samples
from perf.history import Revision, revision, revisions
from perf.record import ROOT
from perf.records import Record, read_records

TIMES = {"base": "2026-01-01T00:00:00+00:00", "new": "2026-01-02T00:00:00+00:00", "newer": "2026-01-03T00:00:00+00:00"}
REPLAYS = 21


class Machine:
    """A synthetic GPU whose noise is that of the committed records.

    A run's times are the recorded medians of `ours` and `read`, times what differs between sessions, between runs of a
    session, and between replays: the spread of each recorded case, and that of the read kernel between two recorded commits.
    """

    def __init__(self, cases: int) -> None:
        records, _ = read_records([ROOT / "perf" / "results" / "h200.jsonl"])
        history = {entry.label: entry for entry in revisions(records)}
        clean = [entry for label, entry in history.items() if not label.endswith("-dirty")][:2]
        deviations = np.array(list(control(*clean).deviations.values()))
        self.run_noise = float(np.std(deviations[np.abs(deviations) < 0.02])) / math.sqrt(2)  # of one of the two runs
        names = [name for name, provider in clean[0].runs if provider == "ours"][:cases]
        self.recorded = {key: clean[0].timed(key)[0] for name in names for key in ((name, "ours"), (name, READ))}

    def run(
        self, label: str, rng: np.random.Generator, slower: Mapping[str, float] | None = None, drift: float = 0.0
    ) -> Revision:
        """One run of every case. slower: factors of `ours` on some cases."""
        lines = []
        for (name, provider), old in self.recorded.items():
            assert old.us is not None
            spread = math.log(old.us.p80 / old.us.p20) / 1.683
            median = old.us.median * math.exp(drift + self.run_noise * rng.standard_normal())
            median *= (slower or {}).get(name, 1.0) if provider == "ours" else 1.0
            lines.append(timed(old.case, provider, median * np.exp(spread * rng.standard_normal(REPLAYS)), label))
        return revision(label, read_lines(lines))


def timed(case: Case, provider: str, us: np.ndarray, label: str) -> dict[str, object]:
    p20, median, p80 = (float(value) for value in np.percentile(us, [20, 50, 80]))
    times = {"median": median, "p20": p20, "p80": p80, "replays": len(us), "samples": [float(value) for value in us]}
    return record(case, provider, 1.0, commit=label, timestamp=TIMES[label]) | {"us": times}


def read_lines(lines: list[dict[str, object]]) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        return read_records([write(Path(folder) / "h200.jsonl", *lines)])[0]


def verdicts(comparisons: list[Comparison]) -> dict[str, str]:
    return {comparison.name: comparison.verdict for comparison in comparisons if comparison.verdict != "same"}


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine(cases=24)


def test_the_synthetic_noise_is_the_recorded_one(machine: Machine) -> None:
    assert 2e-4 < machine.run_noise < 5e-3
    assert len(machine.recorded) == 48


def test_a_planted_regression_is_called_and_reruns_are_not(machine: Machine) -> None:
    """20 of 20, with a drift of the whole machine between the sessions."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        drift = rng.uniform(-0.015, 0.015)
        names = sorted({name for name, _ in machine.recorded})
        planted = names[seed % len(names)]
        base, rerun = machine.run("base", rng), machine.run("new", rng, drift=drift)
        slow = machine.run("newer", rng, {planted: 1.03}, drift)
        assert verdicts(compare_revisions([base], rerun, ["ours"])) == {}, f"seed {seed}"
        assert verdicts(compare_revisions([base], slow, ["ours"])) == {planted: "slower"}, f"seed {seed}"


@pytest.mark.parametrize(("factor", "expected"), [(1.01, "same"), (1.05, "slower"), (1 / 1.05, "faster")])
def test_every_case_changed(machine: Machine, factor: float, expected: str) -> None:
    """Changes below the threshold are not called; all cases at once are not taken for a drift of the machine."""
    rng = np.random.default_rng(7)
    names = {name for name, _ in machine.recorded}
    base, new = machine.run("base", rng), machine.run("new", rng, dict.fromkeys(names, factor))
    comparisons = compare_revisions([base], new, ["ours"])
    assert {comparison.verdict for comparison in comparisons} == {expected} and len(comparisons) == len(names)
    for comparison in comparisons:
        assert comparison.ratio == pytest.approx(factor, rel=0.02) and comparison.low < comparison.ratio < comparison.high
        assert comparison.sampled


def test_without_the_threshold_reruns_would_be_called(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the 20 of 20: with neither floor nor A/A noise, the replays' spread alone calls reruns different."""
    monkeypatch.setattr("perf.compare.FLOOR", 0.0)
    monkeypatch.setattr("perf.compare.NOISE_FACTOR", 1e-9)
    monkeypatch.setattr("perf.compare.NORMAL_MAD", 1e-9)
    monkeypatch.setattr("perf.compare.Control.noise_of", lambda self, name: 0.0)
    rng = np.random.default_rng(0)
    assert verdicts(compare_revisions([machine.run("base", rng)], machine.run("new", rng), ["ours"]))


def test_the_interval_covers_the_truth_as_often_as_it_says(machine: Machine) -> None:
    covered = [
        comparison.low <= 1.03 <= comparison.high
        for seed in range(10)
        for rng in [np.random.default_rng(100 + seed)]
        for names in [{name for name, _ in machine.recorded}]
        for comparison in compare_revisions(
            [machine.run("base", rng)], machine.run("new", rng, dict.fromkeys(names, 1.03)), ["ours"]
        )
    ]
    assert 0.9 < np.mean(covered) < 1


CASES = [Case(32, 8, 128, 16, fixed(batch, 1024)) for batch in (1, 2, 4, 8, 16, 32)]


def flat(label: str, us: Mapping[str, float], cases: list[Case] = CASES, **more: object) -> list[dict[str, object]]:
    """Lines without samples and without noise."""
    return [
        record(case, provider, value, commit=label, timestamp=TIMES[label], **more)
        for case in cases
        for provider, value in us.items()
    ]


def test_the_drift_is_divided_out_and_a_disturbed_control_calls_nothing() -> None:
    base = flat("base", {"ours": 100.0, READ: 90.0})
    new = flat("new", {"ours": 110.0, READ: 99.0}, CASES[:-1]) + flat("new", {"ours": 150.0, READ: 130.0}, CASES[-1:])
    comparisons = compare_revisions([revision("base", read_lines(base))], revision("new", read_lines(new)), ["ours"])
    assert [comparison.ratio for comparison in comparisons[:-1]] == pytest.approx([1.0] * 5)
    assert comparisons[-1].verdict == "same"
    assert comparisons[-1].threshold == pytest.approx(NOISE_FACTOR * math.log(130 / 99))
    assert comparisons[0].threshold == FLOOR
    assert not comparisons[0].sampled


def test_percentiles_stand_in_for_samples() -> None:
    (line,) = flat("base", {"ours": 100.0}, CASES[:1])
    (entry,) = read_lines([line | {"us": {"median": 100.0, "p20": 98.0, "p80": 102.0, "replays": 21}}])
    found = np.percentile(samples(entry), [20, 50, 80])
    assert found == pytest.approx([98.0, 100.0, 102.0], rel=4e-3)


def invoke(capsys: pytest.CaptureFixture[str], results: Path, base: str = "best", new: str = "latest", run: Path | None = None):
    """Exit code, stdout and stderr of the gate."""
    with pytest.raises(typer.Exit) as caught:
        gate.main(results, base, new, run, "ours")
    captured = capsys.readouterr()
    return caught.value.exit_code, captured.out, captured.err


def test_the_best_known_is_not_the_one_before(tmp_path: Path, capsys) -> None:
    """Two steps of 1.5% pass one by one; the sum of them does not."""
    lines = [flat(label, {"ours": us, READ: 90.0}) for label, us in (("base", 100.0), ("new", 101.5), ("newer", 103.1))]
    results = write(tmp_path / "h200.jsonl", *(line for of_label in lines for line in of_label))
    assert invoke(capsys, results, base="new")[0] == 0
    code, out, _ = invoke(capsys, results)
    assert code == 1 and "6 slower, 0 faster, 0 same, 0 lost, of newer" in out
    assert "A/A noise 0.00%" in out and "samples not recorded on some side" in out
    assert invoke(capsys, results, new="new")[0] == 0  # held against newer too: faster than that, slower than base by 1.5%


def test_a_run_from_another_file(tmp_path: Path, capsys) -> None:
    known = write(tmp_path / "h200.jsonl", *flat("base", {"ours": 100.0, READ: 90.0}))
    run = write(tmp_path / "run.jsonl", *flat("new", {"ours": 104.0, READ: 90.0}))
    assert invoke(capsys, known, run=run)[0] == 1
    assert invoke(capsys, run, run=known)[0] == 0


def test_a_time_that_is_lost_fails(tmp_path: Path, capsys) -> None:
    lost = record(CASES[0], "ours", error="RuntimeError: no", commit="new", timestamp=TIMES["new"])
    results = write(tmp_path / "h200.jsonl", *flat("base", {"ours": 100.0}), *flat("new", {"ours": 100.0}, CASES[1:]), lost)
    code, out, _ = invoke(capsys, results)
    assert code == 1 and f"{CASES[0].name}: ours has no time any more: failed: RuntimeError: no" in out
    assert "the read kernel ran in 0 common cases only" in out


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ([], {}, "hold 0 GPUs"),
        (flat("base", {"ours": 1.0}), {}, "no record to hold base against"),
        (flat("base", {"ours": 1.0}) + flat("new", {"fa3": 1.0}), {}, "timed no case at both"),
        (
            flat("base", {"ours": 1.0}) + flat("new", {"ours": 1.0}),
            {"base": "abc"},
            "'abc' names 0 of the recorded revisions (base)",
        ),
        (
            flat("base", {"ours": 1.0}) + flat("new", {"ours": 1.0}, gpu="NVIDIA H100"),
            {},
            "hold 2 GPUs (NVIDIA H200, NVIDIA H100)",
        ),
    ],
)
def test_nothing_to_compare(tmp_path: Path, capsys, lines, arguments: dict[str, str], message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.touch()
    code, _, err = invoke(capsys, write(path, *lines), **arguments)
    assert code == 2 and message in err


def test_bad_lines_are_reported_and_the_rest_compared(tmp_path: Path, capsys) -> None:
    results = write(tmp_path / "h200.jsonl", *flat("base", {"ours": 100.0, READ: 90.0}))
    with results.open("a") as file:
        file.write('{"name": \n')
    code, out, err = invoke(capsys, write(results, *flat("new", {"ours": 100.0, READ: 90.0})))
    assert code == 0 and "6 same" in out
    assert err.startswith(f"{results}:13: truncated: ") and err.count("\n") == 1
