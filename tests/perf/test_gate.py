"""perf.gate and perf.compare: a planted regression is called, reruns of the same code are not, and machines may drift."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import typer

from perf import compare, gate
from perf.cases import COPY, READ, Case, append_case, fixed
from perf.compare import FLOOR, NOISE_FACTOR, Comparison, changes, compare_revisions, control, decide, samples
from perf.history import Key, Revision, revision, revisions
from perf.record import ROOT
from perf.records import Record, read_records
from tests.support.perf_lines import record, write

TIMES = {"base": "2026-01-01T00:00:00+00:00", "new": "2026-01-02T00:00:00+00:00", "newer": "2026-01-03T00:00:00+00:00"}
REPLAYS = 21


class Machine:
    """A synthetic GPU whose noise is that of the committed records.

    A run's times are the recorded medians of `ours` and `read`, times what differs between sessions, between runs of a
    session, and between replays: the spread of each recorded case, and that of the read kernel between two recorded commits.
    A peer takes as long as `ours` and never changes.
    """

    def __init__(self, cases: int) -> None:
        records, _ = read_records([ROOT / "perf" / "results" / "h200.jsonl"])
        history = {entry.label: entry for entry in revisions(records)}
        clean = [entry for label, entry in history.items() if not label.endswith("-dirty")][:2]
        deviations = np.array(list(control(*clean).deviations.values()))
        self.run_noise = float(np.std(deviations[np.abs(deviations) < 0.02])) / math.sqrt(2)  # of one of the two runs
        names = [key.name for key in clean[0].runs if key.provider == "ours" and key.metric == "device"][:cases]
        sources = {"ours": "ours", READ: READ, "fa3": "ours"}
        self.recorded = {
            (name, provider): clean[0].timed(Key(name, source))[0] for name in names for provider, source in sources.items()
        }

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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records up to those of e9a0ee2fd, of an H200 or two; later ones do not change what the tests say of them."""
    path = tmp_path_factory.mktemp("recorded") / "h200.jsonl"
    lines = (ROOT / "perf" / "results" / "h200.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3611]))
    return path


def test_the_synthetic_noise_is_the_recorded_one(machine: Machine) -> None:
    assert 2e-4 < machine.run_noise < 5e-3
    assert len(machine.recorded) == 72


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


def compared(base: Mapping[str, float], new: Mapping[str, float], **more: object) -> list[Comparison]:
    """`ours` at two revisions of which each provider took so many microseconds on every case."""
    sides = [revision(label, read_lines(flat(label, us, **more))) for label, us in (("base", base), ("new", new))]
    return compare_revisions(sides[:1], sides[1], ["ours"])


def called(comparisons: list[Comparison]) -> set[str]:
    return {comparison.verdict for comparison in comparisons}


def test_a_shift_that_unchanged_peers_show_too_is_not_called() -> None:
    """The read kernel stands still and three peers take 2% longer: so may an unchanged kernel of ours."""
    peers = {"fa3": 100.0, "flashinfer-fa2": 120.0, "flashinfer-xqa": 150.0}
    base, shifted = {"ours": 100.0, READ: 90.0, **peers}, {READ: 90.0, **{name: 1.02 * us for name, us in peers.items()}}
    assert called(compared(base, {"ours": 102.5, **shifted})) == {"same"}
    beyond = compared(base, {"ours": 105.0, **shifted})
    assert called(beyond) == {"slower"}
    assert beyond[0].ratio == pytest.approx(1.05) and beyond[0].least == pytest.approx(1.05 / 1.02)
    assert beyond[0].low == pytest.approx(1.05 / 1.02, rel=1e-3) and beyond[0].high == pytest.approx(1.05, rel=1e-3)
    without = {name: us for name, us in shifted.items() if name == READ}
    assert called(compared({"ours": 100.0, READ: 90.0}, {"ours": 102.5, **without})) == {"slower"}


def test_a_peer_of_another_version_says_nothing() -> None:
    base = flat("base", {"ours": 100.0, READ: 90.0}) + flat("base", {"fa3": 100.0}, version="1")
    new = flat("new", {"ours": 102.5, READ: 90.0}) + flat("new", {"fa3": 102.0}, version="2")
    sides = revision("base", read_lines(base)), revision("new", read_lines(new))
    assert control(*sides).peers == 0
    assert called(compare_revisions(sides[:1], sides[1], ["ours"])) == {"slower"}


def test_a_floor_of_another_version_is_no_control() -> None:
    base = flat("base", {READ: 90.0}, version="1") + flat("base", {"ours": 100.0})
    new = flat("new", {READ: 87.0}, version="2") + flat("new", {"ours": 100.0})
    found = control(revision("base", read_lines(base)), revision("new", read_lines(new)))
    assert (found.cases, found.drift, found.trusted) == (0, 0.0, False)


def test_where_no_peer_tells_a_kernel_may_follow_the_reads_drift_or_not() -> None:
    """The memory is 3% faster: a kernel that waits for something else keeps its time, and one that takes 3% longer is slower."""
    base, faster = {"ours": 100.0, READ: 90.0}, {READ: 90.0 * 0.97}
    assert called(compared(base, {"ours": 100.0, **faster})) == {"same"}
    assert called(compared(base, {"ours": 97.0, **faster})) == {"same"}
    assert called(compared(base, {"ours": 103.0, **faster})) == {"slower"}
    assert called(compared(base, {"ours": 94.0, **faster})) == {"faster"}
    assert called(compared(base | {"fa3": 110.0}, {"ours": 100.0, "fa3": 110.0 * 0.97, **faster})) == {"slower"}


def test_unchanged_peers_of_the_records_are_not_called(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer of each pair of commits, by what the other peers show: 3 of 282 are called; by the read's drift alone 23 are."""
    history = revisions(read_records([recorded])[0])
    unchanged, calls = compare.unchanged, []
    for held_out in ("fa3", "flashinfer-fa2", "flashinfer-xqa"):
        monkeypatch.setattr(compare, "unchanged", lambda *given, held=held_out: given[2].provider != held and unchanged(*given))
        calls += [
            comparison.verdict
            for index, new in enumerate(history)
            for base in history[:index]
            for comparison in compare_revisions([base], new, [held_out])
        ]
    assert len(calls) == 282
    assert len(calls) - calls.count("same") <= 4


def test_an_append_is_held_to_the_copy_and_a_decode_step_to_the_read() -> None:
    appends = [append_case(tokens) for tokens in (64, 128, 256, 512, 1024, 2048)]
    base = flat("base", {"ours": 100.0, READ: 90.0}) + flat("base", {"ours": 100.0, COPY: 90.0}, appends)
    new = flat("new", {"ours": 98.0, READ: 90.0 * 0.98}) + flat("new", {"ours": 103.0, COPY: 90.0 * 1.03}, appends)
    sides = revision("base", read_lines(base)), revision("new", read_lines(new))
    assert control(*sides).drift == pytest.approx(math.log(0.98))
    assert control(*sides, floor=COPY).drift == pytest.approx(math.log(1.03))
    comparisons = compare_revisions(sides[:1], sides[1], ["ours"])
    assert len(comparisons) == 12 and called(comparisons) == {"same"}
    assert [comparison.ratio for comparison in comparisons] == pytest.approx([1.0] * 12)


def comparison(p: float, ratio: float = 1.1) -> Comparison:
    times = {"base_us": 100.0, "new_us": 100.0 * ratio, "ratio": ratio, "low": ratio, "high": ratio, "least": ratio}
    return Comparison("case", "ours", "device", "base", "new", **times, p=p, threshold=0.02, sampled=True)


def test_at_most_one_call_in_twenty_is_wrong() -> None:
    """A change of 10% is called up to an adjusted p of 0.05 (Benjamini-Hochberg over the cases)."""
    assert [decide([comparison(p)])[0].verdict for p in (0.049, 0.051, 0.2, 0.45)] == ["slower", "same", "same", "same"]
    many = decide([comparison(0.004), *(comparison(0.9) for _ in range(9))])
    assert many[0].p == pytest.approx(0.04) and [entry.verdict for entry in many] == ["slower"] + ["same"] * 9
    assert {entry.verdict for entry in decide([comparison(0.006), *(comparison(0.9) for _ in range(9))])} == {"same"}
    assert decide([comparison(0.01, 1 / 1.1), comparison(0.01, 1.019)])[0].verdict == "faster"
    assert decide([comparison(0.01, 1 / 1.019), comparison(0.01, 1.019)])[1].verdict == "same"


def test_times_in_a_stream_are_compared_beside_device_times_and_other_metrics_are_not() -> None:
    """Each metric has a control of its own: in the stream everything, the read included, takes 10% longer."""

    def lines(label: str, ours: float, in_stream: float, drift: float) -> list[Record]:
        device = flat(label, {"ours": ours, READ: 90.0})
        behind = flat(label, {"ours": in_stream, READ: 92.0 * drift}, metric="in_stream")
        others = flat(label, {"ours": 5.0 * drift}, metric="host.run") + flat(label, {"ours": 9.0 * drift}, metric="a new one")
        return read_lines(device + behind + others)

    base = revision("base", lines("base", 100.0, 103.0, 1.0))
    comparisons = compare_revisions([base], revision("new", lines("new", 100.0, 103.0 * 1.1, 1.1)), ["ours"])
    assert {(entry.metric, entry.verdict) for entry in comparisons} == {("device", "same"), ("in_stream", "same")}
    slower = compare_revisions([base], revision("new", lines("new", 100.0, 103.0 * 1.2, 1.1)), ["ours"])
    assert {(entry.metric, entry.verdict) for entry in slower} == {("device", "same"), ("in_stream", "slower")}
    assert len(slower) == 2 * len(CASES)
    assert {entry.metric for entry in changes([base, revision("new", lines("new", 120.0, 103.0, 1.0))])} == {
        "device",
        "in_stream",
    }


@pytest.mark.parametrize(
    ("base", "new", "words"),
    [
        ({"id": "abc"}, {"id": "abc"}, "both on the GPU abc"),
        ({"id": "abc"}, {"id": "def"}, "abc and def: not one physical GPU"),
        ({"sm_mhz": 1980.0}, {"id": "def"}, "a record does not name its physical GPU"),
        (None, {"id": "def"}, "a record does not name its physical GPU"),
    ],
)
def test_the_gate_says_whether_both_sides_ran_on_one_gpu(tmp_path: Path, capsys, base, new, words: str) -> None:
    us = {"ours": 100.0, READ: 90.0}
    results = write(tmp_path / "h200.jsonl", *flat("base", us, machine=base), *flat("new", us, machine=new))
    code, out, _ = invoke(capsys, results)
    assert code == 0 and f"base -> new: {words}\n" in out


def test_the_recorded_commits_hold_nothing_slower(recorded: Path, capsys) -> None:
    """Of 34.26 us to 34.64 (e4m3, 32 x 4k, head_dim 64), and 7.60 to 7.69 (1 x 8k), the memory's 1.6% made regressions."""
    code, out, _ = invoke(capsys, recorded)
    assert code == 0 and "0 slower, 0 faster, 41 same, 0 lost, of e9a0ee2fd" in out


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
    assert "read ran in 0 common cases only" in out


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
