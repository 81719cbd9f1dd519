"""Online softmax over the KV tiles of one warp (Milakov and Gimelshein 2018, as in FlashAttention), in base 2.

Each thread owns two rows of the m16n8 accumulators, lane / 4 and lane / 4 + 8: their maxima and its own part of their sums. The
second row is left alone if the tile holds at most 8 query heads. Scores stay unscaled; (score - max) is taken before scaling,
so that logits of any size keep f32's relative precision. Where instructions are the limit, bases.py is used instead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def rows_of(acc: cute.Tensor) -> cute.Tensor:
    """Views an accumulator ((column pair, row pair), 1, n) as (2 rows, columns) of this thread."""
    layout = acc.layout
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            (layout.shape[0][1], (layout.shape[0][0], layout.shape[2])),
            stride=(layout.stride[0][1], (layout.stride[0][0], layout.stride[2])),
        ),
    )


@cute.jit
def quad_max(value: Float32, nan: cutlass.Constexpr = False) -> Float32:
    """Maximum over the four lanes that share a row. nan: whether a NaN is the maximum; else NaNs are ignored."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1), nan=nan)
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2), nan=nan)


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


@cute.jit
def finite_or_zero(value: Float32) -> Float32:
    """-inf (nothing seen yet) becomes 0, so that differences of maxima are never NaN."""
    return 0.0 if value == -Float32.inf else value


@cute.jit
def online_softmax(
    acc_s: cute.Tensor,
    acc_o: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    row_scales: list,
    weights_up,
):
    """acc_s becomes exp2((acc_s - row_max) * row_scales[row]); row_max, row_sum and acc_o move to the new maximum.

    acc_s, acc_o: f32 accumulators of one warp; row_max, row_sum: f32 [rows in use]; row_sum holds this thread's columns only.
    weights_up: attend.weights_up, with one factor for sums and O.
    """
    scores = rows_of(acc_s)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        row = scores[r, None].load()
        peak = quad_max(row.reduce(cute.ReductionOp.MAX, row_max[r], 0))
        shift = finite_or_zero(peak)
        decay = cute.math.exp2((row_max[r] - shift) * row_scales[r], fastmath=True)
        exponents = (row - shift) * row_scales[r]
        if cutlass.const_expr(weights_up is not None):
            exponents = exponents + weights_up.term
            decay = decay * weights_up.outputs
        weights = cute.math.exp2(exponents, fastmath=True)
        scores[r, None].store(weights)
        row_sum[r] = weights.reduce(cute.ReductionOp.ADD, row_sum[r] * decay, 0)
        row_max[r] = peak
        rescale_row(acc_o, r, decay)


def rescale_row(acc_o: cute.Tensor, row: int, factor: Float32):
    """Multiplies one of a lane's rows of an accumulator by `factor`."""
    outputs = rows_of(acc_o)
    outputs[row, None].store(outputs[row, None].load() * factor)
