"""The records of one GPU as a history: what each revision measured, oldest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from perf.measure import DEVICE
from perf.records import Record

Key = tuple[str, str]  # case name, provider


@dataclass(frozen=True)
class Revision:
    """The device records of one state of the checkout. label: its commit, shortened, and whether it was changed since.

    time: that of its first record. runs: the records of each case and provider, oldest first: more than one where it was
    measured again.
    """

    label: str
    time: datetime
    runs: Mapping[Key, tuple[Record, ...]]

    def timed(self, key: Key) -> tuple[Record, ...]:
        """The runs of a case and provider that have a time."""
        return tuple(record for record in self.runs.get(key, ()) if record.us is not None)

    def newest(self, key: Key) -> Record | None:
        """The newest record of a case and provider, with a time or without."""
        return self.runs[key][-1] if key in self.runs else None


def revision(label: str, records: Iterable[Record]) -> Revision:
    """The device records among `records` as one revision. Raises ValueError where there is none."""
    ordered = sorted((record for record in records if record.metric == DEVICE), key=lambda record: record.time)
    if not ordered:
        raise ValueError(f"{label}: holds no record of device time")
    runs: dict[Key, list[Record]] = {}
    for record in ordered:
        runs.setdefault((record.name, record.provider), []).append(record)
    return Revision(label, ordered[0].time, {key: tuple(of_key) for key, of_key in runs.items()})


def revisions(records: Iterable[Record]) -> list[Revision]:
    """Every revision among `records`, oldest first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.metric == DEVICE:
            groups.setdefault(record.revision, []).append(record)
    return sorted((revision(label, group) for label, group in groups.items()), key=lambda entry: entry.time)


def by_gpu(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each GPU, in order of appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.gpu, []).append(record)
    return groups
