"""Online softmax over the columns of S^T, each a packed query row, by a warpgroup (attend/transposed_mma.py).

A lane holds two tokens of each of many rows, so a row's numbers are those of the whole warpgroup and lie in shared memory: its
factor, what is subtracted from its scaled scores (the offset) and the largest score when that last moved (the peak). As in
bases.py the offset moves only if a score would weigh too much. All warps vote on that, since V^T P^T adds the tokens of all.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import KernelSpec
from ...config.tiling import TILE_M, WARPGROUP, WARPGROUP_M
from ..kv.scale import SMALLEST_UNIT, Scaling, half_to_float, settle, unit_of, widen_unit
from ..mainloop.shared import Shared
from ..ptx.barriers import PRODUCTS
from ..ptx.registers import LANES, as_bits, as_float, quotient, remainder
from .attend import LEAST_FACTOR
from .bases import MOST_BASE, largest_bits, rounded_product, slack_of
from .epilogue import merge_row, settle_outputs
from .mask import HOLE_BITS, RowMask
from .pack_gqa import sync_consumers, turn_of, warpgroup_of
from .query_range import pack
from .query_rows import TilePlace
from .softmax import finite_or_zero
from ..ptx.shared_pairs import write_pair

FACTORS, OFFSETS, PEAKS, EXCHANGE = range(4)  # rows of numbers in shared memory; the last has one for each warp
INVERSE = 254 << 23  # what the bits of a power of two and of its inverse add up to


@dataclass(frozen=True)
class ColumnState:
    """A warp's part of the running state of its warpgroup. acc_o: f32 O^T [registers of a block of 64 columns of V, block].

    row_sum: this lane's part of the sums of its rows; unit: of O alone, Int32 [1], if V has one scale per token, else None.
    """

    acc_o: cute.Tensor
    row_sum: cute.Tensor
    unit: cute.Tensor | None


def lane_count(spec: KernelSpec) -> int:
    """Packed rows of which a lane holds scores."""
    return spec.block_rows // 4


def make_column_state(spec: KernelSpec, _thr_mma) -> ColumnState:
    """A state in registers; reset_columns gives it values."""
    shape = spec.block_rows // 2, spec.padded_v_head_dim // WARPGROUP_M
    unit = cute.make_rmem_tensor(1, Int32) if spec.v_token_scale else None
    return ColumnState(cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(lane_count(spec), Float32), unit)


@dataclass(frozen=True)
class RowNumbers:
    """The numbers of a warpgroup's packed rows in shared memory: [row in the order of lanes, kind].

    Lane l holds rows 8 j + 2 c and 8 j + 2 c + 1 with c = l % 4, whose numbers are neighbours, from `first` on.
    """

    base: cute.Pointer
    first: Int32


def numbers_of(spec: KernelSpec, shared: Shared) -> RowNumbers:
    """Those of this warp's group."""
    base = shared.row_numbers.iterator + turn_of(spec) * spec.row_numbers
    return RowNumbers(base, cute.arch.lane_idx() % 4 * (lane_count(spec) + 4))


def place_of_row(spec: KernelSpec, row: Int32) -> Int32:
    """The place of a packed row's number."""
    return remainder(quotient(row, 2), 4) * (lane_count(spec) + 4) + quotient(row, 8) * 2 + remainder(row, 2)


def own_rows(spec: KernelSpec) -> list[Int32]:
    """The packed rows of which this lane holds scores."""
    return [r // 2 * 8 + cute.arch.lane_idx() % 4 * 2 + r % 2 for r in range(lane_count(spec))]


def own_numbers(spec: KernelSpec, numbers: RowNumbers, kind: int | Int32) -> cute.Tensor:
    """This lane's numbers of a kind, in shared memory."""
    at = (numbers.base + (kind * spec.spread_rows + numbers.first)).toint()
    pointer = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(lane_count(spec)))


def read_numbers(spec: KernelSpec, numbers: RowNumbers, kind: int | Int32) -> cute.Tensor:
    """This lane's numbers of a kind, in registers."""
    found = cute.make_rmem_tensor(lane_count(spec), Float32)
    cute.autovec_copy(own_numbers(spec, numbers, kind), found)
    return found


