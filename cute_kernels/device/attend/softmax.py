"""Online softmax over the KV tiles of one warp (Milakov and Gimelshein 2018, as in FlashAttention), in base 2.

Each thread owns two rows of the m16n8 accumulators, lane / 4 and lane / 4 + 8: their maxima and its own part of their sums. The
second is left alone where the tile holds at most 8 query heads. Scores stay unscaled; (score - max) is taken before scaling,
so that logits of any size keep f32's relative precision. Or, where instructions limit, one step makes score * scale - base, with
the rounded base = max * scale: what a row's weights are relative to is the same for all, so it loses nothing but range.
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
def quad_max(value: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))


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
    row_scales: tuple,
    weights_up: tuple | None,
    known: tuple | None,
):
    """acc_s becomes exp2((acc_s - row_max) * row_scale); row_max, row_sum and acc_o move to the new maximum.

    acc_s, acc_o: f32 accumulators of one warp; row_max, row_sum: f32 [rows in use]; row_sum holds this thread's columns only.
    weights_up: (what is added to the exponent, a factor on the sum and O so far), or None.
    known: what find_bases found, or None.
    """
    scores = rows_of(acc_s)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        row = scores[r, None].load()
        if cutlass.const_expr(known is None):
            peak = row_peak(row, row_max[r])
            shift = finite_or_zero(peak)
            decay = cute.math.exp2((row_max[r] - shift) * row_scales[r], fastmath=True)
            exponents = (row - shift) * row_scales[r]
        else:
            peak, decay, offset = (values[r] for values in known)
            exponents = row * row_scales[r] - (offset if cutlass.const_expr(weights_up is None) else offset - weights_up[0])
        if cutlass.const_expr(weights_up is not None):
            if cutlass.const_expr(known is None):
                exponents = exponents + weights_up[0]
            decay = decay * weights_up[1]
        weights = cute.math.exp2(exponents, fastmath=True)
        scores[r, None].store(weights)
        row_sum[r] = weights.reduce(cute.ReductionOp.ADD, row_sum[r] * decay, 0)
        row_max[r] = peak
        rescale_row(acc_o, r, decay)


def row_peak(row: cute.TensorSSA, before: Float32) -> Float32:
    """The maximum of a row's scores, of all lanes that share it, and of the one before."""
    return quad_max(row.reduce(cute.ReductionOp.MAX, before, 0))


MOST_BASE = 2.0**20  # magnitude of a base beyond which the rest of its product may carry a weight past the range of f16


@cute.jit
def find_bases(acc_s: cute.Tensor, row_max: cute.Tensor, row_scales: list) -> tuple[list, list, list]:
    """(row_peak, what sums and O so far are multiplied by, what is taken from scaled scores) of each row in use.

    The last is the base, or past MOST_BASE 0, and the scores lose their maximum at once.
    """
    scores, rows = rows_of(acc_s), range(cute.size(row_max))
    peaks = [quad_max(largest([scores[r, c] for c in range(cute.size(scores, mode=[1]))] + [row_max[r]])) for r in rows]
    bases, decays, far = [], [], []
    for r in cutlass.range_constexpr(len(peaks)):
        bases.append(rounded_product(finite_or_zero(peaks[r]), row_scales[r]))
        before = rounded_product(row_max[r], row_scales[r])
        decays.append(cute.math.exp2(before - bases[r], fastmath=True))
        far.append(cute.arch.fmax(bases[r], -bases[r]) >= MOST_BASE)
    offsets = list(bases)
    if cute.arch.vote_any_sync(far[0] | far[-1]):
        for r in cutlass.range_constexpr(len(peaks)):  # a row's bits depend on no other
            taken = cutlass.select_(far[r], finite_or_zero(peaks[r]), Float32(0.0))
            scores[r, None].store(scores[r, None].load() - taken)
            offsets[r] = cutlass.select_(far[r], Float32(0.0), bases[r])
    return peaks, decays, offsets


def largest(values: list) -> Float32:
    """The maximum, in as few steps behind each other as can be. NaN counts as nothing: it reaches the sum by its weight."""
    while len(values) > 1:
        pairs = [cute.arch.fmax(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def rounded_product(first: Float32, second: Float32) -> Float32:
    """A product that the compiler may not fuse with what follows: each use of a base has the same one."""
    text = "mul.rn.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[first, second])


def rescale_row(acc_o: cute.Tensor, row: int, factor: Float32):
    """Multiplies one of a lane's rows of an accumulator."""
    outputs = rows_of(acc_o)
    outputs[row, None].store(outputs[row, None].load() * factor)
