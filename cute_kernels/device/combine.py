"""Combines the partial states of a cut row: out = sum_p w_p out_p with w_p = 2^(lse_p - lse), in piece order.

Every CTA stores its pieces and goes on. The CTA that holds a row's last piece combines at the end of its share, in piece order,
so the result is deterministic and there is no second launch. It waits only for CTAs of a lower index, which the hardware
starts no later than itself.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..config import KernelSpec
from .epilogue import lse_factor
from .partials import receive, send, word_at
from .softmax import finite_or_zero
from .work_scheduler import Piece

IN_FLIGHT = 8  # words a thread waits for together: more costs registers that two CTAs an SM need


def shape_of(spec: KernelSpec) -> tuple[int, int]:
    """(pieces, pairs of columns) that a thread takes together: two pairs where a row has more pairs than the CTA threads."""
    pairs = 1 if spec.packed_rows * spec.padded_head_dim // 2 <= spec.num_warps * 32 else 2
    return IN_FLIGHT // pairs, pairs


@cute.jit
def combine_row(spec: cutlass.Constexpr, words: cute.Tensor, slots: tuple, piece: Piece, pieces: Int32, tag: Int32, out, lse):
    """Combines the `pieces` states of a row's unit into out [batch, num_heads, head_dim] and lse [batch, num_heads].

    slots: (of the first piece, of the second, distance of further ones).
    """
    chunk, pairs = shape_of(spec)
    threads = cutlass.const_expr(spec.num_warps * 32)
    work = piece.heads * (spec.padded_head_dim // 2)
    for begin in cutlass.range(cute.arch.thread_idx()[0], work, threads * pairs, unroll=1):
        states = cute.make_rmem_tensor((4, pairs), Float32)  # first, second, peak, total
        states.fill(0.0)
        for j in cutlass.range_constexpr(pairs):
            states[2, j] = -Float32.inf
        for p in cutlass.range(0, pieces, chunk, unroll=1):
            parts = cute.make_rmem_tensor((3, chunk, pairs), Float32)
            collect(spec, words, slots, begin, work, p, pieces, tag, parts)
            for j in cutlass.range_constexpr(pairs):
                merge_parts(states[None, j], parts[None, None, j], pieces - p)
        for j in cutlass.range_constexpr(pairs):
            if begin + j * threads < work:
                store_pair(spec, states[None, j], piece, begin + j * threads, out, lse)


@cute.jit
def store_pair(spec: cutlass.Constexpr, state: cute.Tensor, piece: Piece, index: Int32, out: cute.Tensor, lse: cute.Tensor):
    """Writes a combined pair of columns, and the lse beside a head's first pair."""
    head, column = piece.head + index // (spec.padded_head_dim // 2), index % (spec.padded_head_dim // 2) * 2
    inverse = Float32(0.0) if state[3] == 0.0 else 1.0 / state[3]
    for c in cutlass.range_constexpr(2):
        if column + c < spec.head_dim:
            out[piece.row, head, column + c] = (state[c] * inverse).to(out.element_type)
    if column == 0:
        lse[piece.row, head] = (cute.math.log2(state[3]) + state[2]) * lse_factor(spec)


@cute.jit
def merge_parts(state: cute.Tensor, parts: cute.Tensor, count: Int32):
    """Merges the first `count` of a chunk's parts (first, second, lse) into the running (first, second, peak, total).

    One maximum for the chunk, so that the weights do not wait for each other.
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
        if weight != 0.0:  # a part past the end repeats another, and its value may be anything
            state[0] += parts[0, i] * weight
            state[1] += parts[1, i] * weight
            state[3] += weight


@cute.jit
def collect(spec: cutlass.Constexpr, words, slots: tuple, begin: Int32, work: Int32, p: Int32, pieces: Int32, tag: Int32, parts):
    """Waits for pieces [p, p + chunk) of a thread's pairs and clears their words. parts: (first, second, lse) of each.

    All loads are in flight before the first tag is looked at; places past an end repeat one of the thread's own words.
    """
    threads = cutlass.const_expr(spec.num_warps * 32)
    chunk, pairs = shape_of(spec)
    waiting = Boolean(True)
    while waiting:
        tags = cute.make_rmem_tensor((chunk, pairs), Int32)
        for j in cutlass.range_constexpr(pairs):
            index = cutlass.select_(begin + j * threads < work, begin + j * threads, begin)
            for i in cutlass.range_constexpr(chunk):
                word = part_at(spec, words, slots, index, cutlass.min(p + i, pieces - 1))
                parts[0, i, j], parts[1, i, j], parts[2, i, j], tags[i, j] = receive(word)
        waiting = Boolean(False)
        for i in cutlass.range_constexpr(chunk * pairs):
            waiting = waiting | (tags[i] != tag)
    clear = Float32(0.0)
    for j in cutlass.range_constexpr(pairs):
        for i in cutlass.range_constexpr(chunk):
            if p + i < pieces and begin + j * threads < work:
                send(part_at(spec, words, slots, begin + j * threads, p + i), clear, clear, clear, Int32(0))


def part_at(spec: KernelSpec, words: cute.Tensor, slots: tuple, index: Int32, piece: Int32) -> cute.Pointer:
    """The word of one piece at pair `index` of the row's heads."""
    opened, continued, stride = slots
    pairs = spec.padded_head_dim // 2
    slot = cutlass.select_(piece == 0, opened, continued + (piece - 1) * stride)
    return word_at(words, index % pairs, index // pairs, slot)
