"""Merges the states of a row's parts in registers: a thread those of its words, then threads that share words among themselves.

A running state is (columns, peak, total): sums of columns and of weights, relative to 2^peak. A part is (columns, lse).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import LINE_WORDS, KernelSpec
from ..attend.pack_gqa import sync_consumers
from ..attend.softmax import finite_or_zero
from ..ptx.registers import LANES, quotient
from .halves import from_halves

MOST_SHARING = 2  # log2 of how many lanes of a warp share a word of f16: those of a cache line stay together


@dataclass(frozen=True)
class Sharing:
    """How threads share words in a round. word: the thread's word; part: its number among those that share it.

    leads: whether it is the first of them, and stores; lanes: how many lanes of a warp have different words; apart: from a thread
    to the one in another warp that shares its word.
    """

    word: Int32
    part: Int32
    leads: Boolean
    lanes: Int32
    apart: Int32


def width_of_all(spec: KernelSpec) -> int:
    """log2 of all threads of the combine."""
    return (spec.num_warps * LANES).bit_length() - 1


def sharing_of(spec: KernelSpec, bits: Int32) -> Sharing:
    """How a thread shares words where 2^bits threads have different words. Neighbours have neighbouring words.

    Lanes of a warp share words of f16 first, which needs no barrier: at 1 x 8k two lanes share a word of 64 packed rows.
    """
    thread, width = cute.arch.thread_idx()[0], 1 << bits
    if not spec.half_words:
        return Sharing(thread & (width - 1), thread >> bits, thread < width, width, cutlass.max(width, LANES))
    warp, lane, sharing = quotient(thread, LANES), cute.arch.lane_idx(), cutlass.min(width_of_all(spec) - bits, MOST_SHARING)
    lane_bits = LANES.bit_length() - 1 - sharing
    warp_bits = bits - lane_bits
    word = ((warp & ((1 << warp_bits) - 1)) << lane_bits) | (lane & ((1 << lane_bits) - 1))
    part = ((warp >> warp_bits) << sharing) | (lane >> lane_bits)
    return Sharing(word, part, part == 0, 1 << lane_bits, LANES << warp_bits)


@cute.jit
def clear_state(state: cute.Tensor):
    """Makes a running state empty."""
    state.fill(0.0)
    state[cute.size(state) - 2] = -Float32.inf


@cute.jit
def merge_sharers(spec: cutlass.Constexpr, states: cute.Tensor, bits: Int32, sharing: Sharing, buffer: cute.Tensor):
    """Calls merge_threads if threads share columns. bits: as in sharing_of."""
    if 1 << bits < spec.num_warps * LANES:
        merge_threads(spec, states, sharing, buffer)


@cute.jit
def merge_threads(spec: cutlass.Constexpr, states: cute.Tensor, sharing: Sharing, buffer: cute.Tensor):
    """Merges the states of threads that have the same columns, into the states of those that lead.

    Lanes of a warp merge by shuffles, warps through `buffer` [value of a state, word, thread].
    """
    words, values = cutlass.const_expr(spec.combine_words), cutlass.const_expr(spec.word_columns + 2)
    cute.arch.sync_warp()  # lanes may have diverged in the branches of merge_parts
    for step in cutlass.range_constexpr(LINE_WORDS.bit_length() - 1, LANES.bit_length() - 1):
        if sharing.lanes <= cutlass.const_expr(1 << step):
            for j in cutlass.range_constexpr(words):
                other = cute.make_rmem_tensor((values, 1), Float32)
                for c in cutlass.range_constexpr(values):
                    other[c, 0] = cute.arch.shuffle_sync_bfly(states[c, j], offset=1 << step)
                merge_parts(states[None, j], other)
    if cutlass.const_expr(spec.half_words):
        if sharing.apart < spec.num_warps * LANES:
            merge_warps(spec, states, sharing, buffer)
    else:
        merge_warps(spec, states, sharing, buffer)


@cute.jit
def merge_warps(spec: cutlass.Constexpr, states: cute.Tensor, sharing: Sharing, buffer: cute.Tensor):
    """Merges the states of warps that have the same columns."""
    thread, words = cute.arch.thread_idx()[0], cutlass.const_expr(spec.combine_words)
    values, peak = cutlass.const_expr(spec.word_columns + 2), cutlass.const_expr(spec.word_columns)
    sync_consumers(spec)
    cute.autovec_copy(states, buffer[None, None, thread])
    sync_consumers(spec)
    if sharing.leads:
        found = cute.make_rmem_tensor((values, words, spec.num_warps), Float32)
        for w in cutlass.range_constexpr(spec.num_warps):
            other = thread + w * sharing.apart
            inside = other < spec.num_warps * LANES
            cute.autovec_copy(buffer[None, None, cutlass.select_(inside, other, thread)], found[None, None, w])
            for j in cutlass.range_constexpr(words):
                found[peak, j, w] = cutlass.select_(inside, found[peak, j, w], -Float32.inf)
        for j in cutlass.range_constexpr(words):
            clear_state(states[None, j])
            merge_parts(states[None, j], found[None, j, None])


def merge_buffer(spec: KernelSpec, base: cute.Pointer) -> cute.Tensor:
    """f32 [value of a state, word, thread] for merge_threads: innermost are the values with narrow words, else the threads."""
    values, words, threads = spec.word_columns + 2, spec.combine_words, spec.num_warps * LANES
    stride = (threads, threads * values, 1) if spec.wide_words else (1, values, values * words)
    return cute.make_tensor(base, cute.make_layout((values, words, threads), stride=stride))


@cute.jit
def normalised(state: cute.Tensor) -> tuple[list[Float32], Float32]:
    """(columns, lse in base 2) of a running (columns, peak, total); (0, -inf) when it is empty."""
    count = cutlass.const_expr(cute.size(state) - 2)
    total = state[count + 1]
    inverse = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
    return [state[c] * inverse for c in range(count)], cute.math.log2(total, fastmath=True) + state[count]


@cute.jit
def merge_parts(state: cute.Tensor, parts: cute.Tensor, marks: cute.Tensor | None = None):
    """Merges a chunk's parts (columns, lse) into the running (columns, peak, total).

    Parts may be running states too, or with their `marks` words of f16 (four pairs of columns, lse). The chunk has one maximum,
    so that the weights do not wait for each other. It is NaN if any part's is: with -inf in its place, a part that saw NaN alone
    would be an empty one to the next merge.
    """
    at, values = cutlass.const_expr(cute.size(state) - 2), cutlass.const_expr(cute.size(state))
    held = cutlass.const_expr(cute.size(parts, mode=[0]))
    columns = cutlass.const_expr(held - 1 if marks is not None else at)  # values ahead of a part's lse, or peak
    peak = state[at]
    for i in cutlass.range_constexpr(cute.size(parts, mode=[1])):
        peak = cute.arch.fmax(peak, parts[columns, i], nan=True)
    shift = finite_or_zero(peak)
    decay = cute.math.exp2(state[at] - shift, fastmath=True)
    for c in cutlass.range_constexpr(values):
        state[c] = peak if cutlass.const_expr(c == at) else state[c] * decay
    for i in cutlass.range_constexpr(cute.size(parts, mode=[1])):
        weight = cute.math.exp2(parts[columns, i] - shift, fastmath=True)
        there = weight != 0.0  # an empty part adds nothing, whatever its values
        if cutlass.const_expr(marks is not None):
            found, unit = from_halves([parts[c, i] for c in range(columns)], marks[i])
            sums = add_weighted([state[c] for c in range(at)], found, weight * unit, there)
            sums.append(state[at + 1] + weight)
        else:
            total = parts[at + 1, i] if cutlass.const_expr(held == values) else Float32(1.0)
            sums = [state[c] for c in range(at)] + [state[at + 1]]
            sums = add_weighted(sums, [parts[c, i] for c in range(at)] + [total], weight, there)
        for c in cutlass.range_constexpr(at):
            state[c] = sums[c]
        state[at + 1] = sums[at]


def add_weighted(sums: list, values: list, weight: Float32, there: Boolean) -> list:
    """Adds values times a weight to sums, by a predicate: nothing if the values are not `there`."""
    count = len(sums)
    steps = [
        f"mov.f32 sum{i}, {{$r{2 + i}}}; @{{$r0}} fma.rn.f32 sum{i}, {{$r{2 + count + i}}}, {{$r1}}, sum{i};"
        for i in range(count)
    ]
    results = [f"mov.f32 {{$w{i}}}, sum{i};" for i in range(count)]
    registers = f".reg .f32 {', '.join(f'sum{i}' for i in range(count))};"
    text = f"{{ {registers} {' '.join(steps + results)} }}"
    args = [there, weight, *sums, *values]
    return list(cute.arch.inline_ptx(text, write_only_types=[Float32] * count, read_only_args=args))
