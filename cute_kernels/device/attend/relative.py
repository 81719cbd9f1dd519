"""Scores relative to their bases: one multiply-add makes a score of Q K^T a logit and subtracts its row's base.

K's scales of tokens are multiplied to the columns of S in any case, so they hold the softmax factor as well, and a score less
its base is rounded once, whatever the base. What bases.py does is then done with scores whose base is 0: a row that moves its
base, a logit to base 2, moves it by the tile's largest score, which is subtracted from all of them. A row that has seen no key
has the base -inf, and its scores are relative to 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...config.decode import KernelSpec
from ..kv.scale import scale_columns
from .bases import exact_maxima, quad_all, stays_at, sums_of, tops_of
from .softmax import finite_or_zero, rows_of


def relate_scores(acc_s: cute.Tensor, state, columns: cute.Tensor):
    """Q K^T, in place, becomes logits to base 2 less their rows' bases. columns: K's scales of this lane's columns."""
    bases = [finite_or_zero(state.row_max[r]) for r in range(cute.size(state.row_max))]
    scale_columns(acc_s, len(bases), columns, bases)


def look_related(spec: KernelSpec, acc_s: cute.Tensor, state, factors: list) -> tuple[list, list, list]:
    """bases.look at related scores. factors: 1 for each row."""
    bases, tops = [Float32(0.0)] * len(factors), tops_of(rows_of(acc_s), len(factors))
    serves = [stays_at(spec, *row) for row in zip(tops, bases, factors, sums_of(state), strict=True)]
    return bases, tops, [serves[r] & (state.row_max[r] != -Float32.inf) for r in range(len(factors))]


@cute.jit
def move_related(acc_s: cute.Tensor, state, factors: list, bases: list, tops: list, stays: list) -> tuple[list, list]:
    """bases.move_bases for related scores: nothing is left to subtract."""
    scores, decays = rows_of(acc_s), [Float32(1.0)] * len(factors)
    stays = [quad_all(stays[r]) for r in range(len(factors))]
    maxima = exact_maxima(scores, tops, stays)
    for r in cutlass.range_constexpr(len(factors)):
        before = finite_or_zero(state.row_max[r])
        base = cutlass.select_(stays[r], state.row_max[r], before + maxima[r])
        decays[r] = cute.math.exp2(state.row_max[r] - finite_or_zero(base), fastmath=True)
        scores[r, None].store(scores[r, None].load() - (finite_or_zero(base) - before))
        state.row_max[r], state.row_sum[r] = base, state.row_sum[r] * decays[r]
    return bases, decays
