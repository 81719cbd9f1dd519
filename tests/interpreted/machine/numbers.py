"""Conversions and arithmetic on 32 lanes for which numpy has no single call. Arrays hold bits unless a docstring names floats."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I8, I16, I32, I64 = np.int8, np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
LANES = 32
FULL = 0xFFFFFFFF
LANE = np.arange(LANES)
TINY = np.float32(2.0**-126)
UINTS = {1: U8, 2: U16, 4: U32, 8: U64}


def mask_of(bits: int) -> np.ndarray:
    """The mask of the lanes that a word of bits names."""
    return _mask_of(bits)


@cache
def _mask_of(bits: int) -> np.ndarray:
    return np.array([bits >> lane & 1 for lane in range(LANES)], dtype=bool)


def bits_of(mask: np.ndarray) -> int:
    """The word of bits that names the lanes of a mask."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def flushed(values: np.ndarray) -> np.ndarray:
    """f32, with zeros for subnormal numbers."""
    return np.where(np.abs(values) < TINY, np.copysign(F32(0), values), values)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in f32, rounded once except for rare ties."""
    return (np.multiply(a, b, dtype=F64) + c).astype(F32)


def bf16_of(values: np.ndarray) -> np.ndarray:
    """f32 as bf16, to nearest even; NaN as the machine has it."""
    bits = values.view(U32)
    rounded = ((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)).astype(U16)
    return np.where(np.isnan(values), U16(0x7FFF), rounded)


def f32_of_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 as f32."""
    return (bits.astype(U32) << U32(16)).view(F32)


