"""Weights of a tile by groups of columns, whose exponentials are interleaved with the other steps of softmax.

ptxas puts the exponentials of a tile first, 8 cycles apart, and what else softmax does behind them. So those of a group of
columns wait for one of the group before, by a predicate that is always true but not known to the compiler. What earlier groups
still have to do then stands among them: over int8 with scales of tokens, prompts take 1.5% less (docs/notes/kernel-log.md).
"""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.decode import KernelSpec
from ..ptx.packed import pack
from .bases import WeightsUp, raise_row

GROUP = 4  # n8 steps of a group, of which a lane reads V's scales together
BEFORE = 5  # how many exponentials before a group is the one that it waits for
NO_WEIGHT = "0xFF812345"  # bits of a NaN that no exponential returns


def weigh_interleaved(
    spec: KernelSpec,
    p: cute.Tensor,
    acc_s: cute.Tensor,
    state,
    factors: list[Float32],
    offsets: list[Float32],
    weights_up: WeightsUp | None,
    scales: cute.Tensor,
    free_p: Callable[[], None],
):
    """As bases.weigh_row of all rows, then scale_columns by V's scales of tokens, then attend.pack_probabilities into p.

    factors, offsets: of each row in use. free_p: waits until no product reads p any more.
    """
    rows = range(len(factors))
    offsets = [raise_row(state, r, offsets[r], weights_up) for r in rows]
    words, steps, weights = cute.recast_tensor(p, Int32), cute.size(acc_s) // 4, []
    for group in range(0, steps + GROUP, GROUP):
        guard = weights[-min(BEFORE, len(weights))] if group else None
        for n in range(group, min(group + GROUP, steps)):
            for r in rows:
                for c in range(2):
                    acc_s[(c, r), 0, n] = exp2_behind(acc_s[(c, r), 0, n] * factors[r] - offsets[r], guard)
                    weights.append(acc_s[(c, r), 0, n])
        if group == GROUP:
            free_p()
        for n in range(max(group - GROUP, 0), min(group, steps)):
            for r in range(2):
                pair = [acc_s[(c, r), 0, n] for c in range(2)]
                if r in rows:
                    state.row_sum[r] = state.row_sum[r] + pair[0] + pair[1]
                    pair = [pair[c] * scales[c, n] for c in range(2)]
                words[2 * n + r] = pack(spec.v_math, *pair)


def exp2_behind(exponent: Float32, guard: Float32 | None) -> Float32:
    """2^exponent, once the exponential `guard` is known."""
    if guard is None:
        return cute.math.exp2(exponent, fastmath=True)
    text = (
        "{ .reg .pred known; .reg .b32 bits; mov.b32 bits, {$r1}; "
        f"setp.ne.s32 known, bits, {NO_WEIGHT}; mov.f32 {{$w0}}, {{$r0}}; "
        "@known ex2.approx.ftz.f32 {$w0}, {$w0}; }"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[exponent, guard])
