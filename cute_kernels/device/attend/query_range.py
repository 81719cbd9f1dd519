"""Brings a query into the range of f16, exactly: each row times a power of two, by which its scores are divided again.

The largest magnitude of a row then lies in [2**15, 2**16). bf16 has fewer bits than f16, so only elements of at most 2**-29 of
that magnitude are rounded, by at most 2**-40 of it. The sign of K's scale goes into the query as well: a softmax scale is above
zero.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.decode import KernelSpec
from ..elements import ELEMENT_TYPES
from ..ptx.packed import pack, widen_pair
from ..ptx.registers import as_bits, as_float, warp_max

TOP = 127 + 15 + 127  # what the exponent fields of the factor and of the row's largest magnitude add up to
MOST = 253  # exponent field of the largest factor whose inverse is normal
INVERSE = 254  # what the exponent fields of a power of two and of its inverse add up to


def rescale(spec: KernelSpec, pairs: cute.Tensor, sign: Float32) -> Float32:
    """A warp multiplies a row by its factor and a sign (1, 0 or -1); returns the factor's inverse.

    The factor is 1 unless the query goes into f16's range. pairs: this lane's pairs of elements, Int32 words; they are rounded in
    place to the type in which Q K^T is computed.
    """
    factor = inverse = Float32(1.0)
    if spec.limits_query:
        peaks = Int32(0)
        for i in range(cute.size(pairs)):
            peaks = larger_magnitudes(spec, peaks, pairs[i])
        first, second = widen_pair(ELEMENT_TYPES[spec.element_type], peaks)
        peak = warp_max(as_bits(cute.arch.fmax(first, second)))  # bits of non-negative floats are in order
        field = cutlass.max(1, cutlass.min(MOST, TOP - (peak >> 23)))
        factor, inverse = as_float(field << 23), as_float((INVERSE - field) << 23)
    for i in range(cute.size(pairs)):
        first, second = widen_pair(ELEMENT_TYPES[spec.element_type], pairs[i])
        pairs[i] = pack(spec.k_math, first * (factor * sign), second * (factor * sign))
    return inverse


def larger_magnitudes(spec: KernelSpec, peaks: Int32, pair: Int32) -> Int32:
    """The larger magnitude of two pairs, in each place. peaks: a pair without signs."""
    text = (
        "{ .reg .b32 before, magnitudes; mov.b32 before, {$r0}; and.b32 magnitudes, {$r1}, 0x7fff7fff; "
        f"max.{spec.element_type}x2 {{$w0}}, before, magnitudes; }}"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[peaks, pair])
