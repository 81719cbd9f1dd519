"""The regions of a backward's workspace, and the tensors that a kernel takes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.workspace import end_of
from ..config.backward import CHAIN_WORDS
from ..planning.workspace import WorkspaceRegion
from .descriptor import PagedAttentionBackwardDescriptor

WORD_BYTES = 4


def workspace_regions(descriptor: PagedAttentionBackwardDescriptor) -> tuple[WorkspaceRegion, ...]:
    """delta: f32 [most_rows, num_heads]; in f16 the ranges of gradients (device/attend/gradient_range.py); where pages are shared
    their chains (device/kv/chains.py), int32.
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
        begin = end_of(tuple(regions[-1:]))
        regions.append(WorkspaceRegion(name, begin, count * WORD_BYTES))
    return tuple(region for region in regions if region.nbytes) if d.batch_size else ()


def workspace_tensors(
    descriptor: PagedAttentionBackwardDescriptor,
    regions: tuple[WorkspaceRegion, ...],
    workspace: Tensor,
    leading: tuple[int, ...],
) -> tuple[Any, ...]:
    """(delta [*leading, num_heads], ranges, pages, nodes, offsets) as a kernel takes them. leading: the axes of query rows."""
    found = {r.name: workspace[r.offset : r.offset + r.nbytes].view(torch.int32) for r in regions}
    shape = (*leading, descriptor.attention.num_heads)
    delta = found["delta"][: torch.Size(shape).numel()].view(torch.float32).view(shape)
    ranges = found["ranges"].view(-1, descriptor.attention.num_kv_heads) if "ranges" in found else None
    if not descriptor.shared_pages:
        return delta, ranges, None, None, None
    per_page, per_node = CHAIN_WORDS
    return delta, ranges, found["pages"].view(per_page, -1), found["nodes"].view(per_node, -1), found["offsets"]
