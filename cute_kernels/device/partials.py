"""Partial states in the workspace: 16-byte words that announce themselves.

A word holds two neighbouring columns of a piece's normalised output, the piece's lse (base 2) and a tag. It is written and read
as one atomic access, so a reader that sees the tag has the word: no counter, no fence (the idea of NCCL's LL protocol). The
reader clears what it has read. The tag is random per plan: what the workspace held before its first launch is no data.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config import SLOTS, KernelSpec

WORD = 4  # 32-bit parts: first value, second value, lse, tag


def open_workspace(spec: KernelSpec, workspace: cute.Tensor) -> cute.Tensor:
    """Words [part, pair of columns, packed row, slot] of 32-bit parts; SLOTS[partition] slots a CTA.

    Balanced: slot 2c holds the piece with which CTA c continues a row, slot 2c + 1 the one with which it opens a row, or a group
    that ends in it (combine.py).
    Invariant: slot (2c + 1) MAX_BLOCKS + b holds block b of the row that CTA c opens for others, and
    2c MAX_BLOCKS + b that of the row which it works on alone.
    """
    pairs, rows = spec.padded_head_dim // 2, spec.packed_rows
    layout = cute.make_layout(
        (WORD, pairs, rows, SLOTS[spec.partition] * cute.arch.grid_dim()[0]), stride=(1, WORD, WORD * pairs, WORD * pairs * rows)
    )
    return cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Int32), layout)


def pairs_of(spec: KernelSpec) -> int:
    """Pairs of columns that a thread takes together: two where a row has more pairs than the CTA threads."""
    return 1 if spec.packed_rows * spec.padded_head_dim // 2 <= spec.num_warps * 32 else 2


def word_at(words: cute.Tensor, pair: Int32, row: Int32, slot: Int32) -> cute.Pointer:
    """The word of (slot, row, pair of columns)."""
    return words.iterator + cute.crd2idx((0, pair, row, slot), words.layout)


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
        "{ .reg .pred absent; .reg .b64 lo, hi; .reg .b128 word; setp.ne.s32 absent, {$r4}, {$r5}; "
        "mov.b64 lo, {{$r1}, {$r2}}; mov.b64 hi, {{$r3}, {$r4}}; mov.b128 word, {lo, hi}; "
        "@absent ld.relaxed.gpu.global.b128 word, [{$r0}]; "
        "mov.b128 {lo, hi}, word; mov.b64 {{$w0}, {$w1}}, lo; mov.b64 {{$w2}, {$w3}}, hi; }",
        write_only_types=[Float32, Float32, Float32, Int32],
        read_only_args=[word.toint(), *known, tag],
    )
