"""The scratch memory of launches, in named regions.

A workspace is zeroed once, and from then on only plans write to it. Each launch leaves it zero, as it found it, so launches of
any plans may use it one after the other. Two launches may not use it at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidArgument
from ..memory import lasting_zeros

REGION_ALIGNMENT = 128  # bytes: a launch's regions end on a cache line, so that the next phase's regions begin on one
WORKSPACE_ALIGNMENT = 16  # bytes: the workspace's own pointer is a multiple of it


@dataclass(frozen=True)
class WorkspaceRegion:
    """`nbytes` bytes from `offset` bytes into the workspace."""

    name: str
    offset: int
    nbytes: int


def rounded_up(nbytes: int) -> int:
    """nbytes, rounded up to whole cache lines."""
    return -(-nbytes // REGION_ALIGNMENT) * REGION_ALIGNMENT


def end_of(regions: tuple[WorkspaceRegion, ...]) -> int:
    """Bytes up to the end of the last region. That is their sum, since each region begins where the previous one ends."""
    return regions[-1].offset + regions[-1].nbytes if regions else 0


def new_workspace(nbytes: int, device: torch.device) -> Tensor:
    """A zeroed workspace, uint8 [nbytes], that any stream may use at once.

    Inside a graph capture it belongs to the graph's pool, and its zeroing is a node of the graph.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # the caller's mode is not that of later runs
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return lasting_zeros((nbytes,), torch.uint8, device)


def check_clean(workspace: Tensor, regions: tuple[WorkspaceRegion, ...]) -> None:
    """Raises InvalidArgument for the first foreign byte of a workspace's regions; waits for its device."""
    for region in regions:
        dirty = workspace[region.offset : region.offset + region.nbytes].nonzero()
        if len(dirty):
            offset = region.offset + int(dirty[0])
            first = f"the first {int(workspace[offset])} at byte {offset}"
            found = f"holds {len(dirty)} foreign bytes in its region {region.name}, {first}"
            raise InvalidArgument("workspace", f"{found}; must be zeroed once and then be written by launches of plans only")
