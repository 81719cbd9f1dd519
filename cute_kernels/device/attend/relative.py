"""Scores relative to their bases: one multiply-add makes a score of Q K^T a logit and subtracts its row's base.

K's scales of tokens are multiplied to the columns of S in any case, so they hold the softmax factor as well, and a score less
its base is rounded once, whatever the base. What bases.py does is then done with scores whose base is 0: a row that moves its
base, a logit to base 2, moves it by the tile's largest score, which is subtracted from all of them. A row that has seen no key
has the base -inf, and its scores are relative to 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from ..kv.scale import scale_columns
from .attend import WarpState
from .bases import exact_maxima, quad_all, stays_at, tops_of
from .softmax import finite_or_zero, rows_of


def relate_scores(acc_s: cute.Tensor, state: WarpState, columns: cute.Tensor):
    """Q K^T, in place, becomes logits to base 2 less their rows' bases. columns: K's scales of this lane's columns."""
    bases = [finite_or_zero(state.row_max[r]) for r in range(cute.size(state.row_max))]
    scale_columns(acc_s, len(bases), columns, bases)


@cute.jit
def settle_related(spec: cutlass.Constexpr, acc_s: cute.Tensor, state: WarpState, factors: list) -> tuple[list, list, Boolean]:
    """bases.settle_bases for related scores: nothing is left to subtract. factors: 1 for each row."""
    scores, rows = rows_of(acc_s), range(len(factors))
    tops, decays = tops_of(scores, len(factors)), [Float32(1.0)] * len(factors)
    begun = [state.row_max[r] != -Float32.inf for r in rows]
    stays = [begun[r] & stays_at(spec, tops[r], Float32(0.0), factors[r], state.row_sum[r]) for r in rows]
    moved = cute.arch.vote_any_sync((stays[0] & stays[-1]) == Boolean(False))
    if moved:
        stays = [quad_all(stays[r]) for r in rows]
        maxima = exact_maxima(scores, tops, stays)
        for r in cutlass.range_constexpr(len(factors)):
            before = finite_or_zero(state.row_max[r])
            base = cutlass.select_(stays[r], state.row_max[r], before + maxima[r])
            decays[r] = cute.math.exp2(state.row_max[r] - finite_or_zero(base), fastmath=True)
            scores[r, None].store(scores[r, None].load() - (finite_or_zero(base) - before))
            state.row_max[r], state.row_sum[r] = base, state.row_sum[r] * decays[r]
        moved = cute.arch.vote_any_sync(begun[0] | begun[-1])  # before the first tile O is 0
    return [Float32(0.0)] * len(factors), decays, moved
