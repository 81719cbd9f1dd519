"""Turns scores of a tile into softmax weights by a row's known lse: each weight by itself, with no maximum to wait for.

A weight is exp2(logit - lse), both to base 2. A lane has two neighbouring tokens of each n8 block; four lanes exchange them, so
that each has eight neighbouring tokens, for stores of 16 bytes.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.weights import LANE_TOKENS, WEIGHT_BYTES, WeightsSpec
from ..elements import ELEMENT_TYPES
from ..ptx.registers import quotient, remainder
from .mask import mask_holes
from .query_rows import TilePlace
from .score import ScoreModifier, modify_scores


@dataclass(frozen=True)
class LaneRow:
    """A packed row of an m-tile that a lane has. head: its query head; live: whether the row has one; lse: in base 2.

    factor: the factor on Q K^T, to base 2.
    """

    head: Int32
    live: Boolean
    factor: Float32
    lse: Float32


@cute.jit
def weigh(
    spec: cutlass.Constexpr,
    acc_s: cute.Tensor,
    coords: cute.Tensor,
    rows: list,
    modifier: ScoreModifier | None,
    place: TilePlace,
    holes: Int32,
):
    """Turns Q K^T of a tile into weights, in place; tokens that do not count get 0, whatever K holds there. rows: LaneRows."""
    if cutlass.const_expr(modifier is not None):
        modify_scores(acc_s, coords, [row.factor for row in rows], modifier, place.token)
    for r in cutlass.range_constexpr(len(rows)):
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            if cutlass.const_expr(i // 2 % 2 == r):
                logit = acc_s[i] if cutlass.const_expr(modifier is not None) else acc_s[i] * rows[r].factor
                acc_s[i] = cute.math.exp2(logit - rows[r].lse, fastmath=True)
    outside = place.valid < spec.tile_n
    if cutlass.const_expr(place.skip is not None):
        outside = outside | (place.skip > 0)
    if outside:
        hide_outside(acc_s, coords, place)
    if holes != 0:
        mask_holes(acc_s, coords, holes, spec.hole_tokens, 0.0)


@cute.jit
def hide_outside(acc_s: cute.Tensor, coords: cute.Tensor, place: TilePlace):
    """Weights of tokens outside the range of keys become 0."""
    for i in cutlass.range_constexpr(cute.size(acc_s)):
        hidden = coords[i][1] >= place.valid
        if cutlass.const_expr(place.skip is not None):
            hidden = hidden | (coords[i][1] < place.skip)
        if hidden:
            acc_s[i] = Float32(0.0)


@cute.jit
def add_heads(acc_s: cute.Tensor, rows: list, sums: cute.Tensor):
    """Adds a lane's rows to its sums over the heads [column pair, n8], except rows without a head."""
    for n in cutlass.range_constexpr(cute.size(sums, mode=[1])):
        for r in cutlass.range_constexpr(len(rows)):
            for c in cutlass.range_constexpr(2):
                sums[c, n] = sums[c, n] + cutlass.select_(rows[r].live, acc_s[(c, r), 0, n], Float32(0.0))


@cute.jit
def share_sums(spec: cutlass.Constexpr, sums: cute.Tensor, target: cute.Tensor, first: Int32):
    """Writes the mean of a tile's weights over all heads, in a fixed order, to target[first] and on, f32 in shared memory."""
    lane = cute.arch.lane_idx()
    for n in cutlass.range_constexpr(cute.size(sums, mode=[1])):
        for c in cutlass.range_constexpr(2):
            total = sums[c, n]
            for offset in cutlass.range_constexpr(2, 5):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << offset)
            if lane < 4:
                target[first + 8 * n + 2 * lane + c] = total * (1.0 / spec.num_heads)


