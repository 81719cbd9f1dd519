"""Providers and a clock that need no GPU, for tests of what times them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from perf.providers.base import Candidate
from perf.timing import Rotation, summarize


@dataclass(frozen=True)
class FakeRotation(Rotation):
    us: float


class FakeClock:
    """A clock on which a call takes as many microseconds as the `us` of the first call says, or 10."""

    def __init__(self, lost=False):
        self.lost = lost

    def capture(self, calls):
        for call in calls:
            call()
        return FakeRotation(lambda: None, len(calls), getattr(calls[0], "us", 10.0))

    def times(self, rotations, replays):
        return [summarize([rotation.us * rotation.calls] * replays, rotation.calls) for rotation in rotations]

    def synchronize(self):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


class Fake:
    """A provider whose candidates are functions of a set's index."""

    reads_unused = False
    operation = "decode"

    def __init__(self, name, *candidates, tolerance=None, reason=None):
        self.name, self.candidates, self.tolerance, self.reason = name, candidates, tolerance, reason

    def available(self):
        return self.reason

    def version(self):
        return "1"

    def prepare(self, inputs):
        return [Candidate([partial(function, inputs, index) for index in range(3)]) for function in self.candidates]


class Timed(Fake):
    """A provider without results whose candidates take the given microseconds."""

    def __init__(self, name, *us):
        super().__init__(name)
        self.us = us

    def prepare(self, inputs):
        candidates = []
        for us in self.us:
            calls = [lambda: None for _ in inputs.sets]
            calls[0].us = us
            candidates.append(Candidate(calls, {"shape": us}))
        return candidates
