"""Online softmax with lazy rescaling, where instructions set the pace: a row's base moves only if a score would weigh too much.

A row's weights are exp2(score * scale - base), with the rounded base = row_max * scale. All weights have the same base, so any
base serves that lets none of them overflow, as in flash-attn-4 (2026). Here row_max is the maximum at the time when the row's
base last moved. So few tiles need the exact maximum, or O rescaled. The first look at a tile compares its scores' bits as
integers, three at a time: from 0 up these are in order, and a score below 0 weighs at most 1 unless the base is below 0 too.
A warp moves its bases in few instructions, as the other warps of its warpgroup wait for it: of the four, one or more moves a base
in half of the tiles over caches with scales of tokens (docs/notes/kernel-log.md).
Where most tiles would move a base anyway, bases follow the maxima, and O is rescaled at each tile (weigh_by_maxima).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import KernelSpec
from ..ptx.registers import as_bits, as_float
from .softmax import finite_or_zero, quad_max, rescale_row, rows_of

MOST_BASE = 2.0**20  # magnitude of a base beyond which the rounded-off rest of its product may carry a weight past f16's range
MOST_F16_BITS = 15.75  # base-2 logarithm of the largest weight in f16, with room for a base's rounding
FEW_COLUMNS = 8  # of a lane in a tile
BF16_SLACK = 16.0  # the same in bf16, whose range is f32's: sums and O stay far from its end
ROW_LANES = 4  # lanes that share a row


@dataclass(frozen=True)
class WeightsUp:
    """What is added to the exponents of a tile's weights, and factors on the sums and on O so far."""

    term: Float32
    sums: Float32
    outputs: Float32


def slack_of(spec: KernelSpec) -> float:
    """How far past its base, to base 2, a scaled score may lie. A scale of V is below two units (kv/scale.py)."""
    return MOST_F16_BITS - spec.weight_bits - spec.scales_weights if spec.v_math == "f16" else BF16_SLACK


def look(spec: KernelSpec, acc_s: cute.Tensor, state, factors: list) -> tuple[list, list, list]:
    """(bases, largest_bits, stays_at) of each of a tile's rows in use. state: WarpState; factors: of the scores, to base 2."""
    bases = [rounded_product(state.row_max[r], factors[r]) for r in range(len(factors))]
    tops = tops_of(rows_of(acc_s), len(factors))
    return bases, tops, [stays_at(spec, *row) for row in zip(tops, bases, factors, sums_of(state), strict=True)]


@cute.jit
def move_bases(acc_s: cute.Tensor, state, factors: list, bases: list, tops: list, stays: list) -> tuple[list, list]:
    """Moves the bases of rows that do not stay; returns (offsets, decays). bases, tops, stays: from `look`.

    offsets: for each row in use, what to subtract from its scaled scores; decays: what O must still be multiplied by. For a base
    past MOST_BASE the offset is 0, and the maximum is subtracted from the scores here.
    """
    scores, offsets, decays = rows_of(acc_s), list(bases), [Float32(1.0)] * len(factors)
    stays = [quad_all(stays[r]) for r in range(len(factors))]
    maxima = exact_maxima(scores, tops, stays)
    for r in cutlass.range_constexpr(len(factors)):  # a row's bits depend on no other row
        peak = cute.arch.fmax(maxima[r], state.row_max[r], nan=True)
        state.row_max[r] = cutlass.select_(stays[r], state.row_max[r], peak)
        offsets[r] = rounded_product(finite_or_zero(state.row_max[r]), factors[r])
        decays[r] = cute.math.exp2(bases[r] - offsets[r], fastmath=True)
        state.row_sum[r] = state.row_sum[r] * decays[r]
    if cutlass.const_expr(few_columns(scores)) or cute.arch.vote_any_sync(is_far(offsets[0]) | is_far(offsets[-1])):
        for r in cutlass.range_constexpr(len(factors)):
            offsets[r] = subtract_far(scores, r, state.row_max[r], offsets[r])
    return offsets, decays


