"""Tuned configurations: plans/<gpu>.json, looked up by problem.

A file holds {"schema": 1, "gpu": name, "entries": [...]}. An entry matches a problem whose fields of EXACT equal its own and
whose num_kv_heads, batch_size and max_seq_len lie in its half-open buckets [low, high); a null high is unbounded. No two
entries of a file may match one problem. An entry has all or none of `us`, `heuristic_us` and `commit`: what was measured.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from ...config.decode import DecodeConfig
from ...config.tiling import MmaScope
from ...errors import InvalidPlanTable
from ..descriptors import DecodeProblem

SCHEMA = 1
EXACT = {
    "arch": str,
    "source": str,
    "head_dim": int,
    "group_size": int,
    "page_size": int,
    "kv_dtype": str,  # DecodeProblem.cache_type: "bf16", "int8", "e4m3/f16"
    "k_scale": str,  # as KVScale says it: "none", "head", "token f16"
    "v_scale": str,
}
BUCKETS = ("num_kv_heads", "batch_size", "max_seq_len")
KNOBS = tuple(knob.name for knob in fields(DecodeConfig))
NAMES = {"mma": get_args(MmaScope)}  # the values of knobs that are no numbers
OPTIONAL_KNOBS = {knob.name for knob in fields(DecodeConfig) if knob.default is not MISSING}
MEASURED = ("us", "heuristic_us", "commit")


@dataclass(frozen=True)
class Bucket:
    """The integers low <= n < high; there is no upper end if high is None."""

    low: int
    high: int | None

    def __contains__(self, n: int) -> bool:
        return self.low <= n and (self.high is None or n < self.high)

    def overlaps(self, other: Bucket) -> bool:
        """Whether some integer lies in both."""
        return (other.high is None or self.low < other.high) and (self.high is None or other.low < self.high)


@dataclass(frozen=True)
class Measured:
    """Measured microseconds of an entry's configuration and of the heuristic's choice, and the commit that was measured."""

    us: float
    heuristic_us: float
    commit: str


@dataclass(frozen=True)
class Entry:
    """One tuned configuration and the problems it serves."""

    exact: tuple[str | int, ...]  # in the order of EXACT
    buckets: tuple[Bucket, ...]  # in the order of BUCKETS
    config: DecodeConfig
    measured: Measured | None = None

    def matches(self, problem: DecodeProblem, arch: str) -> bool:
        """Whether this entry is for `problem` on the mainloop `arch`."""
        if self.exact != exact_of(problem, arch):
            return False
        extents = (problem.num_kv_heads, problem.batch_size, problem.max_seq_len)
        return all(n is not None and n in bucket for n, bucket in zip(extents, self.buckets, strict=True))

    def overlaps(self, exact: tuple[str | int, ...], buckets: Iterable[Bucket]) -> bool:
        """Whether a problem of `exact` and `buckets` could match this entry."""
        return self.exact == exact and all(a.overlaps(b) for a, b in zip(self.buckets, buckets, strict=True))

    def order(self) -> tuple[object, ...]:
        """The key that sorts entries in a file: the exact fields, then the low ends of the buckets."""
        return (*self.exact, *(bucket.low for bucket in self.buckets))

    def to_dict(self) -> dict[str, Any]:
        """The entry's line of a file, as plain data."""
        buckets = {name: [bucket.low, bucket.high] for name, bucket in zip(BUCKETS, self.buckets, strict=True)}
        measured = {} if self.measured is None else asdict(self.measured)
        return {**dict(zip(EXACT, self.exact, strict=True)), **buckets, "config": asdict(self.config), **measured}


def exact_of(problem: DecodeProblem, arch: str) -> tuple[str | int, ...]:
    """What an entry for `problem` on the mainloop `arch` must equal, in the order of EXACT."""
    shape = (arch, problem.source, problem.head_dim, problem.group_size, problem.page_size)
    return (*shape, problem.cache_type, str(problem.k_scale), str(problem.v_scale))


