"""The scratch memory of cut rows: named regions whose layout host and device (device/partials.py) agree on.

A workspace is zeroed once and from then on left to plans: each launch leaves it as it found it, zero, so launches of any plans
may use it one after the other. Two launches may not use it at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import SLOTS, Partition, packed_rows
from .descriptors import DecodeProblem
from .errors import InvalidArgument

REGION_ALIGNMENT = 128  # bytes: a region starts and ends on a cache line
WORKSPACE_ALIGNMENT = 16  # bytes: what the workspace's own pointer must keep
ANNOUNCEMENT_BYTES = 4
WORD_BYTES = 16  # two neighbouring columns, the lse and a mark


@dataclass(frozen=True)
class WorkspaceRegion:
    """`nbytes` bytes from `offset` bytes into the workspace."""

    name: str
    offset: int
    nbytes: int


def workspace_regions(
    problem: DecodeProblem, num_ctas: int, partition: Partition, unit_heads: int = 1
) -> tuple[WorkspaceRegion, ...]:
    """The regions of a grid of `num_ctas` CTAs; none where rows stay whole or the batch is empty. Lengths do not matter.

    partial_states: words [SLOTS num_ctas, min(group_size x unit_heads, 16), padded head_dim / 2] of out, lse and a mark, as
    device/partials.py lays them out. announcements: i32 [num_ctas], of CTAs that have started, where the combine of a row is
    divided between them.
    """
    slots = SLOTS[partition] * num_ctas
    if slots == 0 or problem.batch_size == 0:
        return ()
    words = slots * packed_rows(problem.group_size * unit_heads) * problem.padded_head_dim // 2
    states = WorkspaceRegion("partial_states", 0, words * WORD_BYTES)
    if partition == "invariant":
        return (states,)
    return states, WorkspaceRegion("announcements", states.nbytes, num_ctas * ANNOUNCEMENT_BYTES)


def workspace_bytes(problem: DecodeProblem, num_ctas: int, partition: Partition, unit_heads: int = 1) -> int:
    """Exact bytes of the workspace: the end of the last region, rounded up to 128."""
    regions = workspace_regions(problem, num_ctas, partition, unit_heads)
    return _aligned(regions[-1].offset + regions[-1].nbytes) if regions else 0


def new_workspace(nbytes: int, device: torch.device) -> Tensor:
    """A zeroed workspace, uint8 [nbytes], that any stream may use at once.

    Inside a graph capture it belongs to the graph's pool, and its zeroing is a node of the graph.
    """
    with torch.inference_mode(False):  # the caller's mode is not that of later runs
        workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
    return workspace


def check_clean(workspace: Tensor, regions: tuple[WorkspaceRegion, ...]) -> None:
    """Raises InvalidArgument for the first foreign byte of a workspace's regions; waits for its device."""
    for region in regions:
        dirty = workspace[region.offset : region.offset + region.nbytes].nonzero()
        if len(dirty):
            offset = region.offset + int(dirty[0])
            first = f"the first {int(workspace[offset])} at byte {offset}"
            found = f"holds {len(dirty)} foreign bytes in its region {region.name}, {first}"
            raise InvalidArgument("workspace", f"{found}; must be zeroed once and then be written by launches of plans only")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
