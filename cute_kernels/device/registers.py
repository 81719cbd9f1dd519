"""The bits of a 32-bit register as another type."""

import cutlass.cute as cute
from cutlass import Float32, Int32


def as_float(bits: Int32) -> Float32:
    """The f32 with these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def as_bits(value: Float32) -> Int32:
    """The bits of an f32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
