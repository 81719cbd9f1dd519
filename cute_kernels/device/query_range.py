"""Brings a query into the range of f16, exactly: each row times a power of two, which its scores are divided by again.

The largest magnitude of a row comes to lie in [2**15, 2**16). bf16 has fewer bits than f16, so what is rounded is 2**-29 of that
magnitude or less, by at most 2**-40 of it. The sign of K's scale goes into the query as well: a softmax scale is above zero.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..config import MMA_K
from .registers import as_bits, as_float
from .softmax import quad_max

FRAGMENT = 8  # elements of one lane's A fragment of a k16 step: (column pair, row, half of the columns)
TOP = 127 + 15 + 127  # what the exponent fields of the factor and of the row's largest magnitude add up to
MOST = 253  # exponent field of the largest factor whose inverse is normal
INVERSE = 254  # what the exponent fields of a power of two and of its inverse add up to


def load_step(shared: cute.Tensor, step: int) -> cute.Tensor:
    """This lane's fragment of a k16 step of a query [element, lane, k16 step], in registers."""
    fragment = cute.make_rmem_tensor(FRAGMENT, shared.element_type)
    cute.autovec_copy(shared[None, cute.arch.lane_idx(), step], fragment)
    return fragment


@cute.jit
def row_factors(spec: cutlass.Constexpr, shared: cute.Tensor, inverses: cute.Tensor) -> cute.Tensor:
    """Factors of this lane's rows, lane / 4 and lane / 4 + 8, f32 [2], and into `inverses` theirs. 1 where K keeps q's type."""
    factors = cute.make_rmem_tensor(2, Float32)
    if cutlass.const_expr(spec.k_bytes > 1):
        factors.fill(1.0)
        inverses.fill(1.0)
    else:
        peaks = cute.make_rmem_tensor(2, Float32)
        peaks.fill(0.0)
        for step in cutlass.range_constexpr(spec.padded_head_dim // MMA_K):
            fragment = load_step(shared, step)
            for e in cutlass.range_constexpr(FRAGMENT):
                value = fragment[e].to(Float32)
                peaks[e // 2 % 2] = cute.arch.fmax(peaks[e // 2 % 2], cute.arch.fmax(value, -value))
        for r in cutlass.range_constexpr(2):
            field = cutlass.max(1, cutlass.min(MOST, TOP - (as_bits(quad_max(peaks[r])) >> 23)))
            factors[r], inverses[r] = as_float(field << 23), as_float((INVERSE - field) << 23)
    return factors


@cute.jit
def rescaled(fragment: cute.Tensor, factors: cute.Tensor, sign: Float32, element_type: cutlass.Constexpr) -> cute.Tensor:
    """A fragment times its rows' factors and a sign (1, 0 or -1), in another type."""
    result = cute.make_rmem_tensor(FRAGMENT, element_type)
    for e in cutlass.range_constexpr(FRAGMENT):
        result[e] = (fragment[e].to(Float32) * (factors[e // 2 % 2] * sign)).to(element_type)
    return result
