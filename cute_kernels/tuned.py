"""Tuned configurations: plans/<gpu>.json, looked up by problem.

A file holds {"schema": 1, "gpu": name, "entries": [...]}. An entry matches a problem whose arch, source, head_dim,
group_size and page_size equal its own and whose num_kv_heads, batch_size and max_seq_len lie in its half-open buckets
[low, high); a null high is unbounded. No two entries of a file may match one problem.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import DecodeConfig
from .descriptors import DecodeProblem
from .errors import InvalidPlanTable

SCHEMA = 1
EXACT = {"arch": str, "source": str, "head_dim": int, "group_size": int, "page_size": int}
BUCKETS = ("num_kv_heads", "batch_size", "max_seq_len")
KNOBS = ("tile_n", "num_stages", "num_warps", "ctas_per_sm")


@dataclass(frozen=True)
class Bucket:
    """The integers low <= n < high; no upper end when high is None."""

    low: int
    high: int | None

    def __contains__(self, n: int) -> bool:
        return self.low <= n and (self.high is None or n < self.high)

    def overlaps(self, other: Bucket) -> bool:
        """Whether some integer lies in both."""
        return (other.high is None or self.low < other.high) and (self.high is None or other.low < self.high)


@dataclass(frozen=True)
class Entry:
    """One tuned configuration and the problems it serves."""

    exact: tuple[str | int, ...]  # in the order of EXACT
    buckets: tuple[Bucket, ...]  # in the order of BUCKETS
    config: DecodeConfig

    def matches(self, problem: DecodeProblem, arch: str) -> bool:
        """Whether this entry is for `problem` on the mainloop `arch`."""
        if self.exact != (arch, problem.source, problem.head_dim, problem.group_size, problem.page_size):
            return False
        extents = (problem.num_kv_heads, problem.batch_size, problem.max_seq_len)
        return all(n is not None and n in bucket for n, bucket in zip(extents, self.buckets, strict=True))


def lookup(problem: DecodeProblem, arch: str, gpu: str, folder: Path | None = None) -> DecodeConfig | None:
    """The tuned configuration of `problem` on the GPU whose slug is `gpu` ("h200"), or None. Raises InvalidPlanTable."""
    entries = load((folder or plans_folder()) / f"{gpu}.json")
    return next((entry.config for entry in entries if entry.matches(problem, arch)), None)


def plans_folder() -> Path:
    """The folder of plan tables: beside this file when installed, beside the package in a checkout."""
    here = Path(__file__).parent
    return here / "plans" if (here / "plans").is_dir() else here.parent / "plans"


@functools.lru_cache(maxsize=16)
def load(path: Path) -> tuple[Entry, ...]:
    """The validated entries of one file; none when it does not exist. Raises InvalidPlanTable."""
    if not path.is_file():
        return ()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidPlanTable(path.name, str(error), "must be JSON") from error
    _check_keys(path.name, document, {"schema", "gpu", "entries"})
    if document["schema"] != SCHEMA:
        raise InvalidPlanTable(f"{path.name}: schema", document["schema"], f"must be {SCHEMA}")
    if not isinstance(document["entries"], list):
        raise InvalidPlanTable(f"{path.name}: entries", document["entries"], "must be a list")
    entries = tuple(_entry(f"{path.name}: entries[{i}]", raw) for i, raw in enumerate(document["entries"]))
    _check_disjoint(path.name, entries)
    return entries


def _entry(where: str, raw: Any) -> Entry:
    _check_keys(where, raw, {*EXACT, *BUCKETS, "config"})
    for name, kind in EXACT.items():
        if type(raw[name]) is not kind:
            raise InvalidPlanTable(f"{where}.{name}", raw[name], f"must be of type {kind.__name__}")
    _check_keys(f"{where}.config", raw["config"], set(KNOBS))
    for name in KNOBS:
        if type(raw["config"][name]) is not int or raw["config"][name] < 1:
            raise InvalidPlanTable(f"{where}.config.{name}", raw["config"][name], "must be an int of at least 1")
    buckets = tuple(_bucket(f"{where}.{name}", raw[name]) for name in BUCKETS)
    return Entry(tuple(raw[name] for name in EXACT), buckets, DecodeConfig(**raw["config"]))


def _bucket(where: str, raw: Any) -> Bucket:
    rule = "must be [low, high) with 0 <= low < high, or [low, null]"
    if not isinstance(raw, list) or len(raw) != 2:
        raise InvalidPlanTable(where, raw, rule)
    low, high = raw
    if type(low) is not int or low < 0 or not (high is None or (type(high) is int and low < high)):
        raise InvalidPlanTable(where, raw, rule)
    return Bucket(low, high)


def _check_keys(where: str, raw: Any, keys: set[str]) -> None:
    if not isinstance(raw, dict) or set(raw) != keys:
        raise InvalidPlanTable(where, sorted(raw) if isinstance(raw, dict) else raw, f"must have exactly the keys {sorted(keys)}")


def _check_disjoint(name: str, entries: tuple[Entry, ...]) -> None:
    for i, entry in enumerate(entries):
        for j, earlier in enumerate(entries[:i]):
            pairs = zip(entry.buckets, earlier.buckets, strict=True)
            if entry.exact == earlier.exact and all(a.overlaps(b) for a, b in pairs):
                raise InvalidPlanTable(f"{name}: entries[{i}]", entry.exact, f"must not overlap entries[{j}]")
