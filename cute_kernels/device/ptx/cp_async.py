"""Asynchronous copies of a few bytes to shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64


@cute.jit
def copy_async(source: Int64, target: Int32, size: cutlass.Constexpr, inside: Boolean):
    """Starts to copy 4, 8 or 16 bytes by cp.async; if `inside` is false it writes zeros and reads nothing.

    Copies of 16 bytes bypass L1. source: a global address, valid even if it is not read; target: a shared-memory address.
    """
    mode = "cg" if cutlass.const_expr(size == 16) else "ca"
    cute.arch.inline_ptx(
        f"cp.async.{mode}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[Int32(target), Int64(source), Int32(size) if inside else Int32(0)],
    )
