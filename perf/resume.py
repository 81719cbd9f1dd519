"""A run in several calls: the cases that it still has to do, and whether there is time for one more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from perf.cases import Case
from perf.measure import DEVICE
from perf.records import Record


def unfinished(cases: Sequence[Case], records: Iterable[Record], providers: Iterable[str], commit: str) -> list[Case]:
    """The cases that lack a record of some provider, in one run at the unchanged `commit`; cases never tried come first.

    A record with a reason in place of a time counts too. Only records of one run count together: its providers were interleaved.
    """
    wanted = set(providers)
    tried: dict[str, dict[object, set[str]]] = {}
    for record in records:
        if record.metric == DEVICE and record.commit == commit and not record.dirty:
            tried.setdefault(record.name, {}).setdefault(record.time, set()).add(record.provider)
    left = [case for case in cases if not any(found >= wanted for found in tried.get(case.name, {}).values())]
    return sorted(left, key=lambda case: case.name in tried)


@dataclass
class Deadline:
    """Stops a run between cases: before a case that would end too late if it took as long as the longest so far.

    seconds: from now on; None never ends. The first case is always measured.
    """

    seconds: float | None
    clock: Callable[[], float] = time.perf_counter
    _start: float = field(init=False)
    _last: float | None = field(init=False, default=None)
    _longest: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._start = self.clock()

    def allows_another(self) -> bool:
        """Whether there is time for a case. Called before each case: the time between two calls is the time of a case."""
        now = self.clock()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        first, self._last = self._last is None, now
        return first or self.seconds is None or now + self._longest <= self._start + self.seconds
