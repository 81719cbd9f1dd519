"""Softmax weights and gradients of scores, for a tile whose Q K^T and dO V^T, or both transposed, are a warp's accumulators.

With the lse and delta = rowsum(dout * out) of each query row known, P = exp(S - lse) and dS = P (dO V^T - delta) need no
other tile (FlashAttention-2, Dao 2023, algorithm 2). A soft cap multiplies dS by 1 - tanh^2; softmax_scale is left to the end.

A lane has rows lane / 4 and lane / 4 + 8, and of each n8 block two neighbouring columns. For dQ, queries are the rows and keys
the columns (QueryRows, KeyColumns); for dK and dV, keys are the rows and queries the columns (KeyRows, QueryColumns).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.backward import MOST_EXPONENT, BackwardSpec
from ...config.decode import LOG2_E
from ..problem import ScoreOperands
from ..ptx.registers import quotient, remainder
from ..ptx.shared_pairs import read_pair
from .query_rows import Queries, Row, position_of
from .score import tanh_of_half
from .seen import sees
from .weights import base_2

LOG2_E_HIGH, LOG2_E_LOW, LN_2 = "0f3FB8AA3B", "0f32A57060", "0f3F317218"  # f32 bits: log2(e) and what it rounds off, ln(2)


@dataclass(frozen=True)
class Asked:
    """The request whose query rows are weighed: its rows, and what changes its scores. head: the first query head."""

    queries: Queries
    row: Row
    scores: ScoreOperands
    head: Int32


def usable_lse(spec: BackwardSpec, lse: Float32) -> Float32:
    """An lse in base 2; -inf, the lse of a row without keys, becomes +inf, so that the row's weights are 0 and not NaN."""
    return cutlass.select_(lse == -Float32.inf, Float32.inf, base_2(spec, lse, LOG2_E))


def position_at(spec: BackwardSpec, asked: Asked, packed: Int32) -> Int32:
    """The position, among the keys, of the query row of a request's packed row."""
    return position_of(spec, asked.row, quotient(packed, spec.group_size))


def slope_of(spec: BackwardSpec, asked: Asked, packed: Int32) -> Float32:
    """ALiBi's slope of the head of a packed row of a request, to base 2; over f32 as it is given."""
    slope = asked.scores.slopes[asked.head + remainder(packed, spec.group_size)]
    return slope if spec.splits else slope * LOG2_E


class QueryRows:
    """Query rows as a lane's rows. packed: their numbers among the request's packed rows; lses (to base 2), deltas: theirs."""

    by_key = False

    def __init__(self, spec: BackwardSpec, asked: Asked, packed: list, lses: list, deltas: list):
        self.lses, self.deltas = lses, deltas
        self.positions = [position_at(spec, asked, one) for one in packed]
        self.slopes = [slope_of(spec, asked, one) for one in packed] if spec.modifiers.alibi else None


class KeyColumns:
    """The tokens of a tile from `first` on as columns. Tokens at or past `end` are not keys."""

    def __init__(self, first: Int32, end: Int32):
        self.first, self.end = first, end

    def key(self, block: int, column: int) -> Int32:
        """The position of the key of a lane's column of an n8 block."""
        return self.first + (8 * block + column) + 2 * remainder(cute.arch.lane_idx(), 4)


class KeyRows:
    """Keys as a lane's rows. positions: theirs among the request's keys, below 0 for a row that is none of them."""

    by_key = True

    def __init__(self, positions: list):
        self.positions = positions


class QueryColumns:
    """The packed rows of a request from `base` on as columns; numbers: their lse and delta, f32 [packed row, which]."""

    def __init__(self, spec: BackwardSpec, asked: Asked, numbers: cute.Tensor, base: Int32):
        self.spec, self.asked, self.numbers, self.base = spec, asked, numbers, base

    def packed(self, block: int, column: int) -> Int32:
        """The packed row of a lane's column of an n8 block."""
        return self.base + (8 * block + column) + 2 * remainder(cute.arch.lane_idx(), 4)

    def pair(self, which: int, block: int) -> tuple[Float32, Float32]:
        """The lse (0) or the delta (1) of a lane's two columns of an n8 block."""
        return read_pair(
            self.numbers.iterator + (which * self.spec.tile_rows + 8 * block + 2 * remainder(cute.arch.lane_idx(), 4))
        )

    def lses(self, block: int) -> list:
        """The lse, to base 2, of a lane's two columns of an n8 block, less weight_bits: it scales weights by 2**weight_bits."""
        lses = [usable_lse(self.spec, lse) for lse in self.pair(0, block)]
        return [lse - self.spec.weight_bits for lse in lses] if self.spec.weight_bits else lses


