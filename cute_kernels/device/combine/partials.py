"""Partial states in the workspace: 16-byte words that announce themselves.

A word holds two neighbouring columns of a piece's normalised output, the piece's lse (base 2) and a mark. It is written and read
as one atomic access, so a reader that sees a mark has the word: no counter, no fence (the idea of NCCL's LL protocol). A word
without a mark is zero: a workspace is zeroed once, and each launch clears every word that it has read, so that it leaves the
workspace as it found it. The mark's sign is a message (schedule/crew.py): DECLINED.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...config.decode import LINE_BYTES, SLOTS, KernelSpec

WORD = 4  # 32-bit parts: first value, second value, lse, mark
WRITTEN, DECLINED = 1, -1  # marks: a state; a state whose CTA leaves its columns to the row's last one


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


def state_bytes(spec: KernelSpec) -> Int64:
    """Bytes of all of it in a workspace, with the announcements behind the states; whole cache lines."""
    ctas = Int64(cute.arch.grid_dim()[0])
    each = state_words(spec, spec.packed_rows) * WORD * 4 * SLOTS[spec.partition] + (4 if spec.divides_combine else 0)
    return (ctas * each + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


def word_at(words: cute.Tensor, index: Int32, slot: Int32) -> cute.Pointer:
    """The word of a pair of columns in a slot."""
    return words.iterator + cute.crd2idx((0, index, slot), words.layout)


@cute.jit
def send(word: cute.Pointer, first: Float32, second: Float32, lse: Float32, mark: Int32):
    """Writes a word."""
    store_words(word.toint(), first, second, lse, mark)


def store_words(address: Int64, first, second, third, fourth):
    """Four 32-bit values in one atomic store of 16 bytes."""
    cute.arch.inline_ptx(
        "{ .reg .b64 lo, hi; .reg .b128 word; mov.b64 lo, {{$r1}, {$r2}}; mov.b64 hi, {{$r3}, {$r4}}; "
        "mov.b128 word, {lo, hi}; st.relaxed.gpu.global.b128 [{$r0}], word; }",
        read_only_args=[address, first, second, third, fourth],
    )


@cute.jit
def receive(word: cute.Pointer, known: tuple) -> tuple[Float32, Float32, Float32, Int32]:
    """Reads a word (first, second, lse, mark), unless `known` is it already: by a predicate, so that loads stay in flight."""
    return cute.arch.inline_ptx(
        "{ .reg .pred absent; .reg .b64 lo, hi; .reg .b128 word; setp.eq.s32 absent, {$r4}, 0; "
        "mov.b64 lo, {{$r1}, {$r2}}; mov.b64 hi, {{$r3}, {$r4}}; mov.b128 word, {lo, hi}; "
        "@absent ld.relaxed.gpu.global.b128 word, [{$r0}]; "
        "mov.b128 {lo, hi}, word; mov.b64 {{$w0}, {$w1}}, lo; mov.b64 {{$w2}, {$w3}}, hi; }",
        write_only_types=[Float32, Float32, Float32, Int32],
        read_only_args=[word.toint(), *known],
    )
