"""Merges the warps' states and stores a row: the final output, or one split's partial state.

An (out, lse) state is normalised: out = sum(p v) / sum(p), lse = log(sum(p)). The merge runs in warp order, so it is
deterministic; an empty state is (0, -inf) and weighs nothing.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..config import TILE_M, KernelSpec
from .attend import WarpState
from .softmax import finite_or_zero, quad_sum, rows_of

LN_2 = math.log(2.0)


def state_layouts(spec: KernelSpec) -> tuple:
    """Shared memory of the merge, f32: O [row, column, warp], then row_max and row_sum [row, warp]."""
    warps, columns = spec.num_warps, spec.padded_head_dim
    acc = cute.make_layout((TILE_M, columns, warps), stride=(columns, 1, TILE_M * columns))
    return acc, cute.make_layout((TILE_M, warps))


@cute.jit
def share_state(spec: cutlass.Constexpr, base: cute.Pointer, thr_mma, state: WarpState, heads: Int32):
    """Every warp writes its state; `base` is the start of the ring, which all warps have finished reading."""
    acc_layout, row_layout = state_layouts(spec)
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    acc = cute.make_tensor(base, acc_layout)
    row_max = cute.make_tensor(base + cute.cosize(acc_layout), row_layout)
    row_sum = cute.make_tensor(base + cute.cosize(acc_layout) + cute.cosize(row_layout), row_layout)
    outputs = rows_of(state.acc_o)
    coords = rows_of(thr_mma.partition_C(cute.make_identity_tensor((TILE_M, spec.padded_head_dim))))
    for r in cutlass.range_constexpr(2):
        total = quad_sum(state.row_sum[r])
        row = lane // 4 + 8 * r
        if row < heads:
            for c in cutlass.range_constexpr(cute.size(outputs, mode=[1])):
                acc[row, coords[r, c][1], warp] = outputs[r, c]
            if lane % 4 == 0:
                row_max[row, warp] = state.row_max[r]
                row_sum[row, warp] = total
    return acc, row_max, row_sum


@cute.jit
def merge_row(spec: cutlass.Constexpr, acc, row_max, row_sum, row: Int32, scale_log2: Float32):
    """Weights of the warps' states of one row, and its lse in base 2 (-inf when empty)."""
    weights = cute.make_rmem_tensor(spec.num_warps, Float32)
    peak = -Float32.inf
    for w in cutlass.range_constexpr(spec.num_warps):
        peak = cute.arch.fmax(peak, row_max[row, w])
    shift = finite_or_zero(peak)
    total = Float32(0.0)
    for w in cutlass.range_constexpr(spec.num_warps):
        weights[w] = cute.math.exp2((row_max[row, w] - shift) * scale_log2, fastmath=True)
        total += weights[w] * row_sum[row, w]
    lse = cute.math.log2(total) + shift * scale_log2  # log2(0) = -inf
    inverse = Float32(0.0) if total == 0.0 else 1.0 / total  # 0: an empty state; NaN is not one
    for w in cutlass.range_constexpr(spec.num_warps):
        weights[w] = weights[w] * inverse
    return weights, lse


@cute.jit
def store_state(spec: cutlass.Constexpr, shared: tuple, target, target_lse, heads: Int32, scale_log2: Float32):
    """Merges the warps' states into target [rows, columns] (any dtype) and target_lse f32 [rows], in target_lse's base.

    target_lse takes base 2 for a partial state, the descriptor's base for a final one.
    """
    acc, row_max, row_sum = shared
    columns = cute.size(target, mode=[1])
    width = 2 if cutlass.const_expr(columns % 2 == 0) else 1
    per_row = cutlass.const_expr(columns // width)
    thread = cute.arch.thread_idx()[0]
    values = cute.make_rmem_tensor(width, target.element_type)
    targets = cute.zipped_divide(target, (1, width))
    for i in cutlass.range(thread, heads * per_row, spec.num_warps * 32):
        row, column = i // per_row, i % per_row
        weights, lse = merge_row(spec, acc, row_max, row_sum, row, scale_log2)
        for c in cutlass.range_constexpr(width):
            value = Float32(0.0)
            for w in cutlass.range_constexpr(spec.num_warps):
                value += weights[w] * acc[row, column * width + c, w]
            values[c] = value.to(target.element_type)
        cute.autovec_copy(values, targets[(0, None), (row, column)])
        if column == 0:
            target_lse[row] = lse if cutlass.const_expr(spec.split or spec.lse_base == "2") else lse * LN_2
