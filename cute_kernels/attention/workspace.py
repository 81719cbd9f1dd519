"""The regions of a decode launch's workspace, whose layout host and device (device/combine/partials.py) agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..config.decode import SLOTS, Partition
from ..planning.workspace import REGION_ALIGNMENT, WorkspaceRegion
from .descriptors import DecodeProblem

ANNOUNCEMENT_BYTES = 4
WORD_BYTES = 16


def workspace_regions(
    problem: DecodeProblem, num_ctas: int, partition: Partition, state_words: int
) -> tuple[WorkspaceRegion, ...]:
    """The regions of a grid of `num_ctas` CTAs; none where rows stay whole or the batch is empty. Lengths do not matter.

    partial_states: words of 16 bytes [SLOTS num_ctas, state_words], out, lse and marks of a unit's packed rows
    (KernelSpec.state_words, device/combine/partials.py). announcements: i32 [num_ctas], of CTAs that have started, where the
    combine of a row is divided between them.
    """
    slots = SLOTS[partition] * num_ctas
    if slots == 0 or problem.batch_size == 0:
        return ()
    states = WorkspaceRegion("partial_states", 0, slots * state_words * WORD_BYTES)
    if partition == "invariant":
        return (states,)
    return states, WorkspaceRegion("announcements", states.nbytes, num_ctas * ANNOUNCEMENT_BYTES)


def joined(regions: Iterable[tuple[WorkspaceRegion, ...]]) -> tuple[WorkspaceRegion, ...]:
    """The regions of several phases, one behind the other; those of further phases carry their number."""
    begin, found = 0, []
    for number, own in enumerate(regions):
        suffix = f"_{number}" if number else ""
        found += [replace(region, name=region.name + suffix, offset=begin + region.offset) for region in own]
        begin += end_of(own)
    return tuple(found)


def workspace_bytes(problem: DecodeProblem, num_ctas: int, partition: Partition, state_words: int) -> int:
    """Exact bytes of the workspace: the end of the last region, rounded up to 128."""
    return end_of(workspace_regions(problem, num_ctas, partition, state_words))


def end_of(regions: tuple[WorkspaceRegion, ...]) -> int:
    """Bytes up to the end of the last region, rounded up to REGION_ALIGNMENT."""
    nbytes = regions[-1].offset + regions[-1].nbytes if regions else 0
    return -(-nbytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
