"""Merges the warps' softmax states of a piece (a KV split) and stores the result: a row's output, or a partial state.

An (out, lse) state is normalised: out = sum(p v) / sum(p), lse = log(sum(p)). The merge follows the order of the warps' tiles
in the piece, so it is deterministic; an empty state is (0, -inf) and has no weight.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import LOG2_E, KernelSpec
from ...config.tiling import TILE_M
from ..combine.partials import columns_of_word, send, word_of_column
from ..kv.scale import Scaling, inverse_of_unit, unit_of
from ..mainloop.tile import swizzled
from ..ptx.packed import pack
from ..ptx.registers import LANES, quotient, remainder, unknown
from ..schedule.work_scheduler import Piece
from .attend import RowTile, WarpState, row_scales
from .bases import rounded_product
from .pack_gqa import VECTOR, lane_rows_of, place_of, sync_consumers
from .query_rows import QueryBlock, block_view, head_of_row, place_in, place_in_view, row_of_head
from .relative import end_bases
from .softmax import finite_or_zero, quad_sum, rescale_row, rows_of

LN_2 = math.log(2.0)
STORES = 4  # stores of a thread in flight together: for 64 packed rows it has 4 or 16
JOINED = 16  # columns that join_state reads together


def lse_factor(spec: KernelSpec) -> float:
    """The factor that takes an lse from base 2 to the descriptor's base."""
    return 1.0 if spec.lse_base == "2" else LN_2


def output_coords(spec: KernelSpec, thr_mma: cute.ThrMma) -> cute.Tensor:
    """(row, column) of each element that this lane holds of an output accumulator, in the layout of rows_of."""
    return rows_of(thr_mma.partition_C(cute.make_identity_tensor((TILE_M, spec.padded_v_head_dim))))


def unit_factor(state: WarpState) -> Float32:
    """The unit of a state's sums and output (WarpState), as a factor."""
    return Float32(1.0) if state.unit is None else unit_of(state.unit)


def value_column(spec: KernelSpec, column: int) -> int:
    """The column of V in column `column` of the O accumulator: each of value_columns neighbours is in an n8 step of its own."""
    together = spec.value_columns
    if together == 1:
        return column
    return column // (8 * together) * (8 * together) + column % 8 * together + column // 8 % together


def is_of(spec: KernelSpec, row: Int32, order: Int32) -> Boolean | bool:
    """Whether the warp at place `order` of the merge attends to a packed row's KV head: places alternate between KV heads."""
    alike = spec.unit_heads == 1 or spec.tile_heads > 1  # a warp's m-tiles have rows of its own KV head alone
    return alike or head_of_row(spec, row) == remainder(order, spec.unit_heads)


def places_of(spec: KernelSpec, row: Int32) -> list:
    """The places in the merge of the warps that attend to a packed row."""
    if spec.unit_heads == 1:
        return list(range(spec.merge_places))
    return [head_of_row(spec, row) + place for place in range(0, spec.merge_places, spec.unit_heads)]


@cute.jit
def share_states(spec: cutlass.Constexpr, merge: tuple, states: list, heads: Int32, order: Int32, scaling: Scaling):
    """A warp's states of its m-tiles go to its place in the merge, or join those that a warp of another turn left there.

    All consumer warps call it. states: a LaneState for each m-tile. Two warps that fold their states have one place: each leaves
    one of its two m-tiles there, then adds the other to what it finds, so that both are busy.
    """
    if cutlass.const_expr(not spec.folds):
        for state in states:
            share_state(spec, merge, state, heads, order)
    else:
        first, second = states
        later = order >= spec.merge_places
        place = cutlass.select_(later, order - spec.merge_places, order)
        if later:
            share_state(spec, merge, first, heads, place)
        else:
            share_state(spec, merge, second, heads, place)
        sync_consumers(spec)
        if later:
            join_state(spec, merge, second, heads, place, scaling)
        else:
            join_state(spec, merge, first, heads, place, scaling)


@dataclass(frozen=True)
class LaneState:
    """What a lane holds of an m-tile's state: the numbers of its rows, their output [row, column] and where that is, the unit.

    inverses: those of the query's row factors, or None: scores that functions have changed are logits already. factors: those of
    the scores, if states merge by bases, else None.
    """

    state: WarpState
    inverses: list[Float32] | None
    factors: list[Float32] | None
    rows: list[Int32]
    outputs: cute.Tensor
    coords: cute.Tensor
    unit: Float32