def elements(acc: cute.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(element, n8 block, row, column of the block) of a lane's part of an accumulator, unrolled."""
    for n in range(cute.size(acc) // 4):
        for r in range(2):
            for c in range(2):
                yield 4 * n + 2 * r + c, n, r, c


def weigh_tile(spec: BackwardSpec, acc_s: cute.Tensor, rows, columns, scale_log2: Float32, softcap: Float32):
    """Turns Q K^T of a tile, or its transpose, into softmax weights, in place. Returns a soft cap's slopes, or None.

    If keys are the rows, weights are multiplied by 2**spec.weight_bits.
    """
    most = Float32(MOST_EXPONENT + (spec.weight_bits if rows.by_key else 0))
    slopes = cute.make_rmem_tensor(acc_s.shape, Float32) if spec.modifiers.softcap else None
    inverse = 2.0 / softcap if spec.modifiers.softcap else None
    lses: list = []
    for i, n, r, c in elements(acc_s):
        if rows.by_key and i % 4 == 0:
            lses = columns.lses(n)
        logit = acc_s[i] * scale_log2
        if slopes is not None:
            tangent = tanh_of_half(logit * inverse)
            logit, slopes[i] = softcap * LOG2_E * tangent, 1.0 - tangent * tangent
        lse = lses[c] if rows.by_key else rows.lses[r]
        bias = bias_of(spec, rows, columns, n, r, c) if spec.modifiers.alibi else None
        if spec.splits and bias is not None:
            acc_s[i] = biased_weight(logit - lse, *bias, most)
            continue
        if bias is not None:
            logit = logit - bias[0] * bias[1]
        acc_s[i] = cute.math.exp2(cute.arch.fmin(logit - lse, most, nan=True), fastmath=True)
    return slopes


def biased_weight(exponent: Float32, slope: Float32, distance: Float32, most: Float32) -> Float32:
    """exp2 of an exponent less ALiBi's bias, exact to f32 also where the bias takes nearly all of a weight.

    An f32 near the bias has too few digits behind its point for that. So the bias, to base 2, and the difference have a low part
    each, what was rounded off (Dekker 1971; Knuth's sum of two), by which the weight is corrected at the end.
    """
    lines = [
        ".reg .f32 bias, low, high, sum, back, other, weight; .reg .pred none;",
        "mul.rn.f32 bias, {$r1}, {$r2}; neg.f32 other, bias; fma.rn.f32 low, {$r1}, {$r2}, other;",
        f"mul.rn.f32 high, bias, {LOG2_E_HIGH}; neg.f32 other, high; mul.rn.f32 low, low, {LOG2_E_HIGH};",
        f"fma.rn.f32 low, bias, {LOG2_E_LOW}, low; fma.rn.f32 other, bias, {LOG2_E_HIGH}, other; add.rn.f32 low, low, other;",
        "sub.rn.f32 sum, {$r0}, high; sub.rn.f32 back, sum, {$r0}; sub.rn.f32 other, sum, back; sub.rn.f32 other, {$r0}, other;",
        "neg.f32 high, high; sub.rn.f32 high, high, back; add.rn.f32 other, other, high; sub.rn.f32 low, other, low;",
        "setp.eq.f32 none, sum, 0fFF800000; selp.f32 low, 0f00000000, low, none;",  # a weight of 0, whose low part is no number
        "min.NaN.f32 sum, sum, {$r3}; ex2.approx.ftz.f32 weight, sum;",
        f"mul.rn.f32 low, low, {LN_2}; fma.rn.f32 {{$w0}}, weight, low, weight;",
    ]
    text = f"{{ {' '.join(lines)} }}"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[exponent, slope, distance, most])


def bias_of(spec: BackwardSpec, rows, columns, block: int, r: int, c: int) -> tuple[Float32, Float32]:
    """(slope, distance) of an element, whose product is ALiBi's bias."""
    if rows.by_key:
        packed = columns.packed(block, c)
        slope, distance = slope_of(spec, columns.asked, packed), position_at(spec, columns.asked, packed) - rows.positions[r]
    else:
        slope, distance = rows.slopes[r], rows.positions[r] - columns.key(block, c)
    return slope, cutlass.max(distance, -distance).to(Float32)


def grade_tile(acc_dp: cute.Tensor, weights: cute.Tensor, slopes: cute.Tensor | None, rows, columns, factor: Float32 | None):
    """Turns dO V^T of a tile, or its transpose, into gradients of scores, in place. factor: a further one on them, or None."""
    deltas: tuple = ()
    for i, n, r, c in elements(acc_dp):
        if rows.by_key and i % 4 == 0:
            deltas = columns.pair(1, n)
        difference = acc_dp[i] - (deltas[c] if rows.by_key else rows.deltas[r])
        if factor is not None:
            difference = difference * factor
        gradient = weights[i] * difference
        acc_dp[i] = gradient if slopes is None else gradient * slopes[i]


@cute.jit
def hide_tile(spec: cutlass.Constexpr, acc: cute.Tensor, rows, columns, queries: Queries):
    """Weights or gradients become 0 where a query row does not see a key."""
    for i, n, r, c in elements(acc):
        if cutlass.const_expr(rows.by_key):
            position = position_at(spec, columns.asked, columns.packed(n, c))
            seen = (rows.positions[r] >= 0) & sees(spec, queries, position, rows.positions[r])
        else:
            key = columns.key(n, c)
            seen = (key < columns.end) & sees(spec, queries, rows.positions[r], key)
        acc[i] = cutlass.select_(seen, acc[i], Float32(0.0))