def copy_numbers(spec: KernelSpec, numbers: RowNumbers, targets: tuple):
    """This lane's factors and offsets to registers."""
    for kind, target in zip((FACTORS, OFFSETS), targets, strict=True):
        cute.autovec_copy(own_numbers(spec, numbers, kind), target)


def all_numbers(spec: KernelSpec, numbers: RowNumbers, kind: int) -> cute.Tensor:
    """All numbers of a kind, in shared memory."""
    return cute.make_tensor(numbers.base + kind * spec.spread_rows, cute.make_layout(spec.spread_rows))


def votes_of(spec: KernelSpec, numbers: RowNumbers) -> cute.Tensor:
    """A word for each warp, in shared memory."""
    begin = numbers.base + (EXCHANGE + WARPGROUP) * spec.spread_rows
    return cute.make_tensor(cute.recast_ptr(begin, dtype=Int32), cute.make_layout(WARPGROUP))


def sync_group():
    """Barrier of a warpgroup."""
    cute.arch.barrier(barrier_id=PRODUCTS + warpgroup_of(), number_of_threads=WARPGROUP * LANES)


def warp_in_group() -> Int32:
    """The number of this warp in its warpgroup."""
    return remainder(cute.arch.make_warp_uniform(cute.arch.warp_idx()), WARPGROUP)


@cute.jit
def reset_columns(spec: cutlass.Constexpr, shared: Shared, state: ColumnState, inverses, heads: Int32, scaling: Scaling):
    """Resets a warpgroup's state to that before any key, and leaves the factors of its rows. inverses: of the query, f32 [row].

    A row past the last one, of zeros, has the factor 1: its scores must not move a base.
    """
    numbers = numbers_of(spec, shared)
    state.acc_o.fill(0.0)
    state.row_sum.fill(0.0)
    if cutlass.const_expr(state.unit is not None):
        state.unit.fill(SMALLEST_UNIT)
    row = remainder(cute.arch.thread_idx()[0], WARPGROUP * LANES)
    factors, offsets, peaks = (all_numbers(spec, numbers, kind) for kind in (FACTORS, OFFSETS, PEAKS))
    if row < spec.block_rows:
        place = place_of_row(spec, row)
        factor = cute.arch.fmax(scaling.log2 * inverses[row], Float32(LEAST_FACTOR))
        factors[place] = cutlass.select_(row < heads, factor, Float32(1.0))
        offsets[place] = -Float32.inf
        peaks[place] = -Float32.inf
    sync_group()


KEYS, VALUES, SHRINK = 0, 2, 4  # places in the scales of a lane: of its two tokens, K's and V's over the unit; the unit's step


def make_scales(spec: KernelSpec) -> cute.Tensor:
    """Registers for what read_scales reads."""
    scales = cute.make_rmem_tensor(5, Float32)
    scales.fill(1.0)
    return scales


@cute.jit
def read_scales(spec: cutlass.Constexpr, shared: Shared, state: ColumnState, scales: cute.Tensor, stage: Int32):
    """Reads the scales of a tile that has come, and raises the unit: O must then be multiplied by its step."""
    if cutlass.const_expr(spec.k_token_scale):
        for part, scale in enumerate(own_scales(shared.scales[0], spec.k_scale == "token_f16", stage)):
            scales[KEYS + part] = scale
    if cutlass.const_expr(spec.v_token_scale):
        peak = settle(shared.scales[1], stage, spec.v_scale == "token_f16", False)
        scales[SHRINK] = widen_unit(state.unit, peak)[0]
        inverse = as_float(INVERSE - state.unit[0])
        for part, scale in enumerate(own_scales(shared.scales[1], spec.v_scale == "token_f16", stage)):
            scales[VALUES + part] = scale * inverse


