"""V's scales of tokens in widened tiles: the warps that widen V multiply each token's elements by its scale.

A widened element is stored x (scale / unit), rounded to f16, as in a 16-bit cache. The unit is a power of two, so far below the
largest scale that the piece has met that products just fit f16's range. It is published with the tile's K, and O is a multiple
of it. A token loses bits if its scale is below 2**-14 of the unit: 2**-22 of the largest scale (int8), 2**-21 (e4m3) or 2**-14
(e5m2). K's scales stay in f32 and multiply columns of scores: a rounded K would show in the lse.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.decode import KernelSpec
from ..ptx.barriers import FOLDED, sync_branches
from ..ptx.packed import pack
from ..ptx.registers import LANES, MAGNITUDE, as_float, warp_max
from .scale import EXPONENT, LARGEST_UNIT, ScaleRing, scale_bits

STEP = 1 << 23  # from a power of two's bits to the next one's
ROOM = {"int8": 8, "e4m3": 7, "e5m2": 0}  # an element times 2**ROOM is at most 65504


@dataclass(frozen=True)
class FoldedScales:
    """ratios: Int32 [token, wide stage], twice the f16 of scale / unit. units: Int32 [wide stage], the bits of the units."""

    ratios: cute.Tensor
    units: cute.Tensor


def make_folded_scales(spec: KernelSpec, smem) -> FoldedScales:
    """Shared memory for V's scales."""
    shapes = (spec.tile_n, spec.wide_stages), spec.wide_stages
    return FoldedScales(*(smem.allocate_tensor(Int32, cute.make_layout(shape)) for shape in shapes))


@cute.jit
def raise_unit(spec: cutlass.Constexpr, ring: ScaleRing, stage: Int32, unit: cute.Tensor):
    """Raises the unit for V's scales of a tile that has come. Each warp does it for itself."""
    peak = Int32(0)
    for group in cutlass.range_constexpr(spec.token_groups):
        if group * LANES + cute.arch.lane_idx() < spec.tile_n:
            peak = cutlass.max(peak, scale_bits(ring, stage, group, spec.v_scale == "token_f16") & MAGNITUDE)
    peak = cutlass.min(warp_max(peak) & EXPONENT, LARGEST_UNIT - STEP)
    unit[0] = cutlass.max(unit[0], peak + (1 - ROOM[spec.v_type]) * STEP)


@cute.jit
def publish_unit(folded: FoldedScales, wide: Int32, unit: cute.Tensor, warp: Int32):
    """The first warp that widens K leaves the unit for the warps that attend."""
    if warp == 0 and cute.arch.lane_idx() == 0:
        folded.units[wide] = unit[0]


@cute.jit
def fold_scales(spec: cutlass.Constexpr, ring: ScaleRing, folded: FoldedScales, stages: tuple, unit: cute.Tensor, warp: Int32):
    """The warps that widen V store a tile's ratios, then meet. stages: (narrow, wide). warp: this warp's number among them."""
    (stage, wide), inverse = stages, as_float((254 << 23) - unit[0])
    crew = cutlass.const_expr(len(spec.widening_crews[1]))
    for group in cutlass.range(warp, spec.token_groups, crew, unroll=1):
        token = group * LANES + cute.arch.lane_idx()
        if token < spec.tile_n:
            ratio = as_float(scale_bits(ring, stage, group, spec.v_scale == "token_f16")) * inverse
            folded.ratios[token, wide] = pack("f16", ratio, ratio)
    sync_branches(FOLDED, crew)


def follow_unit(unit: cute.Tensor, published: Int32) -> Float32:
    """Takes the unit with which a tile came, and returns the unit before over it."""
    before = unit[0]
    unit[0] = published
    return as_float((127 << 23) + before - published)
