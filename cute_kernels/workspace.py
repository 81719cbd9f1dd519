"""The scratch memory of a split row: named regions whose layout host and device agree on."""

from __future__ import annotations

from dataclasses import dataclass

from .config import padded_head_dim
from .descriptors import DecodeProblem

REGION_ALIGNMENT = 128  # bytes: a region starts on a cache line
WORKSPACE_ALIGNMENT = 16  # bytes: what the workspace's own pointer must keep
F32_BYTES = 4


@dataclass(frozen=True)
class WorkspaceRegion:
    """`nbytes` bytes from `offset` bytes into the workspace."""

    name: str
    offset: int
    nbytes: int


def workspace_regions(problem: DecodeProblem, num_splits: int) -> tuple[WorkspaceRegion, ...]:
    """The regions of a launch with `num_splits` pieces a row; none where a row is not cut or there is no row.

    lse_partial f32 [num_splits, batch, num_heads]; out_partial f32 [num_splits, batch, num_heads, padded head_dim].
    """
    rows = num_splits * problem.batch_size * problem.num_heads
    if num_splits == 1 or rows == 0:
        return ()
    lse = WorkspaceRegion("lse_partial", 0, rows * F32_BYTES)
    out = WorkspaceRegion("out_partial", _aligned(lse.nbytes), rows * padded_head_dim(problem.head_dim) * F32_BYTES)
    return lse, out


def workspace_bytes(problem: DecodeProblem, num_splits: int) -> int:
    """Exact bytes of the workspace: the end of the last region, rounded up to 128."""
    regions = workspace_regions(problem, num_splits)
    return _aligned(regions[-1].offset + regions[-1].nbytes) if regions else 0


def fitting_splits(problem: DecodeProblem, num_splits: int, max_bytes: int | None) -> int:
    """The largest number of splits, at most `num_splits`, whose workspace fits in `max_bytes`; 1 needs no workspace."""
    while max_bytes is not None and num_splits > 1 and workspace_bytes(problem, num_splits) > max_bytes:
        num_splits -= 1
    return num_splits


def _aligned(nbytes: int) -> int:
    return -(-nbytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
