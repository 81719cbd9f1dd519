"""Combines the partial states of a cut row: out = sum_p w_p out_p with w_p = 2^(lse_p - lse), in piece order.

Every CTA stores its pieces and goes on, and combines at the end of its share. The columns of a row are divided between the CTAs
of all its pieces but the first (a reduce-scatter): each gathers its own columns of every piece. Which CTA combines a column
changes no bit of it, so the result is deterministic, and there is no second launch.
Who they are, and how they know that they may wait for each other: schedule/crew.py.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int8, Int32

from ...config.decode import LINE_WORDS, MOST_PIECES, PARTS_IN_FLIGHT, KernelSpec
from ..attend.epilogue import join_sink, lse_factor
from ..attend.pack_gqa import sync_consumers
from ..attend.query_rows import QueryBlock, place_in
from ..attend.softmax import finite_or_zero
from ..ptx.registers import LANES, quotient, remainder
from ..schedule.work_scheduler import Piece
from .partials import WRITTEN, receive, send, state_words, word_at

IN_FLIGHT = 16  # words a thread waits for together where one CTA combines a row


@dataclass(frozen=True)
class Parts:
    """The states to combine. opened: slot of piece 0; continued: of 1; stride: to the next."""

    count: Int32
    opened: Int32
    continued: Int32
    stride: Int32


@dataclass(frozen=True)
class Columns:
    """Pairs of columns [low, high) of a block of packed rows, which are laid end to end.

    bits: 2^bits threads lie beside each other on them (width_bits).
    """

    block: QueryBlock
    low: Int32
    high: Int32
    bits: Int32


def parts_together(spec: KernelSpec) -> int:
    """Parts that a thread waits for together."""
    return PARTS_IN_FLIGHT if spec.divides_combine else IN_FLIGHT // spec.combine_pairs


def all_columns(spec: KernelSpec, piece: Piece, parts: Parts) -> Columns:
    """Those of a whole row."""
    work = state_words(spec, piece.block.rows)
    return Columns(piece.block, Int32(0), work, width_bits(spec, work, parts.count))


def columns_of(spec: KernelSpec, block: QueryBlock, index: Int32, step: Int32, bits: Int32) -> Columns:
    """Those of one CTA of a crew, `step` of each: the last ones may have none."""
    work = state_words(spec, block.rows)
    return Columns(block, cutlass.min(index * step, work), cutlass.min(index * step + step, work), bits)


def step_of(spec: KernelSpec, heads: Int32, crew: Int32) -> Int32:
    """Pairs of columns of each of `crew` CTAs: whole cache lines."""
    return quotient(state_words(spec, heads) + crew * LINE_WORDS - 1, crew * LINE_WORDS) * LINE_WORDS


def width_bits(spec: KernelSpec, columns: Int32, count: Int32) -> Int32:
    """The logarithm of how many threads lie beside each other on pairs of columns: the others have the same of other parts.

    No fewer than the columns need, nor than lets a thread wait for all of its `count` parts together: merging costs.
    """
    most = (spec.num_warps * LANES).bit_length() - 1
    found = Int32(most)
    for bits in range(most - 1, LINE_WORDS.bit_length() - 2, -1):
        narrower = (columns <= spec.combine_pairs << bits) & (count > parts_together(spec) << (most - bits - 1))
        found = cutlass.select_(narrower, bits, found)
    return found


@cute.jit
def combine_columns(spec: cutlass.Constexpr, words: cute.Tensor, parts: Parts, columns: Columns, scratch: tuple, out, lse, sinks):
    """Combines columns of a row into out and lse. By all consumer warps.

    scratch: (f32 of the merge buffer, bytes of the pieces that decline). sinks: f32 [num_heads], or None.
    """
    thread, bits = cute.arch.thread_idx()[0], cute.arch.make_warp_uniform(columns.bits)
    width = 1 << bits
    for base in cutlass.range(columns.low, columns.high, width * spec.combine_pairs, unroll=1):
        step, begin = 1, base + (thread & (width - 1)) * spec.combine_pairs
        if cutlass.const_expr(spec.by_warpgroup):  # neighbours' words beside each other: with 4 pairs a thread it matters
            step, begin = width, base + (thread & (width - 1))
        states = gather(spec, words, parts, columns.high, begin, step, bits, scratch[1])
        if width < spec.num_warps * LANES:
            merge_threads(spec, states, width, scratch[0])
        if begin < columns.high and thread < width:
            for j in cutlass.range_constexpr(spec.combine_pairs):
                if cutlass.const_expr(not spec.by_warpgroup) or begin + j * step < columns.high:
                    store_pair(spec, states[None, j], columns, begin + j * step, out, lse, sinks)


@cute.jit
def gather(spec: cutlass.Constexpr, words: cute.Tensor, parts: Parts, high: Int32, begin: Int32, step, bits: Int32, declined):
    """This thread's pairs from `begin` on, `step` apart, over its parts: (first, second, peak, total) x pairs."""
    pairs, chunk = cutlass.const_expr(spec.combine_pairs), cutlass.const_expr(parts_together(spec))
    states = cute.make_rmem_tensor((4, pairs), Float32)
    for j in cutlass.range_constexpr(pairs):
        clear_state(states[None, j])
    others = (spec.num_warps * LANES) >> bits
    for base in cutlass.range(0, parts.count, others * chunk, unroll=1):  # as often in all lanes of a warp: collect syncs them
        p = base + (cute.arch.thread_idx()[0] >> bits)
        found = cute.make_rmem_tensor((3, chunk, pairs), Float32)
        collect(spec, words, parts, high, (begin, step), others, p, found, declined)
        for j in cutlass.range_constexpr(pairs):
            merge_parts(states[None, j], found[None, None, j], Int32(chunk))
    return states


