"""Partial states in the workspace: 16-byte words that announce themselves.

A word holds two neighbouring columns of a piece's normalised output, the piece's lse (base 2) and a tag. It is written and read
as one atomic access, so a reader that sees the tag has the word: no counter, no fence (the idea of NCCL's LL protocol). The
reader clears what it has read. The tag is random per plan: what the workspace held before its first launch is no data. Its sign
is a message (crew.py): a negative one declines.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..config import SLOTS, KernelSpec
from .registers import MAGNITUDE, SIGN

WORD = 4  # 32-bit parts: first value, second value, lse, tag


def open_workspace(spec: KernelSpec, workspace: cute.Tensor) -> cute.Tensor:
    """Words [part, pair of columns of the packed rows laid end to end, slot] of 32-bit parts; SLOTS[partition] slots a CTA.

    Balanced: slot 2c holds the piece with which CTA c continues a row, slot 2c + 1 the one with which it opens a row.
    Invariant: slot (2c + 1) MAX_BLOCKS + b holds block b of the row that CTA c opens for others, and
    2c MAX_BLOCKS + b that of the row which it works on alone.
    """
    layout = cute.make_layout((WORD, state_words(spec, spec.packed_rows), SLOTS[spec.partition] * cute.arch.grid_dim()[0]))
    return cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Int32), layout)


def state_words(spec: KernelSpec, heads: Int32 | int) -> Int32 | int:
    """Words of a state of `heads` packed rows."""
    return heads * spec.row_pairs


def declining(tag: Int32) -> Int32:
    """A tag that says that the piece's CTA leaves its columns to the row's last one."""
    return tag | Int32(SIGN)


def is_tagged(word: Int32, tag: Int32) -> Boolean:
    """Whether a word's tag is this one, of either sign."""
    return (word & Int32(MAGNITUDE)) == tag


def word_at(words: cute.Tensor, index: Int32, slot: Int32) -> cute.Pointer:
    """The word of a pair of columns in a slot."""
    return words.iterator + cute.crd2idx((0, index, slot), words.layout)


@cute.jit
def send(word: cute.Pointer, first: Float32, second: Float32, lse: Float32, tag: Int32):
    """Writes a word."""
    store_words(word.toint(), first, second, lse, tag)


def store_words(address: Int64, first, second, third, fourth):
    """Four 32-bit values in one atomic store of 16 bytes."""
    cute.arch.inline_ptx(
        "{ .reg .b64 lo, hi; .reg .b128 word; mov.b64 lo, {{$r1}, {$r2}}; mov.b64 hi, {{$r3}, {$r4}}; "
        "mov.b128 word, {lo, hi}; st.relaxed.gpu.global.b128 [{$r0}], word; }",
        read_only_args=[address, first, second, third, fourth],
    )


@cute.jit
def receive(word: cute.Pointer, tag: Int32, known: tuple) -> tuple[Float32, Float32, Float32, Int32]:
    """Reads a word (first, second, lse, tag), unless `known` is it already: by a predicate, so that loads stay in flight."""
    return cute.arch.inline_ptx(
        "{ .reg .pred absent; .reg .b32 found; .reg .b64 lo, hi; .reg .b128 word; "
        "and.b32 found, {$r4}, 0x7fffffff; setp.ne.s32 absent, found, {$r5}; "
        "mov.b64 lo, {{$r1}, {$r2}}; mov.b64 hi, {{$r3}, {$r4}}; mov.b128 word, {lo, hi}; "
        "@absent ld.relaxed.gpu.global.b128 word, [{$r0}]; "
        "mov.b128 {lo, hi}, word; mov.b64 {{$w0}, {$w1}}, lo; mov.b64 {{$w2}, {$w3}}, hi; }",
        write_only_types=[Float32, Float32, Float32, Int32],
        read_only_args=[word.toint(), *known, tag],
    )