def lane_state(spec: KernelSpec, thr_mma, attended: RowTile, row_tile: Int32, scaling: Scaling) -> LaneState:
    """The lane's part of the state of an m-tile. row_tile: the m-tile's number."""
    state, inverses = attended.state, None if spec.modifiers.functions else attended.inverses
    factors = row_scales(attended, scaling) if spec.merges_bases else None
    if spec.relates_scores:
        end_bases(state)
    if spec.scales_values:  # until here O alone is a multiple of the unit
        for r in range(cute.size(state.row_sum)):
            state.row_sum[r] = state.row_sum[r] * inverse_of_unit(state.unit)
    rows, coords = lane_rows_of(spec, row_tile), output_coords(spec, thr_mma)
    return LaneState(state, inverses, factors, rows, rows_of(state.acc_o), coords, unit_factor(state))


def peak_of(lane: LaneState, r: int) -> Float32:
    """To what a row's weights are relative: its base, if states merge by bases, or its maximum without the query's row factor."""
    if lane.factors is not None:
        return rounded_product(lane.state.row_max[r], lane.factors[r])
    return lane.state.row_max[r] * (1.0 if lane.inverses is None else lane.inverses[r])


def columns_of_row(spec: KernelSpec, lane: LaneState, r: int) -> list:
    """The columns of V in which the lane's output of a row is."""
    return [value_column(spec, lane.coords[r, c][1]) for c in range(cute.size(lane.outputs, mode=[1]))]


@cute.jit
def share_state(spec: cutlass.Constexpr, merge: tuple, own: LaneState, heads: Int32, place: Int32):
    """Writes an m-tile's state to a place of the merge, with the query's row factors and the state's unit taken out."""
    acc, row_max, row_sum, _ = merge
    for r in cutlass.range_constexpr(cute.size(own.state.row_max)):
        total = quad_sum(own.state.row_sum[r])
        at = row_of_head(spec, own.rows[r])
        if own.rows[r] < heads and is_of(spec, own.rows[r], place):
            for c, column in enumerate(columns_of_row(spec, own, r)):
                acc[at, column, place] = own.outputs[r, c] * own.unit
            if cute.arch.lane_idx() % 4 == 0:
                row_max[at, place] = peak_of(own, r)
                row_sum[at, place] = total * own.unit


@cute.jit
def join_state(spec: cutlass.Constexpr, merge: tuple, own: LaneState, heads: Int32, place: Int32, scaling: Scaling):
    """Adds an m-tile's state to the one that another warp left at a place of the merge."""
    acc, row_max, row_sum, _ = merge
    for r in cutlass.range_constexpr(cute.size(own.state.row_max)):
        at = row_of_head(spec, own.rows[r])
        totals, peaks = (quad_sum(own.state.row_sum[r]) * own.unit, row_sum[at, place]), (peak_of(own, r), row_max[at, place])
        cute.arch.sync_warp()  # the four lanes of a row have read both numbers
        peak = cute.arch.fmax(*peaks)
        weights = [state_weight(each, finite_or_zero(peak), scaling) for each in peaks]
        columns = columns_of_row(spec, own, r)
        if own.rows[r] < heads:
            for begin in cutlass.range_constexpr(0, len(columns), JOINED):
                some = range(begin, min(begin + JOINED, len(columns)))
                there = [acc[at, columns[c], place] for c in some]  # loads before stores: the compiler makes vectors of both
                for c in some:
                    acc[at, columns[c], place] = own.outputs[r, c] * (own.unit * weights[0]) + there[c - begin] * weights[1]
            if cute.arch.lane_idx() % 4 == 0:
                row_max[at, place] = peak
                row_sum[at, place] = totals[0] * weights[0] + totals[1] * weights[1]


def state_weight(row_max: Float32, shift: Float32, scaling: Scaling) -> Float32:
    """The weight of a state of a row relative to `shift`; 0 if it has seen no key, whatever the scale."""
    weight = cute.math.exp2((row_max - shift) * scaling.log2, fastmath=True)
    return cutlass.select_(row_max == -Float32.inf, Float32(0.0), weight)


