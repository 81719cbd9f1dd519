"""perf.timing.GraphClock on a device that is made up: its graphs are lists of calls, and time passes as each is replayed."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from perf.timing import GraphClock, Preceded, Timing, added


class Device:
    """A device of one stream. A call's work takes its `us`; events note the time at which they are reached.

    launched: names of the calls in the order in which the device ran them; spans: what was recorded and replayed, in order.
    """

    def __init__(self) -> None:
        self.now, self.launched, self.order = 0.0, [], []
        self.graph: Graph | None = None

    def work(self, name: str, us: float):
        """A call of so many microseconds."""

        def call() -> None:
            if self.graph is not None:
                self.graph.calls.append((name, us))
            else:
                self.run(name, us)

        return call

    def run(self, name: str, us: float) -> None:
        self.launched.append(name)
        self.now += us


class Graph:
    """A graph of a Device."""

    def __init__(self, device: Device) -> None:
        self.device, self.calls = device, []

    def replay(self) -> None:
        self.device.order.append(self.calls[0][0])
        for call in self.calls:
            self.device.run(*call)


class Event:
    """An event of a Device."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, None

    def record(self) -> None:
        assert self.at is None, "a second time"
        self.device.order.append("event")
        self.at = self.device.now

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, as CUDA has it."""
        return (end.at - self.at) / 1e3


@pytest.fixture
def device(monkeypatch) -> Device:
    made = Device()

    @contextmanager
    def capturing(graph):
        made.graph = graph
        yield
        made.graph = None

    @contextmanager
    def on(stream):
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, replacement in {
        "Stream": lambda device=None: stream,
        "current_stream": lambda device=None: stream,
        "stream": on,
        "synchronize": lambda device=None: made.order.append("synchronize"),
        "CUDAGraph": lambda: Graph(made),
        "graph": capturing,
        "Event": lambda enable_timing: Event(made),
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", replacement)
    return made


@pytest.mark.parametrize("sets", [1, 2, 3, 5, 8, 19])
def test_a_graph_has_eight_calls_and_whole_rotations(device, sets):
    """Fewer would be a time of the two events and of the graph's launch more than of the calls."""
    rotation = GraphClock().capture([device.work(f"set {i}", 5.0) for i in range(sets)])
    assert device.launched == [f"set {i}" for i in range(sets)], "each once beforehand, eagerly"
    device.launched.clear()
    rotation.replay()
    assert rotation.calls == len(device.launched) >= 8
    assert rotation.calls - sets < 8
    assert device.launched == [f"set {i % sets}" for i in range(rotation.calls)]


def test_replays_are_interleaved_each_between_its_own_events(device):
    clock = GraphClock()
    rotations = [clock.capture([device.work(name, us)] * 8) for name, us in (("a", 10.0), ("b", 20.0), ("c", 1.5))]
    device.order.clear()
    timings = clock.times(rotations, 5)
    timed = device.order[: device.order.index("synchronize")]
    first = timed.index("event")
    assert sorted(timed[:first]) == sorted("aabbcc"), "warm-up"
    assert timed[first:] == [part for _ in range(5) for name in "abc" for part in ("event", name, "event")]
    assert [timing.median for timing in timings] == pytest.approx([10.0, 20.0, 1.5])
    assert all(timing.replays == len(timing.samples) == 5 for timing in timings)


def test_a_device_that_slows_down_slows_all_rotations_alike(device):
    """What interleaving is for: of two equal rotations, timed one after the other, the second would seem slower."""
    clock = GraphClock()
    rotations = [clock.capture([device.work(name, 0.0)] * 8) for name in "ab"]
    run = device.run
    device.run = lambda name, us: run(name, 10.0 + len(device.launched) / 1000)
    a, b = clock.times(rotations, 21)
    assert b.median / a.median == pytest.approx(1.0, rel=0.002)
    assert a.samples[-1] / a.samples[0] > 1.02


def test_a_query_is_answered_while_rotations_are_replayed(device):
    rotation = GraphClock().capture([device.work("a", 10.0)] * 8)
    device.launched.clear()

    def query():
        before = len(device.launched)
        while len(device.launched) < before + 24:
            pass
        return "1980 MHz"

    assert GraphClock().under_load([rotation], query) == "1980 MHz"
    assert len(device.launched) >= 24
    assert device.order[-1] == "synchronize"
    with pytest.raises(OSError, match="no tool"):
        GraphClock().under_load([], lambda: (_ for _ in ()).throw(OSError("no tool")))


def test_what_calls_add_is_the_difference_within_each_round(device):
    """Rounds of 1.0 and 1.5 times the time: medians of pairs, not of what was timed at different clocks."""
    alone = Timing(2.0, 2.0, 3.0, 3, samples=(2.0, 3.0, 2.0))
    together = Timing(15.0, 12.0, 18.0, 3, samples=(12.0, 18.0, 15.0))
    timing = added(together, alone)
    assert timing.samples == (10.0, 15.0, 13.0)
    assert (timing.median, timing.replays) == (13.0, 3)
    assert (timing.p20, timing.p80) == pytest.approx((11.2, 14.2))
    with pytest.raises(ValueError, match=r"0\.50 us a call faster with the calls"):
        added(Timing(2.0, 2.0, 2.5, 2, samples=(2.5, 2.5)), Timing(2.0, 2.0, 3.0, 2, samples=(2.0, 3.0)))


def test_a_preceded_call_runs_second_and_returns_its_own_result(device):
    pair = Preceded(device.work("writes q", 2.0), lambda: device.work("reads q", 3.0)() or "out")
    assert pair() == "out"
    assert device.launched == ["writes q", "reads q"]
