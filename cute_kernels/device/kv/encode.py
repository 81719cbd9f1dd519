"""Values as a cache stores them: divided by a scale in f32, rounded to nearest even and saturated, one 8-bit element each.

fp8 is encoded by instruction on sm_90a, two values at a time, and in integers on older GPUs (compute capability 8.0 to 8.8 has no
such instruction). Both give the same bits, also for subnormals, infinities and NaN (0x7f of either sign).
"""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int8, Int32, Uint8, Uint16

from ...kv.quantize import HALF_TO_INF, HALF_TO_ZERO, LARGEST_HALF, LEAST_AMAX, LEAST_NORMAL_HALF
from ..elements import stored_element
from ..ptx.registers import MAGNITUDE, SIGN, as_bits, as_float

LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
MANTISSA = {"e4m3": 3, "e5m2": 2}  # bits
LEAST_EXPONENT = {"e4m3": -6, "e5m2": -14}  # of a normal value
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
NAN_CODE = 0x7F
INF_BITS = 0x7F800000
LEAST_DIVISOR, LARGEST_DIVISOR = 2.0**-60, 2.0**122  # for which `ieee_quotient` holds
BEYOND = 2.0**20  # a quotient that saturates every type
ROUNDER = 1.5 * 2.0**23  # adding it rounds an f32 to a whole number, whose low bits are the low bits of the sum
NUDGE = 2.0**-21  # above the error of an inverse, 2**-22; below the distance of a product to the middle of two whole numbers
HALF_UNIT = 2.0**-18  # half of the last place of an f32 in 64..128
MANTISSA_BITS = {Float16: 11, BFloat16: 8}  # of a value before it is stored, with the implicit one; F32_BITS: of an f32
F32_BITS = 24


def bits_of(value: float) -> int:
    """The bits of an f32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def rounded_down(value: float) -> float:
    """The largest f32 that is not above a positive value."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    nearest, before = struct.unpack("<2f", struct.pack("<2i", bits, bits - 1))
    return nearest if nearest <= value else before


def fma(first: Float32, second: Float32, third: Float32) -> Float32:
    """first * second + third, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[first, second, third]
    )


def divide_largest(stored_type: str, largest: Float32) -> Float32:
    """largest / LARGEST[stored_type]: the bits of IEEE division for 16-bit values and LEAST_AMAX, infinity and NaN too.

    The inverse is a sum of two f32, neither of them negative.
    """
    inverse = 1.0 / LARGEST[stored_type]
    upper = rounded_down(inverse)
    return fma(largest, Float32(upper), largest * Float32(inverse - upper))


@cute.jit
def end_of_half(exact: Float32) -> Float32:
    """The f16 scale (quantize.rounded_scale) of an exact scale above zero that is not in f16's normal range."""
    scale = cutlass.select_(exact < Float32.inf, Float32(LARGEST_HALF), exact)
    if exact < LEAST_NORMAL_HALF:
        scale = whole_units(exact)
    return scale


