"""Scales of tokens that go into int8 elements of V as these are decoded: a multiply-add makes an element and scales it at once.

An int8 k with its sign bit flipped, as the lowest byte of an f16, is the subnormal (k + 128) 2**-24. With a token's factor
f = scale * 2**24 / unit in f16, (k + 128) 2**-24 * f - 2**-17 * f is k * scale / unit, rounded once. So no weight is multiplied,
and only O is a multiple of the unit: 2**8 times a power of two above the largest scale that has come so far in the piece.

Elements of a token whose scale lies below 2**-12 of that power would lose bits. A tile with such a token has a unit of 2**-16 of
the other tiles', and its elements are multiplied in f32: a token whose scale is below 2**-28 of the largest then loses bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..ptx.packed import pack
from ..ptx.registers import LANES, MAGNITUDE, as_float, warp_max
from .scale import EXPONENT, ScaleRing, shrink_of

FIELD = 23  # the place of an f32's exponent
ABOVE = 1 + 8 << FIELD  # from the power of two below the largest scale to the unit
FAR = 12 + 8 << FIELD  # from the unit down to a scale whose factor would be too small
FURTHER = 16 << FIELD  # from the unit down to that of a tile with such a scale
LARGEST = 80 + 127 << FIELD  # a unit; any step between units is then a normal f32
OF_KEYS = 0x78007800  # a factor of 2**15 in f16, twice
INVERSE_OF_KEYS = 2.0**9  # what K's scales are multiplied by
OFFSET = "0x80808080"  # -2**-17 in f16, twice


def raise_unit(unit: Int32, peak: Int32, least: Int32) -> tuple[Int32, Boolean]:
    """(the unit, an f32's exponent, for a tile and all after it, whether a scale of the tile is far below it).

    unit: before. peak, least: bits of the largest magnitude of the tile's scales, and of the smallest one above 0.
    """
    unit = cutlass.max(unit, cutlass.min((peak & EXPONENT) + ABOVE, LARGEST))
    return unit, least < unit - FAR


@cute.jit
def open_keys(spec: cutlass.Constexpr, ring: ScaleRing, thread: Int32, threads: cutlass.Constexpr):
    """Threads store the constant factor of K's tokens. thread: a thread's number among them."""
    for token in cutlass.range(thread, spec.tile_n, threads, unroll=1):
        store_factor(ring, token, 0, Int32(OF_KEYS))


def per_unit(bits: Int32, unit: Int32, power: int) -> Float32:
    """A scale times 2 ** power / unit. bits: the scale's."""
    return as_float(bits) * as_float((power + 127 << FIELD) - (unit - (127 << FIELD)))


def factor_of(bits: Int32, unit: Int32) -> Int32:
    """A scale's factor, in both halves of a word."""
    factor = per_unit(bits, unit, 24)
    return pack("f16", factor, factor)


def offset_of(factor: Int32) -> Int32:
    """What the multiply-add of a decoded element adds, for two factors."""
    text = f"{{ .reg .b32 x, power; mov.b32 x, {{$r0}}; mov.b32 power, {OFFSET}; mul.f16x2 {{$w0}}, x, power; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[factor])


def word_of(unit: Int32, far: Boolean) -> Int32:
    """What readers of a tile find in ScaleRing.upper: the tile's unit, and in the lowest bit is_far."""
    return cutlass.select_(far, unit - FURTHER | 1, unit)


def follow_unit(unit: cute.Tensor, word: Int32) -> Float32:
    """Takes over the unit of a tile (Int32 [1]); returns the old one divided by it. word: word_of."""
    before = unit[0]
    unit[0] = word & EXPONENT
    return shrink_of(before, unit[0])


def is_far(word: Int32) -> Boolean:
    """Whether elements of a tile are scaled in f32. word: word_of."""
    return (word & 1) != 0


def settled_unit(found: list, unit: Int32) -> tuple[Int32, Boolean]:
    """raise_unit by the scales of a tile. found: the bits of this lane's, 0 past the tile."""
    peak, least = Int32(0), Int32(MAGNITUDE)
    for bits in found:
        magnitude = bits & MAGNITUDE
        peak = cutlass.max(peak, magnitude)
        least = cutlass.min(least, cutlass.select_(magnitude == 0, MAGNITUDE, magnitude))
    return raise_unit(unit, warp_max(peak), cute.arch.warp_redux_sync(least, "min"))


@cute.jit
def store_factors(spec: cutlass.Constexpr, ring: ScaleRing, stage: Int32, bits: list, unit: cute.Tensor):
    """A warp stores the factors of a tile's tokens. bits: of this lane's scales, by group of 32 tokens; unit: Int32 [1]."""
    lane = cute.arch.lane_idx()
    found = [cutlass.select_(group * LANES + lane < spec.tile_n, one, 0) for group, one in enumerate(bits)]
    unit[0], far = settled_unit(found, unit[0])
    for group in cutlass.range_constexpr(spec.token_groups):
        if group * LANES + lane < spec.tile_n:
            store_factor(ring, group * LANES + lane, stage, factor_of(found[group], unit[0]))
            if far:
                ring.words[group * LANES + lane, stage] = per_unit(found[group], unit[0], 16)
    if lane == 0:
        ring.upper[0, stage] = word_of(unit[0], far)


def store_factor(ring: ScaleRing, token: Int32, stage: Int32 | int, factor: Int32):
    """Stores the factor of a token, and its offset beside it."""
    at = ring.factors.iterator + cute.crd2idx((2 * token, stage), ring.factors.layout)
    text = "st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};"
    cute.arch.inline_ptx(text, read_only_args=[Int32(at.toint()), factor, offset_of(factor)])
