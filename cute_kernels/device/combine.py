"""Combines the partial states of a split row: out = sum_s w_s out_s with w_s = 2^(lse_s - lse), in split order.

One CTA per (row, query head): the warps take the splits in turn, then their sums are added in warp order. Deterministic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config import KernelSpec
from .epilogue import LN_2
from .softmax import finite_or_zero

WARPS = 4
VECTOR = 4  # f32 elements of one 16-byte load


def open_partials(spec: KernelSpec, workspace: cute.Tensor, batch: Int32, heads: Int32, num_splits: Int32) -> tuple:
    """The workspace: lse_partial f32 [split, batch, head] (base 2), then out_partial f32 [split, batch, head, column]."""
    columns = spec.padded_head_dim
    states = Int64(batch) * heads
    base = cute.recast_ptr(workspace.iterator, dtype=Float32)
    offset = cute.assume((states * num_splits + 31) // 32 * 32, divby=32)
    shape = (num_splits, batch, heads)
    lse = cute.make_tensor(base, cute.make_layout(shape, stride=(states, Int64(heads), 1)))
    strides = (cute.assume(states * columns, divby=16), cute.assume(Int64(heads) * columns, divby=16), columns, 1)
    return lse, cute.make_tensor(base + offset, cute.make_layout((*shape, columns), stride=strides))


@cute.jit
def combine_row(spec: cutlass.Constexpr, partials: tuple, out: cute.Tensor, lse: cute.Tensor, num_splits: Int32, sums):
    """Combines this CTA's row and query head into out [batch, num_heads, head_dim] and lse f32 [batch, num_heads].

    sums: shared f32 [WARPS, padded head_dim].
    """
    lse_partial, out_partial = partials
    block = cute.arch.block_idx()[0]
    heads = Int32(out.shape[1])
    row, head = block // heads, block % heads
    thread, lane, warp = cute.arch.thread_idx()[0], cute.arch.lane_idx(), cute.arch.warp_idx()
    peak = -Float32.inf
    for split in cutlass.range(lane, num_splits, 32):
        peak = cute.arch.fmax(peak, lse_partial[split, row, head])
    peak = cute.arch.warp_reduction_max(peak)
    shift = finite_or_zero(peak)
    total = Float32(0.0)
    for split in cutlass.range(lane, num_splits, 32):
        total += cute.math.exp2(lse_partial[split, row, head] - shift, fastmath=True)
    total = cute.arch.warp_reduction_sum(total)
    vectors = cute.zipped_divide(out_partial[None, row, head, None], (1, VECTOR))
    chunks = cutlass.const_expr(-(-spec.padded_head_dim // (32 * VECTOR)))
    acc = cute.make_rmem_tensor((VECTOR, chunks), Float32)
    acc.fill(0.0)
    for split in cutlass.range(warp, num_splits, WARPS, unroll=4):
        lse_split = lse_partial[split, row, head]
        if lse_split != -Float32.inf:  # an empty split wrote no output
            weight = cute.math.exp2(lse_split - shift, fastmath=True)
            for c in cutlass.range_constexpr(chunks):
                column = c * 32 + lane
                if column * VECTOR < spec.padded_head_dim:
                    values = cute.make_rmem_tensor(VECTOR, Float32)
                    cute.autovec_copy(vectors[(0, None), (split, column)], values)
                    acc[None, c].store(acc[None, c].load() + values.load() * weight)
    for c in cutlass.range_constexpr(chunks):
        column = c * 32 + lane
        if column * VECTOR < spec.padded_head_dim:
            for i in cutlass.range_constexpr(VECTOR):
                sums[warp, column * VECTOR + i] = acc[i, c]
    cute.arch.sync_threads()
    inverse = 1.0 / total
    value_lse = cute.math.log2(total) + shift
    if peak == -Float32.inf:
        inverse = Float32(0.0)
        value_lse = -Float32.inf
    for column in cutlass.range(thread, spec.head_dim, WARPS * 32):
        value = Float32(0.0)
        for w in cutlass.range_constexpr(WARPS):
            value += sums[w, column]
        out[row, head, column] = (value * inverse).to(out.element_type)
    if thread == 0:
        lse[row, head] = value_lse if cutlass.const_expr(spec.lse_base == "2") else value_lse * LN_2
