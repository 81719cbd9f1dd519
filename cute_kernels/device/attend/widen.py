"""Tiles of 8 bits made 16 in shared memory, where wgmma reads them: exactly, by warps that do nothing else."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.tiling import WIDENING_WARPS
from ..kv.codec import HALVES, decode
from ..ptx.registers import LANES
from .query_rows import TilePlace

UNITS = 4  # of a thread's load, 8 elements, which it stores as 16 bytes: then neither meets a bank twice
TOGETHER = 8  # loads of a thread before the first store, past which the compiler moves none


@cute.jit
def widen_tile(stored: cutlass.Constexpr, source: cute.Tensor, target: cute.Tensor, seen: TilePlace | None, warp: Int32):
    """Writes a tile [token, unit of two 8-bit elements] as [token, element] of f16. seen: zeros are written outside, or None.

    warp: which of the WIDENING_WARPS this one is.
    """
    per_row = cutlass.const_expr(cute.size(source, mode=[1]) // UNITS)
    threads, work = WIDENING_WARPS * LANES, cute.size(source, mode=[0]) * per_row
    narrow, wide = cute.zipped_divide(source, (1, UNITS)), cute.zipped_divide(target, (1, 2 * UNITS))
    thread = warp * LANES + cute.arch.lane_idx()
    turns = cutlass.const_expr(-(-work // threads))
    for begin in cutlass.range_constexpr(0, turns, TOGETHER):
        count = cutlass.const_expr(min(TOGETHER, turns - begin))
        found = cute.make_rmem_tensor((UNITS, count), narrow.element_type)
        for i in cutlass.range_constexpr(count):
            index = cutlass.min(thread + (begin + i) * threads, work - 1)
            cute.autovec_copy(narrow[(0, None), (index // per_row, index % per_row)], found[None, i])
        for i in cutlass.range_constexpr(count):
            index = thread + (begin + i) * threads
            if cutlass.const_expr(work % threads == 0) or index < work:
                place = index // per_row, index % per_row
                cute.autovec_copy(widened(stored, found[None, i], wide.element_type, seen, place[0]), wide[(0, None), place])


@cute.jit
def widened(stored: cutlass.Constexpr, units: cute.Tensor, element_type: cutlass.Constexpr, seen, token: Int32) -> cute.Tensor:
    """The elements of a token's units."""
    made = cute.make_rmem_tensor(2 * UNITS, element_type)
    source, target = cute.recast_tensor(units, Int32), cute.recast_tensor(made, Int32)
    for word in cutlass.range_constexpr(UNITS // 2):
        target[2 * word], target[2 * word + 1] = decode(stored, True, source[word], HALVES)
    if cutlass.const_expr(seen is not None) and is_outside(seen, token):
        target.fill(0)
    return made


def is_outside(place: TilePlace, token: Int32) -> Boolean:
    """Whether no row sees a token of a tile."""
    outside = token >= place.valid
    return outside if place.skip is None else outside | (token < place.skip)
