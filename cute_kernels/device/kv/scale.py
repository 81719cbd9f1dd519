"""The scales of a cache on the device: where they fold into attention without touching K or V.

With one scale per tensor or per KV head, K's scale folds into the softmax scale, its sign into the query, and V's scale into the
output. With one scale per token and KV head, K's scales fold into the columns of S, V's into the columns of P. A token's scale
travels with its tile: the producer copies the 32-bit word that holds the scale by cp.async, and the warp that reads the tile
converts the scale to f32. If other warps widen the tile, those warps convert the scale for all readers.

P is f16, but V's scales have any size. So softmax weights, their sums and O are multiples of a unit, the power of two below the
largest scale that the warp has met, at least 2**-26. A token whose scale is below 2**-28 of that unit therefore loses bits.
"""

import math
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64

from ...config.decode import SCALE_BYTES, KernelSpec
from ...config.problem import ScaleForm
from ..ptx.cp_async import copy_async
from ..ptx.registers import LANES, MAGNITUDE, as_bits, as_float, quotient, remainder, warp_max

EXPONENT = 0x7F800000  # the exponent bits of an f32
PAIR_BITS = 10  # scales this many binades apart are pairs of normal f16, which hold an f16 scale exactly
SMALLEST_UNIT, LARGEST_UNIT = (127 - 26) << 23, (127 + 100) << 23  # any step between units is a normal f32


@dataclass(frozen=True)
class Scaling:
    """The f32 factors of a CTA. log2: on scores, to base 2, above zero; value: on the output; sign: on the query, 1, 0 or -1."""

    log2: Float32
    value: Float32
    sign: Float32


@dataclass(frozen=True)
class ScaleRing:
    """Scales of the tokens of each stage's tile: 32-bit words [token, stage].

    upper: Int32 [group of 32 tokens, stage]; bit l: the f16 scale of token l lies in the upper half of its word. For widened
    tiles words are f32, ordered so that the words of a lane's accumulator columns are neighbours; V's are as widen_value_scales
    says.
    """

    words: cute.Tensor
    upper: cute.Tensor


def make_scale_rings(spec: KernelSpec, smem, stages: int, widened: bool = False) -> tuple:
    """The rings of (K's scales, V's scales), None for a tensor without a scale per token. widened: whether tiles are widened."""
    rings, layout = [], cute.make_layout((spec.tile_n, stages))
    if widened:  # a token is (column of a pair, pair of an n8 step, step)
        steps = spec.tile_n // 8
        layout = cute.make_layout(((2, 4, steps), stages), stride=((1, 2 * steps, 2), spec.tile_n))
    for form in (spec.k_scale, spec.v_scale):
        ring = None
        if form.startswith("token"):
            words = smem.allocate_tensor(Int32, layout, byte_alignment=16)
            upper = smem.allocate_tensor(Int32, cute.make_layout((spec.scale_groups, stages)), byte_alignment=16)
            ring = ScaleRing(words, upper)
        rings.append(ring)
    return tuple(rings)


@cute.jit
def open_scaling(spec: cutlass.Constexpr, scales: tuple, kv_head: Int32, scale_log2: Float32) -> Scaling:
    """The scaling of a KV head. scales: (K's, V's), [1] or [num_kv_heads] if they are not per token."""
    value, sign = Float32(1.0), Float32(1.0)
    if cutlass.const_expr(spec.k_scale == "head"):
        scale = head_scale(scales[0], kv_head)
        sign = cutlass.select_(scale > 0.0, Float32(1.0), cutlass.select_(scale < 0.0, Float32(-1.0), Float32(0.0)))
        scale_log2 = scale_log2 * cutlass.select_(scale == 0.0, Float32(1.0), cute.arch.fmax(scale, -scale))
    if cutlass.const_expr(spec.v_scale == "head"):
        value = head_scale(scales[1], kv_head)
    return Scaling(scale_log2, value, sign)


def merge_scaling(spec: KernelSpec, scaling: Scaling) -> Scaling:
    """The scaling with which states merge: bases, and maxima of scores that have functions (attend/score.py), are to base 2."""
    return replace(scaling, log2=Float32(1.0)) if spec.modifiers.functions or spec.merges_bases else scaling