@cute.jit
def store_weights(
    spec: cutlass.Constexpr, acc_s: cute.Tensor, rows: list, weights: cute.Tensor, row: Int32, token: Int32, end: Int32
):
    """Stores the lanes' rows of a tile to weights [batch, num_heads, max_seq_len], from `token` on, only before `end`."""
    lane, dtype = cute.arch.lane_idx(), ELEMENT_TYPES[spec.weights_type]
    for r in cutlass.range_constexpr(len(rows)):
        own = cute.make_rmem_tensor(LANE_TOKENS, Float32)
        for n in cutlass.range_constexpr(LANE_TOKENS // 2):
            for c in cutlass.range_constexpr(2):
                own[2 * n + c] = acc_s[(c, r), 0, n]
        values = gather_tokens(own, dtype)
        first = token + remainder(lane, 4) * LANE_TOKENS
        at = weights.iterator + cute.crd2idx((row, rows[r].head, first), weights.layout)
        store_row(spec, values, at, first, cutlass.select_(rows[r].live, end, 0))


def gather_tokens(own: cute.Tensor, dtype: type) -> cute.Tensor:
    """Exchanges a lane's weights, two of each n8 block, with its quad: returns, as `dtype`, those of block lane % 4."""
    values = cute.make_rmem_tensor(LANE_TOKENS, dtype)
    values.store(own.load().to(dtype))
    words = cute.recast_tensor(values, Int32)
    pairs = cute.size(words) // 4  # words of two tokens
    for part in range(pairs):
        places = [pairs * block + part for block in range(4)]
        for place, word in zip(places, transposed([words[place] for place in places]), strict=True):
            words[place] = word
    return values


def transposed(words: list[Int32]) -> list[Int32]:
    """Word j of lane i of four neighbours becomes word i of lane j."""
    lane = cute.arch.lane_idx()
    for bit in (1, 2):
        upper = (lane & bit) != 0
        for low in (place for place in range(4) if not place & bit):
            high = low | bit
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, words[low], words[high]), offset=bit)
            words[low], words[high] = cutlass.select_(upper, other, words[low]), cutlass.select_(upper, words[high], other)
    return words


@cute.jit
def store_row(spec: cutlass.Constexpr, values: cute.Tensor, at: cute.Pointer, first: Int32, end: Int32):
    """Stores neighbouring weights, of tokens from `first` on, to `at` and on: those before `end`, by whole vectors."""
    dtype, vector = values.element_type, cutlass.const_expr(spec.store_bytes // WEIGHT_BYTES[spec.weights_type])
    for i in cutlass.range_constexpr(0, LANE_TOKENS, vector):
        if first + i < end:
            pointer = cute.make_ptr(dtype, (at + i).toint(), cute.AddressSpace.gmem, assumed_align=spec.store_bytes)
            source = cute.make_tensor(values.iterator + i, cute.make_layout(vector))
            cute.autovec_copy(source, cute.make_tensor(pointer, cute.make_layout(vector)))


@cute.jit
def zero_weights(spec: cutlass.Constexpr, weights: cute.Tensor, row: Int32, begin: Int32, end: Int32):
    """The CTA's threads write zeros to the tokens [begin, end) of all heads of a row, in whole vectors."""
    zeros = cute.make_rmem_tensor(LANE_TOKENS, ELEMENT_TYPES[spec.weights_type])
    zeros.fill(0.0)
    per_head = quotient(cutlass.max(end - begin, 0) + LANE_TOKENS - 1, LANE_TOKENS)
    thread, threads = cute.arch.thread_idx()[0], cutlass.const_expr(32 * spec.num_warps)
    for i in cutlass.range(thread, spec.num_heads * per_head, threads, unroll=1):
        head, first = quotient(i, per_head), begin + remainder(i, per_head) * LANE_TOKENS
        store_row(spec, zeros, weights.iterator + cute.crd2idx((row, head, first), weights.layout), first, end)


def base_2(spec: WeightsSpec, lse: Float32, log2_e: float) -> Float32:
    """An lse in base 2."""
    return lse if spec.lse_base == "2" else lse * log2_e
