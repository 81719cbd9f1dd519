"""The workspaces of the one-call functions: one per device and stream, and another for each graph capture.

A workspace serves any plans whose launches follow each other (planning/workspace.py), as launches on one stream do. A captured
graph may be replayed on any stream, at the same time as other launches. So each capture takes a workspace from the graph's own
pool. Its zeroing is a node of the graph before its first use, so the pool may lend the memory out between two replays.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from ..planning.workspace import new_workspace

MAX_STREAMS = 64  # streams whose workspaces are kept, the least recently used first to go

Key = tuple[torch.device, int]  # a device and the handle of a stream


class Captured(NamedTuple):
    """A workspace that belongs to the graph of one capture."""

    capture: int
    workspace: Tensor


_kept: OrderedDict[Key, Tensor] = OrderedDict()
_captured: dict[Key, Captured] = {}


def stream_workspace(nbytes: int, device: torch.device, reuse_in_capture: bool = True) -> Tensor | None:
    """A zeroed workspace of at least `nbytes` for a launch on the device's current stream; None if `nbytes` is 0.

    reuse_in_capture: whether later calls of the same capture on the same stream get the same workspace. False is for tracing
    compilers, which want no memory of a graph's pool to outlive the operator that took it: each call then zeroes its own.
    """
    if nbytes == 0:
        return None
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if torch.cuda.is_current_stream_capturing():
        return _of_capture(key, nbytes) if reuse_in_capture else new_workspace(nbytes, device)
    _captured.pop(key, None)  # that capture is over
    workspace = _kept.get(key)
    if workspace is None or workspace.numel() < nbytes:
        workspace = _kept[key] = new_workspace(nbytes, device)
        if len(_kept) > MAX_STREAMS:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
    return workspace


def forget_workspaces() -> None:
    """Frees the kept workspaces. A launch in flight is safe: the allocator reuses its memory in the order of its stream."""
    _kept.clear()
    _captured.clear()


def _of_capture(key: Key, nbytes: int) -> Tensor:
    """The workspace of the capture under way on a stream; a larger one from now on if a plan needs more."""
    capture = capture_id(key[1])
    held = _captured.get(key)
    if held is None or held.capture != capture or held.workspace.numel() < nbytes:
        held = _captured[key] = Captured(capture, new_workspace(nbytes, key[0]))
    return held.workspace


def capture_id(stream: int) -> int:
    """The driver's number of the capture under way on a stream: unique in the process, the same for all streams of a capture."""
    from cuda.bindings import driver

    _, _, capture, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    return int(capture)
