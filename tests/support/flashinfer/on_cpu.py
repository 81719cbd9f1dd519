"""Runs tests that name cuda:0 on the CPU: devices are rewritten, and a graph replays the calls made during its capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import TorchFunctionMode

from cute_kernels.integrations import flashinfer

CPU = torch.device("cpu")


def moved(value: Any, to: bool) -> Any:
    """The CPU in place of a CUDA device, however it is named. to: whether a number names a device too, as in Tensor.to(0)."""
    named = isinstance(value, torch.device | str) and str(value).startswith("cuda")
    return CPU if named or (to and type(value) is int) else value


class OnCPU(TorchFunctionMode):
    """Every tensor is made on the CPU, and stays there."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = {name: moved(value, False) for name, value in (kwargs or {}).items()}
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            args = (args[0], *(moved(arg, True) for arg in args[1:]))
        return func(*args, **kwargs)


class CPUGenerator(torch.Generator):
    """A random number generator on the CPU, whatever device is named."""

    def __new__(cls, device: Any = CPU) -> CPUGenerator:
        return super().__new__(cls, CPU)


class RecordedGraph:
    """Replays the wrapper runs that were called during its capture, into the outputs that they returned then."""

    capturing: RecordedGraph | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


@contextmanager
def capture(graph: RecordedGraph) -> Iterator[None]:
    RecordedGraph.capturing = graph
    yield
    RecordedGraph.capturing = None


def recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        got = run(self, *args, **kwargs)
        if RecordedGraph.capturing is not None:
            kwargs |= dict(zip(("out", "lse"), got, strict=True)) if isinstance(got, tuple) else {"out": got}
            RecordedGraph.capturing.calls.append(lambda: run(self, *args, **kwargs))
        return got

    return call


@contextmanager
def on_cpu() -> Iterator[None]:
    cuda = {
        "CUDAGraph": RecordedGraph,
        "graph": capture,
        "Stream": MagicMock,
        "stream": lambda _stream: nullcontext(),
        "current_stream": MagicMock(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    with ExitStack() as replaced:
        for name, stand_in in cuda.items():
            replaced.enter_context(patch.object(torch.cuda, name, stand_in))
        for wrapper in (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper):
            replaced.enter_context(patch.object(wrapper, "run", recorded(wrapper.run)))
        replaced.enter_context(patch.object(torch, "Generator", CPUGenerator))
        replaced.enter_context(OnCPU())
        yield