@cute.jit
def merge_row(spec: cutlass.Constexpr, row_max, row_sum, row: Int32, scaling: Scaling):
    """(weights of the warps' states of one row, a factor on the weighted sum, the row's lse in base 2: -inf when empty).

    The factor is known later than the weights, so it is not multiplied into them: that would hold up the sum.
    """
    places, at = places_of(spec, row), row_of_head(spec, row)
    weights = cute.make_rmem_tensor(len(places), Float32)
    peak = -Float32.inf
    for w in cutlass.range_constexpr(len(places)):
        peak = cute.arch.fmax(peak, row_max[at, places[w]])
    shift = finite_or_zero(peak)
    total = Float32(0.0)
    for w in cutlass.range_constexpr(len(places)):
        weights[w] = state_weight(row_max[at, places[w]], shift, scaling)
        total += weights[w] * row_sum[at, places[w]]
    return weights, *normalisation(spec, total, shift, scaling)


@cute.jit
def normalisation(spec: cutlass.Constexpr, total: Float32, shift: Float32, scaling: Scaling) -> tuple[Float32, Float32]:
    """(a factor on a row's output, its lse in base 2: -inf when empty). total: the sum of its weights relative to `shift`."""
    lse = cute.math.log2(total, fastmath=True) + (shift * scaling.log2 - spec.weight_bits)
    inverse = scaling.value * cute.arch.rcp_approx(total)
    if total == 0.0:  # an empty state, whatever its scales; NaN is not empty
        lse, inverse = -Float32.inf, Float32(0.0)
    return inverse, lse


@cute.jit
def join_sink(sink: Float32, row_lse: Float32) -> tuple[Float32, Float32]:
    """(a factor on a row's output, its lse in base 2) once a sink joins its denominator. sink: a logit, in natural log."""
    (factor, _), lse = join_lses(row_lse, sink * LOG2_E)
    return factor, lse


@cute.jit
def join_lses(lse: Float32, other: Float32) -> tuple[tuple[Float32, Float32], Float32]:
    """((factors on two normalised states of a row), the lse of both). lse, other: theirs, in base 2; -inf if a state is empty."""
    peak = finite_or_zero(cute.arch.fmax(other, lse))
    weight, added = cute.math.exp2(lse - peak, fastmath=True), cute.math.exp2(other - peak, fastmath=True)
    total = weight + added
    factor = Float32(0.0) if weight == 0.0 else weight * cute.arch.rcp_approx(total)
    further = Float32(0.0) if added == 0.0 else added * cute.arch.rcp_approx(total)
    return (factor, further), cute.math.log2(total, fastmath=True) + peak


def settled_row(spec: KernelSpec, merge: tuple, row: Int32, scaling: Scaling):
    """merge_row. For a row that settle_turns has merged: no weights, a factor of 1, and the lse that it left."""
    if spec.by_warpgroup:
        return None, Float32(1.0), merge[3][row]
    return merge_row(spec, merge[1], merge[2], row, scaling)


@cute.jit
def merged(spec: cutlass.Constexpr, acc, weights, inverse: Float32, row: Int32, column: Int32) -> Float32:
    """One element of the merged output."""
    value, places = Float32(0.0), places_of(spec, row)
    if cutlass.const_expr(weights is None):
        value = acc[row, column, 0]
    else:
        for w in cutlass.range_constexpr(len(places)):
            value += weights[w] * acc[row_of_head(spec, row), column, places[w]]
    return value * inverse


@dataclass(frozen=True)
class Storers:
    """The threads that store a piece: this thread's number, and how many they are.

    words: how many wide words of a part of a row a thread merges at once. columns, groups: the same of a whole row, as groups of
    neighbouring columns.
    """

    thread: Int32
    count: int
    words: int
    columns: int
    groups: int = 1


def all_consumers(spec: KernelSpec) -> Storers:
    """The threads of all consumer warps."""
    thread, count = cute.arch.thread_idx()[0], spec.num_warps * LANES
    return Storers(thread, count, spec.words_together, spec.store_columns, spec.store_groups)


def stores_together(spec: KernelSpec) -> int:
    """Iterations of a thread's store loop that are in flight together."""
    return STORES if spec.by_warpgroup else 1


