"""Rotary position embedding of rows in registers: f32 products and sums, each rounded by itself.

There is no fused multiply-add, so that PyTorch's f32 operations on the CPU give the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.append import AppendSpec, angle_columns


@cute.jit
def find_angles(position, cos_sin_cache: cute.Tensor) -> Int32:
    """The row of cos_sin_cache [max_position, rotary_dim] for a position, i32 or i64; -1 if the cache has no such row."""
    row = Int32(-1)
    if position >= 0 and position < cos_sin_cache.shape[0]:
        row = Int32(position)
    return row


@cute.jit
def rotate_row(
    spec: cutlass.Constexpr, source: cute.Tensor, cos_sin_cache: cute.Tensor, angles: Int32, lane: Int32, row: cute.Tensor
):
    """Rotates `row`, a thread's loaded part [columns, rounds] of `source` [head_dim]; leaves it unchanged if angles < 0.

    If the other column of a pair is in another thread's part, it is loaded again: from L1, with its whole piece.
    """
    if angles >= 0:
        pieces = cute.zipped_divide(source, (spec.columns,))
        table = cute.zipped_divide(cos_sin_cache[angles, None], (angle_columns(spec.columns, spec.rotary.half),))
        for r in cutlass.range_constexpr(spec.rounds):
            piece = r * spec.lanes + lane
            if piece < cutlass.const_expr(spec.rotary.rotary_dim // spec.columns):
                rotate_piece(spec, pieces, table, piece, row[None, r])


@cute.jit
def rotate_piece(spec: cutlass.Constexpr, pieces: cute.Tensor, table: cute.Tensor, piece: Int32, values: cute.Tensor):
    """Rotates the columns of one piece, in place."""
    count = cutlass.const_expr(angle_columns(spec.columns, spec.rotary.half))
    sines = cutlass.const_expr(spec.rotary.rotary_dim // 2 // count)  # pieces of cosines before the first of sines
    angle, partner, second = pairing_of(spec, piece, sines)
    cos, sin = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(table[(None,), angle], cos)
    cute.autovec_copy(table[(None,), angle + sines], sin)
    others = cute.make_rmem_tensor(spec.columns, values.element_type)
    if cutlass.const_expr(spec.rotary.half or spec.columns == 1):
        cute.autovec_copy(pieces[(None,), partner], others)
    else:
        for i in cutlass.range_constexpr(spec.columns):
            others[i] = values[i ^ 1]
    for i in cutlass.range_constexpr(spec.columns):
        pair = cutlass.const_expr(i if spec.rotary.half else i // 2)
        own, other = Float32(values[i]), Float32(others[i])
        sine = sin[pair]
        if cutlass.const_expr(spec.rotary.half or spec.columns == 1):
            sine = cutlass.select_(second, sine, -sine)
        elif cutlass.const_expr(i % 2 == 0):
            sine = -sine
        values[i] = rotated(own, cos[pair], other, sine).to(values.element_type)


def pairing_of(spec: AppendSpec, piece: Int32, sines: int) -> tuple:
    """(piece of the cosines, piece of the other columns, whether `piece` has the second column of each pair) of a row."""
    if spec.rotary.half:
        second = piece >= sines
        return cutlass.select_(second, piece - sines, piece), cutlass.select_(second, piece - sines, piece + sines), second
    if spec.columns > 1:
        return piece, piece, None
    return piece // 2, piece ^ 1, piece % 2 == 1


def rotated(own: Float32, cos: Float32, other: Float32, sin: Float32) -> Float32:
    """own * cos + other * sin, with three roundings."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 first, second; mul.rn.f32 first, {$r0}, {$r1}; mul.rn.f32 second, {$r2}, {$r3}; "
        "add.rn.f32 {$w0}, first, second; }",
        write_only_types=[Float32],
        read_only_args=[own, cos, other, sin],
    )
