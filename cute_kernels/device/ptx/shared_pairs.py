"""Pairs of f32 in shared memory, in one access each."""

import cutlass.cute as cute
from cutlass import Float32, Int32


def write_pair(at: cute.Pointer, first: Float32, second: Float32):
    """Writes two neighbours, aligned to 8 bytes."""
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[Int32(at.toint()), first, second])


def read_pair(at: cute.Pointer) -> tuple[Float32, Float32]:
    """Reads two neighbours, aligned to 8 bytes."""
    text = "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=[Int32(at.toint())])
