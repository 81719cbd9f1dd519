"""The records of one GPU as a history: the records of each revision, oldest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from perf.measure import DEVICE
from perf.records import Record


class Key(NamedTuple):
    """The subject of repeated measurements: a metric of a provider on a case, which is named."""

    name: str
    provider: str
    metric: str = DEVICE


@dataclass(frozen=True)
class Revision:
    """The records of one state of the checkout. label: its commit, shortened, and whether it was changed since.

    time: the time of its first record. runs: the records of each case, provider and metric, oldest first: several if it was
    measured again.
    """

    label: str
    time: datetime
    runs: Mapping[Key, tuple[Record, ...]]

    def timed(self, key: Key) -> tuple[Record, ...]:
        """The runs of a case, provider and metric that have a time."""
        return tuple(record for record in self.runs.get(key, ()) if record.us is not None)

    def newest(self, key: Key) -> Record | None:
        """The newest record of a case, provider and metric, with a time or without."""
        return self.runs[key][-1] if key in self.runs else None

    @property
    def machines(self) -> frozenset[str | None]:
        """The physical GPUs that the revision was measured on; None among them if a record does not name its GPU."""
        return frozenset(record.machine for of_key in self.runs.values() for record in of_key)


def revision(label: str, records: Iterable[Record]) -> Revision:
    """`records` as one revision. Raises ValueError if none is of device time."""
    ordered = sorted(records, key=lambda record: record.time)
    if not any(record.metric == DEVICE for record in ordered):
        raise ValueError(f"{label}: holds no record of device time")
    runs: dict[Key, list[Record]] = {}
    for record in ordered:
        runs.setdefault(Key(record.name, record.provider, record.metric), []).append(record)
    return Revision(label, ordered[0].time, {key: tuple(of_key) for key, of_key in runs.items()})


def revisions(records: Iterable[Record]) -> list[Revision]:
    """Every revision among `records` that has a record of device time, oldest first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.revision, []).append(record)
    timed = [(label, group) for label, group in groups.items() if any(record.metric == DEVICE for record in group)]
    return sorted((revision(label, group) for label, group in timed), key=lambda entry: entry.time)


def by_gpu(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each GPU, in order of appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.gpu, []).append(record)
    return groups