@cute.jit
def store_final(spec: cutlass.Constexpr, merge: tuple, block: QueryBlock, out, lse, scaling: Scaling, sinks, storers: Storers):
    """Stores a whole row: the merged state is its result. sinks: f32 [num_heads], or None."""
    target = block_view(spec, out, block)
    width = cutlass.const_expr(math.gcd(spec.v_head_dim, storers.columns))
    per_row = cutlass.const_expr(spec.v_head_dim // width)
    apart = cutlass.const_expr(-(-per_row // storers.groups))
    values = cute.make_rmem_tensor(width, out.element_type)
    for i in cutlass.range(storers.thread, block.rows * apart, storers.count, unroll=stores_together(spec)):
        row, first = quotient(i, apart), remainder(i, apart)
        weights, inverse, row_lse = settled_row(spec, merge, row, scaling)
        if cutlass.const_expr(spec.modifiers.sinks):
            factor, row_lse = join_sink(sinks[place_in(spec, block, row)[-1]], row_lse)
            inverse = inverse * factor
        goal = cute.zipped_divide(target[(*place_in_view(spec, block, row), None)], (width,))
        for group in cutlass.range_constexpr(storers.groups):
            column = first + group * apart
            if cutlass.const_expr((group + 1) * apart <= per_row) or column < per_row:
                for c in cutlass.range_constexpr(width):
                    values[c] = merged(spec, merge[0], weights, inverse, row, column * width + c).to(out.element_type)
                cute.autovec_copy(values, goal[None, column])
        if first == 0:
            lse[place_in(spec, block, row)] = row_lse * lse_factor(spec)


@cute.jit
def store_partial(
    spec: cutlass.Constexpr, merge: tuple, piece: Piece, words, slot: Int32, mark: Int32, scaling: Scaling, storers: Storers
):
    """Stores a part of a row (a partial result): the merged state goes to slot `slot` of the workspace.

    A thread's narrow words of a row are neighbours. Its wide words are row_words / storers.words apart.
    """
    together = cutlass.const_expr(storers.words)
    beside, step = cutlass.const_expr((1, spec.row_words // together) if spec.wide_words else (together, 1))
    per_row = cutlass.const_expr(spec.row_words * beside // together)
    meets = cutlass.const_expr(spec.half_words and spec.words_an_lse > 1)  # lanes find a power of two together
    begin, end = storers.thread * beside, piece.block.rows * per_row
    if cutlass.const_expr(meets):
        begin -= cute.arch.lane_idx()
    for base in cutlass.range(begin, end, storers.count * beside, unroll=stores_together(spec)):
        index, there = base, None
        if cutlass.const_expr(meets):  # all lanes of a warp loop equally often
            index = base + cute.arch.lane_idx()
            there = index < end
            index = cutlass.select_(there, index, 0)
        row, word = quotient(index, per_row), remainder(index, per_row)
        first = index if cutlass.const_expr(per_row == spec.row_words) else row * spec.row_words + word
        weights, inverse, row_lse = settled_row(spec, merge, row, scaling)
        values = []
        for j in cutlass.range_constexpr(together):
            starts, width = columns_of_word(spec, word + j * step)
            columns = [start + c for start in starts for c in range(width)]
            values.append([merged(spec, merge[0], weights, inverse, row, column) for column in columns])
        for j in cutlass.range_constexpr(together):
            send(spec, words, first + j * step, slot, values[j], row_lse, mark, there)


@dataclass(frozen=True)
class SettledRows:
    """A lane's rows of an m-tile, with no other state to merge: their normalised output, their numbers, their lse in base 2."""

    acc_o: cute.Tensor
    coords: cute.Tensor
    rows: list[Int32]
    lse: list[Float32]


@dataclass(frozen=True)
class Outputs:
    """A lane's output of its rows, f32 [row, column]: all columns, or the half that one of two turns settles (turns.py).

    columns_before, words_before: columns of V, and words of a state, from the lane's first ones to these. owns_first: whether the
    first word is theirs, or the other half's; None if it always is.
    """

    values: cute.Tensor
    columns_before: Int32 | int = 0
    words_before: Int32 | int = 0
    owns_first: Boolean | None = None


@cute.jit
def settle_rows(spec: cutlass.Constexpr, own: LaneState, scaling: Scaling) -> SettledRows:
    """Normalises a warp's state of an m-tile in its registers."""
    found = []
    for r in cutlass.range_constexpr(len(own.rows)):
        peak = peak_of(own, r)
        total = cutlass.select_(peak == -Float32.inf, Float32(0.0), quad_sum(own.state.row_sum[r]) * own.unit)
        factor, row_lse = normalisation(spec, total, finite_or_zero(peak), scaling)
        rescale_row(own.state.acc_o, r, factor * own.unit)
        found.append(row_lse)
    return SettledRows(own.state.acc_o, own.coords, own.rows, found)


@cute.jit
def send_rows(
    spec: cutlass.Constexpr, settled: SettledRows, heads: Int32, words, slot: Int32, mark: Int32, some: Outputs | None = None
):
    """Stores a part of a row: a lane writes its settled rows to a slot of the workspace. some: which columns, None for all."""
    some = Outputs(rows_of(settled.acc_o)) if some is None else some
    for r in cutlass.range_constexpr(len(settled.rows)):
        row = settled.rows[r]
        if cutlass.const_expr(spec.half_words):  # a predicate, as lanes of other rows take part
            send_row(spec, settled, r, words, slot, mark, some, row < unknown(heads))
        elif row < heads:
            send_row(spec, settled, r, words, slot, mark, some)


def send_row(
    spec: KernelSpec,
    settled: SettledRows,
    r: int,
    words: cute.Tensor,
    slot: Int32,
    mark: Int32,
    some: Outputs,
    there: Boolean | None = None,
):
    """send_rows of one of a lane's rows. there: as in `send`; PTX takes no predicate that is known when it is compiled."""
    begin = settled.rows[r] * spec.row_words + some.words_before
    for c in range(0, cute.size(some.values, mode=[1]), spec.word_columns):
        values, sends = [some.values[r, c + i] for i in range(spec.word_columns)], there
        if c == 0 and some.owns_first is not None:
            sends = some.owns_first if there is None else there & some.owns_first
        index = begin + word_of_column(spec, settled.coords[r, c][1])
        send(spec, words, index, slot, values, settled.lse[r], mark, sends)


@cute.jit
def store_rows(
    spec: cutlass.Constexpr, settled: SettledRows, query: cute.Tensor, row_tile: Int32, block: QueryBlock, out, lse, sinks
):
    """Stores a whole row: a warp's settled rows are its result. They pass through the query's rows, which no warp needs any more.

    query: the piece's query buffer. sinks: f32 [num_heads], or None.
    """
    outputs, words = rows_of(settled.acc_o), cute.recast_tensor(query, Int32)
    for r in cutlass.range_constexpr(len(settled.rows)):
        row, factor, row_lse = settled.rows[r], Float32(1.0), settled.lse[r]
        if row < block.rows:
            place = place_in(spec, block, row)
            if cutlass.const_expr(spec.modifiers.sinks):
                factor, row_lse = join_sink(sinks[place[-1]], row_lse)
            for c in cutlass.range_constexpr(0, cute.size(outputs, mode=[1]), 2):
                pair = pack(spec.element_type, outputs[r, c] * factor, outputs[r, c + 1] * factor)
                words[place_of(spec, row, settled.coords[r, c][1])] = pair
            if cute.arch.lane_idx() % 4 == 0:
                lse[place] = row_lse * lse_factor(spec)
    cute.arch.sync_warp()
    target, per_row = block_view(spec, out, block), cutlass.const_expr(spec.padded_v_head_dim // VECTOR)
    for i in cutlass.range(cute.arch.lane_idx(), TILE_M * per_row, LANES, unroll=STORES):
        row, column = row_tile * TILE_M + quotient(i, per_row), remainder(i, per_row)
        if row < block.rows:
            at = query.iterator.toint() + swizzled(spec.query_tile, 0, row, column * VECTOR * spec.q_bytes)
            source = cute.make_tensor(cute.make_ptr(out.element_type, at, cute.AddressSpace.smem, assumed_align=16), VECTOR)
            values = cute.make_rmem_tensor(VECTOR, out.element_type)
            cute.autovec_copy(source, values)
            goal = cute.zipped_divide(target[(*place_in_view(spec, block, row), None)], (VECTOR,))
            cute.autovec_copy(values, goal[None, column])
