"""One JSON line per case and provider, appended to results/<gpu>.jsonl and never rewritten."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from perf.cases import WGMMA, Case

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "results"  # the committed records
H200 = RESULTS / "h200.jsonl"
PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "triton", "numpy")
SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "mem_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.draw.instant": "watts",
    "temperature.gpu": "celsius",
}


def case_fields(case: Case) -> dict[str, object]:
    """The fields of a record that describe its case: the name, the batch, and every field of the case.

    Fields that are None, and the operation of a decode step, are left out.
    """
    fields = asdict(case) | {"lengths": {"rule": type(case.lengths).__name__, **asdict(case.lengths)}}
    stored = {name: value for name, value in fields.items() if value is not None and value != "decode"}
    return {"name": case.name, "source": case.source, "batch_size": case.batch_size, **stored}


def ratio_field(case: Case) -> str:
    """The name of a record's field that holds its time over the time of the case's floor."""
    return "ratio_to_wgmma" if case.floor == WGMMA else "ratio_to_read"


def append(path: Path, record: Mapping[str, object]) -> None:
    """Appends one record as one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(record), allow_nan=False) + "\n")


def plain(value: object) -> object:
    """`value` in JSON's own types: dataclasses as objects, enums and anything else by name."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain({name: getattr(value, name) for name in value.__dataclass_fields__})
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@cache
def environment() -> dict[str, object]:
    """The facts that do not change during a run: commit, versions, host. Without git the commit is PERF_COMMIT."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    return {"schema": SCHEMA, **commit(), "versions": versions | {name: package_version(name) for name in PACKAGES}}


def package_version(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> dict[str, object]:
    """The checkout's commit and whether it was changed since; PERF_COMMIT (`<hash>` or `<hash>-dirty`) overrides it."""
    given = os.environ.get("PERF_COMMIT")
    if given:
        return {"commit": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    head = output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changes = output(["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!perf/results"])
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def machine(device: torch.device) -> dict[str, object]:
    """Which GPU `device` is, its driver, and its clocks, power and temperature right now; empty for another kind of device.

    id: the first 12 hexadecimal digits of the SHA-256 of the UUID. Values that nvidia-smi does not tell are left out.
    """
    if device.type != "cuda":
        return {}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    values = [value.strip() for value in (output(query) or "").split(",")]
    readings = dict(zip(SMI_FIELDS.values(), map(number, values), strict=True)) if len(values) == len(SMI_FIELDS) else {}
    return {"id": digest(uuid.encode(), 12), **readings}


def digest(data: bytes, digits: int) -> str:
    """The first hexadecimal digits of the SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()[:digits]


def number(text: str) -> float | str:
    """`text` as a number if it is one; a driver version such as 580.95.05 stays text."""
    try:
        return float(text)
    except ValueError:
        return text


def timestamp() -> str:
    """Now, in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def output(command: list[str]) -> str | None:
    """The output of a command, or None if the command is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
