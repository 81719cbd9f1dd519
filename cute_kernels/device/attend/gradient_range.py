"""Brings the gradients of scores into the range of f16, exactly: each times a power of two, by which a sum is divided again.

For dQ each row has a factor of its own, which follows the largest gradient so far, as softmax's maximum follows the scores; the
sums are rescaled with it. The largest gradient of a request and KV head is left for the launches over its keys, whose sums cross
the rows. A factor brings the largest gradient to [2**14, 2**15). bf16 has f32's range, and needs none of this.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..ptx.registers import as_bits, as_float
from .softmax import quad_max, rescale_row

ONE = 127  # exponent field of 1
TOP = 2 * ONE + 14  # what the exponent fields of a gradient and of the factor that brings it to 2**14 add up to
MOST = ONE + 30  # exponent field of the largest gradient that a factor follows: an infinity may not move other gradients to zero
LARGEST_FIELD = 254
LEAST = 1  # exponent field of the largest gradient if there was none yet
MOST_STEP = 64  # binary digits by which sums in f32 are scaled up at once


def power_of_two(field: Int32) -> Float32:
    """2**(field - 127); 0 below f32's normal numbers."""
    return as_float(cutlass.max(Int32(0), cutlass.min(field, LARGEST_FIELD)) << 23)


def lift_of(largest: Int32) -> Int32:
    """The exponent field of the factor, from that of the largest gradient."""
    return cutlass.min(TOP - largest, LARGEST_FIELD)


@cute.jit
def lift_rows(acc_ds: cute.Tensor, sums: cute.Tensor, largest: cute.Tensor):
    """Multiplies a tile's gradients by their rows' factors, and rescales sums. largest: both rows' exponent fields, updated."""
    for r in cutlass.range_constexpr(2):
        peak = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(acc_ds)):
            if cutlass.const_expr(i // 2 % 2 == r):
                peak = cute.arch.fmax(peak, cute.arch.fmax(acc_ds[i], -acc_ds[i]))
        before = largest[r]
        field = cutlass.min(as_bits(quad_max(peak)) >> 23, MOST)
        largest[r] = cutlass.max(before, field)
        factor = power_of_two(lift_of(largest[r]))
        for i in cutlass.range_constexpr(cute.size(acc_ds)):
            if cutlass.const_expr(i // 2 % 2 == r):
                acc_ds[i] = acc_ds[i] * factor
        rescale_row(sums, r, power_of_two(ONE + lift_of(largest[r]) - lift_of(before)))


def lower_rows(sums: cute.Tensor, largest: cute.Tensor):
    """Divides the rows of a sum by their factors."""
    for r in range(2):
        rescale_row(sums, r, power_of_two(2 * ONE - lift_of(largest[r])))


@cute.jit
def move_sums(sums: cute.Tensor, before: Int32, ranges: cute.Tensor, place: tuple) -> Int32:
    """Rescales a sum from one factor, `before`, to that of a request and KV head; returns the new factor's exponent field."""
    field = cutlass.min(lift_of(cutlass.max(ranges[place], LEAST)), before + MOST_STEP)
    step = power_of_two(ONE + field - before)
    for r in cutlass.range_constexpr(2):
        rescale_row(sums, r, step)
    return field
