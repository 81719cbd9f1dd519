"""perf.resume: a run in several calls measures every case once, and stops before its time is up."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from perf import export, gate, run
from perf.cases import Case, fixed
from perf.measure import Limits
from perf.providers.flashinfer import FlashInferFa2, FlashInferXqa
from perf.providers.ours import Ours
from perf.records import read_records
from perf.resume import Deadline, unfinished
from tests.support.perf_fakes import FakeClock, Timed
from tests.support.perf_lines import record, write

CPU = torch.device("cpu")
CASES = [Case(4, 2, 16, 4, fixed(batch, 7)) for batch in (1, 2, 3, 4)]
COMMIT = "0123456789abcdef"
LATER = "2026-01-02T03:14:05+00:00"


def left(path: Path, *providers: str) -> list[int]:
    """The batches of CASES that are unfinished."""
    records, problems = read_records([path])
    assert not problems
    return [case.batch_size for case in unfinished(CASES, records, providers or ("ours", "read"), COMMIT)]


def test_a_case_is_finished_when_one_run_has_all_providers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "h200.jsonl",
        record(CASES[0], "ours", 2.0),
        record(CASES[0], "read", 1.0),
        record(CASES[1], "ours", 2.0),
        record(CASES[1], "read", 1.0, timestamp=LATER),  # another run: not interleaved
        record(CASES[2], "ours", not_supported="head_dim 16"),
        record(CASES[2], "read", error="lost"),
    )
    assert left(path) == [4, 2]  # what was tried and is incomplete comes last
    assert left(path, "ours") == [4]
    assert left(path, "ours", "read", "fa3") == [4, 1, 2, 3]


@pytest.mark.parametrize("more", [{"commit": "f" * 16}, {"dirty": True}, {"metric": "host.run"}])
def test_other_states_of_the_checkout_and_host_times_do_not_count(tmp_path: Path, more: dict[str, object]) -> None:
    path = write(tmp_path / "h200.jsonl", *(record(CASES[0], provider, 2.0, **more) for provider in ("ours", "read")))
    assert left(path) == [1, 2, 3, 4]


class Hands:
    """A clock whose next answers are given."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self) -> float:
        return self.seconds.pop(0)


def test_a_deadline_leaves_room_for_the_longest_case_so_far() -> None:
    deadline = Deadline(100, Hands(0, 5, 45, 55, 61))
    assert deadline.allows_another()  # at 5: nothing known yet
    assert deadline.allows_another()  # at 45: a case took 40, one more ends at 85
    assert deadline.allows_another()  # at 55
    assert not deadline.allows_another()  # at 61 + 40


def test_a_first_case_always_runs_and_no_limit_never_ends() -> None:
    assert Deadline(1, Hands(0, 50)).allows_another()
    endless = Deadline(None, Hands(0, 1, 10**6, 10**9))
    assert all(endless.allows_another() for _ in range(3))


def test_a_run_in_several_calls_measures_every_case_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GraphClock", FakeClock)
    monkeypatch.setattr(run, "machine", lambda device: {})
    monkeypatch.setattr(run, "environment", lambda: {"schema": 1, "commit": COMMIT, "dirty": False})
    monkeypatch.setattr(run.DeviceFacts, "of", staticmethod(lambda device: run.DeviceFacts("cuda", "NVIDIA H200", (9, 0), 132)))
    providers = [Ours(), Timed("read", 1.0)]
    path = tmp_path / "h200.jsonl"
    limits = Limits(15, 1, 2**20, rotated_bytes=1, host_calls=0, in_stream=0)
    begun = []
    for _ in range(3):
        rest = run.still_to_run(CASES, providers, [path])
        deadline = Deadline(10, Hands(0, 1, 5, 9, 10, 11))  # a third case would end at 13
        outcomes, over = run.run_cases(rest, providers, limits, CPU, path, deadline)
        begun.append(([outcome.case.batch_size for outcome in outcomes if outcome.provider == "ours"], over))
    assert begun == [([1, 2], 2), ([3, 4], 0), ([], 0)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["batch_size"], line["provider"]) for line in lines] == [(b, p) for b in (1, 2, 3, 4) for p in ("ours", "read")]


def test_a_changed_checkout_measures_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "h200.jsonl", record(CASES[0], "read", 1.0))
    for facts in ({"commit": COMMIT, "dirty": True}, {"commit": None, "dirty": None}):
        monkeypatch.setattr(run, "environment", lambda facts=facts: facts)
        assert run.still_to_run(CASES, [Timed("read", 1.0)], [path]) == CASES
    monkeypatch.setattr(run, "environment", lambda: {"commit": COMMIT, "dirty": False})
    assert run.still_to_run(CASES, [Timed("read", 1.0)], [path]) == CASES[1:]


@pytest.mark.parametrize(("wrong", "left_over", "code"), [(False, 2, 3), (True, 2, 1), (False, 0, 0)])
def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool, left_over: int, code: int) -> None:
    outcome = run.Outcome(CASES[0], "ours", "1", strict=True, error="crash" if wrong else None, not_supported="no")
    monkeypatch.setattr(run, "run_cases", lambda *arguments: ([outcome], left_over))
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(run.torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    monkeypatch.setattr(run.DeviceFacts, "of", staticmethod(lambda device: run.DeviceFacts("cuda", "NVIDIA H200", (9, 0), 132)))
    result = CliRunner().invoke(run.app, ["--cases", "ragged", "--providers", "read", "--minutes", "8", "--out", str(tmp_path)])
    assert result.exit_code == code, result.output
    assert ("2 of 32 cases left" in result.output) == bool(left_over)


def test_flashinfer_compiles_each_module_once_and_leaves_failures_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def build(*key: object) -> None:
        asked.append(key)
        raise RuntimeError("no compiler")

    for name in ("flashinfer", "flashinfer.prefill", "flashinfer.xqa"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(get_batch_prefill_module=build, get_xqa_module=build))
    one = Case(8, 2, 64, 16, fixed(1, 7))
    others = [replace(one, lengths=fixed(9, 7)), replace(one, kv_dtype="int8", kv_scale="token-f16")]
    contiguous = replace(one, page_size=0, table_format="none")
    FlashInferFa2().compile_ahead([one, *others, contiguous, replace(one, kv_dtype="e5m2")])
    bf16 = torch.bfloat16
    fa2 = [("fa2", bf16, kv, bf16, torch.int32, 64, 64, 0, False, False, False) for kv in (bf16, torch.float8_e5m2)]
    assert sorted(asked, key=str) == sorted(fa2, key=str)
    asked.clear()
    FlashInferXqa().compile_ahead([one, *others, contiguous, replace(one, kv_dtype="e5m2"), replace(one, page_size=8)])
    assert asked == [(bf16, bf16, 16, 64, 4, False, bf16, 1, False)]


@pytest.mark.parametrize("option", ["--cases", "--providers"])
@pytest.mark.parametrize("text", ["", " , "])
def test_an_option_without_a_name_in_it_is_no_request(option: str, text: str) -> None:
    result = CliRunner().invoke(run.app, [option, text, "--list"])
    assert result.exit_code == 2 and f"{option[2:]}: {text!r} names nothing" in result.output


def test_committed_records_are_the_default_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, name in ((gate.main, "results"), (export.main, "results"), (run.main, "out")):
        default = inspect.signature(command).parameters[name].default
        assert default.is_absolute() and default.exists()