@cute.jit
def exact_maxima(scores: cute.Tensor, tops: list, stays: list) -> list:
    """The maxima, in all of their lanes, of the scores of rows that do not stay. tops: the rows' largest_bits.

    The largest integer is the bits of the maximum if some score of the row is above 0, which only many columns make worth a look.
    """
    if cutlass.const_expr(few_columns(scores)):
        return [raised_peak(scores, r, -Float32.inf) for r in range(len(tops))]
    bits = [quad_largest(top) for top in tops]
    maxima = [as_float(top) for top in bits]
    known = [(top > 0) | stay for top, stay in zip(bits, stays, strict=True)]
    if cute.arch.vote_any_sync((known[0] & known[-1]) == Boolean(False)):
        for r in cutlass.range_constexpr(len(maxima)):
            maxima[r] = raised_peak(scores, r, -Float32.inf)
    return maxima


def few_columns(scores: cute.Tensor) -> bool:
    """Whether a lane has so few scores of a row that branches save nothing."""
    return cute.size(scores, mode=[1]) <= FEW_COLUMNS


def stays_at(spec: KernelSpec, top: Int32, base: Float32, factor: Float32, row_sum: Float32) -> Boolean:
    """Whether a row's base serves a tile, as far as this lane's columns show. top: their largest_bits; row_sum: this lane's.

    If weights are rounded to the type of the inputs, no score may outweigh all earlier scores together either, which weigh about
    as much in each of a row's lanes: a key that dominates its row keeps the weight 1, which no rounding changes. The earlier
    scores weigh at least 1 together, since the base is that of one of them. Times V's scales, any weight is rounded.
    """
    most = Float32(2.0 ** slack_of(spec))
    if spec.v_math == spec.element_type and not spec.scales_weights:
        earlier = row_sum * (ROW_LANES * 2.0**-spec.weight_bits)
        most = cute.arch.fmin(cute.arch.fmax(earlier, Float32(1.0)), most)
    weight = cute.math.exp2(as_float(top) * factor - base, fastmath=True)
    return (weight <= most) & ((top & as_bits(base)) >= 0) & (cute.arch.fmax(base, -base) < MOST_BASE)


def weigh_by_maxima(acc_s: cute.Tensor, state, factors: list, weights_up: WeightsUp | None):
    """As online_softmax, with a rounded base that follows the maximum.

    O is rescaled at each tile, and no branch depends on the scores. factors: as in `look`.
    """
    offsets, decays = follow_maxima(acc_s, state, factors)
    for r in range(len(factors)):
        rescale_row(state.acc_o, r, decays[r] if weights_up is None else decays[r] * weights_up.outputs)
        weigh_row(acc_s, state, r, factors[r], offsets[r], weights_up)


@cute.jit
def follow_maxima(acc_s: cute.Tensor, state, factors: list) -> tuple[list, list]:
    """Moves each base to its row's maximum; returns (offsets, decays) as move_bases does."""
    scores, peaks, offsets, decays = rows_of(acc_s), [], [], []
    for r in cutlass.range_constexpr(len(factors)):
        peaks.append(raised_peak(scores, r, state.row_max[r]))
        offsets.append(rounded_product(finite_or_zero(peaks[r]), factors[r]))
        decays.append(cute.math.exp2(rounded_product(state.row_max[r], factors[r]) - offsets[r], fastmath=True))
        state.row_max[r] = peaks[r]
        state.row_sum[r] = state.row_sum[r] * decays[r]
    if cute.arch.vote_any_sync(is_far(offsets[0]) | is_far(offsets[-1])):
        for r in cutlass.range_constexpr(len(factors)):
            offsets[r] = subtract_far(scores, r, peaks[r], offsets[r])
    return offsets, decays


def raised_peak(scores: cute.Tensor, row: int, peak: Float32) -> Float32:
    """The maximum of a row's scores in all of its lanes, and of `peak`."""
    return quad_max(largest([*(scores[row, c] for c in range(cute.size(scores, mode=[1]))), peak]), nan=True)


def subtract_far(scores: cute.Tensor, row: int, peak: Float32, base: Float32) -> Float32:
    """Returns what to subtract from a row's scaled scores: if the base is past MOST_BASE 0, as `peak` is subtracted here."""
    far = is_far(base)
    scores[row, None].store(scores[row, None].load() - cutlass.select_(far, finite_or_zero(peak), Float32(0.0)))
    return cutlass.select_(far, Float32(0.0), base)


