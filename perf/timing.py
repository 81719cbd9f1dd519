"""Device time from replays of CUDA graphs, and host time from eager calls.

Every provider is timed in the same way: one graph holds a call on each input set in turn, a replay is timed with events
and divided by the number of calls, and the providers' replays are interleaved, so that they see the same clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from cute_kernels.bench.clock import capture

WARM_UP = 2

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over `replays` replays: median, 20th and 80th percentile.

    samples: the time of each replay in chronological order, to 0.1 ns; empty in records that are older than this field.
    """

    median: float
    p20: float
    p80: float
    replays: int
    samples: tuple[float, ...] = ()


def summarize(replay_us: Sequence[float], calls: int) -> Timing:
    """Timing of one call from the times of whole replays of `calls` calls each."""
    samples = np.asarray(replay_us) / calls
    p20, mid, p80 = np.percentile(samples, [20, 50, 80])
    return Timing(float(mid), float(p20), float(p80), len(samples), tuple(float(us) for us in samples.round(4)))


def added(whole: Timing, part: Timing) -> Timing:
    """The time that one call adds to `part`: replay by replay, the difference of two interleaved rotations of as many calls.

    Raises ValueError if a difference is not positive: then it is lost in the noise.
    """
    differences = [a - b for a, b in zip(whole.samples, part.samples, strict=True)]
    if min(differences) <= 0:
        raise ValueError(f"a replay was {-min(differences):.2f} us a call faster with the calls than without them")
    return summarize(differences, 1)


@dataclass(frozen=True)
class Preceded:
    """A call right after another call, on one stream."""

    before: Callable[[], object]
    call: Callable[[], object]

    def __call__(self) -> object:
        self.before()
        return self.call()


class Clock(Protocol):
    """How device time is taken; a rotation is whatever `capture` returns."""

    def capture(self, calls: Sequence[Callable[[], object]]) -> Rotation:
        """Makes one replayable rotation of `calls`, one for each input set. Each call first runs eagerly."""

    def times(self, rotations: Sequence[Rotation], replays: int) -> list[Timing]:
        """Times each rotation `replays` times, interleaved."""

    def under_load(self, rotations: Sequence[Rotation], query: Callable[[], T]) -> T:
        """Returns the answer of `query`, which runs while the rotations are replayed, untimed."""

    def synchronize(self) -> None:
        """Waits for the device. Raises the error that occurred on it."""


@dataclass(frozen=True)
class Rotation:
    """Something that makes `calls` calls when replayed, a whole number of times over the input sets."""

    replay: Callable[[], None]
    calls: int


class GraphClock:
    """Replays of CUDA graphs on the current device, timed with events."""

    def capture(self, calls: Sequence[Callable[[], object]]) -> Rotation:
        graph, captured = capture(calls)
        return Rotation(graph.replay, captured)

    def times(self, rotations: Sequence[Rotation], replays: int) -> list[Timing]:
        for rotation in rotations:
            for _ in range(WARM_UP):
                rotation.replay()
        events = [[(timed_event(), timed_event()) for _ in range(replays)] for _ in rotations]
        for replay in range(replays):
            for rotation, pairs in zip(rotations, events, strict=True):
                start, end = pairs[replay]
                start.record()
                rotation.replay()
                end.record()
        self.synchronize()
        return [
            summarize([1e3 * start.elapsed_time(end) for start, end in pairs], rotation.calls)
            for rotation, pairs in zip(rotations, events, strict=True)
        ]

    def under_load(self, rotations: Sequence[Rotation], query: Callable[[], T]) -> T:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(query)
            while not answer.done():
                for rotation in rotations:
                    rotation.replay()
                self.synchronize()  # so that no long queue remains
        return answer.result()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def timed_event() -> torch.cuda.Event:
    """A CUDA event that keeps its time."""
    return torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True)
class HostRounds:
    """How often a host time is taken, `pause_s` seconds apart: a core's other work only adds time, and only for a while."""

    count: int = 4
    pause_s: float = 0.05


def host_time(
    call: Callable[[], object], calls: int, chunk: int, synchronize: Callable[[], None], rounds: HostRounds | None = None
) -> Timing:
    """Host time of one call: the round with the smallest median.

    A round makes `calls` calls, in chunks short enough not to fill the launch queue, synchronised in between.
    """
    rounds, found = rounds or HostRounds(), []
    call()
    for turn in range(rounds.count):
        time.sleep(rounds.pause_s if turn else 0.0)
        found.append(host_round(call, calls, chunk, synchronize))
    return min(found, key=lambda timing: timing.median)


def host_round(call: Callable[[], object], calls: int, chunk: int, synchronize: Callable[[], None]) -> Timing:
    """One round of host_time."""
    times = []
    for _ in range(calls // chunk):
        synchronize()
        start = time.perf_counter()
        for _ in range(chunk):
            call()
        times.append(1e6 * (time.perf_counter() - start))
    synchronize()
    return summarize(times, chunk)
