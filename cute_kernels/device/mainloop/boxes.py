"""TMA boxes: the tensor map of a cache, and where each box of a tile lies in the cache and in a ring of tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ...config.problem import UNIT_BYTES
from ...config.tiling import RingShape
from . import tile


def in_units(cache: cute.Tensor) -> cute.Tensor:
    """A cache [pages, heads, slots, head_dim] as 16-bit units: two neighbouring 8-bit columns make one, an f32 column two."""
    if cache.element_type.width == 8 * UNIT_BYTES:
        return cache
    return cute.recast_tensor(cache, cutlass.Float16)


def tensor_map(cache: cute.Tensor, shape: RingShape) -> tuple:
    """(atom, coordinates) of a cache [pages, heads, slots, head_dim] in any strides, for boxes of a ring."""
    (width, blocks), units = tile.columns(shape), in_units(cache)
    slots, heads, pages = (units.shape[i] for i in (2, 1, 0))
    strides = [units.stride[i] for i in (2, 1, 0)]
    shapes, steps = (slots, (width, blocks), heads, pages), (strides[0], (1, width), *strides[1:])
    if shape.by_block:
        shapes, steps = (slots, width, blocks, heads, pages), (strides[0], 1, width, *strides[1:])
    view = cute.make_tensor(units.iterator, cute.make_layout(shapes, stride=steps))
    slab = cute.make_composed_layout(tile.swizzle(shape), 0, tile.slab_layout(shape))
    load = cpasync.CopyBulkTensorTileG2SOp()
    return tuple(cpasync.make_tiled_tma_atom(load, view, slab, (shape.box_rows, tile.box_columns(shape))))[:2]


def partition_boxes(atom, coords: cute.Tensor, ring: cute.Tensor, shape: RingShape) -> tuple:
    """Boxes in shared memory [box, slab, column block, stage] and global memory [box, slot block, column block, head, page].

    Global memory has no axis of column blocks if a box brings all of them.
    """
    slabs = cute.make_tensor(ring.iterator, tile.slab_ring_layout(shape))
    boxes = cute.zipped_divide(coords, (shape.box_rows, tile.box_columns(shape)))
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(slabs, 0, 2), boxes)


def arrive_after_copies(barrier: cute.Pointer):
    """Each lane arrives at the barrier once all cp.async that it has started so far have landed."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[Int32(barrier.toint())])
