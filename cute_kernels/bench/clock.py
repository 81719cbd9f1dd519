"""How long a call takes: on a GPU from replays of a CUDA graph, on the CPU by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

REPLAYS = 21
CALLS = 8  # the least calls in a graph, so that the cost of the two events disappears
CPU_RUNS = 3

Advance = Callable[[], None]


def rounds(device: torch.device) -> int:
    """How often `seconds_of` calls `advance`."""
    return 1 + (REPLAYS if device.type == "cuda" else CPU_RUNS)


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device, advance: Advance) -> float:
    """The median time of one call; each call has inputs of its own. The first calls, which may compile, do not count."""
    if device.type != "cuda":
        return _on_cpu(calls, advance)
    graph, captured = capture(calls, device)
    advance()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / captured)
        advance()
    return median(times)


def capture(calls: Sequence[Callable[[], object]], device: torch.device | None = None) -> tuple[torch.cuda.CUDAGraph, int]:
    """(one graph of whole rounds of the calls, how many calls it holds: CALLS at least). Each call first runs eagerly.

    device: None stands for the current one.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    repeats = -(-CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph, repeats * len(calls)


def _on_cpu(calls: Sequence[Callable[[], object]], advance: Advance) -> float:
    times = []
    for run in range(1 + CPU_RUNS):
        started = time.perf_counter()
        for call in calls:
            call()
        if run:
            times.append((time.perf_counter() - started) / len(calls))
        advance()
    return median(times)
