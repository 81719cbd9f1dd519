"""Providers and a clock that need no GPU, for tests of the code that times them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from perf.correctness import OURS, attention_f64
from perf.providers.base import Candidate
from perf.timing import Preceded, Rotation, summarize


@dataclass(frozen=True)
class FakeRotation(Rotation):
    us: float


def us_of(call):
    """The microseconds of a call on the clock: its `us`, or 10; for a call after another, the sum of both."""
    return us_of(call.before) + us_of(call.call) if isinstance(call, Preceded) else getattr(call, "us", 10.0)


class FakeClock:
    """A clock on which every call of a rotation takes as long as the first."""

    def __init__(self, lost=False):
        self.lost = lost

    def capture(self, calls):
        for call in calls:
            call()
        return FakeRotation(lambda: None, len(calls), us_of(calls[0]))

    def times(self, rotations, replays):
        return [summarize([rotation.us * rotation.calls] * replays, rotation.calls) for rotation in rotations]

    def under_load(self, rotations, query):
        return query()

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


class Kernel:
    """A configuration's right answer, or a wrong one, in as many microseconds as `us` says."""

    name, tolerance, reads_unused = "ours", OURS, False

    def __init__(self, us, wrong, config):
        self.us, self.wrong, self.config = us, wrong, config

    def available(self):
        return None

    def version(self):
        return "1"

    def prepare(self, inputs):
        calls = [partial(self.answer, inputs, index) for index in range(len(inputs.sets))]
        us = self.us(inputs.case, self.config)
        first = calls[0]

        def timed():
            return first()

        timed.us = us
        return [Candidate([timed, *calls[1:]])]

    def answer(self, inputs, index):
        outs = []
        for row, q in enumerate(inputs.sets[index].q):
            outs.append(attention_f64(q, *inputs.row(index, row), inputs.softmax_scale)[0].to(q.dtype))
        return torch.stack(outs) * (0 if self.config in self.wrong else 1), None
