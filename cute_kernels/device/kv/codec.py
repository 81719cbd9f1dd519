"""The meaning of a cache's bits: a 32-bit register of a tile, as ldmatrix gives it, becomes operands of the MMA.

16-bit elements are operands as they are. With 8-bit elements, a register of K holds four neighbouring columns of one token, and a
register of V, transposed, holds two columns of each of two tokens. Both become two registers of two f16, which hold every 8-bit
element exactly, or of two bf16, which hold every int8. K splits into its lower and upper half; V into its even and odd bytes, so
that each result is two tokens of one column.
"""

import cutlass.cute as cute
from cutlass import Int32

HALVES, PARITIES = ("10", "32"), ("20", "31")  # bytes of each register, the upper first
E4M3_TO_F16 = "0x5C005C00"  # 2 ** (15 - 7), twice: for the difference of the exponent biases
INT8_TO_BF16, INT8_OFFSET = "0x7E807E80", "0xBF80BF80"  # 2 ** 126 and -1 in bf16, twice (decode_to_bf16)
INT8_BIAS = "0x64806480"  # 1024 + 128, twice: subtracted from 1024 + an int8 whose sign bit is flipped, it leaves the int8


def decode(types: tuple[str, str], by_instruction: bool, word: Int32, pairs: tuple[str, str]) -> tuple[Int32, Int32]:
    """Two registers of 16 bits from one register of 8-bit elements.

    types: (stored, of the products: f16, or bf16 for int8); pairs: HALVES or PARITIES; by_instruction: for e4m3, on SM90.
    """
    stored_type, math = types
    if math == "bf16":
        return decode_to_bf16(word, pairs)
    if stored_type == "int8":
        text = _int8(pairs)
    elif stored_type == "e5m2":
        text = " ".join(_e5m2(i, pair) for i, pair in enumerate(pairs))
    elif by_instruction:
        text = _e4m3(pairs)
    else:
        text = " ".join(_e4m3_in_integers(i, pair) for i, pair in enumerate(pairs))
    return cute.arch.inline_ptx(f"{{ {text} }}", write_only_types=[Int32, Int32], read_only_args=[word])


def decode_to_bf16(word: Int32, pairs: tuple[str, str]) -> tuple[Int32, Int32]:
    """Two registers of bf16 from one register of int8, times 2 ** -INT8_POWER.

    An int8 k with its sign bit flipped, as the lowest byte of a bf16, is (k + 128) 2**-133: up to 2**-126 bf16 has equal steps.
    """
    text = f"mov.b32 {{$w0}}, {INT8_TO_BF16}; mov.b32 {{$w1}}, {INT8_OFFSET};"
    constants = cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[])
    return decode_scaled("bf16", word, pairs, *constants)


def decode_scaled(math: str, word: Int32, pairs: tuple[str, str], factor: Int32, offset: Int32) -> tuple[Int32, Int32]:
    """As `decode` of int8, times scales. factor, offset: of type `math` for each half of both results (value_scales.py)."""
    lines = [".reg .b32 x, y;", "xor.b32 x, {$r0}, 0x80808080;"]
    for i, (upper, lower) in enumerate(pairs):
        lines.append(f"prmt.b32 y, x, 0, 0x4{upper}4{lower}; fma.rn.{math}x2 {{$w{i}}}, y, {{$r1}}, {{$r2}};")
    text = f"{{ {' '.join(lines)} }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[word, factor, offset])


def _int8(pairs: tuple[str, str]) -> str:
    lines = [".reg .b32 x, y, bias;", f"xor.b32 x, {{$r0}}, 0x80808080; mov.b32 bias, {INT8_BIAS};"]
    for i, (upper, lower) in enumerate(pairs):
        lines.append(f"prmt.b32 y, x, 0x64646464, 0x4{upper}4{lower}; sub.f16x2 {{$w{i}}}, y, bias;")
    return " ".join(lines)


def _e5m2(index: int, pair: str) -> str:
    """e5m2 is the upper half of an f16."""
    return f"prmt.b32 {{$w{index}}}, {{$r0}}, 0, 0x{pair[0]}4{pair[1]}4;"


def _e4m3(pairs: tuple[str, str]) -> str:
    lines = [".reg .b32 x; .reg .b16 lower, upper;"]
    lines.append(f"prmt.b32 x, {{$r0}}, 0, 0x{pairs[1]}{pairs[0]};" if pairs != HALVES else "mov.b32 x, {$r0};")
    lines.append("mov.b32 {lower, upper}, x;")
    lines += [f"cvt.rn.f16x2.e4m3x2 {{$w{i}}}, {half};" for i, half in enumerate(("lower", "upper"))]
    return " ".join(lines)


def _e4m3_in_integers(index: int, pair: str) -> str:
    """e4m3 bits, shifted down one place, are an f16 of 2 ** -8 times the value; the carry out of a NaN sets NaN's exponent."""
    return (
        "{ .reg .b32 x, sign, size, carry, factor; "
        f"prmt.b32 x, {{$r0}}, 0, 0x{pair[0]}4{pair[1]}4; and.b32 sign, x, 0x80008000; "
        "shr.u32 size, x, 1; and.b32 size, size, 0x3F803F80; "
        "add.u32 carry, size, 0x00800080; and.b32 carry, carry, 0x40004000; "
        f"or.b32 size, size, carry; or.b32 size, size, sign; mov.b32 factor, {E4M3_TO_F16}; "
        f"mul.f16x2 {{$w{index}}}, size, factor; }}"
    )
