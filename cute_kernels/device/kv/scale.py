"""The scales of a cache on the device: where they fold into attention without touching K or V.

With one scale per tensor or per KV head, K's scale folds into the softmax scale, its sign into the query, and V's scale into the
output. With one scale per token and KV head, K's scales fold into the columns of S, V's into the columns of P. A token's scale
travels with its tile: the producer copies the 32-bit word that holds the scale by cp.async, and the warp that reads the tile
converts the scale to f32. If tiles are widened, one warp converts a scale for all readers (kv/wide_scales.py).

Where P is f16, V's scales may leave its range. So softmax weights, their sums and O are multiples of a unit, the power of two
below the largest scale that the warp has met, at least 2**-26. A token whose scale is below 2**-28 of that unit loses bits.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64

from ...config.decode import SCALE_BYTES, KernelSpec
from ...config.problem import ScaleForm
from ..ptx.cp_async import copy_async
from ..ptx.packed import widen_pair
from ..ptx.registers import LANES, MAGNITUDE, as_bits, as_float, remainder, warp_max

WIDE_SCALES = {2: Float16, 4: Float32}  # the type of a widened tile's scales, by their bytes
EXPONENT = 0x7F800000  # the exponent bits of an f32
SMALLEST_UNIT, LARGEST_UNIT = (127 - 26) << 23, (127 + 100) << 23  # any step between units is a normal f32


@dataclass(frozen=True)
class Scaling:
    """The f32 factors of a CTA. log2: on scores, to base 2, above zero; value: on the output; sign: on the query, 1, 0 or -1.

    keys: on scales of K's tokens, where these hold the softmax factor (KernelSpec.relates_scores), else None.
    """

    log2: Float32
    value: Float32
    sign: Float32
    keys: Float32 | None


@dataclass(frozen=True)
class ScaleRing:
    """Scales of the tokens of each stage's tile: 32-bit words [token, stage].

    upper: Int32 [group of 32 tokens, stage]; bit l: the f16 scale of token l lies in the upper half of its word. For widened
    tiles scales are f32 or f16 (`wide_scale_bytes`), ordered so that those of a lane's accumulator columns are neighbours, and
    `upper` has the bits of the largest magnitude in each group, or first those of the largest of all (`settles_scales`); of V's
    scales alone.
    factors: those of V's tokens, if they go into V (value_scales.py), with word_of in `upper`; K's constant ones; or None.
    """

    words: cute.Tensor
    upper: cute.Tensor
    factors: cute.Tensor | None = None


def make_scale_rings(spec: KernelSpec, smem, stages: int, widened: bool = False) -> tuple:
    """The rings of (K's scales, V's scales), None for a tensor without a scale per token. widened: whether tiles are widened."""
    rings, layout, kind = [], cute.make_layout((spec.tile_n, stages)), Int32
    factor_stages = (spec.scales_keys, stages * spec.scales_values) if widened else (0, 0)
    for form, nbytes, scaled in zip((spec.k_scale, spec.v_scale), spec.wide_scale_bytes, factor_stages, strict=True):
        ring = None
        if widened:  # a token is (column of a pair, pair of an n8 step, step)
            apart, kind = spec.lane_scales * 4 // nbytes, WIDE_SCALES[nbytes]
            layout = cute.make_layout(((2, 4, spec.tile_n // 8), stages), stride=((1, apart, 2), 4 * apart))
        if form.startswith("token"):
            words = smem.allocate_tensor(kind, layout, byte_alignment=16)
            upper = smem.allocate_tensor(Int32, cute.make_layout((spec.scale_groups, stages)), byte_alignment=16)
            factors = None
            if scaled:
                shape = cute.make_layout((spec.factor_words, int(scaled)))
                factors = smem.allocate_tensor(Int32, shape, byte_alignment=16)
            ring = ScaleRing(words, upper, factors)
        rings.append(ring)
    return tuple(rings)


@cute.jit
def open_scaling(spec: cutlass.Constexpr, scales: tuple, kv_head: Int32, scale_log2: Float32) -> Scaling:
    """The scaling of a KV head. scales: (K's, V's), [1] or [num_kv_heads] if they are not per token."""
    value, sign, keys = Float32(2.0 ** spec.decoded_powers[1]), Float32(1.0), None
    scale_log2 = key_factor(spec, scale_log2)
    if cutlass.const_expr(spec.relates_scores):
        scale_log2, keys = Float32(1.0), scale_log2
    if cutlass.const_expr(spec.k_scale == "head"):
        scale = head_scale(scales[0], kv_head)
        sign = cutlass.select_(scale > 0.0, Float32(1.0), cutlass.select_(scale < 0.0, Float32(-1.0), Float32(0.0)))
        scale_log2 = scale_log2 * cutlass.select_(scale == 0.0, Float32(1.0), cute.arch.fmax(scale, -scale))
    if cutlass.const_expr(spec.v_scale == "head"):
        value = value * head_scale(scales[1], kv_head)
    return Scaling(scale_log2, value, sign, keys)


def key_factor(spec: KernelSpec, scale_log2: Float32) -> Float32:
    """The factor on Q K^T, of K as it is decoded, that makes it a logit to base 2."""
    return scale_log2 * 2.0 ** spec.decoded_powers[0]


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
def settle_scales(spec: cutlass.Constexpr, rings: tuple, stage: Int32, of_keys: Float32 | None = None) -> Int32:
    """Converts the scales of a tile that has come to f32, each lane its own tokens; returns the bits of V's largest magnitude.

    If several warps read a tile, its words stay as they came: column_scales converts them. If other warps widen tiles, rings and
    stage are of the widened tiles, whose scales are f32 already. Scales that go into V are left to value_scales.py. of_keys: what
    K's scales are multiplied by, None for nothing.
    """
    peak, alone = Int32(0), cutlass.const_expr(spec.readers == 1)
    if cutlass.const_expr(spec.widens_tiles):
        if cutlass.const_expr(spec.keeps_unit):
            for group in cutlass.range_constexpr(1 if spec.settles_scales else spec.token_groups):
                peak = cutlass.max(peak, rings[1].upper[group, stage])
        return peak
    if cutlass.const_expr(spec.k_token_scale and alone):
        settle(rings[0], stage, spec.k_scale == "token_f16", alone, of_keys)
    if cutlass.const_expr(spec.scales_weights):
        peak = settle(rings[1], stage, spec.v_scale == "token_f16", alone, None)
    if cutlass.const_expr(spec.token_scales > 0):
        cute.arch.sync_warp()
    return peak


@cute.jit
def settle(ring: ScaleRing, stage: Int32, half: cutlass.Constexpr, kept: cutlass.Constexpr, factor: Float32 | None) -> Int32:
    """Returns the bits of the largest magnitude of this lane's scales.

    half: they are f16; kept: they become f32 in place; factor: what they are then multiplied by, None for nothing.
    """
    peak = Int32(0)
    for group in cutlass.range_constexpr((cute.size(ring.words, mode=[0]) + LANES - 1) // LANES):
        peak = cutlass.max(peak, settle_group(ring, stage, group, half, kept, factor))
    return peak


@cute.jit
def settle_group(
    ring: ScaleRing,
    stage: Int32,
    group: Int32 | int,
    half: cutlass.Constexpr,
    kept: cutlass.Constexpr,
    factor: Float32 | None,
) -> Int32:
    """As `settle`, for a group of 32 tokens."""
    peak, token = Int32(0), group * LANES + cute.arch.lane_idx()
    if token < cute.size(ring.words, mode=[0]):
        bits = ring.words[token, stage]
        if cutlass.const_expr(half):
            bits = own_half(bits, ring.upper[group, stage])
        if cutlass.const_expr(factor is not None):
            bits = as_bits(as_float(bits) * factor)
        if cutlass.const_expr(kept and (half or factor is not None)):
            ring.words[token, stage] = bits
        peak = bits & MAGNITUDE
    return peak


def own_half(word: Int32, upper: Int32) -> Int32:
    """The bits, as f32, of the f16 scale of this lane's token. word: the one that holds it; upper: as in ScaleRing."""
    return as_bits(half_to_float(word >> (16 * ((upper >> cute.arch.lane_idx()) & 1))))


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
    if spec.widens_tiles:
        return own_scales(ring, tokens // 4, stage)
    layout = cute.make_layout((4, tokens // 8, cute.size(ring.words, mode=[1])), stride=(1, 4, tokens // 2))
    pairs = cute.make_tensor(cute.recast_ptr(ring.words.iterator, dtype=Int64), layout)
    scales = cute.make_rmem_tensor(tokens // 8, Int64)
    for n in range(tokens // 8):
        scales[n] = pairs[cute.arch.lane_idx() % 4, n, stage]
    found = cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Float32), cute.make_layout((2, tokens // 8)))
    if spec.readers > 1 and form == "token_f16":
        widen_columns(ring, found, stage)
    return found


def own_scales(ring: ScaleRing, count: int, stage: Int32) -> cute.Tensor:
    """As column_scales, for a widened tile: the lane's `count` scales are neighbours in memory."""
    kind = ring.words.element_type
    found = cute.make_rmem_tensor((2, count // 2), kind)
    place = (cute.arch.lane_idx() % 4 + 4 * stage) * ring.words.stride[0][1]
    source = cute.make_ptr(kind, (ring.words.iterator + place).toint(), cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, count // 2))), found)
    if kind is Float32:
        return found
    scales, pairs = cute.make_rmem_tensor(found.shape, Float32), cute.recast_tensor(found, Int32)
    for n in range(count // 2):
        scales[0, n], scales[1, n] = widen_pair(kind, pairs[0, n])
    return scales


def widen_columns(ring: ScaleRing, found: cute.Tensor, stage: Int32):
    """Converts this lane's words, which hold an f16 in either half, to f32 in place. found: [column pair, n8]."""
    words, lane = cute.recast_tensor(found, Int32), cute.arch.lane_idx()
    for n in range(cute.size(found, mode=[1])):
        upper = ring.upper[n // 4, stage] >> (n % 4 * 8 + lane % 4 * 2)
        for c in range(2):
            words[c, n] = as_bits(half_to_float(words[c, n] >> (16 * ((upper >> c) & 1))))


@cute.jit
def scale_columns(acc_s: cute.Tensor, rows: cutlass.Constexpr, scales: cute.Tensor, less: list | None = None):
    """Multiplies the columns of an accumulator ((column pair, row pair), 1, n8), in the rows that are in use.

    less: for each of these rows, what to subtract then, in the same step; None for nothing.
    """
    for n in cutlass.range_constexpr(cute.size(scales, mode=[1])):
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(2):
                scaled = acc_s[(c, r), 0, n] * scales[c, n]
                acc_s[(c, r), 0, n] = scaled if cutlass.const_expr(less is None) else scaled - less[r]


@cute.jit
def widen_unit(unit: cute.Tensor, peak: Int32) -> tuple[Float32, Float32]:
    """Raises the unit (Int32 [1], an f32 exponent field) to the power of two below the warp's largest scale, if that is larger.

    peak: the bits of the largest scale of this lane's tokens. Returns (old unit / new unit, log2(1 / new unit)).
    """
    before = unit[0]
    unit[0] = cutlass.max(before, cutlass.min(warp_max(peak) & EXPONENT, LARGEST_UNIT))
    return shrink_of(before, unit[0]), (127 - (unit[0] >> 23)).to(Float32)


def shrink_of(before: Int32, after: Int32) -> Float32:
    """What a number of units is multiplied by when its unit changes: the old unit divided by the new one."""
    return as_float((127 << 23) + before - after)


def unit_of(unit: cute.Tensor) -> Float32:
    """The unit as a factor."""
    return as_float(unit[0])


def inverse_of_unit(unit: cute.Tensor) -> Float32:
    """The inverse of the unit, as a factor."""
    return as_float((2 * 127 << 23) - unit[0])
