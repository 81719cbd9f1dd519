"""Combines the partial states of a cut row: out = sum_p w_p out_p with w_p = 2^(lse_p - lse), in piece order.

Every CTA stores its pieces and goes on; those that combine do so at the end of their share. A row in few pieces is combined
by the CTA that holds its last one. In a row of many, the last piece of each group combines the group into one state, in
parallel, and the row's last combines those states and its own group. The order is fixed, so the result is deterministic, and
there is no second launch. A CTA waits only for CTAs of a lower index, which the hardware starts no later than itself.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..config import KernelSpec
from .epilogue import lse_factor
from .partials import pairs_of, receive, send, word_at
from .registers import quotient, remainder
from .softmax import finite_or_zero
from .work_scheduler import Piece

IN_FLIGHT = 16  # words a thread waits for together


@dataclass(frozen=True)
class Parts:
    """The states to combine: pieces `low` to `low` + `pieces` - 1, then those of the first `groups` groups.

    count: places of both; the groups come later, so they have a round of their own where one has no room for all. opened:
    slot of the row's piece 0; continued: slot of its piece 1; stride: slots from there to the next. tag: what words carry.
    """

    count: Int32
    pieces: Int32
    groups: Int32
    low: Int32
    opened: Int32
    continued: Int32
    stride: Int32
    tag: Int32


def make_parts(spec: KernelSpec, pieces: Int32, groups: Int32, low: Int32, slots: tuple, tag: Int32) -> Parts:
    """Parts with room for the groups behind the pieces. slots: (opened, continued, stride)."""
    apart = (groups > 0) & (pieces + groups > group_of(spec))
    return Parts(cutlass.select_(apart, group_of(spec), pieces) + groups, pieces, groups, low, *slots, tag)


def group_of(spec: KernelSpec) -> int:
    """Pieces of a group: as many as a thread waits for together."""
    return IN_FLIGHT // pairs_of(spec)


def is_part(parts: Parts, index: Int32) -> Boolean:
    """Whether a place holds one of the parts."""
    return (index < parts.pieces) | ((index >= parts.count - parts.groups) & (index < parts.count))


def find_part(spec: KernelSpec, parts: Parts, index: Int32) -> Int32:
    """The slot of the part at a place."""
    group, ordinal = group_of(spec), index - (parts.count - parts.groups)
    piece = cutlass.select_(ordinal >= 0, ordinal * group + group - 1, parts.low + index)
    slot = cutlass.select_(piece == 0, parts.opened, parts.continued + (piece - 1) * parts.stride)
    return slot + (ordinal >= 0)


@cute.jit
def combine_row(spec: cutlass.Constexpr, words: cute.Tensor, parts: Parts, piece: Piece, out, lse):
    """Combines the parts of a whole row into out [batch, num_heads, head_dim] and lse [batch, num_heads]."""
    threads = cutlass.const_expr(spec.num_warps * 32 * pairs_of(spec))
    for begin in cutlass.range(cute.arch.thread_idx()[0], piece.heads * (spec.padded_head_dim // 2), threads, unroll=1):
        states = gather(spec, words, parts, piece.heads, begin)
        for j in cutlass.range_constexpr(pairs_of(spec)):
            index = begin + j * spec.num_warps * 32
            if index < piece.heads * (spec.padded_head_dim // 2):
                store_pair(spec, states[None, j], piece, index, out, lse)


@cute.jit
def combine_group(spec: cutlass.Constexpr, words: cute.Tensor, parts: Parts, piece: Piece):
    """Combines a group's parts into one, in the slot beside its last piece: that CTA opens no row, or it would hold the last."""
    pairs = cutlass.const_expr(spec.padded_head_dim // 2)
    threads = cutlass.const_expr(spec.num_warps * 32 * pairs_of(spec))
    slot = find_part(spec, parts, parts.pieces - 1) + 1
    for begin in cutlass.range(cute.arch.thread_idx()[0], piece.heads * pairs, threads, unroll=1):
        states = gather(spec, words, parts, piece.heads, begin)
        for j in cutlass.range_constexpr(pairs_of(spec)):
            index = begin + j * spec.num_warps * 32
            if index < piece.heads * pairs:
                first, second, row_lse = normalised(states[None, j])
                place = remainder(index, pairs), quotient(index, pairs), slot
                send(word_at(words, *place), first, second, row_lse, parts.tag)


@cute.jit
def gather(spec: cutlass.Constexpr, words: cute.Tensor, parts: Parts, heads: Int32, begin: Int32) -> cute.Tensor:
    """This thread's pairs from `begin` on, over all parts: (first, second, peak, total) x pairs."""
    pairs, chunk = cutlass.const_expr(pairs_of(spec)), cutlass.const_expr(group_of(spec))
    states = cute.make_rmem_tensor((4, pairs), Float32)
    states.fill(0.0)
    for j in cutlass.range_constexpr(pairs):
        states[2, j] = -Float32.inf
    for p in cutlass.range(0, parts.count, chunk, unroll=1):
        found = cute.make_rmem_tensor((3, chunk, pairs), Float32)
        collect(spec, words, parts, heads * (spec.padded_head_dim // 2), begin, p, found)
        for j in cutlass.range_constexpr(pairs):
            merge_parts(states[None, j], found[None, None, j], Int32(chunk))
    return states


@cute.jit
def normalised(state: cute.Tensor) -> tuple[Float32, Float32, Float32]:
    """(first, second, lse in base 2) of a running (first, second, peak, total); (0, 0, -inf) when it is empty."""
    inverse = Float32(0.0) if state[3] == 0.0 else 1.0 / state[3]
    return state[0] * inverse, state[1] * inverse, cute.math.log2(state[3]) + state[2]


@cute.jit
def store_pair(spec: cutlass.Constexpr, state: cute.Tensor, piece: Piece, index: Int32, out: cute.Tensor, lse: cute.Tensor):
    """Writes a combined pair of columns, and the lse beside a head's first pair."""
    pairs = spec.padded_head_dim // 2
    head, column = piece.head + quotient(index, pairs), remainder(index, pairs) * 2
    first, second, row_lse = normalised(state)
    for c in cutlass.range_constexpr(2):
        if column + c < spec.head_dim:
            out[piece.row, head, column + c] = (second if cutlass.const_expr(c) else first).to(out.element_type)
    if column == 0:
        lse[piece.row, head] = row_lse * lse_factor(spec)


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
        if weight != 0.0:  # an empty part weighs nothing, whatever its value
            state[0] += parts[0, i] * weight
            state[1] += parts[1, i] * weight
            state[3] += weight


@cute.jit
def collect(spec: cutlass.Constexpr, words: cute.Tensor, parts: Parts, work: Int32, begin: Int32, p: Int32, found: cute.Tensor):
    """Waits for parts [p, p + chunk) of a thread's pairs and clears their words. found: (first, second, lse) of each.

    All loads of a round are in flight together, and a round asks only for what is missing.
    """
    threads = cutlass.const_expr(spec.num_warps * 32)
    chunk, pairs = group_of(spec), pairs_of(spec)
    seen = cute.make_rmem_tensor((chunk, pairs), Int32)
    found.fill(0.0)
    for j in cutlass.range_constexpr(pairs):
        for i in cutlass.range_constexpr(chunk):
            asked = is_part(parts, p + i) & (begin + j * threads < work)
            seen[i, j] = cutlass.select_(asked, 0, parts.tag)
            found[2, i, j] = cutlass.select_(asked, found[2, i, j], -Float32.inf)
    waiting = Boolean(True)
    while waiting:
        waiting = Boolean(False)
        for j in cutlass.range_constexpr(pairs):
            for i in cutlass.range_constexpr(chunk):
                word = part_at(spec, words, parts, begin + j * threads, p + i)
                known = (found[0, i, j], found[1, i, j], found[2, i, j], seen[i, j])
                found[0, i, j], found[1, i, j], found[2, i, j], seen[i, j] = receive(word, parts.tag, known)
        for j in cutlass.range_constexpr(pairs):
            for i in cutlass.range_constexpr(chunk):
                waiting = waiting | (seen[i, j] != parts.tag)
    clear = Float32(0.0)
    for j in cutlass.range_constexpr(pairs):
        for i in cutlass.range_constexpr(chunk):
            if is_part(parts, p + i) & (begin + j * threads < work):
                send(part_at(spec, words, parts, begin + j * threads, p + i), clear, clear, clear, Int32(0))


def part_at(spec: KernelSpec, words: cute.Tensor, parts: Parts, index: Int32, part: Int32) -> cute.Pointer:
    """The word of one part at pair `index` of the row's heads."""
    pairs = spec.padded_head_dim // 2
    return word_at(words, remainder(index, pairs), quotient(index, pairs), find_part(spec, parts, part))
