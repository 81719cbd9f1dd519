"""The regions of a backward's workspace, and the tensors in them that a kernel takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config.backward import CHAIN_WORDS
from ..planning.workspace import WorkspaceRegion, end_of, rounded_up
from .descriptor import PagedAttentionBackwardDescriptor

WORD_BYTES = 4


def workspace_regions(descriptor: PagedAttentionBackwardDescriptor) -> tuple[WorkspaceRegion, ...]:
    """The regions of the workspace. Each ends on a cache line.

    delta: f32 [most_rows, num_heads]; for f16 the gradients' ranges (device/attend/gradient_range.py); if pages are shared, their
    chains (device/kv/chains.py), int32.
    """
    d = descriptor.attention
    words = {"delta": descriptor.most_rows * d.num_heads}
    if d.q_dtype == torch.float16:
        words["ranges"] = d.batch_size * d.num_kv_heads
    if descriptor.shared_pages:
        per_page, per_node = CHAIN_WORDS
        words |= {"pages": per_page * (d.num_pages or 0), "nodes": per_node * descriptor.nodes, "offsets": d.batch_size}
    regions: list[WorkspaceRegion] = []
    for name, count in words.items():
        regions.append(WorkspaceRegion(name, end_of(tuple(regions[-1:])), rounded_up(count * WORD_BYTES)))
    return tuple(region for region in regions if region.nbytes) if d.batch_size else ()


def workspace_tensors(
    descriptor: PagedAttentionBackwardDescriptor,
    regions: tuple[WorkspaceRegion, ...],
    workspace: Tensor,
    leading: tuple[int, ...],
) -> tuple[Any, ...]:
    """(delta [*leading, num_heads], ranges, pages, nodes, offsets) as a kernel takes them. leading: the axes of query rows."""
    d, shapes = descriptor.attention, {"delta": (*leading, descriptor.attention.num_heads)}
    per_page, per_node = CHAIN_WORDS
    shapes["ranges"] = (d.batch_size, d.num_kv_heads)
    shapes |= {"pages": (per_page, d.num_pages or 0), "nodes": (per_node, descriptor.nodes), "offsets": (d.batch_size,)}
    found: dict[str, Tensor] = {}
    for region in regions:
        shape = shapes[region.name]
        words = workspace[region.offset : region.offset + region.nbytes].view(torch.int32)
        found[region.name] = words[: torch.Size(shape).numel()].view(shape)
    delta = found["delta"].view(torch.float32)
    return delta, *(found.get(name) for name in ("ranges", "pages", "nodes", "offsets"))
