"""Combines the partial states of a cut row: out = sum_p w_p out_p with w_p = 2^(lse_p - lse), in piece order.

Every CTA stores its pieces and goes on. The CTA that holds a row's last piece combines at the end of its share, in piece order,
so the result is deterministic and there is no second launch. It waits only for CTAs of a lower index, which the hardware
starts no later than itself.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .epilogue import lse_factor
from .partials import receive, send, word_at
from .softmax import finite_or_zero
from .work_scheduler import Piece

CHUNK = 8  # pieces whose words are in flight together: more costs registers that two CTAs an SM need


@cute.jit
def combine_row(spec: cutlass.Constexpr, words: cute.Tensor, slots: tuple, piece: Piece, pieces: Int32, tag: Int32, out, lse):
    """Combines the `pieces` states of a row's unit into out [batch, num_heads, head_dim] and lse [batch, num_heads].

    A thread takes a pair of columns of one query head. slots: (of the first piece, of the second, distance of further ones).
    """
    pairs = cutlass.const_expr(spec.padded_head_dim // 2)
    for i in cutlass.range(cute.arch.thread_idx()[0], piece.heads * pairs, spec.num_warps * 32, unroll=1):
        row, pair = i // pairs, i % pairs
        state = cute.make_rmem_tensor(4, Float32)  # first, second, peak, total
        state.fill(0.0)
        state[2] = -Float32.inf
        for p in cutlass.range(0, pieces, CHUNK, unroll=1):
            parts = cute.make_rmem_tensor((3, CHUNK), Float32)
            collect(words, slots, row, pair, p, pieces, tag, parts)
            merge_parts(state, parts, pieces - p)
        inverse = Float32(0.0) if state[3] == 0.0 else 1.0 / state[3]
        for c in cutlass.range_constexpr(2):
            if 2 * pair + c < spec.head_dim:
                out[piece.row, piece.head + row, 2 * pair + c] = (state[c] * inverse).to(out.element_type)
        if pair == 0:
            lse[piece.row, piece.head + row] = (cute.math.log2(state[3]) + state[2]) * lse_factor(spec)


@cute.jit
def merge_parts(state: cute.Tensor, parts: cute.Tensor, count: Int32):
    """Merges the first `count` of a chunk's parts (first, second, lse) into the running (first, second, peak, total).

    One maximum for the chunk, so that the weights do not wait for each other.
    """
    peak = state[2]
    for i in cutlass.range_constexpr(CHUNK):
        parts[2, i] = cutlass.select_(i < count, parts[2, i], -Float32.inf)
        peak = cute.arch.fmax(peak, parts[2, i])
    shift = finite_or_zero(peak)
    decay = cute.math.exp2(state[2] - shift, fastmath=True)
    for c in cutlass.range_constexpr(4):
        state[c] = peak if cutlass.const_expr(c == 2) else state[c] * decay
    for i in cutlass.range_constexpr(CHUNK):
        weight = cute.math.exp2(parts[2, i] - shift, fastmath=True)
        if weight != 0.0:  # a part past the end repeats another, and its value may be anything
            state[0] += parts[0, i] * weight
            state[1] += parts[1, i] * weight
            state[3] += weight


@cute.jit
def collect(words: cute.Tensor, slots: tuple, row: Int32, pair: Int32, p: Int32, pieces: Int32, tag: Int32, parts: cute.Tensor):
    """Waits for pieces [p, p + CHUNK) of a pair of columns and clears their words. parts: (first, second, lse) of each.

    All loads are in flight before the first tag is looked at; places past the last piece repeat it.
    """
    waiting = Boolean(True)
    while waiting:
        tags = cute.make_rmem_tensor(CHUNK, Int32)
        for i in cutlass.range_constexpr(CHUNK):
            word = word_at(words, pair, row, slot_of(slots, cutlass.min(p + i, pieces - 1)))
            parts[0, i], parts[1, i], parts[2, i], tags[i] = receive(word)
        waiting = Boolean(False)
        for i in cutlass.range_constexpr(CHUNK):
            waiting = waiting | (tags[i] != tag)
    clear = Float32(0.0)
    for i in cutlass.range_constexpr(CHUNK):
        if p + i < pieces:
            send(word_at(words, pair, row, slot_of(slots, p + i)), clear, clear, clear, Int32(0))


def slot_of(slots: tuple, piece: Int32) -> Int32:
    """The slot of a row's piece."""
    opened, continued, stride = slots
    return cutlass.select_(piece == 0, opened, continued + (piece - 1) * stride)