def head_scale(scales: cute.Tensor, kv_head: Int32) -> Float32:
    """A KV head's scale, or the one scale of the tensor."""
    return scales[cutlass.min(kv_head, Int32(scales.shape[0]) - 1)]


@cute.jit
def find_scale(spec: cutlass.Constexpr, scales, page: Int32, position: Int32, kv_head: Int32, inside: Boolean):
    """Where the scale of each lane's token is: (address, whether to read it, `upper` of the lanes' tokens).

    scales: [pages, page_size, num_kv_heads], contiguous [batch, num_kv_heads, tokens]. position: the token's position in its row,
    or for a packed cache among all tokens.
    """
    coord = (page, kv_head, position)
    if cutlass.const_expr(spec.page_size):
        coord = (page, remainder(position, spec.page_size), kv_head)
    address, upper = Int64(scales.iterator.toint()), Int32(0)
    if inside:
        address = Int64((scales.iterator + cute.crd2idx(coord, scales.layout)).toint())
    if cutlass.const_expr(scales.element_type.width < 8 * SCALE_BYTES):
        upper = cute.arch.vote_ballot_sync(address % SCALE_BYTES != 0)
    return address, inside, upper


@cute.jit
def fetch_scales(rings: tuple, found: list, stage: Int32):
    """Each lane starts to copy the words that hold its tokens' scales, or zeros; lane 0 stores which half of each word counts.

    found: per 32 tokens of the tile, [K's, V's] by find_scale, None where `rings` has None.
    """
    for group in cutlass.range_constexpr(len(found)):
        token = group * LANES + cute.arch.lane_idx()
        for ring, (address, inside, _) in with_scales(rings, found[group]):
            if token < cute.size(ring.words, mode=[0]):
                target = ring.words.iterator + cute.crd2idx((token, stage), ring.words.layout)
                copy_async(address & ~Int64(SCALE_BYTES - 1), target.toint(), SCALE_BYTES, inside)
    if cute.arch.lane_idx() == 0:  # once, after all copies: with a branch between them the compiler makes two copies of one
        for group in cutlass.range_constexpr(len(found)):
            for ring, (_, _, upper) in with_scales(rings, found[group]):
                ring.upper[group, stage] = upper


def with_scales(rings: tuple, found: list) -> list:
    """(ring, the result of find_scale) of K and of V, for tensors that have a scale per token."""
    return [both for both in zip(rings, found, strict=True) if both[0] is not None]


@cute.jit
def settle_scales(spec: cutlass.Constexpr, rings: tuple, stage: Int32) -> Int32:
    """Converts the scales of a tile that has come to f32, each lane its own tokens; returns the bits of V's largest magnitude.

    If several warps read a tile, its words stay as they came: column_scales converts them.
    """
    peak, alone = Int32(0), cutlass.const_expr(spec.readers == 1)
    if cutlass.const_expr(spec.k_token_scale and alone):
        settle(rings[0], stage, spec.k_scale == "token_f16", alone)
    if cutlass.const_expr(spec.v_token_scale):
        peak = settle(rings[1], stage, spec.v_scale == "token_f16", alone)
    if cutlass.const_expr(spec.token_scales > 0):
        cute.arch.sync_warp()
    return peak


