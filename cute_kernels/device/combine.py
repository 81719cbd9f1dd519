"""Combines the partial states of a split row: out = sum_s w_s out_s with w_s = 2^(lse_s - lse), in split order.

One CTA per (row, query head): the warps take the splits in turn, then their sums are added in warp order. Deterministic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config import MAX_SPLITS, KernelSpec
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


def shared_layout(spec: KernelSpec) -> cute.Layout:
    """f32 in shared memory: a sum per warp and column, then a weight per split."""
    return cute.make_layout(WARPS * spec.padded_head_dim + MAX_SPLITS)


@cute.jit
def split_weights(lse_partial: cute.Tensor, num_splits: Int32, weights: cute.Tensor):
    """Writes 2^(lse_s - lse) of every split s of one row to shared memory; returns the row's lse (base 2, -inf if empty)."""
    peak = -Float32.inf
    for split in cutlass.range(cute.arch.lane_idx(), num_splits, 32):
        peak = cute.arch.fmax(peak, lse_partial[split])
    shift = finite_or_zero(cute.arch.warp_reduction_max(peak))
    total = Float32(0.0)
    for split in cutlass.range(cute.arch.lane_idx(), num_splits, 32):
        total += cute.math.exp2(lse_partial[split] - shift, fastmath=True)
    lse = cute.math.log2(cute.arch.warp_reduction_sum(total)) + shift  # log2(0) = -inf
    for split in cutlass.range(cute.arch.thread_idx()[0], num_splits, WARPS * 32):
        weights[split] = cute.math.exp2(lse_partial[split] - finite_or_zero(lse), fastmath=True)
    cute.arch.sync_threads()
    return lse


@cute.jit
def combine_row(spec: cutlass.Constexpr, partials: tuple, out: cute.Tensor, lse: cute.Tensor, num_splits: Int32, shared):
    """Combines this CTA's row and query head into out [batch, num_heads, head_dim] and lse f32 [batch, num_heads]."""
    block = cute.arch.block_idx()[0]
    heads = Int32(out.shape[1])
    row, head = block // heads, block % heads
    columns = spec.padded_head_dim
    sums = cute.make_tensor(shared.iterator, cute.make_layout((WARPS, columns), stride=(columns, 1)))
    weights = cute.make_tensor(shared.iterator + WARPS * columns, cute.make_layout(MAX_SPLITS))
    thread, lane, warp = cute.arch.thread_idx()[0], cute.arch.lane_idx(), cute.arch.warp_idx()
    total = split_weights(partials[0][None, row, head], num_splits, weights)
    vectors = cute.zipped_divide(partials[1][None, row, head, None], (1, VECTOR))
    for c in cutlass.range_constexpr(-(-columns // (32 * VECTOR))):
        column = c * 32 + lane
        if column * VECTOR < columns:
            acc = cute.make_rmem_tensor(VECTOR, Float32)
            acc.fill(0.0)
            for split in cutlass.range(warp, num_splits, WARPS, unroll=4):
                values = cute.make_rmem_tensor(VECTOR, Float32)
                cute.autovec_copy(vectors[(0, None), (split, column)], values)
                weight = weights[split]
                for i in cutlass.range_constexpr(VECTOR):
                    acc[i] += 0.0 if weight == 0.0 else weight * values[i]  # an empty split wrote no output
            for i in cutlass.range_constexpr(VECTOR):
                sums[warp, column * VECTOR + i] = acc[i]
    cute.arch.sync_threads()
    for column in cutlass.range(thread, spec.head_dim, WARPS * 32):
        value = Float32(0.0)
        for w in cutlass.range_constexpr(WARPS):
            value += sums[w, column]
        out[row, head, column] = value.to(out.element_type)
    if thread == 0:
        lse[row, head] = total if cutlass.const_expr(spec.lse_base == "2") else total * LN_2
