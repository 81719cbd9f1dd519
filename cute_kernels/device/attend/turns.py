"""Merges the states of two warpgroups that attended to a piece in turn: each has seen every other tile of it.

The merge's first place settles a whole row, and all threads store it. Of a part of a row each turn settles and stores half of the
columns, if KernelSpec.settles_halves: by the same code, which a launch executes once and an SM then fetches once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import KernelSpec
from ..kv.scale import Scaling
from ..ptx.shared_pairs import read_pair, write_pair
from .bases import ROW_LANES
from .epilogue import LaneState, Outputs, SettledRows, merge_row, peak_of, send_rows
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
        share_columns(spec, acc, own, heads, Outputs(own.outputs))
    sync_consumers(spec)
    if order == 0:
        for r in cutlass.range_constexpr(len(own.rows)):
            row = own.rows[r]
            if row < heads:
                factors, row_lse = turn_factors(spec, merge, row, own.unit, Boolean(True), scaling)
                settle_outputs(acc, own, r, factors)
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
def share_columns(spec: cutlass.Constexpr, acc: cute.Tensor, own: LaneState, heads: Int32, some: Outputs):
    """Writes some of a lane's output, times its unit, to the merge: the first word only if it is theirs."""
    columns = cutlass.const_expr(cute.size(some.values, mode=[1]))
    first = cutlass.const_expr(0 if some.owns_first is None else spec.word_columns)
    for r in cutlass.range_constexpr(len(own.rows)):
        if own.rows[r] < heads:
            share_pairs(acc, own, r, range(first, columns, 2), some)
            if cutlass.const_expr(first > 0) and some.owns_first:
                share_pairs(acc, own, r, range(0, first, 2), some)


def share_pairs(acc: cute.Tensor, own: LaneState, r: int, pairs: range, some: Outputs):
    """share_columns of some pairs of columns in a lane's row r."""
    for c in pairs:
        write_pair(place_of_pair(acc, own, r, c, some), *(some.values[r, c + j] * own.unit for j in range(2)))


def place_of_pair(acc: cute.Tensor, own: LaneState, r: int, c: int, some: Outputs) -> cute.Pointer:
    """Where in the merge a pair of neighbouring columns lies, in a lane's row r."""
    column = own.coords[r, c][1] + some.columns_before
    return acc.iterator + cute.crd2idx((own.rows[r], column, 0), acc.layout)


def turn_factors(
    spec: KernelSpec, merge: tuple, row: Int32, unit: Float32, leads: Boolean, scaling: Scaling
) -> tuple[list, Float32]:
    """([a factor on a turn's output, of this unit, and on the other turn's], the row's lse in base 2).

    leads: whether the turn has the merge's first place.
    """
    weights, inverse, row_lse = merge_row(spec, merge[1], merge[2], row, scaling)
    own, other = (cutlass.select_(leads, *both) for both in ((weights[0], weights[1]), (weights[1], weights[0])))
    return [own * unit * inverse, other * inverse], row_lse


@cute.jit
def share_halves(spec: cutlass.Constexpr, merge: tuple, own: LaneState, heads: Int32, order: Int32):
    """Leaves in `merge` what the other turn's send_halves needs of a warp's state: the half of the columns that it settles."""
    share_peaks(merge, own, heads, order)
    share_columns(spec, merge[0], own, heads, half_of(spec, own, 1 - order))


def half_of(spec: KernelSpec, own: LaneState, which: Int32) -> Outputs:
    """The first (0) or last half (1) of a lane's output, in whole words of a state. A word in the middle is in both.

    It belongs to the first half.
    """
    columns, word = cute.size(own.outputs, mode=[1]), spec.word_columns
    count = -(-columns // (2 * word)) * word
    values, begin = cute.make_rmem_tensor((len(own.rows), count), Float32), columns - count
    for r in range(len(own.rows)):
        for c in range(count):
            values[r, c] = cutlass.select_(which == 0, own.outputs[r, c], own.outputs[r, begin + c])
    owns_first = None if count == begin else which == 0
    return Outputs(values, which * (begin * ROW_LANES), which * (begin * ROW_LANES // word), owns_first)


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
    half, lses = half_of(spec, own, order), cute.make_rmem_tensor(len(own.rows), Float32)
    for r in cutlass.range_constexpr(len(own.rows)):
        if own.rows[r] < heads:
            factors, lses[r] = turn_factors(spec, merge, own.rows[r], own.unit, order == 0, scaling)
            join_columns(merge[0], own, r, half, factors)
    settled = SettledRows(own.state.acc_o, own.coords, own.rows, [lses[r] for r in range(len(own.rows))])
    send_rows(spec, settled, heads, words, slot, mark, half)


def join_columns(acc: cute.Tensor, own: LaneState, r: int, some: Outputs, factors: list):
    """Some of a lane's output of a row becomes its own times the first factor, plus acc's times the second."""
    pairs = range(0, cute.size(some.values, mode=[1]), 2)
    others = [read_pair(place_of_pair(acc, own, r, c, some)) for c in pairs]
    for c, other in zip(pairs, others, strict=True):
        for j in range(2):
            some.values[r, c + j] = some.values[r, c + j] * factors[0] + other[j] * factors[1]


def settle_outputs(acc: cute.Tensor, own: LaneState, r: int, factors: list):
    """Writes to acc a lane's output of a row times the first factor plus acc's output times the second."""
    every, columns = Outputs(own.outputs), cute.size(own.outputs, mode=[1])
    for begin in range(0, columns, 2 * PAIRS_READ):
        pairs = range(begin, min(begin + 2 * PAIRS_READ, columns), 2)
        places = [place_of_pair(acc, own, r, c, every) for c in pairs]
        others = [read_pair(at) for at in places]
        for c, at, other in zip(pairs, places, others, strict=True):
            write_pair(at, *(own.outputs[r, c + j] * factors[0] + other[j] * factors[1] for j in range(2)))
