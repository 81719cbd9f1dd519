"""What lies past a row's end: scores become -inf, and V rows become zero, whatever the bytes hold (NaN included).

A page outside the pool is a hole: no byte is read for it (K and V are zeros), and its scores become -inf.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

VECTOR = 8  # units of one 16-byte store


@cute.jit
def mask_scores(acc_s: cute.Tensor, coords: cute.Tensor, valid: Int32):
    """Scores of tokens at or past `valid` become -inf. coords: (row, token) of each accumulator element."""
    for i in cutlass.range_constexpr(cute.size(acc_s)):
        if coords[i][1] >= valid:
            acc_s[i] = -Float32.inf


@cute.jit
def mask_holes(acc_s: cute.Tensor, coords: cute.Tensor, holes: Int32, tokens: cutlass.Constexpr):
    """Scores of the tokens whose page is not in the pool become -inf. Bit b of holes stands for `tokens` tokens."""
    for i in cutlass.range_constexpr(cute.size(acc_s)):
        if (holes >> (coords[i][1] // tokens)) & 1 != 0:
            acc_s[i] = -Float32.inf


@cute.jit
def zero_rows(spec: cutlass.Constexpr, tile: cute.Tensor, valid: Int32, lane: Int32):
    """One warp zeroes rows valid.. of a tile of V [tile_n tokens, units]: 0 * NaN must not reach the output."""
    vectors = cute.zipped_divide(tile, (1, VECTOR))
    per_row = cutlass.const_expr(spec.rings[1].units // VECTOR)
    zero = cute.make_rmem_tensor(VECTOR, tile.element_type)
    zero.fill(0)
    for i in cutlass.range(valid * per_row + lane, spec.tile_n * per_row, cute.arch.WARP_SIZE):
        target = vectors[(0, None), (i // per_row, i % per_row)]
        cute.autovec_copy(zero, target)
    cute.arch.sync_warp()
