"""Merges the states of two warpgroups that attended to a piece in turn: each has seen every other tile of it.

The merge's first place settles a whole row, and all threads store it. Of a part of a row each turn settles and stores half of the
columns, if KernelSpec.settles_halves.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.decode import KernelSpec
from ..kv.scale import Scaling
from ..ptx.shared_pairs import read_pair, write_pair
from .epilogue import LaneState, SettledRows, merge_row, peak_of, send_rows
from .pack_gqa import sync_consumers
from .softmax import quad_sum

PAIRS_READ = 16  # pairs of columns that settle_outputs reads together: registers for all 64 columns would spill at head_dim 256


@cute.jit
def settle_turns(spec: cutlass.Constexpr, merge: tuple, own: LaneState, heads: Int32, order: Int32, scaling: Scaling):
    """Merges two turns' states of an m-tile in the registers of the merge's first place, and leaves the result.

    All consumer warps call it. It leaves O [row, column, 0] and the lse in `merge`, both settled.
    """
    acc, _, _, lse = merge
    share_peaks(merge, own, heads, order)
    if order > 0:
        share_columns(acc, own, heads, range(cute.size(own.outputs, mode=[1])))
    sync_consumers(spec)
    if order == 0:
        for r in cutlass.range_constexpr(len(own.rows)):
            row = own.rows[r]
            if row < heads:
                factors, row_lse = turn_factors(spec, merge, row, own.unit, 0, scaling)
                columns = [own.coords[r, c][1] for c in range(cute.size(own.coords, mode=[1]))]
                settle_outputs(acc, row, columns, own.outputs[r, None], factors)
                if cute.arch.lane_idx() % 4 == 0:
                    lse[row] = row_lse


@cute.jit
def share_peaks(merge: tuple, own: LaneState, heads: Int32, order: Int32):
    """Writes the bases and sums of a lane's rows to a place of the merge."""
    _, row_max, row_sum, _ = merge
    for r in cutlass.range_constexpr(len(own.rows)):
        row, total = own.rows[r], quad_sum(own.state.row_sum[r])
        if row < heads and cute.arch.lane_idx() % 4 == 0:
            row_max[row, order] = peak_of(own, r)
            row_sum[row, order] = total * own.unit


@cute.jit
def share_columns(acc: cute.Tensor, own: LaneState, heads: Int32, some: cutlass.Constexpr):
    """Writes a lane's output, times its unit, to the merge. some: which of the lane's columns."""
    for r in cutlass.range_constexpr(len(own.rows)):
        if own.rows[r] < heads:
            for c in cutlass.range_constexpr(some.start, some.stop, 2):
                at = acc.iterator + cute.crd2idx((own.rows[r], own.coords[r, c][1], 0), acc.layout)
                write_pair(at, own.outputs[r, c] * own.unit, own.outputs[r, c + 1] * own.unit)


def turn_factors(spec: KernelSpec, merge: tuple, row: Int32, unit: Float32, order: int, scaling: Scaling) -> tuple[list, Float32]:
    """([a factor on the output of the turn at place `order`, of this unit, and on the other turn's], the row's lse in base 2)."""
    weights, inverse, row_lse = merge_row(spec, merge[1], merge[2], row, scaling)
    return [weight * inverse for weight in (weights[order] * unit, weights[1 - order])], row_lse


@cute.jit
def share_halves(spec: cutlass.Constexpr, merge: tuple, own: LaneState, heads: Int32, order: Int32):
    """Leaves in `merge` what the other turn's send_halves needs of a warp's state: the half of the columns that it settles."""
    share_peaks(merge, own, heads, order)
    if order == 0:
        share_columns(merge[0], own, heads, half_of(spec, own, 1))
    else:
        share_columns(merge[0], own, heads, half_of(spec, own, 0))


def half_of(spec: KernelSpec, own: LaneState, which: int) -> range:
    """The first (0) or second half of a lane's columns of the output, in whole words of a state."""
    columns, word = cute.size(own.outputs, mode=[1]), spec.word_columns
    half = -(-columns // (2 * word)) * word
    return range(half, columns) if which else range(half)


@cute.jit
def send_halves(
    spec: cutlass.Constexpr,
    merge: tuple,
    own: LaneState,
    heads: Int32,
    order: Int32,
    scaling: Scaling,
    words,
    slot: Int32,
    mark: Int32,
):
    """Merges two turns' states of an m-tile in registers, a barrier after share_halves, and stores them as a part of a row.

    The warps of each turn settle and store one half of the columns.
    """
    for place in cutlass.range_constexpr(2):
        if order == place:
            some, lses = cutlass.const_expr(half_of(spec, own, place)), cute.make_rmem_tensor(len(own.rows), Float32)
            for r in cutlass.range_constexpr(len(own.rows)):
                if own.rows[r] < heads:
                    factors, lses[r] = turn_factors(spec, merge, own.rows[r], own.unit, place, scaling)
                    join_columns(merge[0], own, r, some, factors)
            settled = SettledRows(own.state.acc_o, own.coords, own.rows, [lses[r] for r in range(len(own.rows))])
            send_rows(spec, settled, heads, words, slot, mark, some)


def join_columns(acc: cute.Tensor, own: LaneState, r: int, some: range, factors: list):
    """Some of a lane's columns of a row become their own times the first factor, plus acc's times the second."""
    pairs = some[::2]
    others = [read_pair(acc.iterator + cute.crd2idx((own.rows[r], own.coords[r, c][1], 0), acc.layout)) for c in pairs]
    for c, other in zip(pairs, others, strict=True):
        for j in range(2):
            own.outputs[r, c + j] = own.outputs[r, c + j] * factors[0] + other[j] * factors[1]


def settle_outputs(acc: cute.Tensor, row: Int32, columns: list, outputs: cute.Tensor, factors: list):
    """Writes to acc a lane's outputs of a row times the first factor plus acc's outputs times the second."""
    for begin in range(0, len(columns), 2 * PAIRS_READ):
        some = range(begin, min(begin + 2 * PAIRS_READ, len(columns)), 2)
        places = [acc.iterator + cute.crd2idx((row, columns[c], 0), acc.layout) for c in some]
        others = [read_pair(at) for at in places]
        for c, at, pair in zip(some, places, others, strict=True):
            write_pair(at, *(outputs[c + j] * factors[0] + pair[j] * factors[1] for j in range(2)))
