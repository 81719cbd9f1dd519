"""Partial results of KV splits in the workspace: words that each carry a mark for their reader.

A state is the normalised output and the lse (base 2) of a piece (a KV split). It is written and read in words. Each word is one
atomic access and carries a mark (a flag): a reader that sees the mark has the word, with no counter and no fence (the idea of
NCCL's LL protocol). A word without a mark is zero: a workspace is zeroed once, and each launch clears every word that it has
read, so that it leaves the workspace as it found it. The sign of a mark next to an lse is a message (schedule/crew.py): DECLINED.

Narrow words, of 16 bytes, hold two columns, the lse and a mark. Wide words hold four columns, of which the first gives its lowest
bit for a mark, or eight in f16 (halves.py). After all wide words come words of 8 bytes with an lse and its mark, one for so many
wide words (KernelSpec.words_an_lse) that it has one reader.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8

from ...config.decode import LINE_BYTES, SLOTS, KernelSpec
from ..ptx.policies import EVICT_LAST
from ..ptx.registers import as_bits, as_float, quotient, remainder
from .halves import as_halves

WORD = 4  # 32-bit parts of a word of 16 bytes
WRITTEN, DECLINED = 1, -1  # marks, or signs of marks: a state; a state whose CTA leaves its columns to the row's last CTA
PRESENT = 1  # the bit that marks a wide word of f32


def open_workspace(spec: KernelSpec, workspace: cute.Tensor) -> cute.Tensor:
    """The states, Int32 [part of 16 bytes, word of the packed rows laid end to end, slot]: SLOTS[partition] slots per CTA.

    Dealt pieces: slot i holds item i of the launch, then counts of arrivals at the m-tiles of its block (combine/pieces.py).

    Balanced: slot 2c holds the piece with which CTA c continues a row, slot 2c + 1 the piece with which it opens a row.
    Invariant: slot (2c + 1) MAX_BLOCKS + b holds block b of the row that CTA c opens for others, and
    slot 2c MAX_BLOCKS + b holds block b of the row that it works on alone.
    """
    layout = cute.make_layout((WORD, spec.state_words, SLOTS[spec.partition] * cute.arch.grid_dim()[0]))
    return cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Int32), layout)


def state_bytes(spec: KernelSpec) -> Int64:
    """Bytes of all states and the announcements after them, in whole cache lines."""
    ctas = Int64(cute.arch.grid_dim()[0])
    each = spec.state_words * WORD * 4 * SLOTS[spec.partition] + (4 if spec.divides_combine else 0)
    return (ctas * each + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


def workspace_from(workspace: cute.Tensor, begin: Int64) -> cute.Tensor:
    """The workspace from byte `begin` on, which is a whole number of cache lines after its start.

    The start is a multiple of 16 bytes. `Pointer.align` would round the address up, and so move the last words past the end.
    """
    start = (workspace.iterator + begin).toint()
    return cute.make_tensor(cute.make_ptr(Uint8, start, cute.AddressSpace.gmem, assumed_align=4 * WORD), workspace.layout)


def columns_of_word(spec: KernelSpec, word: Int32) -> tuple[list[Int32], int]:
    """(where the runs of neighbouring columns of a packed row's word begin, columns per run).

    If states go to memory from registers, a word has a lane's columns, two of each of two n8 steps, or of four in f16.
    """
    if spec.settles_alone or spec.settles_halves:
        steps = spec.word_columns // 2
        first = quotient(word, 4) * (8 * steps) + remainder(word, 4) * 2
        return [first + 8 * step for step in range(steps)], 2
    return [word * spec.word_columns], spec.word_columns


def word_of_column(spec: KernelSpec, column: Int32) -> Int32:
    """The word of a packed row whose first run begins at `column`."""
    if spec.settles_alone or spec.settles_halves:
        together = 4 * spec.word_columns  # of the four lanes of a row
        return quotient(column, together) * 4 + quotient(remainder(column, together), 2)
    return quotient(column, spec.word_columns)


def word_at(words: cute.Tensor, index: Int32, slot: Int32) -> Int64:
    """The address of a word of a slot."""
    return Int64((words.iterator + cute.crd2idx((0, index, slot), words.layout)).toint())


def lse_at(spec: KernelSpec, words: cute.Tensor, index: Int32, slot: Int32) -> Int64:
    """The address of the lse of a wide word."""
    return word_at(words, spec.packed_rows * spec.row_words, slot) + quotient(index, spec.words_an_lse) * 8


@cute.jit
def send(
    spec: cutlass.Constexpr,
    words: cute.Tensor,
    index: Int32,
    slot: Int32,
    values: list,
    lse: Float32,
    mark: Int32,
    there: Boolean | None = None,
):
    """Writes a word, and with the first of the words that share an lse also that lse.

    there: whether there is such a word, None if always: where lanes find a power of two together (halves.py), all call it.
    """
    address = word_at(words, index, slot)
    if cutlass.const_expr(spec.half_words):
        pairs, field = as_halves(spec, values)
        store_words(address, *pairs, there)
        store_pair(lse_at(spec, words, index, slot), lse, mark * field, with_lse(spec, index, there))
    elif cutlass.const_expr(spec.wide_words):
        store_words(address, as_float(as_bits(values[0]) | PRESENT), *values[1:])
        store_pair(lse_at(spec, words, index, slot), lse, mark, with_lse(spec, index))
    else:
        store_words(address, *values, lse, mark)


@cute.jit
def clear(spec: cutlass.Constexpr, words: cute.Tensor, index: Int32, slot: Int32, there: Boolean):
    """Zeroes a word, if it is `there`, and its lse, marks included. Neighbouring lanes call it once all have read theirs.

    L2 keeps the states of a row that CTAs combine together: they poll for words that are not written yet, and where a kernel
    that streams weights has evicted these, a poll takes as long as a read of memory (64 rows over 8 bits 2 us sooner behind it).
    """
    nothing, kept = Float32(0.0), cutlass.const_expr(spec.divides_combine and spec.target == "sm_90a")
    store_words(word_at(words, index, slot), nothing, nothing, nothing, Int32(0), there, kept)
    if cutlass.const_expr(spec.wide_words):
        store_pair(lse_at(spec, words, index, slot), nothing, Int32(0), with_lse(spec, index, there), kept)


def with_lse(spec: KernelSpec, index: Int32, there: Boolean | None = None) -> Boolean | None:
    """Whether a wide word, if it is `there`, is the first of those that share an lse; None if always."""
    if spec.words_an_lse == 1:
        return there
    first = remainder(index, spec.words_an_lse) == 0
    return first if there is None else there & first


def store_words(address: Int64, first, second, third, fourth, there: Boolean | None = None, kept: bool = False):
    """Four 32-bit values in one atomic store of 16 bytes. there: whether to store them, None if always. kept: as in store."""
    before = ".reg .b64 lo, hi; .reg .b128 word; mov.b64 lo, {{$r1}, {$r2}}; mov.b64 hi, {{$r3}, {$r4}}; mov.b128 word, {lo, hi};"
    store(before, "b128", "word", [address, first, second, third, fourth], there, kept)


def store_pair(address: Int64, lse: Float32, mark: Int32, there: Boolean | None = None, kept: bool = False):
    """An lse and its mark in one atomic store of 8 bytes. there, kept: as in store_words."""
    store(".reg .b64 pair; mov.b64 pair, {{$r1}, {$r2}};", "b64", "pair", [address, lse, mark], there, kept)


def store(before: str, kind: str, value: str, args: list, there: Boolean | None, kept: bool):
    """Stores a value that the PTX `before` makes, if `there` holds. By a predicate: a branch for each store is slow.

    kept: whether L2 keeps the line longer than others.
    """
    hint = policy = ""
    if kept:
        before, hint, policy = f"{before} .reg .b64 policy; mov.b64 policy, {EVICT_LAST:#x};", ".L2::cache_hint", ", policy"
    text = f"st.relaxed.gpu.global{hint}.{kind} [{{$r0}}], {value}{policy};"
    if there is not None:
        text, args = f"@{{$r{len(args)}}} {text}", [*args, there]
    cute.arch.inline_ptx(f"{{ {before} {text} }}", read_only_args=args)


def receive(spec: KernelSpec, words: cute.Tensor, index: Int32, slot: Int32, known: tuple) -> tuple:
    """Reads a word (its columns, the lse, a mark), unless `known` has it already: by predicates, so that loads stay in flight."""
    if not spec.wide_words:
        address = word_at(words, index, Int32(0)), slot_bytes(words, slot)
        return load_words(address, "setp.eq.s32 absent, {$r5}, 0; ", known, Int32)
    lse = lse_at(spec, words, index, Int32(0)), slot_bytes(words, slot)
    return *receive_columns(spec, words, index, slot, known[:4]), *load_pair(lse, known[4:])


def receive_columns(spec: KernelSpec, words: cute.Tensor, index: Int32, slot: Int32, known: tuple) -> tuple:
    """As `receive`, a wide word alone: its four columns, or four pairs of them."""
    address = word_at(words, index, Int32(0)), slot_bytes(words, slot)
    test = ".reg .b32 mark; and.b32 mark, {$r2}, 1; setp.eq.s32 absent, mark, 0; "
    if spec.half_words:
        test = ".reg .b32 first; mov.b32 first, {$r2}; setp.eq.s32 absent, first, 0; "
    return load_words(address, test, known, Float32)


def slot_bytes(words: cute.Tensor, slot: Int32) -> Int64:
    """Bytes from slot 0 to a slot."""
    return Int64(slot) * (4 * words.stride[2])


def load_words(address: tuple[Int64, Int64], test: str, known: tuple, last: type) -> tuple:
    """Four 32-bit values, the last of type `last`: by one atomic load if `test` sets absent, else from `known`.

    address: two summands. Their sum is formed here, or the compiler would hold one for each load of a loop in registers.
    """
    return cute.arch.inline_ptx(
        f"{{ .reg .pred absent; .reg .b64 at, lo, hi; .reg .b128 word; {test}"
        "mov.b64 lo, {{$r2}, {$r3}}; mov.b64 hi, {{$r4}, {$r5}}; mov.b128 word, {lo, hi}; "
        "add.s64 at, {$r0}, {$r1}; @absent ld.relaxed.gpu.global.b128 word, [at]; "
        "mov.b128 {lo, hi}, word; mov.b64 {{$w0}, {$w1}}, lo; mov.b64 {{$w2}, {$w3}}, hi; }",
        write_only_types=[Float32, Float32, Float32, last],
        read_only_args=[*address, *known],
    )


def load_pair(address: tuple[Int64, Int64], known: tuple) -> tuple[Float32, Int32]:
    """An lse and its mark: by one atomic load if `known` lacks the mark, else `known`. address: as in load_words."""
    return cute.arch.inline_ptx(
        "{ .reg .pred absent; .reg .b64 at, pair; setp.eq.s32 absent, {$r3}, 0; mov.b64 pair, {{$r2}, {$r3}}; "
        "add.s64 at, {$r0}, {$r1}; @absent ld.relaxed.gpu.global.b64 pair, [at]; mov.b64 {{$w0}, {$w1}}, pair; }",
        write_only_types=[Float32, Int32],
        read_only_args=[*address, *known],
    )


def is_missing(spec: KernelSpec, known: tuple) -> Boolean:
    """Whether a word that `receive` returned lacks its mark, or its lse's mark."""
    missing = known[-1] == 0
    if not spec.wide_words:
        return missing
    first = as_bits(known[0])
    return missing | ((first if spec.half_words else first & PRESENT) == 0)


def without_mark(spec: KernelSpec, first: Float32) -> Float32:
    """The first column of a received word without the mark, or the first pair."""
    return as_float(as_bits(first) & ~PRESENT) if spec.wide_words and not spec.half_words else first
