"""Scales of tokens beside widened tiles: what one warp, or the warps that widen K, leave for all readers of a tile.

They are f32, but V's f16 scales may stay f16 (KernelSpec.wide_scale_bytes). The warp that brings the scales reads those of a tile
to registers while it stores those of the tile before. If one crew widens both K and V, the warp that brings all of them copies
scales to shared memory, and that crew converts them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...config.decode import KernelSpec
from ...config.problem import ScaleForm
from ..ptx.registers import LANES, MAGNITUDE, as_bits, as_float, warp_max
from .scale import ScaleRing, half_to_float, key_factor, own_half
from .value_scales import INVERSE_OF_KEYS, store_factors


def make_coming(spec: KernelSpec) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """Registers for the scales of two tiles on their way, and for the unit of V's (value_scales.py), Int32 [1].

    Scales are Int32 [group of 32 tokens, K and V]: this lane's token of each group.
    """
    later, earlier = (cute.make_rmem_tensor((spec.token_groups, 2), Int32) for _ in range(2))
    return later, earlier, cute.make_rmem_tensor(1, Int32)


def read_scales(spec: KernelSpec, found: list, coming: cute.Tensor):
    """Starts to read scales from where they are, found by find_scales: each lane its own tokens'; zeros for what is not read."""
    for group, both in enumerate(found):
        for which, one in enumerate(both):
            if one is not None:
                coming[group, which] = read_scale((spec.k_scale, spec.v_scale)[which], *one[:2])


def read_scale(form: ScaleForm, address: Int64, inside: Boolean) -> Int32:
    """The bits of a scale in global memory, or 0 if it is not `inside`.

    An f16 has a register for itself: the assembler would pack two loaded as 16 bits, and for that wait at once.
    """
    bits = "u16" if form == "token_f16" else "b32"
    text = f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; mov.b32 {{$w0}}, 0; @p ld.global.{bits} {{$w0}}, [{{$r0}}]; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address, Int32(inside)])


@cute.jit
def store_scales(spec: cutlass.Constexpr, wide: tuple, stage: Int32, coming: cute.Tensor, unit: cute.Tensor, scale_log2: Float32):
    """Stores the scales of a tile for all its readers, and the largest magnitude of V's, or factors of V's.

    wide: rings of K's and V's scales for widened tiles; unit: that of earlier factors of the piece, which becomes the tile's;
    scale_log2: of the softmax.
    """
    lane = cute.arch.lane_idx()
    for which, ring in [(which, ring) for which, ring in enumerate(wide) if ring is not None]:
        bits = [scale_bits(spec, which, coming[group, which], scale_log2) for group in range(spec.token_groups)]
        if cutlass.const_expr(which == 1 and spec.scales_values):
            store_factors(spec, ring, stage, bits, unit)
        else:
            peak = Int32(0)
            for group in cutlass.range_constexpr(spec.token_groups):
                peak = cutlass.max(peak, store_scale(spec, ring, stage, group, bits[group]))
            if cutlass.const_expr(which == 1 and spec.keeps_unit):
                peak = warp_max(peak)
                if lane == 0:
                    ring.upper[0, stage] = peak


def scale_bits(spec: KernelSpec, which: int, found: Int32, scale_log2: Float32) -> Int32:
    """The bits, as f32, of a scale of K (0) or V (1) as read_scale found it; K's with what else it holds."""
    form, bits = (spec.k_scale, spec.v_scale)[which], found
    if form == "token_f16":
        bits = as_bits(half_to_float(bits))
    return key_bits(spec, bits, scale_log2) if which == 0 else bits


def key_bits(spec: KernelSpec, bits: Int32, scale_log2: Float32) -> Int32:
    """The bits of a scale of K, times the softmax factor (relates_scores), or times what K's constant factor takes off."""
    if spec.relates_scores:
        return as_bits(as_float(bits) * key_factor(spec, scale_log2))
    return as_bits(as_float(bits) * INVERSE_OF_KEYS) if spec.scales_keys else bits


@cute.jit
def store_scale(spec: cutlass.Constexpr, ring: ScaleRing, stage: Int32, group: Int32 | int, bits: Int32) -> Int32:
    """Stores the scale of this lane's token in a group, bits of an f32; returns its magnitude's, or 0 past the tile."""
    token = group * LANES + cute.arch.lane_idx()
    if token < spec.tile_n:
        ring.words[token, stage] = as_float(bits).to(ring.words.element_type)
    return cutlass.select_(token < spec.tile_n, bits & MAGNITUDE, Int32(0))


def load_scale(spec: KernelSpec, ring: ScaleRing, stage: Int32, group: Int32) -> tuple[Int32, Int32]:
    """(word of this lane's token in a group, `upper` of the group), or others if the group lies past the tile."""
    token = cutlass.min(group * LANES + cute.arch.lane_idx(), spec.tile_n - 1)
    return ring.words[token, stage], ring.upper[cutlass.min(group, spec.token_groups - 1), stage]


def load_scales(spec: KernelSpec, rings: tuple, stage: Int32, warp: Int32) -> list:
    """load_scale of the first group whose scales a warp stores that widens K, for each of `rings`; None for one that is None."""
    return [None if ring is None else load_scale(spec, ring, stage, warp) for ring in rings]


@cute.jit
def widen_scales(
    spec: cutlass.Constexpr,
    rings: tuple,
    stage: Int32,
    wide: tuple,
    wide_stage: Int32,
    warp: Int32,
    found: list,
    scale_log2: Float32,
):
    """A warp that widens K stores scales as f32 for all readers of the tile, with the largest magnitude of 32 tokens' of V.

    found: load_scales of the warp; what further groups have is loaded here, as registers do not suffice for all. scale_log2: of
    the softmax.
    """
    lane, crew = cute.arch.lane_idx(), len(spec.widening_crews[0])
    every = zip(rings, wide, (spec.k_scale, spec.v_scale), found, (False, True), strict=True)
    for ring, target, form, early, of_values in [one for one in every if one[0] is not None]:
        for turn in cutlass.range_constexpr(-(-spec.token_groups // crew)):
            group = warp + turn * crew
            bits, upper = early if cutlass.const_expr(turn == 0) else load_scale(spec, ring, stage, group)
            if cutlass.const_expr(form == "token_f16"):
                bits = own_half(bits, upper)
            if cutlass.const_expr(not of_values):
                bits = key_bits(spec, bits, scale_log2)
            magnitude = store_scale(spec, target, wide_stage, group, bits)
            if cutlass.const_expr(of_values and spec.keeps_unit):
                peak = warp_max(magnitude)
                if (lane == 0) & (group < spec.token_groups):
                    target.upper[group, wide_stage] = peak
