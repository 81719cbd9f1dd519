"""The workspaces of the one-call functions: one a device and stream, and one of its own for each graph capture.

A workspace serves any plans whose launches follow each other (planning/workspace.py). On one stream they do. A captured graph
may be replayed on any stream, beside anything: each capture takes a workspace from the graph's own pool, whose zeroing is a
node of the graph before its first use, so that the pool may hand the memory to others between two replays.
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
    """A zeroed workspace of at least `nbytes` for a launch on the device's current stream; None where `nbytes` is 0.

    reuse_in_capture: whether later calls of the same capture on the same stream get the same one. Tracing compilers want none of
    their graph pool's memory to outlive the operator that took it; then each call of a capture zeroes one for itself.
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
    """Gives back what is kept. A launch in flight keeps its memory: the allocator reuses it in the order of its stream."""
    _kept.clear()
    _captured.clear()


def _of_capture(key: Key, nbytes: int) -> Tensor:
    """The workspace of the capture that goes on on a stream; a larger one from here on where a plan needs more."""
    capture = capture_id(key[1])
    held = _captured.get(key)
    if held is None or held.capture != capture or held.workspace.numel() < nbytes:
        held = _captured[key] = Captured(capture, new_workspace(nbytes, key[0]))
    return held.workspace


def capture_id(stream: int) -> int:
    """The driver's number of the capture that goes on on a stream: unique in the process, the same for all of its streams."""
    from cuda.bindings import driver

    _, _, capture, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    return int(capture)
