"""Brings a query into the range of f16, exactly: each row times a power of two, which its scores are divided by again.

The largest magnitude of a row comes to lie in [2**15, 2**16). bf16 has fewer bits than f16, so what is rounded is 2**-29 of that
magnitude or less, by at most 2**-40 of it. The sign of K's scale goes into the query as well: a softmax scale is above zero.
"""

from collections.abc import Callable
from itertools import product

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..config import MMA_K, ElementType, KernelSpec
from .registers import as_bits, as_float
from .softmax import quad_max
from .tracing import ELEMENT_TYPES

FRAGMENT = 8  # elements of one lane's A fragment of a k16 step: (column pair, row, half of the columns)
TOP = 127 + 15 + 127  # what the exponent fields of the factor and of the row's largest magnitude add up to
MOST = 253  # exponent field of the largest factor whose inverse is normal
INVERSE = 254  # what the exponent fields of a power of two and of its inverse add up to


def load_step(shared: cute.Tensor, step: int) -> cute.Tensor:
    """This lane's fragment of a k16 step of a query [element, lane, k16 step], in registers."""
    fragment = cute.make_rmem_tensor(FRAGMENT, shared.element_type)
    cute.autovec_copy(shared[None, cute.arch.lane_idx(), step], fragment)
    return fragment


def words_of(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment as 32-bit words, pairs of columns: [row, half of the columns]."""
    return cute.make_tensor(cute.recast_ptr(fragment.iterator, dtype=Int32), cute.make_layout((2, FRAGMENT // 4)))


def row_factors(spec: KernelSpec, load: Callable[[int], cute.Tensor], inverses: cute.Tensor) -> cute.Tensor:
    """Factors of this lane's rows in use, f32, and into `inverses` theirs; 1 where K keeps q's type.

    load: gives the fragment of a k16 step.
    """
    factors = cute.make_rmem_tensor(spec.lane_rows, Float32)
    factors.fill(1.0)
    inverses.fill(1.0)
    if spec.k_bytes == 1:
        peaks = [Int32(0)] * spec.lane_rows
        for step in range(spec.padded_head_dim // MMA_K):
            words = words_of(load(step))
            for row, half in product(range(spec.lane_rows), range(FRAGMENT // 4)):
                peaks[row] = larger_magnitudes(spec, peaks[row], words[row, half])
        for row, peak in enumerate(peaks):
            field = cutlass.max(1, cutlass.min(MOST, TOP - (as_bits(quad_max(larger_of_pair(spec, peak))) >> 23)))
            factors[row], inverses[row] = as_float(field << 23), as_float((INVERSE - field) << 23)
    return factors


def larger_magnitudes(spec: KernelSpec, peaks: Int32, pair: Int32) -> Int32:
    """Of two pairs, the larger magnitude in each place. peaks: without signs."""
    text = (
        "{ .reg .b32 before, magnitudes; mov.b32 before, {$r0}; and.b32 magnitudes, {$r1}, 0x7fff7fff; "
        f"max.{spec.element_type}x2 {{$w0}}, before, magnitudes; }}"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[peaks, pair])


def larger_of_pair(spec: KernelSpec, pair: Int32) -> Float32:
    """The larger of a pair."""
    word = cute.make_rmem_tensor(1, Int32)
    word[0] = pair
    elements = cute.make_tensor(cute.recast_ptr(word.iterator, dtype=ELEMENT_TYPES[spec.element_type]), cute.make_layout(2))
    first, second = elements[0].to(Float32), elements[1].to(Float32)
    return cute.arch.fmax(first, second)


def rescaled(spec: KernelSpec, fragment: cute.Tensor, factors: cute.Tensor, sign: Float32) -> cute.Tensor:
    """A fragment times its rows' factors and a sign (1, 0 or -1), in the type that Q K^T is computed in."""
    result = cute.make_rmem_tensor(FRAGMENT, ELEMENT_TYPES[spec.k_math])
    words, source = words_of(result), words_of(fragment)
    for row, half in product(range(2), range(FRAGMENT // 4)):
        words[row, half] = source[row, half]  # zero where a row is not in use
        if row < spec.lane_rows:
            pair = [fragment[4 * half + 2 * row + c].to(Float32) * (factors[row] * sign) for c in range(2)]
            words[row, half] = pair_of(*pair, spec.k_math)
    return result


def pair_of(first: Float32, second: Float32, target: ElementType) -> Int32:
    """Two f32 rounded into one word, by an instruction that stays where it is: the compiler would sink it into a loop."""
    text = f"cvt.rn.{target}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[first, second])