def whole_units(value: Float32) -> Float32:
    """A value below 1/2, rounded up to a multiple of f16's least value: that is the last place of an f32 sum in 1/2..1."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 sum; add.rp.f32 sum, {$r0}, 0f3F000000; sub.rn.f32 {$w0}, sum, 0f3F000000; }",
        write_only_types=[Float32],
        read_only_args=[value],
    )


@cute.jit
def beyond_half(exact: Float32, largest: Float32) -> Boolean:
    """quantize.beyond_half of a row with the largest magnitude `largest`, which is at least LEAST_AMAX."""
    return (exact <= HALF_TO_ZERO and largest > LEAST_AMAX) or (exact >= HALF_TO_INF and exact < Float32.inf)


@cute.jit
def quantize(
    stored_type: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    rounded: cutlass.Constexpr,
    by_instruction: cutlass.Constexpr,
    values: cute.Tensor,
    divisor: Float32,
    largest: Float32,
) -> cute.Tensor:
    """encode(values / divisor), for values of a 16-bit `dtype` up to `largest` and a divisor that follows from it.

    divisor: divide_largest(largest), rounded to f16 if `rounded`. int8 takes one multiplication per value.
    """
    if cutlass.const_expr(stored_type != "int8"):
        divide(values, divisor, bounded=True)
        return encode(stored_type, by_instruction, values)
    codes = cute.make_rmem_tensor(cutlass.const_expr(cute.size(values)), Int8)
    inverse = cute.arch.rcp_approx(divisor)
    if cutlass.const_expr(rounded):
        nudged, doubtful = inverse_of_half(dtype, divisor, inverse)
    else:
        nudged, doubtful = inverse_of_exact(divisor, inverse, largest)
    for i in cutlass.range_constexpr(cute.size(values)):
        codes[i] = Int8(as_bits(fma(values[i], nudged, Float32(ROUNDER))))
    if doubtful:
        for i in cutlass.range_constexpr(cute.size(values)):
            codes[i] = to_int8(corrected_quotient(values[i], divisor, inverse))
    return codes


@cute.jit
def inverse_of_exact(divisor: Float32, inverse: Float32, largest: Float32) -> tuple[Float32, Boolean]:
    """(an inverse by which products round as quotients do, whether that is in doubt) for divisor = divide_largest(largest).

    127 x / largest, for 16-bit x, is the middle of two whole numbers for x = +-largest / 2 (63.5). For no other x is it a middle,
    or very near one, unless the divisor is exact. So an inverse that is off to the side to which the quotient of largest / 2
    rounds gives all codes. In doubt are divisors that are exact, infinity or NaN.
    """
    excess = fma(divisor, Float32(-LARGEST["int8"]), largest)  # exact
    return nudge(inverse, fma(divisor, Float32(HALF_UNIT), excess)), not cute.arch.fmax(excess, -excess) > 0.0


@cute.jit
def inverse_of_half(dtype: cutlass.Constexpr, divisor: Float32, inverse: Float32) -> tuple[Float32, Boolean]:
    """As inverse_of_exact, for a divisor that is an f16 and values of `dtype`.

    x / divisor is the middle of two whole numbers, n and n + 1, or at least 2**-19 of itself away from any middle. So an inverse
    that is too small gives all codes except for middles with an odd n; and (n + 1/2) * divisor has more bits than x unless the
    divisor ends in zeros. In doubt are divisors that end in zeros, the largest f16 (its quotients may saturate), infinity, NaN.
    """
    ends_in_zeros = (as_bits(divisor) & zeros_of_middles(dtype)) == 0
    return nudge(inverse, Float32(-1.0)), ends_in_zeros or not divisor < LARGEST_HALF


def zeros_of_middles(dtype: type) -> int:
    """A mask of f32 bits: an f16 divisor has zeros there if (n + 1/2) * divisor, for an odd n, may be a value of `dtype`.

    An odd number of as many bits as such a value has, or one bit fewer, has too many bits when multiplied by three.
    """
    zeros = MANTISSA_BITS[Float16] + 1 - MANTISSA_BITS[dtype]
    return ((1 << zeros) - 1) << (F32_BITS - MANTISSA_BITS[Float16])


def nudge(inverse: Float32, direction: Float32) -> Float32:
    """`inverse`, larger by NUDGE of itself, or smaller if `direction` is negative."""
    amount = as_float((as_bits(direction) & SIGN) | bits_of(NUDGE))
    return fma(inverse, amount, inverse)


@cute.jit
def divide(values: cute.Tensor, divisor: Float32, bounded: cutlass.Constexpr):
    """values / divisor in place: the bits of IEEE division as far as 8 bits can tell, without a division per value.

    bounded: whether no quotient is beyond the stored type's range, nor a NaN unless the divisor is NaN.
    """
    if divisor >= LEAST_DIVISOR and divisor <= LARGEST_DIVISOR:
        inverse = 1.0 / divisor
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = ieee_quotient(values[i], divisor, inverse, bounded)
    else:
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] / divisor


@cute.jit
def ieee_quotient(value: Float32, divisor: Float32, inverse: Float32, bounded: cutlass.Constexpr) -> Float32:
    """value / divisor by Markstein's theorem: an inverse and a quotient that are right to one unit, and an exact remainder.

    The result has the value's sign, also if it is zero. Below 2**-18, where everything stored is a zero, a remainder may be
    inexact.
    """
    rough, near = value * inverse, corrected_quotient(value, divisor, inverse)
    exact = fma(fma(-near, divisor, value), inverse, near)
    exact = as_float((as_bits(exact) & MAGNITUDE) | (as_bits(rough) & SIGN))
    if cutlass.const_expr(bounded):
        return exact
    if rough > BEYOND or rough < -BEYOND:  # infinity has no remainder
        exact = rough
    return exact


def corrected_quotient(value: Float32, divisor: Float32, inverse: Float32) -> Float32:
    """value / divisor, from an inverse that is right to one unit: right to one unit, and exact if the quotient is short."""
    rough = value * inverse
    return fma(fma(-rough, divisor, value), inverse, rough)


@cute.jit
def encode(stored_type: cutlass.Constexpr, by_instruction: cutlass.Constexpr, values: cute.Tensor) -> cute.Tensor:
    """The 8-bit elements of `values`, f32 in registers: Int8 or Uint8, one per value."""
    count = cutlass.const_expr(cute.size(values))
    codes = cute.make_rmem_tensor(count, stored_element(stored_type))
    if cutlass.const_expr(stored_type == "int8"):
        for i in cutlass.range_constexpr(count):
            codes[i] = to_int8(values[i])
    elif cutlass.const_expr(by_instruction and count > 1):
        pairs = cute.recast_tensor(codes, Uint16)
        for i in cutlass.range_constexpr(count // 2):
            pairs[i] = to_fp8_pair(stored_type, values[2 * i], values[2 * i + 1])
    elif cutlass.const_expr(by_instruction):
        codes[0] = Uint8(to_fp8_pair(stored_type, values[0], Float32(0.0)) & 0xFF)
    else:
        for i in cutlass.range_constexpr(count):
            codes[i] = to_fp8(stored_type, values[i])
    return codes


@cute.jit
def to_int8(value: Float32) -> Int8:
    """The int8 code: rounded to nearest even, at most 127 in magnitude; NaN gives 0."""
    rounded = cute.arch.inline_ptx("cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
    return Int8(cutlass.max(-127, cutlass.min(127, rounded)))


def to_fp8_pair(stored_type: str, low: Float32, high: Float32) -> Uint16:
    """Two fp8 codes: that of `low` in the low byte."""
    return cute.arch.inline_ptx(
        f"cvt.rn.satfinite.{stored_type}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Uint16], read_only_args=[low, high]
    )


@cute.jit
def to_fp8(stored_type: cutlass.Constexpr, value: Float32) -> Uint8:
    """One fp8 code, computed in integers: an addition rounds the magnitude at the last bit that is kept."""
    kept, least = cutlass.const_expr(MANTISSA[stored_type]), cutlass.const_expr(LEAST_EXPONENT[stored_type])
    dropped = cutlass.const_expr(23 - kept)
    bits = as_bits(value)
    magnitude = bits & MAGNITUDE
    halves_to_even = ((magnitude >> dropped) & 1) + ((1 << (dropped - 1)) - 1)
    code = ((magnitude + halves_to_even) >> dropped) - ((127 + least - 1) << kept)
    if magnitude < cutlass.const_expr(bits_of(2.0**least)):  # a subnormal: its unit is the last place of this power of two
        unit = cutlass.const_expr(2.0 ** (least - kept + 23))
        code = as_bits(as_float(magnitude) + unit) - cutlass.const_expr(bits_of(unit))
    code = cutlass.min(code, cutlass.const_expr(LARGEST_CODE[stored_type])) | ((bits >> 24) & 0x80)
    if magnitude > INF_BITS:
        code = Int32(NAN_CODE)
    return Uint8(code)