def is_far(base: Float32) -> Boolean:
    """Whether a base is past MOST_BASE."""
    return cute.arch.fmax(base, -base) >= MOST_BASE


def raise_row(state, row: int, offset: Float32, weights_up: WeightsUp | None) -> Float32:
    """Returns the offset of a row's weights, and takes its sum along. weights_up: attend.weights_up."""
    if weights_up is not None:
        offset = offset - weights_up.term
        state.row_sum[row] = state.row_sum[row] * weights_up.sums
    return offset


@cute.jit
def weigh_row(acc_s: cute.Tensor, state, row: cutlass.Constexpr, factor: Float32, offset: Float32, weights_up: WeightsUp | None):
    """A row of acc_s becomes exp2(acc_s * factor - offset), and joins its sum. weights_up: attend.weights_up."""
    scores, offset = rows_of(acc_s), raise_row(state, row, offset, weights_up)
    weights = cute.math.exp2(scores[row, None].load() * factor - offset, fastmath=True)
    scores[row, None].store(weights)
    state.row_sum[row] = weights.reduce(cute.ReductionOp.ADD, state.row_sum[row], 0)


@cute.jit
def follow_bases(acc_o: cute.Tensor, decays: list, moved: Boolean, weights_up: WeightsUp | None):
    """Rescales O to the current bases, which few tiles move. decays, moved: from lazy.settle_bases."""
    factors = list(decays)
    if cutlass.const_expr(weights_up is not None):
        factors, moved = [decay * weights_up.outputs for decay in decays], moved | (weights_up.outputs != 1.0)
    if moved:
        for r in cutlass.range_constexpr(len(factors)):
            rescale_row(acc_o, r, factors[r])


def quad_votes(value: Boolean) -> Int32:
    """A bit for each of the four lanes that share a row: whether `value` is true there."""
    return (cute.arch.vote_ballot_sync(value) >> (cute.arch.lane_idx() & 28)) & 15


def quad_all(value: Boolean) -> Boolean:
    """Whether `value` is true in all four lanes that share a row."""
    return quad_votes(value) == 15


def quad_any(value: Boolean) -> Boolean:
    """Whether `value` is true in any of the four lanes that share a row."""
    return quad_votes(value) != 0


def quad_largest(value: Int32) -> Int32:
    """The largest of the integers of four lanes that share a row."""
    value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def sums_of(state) -> list:
    """This lane's sums of each row in use."""
    return [state.row_sum[r] for r in range(cute.size(state.row_sum))]


def bases_of(state) -> list:
    """The bases of each row in use."""
    return [state.row_max[r] for r in range(cute.size(state.row_max))]


def tops_of(scores: cute.Tensor, rows: int) -> list:
    """largest_bits of this lane's scores of each row in use."""
    words = cute.recast_tensor(scores, Int32)
    return [largest_bits([words[r, c] for c in range(cute.size(words, mode=[1]))]) for r in range(rows)]


def largest_bits(values: list) -> Int32:
    """The maximum of integers, three at a time, as the machine's instruction takes them."""
    while len(values) > 1:
        threes = [values[i : i + 3] for i in range(0, len(values), 3)]
        values = [larger(larger(*three[:2]), three[2]) if len(three) == 3 else larger(*three) for three in threes]
    return values[0]


def larger(first: Int32, second: Int32 | None = None) -> Int32:
    """The larger of two integers, or the first if it is the only one."""
    return first if second is None else cutlass.max(first, second)


def largest(values: list) -> Float32:
    """The maximum, in as few dependent steps as possible. NaN counts as the largest: a row that has one is not an empty row."""
    while len(values) > 1:
        pairs = [cute.arch.fmax(*values[i : i + 2], nan=True) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def rounded_product(first: Float32, second: Float32) -> Float32:
    """A product that the compiler may not fuse with a later step, so that each use of a base has the same value."""
    text = "mul.rn.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[first, second])