@cute.jit
def settle(ring: ScaleRing, stage: Int32, half: cutlass.Constexpr, kept: cutlass.Constexpr) -> Int32:
    """Returns the bits of the largest magnitude of this lane's scales. half: they are f16; kept: they become f32 in place."""
    peak = Int32(0)
    for group in cutlass.range_constexpr((cute.size(ring.words, mode=[0]) + LANES - 1) // LANES):
        token = group * LANES + cute.arch.lane_idx()
        if token < cute.size(ring.words, mode=[0]):
            bits = scale_bits(ring, stage, group, half)
            if cutlass.const_expr(kept and half):
                ring.words[token, stage] = bits
            peak = cutlass.max(peak, bits & MAGNITUDE)
    return peak


def scale_bits(ring: ScaleRing, stage: Int32, group: Int32 | int, half: bool) -> Int32:
    """The bits, as f32, of the scale of this lane's token of a group of 32. half: it is f16."""
    lane = cute.arch.lane_idx()
    bits = ring.words[group * LANES + lane, stage]
    return as_bits(half_to_float(bits >> (16 * ((ring.upper[group, stage] >> lane) & 1)))) if half else bits


@cute.jit
def widen_key_scales(spec: cutlass.Constexpr, ring: ScaleRing, stage: Int32, wide: ScaleRing, wide_stage: Int32, warp: Int32):
    """A warp that widens K stores its part of K's scales as f32 for all readers of the tile."""
    for group in cutlass.range(warp, spec.token_groups, len(spec.widening_crews[0]), unroll=1):
        token = group * LANES + cute.arch.lane_idx()
        if token < spec.tile_n:
            wide.words[token, wide_stage] = scale_bits(ring, stage, group, spec.k_scale == "token_f16")


@cute.jit
def widen_value_scales(spec: cutlass.Constexpr, ring: ScaleRing, stage: Int32, wide: ScaleRing, wide_stage: Int32, before: Int32):
    """One warp that widens V stores V's scales, divided by the unit of the piece so far, for all readers of the tile.

    As pairs of f16 if no scale but 0 is less than 2**-PAIR_BITS of the unit, else as f32. wide.upper[0]: the unit; [1]: whether
    they are pairs. before: the unit of the tiles before this one.
    """
    lane, groups = cute.arch.lane_idx(), range(spec.token_groups)
    scales = cute.make_rmem_tensor(spec.token_groups, Int32)
    scales.fill(0)
    for group in groups:
        if group * LANES + lane < spec.tile_n:
            scales[group] = scale_bits(ring, stage, group, spec.v_scale == "token_f16")
    magnitudes = [scales[group] & MAGNITUDE for group in groups]
    peak = least = magnitudes[0]
    for magnitude in magnitudes[1:]:
        peak = cutlass.max(peak, magnitude)
    unit = raised(before, peak)
    for number, magnitude in enumerate(magnitudes):
        magnitude = cutlass.select_(magnitude == 0, unit, magnitude)
        least = cutlass.min(least, magnitude) if number else magnitude
    pairs = -warp_max(-least) >= unit - (PAIR_BITS << 23)
    halves = cute.make_tensor(cute.recast_ptr(wide.words.iterator, dtype=Float16), 2 * cute.cosize(wide.words.layout))
    for group in groups:
        token = group * LANES + lane
        scale = as_float(scales[group]) * inverse_of(unit)
        if token < spec.tile_n:
            if pairs:
                pair = remainder(token, 8) // 2 * (spec.tile_n // 8) + quotient(token, 8)
                halves[2 * (wide_stage * spec.tile_n + pair) + token % 2] = Float16(scale)
            else:
                wide.words[token, wide_stage] = as_bits(scale)
    if lane == 0:
        wide.upper[0, wide_stage] = unit
        wide.upper[1, wide_stage] = Int32(pairs)


def inverse_of(unit: Int32) -> Float32:
    """1 / unit."""
    return as_float((254 << 23) - unit)


def find_scales(spec: KernelSpec, scales: tuple, *where) -> list:
    """find_scale of K's and V's scales, None for a tensor without a scale per token. where: its further arguments."""
    forms = spec.k_token_scale, spec.v_token_scale
    return [find_scale(spec, one, *where) if form else None for one, form in zip(scales, forms, strict=True)]


def half_to_float(bits: Int32) -> Float32:
    """The f32 of the f16 in the lower half of a register."""
    text = "{ .reg .b16 lower, upper; mov.b32 {lower, upper}, {$r0}; cvt.f32.f16 {$w0}, lower; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[bits])


def column_scales(spec: KernelSpec, ring: ScaleRing, form: ScaleForm, stage: Int32) -> cute.Tensor:
    """The scales of this lane's columns of an accumulator [column pair, n8], f32 in registers."""
    tokens = cute.size(ring.words, mode=[0])
    layout = cute.make_layout((4, tokens // 8, cute.size(ring.words, mode=[1])), stride=(1, 4, tokens // 2))
    pairs = cute.make_tensor(cute.recast_ptr(ring.words.iterator, dtype=Int64), layout)
    scales = cute.make_rmem_tensor(tokens // 8, Int64)
    for n in range(tokens // 8):
        scales[n] = pairs[cute.arch.lane_idx() % 4, n, stage]
    found = cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Float32), cute.make_layout((2, tokens // 8)))
    if spec.readers > 1 and form == "token_f16":
        widen_columns(ring, found, stage)
    return found


def own_scales(ring: ScaleRing, tokens: int, stage: Int32) -> cute.Tensor:
    """As column_scales, for a widened tile, where the scales of a lane's columns are neighbours in memory."""
    return neighbours(ring, Float32, cute.make_layout((2, tokens // 8)), (cute.arch.lane_idx() % 4 + 4 * stage) * (tokens // 4))


def pair_scales(ring: ScaleRing, tokens: int, stage: Int32) -> cute.Tensor:
    """V's scales of this lane's columns of a widened tile, where they are pairs of f16: Int32 [n8]."""
    return neighbours(ring, Int32, cute.make_layout(tokens // 8), cute.arch.lane_idx() % 4 * (tokens // 8) + stage * tokens)


def neighbours(ring: ScaleRing, dtype: type, layout: cute.Layout, place: Int32) -> cute.Tensor:
    """Words of a ring, read in as few loads as possible."""
    found, align = cute.make_rmem_tensor(layout.shape, dtype), math.gcd(16, 4 * cute.size(layout))
    source = cute.make_ptr(dtype, (ring.words.iterator + place).toint(), cute.AddressSpace.smem, assumed_align=align)
    cute.autovec_copy(cute.make_tensor(source, layout), found)
    return found


def widen_columns(ring: ScaleRing, found: cute.Tensor, stage: Int32):
    """Converts this lane's words, which hold an f16 in either half, to f32 in place. found: [column pair, n8]."""
    words, lane = cute.recast_tensor(found, Int32), cute.arch.lane_idx()
    for n in range(cute.size(found, mode=[1])):
        upper = ring.upper[n // 4, stage] >> (n % 4 * 8 + lane % 4 * 2)
        for c in range(2):
            words[c, n] = as_bits(half_to_float(words[c, n] >> (16 * ((upper >> c) & 1))))


@cute.jit
def scale_columns(acc_s: cute.Tensor, rows: cutlass.Constexpr, scales: cute.Tensor):
    """Multiplies the columns of an accumulator ((column pair, row pair), 1, n8), in the rows that are in use."""
    for n in cutlass.range_constexpr(cute.size(scales, mode=[1])):
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(2):
                acc_s[(c, r), 0, n] = acc_s[(c, r), 0, n] * scales[c, n]


@cute.jit
def widen_unit(unit: cute.Tensor, peak: Int32) -> tuple[Float32, Float32]:
    """raise_unit. Returns (old unit / new unit, log2(1 / new unit))."""
    before = unit[0]
    raise_unit(unit, peak)
    return unit_step(before, unit[0]), (127 - (unit[0] >> 23)).to(Float32)


def raise_unit(unit: cute.Tensor, peak: Int32):
    """Raises the unit (Int32 [1], an f32 exponent field) to the power of two below the warp's largest scale, if that is larger.

    peak: the bits of the largest scale of this lane's tokens.
    """
    unit[0] = raised(unit[0], peak)


def raised(unit: Int32, peak: Int32) -> Int32:
    """The same, of a value."""
    return cutlass.max(unit, cutlass.min(warp_max(peak) & EXPONENT, LARGEST_UNIT))


def unit_step(before: Int32, unit: Int32) -> Float32:
    """Old unit / new unit."""
    return as_float((127 << 23) + before - unit)


def unit_of(unit: cute.Tensor) -> Float32:
    """The unit as a factor."""
    return as_float(unit[0])
