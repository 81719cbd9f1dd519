"""Online softmax whose bases move lazily (bases.py), over scores as they are or related ones (relative.py)."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from ...config.decode import KernelSpec
from .bases import WeightsUp, bases_of, follow_bases, look, move_bases, sums_of, weigh_row
from .relative import look_related, move_related


def ways_of(spec: KernelSpec) -> tuple[Callable, Callable]:
    """How to look at scores, and how to move bases."""
    return (look_related, move_related) if spec.relates_scores else (look, move_bases)


def has_begun(spec: KernelSpec, state) -> Boolean:
    """Whether one of this lane's rows has seen a key, or for related scores, one in this lane's columns; before that O is 0."""
    numbers, before = (sums_of(state), 0.0) if spec.relates_scores else (bases_of(state), -Float32.inf)
    return (numbers[0] != before) | (numbers[-1] != before)


@cute.jit
def settle_bases(spec: cutlass.Constexpr, acc_s: cute.Tensor, state, factors: list) -> tuple[list, list, Boolean]:
    """Moves the bases that have to move; returns (offsets, decays, moved). state, factors: as in `look`.

    offsets, decays: move_bases; moved: whether O must be multiplied by decays, as a base of the warp moved.
    """
    looking, moving = cutlass.const_expr(ways_of(spec))
    bases, tops, stays = looking(spec, acc_s, state, factors)
    offsets, decays = list(bases), [Float32(1.0)] * len(factors)
    moved = cute.arch.vote_any_sync((stays[0] & stays[-1]) == Boolean(False))
    if moved:
        begun = has_begun(spec, state)
        found = moving(acc_s, state, factors, bases, tops, stays)
        for r in cutlass.range_constexpr(len(factors)):
            offsets[r], decays[r] = found[0][r], found[1][r]
        moved = cute.arch.vote_any_sync(begun)
    return offsets, decays, moved


@cute.jit
def weigh_lazily(spec: cutlass.Constexpr, scores: list, states: list, factors: list, weights_up: WeightsUp | None):
    """As online_softmax of each m-tile: with one vote, and one branch, for all rows of a warp.

    factors: of the scores of each m-tile's rows, to base 2. weights_up: attend.weights_up; nothing in it is for O.
    """
    looking, moving = cutlass.const_expr(ways_of(spec))
    tiles = range(len(scores))
    looks = [looking(spec, scores[t], states[t], factors[t]) for t in tiles]
    offsets, all_stay = [list(looks[t][0]) for t in tiles], Boolean(True)
    for t in cutlass.range_constexpr(len(scores)):
        all_stay = all_stay & looks[t][2][0] & looks[t][2][-1]
    if cute.arch.vote_any_sync(all_stay == Boolean(False)):
        for t in cutlass.range_constexpr(len(scores)):
            begun = has_begun(spec, states[t])
            found = moving(scores[t], states[t], factors[t], *looks[t])
            for r in cutlass.range_constexpr(len(factors[t])):
                offsets[t][r] = found[0][r]
            follow_bases(states[t].acc_o, found[1], cute.arch.vote_any_sync(begun), None)
    for t in cutlass.range_constexpr(len(scores)):
        for r in cutlass.range_constexpr(len(factors[t])):
            weigh_row(scores[t], states[t], r, factors[t][r], offsets[t][r], weights_up)
