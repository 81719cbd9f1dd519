"""Combines the partial states of a cut row (split-KV): out = sum_p w_p out_p with w_p = 2^(lse_p - lse), in piece order.

In a balanced plan every CTA stores its pieces (KV splits) and goes on, and combines at the end of its share (work partition). The
columns of a row are divided between the CTAs of all its pieces but the first (a reduce-scatter): each gathers its own columns of
every piece. Which CTA combines a column changes no bit of it, so the result is deterministic, and there is no second launch.
schedule/crew.py says which CTAs combine, and how they know that they may wait for each other. In an invariant plan one CTA
combines a row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int8, Int32

from ...config.decode import LINE_WORDS, MOST_PIECES, KernelSpec
from ..attend.epilogue import join_sink, lse_factor
from ..attend.query_rows import QueryBlock, place_in
from ..ptx.registers import LANES, as_float, quotient, remainder
from ..schedule.work_scheduler import Piece
from .merging import Sharing, clear_state, merge_parts, merge_sharers, normalised, sharing_of, width_of_all
from .partials import PRESENT, WRITTEN, clear, columns_of_word, is_missing, receive, without_mark


@dataclass(frozen=True)
class Parts:
    """The states to combine. opened: the slot of piece 0; continued: that of piece 1; stride: slots from there to the next."""

    count: Int32
    opened: Int32
    continued: Int32
    stride: Int32


@dataclass(frozen=True)
class Columns:
    """Words [low, high) of a block of packed rows, whose words are laid end to end.

    bits: 2^bits neighbouring threads take neighbouring words (width_bits).
    """

    block: QueryBlock
    low: Int32
    high: Int32
    bits: Int32


@dataclass(frozen=True)
class Round:
    """How many words, each of how many parts, a thread waits for together. shares: whether threads may share words."""

    words: int
    parts: int
    shares: bool = False


FEW = Round(4, 2)  # for warpgroups: twice as many words spill, +8 us at 128 rows; without this round +4 us at 16 rows
MANY = Round(1, 8)  # for warpgroups, if no threads need to share words: 1 x 8k 1.1 us sooner at 64 rows over 8 bits


def usual_round(spec: KernelSpec) -> Round:
    """The round that serves any number of parts."""
    return Round(spec.combine_words, spec.parts_in_flight, True)


def takes_many(spec: KernelSpec) -> bool:
    """Whether the round MANY may serve columns: words of f16 are shared at little cost, and have one round for all but FEW."""
    return spec.by_warpgroup and spec.divides_combine and not spec.half_words


def has_many(spec: KernelSpec, columns: Columns, count: Int32) -> Boolean:
    """Whether the round MANY serves the columns, in `count` parts: no threads share words, and each word has a thread.

    A crew's last CTA, which may have few words, takes the round of the others: as no threads share words, the usual one has twice
    as many turns.
    """
    alone = columns.bits == width_of_all(spec)
    return alone & (columns.high - columns.low <= spec.num_warps * LANES) & (count > usual_round(spec).parts)


def all_columns(spec: KernelSpec, piece: Piece, parts: Parts) -> Columns:
    """The columns of a whole row."""
    work = piece.block.rows * spec.row_words
    return Columns(piece.block, Int32(0), work, width_bits(spec, work, parts.count))


def columns_of(spec: KernelSpec, block: QueryBlock, index: Int32, step: Int32, bits: Int32) -> Columns:
    """The columns of CTA `index` of a crew (reduction group): `step` words each, but the last CTAs may have none."""
    work = block.rows * spec.row_words
    return Columns(block, cutlass.min(index * step, work), cutlass.min(index * step + step, work), bits)


def step_of(spec: KernelSpec, heads: Int32, crew: Int32) -> Int32:
    """Words for each of `crew` CTAs, in whole cache lines."""
    return quotient(heads * spec.row_words + crew * LINE_WORDS - 1, crew * LINE_WORDS) * LINE_WORDS


def width_bits(spec: KernelSpec, words: Int32, count: Int32) -> Int32:
    """log2 of how many neighbouring threads take different words; further threads take the same words of other parts.

    It is the largest width at which a thread waits for all its parts together, unless the words need more: merging costs.
    Warpgroups share no words of f32 if more than half of the threads have one (MANY).
    """
    most, usual = width_of_all(spec), usual_round(spec)
    found = Int32(most)
    for bits in range(most - 1, LINE_WORDS.bit_length() - 2, -1):
        narrower = (words <= usual.words << bits) & (count > usual.parts << (most - bits - 1))
        found = cutlass.select_(narrower, bits, found)
    busy = words > 1 << (most - 1)
    return cutlass.select_(busy, most, found) if takes_many(spec) else found


@cute.jit
def combine_columns(spec: cutlass.Constexpr, words: cute.Tensor, parts: Parts, columns: Columns, scratch: tuple, out, lse, sinks):
    """Combines columns of a row into out and lse. All consumer warps call it.

    scratch: (f32 of the merge buffer, Shared.declined). sinks: f32 [num_heads], or None.
    """
    rest = words, parts, columns, scratch, out, lse, sinks
    if cutlass.const_expr(spec.by_warpgroup and spec.divides_combine):
        if parts.count <= FEW.parts:
            combine_rounds(spec, FEW, *rest)
        elif cutlass.const_expr(not takes_many(spec)):
            combine_rounds(spec, usual_round(spec), *rest)
        elif has_many(spec, columns, parts.count):
            combine_rounds(spec, MANY, *rest)
        else:
            combine_rounds(spec, usual_round(spec), *rest)
    else:
        combine_rounds(spec, usual_round(spec), *rest)


@cute.jit
def combine_rounds(
    spec: cutlass.Constexpr,
    together: cutlass.Constexpr,
    words: cute.Tensor,
    parts: Parts,
    columns: Columns,
    scratch: tuple,
    out,
    lse,
    sinks,
):
    """combine_columns with `together` as its round."""
    bits = cute.arch.make_warp_uniform(columns.bits)
    width, sharing = 1 << bits, sharing_of(spec, bits)
    for base in cutlass.range(columns.low, columns.high, width * together.words, unroll=1):
        step, begin = 1, base + sharing.word * together.words
        if cutlass.const_expr(spec.by_warpgroup):  # neighbours take neighbouring words: with 4 words per thread it matters
            step, begin = width, base + sharing.word
        states = gather(spec, together, words, parts, columns.high, begin, step, bits, sharing, scratch[1])
        if cutlass.const_expr(together.shares):
            merge_sharers(spec, states, bits, sharing, scratch[0])
        if begin < columns.high and sharing.leads:
            for j in cutlass.range_constexpr(together.words):
                if cutlass.const_expr(not spec.by_warpgroup) or begin + j * step < columns.high:
                    store_word(spec, states[None, j], columns, begin + j * step, out, lse, sinks)


@cute.jit
def gather(
    spec: cutlass.Constexpr,
    together: cutlass.Constexpr,
    words: cute.Tensor,
    parts: Parts,
    high: Int32,
    begin: Int32,
    step,
    bits: Int32,
    sharing: Sharing,
    declined,
):
    """Merges this thread's words, from `begin` on and `step` apart, over its parts: (columns, peak, total) x words."""
    states = cute.make_rmem_tensor((spec.word_columns + 2, together.words), Float32)
    for j in cutlass.range_constexpr(together.words):
        clear_state(states[None, j])
    others, mine = Int32(1), Int32(0)
    if cutlass.const_expr(together.shares):
        others, mine = (spec.num_warps * LANES) >> bits, sharing.part
    for base in cutlass.range(
        0, parts.count, others * together.parts, unroll=1
    ):  # all lanes of a warp loop equally often: collect syncs them
        p = base + mine
        shape = together.parts, together.words
        found, marks = cute.make_rmem_tensor((held_values(spec), *shape), Float32), cute.make_rmem_tensor(shape, Int32)
        collect(spec, words, parts, high, (begin, step), others, p, found, marks, declined)
        for j in cutlass.range_constexpr(together.words):
            if cutlass.const_expr(spec.half_words):
                merge_parts(states[None, j], found[None, None, j], marks[None, j])
            else:
                merge_parts(states[None, j], found[None, None, j])
    return states


