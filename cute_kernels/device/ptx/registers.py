"""The bits of a 32-bit register as another type, reductions over a warp, and division of non-negative numbers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

LANES = cute.arch.WARP_SIZE
SIGN, MAGNITUDE = -(2**31), 2**31 - 1  # the sign bit, and all other bits


def _moved(value: Int32 | Float32, kind: type) -> Any:
    """A 32-bit register as another one of type `kind`, with the same bits: to the compiler they have nothing in common."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[kind], read_only_args=[value])


def as_float(bits: Int32) -> Float32:
    """The f32 with these bits."""
    return _moved(bits, Float32)


def as_bits(value: Float32) -> Int32:
    """The bits of an f32."""
    return _moved(value, Int32)


def unknown(value: Int32) -> Int32:
    """A value of which the compiler no longer knows what it knew."""
    return _moved(value, Int32)


def warp_max(value: Int32) -> Int32:
    """The largest of a warp's values."""
    return cute.arch.inline_ptx("redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[value])


def lane_sum(value: Int32) -> Int32:
    """The sum of a warp's values, which must not wrap."""
    return cute.arch.inline_ptx("redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[value])


def quotient(number: Int32, divisor: Int32 | int) -> Int32:
    """number // divisor, neither negative: signed division is a chain of ten steps even if the divisor is known."""
    return Int32(Uint32(number) // Uint32(divisor))


def quick_quotient(number: Int32, divisor: Int32) -> Int32:
    """number // divisor in fewer steps, for a number from 0 to 2**20: half a step keeps the quotient clear of rounding."""
    return Int32((number.to(Float32) + 0.5) * cute.arch.rcp_approx(divisor.to(Float32)))


def remainder(number: Int32, divisor: Int32 | int) -> Int32:
    """number % divisor, neither negative: unsigned, as in `quotient`."""
    return Int32(Uint32(number) % Uint32(divisor))
