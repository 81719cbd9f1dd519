"""Functions of a score: a cap (Gemma 2's) and a bias by distance (ALiBi, Press, Smith and Lewis 2022).

They apply in this order, after softmax_scale and k_scale. The result is a logit to base 2, without further factors.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.decode import LOG2_E, KernelSpec
from .mask import RowMask
from .query_rows import QueryBlock, place_in

NEARLY_LINEAR = 0.1  # tanh's argument up to which the series below is exact to 6e-8, and 1 - 2 / (e^2x + 1) loses digits


@dataclass(frozen=True)
class ScoreModifier:
    """A lane's functions of a score. softcap: the cap, or None.

    slopes: its rows' ALiBi slopes, to base 2, or None; positions: its rows' among the keys.
    """

    softcap: Float32 | None
    slopes: list[Float32] | None
    positions: list[Int32]


def make_modifier(spec: KernelSpec, scores, block: QueryBlock, lane_rows: list, mask: RowMask) -> ScoreModifier | None:
    """The modifier of this lane's rows for one piece; None if scores are only scaled. scores: ScoreOperands."""
    if not spec.modifiers.functions:
        return None
    slopes = None
    if spec.modifiers.alibi:
        heads = [place_in(spec, block, cutlass.min(row, cutlass.max(block.rows - 1, 0)))[-1] for row in lane_rows]
        slopes = [scores.slopes[head] * LOG2_E for head in heads]
    return ScoreModifier(scores.softcap if spec.modifiers.softcap else None, slopes, mask.positions)


@cute.jit
def modify_scores(acc_s: cute.Tensor, coords: cute.Tensor, factors: list, modifier: ScoreModifier, token: Int32):
    """Turns a tile's scores into logits to base 2. factors: score_factors; token: the tile's first token."""
    inverse = Float32(1.0)
    if cutlass.const_expr(modifier.softcap is not None):
        inverse = 2.0 / modifier.softcap
    for r in cutlass.range_constexpr(len(factors)):
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            if cutlass.const_expr(i // 2 % 2 == r):
                logit = acc_s[i] * factors[r]
                if cutlass.const_expr(modifier.softcap is not None):
                    logit = modifier.softcap * LOG2_E * tanh_of_half(logit * inverse)
                if cutlass.const_expr(modifier.slopes is not None):
                    distance = modifier.positions[r] - (token + coords[i][1])
                    logit = logit - modifier.slopes[r] * cutlass.max(distance, -distance).to(Float32)
                acc_s[i] = logit


def tanh_of_half(doubled: Float32) -> Float32:
    """tanh(x), to a few ulp, from doubled = 2 x log2(e): the approximate instruction is off by 5e-4 of the value."""
    x = doubled * (0.5 / LOG2_E)
    square = x * x
    series = x + x * square * (square * (2 / 15) - 1 / 3)
    whole = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(doubled, fastmath=True))
    return cutlass.select_(square < NEARLY_LINEAR**2, series, whole)
