"""The shared memory of a CTA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config import KernelSpec
from . import tile
from .epilogue import merge_tensors
from .pack_gqa import query_layout


@dataclass(frozen=True)
class Shared:
    """The K and V rings, swizzled; two queries; the merge buffer; the mbarriers; the holes of each stage's tile (mask.py).

    schedule: what only the end of a share needs, (prefix, cost, slices) of it and the slice that opened its first row: kept
    out of registers.
    """

    rings: tuple
    query: cute.Tensor
    merge: tuple
    barriers: cute.Pointer
    holes: cute.Tensor
    schedule: cute.Tensor


def allocate(spec: KernelSpec, element_type: type) -> Shared:
    """Lays out the CTA's shared memory."""
    smem = cutlass.memory.SmemAllocator()
    ring, swizzle = tile.ring_layout(spec), tile.swizzle(spec)
    rings = tuple(smem.allocate_tensor(element_type, ring, byte_alignment=1024, swizzle=swizzle) for _ in range(2))
    query = smem.allocate_tensor(element_type, query_layout(spec), byte_alignment=128)
    merge = merge_tensors(spec, smem.allocate_array(Float32, spec.merge_floats, byte_alignment=16))
    barriers = smem.allocate_array(Int64, 2 * spec.num_stages)
    holes, schedule = (cute.make_tensor(smem.allocate_array(Int32, n), cute.make_layout(n)) for n in (spec.num_stages, 4))
    return Shared(rings, query, merge, barriers, holes, schedule)


@cute.jit
def read_holes(spec: cutlass.Constexpr, shared: Shared, stage: Int32) -> Int32:
    """The holes of the tile in a stage, for all lanes. Only lane 0, which also frees the stage, reads them."""
    holes = Int32(0)
    if cutlass.const_expr(spec.source == "paged"):
        if cute.arch.lane_idx() == 0:
            holes = shared.holes[stage]
        holes = cute.arch.shuffle_sync(holes, 0)
    return holes