@cute.jit
def clear_state(state: cute.Tensor):
    """An empty running state."""
    state.fill(0.0)
    state[2] = -Float32.inf


@cute.jit
def merge_threads(spec: cutlass.Constexpr, states: cute.Tensor, width: Int32, buffer: cute.Tensor):
    """Merges the states of threads that have the same columns, into those of the first `width` threads.

    Lanes of a warp by shuffles, warps through `buffer` [4, pair, thread].
    """
    thread, pairs = cute.arch.thread_idx()[0], cutlass.const_expr(spec.combine_pairs)
    cute.arch.sync_warp()  # lanes may be apart behind the branches of merge_parts
    for step in cutlass.range_constexpr(LINE_WORDS.bit_length() - 1, LANES.bit_length() - 1):
        if width <= cutlass.const_expr(1 << step):
            for j in cutlass.range_constexpr(pairs):
                other = cute.make_rmem_tensor((4, 1), Float32)
                for c in cutlass.range_constexpr(4):
                    other[c, 0] = cute.arch.shuffle_sync_bfly(states[c, j], offset=1 << step)
                merge_parts(states[None, j], other, Int32(1))
    sync_consumers(spec)
    cute.autovec_copy(states, buffer[None, None, thread])
    sync_consumers(spec)
    if thread < width:
        found = cute.make_rmem_tensor((4, pairs, spec.num_warps), Float32)
        for w in cutlass.range_constexpr(spec.num_warps):
            other = thread + w * cutlass.max(width, LANES)
            inside = other < spec.num_warps * LANES
            cute.autovec_copy(buffer[None, None, cutlass.select_(inside, other, thread)], found[None, None, w])
            for j in cutlass.range_constexpr(pairs):
                found[2, j, w] = cutlass.select_(inside, found[2, j, w], -Float32.inf)
        for j in cutlass.range_constexpr(pairs):
            clear_state(states[None, j])
            merge_parts(states[None, j], found[None, j, None], Int32(spec.num_warps))


def merge_buffer(spec: KernelSpec, base: cute.Pointer) -> cute.Tensor:
    """f32 [4, pair, thread] for merge_threads."""
    pairs, threads = spec.combine_pairs, spec.num_warps * LANES
    return cute.make_tensor(base, cute.make_layout((4, pairs, threads)))


@cute.jit
def normalised(state: cute.Tensor) -> tuple[Float32, Float32, Float32]:
    """(first, second, lse in base 2) of a running (first, second, peak, total); (0, 0, -inf) when it is empty."""
    inverse = Float32(0.0) if state[3] == 0.0 else cute.arch.rcp_approx(state[3])
    return state[0] * inverse, state[1] * inverse, cute.math.log2(state[3], fastmath=True) + state[2]


@cute.jit
def store_pair(
    spec: cutlass.Constexpr, state: cute.Tensor, columns: Columns, index: Int32, out: cute.Tensor, lse: cute.Tensor, sinks
):
    """Writes a combined pair of columns, and the lse beside a packed row's first pair."""
    place = place_in(spec, columns.block, quotient(index, spec.row_pairs))
    column = remainder(index, spec.row_pairs) * 2
    first, second, row_lse = normalised(state)
    if cutlass.const_expr(spec.modifiers.sinks):
        factor, row_lse = join_sink(sinks[place[-1]], row_lse)
        first, second = first * factor, second * factor
    for c in cutlass.range_constexpr(2):
        if column + c < spec.v_head_dim:
            out[(*place, column + c)] = (second if cutlass.const_expr(c) else first).to(out.element_type)
    if column == 0:
        lse[place] = row_lse * lse_factor(spec)


