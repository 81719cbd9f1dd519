"""Pairs of 16-bit values in 32-bit registers."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

from ...config.problem import ElementType
from .registers import as_float

SUFFIX = {BFloat16: "bf16x2", Float16: "f16x2"}  # of instructions


def as_words(values: cute.Tensor) -> cute.Tensor:
    """An even number of 16-bit values in registers, as half as many 32-bit words."""
    flat = cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
    return cute.recast_tensor(flat, Int32)


def widen(values: cute.Tensor) -> cute.Tensor:
    """An even number of 16-bit values in registers, as f32 of the same shape."""
    wide = cute.make_rmem_tensor(values.shape, Float32)
    words = as_words(values)
    for i in range(cute.size(words)):
        wide[2 * i], wide[2 * i + 1] = widen_pair(values.element_type, words[i])
    return wide


def widen_pair(dtype: type, pair: Int32) -> tuple[Float32, Float32]:
    """(f32 of the low half, f32 of the high half). A bf16 is the upper half of its f32, so each takes one instruction."""
    if dtype is BFloat16:
        return as_float(pair << 16), as_float(pair & -0x10000)
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=[pair])


def larger_pair(dtype: type, target: str, first: Int32, second: Int32) -> Int32:
    """The larger magnitudes of two pairs, half by half, with any sign; NaN if either value is NaN.

    From compute capability 8.6 on, this is one instruction, which takes magnitudes.
    """
    kind = SUFFIX[dtype]
    text = f"max.NaN.xorsign.abs.{kind} {{$w0}}, {{$r0}}, {{$r1}};"
    if target == "sm_80":
        text = (
            f"{{ .reg .b32 first, second; abs.{kind} first, {{$r0}}; abs.{kind} second, {{$r1}}; "
            f"max.NaN.{kind} {{$w0}}, first, second; }}"
        )
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[first, second])


def select_bytes(first: Int32, second: Int32, which: int) -> Int32:
    """Four of the eight bytes of two words. which: one nibble per byte of the result, the number of its source byte."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {which};", write_only_types=[Int32], read_only_args=[first, second]
    )


def pack(element_type: ElementType, first: Float32, second: Float32) -> Int32:
    """Two f32 rounded into one word."""
    text = f"cvt.rn.{element_type}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[first, second])
