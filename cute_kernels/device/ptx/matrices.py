"""Loads of 8 x 8 matrices of 16-bit elements from shared memory."""

import cutlass.cute as cute
from cutlass import Int32


def load_matrices(address: Int32, turned: bool = False) -> list[Int32]:
    """A register of each of four matrices, by one ldmatrix. address: lane l has that of row l % 8 of matrix l // 8.

    A register holds two neighbours of row lane / 4, or, `turned`, of a column.
    """
    trans = ".trans" if turned else ""
    found = cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Int32] * 4,
        read_only_args=[Int32(address)],
    )
    return [found[i] for i in range(4)]
