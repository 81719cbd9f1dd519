"""The regions of a decode launch's workspace, whose layout host and device (device/combine/partials.py) agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..config.decode import LINE_BYTES, SLOTS, Partition
from ..planning.workspace import WorkspaceRegion, end_of, rounded_up
from .descriptors import DecodeProblem

ANNOUNCEMENT_BYTES = 4
# i32 [1] in a cache line: how many items the CTAs of a mixed kernel have claimed (device/schedule/dealing.py)
CLAIMS = WorkspaceRegion("claims", 0, LINE_BYTES)
WORD_BYTES = 16


def workspace_regions(
    problem: DecodeProblem, num_ctas: int, partition: Partition, state_words: int
) -> tuple[WorkspaceRegion, ...]:
    """The regions of a grid of `num_ctas` CTAs. There are none if rows stay whole, or if the batch or its max_seq_len is 0.

    Lengths that a run decides do not matter.

    partial_states: words of 16 bytes [SLOTS num_ctas, state_words], which hold out, lse and marks of a unit's packed rows
    (KernelSpec.state_words, device/combine/partials.py), and counts of arrivals if blocks are dealt in pieces. announcements: i32
    [num_ctas], of CTAs that have started; there are some if CTAs divide the combine of a row between them. The last region ends
    on a cache line.
    """
    slots = SLOTS[partition] * num_ctas
    if slots == 0 or problem.batch_size == 0 or problem.max_seq_len == 0:  # a hint is never 0: no launch has a key
        return ()
    nbytes = slots * state_words * WORD_BYTES
    if partition != "balanced":
        return (WorkspaceRegion("partial_states", 0, rounded_up(nbytes)),)
    end = rounded_up(nbytes + num_ctas * ANNOUNCEMENT_BYTES)
    return WorkspaceRegion("partial_states", 0, nbytes), WorkspaceRegion("announcements", nbytes, end - nbytes)


def joined(regions: Iterable[tuple[WorkspaceRegion, ...]], claims: bool = False) -> tuple[WorkspaceRegion, ...]:
    """The regions of several phases, one after the other; from the second phase on, their names end in the phase's number.

    claims: whether CLAIMS come before them.
    """
    found = [CLAIMS] if claims else []
    begin = end_of(tuple(found))
    for number, own in enumerate(regions):
        suffix = f"_{number}" if number else ""
        found += [replace(region, name=region.name + suffix, offset=begin + region.offset) for region in own]
        begin += end_of(own)
    return tuple(found)


def workspace_bytes(problem: DecodeProblem, num_ctas: int, partition: Partition, state_words: int) -> int:
    """Exact bytes of the workspace."""
    return end_of(workspace_regions(problem, num_ctas, partition, state_words))
