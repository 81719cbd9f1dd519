"""Words of f16: eight columns of a partial state and the power of two that they are multiples of.

Neighbouring lanes whose words share an lse find one power from their largest finite magnitude, which then lies in [2**14, 2**15).
So a column is rounded to 11 bits unless it is below 2**-28 of that magnitude, whatever V's range; an output in bf16 is rounded by
eight times as much. Infinity and NaN stay what they are. The power goes with the lse, as the magnitude of its mark: the exponent
field of an f32. The first pair of columns is the word's own mark: a pair of zeros is written as negative zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ...config.decode import KernelSpec
from ..ptx.packed import pack, widen_pair
from ..ptx.registers import MAGNITUDE, as_bits, as_float

FIELD = 23  # the first bit of an f32's exponent field
TOP = 127 + 14 + 127  # what the exponent fields of the factor and of the largest magnitude add up to
MOST = 253  # exponent field of the largest factor whose inverse is normal
INVERSE = 254  # what the exponent fields of a power of two and of its inverse add up to
NEGATIVE_ZEROS = -0x7FFF8000  # two of f16


def as_halves(spec: KernelSpec, values: list) -> tuple[list[Int32], Int32]:
    """(a word's eight f32 columns as four pairs of f16, the exponent field of their power of two).

    All lanes of a warp call it together if words of several lanes share an lse.
    """
    peak = Int32(0)  # the bits of twice the largest finite magnitude: those of infinity and NaN become negative
    for value in values:
        peak = cutlass.max(peak, (as_bits(value) & MAGNITUDE) + (1 << FIELD))
    for step in range(spec.words_an_lse.bit_length() - 1):
        peak = cutlass.max(peak, cute.arch.shuffle_sync_bfly(peak, offset=1 << step))
    field = cutlass.min(MOST, TOP + 1 - (peak >> FIELD))
    factor = as_float(field << FIELD)
    pairs = [pack("f16", values[i] * factor, values[i + 1] * factor) for i in range(0, len(values), 2)]
    pairs[0] = cutlass.select_(pairs[0] == 0, NEGATIVE_ZEROS, pairs[0])
    return pairs, INVERSE - field


def from_halves(pairs: list[Float32], mark: Int32) -> tuple[list[Float32], Float32]:
    """(the eight columns of a received word, their power of two). pairs: bits of two columns each; mark: that of the lse."""
    columns = [value for pair in pairs for value in widen_pair(Float16, as_bits(pair))]
    return columns, as_float(cutlass.max(mark, -mark) << FIELD)
