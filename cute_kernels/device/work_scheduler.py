"""Which piece of work a CTA takes: (row, KV head, m-tile, split), and that split's share of the row's KV tiles.

A row's tiles are cut into num_splits contiguous shares from its length on the device, so one launch serves any lengths.
CTAs that read the same KV (the m-tiles of one split) are neighbours, then the heads of a row, whose pages lie together.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..config import TILE_M, KernelSpec


@dataclass(frozen=True)
class Work:
    """One CTA's piece. head: first query head of the m-tile; heads: how many of its rows are real."""

    row: Int32
    kv_head: Int32
    head: Int32
    heads: Int32
    split: Int32


def m_tiles(spec: KernelSpec) -> int:
    """Tensor-core tiles that hold the query heads of one KV head."""
    return -(-spec.group_size // TILE_M)


def take_work(spec: KernelSpec, num_kv_heads: Int32, num_splits: Int32) -> Work:
    """Decodes the linear CTA index: m-tile fastest, then split, KV head, row."""
    index, _, _ = cute.arch.block_idx()
    m_tile, index = index % m_tiles(spec), index // m_tiles(spec)
    split, index = index % num_splits, index // num_splits
    kv_head, row = index % num_kv_heads, index // num_kv_heads
    heads = cutlass.min(spec.group_size - m_tile * TILE_M, TILE_M)
    return Work(row, kv_head, kv_head * spec.group_size + m_tile * TILE_M, heads, split)


def tile_range(spec: KernelSpec, length: Int32, split: Int32, num_splits: Int32) -> tuple[Int32, Int32]:
    """[first, end) of the KV tiles of `split`; shares differ by at most one tile, and may be empty."""
    tiles = (length + spec.tile_n - 1) // spec.tile_n
    share, extra = tiles // num_splits, tiles % num_splits
    first = split * share + cutlass.min(split, extra)
    return first, first + share + (split < extra)
