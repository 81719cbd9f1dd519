"""Scores relative to their bases: one multiply-add makes a score of Q K^T a logit and subtracts its row's base.

K's scales of tokens are multiplied to the columns of S in any case, so they hold the softmax factor as well, and a score less
its base is rounded once, whatever the base. What bases.py does is then done with scores whose base is 0: a row that moves its
base, a logit to base 2, moves it by the tile's largest score, which is subtracted from all of them. A row begins with the base
0, which most rows keep if V's scales multiply weights: it serves unless a row's first logits are far below it. A row has begun
once its sum is not 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...config.decode import KernelSpec
from ..kv.scale import scale_columns
from ..ptx.registers import as_float
from .bases import bases_of, exact_maxima, quad_all, quad_any, slack_of, stays_at, sums_of, tops_of
from .softmax import finite_or_zero, rows_of

LEAST_LOGIT = -32.0  # of first keys that weigh enough: what weighs 2**-90 of them is still a normal bf16
LEAST_SUM = 2.0**-120  # of a lane of a row that has begun, once a base of its warp has moved


def relate_scores(acc_s: cute.Tensor, state, columns: cute.Tensor):
    """Q K^T, in place, becomes logits to base 2 less their rows' bases. columns: K's scales of this lane's columns."""
    bases = bases_of(state)
    scale_columns(acc_s, len(bases), columns, bases)


def look_related(spec: KernelSpec, acc_s: cute.Tensor, state, factors: list) -> tuple[list, list, list]:
    """bases.look at related scores. factors: 1 for each row.

    Where V's scales multiply weights, a score's distance from its base says all, so nothing waits for an exponential. A row's
    first keys need no other base then if those in this lane weigh enough (where all of them are below 0, the largest integer is
    the least score). Otherwise a key that dominates its row has to weigh 1 (stays_at).
    """
    bases, tops, sums = [Float32(0.0)] * len(factors), tops_of(rows_of(acc_s), len(factors)), sums_of(state)
    weighs = [total != 0.0 for total in sums]
    if spec.scales_weights:
        serves = [as_float(top) <= slack_of(spec) for top in tops]
        weighs = [(as_float(top) >= LEAST_LOGIT) | weigh for top, weigh in zip(tops, weighs, strict=True)]
    else:
        serves = [stays_at(spec, *row) for row in zip(tops, bases, factors, sums, strict=True)]
    return bases, tops, [serve & weigh for serve, weigh in zip(serves, weighs, strict=True)]


@cute.jit
def move_related(acc_s: cute.Tensor, state, factors: list, bases: list, tops: list, stays: list) -> tuple[list, list]:
    """bases.move_bases for related scores: nothing is left to subtract. The base of a row that has begun only rises."""
    scores, decays = rows_of(acc_s), [Float32(1.0)] * len(factors)
    stays = [quad_all(stays[r]) for r in range(len(factors))]
    maxima = exact_maxima(scores, tops, stays)
    for r in cutlass.range_constexpr(len(factors)):
        begun, rise = quad_any(state.row_sum[r] != 0.0), finite_or_zero(maxima[r])
        rise = cutlass.select_(begun, cute.arch.fmax(rise, Float32(0.0), nan=True), rise)
        rise = cutlass.select_(stays[r], Float32(0.0), rise)
        decays[r] = cutlass.select_(begun, cute.math.exp2(-rise, fastmath=True), Float32(1.0))
        scores[r, None].store(scores[r, None].load() - rise)
        # a lane whose keys weigh nothing does not ask for another base at each tile
        least = cutlass.select_(begun, Float32(LEAST_SUM), Float32(0.0))
        state.row_max[r], state.row_sum[r] = state.row_max[r] + rise, state.row_sum[r] * decays[r] + least
    return bases, decays


def end_bases(state):
    """A row that has seen no key has the base -inf once its tiles are over."""
    for r in range(cute.size(state.row_max)):
        begun = quad_any(state.row_sum[r] != 0.0)
        state.row_max[r] = cutlass.select_(begun, state.row_max[r], -Float32.inf)