def held_values(spec: KernelSpec) -> int:
    """Registers for a word of a part and its lse, as they come: four if its columns are in f16."""
    return (spec.word_columns // 2 if spec.half_words else spec.word_columns) + 1


@cute.jit
def store_word(
    spec: cutlass.Constexpr, state: cute.Tensor, columns: Columns, index: Int32, out: cute.Tensor, lse: cute.Tensor, sinks
):
    """Writes the columns of a combined word, and with a packed row's first word its lse."""
    place, word = place_in(spec, columns.block, quotient(index, spec.row_words)), remainder(index, spec.row_words)
    values, row_lse = normalised(state)
    if cutlass.const_expr(spec.modifiers.sinks):
        factor, row_lse = join_sink(sinks[place[-1]], row_lse)
        values = [value * factor for value in values]
    starts, width = columns_of_word(spec, word)
    if cutlass.const_expr(spec.v_head_dim % width == 0):
        runs, run = cute.zipped_divide(out[(*place, None)], (width,)), cute.make_rmem_tensor(width, out.element_type)
        for i, start in enumerate(starts):
            for c in cutlass.range_constexpr(width):
                run[c] = values[i * width + c].to(out.element_type)
            if cutlass.const_expr(spec.v_head_dim == spec.padded_v_head_dim) or start < spec.v_head_dim:
                cute.autovec_copy(run, runs[None, quotient(start, width)])
    else:
        for i in cutlass.range_constexpr(len(values)):
            column = starts[i // width] + i % width
            if column < spec.v_head_dim:
                out[(*place, column)] = values[i].to(out.element_type)
    if word == 0:
        lse[place] = row_lse * lse_factor(spec)


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
    seen: cute.Tensor,
    declined: cute.Tensor,
):
    """Waits for a chunk of this thread's parts, every `others`-th from p on, and clears their words.

    found: (columns, lse) of each; seen: their marks.

    place: (the first of the thread's words, how far the words are apart). All loads of a round are in flight together, and a
    round asks only for words that are missing.
    """
    values, chunk, count = (cutlass.const_expr(cute.size(found, mode=[mode])) for mode in range(3))
    begin, step = place
    found.fill(0.0)
    for j in cutlass.range_constexpr(count):
        for i in cutlass.range_constexpr(chunk):
            asked = (p + i * others < parts.count) & inside(begin, step, j, high)
            seen[i, j] = cutlass.select_(asked, Int32(0), WRITTEN)
            found[values - 1, i, j] = cutlass.select_(asked, found[values - 1, i, j], -Float32.inf)
            if cutlass.const_expr(spec.wide_words):
                found[0, i, j] = cutlass.select_(asked, found[0, i, j], as_float(Int32(PRESENT)))
    waiting = Boolean(True)
    while waiting:
        waiting = Boolean(False)
        for j in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(chunk):
                known = (*(found[c, i, j] for c in range(values)), seen[i, j])
                slot = slot_of_part(parts, p + i * others)
                for c, value in enumerate(receive(spec, words, begin + j * step, slot, known)):
                    if cutlass.const_expr(c < values):
                        found[c, i, j] = value
                    else:
                        seen[i, j] = value
        for j in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(chunk):
                waiting = waiting | is_missing(spec, (found[0, i, j], seen[i, j]))
    cute.arch.sync_warp()  # lanes leave that loop one by one and stay diverged: 0.1 to 0.5 us, 1 us more if shuffles follow
    signs = Int32(0)
    for j in cutlass.range_constexpr(count):
        for i in cutlass.range_constexpr(chunk):
            signs = signs | seen[i, j]
            found[0, i, j] = without_mark(spec, found[0, i, j])
            asked = (p + i * others < parts.count) & inside(begin, step, j, high)
            clear(spec, words, begin + j * step, slot_of_part(parts, p + i * others), asked)
    if signs < 0:
        for j in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(chunk):
                if seen[i, j] < 0 and p + i * others < MOST_PIECES:
                    declined[0], declined[p + i * others] = Int8(1), Int8(1)


def inside(begin: Int32, step: Int32 | int, j: int, high: Int32) -> Boolean:
    """Whether a thread's word j is one of the columns: if step is an int, all its words are, or none."""
    return (begin if isinstance(step, int) else begin + j * step) < high


def slot_of_part(parts: Parts, part: Int32) -> Int32:
    """The slot of one part."""
    return cutlass.select_(part == 0, parts.opened, parts.continued + (part - 1) * parts.stride)