def dump(gpu: str, entries: Iterable[Entry]) -> str:
    """The text of a file: one entry per line. gpu: the full name of the GPU."""
    lines = ",\n".join(f"    {json.dumps(entry.to_dict())}" for entry in entries)
    listed = f"[\n{lines}\n  ]" if lines else "[]"
    return f'{{\n  "schema": {SCHEMA},\n  "gpu": {json.dumps(gpu)},\n  "entries": {listed}\n}}\n'


@dataclass(frozen=True)
class _Forced:
    config: DecodeConfig | None


_forced: ContextVar[_Forced | None] = ContextVar("_forced", default=None)


@contextmanager
def forced(config: DecodeConfig | None) -> Iterator[None]:
    """Within it, `lookup` answers `config` to every problem, whatever the tables hold; None leaves the choice to the heuristic.

    The tuner uses it. Plans that `select` has kept are not chosen again.
    """
    token = _forced.set(_Forced(config))
    try:
        yield
    finally:
        _forced.reset(token)


def lookup(problem: DecodeProblem, arch: str, gpu: str, folder: Path | None = None) -> DecodeConfig | None:
    """The tuned configuration of `problem` on the GPU whose slug is `gpu` ("h200"), or None. Raises InvalidPlanTable.

    Entries are measured with one query row per request: there is no entry for several.
    """
    instead = _forced.get()
    if instead is not None:
        return instead.config
    if problem.query != "one":
        return None
    entries = load((folder or plans_folder()) / f"{gpu}.json")
    return next((entry.config for entry in entries if entry.matches(problem, arch)), None)


def plans_folder() -> Path:
    """The folder of plan tables: inside the package if installed, next to the package in a checkout."""
    here = Path(__file__).parents[2]
    return here / "plans" if (here / "plans").is_dir() else here.parent / "plans"


@functools.lru_cache(maxsize=16)
def load(path: Path) -> tuple[Entry, ...]:
    """The validated entries of one file; none if it does not exist. Raises InvalidPlanTable."""
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
    measured = set(MEASURED) if isinstance(raw, dict) and set(MEASURED) & set(raw) else set()
    _check_keys(where, raw, {*EXACT, *BUCKETS, "config", *measured})
    for name, kind in EXACT.items():
        if type(raw[name]) is not kind:
            raise InvalidPlanTable(f"{where}.{name}", raw[name], f"must be of type {kind.__name__}")
    given = set(raw["config"]) if isinstance(raw["config"], dict) else set()
    knobs = set(KNOBS) - (OPTIONAL_KNOBS - given)
    _check_keys(f"{where}.config", raw["config"], knobs)
    for name in sorted(knobs):
        if name in NAMES:
            if raw["config"][name] not in NAMES[name]:
                raise InvalidPlanTable(f"{where}.config.{name}", raw["config"][name], f"must be one of {NAMES[name]}")
        elif type(raw["config"][name]) is not int or raw["config"][name] < 1:
            raise InvalidPlanTable(f"{where}.config.{name}", raw["config"][name], "must be an int of at least 1")
    buckets = tuple(_bucket(f"{where}.{name}", raw[name]) for name in BUCKETS)
    config = DecodeConfig(**raw["config"])
    return Entry(tuple(raw[name] for name in EXACT), buckets, config, _measured(where, raw) if measured else None)


def _measured(where: str, raw: Any) -> Measured:
    for name in ("us", "heuristic_us"):
        if type(raw[name]) not in (int, float) or not math.isfinite(raw[name]) or raw[name] <= 0:
            raise InvalidPlanTable(f"{where}.{name}", raw[name], "must be a number of microseconds above 0")
    if raw["us"] >= raw["heuristic_us"]:
        raise InvalidPlanTable(f"{where}.us", raw["us"], f"must be below heuristic_us = {raw['heuristic_us']}")
    if type(raw["commit"]) is not str or not raw["commit"]:
        raise InvalidPlanTable(f"{where}.commit", raw["commit"], "must name a commit")
    return Measured(float(raw["us"]), float(raw["heuristic_us"]), raw["commit"])


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
            if earlier.overlaps(entry.exact, entry.buckets):
                raise InvalidPlanTable(f"{name}: entries[{i}]", entry.exact, f"must not overlap entries[{j}]")