def packed(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """A word of two halves."""
    return upper.astype(U32) << U32(16) | lower


def halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of a word."""
    return word.astype(U16), (word >> U32(16)).astype(U16)


def bf16x2_of(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Two f32 as bf16 in a word."""
    return packed(bf16_of(upper), bf16_of(lower))


def f16x2_of(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Two f32 as f16 in a word."""
    return packed(upper.astype(F16).view(U16), lower.astype(F16).view(U16))


def fma_f16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in f16, half by half, rounded once: f64 holds a product of two f16 and its sum with a third one."""
    a, b, c = (word.view(F16).astype(F64) for word in (a, b, c))
    return (a * b + c).astype(F16).view(U32)


def fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in bf16, half by half, rounded once, except where f64 does not hold the sum."""
    a, b, c = (_bf16_pairs(word).astype(F64) for word in (a, b, c))
    with np.errstate(over="ignore", invalid="ignore"):
        return bf16_of(_to_odd(a * b + c)).view(U32)


def _to_odd(values: np.ndarray) -> np.ndarray:
    """f64 as f32, where what does not fit makes the last bit 1: rounded further to 16 bits, they are as if rounded once."""
    cut = values.astype(F32)
    cut = np.where(np.abs(cut) > np.abs(values), np.nextafter(cut, F32(0)), cut)
    inexact = np.isfinite(values) & (cut != values)
    return (cut.view(U32) | inexact.astype(U32)).view(F32)


@cache
def _fp8_values(name: str) -> np.ndarray:
    stored = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    return stored.to(torch.float32).numpy().astype(F16).view(U16)


def f16x2_of_e4m3x2(pair: np.ndarray) -> np.ndarray:
    """Two e4m3 in 16 bits as two f16 in a word."""
    values = _fp8_values("float8_e4m3fn")
    return packed(values[pair >> U16(8)], values[pair & U16(0xFF)])


def f16x2_of_e5m2x2(pair: np.ndarray) -> np.ndarray:
    """Two e5m2 in 16 bits as two f16 in a word."""
    values = _fp8_values("float8_e5m2")
    return packed(values[pair >> U16(8)], values[pair & U16(0xFF)])


def _fp8_of(values: np.ndarray, name: str) -> np.ndarray:
    dtype = getattr(torch, name)
    largest = torch.finfo(dtype).max
    bits = torch.from_numpy(np.clip(values, -largest, largest)).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(values), U8(0x7F), bits).astype(U16)


def fp8x2_of(upper: np.ndarray, lower: np.ndarray, name: str) -> np.ndarray:
    """Two f32 as fp8 in 16 bits, saturated at the largest number."""
    return _fp8_of(upper, name) << U16(8) | _fp8_of(lower, name)


def s32_of(values: np.ndarray) -> np.ndarray:
    """f32 as int32, to nearest even, saturated, NaN as 0."""
    return np.clip(
        np.nan_to_num(np.rint(values.astype(F64)), nan=0.0, posinf=2.0**40, neginf=-(2.0**40)), -(2**31), 2**31 - 1
    ).astype(I32)


def rounded_up(values: np.ndarray) -> np.ndarray:
    """f64 as f32, rounded towards infinity."""
    nearest = values.astype(F32)
    return np.where(nearest.astype(F64) < values, np.nextafter(nearest, F32(np.inf)), nearest)


def ex2(values: np.ndarray) -> np.ndarray:
    """2 to the power of f32, without subnormal numbers."""
    return flushed(np.exp2(flushed(values)))


def lg2(values: np.ndarray) -> np.ndarray:
    """The logarithm to base 2 of f32."""
    return np.log2(flushed(values))


def reciprocal(values: np.ndarray) -> np.ndarray:
    """1 / f32, without subnormal numbers."""
    return flushed(F32(1) / flushed(values))


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of a and b, each chosen by a nibble of the selector; its top bit asks for copies of the sign."""
    both = b.astype(U64) << U64(32) | a
    found = np.zeros(LANES, U32)
    for place in range(4):
        nibble = selector >> U32(4 * place) & U32(0xF)
        byte = (both >> ((nibble & U32(7)).astype(U64) << U64(3)) & U64(0xFF)).astype(U32)
        byte = np.where(nibble > 7, np.where(byte > 0x7F, U32(0xFF), U32(0)), byte)
        found |= byte << U32(8 * place)
    return found


def _bf16_pairs(word: np.ndarray) -> np.ndarray:
    return f32_of_bf16(np.ascontiguousarray(word).view(U16))


def max_bf16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger of two words of two bf16; a number rather than NaN."""
    x, y = _bf16_pairs(a), _bf16_pairs(b)
    return bf16_of(np.fmax(x, y)).view(U32)


def max_nan_bf16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger of two words of two bf16; NaN if one is."""
    return bf16_of(np.maximum(_bf16_pairs(a), _bf16_pairs(b))).view(U32)


def max_nan_xorsign_abs_bf16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger magnitude of two words of two bf16, with the product of their signs; NaN if one is."""
    x, y = _bf16_pairs(a), _bf16_pairs(b)
    largest = np.maximum(np.abs(x), np.abs(y))
    negative = np.signbit(x) ^ np.signbit(y)
    return bf16_of(np.where(np.isnan(largest), largest, np.where(negative, -largest, largest))).view(U32)


def max_nan_xorsign_abs_f16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same for two words of two f16."""
    x, y = a.view(F16), b.view(F16)
    largest = np.maximum(np.abs(x), np.abs(y))
    return np.where((np.signbit(x) ^ np.signbit(y)) & ~np.isnan(largest), -largest, largest).view(U32)


def upper_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 64 bits of products of 64-bit words."""
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], U64)


def split_word(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) 32 bits of 64-bit words."""
    return word.astype(U32), (word >> U64(32)).astype(U32)


def joined_word(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """64-bit words from their halves."""
    return upper.astype(U64) << U64(32) | lower


def shift_left(value: np.ndarray, count: np.ndarray) -> np.ndarray:
    """value << count; 0 if count is at least the width."""
    width = 8 * value.dtype.itemsize
    return np.where(count < width, value << (count & U32(width - 1)).astype(value.dtype), value.dtype.type(0))


def shift_right(value: np.ndarray, count: np.ndarray) -> np.ndarray:
    """value >> count; copies of the sign if count is at least the width (0 if unsigned)."""
    width = 8 * value.dtype.itemsize
    most = value.dtype.type(0) if value.dtype.kind == "u" else value >> value.dtype.type(width - 1)
    return np.where(count < width, value >> (count & U32(width - 1)).astype(value.dtype), most)
