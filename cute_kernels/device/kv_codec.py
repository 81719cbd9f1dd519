"""What the bits of a cache mean: a 32-bit register of a tile, as ldmatrix gives it, becomes operands of the MMA.

16-bit elements are operands as they are. Of 8 bits, a register of K holds four neighbouring columns of one token, and one of V,
transposed, two columns of each of two tokens. Both become two registers of two f16, which hold every such element exactly:
of K the lower and the upper half, of V the even and the odd bytes, so that each is two tokens of one column.

An int8 of V with a scale a token becomes the subnormal f16 (value + 128) 2**-24: its byte with the sign flipped, below a byte of
zeros. What that adds to P V is the same in all columns, P times a matrix of 128 2**-24: a tensor-core step for 16 tokens finds
it (owed), where subtractions would be as many instructions as the rest of the conversion. O then rounds as if each token had a
value of 128 times its scale, which is what a scale a token says, to 1 in 127. Other scales do not, nor does a query for K.
"""

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ..config import Arch, KernelSpec

HALVES, PARITIES = ("10", "32"), ("20", "31")  # bytes of each register, the upper first
E4M3_TO_F16 = "0x5C005C00"  # 2 ** (15 - 7), twice: between the biases of the exponents
INT8_BIAS = "0x64806480"  # 1024 + 128, twice: an int8 with its sign flipped, below the exponent of 1024, less this
INT8_UNIT = 2.0**-24  # the smallest f16
MINUS_128 = -0x7F7F7F80  # -128 of that unit as an f16, twice


def decode_k(spec: KernelSpec, word: Int32) -> tuple[Int32, Int32]:
    """Two registers of f16 from one of K."""
    return _run(_decode(spec.k_type, spec.arch, HALVES), word)


def decode_v(spec: KernelSpec, word: Int32) -> tuple[Int32, Int32]:
    """Two registers of f16 from one of V."""
    return _run(_biased_int8(PARITIES) if is_biased(spec) else _decode(spec.v_type, spec.arch, PARITIES), word)


def is_biased(spec: KernelSpec) -> bool:
    """Whether an element of V is decoded as (value + 128) INT8_UNIT."""
    return spec.v_type == "int8" and spec.v_token_scale


def decoded_unit(spec: KernelSpec) -> float:
    """What a decoded element of V is in units of."""
    return INT8_UNIT if is_biased(spec) else 1.0


def owed(mma: cute.TiledMma, p: cute.Tensor) -> cute.Tensor:
    """What P V with biased elements lacks to that with the values, in each column: f32 ((2 columns, 2 rows), 1, 1).

    p: the A fragments of the k16 steps.
    """
    minus, total = cute.make_rmem_tensor(((2, 2), 1), Float16), cute.make_rmem_tensor(((2, 2), 1, 1), Float32)
    cute.recast_tensor(minus, Int32).fill(MINUS_128)
    total.fill(0.0)
    for step in range(cute.size(p, mode=[2])):
        cute.gemm(mma, total, p[None, None, step], minus, total)
    return total


def _run(text: str, word: Int32) -> tuple[Int32, Int32]:
    return cute.arch.inline_ptx(f"{{ {text} }}", write_only_types=[Int32, Int32], read_only_args=[word])


def _decode(stored_type: str, arch: Arch, pairs: tuple[str, str]) -> str:
    if stored_type == "int8":
        return _int8(pairs)
    if stored_type == "e5m2":
        return " ".join(_e5m2(i, pair) for i, pair in enumerate(pairs))
    if arch == "sm90":
        return _e4m3(pairs)
    return " ".join(_e4m3_in_integers(i, pair) for i, pair in enumerate(pairs))


def _int8(pairs: tuple[str, str]) -> str:
    lines = [".reg .b32 x, y, bias;", f"xor.b32 x, {{$r0}}, 0x80808080; mov.b32 bias, {INT8_BIAS};"]
    for i, (upper, lower) in enumerate(pairs):
        lines.append(f"prmt.b32 y, x, 0x64646464, 0x4{upper}4{lower}; sub.f16x2 {{$w{i}}}, y, bias;")
    return " ".join(lines)


def _biased_int8(pairs: tuple[str, str]) -> str:
    lines = [".reg .b32 x;", "xor.b32 x, {$r0}, 0x80808080;"]
    lines += [f"prmt.b32 {{$w{i}}}, x, 0, 0x4{upper}4{lower};" for i, (upper, lower) in enumerate(pairs)]
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
    """The bits of an f16 at 2 ** -8 of the value: the magnitude one place down; a carry out of NaN's makes NaN's exponent."""
    return (
        "{ .reg .b32 x, sign, size, carry, factor; "
        f"prmt.b32 x, {{$r0}}, 0, 0x{pair[0]}4{pair[1]}4; and.b32 sign, x, 0x80008000; "
        "shr.u32 size, x, 1; and.b32 size, size, 0x3F803F80; "
        "add.u32 carry, size, 0x00800080; and.b32 carry, carry, 0x40004000; "
        f"or.b32 size, size, carry; or.b32 size, size, sign; mov.b32 factor, {E4M3_TO_F16}; "
        f"mul.f16x2 {{$w{index}}}, size, factor; }}"
    )