def own_scales(ring, half: bool, stage: Int32) -> list[Float32]:
    """The scales of this lane's tokens, one of each half."""
    found = []
    for part in range(2):
        token = warp_in_group() * TILE_M + 8 * part + cute.arch.lane_idx() // 4
        bits = ring.words[token, stage]
        if half:
            upper = ring.upper[token // LANES, stage] >> (token % LANES)
            found.append(half_to_float(bits >> (16 * (upper & 1))))
        else:
            found.append(as_float(bits))
    return found


def score_at(r: int, part: int) -> int:
    """The place in S^T of the score of this lane's row r for its token of a half."""
    return r // 2 * 4 + part * 2 + r % 2


def scale_scores(spec: KernelSpec, acc_s: cute.Tensor, scales: cute.Tensor):
    """Multiplies scores by K's scales of tokens, before any score is hidden: a scale may be 0."""
    if spec.k_token_scale:
        for i in range(cute.size(acc_s)):
            acc_s[i] = acc_s[i] * scales[KEYS + i // 2 % 2]


@cute.jit
def hide_columns(spec: cutlass.Constexpr, acc_s: cute.Tensor, mask: RowMask | None, place: TilePlace):
    """Scores of what a row does not see become -inf. mask: of this lane's rows, or None if all see the same."""
    for part in cutlass.range_constexpr(2):
        token = warp_in_group() * TILE_M + 8 * part + cute.arch.lane_idx() // 4
        for r in cutlass.range_constexpr(lane_count(spec)):
            hidden = token >= place.valid
            if cutlass.const_expr(mask is not None):
                hidden = place.token + token >= mask.end[r]
                if cutlass.const_expr(mask.first is not None):
                    hidden = hidden | (place.token + token < mask.first[r])
            if hidden:
                acc_s[score_at(r, part)] = -Float32.inf


@cute.jit
def hide_holes(spec: cutlass.Constexpr, acc_s: cute.Tensor, holes: Int32):
    """Scores of tokens whose page is not in the pool become -inf. holes: a bit for each `hole_tokens` of the tile."""
    for part in cutlass.range_constexpr(2):
        token = warp_in_group() * TILE_M + 8 * part + cute.arch.lane_idx() // 4
        if (holes >> (token // spec.hole_tokens)) & 1 != 0:
            for r in cutlass.range_constexpr(lane_count(spec)):
                acc_s[score_at(r, part)] = -Float32.inf


@cute.jit
def weigh_columns(spec: cutlass.Constexpr, shared: Shared, acc_s: cute.Tensor, state: ColumnState, scales: cute.Tensor, own: tuple) -> list:
    """Turns the scores of a tile into P^T, which joins the sums; returns its words as store_weights takes them.

    V^T P^T of the tile before must be done: O moves with the offsets. own: this lane's factors and offsets.
    """
    numbers, count, (factors, offsets) = numbers_of(spec, shared), lane_count(spec), own
    exponents, limit = cute.make_rmem_tensor((count, 2), Float32), Float32(slack_of(spec) + spec.weight_bits)
    for r in cutlass.range_constexpr(count):
        for part in cutlass.range_constexpr(2):
            exponents[r, part] = acc_s[score_at(r, part)] * factors[r] - offsets[r]
    words = cute.recast_tensor(exponents, Int32)
    moves = largest_bits([words[i] for i in range(cute.size(words))]) > as_bits(limit)  # NaN is above
    votes = votes_of(spec, numbers)
    some = cute.arch.vote_any_sync(moves)
    if cute.arch.lane_idx() == 0:
        votes[warp_in_group()] = Int32(some)
    sync_group()
    if (votes[0] | votes[1] | votes[2] | votes[3]) != 0:
        move_offsets(spec, numbers, acc_s, exponents, factors, offsets, state, limit)
    if cutlass.const_expr(spec.v_token_scale):
        if scales[SHRINK] != 1.0:
            for i in cutlass.range_constexpr(cute.size(state.acc_o)):
                state.acc_o[i] = state.acc_o[i] * scales[SHRINK]
    exponents.store(cute.math.exp2(exponents.load(), fastmath=True))
    for r in cutlass.range_constexpr(count):
        state.row_sum[r] = state.row_sum[r] + (exponents[r, 0] + exponents[r, 1])
    found = []
    for part in cutlass.range_constexpr(2):
        weights = [exponents[r, part] * scales[VALUES + part] if spec.v_token_scale else exponents[r, part] for r in range(count)]
        found.append([pack(spec.v_math, *weights[r : r + 2]) for r in range(0, count, 2)])
    return found


@cute.jit
def move_offsets(
    spec: cutlass.Constexpr, numbers: RowNumbers, acc_s: cute.Tensor, exponents: cute.Tensor, factors, offsets, state, limit: Float32
):
    """Moves the offsets of the rows of which a score would weigh too much; a row's bits depend on no other row.

    Past MOST_BASE, and until a row has seen a key, its offset is -inf, so that it moves with each tile.
    """
    count, warp, lane, bits = lane_count(spec), warp_in_group(), cute.arch.lane_idx(), Float32(spec.weight_bits)
    own, kept = own_numbers(spec, numbers, EXCHANGE + warp), [own_numbers(spec, numbers, kind) for kind in (PEAKS, OFFSETS)]
    for r in cutlass.range_constexpr(count):
        peak = cute.arch.fmax(acc_s[score_at(r, 0)], acc_s[score_at(r, 1)], nan=True)
        for apart in (4, 8, 16):
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=apart), nan=True)
        if lane < 4:
            own[r] = peak
    sync_group()
    peaks, before = [read_numbers(spec, numbers, EXCHANGE + other) for other in range(WARPGROUP)], read_numbers(spec, numbers, PEAKS)
    sync_group()  # all have read before the first one writes
    for r in cutlass.range_constexpr(count):
        exact = peaks[0][r]
        for other in cutlass.range_constexpr(1, WARPGROUP):
            exact = cute.arch.fmax(exact, peaks[other][r], nan=True)
        stays = exact * factors[r] - offsets[r] <= limit
        peak = cutlass.select_(stays, before[r], cute.arch.fmax(before[r], exact, nan=True))
        base = rounded_product(finite_or_zero(peak), factors[r])
        decay = cute.math.exp2(rounded_product(before[r], factors[r]) - base, fastmath=True)
        far = cute.arch.fmax(base, -base) >= MOST_BASE
        shift, offset = cutlass.select_(far, finite_or_zero(peak), Float32(0.0)), cutlass.select_(far, Float32(0.0), base) - bits
        for part in cutlass.range_constexpr(2):
            exponents[r, part] = (acc_s[score_at(r, part)] - shift) * factors[r] - offset
        state.row_sum[r] = state.row_sum[r] * decay
        for block in cutlass.range_constexpr(cute.size(state.acc_o, mode=[1])):
            for part in cutlass.range_constexpr(2):
                at = score_at(r, part)
                state.acc_o[at, block] = state.acc_o[at, block] * decay
        if (warp == 0) & (lane < 4):
            kept[0][r] = peak
            kept[1][r] = cutlass.select_(far | (peak == -Float32.inf), -Float32.inf, offset)


@cute.jit
def settle_columns(spec: cutlass.Constexpr, shared: Shared, state: ColumnState, heads: Int32, order: Int32, scaling: Scaling):
    """Merges the turns' states, and leaves O [row, column, 0] and the lse in `merge`, as epilogue.settle_turns does."""
    acc, row_max, row_sum, lse = shared.merge
    numbers, count, warp, lane = numbers_of(spec, shared), lane_count(spec), warp_in_group(), cute.arch.lane_idx()
    unit = Float32(1.0) if cutlass.const_expr(state.unit is None) else unit_of(state.unit)
    own = own_numbers(spec, numbers, EXCHANGE + warp)
    for r in cutlass.range_constexpr(count):
        total = state.row_sum[r]
        for apart in (4, 8, 16):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=apart)
        if lane < 4:
            own[r] = total
    sync_group()
    row = remainder(cute.arch.thread_idx()[0], WARPGROUP * LANES)
    if row < spec.block_rows:
        place = place_of_row(spec, row)
        if row < heads:
            total = all_numbers(spec, numbers, EXCHANGE)[place]
            for other in cutlass.range_constexpr(1, WARPGROUP):
                total = total + all_numbers(spec, numbers, EXCHANGE + other)[place]
            row_max[row, order] = rounded_product(all_numbers(spec, numbers, PEAKS)[place], all_numbers(spec, numbers, FACTORS)[place])
            row_sum[row, order] = total
    blocks = cutlass.const_expr(spec.padded_v_head_dim // WARPGROUP_M)
    ours = cutlass.const_expr(tuple(range(blocks)))
    if cutlass.const_expr(spec.turns > 1 and blocks == 1):
        if order > 0:
            leave_block(spec, acc, state, 0, heads, unit)
        sync_consumers(spec)
        if order == 0:
            merge_blocks(spec, shared.merge, state, ours, heads, order, unit, scaling)
    else:
        if cutlass.const_expr(spec.turns > 1):
            if order == 0:
                leave_block(spec, acc, state, 1, heads, unit)
            else:
                leave_block(spec, acc, state, 0, heads, unit)
        sync_consumers(spec)
        if cutlass.const_expr(spec.turns == 1):
            merge_blocks(spec, shared.merge, state, ours, heads, order, unit, scaling)
        elif order == 0:
            merge_blocks(spec, shared.merge, state, ours[:1], heads, order, unit, scaling)
        else:
            merge_blocks(spec, shared.merge, state, ours[1:], heads, order, unit, scaling)


def block_columns(block: int) -> Int32:
    """The first of the two columns of V that this lane holds of a block of 64."""
    return (block * WARPGROUP + warp_in_group()) * TILE_M + cute.arch.lane_idx() // 4 * 2


def leave_block(spec: KernelSpec, acc: cute.Tensor, state: ColumnState, block: int, heads: Int32, unit: Float32):
    """Leaves a block of O for the other turn, which merges it."""
    for r, row in enumerate(own_rows(spec)):
        leave_pair(acc, row, block_columns(block), [state.acc_o[score_at(r, part), block] * unit for part in range(2)], heads)


@cute.jit
def leave_pair(acc: cute.Tensor, row: Int32, column: Int32, pair: list, heads: Int32):
    """Writes two neighbours of a row's output, if there is such a row."""
    if row < heads:
        write_pair(acc.iterator + cute.crd2idx((row, column, 0), acc.layout), *pair)


@cute.jit
def merge_blocks(
    spec: cutlass.Constexpr,
    merge: tuple,
    state: ColumnState,
    blocks: cutlass.Constexpr,
    heads: Int32,
    order: Int32,
    unit: Float32,
    scaling: Scaling,
):
    """Merges blocks of O with what the other turn left there. Each lane finds the factors of a row or two for the others."""
    acc, row_max, row_sum, lse = merge
    lane, rows, found = cute.arch.lane_idx(), own_rows(spec), []
    for first in cutlass.range_constexpr(0, lane_count(spec), 8):
        mine = (first + lane // 4) // 2 * 8 + lane % 4 * 2 + lane // 4 % 2
        weights, inverse, row_lse = merge_row(spec, row_max, row_sum, mine, scaling)
        own, other = weights[0], weights[spec.turns - 1]
        if cutlass.const_expr(spec.turns > 1):
            own, other = cutlass.select_(order == 0, own, other), cutlass.select_(order == 0, other, own)
        found.append((own * inverse * unit, other * inverse))
        if (order == 0) & (warp_in_group() == 0) & (mine < heads):
            lse[mine] = row_lse
    columns = [block_columns(block) + part for block in blocks for part in range(2)]
    for r in cutlass.range_constexpr(len(rows)):
        factors = [cute.arch.shuffle_sync(factor, r % 8 * 4 + lane % 4) for factor in found[r // 8]]
        outputs = [state.acc_o[score_at(r, part), block] for block in blocks for part in range(2)]
        if rows[r] < heads:
            settle_outputs(spec, acc, rows[r], columns, outputs, factors)
