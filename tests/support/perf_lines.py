"""Lines of perf/results as perf.run writes them, for tests of the code that reads them."""

from __future__ import annotations

from pathlib import Path

from perf.cases import FLOORS, Case
from perf.record import append, case_fields, ratio_field

GATE = {"error": 2e-4, "torch_error": 1.6e-4, "lse_error": 1e-7, "passed": True, "reason": ""}


def record(case: Case, provider: str, us: float | None = None, read_us: float | None = None, **more: object) -> dict[str, object]:
    """A record. read_us: the floor's time in the same run. A time has passed the gate unless `more` says otherwise."""
    times = {} if us is None else {"us": {"median": us, "p20": us, "p80": us, "replays": 21}}
    gate = {} if us is None or provider in FLOORS else {"gate": GATE}
    ratio = {} if us is None or read_us is None else {ratio_field(case): us / read_us}
    size = {"bytes": case.kv_bytes}
    who = {"provider": provider, "version": "1.2", "metric": "device"}
    facts = {"schema": 1, "commit": "0123456789abcdef", "dirty": False, "gpu": "NVIDIA H200"}
    facts["timestamp"] = "2026-01-02T03:04:05+00:00"
    return {**case_fields(case), **size, **who, **times, **gate, **ratio, **facts, **more}


def write(path: Path, *records: dict[str, object]) -> Path:
    """Appends records to a file."""
    for entry in records:
        append(path, entry)
    return path