@cute.jit
def merge_parts(state: cute.Tensor, parts: cute.Tensor, count: Int32):
    """Merges the first `count` of a chunk's parts (first, second, lse) into the running (first, second, peak, total).

    Parts may be running states too, of four values. One maximum for the chunk, so that the weights do not wait for each other.
    """
    peak = state[2]
    for i in cutlass.range_constexpr(cute.size(parts, mode=[1])):
        parts[2, i] = cutlass.select_(i < count, parts[2, i], -Float32.inf)
        peak = cute.arch.fmax(peak, parts[2, i])
    shift = finite_or_zero(peak)
    decay = cute.math.exp2(state[2] - shift, fastmath=True)
    for c in cutlass.range_constexpr(4):
        state[c] = peak if cutlass.const_expr(c == 2) else state[c] * decay
    for i in cutlass.range_constexpr(cute.size(parts, mode=[1])):
        weight = cute.math.exp2(parts[2, i] - shift, fastmath=True)
        if weight != 0.0:  # an empty part weighs nothing, whatever its value
            state[0] += parts[0, i] * weight
            state[1] += parts[1, i] * weight
            state[3] += weight * (parts[3, i] if cutlass.const_expr(cute.size(parts, mode=[0]) > 3) else 1.0)


@cute.jit
def collect(
    spec: cutlass.Constexpr,
    words: cute.Tensor,
    parts: Parts,
    high: Int32,
    place: tuple,
    others: Int32,
    p: Int32,
    found: cute.Tensor,
    declined: cute.Tensor,
):
    """Waits for a chunk of this thread's parts, p and on, one of `others`, and clears their words. found: (first, second, lse).

    place: (the first of the thread's pairs, how far they are apart). All loads of a round are in flight together, and a round
    asks only for what is missing.
    """
    chunk, pairs = parts_together(spec), spec.combine_pairs
    begin, step = place
    seen = cute.make_rmem_tensor((chunk, pairs), Int32)
    found.fill(0.0)
    for j in cutlass.range_constexpr(pairs):
        for i in cutlass.range_constexpr(chunk):
            asked = (p + i * others < parts.count) & inside(begin, step, j, high)
            seen[i, j] = cutlass.select_(asked, Int32(0), WRITTEN)
            found[2, i, j] = cutlass.select_(asked, found[2, i, j], -Float32.inf)
    waiting = Boolean(True)
    while waiting:
        waiting = Boolean(False)
        for j in cutlass.range_constexpr(pairs):
            for i in cutlass.range_constexpr(chunk):
                word = part_at(spec, words, parts, begin + j * step, p + i * others)
                known = (found[0, i, j], found[1, i, j], found[2, i, j], seen[i, j])
                found[0, i, j], found[1, i, j], found[2, i, j], seen[i, j] = receive(word, known)
        for j in cutlass.range_constexpr(pairs):
            for i in cutlass.range_constexpr(chunk):
                waiting = waiting | (seen[i, j] == 0)
    cute.arch.sync_warp()  # lanes leave that loop one by one, and stay apart: 0.1 to 0.5 us, 1 us more where shuffles follow
    clear, signs = Float32(0.0), Int32(0)
    for j in cutlass.range_constexpr(pairs):
        for i in cutlass.range_constexpr(chunk):
            signs = signs | seen[i, j]
            if (p + i * others < parts.count) & inside(begin, step, j, high):
                send(part_at(spec, words, parts, begin + j * step, p + i * others), clear, clear, clear, Int32(0))
    if signs < 0:
        for j in cutlass.range_constexpr(pairs):
            for i in cutlass.range_constexpr(chunk):
                if seen[i, j] < 0 and p + i * others < MOST_PIECES:
                    declined[0], declined[p + i * others] = Int8(1), Int8(1)


def inside(begin: Int32, step: Int32 | int, j: int, high: Int32) -> Boolean:
    """Whether a thread's pair j is one of the columns: neighbouring pairs all are, or none."""
    return (begin if isinstance(step, int) else begin + j * step) < high


def part_at(spec: KernelSpec, words: cute.Tensor, parts: Parts, index: Int32, part: Int32) -> cute.Pointer:
    """The word of one part at pair `index` of the row's heads."""
    slot = cutlass.select_(part == 0, parts.opened, parts.continued + (part - 1) * parts.stride)
    return word_at(words, index, slot)
