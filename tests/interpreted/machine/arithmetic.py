"""Handlers of arithmetic, comparisons and conversions."""

from __future__ import annotations

from .emitter import TYPES, Emitter, Handler, unknown
from .numbers import U32
from .ptx import Instruction

COMPARED = {"eq": "{a} == {b}", "lt": "{a} < {b}", "le": "{a} <= {b}", "gt": "{a} > {b}", "ge": "{a} >= {b}"}
UNORDERED = {"equ": "~(({a} < {b}) | ({a} > {b}))", "neu": "{a} != {b}", "ltu": "~({a} >= {b})", "leu": "~({a} > {b})"}
UNORDERED |= {"gtu": "~({a} <= {b})", "geu": "~({a} < {b})"}

FLOAT = {  # f32 expressions by opcode
    "add.f32": "{a} + {b}",
    "add.rn.f32": "{a} + {b}",
    "sub.f32": "{a} - {b}",
    "sub.rn.f32": "{a} - {b}",
    "mul.f32": "{a} * {b}",
    "mul.rn.f32": "{a} * {b}",
    "add.rp.f32": "rounded_up({a}.astype(float64) + {b})",
    "fma.rn.f32": "fma({a}, {b}, {c})",
    "div.rn.f32": "{a} / {b}",
    "rcp.rn.f32": "F32(1) / {a}",
    "rcp.approx.ftz.f32": "reciprocal({a})",
    "ex2.approx.ftz.f32": "ex2({a})",
    "lg2.approx.ftz.f32": "lg2({a})",
    "max.f32": "np.fmax({a}, {b})",
    "min.f32": "np.fmin({a}, {b})",
    "max.NaN.f32": "np.maximum({a}, {b})",
    "min.NaN.f32": "np.minimum({a}, {b})",
    "abs.f32": "np.abs({a})",
    "neg.f32": "-{a}",
}
PACKED = {  # expressions on words of two halves, by opcode
    "add.f16x2": "({a}.view(float16) + {b}.view(float16)).view(uint32)",
    "sub.f16x2": "({a}.view(float16) - {b}.view(float16)).view(uint32)",
    "mul.f16x2": "({a}.view(float16) * {b}.view(float16)).view(uint32)",
    "fma.rn.f16x2": "fma_f16x2({a}, {b}, {c})",
    "mul.bf16x2": "fma_bf16x2({a}, {b}, {a} & U32(0) | U32(0x80008000))",
    "fma.rn.bf16x2": "fma_bf16x2({a}, {b}, {c})",
    "max.f16x2": "np.fmax({a}.view(float16), {b}.view(float16)).view(uint32)",
    "max.NaN.f16x2": "np.maximum({a}.view(float16), {b}.view(float16)).view(uint32)",
    "max.NaN.xorsign.abs.f16x2": "max_nan_xorsign_abs_f16x2({a}, {b})",
    "abs.f16x2": "{a} & U32(0x7FFF7FFF)",
    "abs.bf16x2": "{a} & U32(0x7FFF7FFF)",
    "max.NaN.bf16x2": "max_nan_bf16x2({a}, {b})",
    "max.bf16x2": "max_bf16x2({a}, {b})",
    "max.NaN.xorsign.abs.bf16x2": "max_nan_xorsign_abs_bf16x2({a}, {b})",
}
WHOLE = {  # integer expressions, by the opcode's words before the type
    "add": "{a} + {b}",
    "sub": "{a} - {b}",
    "mul.lo": "{a} * {b}",
    "mad.lo": "{a} * {b} + {c}",
    "div": "{a} // {b}",
    "rem": "{a} % {b}",
    "min": "np.minimum({a}, {b})",
    "max": "np.maximum({a}, {b})",
    "min.relu": "np.maximum(np.minimum({a}, {b}), 0)",
    "max.relu": "np.maximum(np.maximum({a}, {b}), 0)",
    "abs": "np.abs({a})",
    "neg": "-{a}",
    "and": "{a} & {b}",
    "or": "{a} | {b}",
    "xor": "{a} ^ {b}",
    "not": "~{a}",
}
UNSIGNED_ONLY = {"div", "rem"}
CONVERTED = {  # by opcode: (type of the sources, expression, type of the result)
    "cvt.rn.bf16.f32": ("f32", "bf16_of({a})", "b16"),
    "cvt.rn.bf16x2.f32": ("f32", "bf16x2_of({a}, {b})", "b32"),
    "cvt.rn.f16.f32": ("f32", "{a}.astype(float16)", "f16"),
    "cvt.rn.f16x2.f32": ("f32", "f16x2_of({a}, {b})", "b32"),
    "cvt.f32.f16": ("f16", "{a}.astype(float32)", "f32"),
    "cvt.f32.bf16": ("b16", "f32_of_bf16({a})", "f32"),
    "cvt.rn.f16x2.e4m3x2": ("b16", "f16x2_of_e4m3x2({a})", "b32"),
    "cvt.rn.f16x2.e5m2x2": ("b16", "f16x2_of_e5m2x2({a})", "b32"),
    "cvt.rn.satfinite.e4m3x2.f32": ("f32", "fp8x2_of({a}, {b}, 'float8_e4m3fn')", "b16"),
    "cvt.rn.satfinite.e5m2x2.f32": ("f32", "fp8x2_of({a}, {b}, 'float8_e5m2')", "b16"),
    "cvt.rni.s32.f32": ("f32", "s32_of({a})", "s32"),
    "cvt.rzi.s32.f32": ("f32", "s32_of(np.trunc({a}))", "s32"),
    "cvt.rn.f32.s32": ("s32", "{a}.astype(float32)", "f32"),
    "cvt.rn.f32.u32": ("u32", "{a}.astype(float32)", "f32"),
}


def _formula(emitter: Emitter, instruction: Instruction, formula: str, kind: str) -> str:
    sources = [emitter.source(operand, kind) for operand in instruction.operands[1:]]
    return formula.format(**dict(zip("abc", sources, strict=False)))


def arithmetic(emitter: Emitter, instruction: Instruction) -> None:
    """Opcodes whose sources and result have one type."""
    opcode, kind = instruction.opcode, instruction.parts[-1]
    words = opcode.rsplit(".", 1)[0]
    if opcode in FLOAT:
        formula = FLOAT[opcode]
    elif opcode in PACKED:
        formula, kind = PACKED[opcode], "b32"
    elif kind[0] in "subp" and words in WHOLE and kind in TYPES and not (words in UNSIGNED_ONLY and kind[0] != "u"):
        formula = WHOLE[words]
    else:
        raise unknown(instruction)
    emitter.put(instruction.operands[0], _formula(emitter, instruction, formula, kind), kind)


def multiply(emitter: Emitter, instruction: Instruction) -> None:
    """Multiplies to the same width or twice it, or takes the upper halves."""
    parts = instruction.parts
    if parts[0] not in ("wide", "hi"):
        arithmetic(emitter, instruction)
        return
    kind = parts[1]
    if instruction.opcode == "mul.hi.u64":
        a, b = (emitter.source(operand, kind) for operand in instruction.operands[1:])
        emitter.put(instruction.operands[0], f"upper_product({a}, {b})", kind)
        return
    wide = kind[0] + str(2 * int(kind[1:]))
    name = ("int" if kind[0] == "s" else "uint") + wide[1:]
    a, b = (f"{emitter.source(operand, kind)}.astype({name})" for operand in instruction.operands[1:3])
    if parts[0] == "wide" and instruction.base == "mul":
        emitter.put(instruction.operands[0], f"{a} * {b}", wide)
    elif parts[0] == "hi" and kind in ("u16", "s16", "u32", "s32") and instruction.base == "mul":
        emitter.put(instruction.operands[0], f"({a} * {b} >> {name}({kind[1:]})).astype({TYPES[kind].__name__})", kind)
    else:
        raise unknown(instruction)


def dot_product(emitter: Emitter, instruction: Instruction) -> None:
    """Multiplies two halves with two bytes."""
    if instruction.opcode != "dp2a.lo.u32.u32":
        raise unknown(instruction)
    a, b, c = (emitter.source(operand, "u32") for operand in instruction.operands[1:])
    text = f"({a} & U32(0xFFFF)) * ({b} & U32(0xFF)) + ({a} >> U32(16)) * ({b} >> U32(8) & U32(0xFF)) + {c}"
    emitter.put(instruction.operands[0], text, "u32")


def shift(emitter: Emitter, instruction: Instruction) -> None:
    """Shifts by any count."""
    kind, (result, value, count) = instruction.parts[0], instruction.operands
    source = emitter.source(value, kind)
    left = instruction.base == "shl"
    assert isinstance(count, str)
    if emitter.kernel.width(count) is None and 0 <= int(count, 0) < int(kind[1:]):
        emitter.put(result, f"{source} {'<<' if left else '>>'} {emitter.immediate(count, TYPES[kind])}", kind)
        return
    emitter.put(result, f"shift_{'left' if left else 'right'}({source}, {emitter.source(count, 'u32')})", kind)


def funnel_shift(emitter: Emitter, instruction: Instruction) -> None:
    """Takes the lower half of two words that are shifted as one."""
    if instruction.opcode != "shf.r.wrap.b32":
        raise unknown(instruction)
    low, high, count = (emitter.source(operand, "b32") for operand in instruction.operands[1:])
    emitter.put(
        instruction.operands[0], f"(joined_word({low}, {high}) >> ({count} & U32(31)).astype(uint64)).astype(uint32)", "b32"
    )


def compare(emitter: Emitter, instruction: Instruction) -> None:
    """Makes a predicate from a comparison."""
    if len(instruction.parts) != 2:
        raise unknown(instruction)
    how, kind = instruction.parts
    if kind[0] == "f" and how == "ne":
        formula = "({a} < {b}) | ({a} > {b})"
    elif how == "ne":
        formula = "{a} != {b}"
    elif how in COMPARED:
        formula = COMPARED[how]
    elif how in UNORDERED and kind[0] == "f":
        formula = UNORDERED[how]
    else:
        raise unknown(instruction)
    emitter.put(instruction.operands[0], _formula(emitter, instruction, formula, kind), "pred")


def select(emitter: Emitter, instruction: Instruction) -> None:
    """Selects one of two values by a predicate."""
    kind, (result, a, b, chosen) = instruction.parts[0], instruction.operands
    text = f"where({emitter.source(chosen, 'pred')}, {emitter.source(a, kind)}, {emitter.source(b, kind)})"
    emitter.put(result, text, kind)


def convert(emitter: Emitter, instruction: Instruction) -> None:
    """Converts floats by the table, integers by their types."""
    opcode, parts = instruction.opcode, instruction.parts
    if opcode in CONVERTED:
        kind, formula, result = CONVERTED[opcode]
        emitter.put(instruction.operands[0], _formula(emitter, instruction, formula, kind), result)
        return
    if len(parts) != 2 or parts[0][0] not in "su" or parts[1][0] not in "su":
        raise unknown(instruction)
    to, of = parts
    name = ("int" if to[0] == "s" else "uint") + to[1:]
    emitter.put(instruction.operands[0], f"{emitter.source(instruction.operands[1], of)}.astype({name})", to)


def permute(emitter: Emitter, instruction: Instruction) -> None:
    """Selects bytes of two words by a selector."""
    if instruction.opcode != "prmt.b32":
        raise unknown(instruction)
    a, b, selector = (emitter.source(operand, "b32") for operand in instruction.operands[1:])
    emitter.put(instruction.operands[0], f"prmt({a}, {b}, {selector})", "b32")


def count_bits(emitter: Emitter, instruction: Instruction) -> None:
    """Counts the bits that are set."""
    if instruction.opcode != "popc.b32":
        raise unknown(instruction)
    text = f"np.bitwise_count({emitter.source(instruction.operands[1], 'b32')}).astype({U32.__name__})"
    emitter.put(instruction.operands[0], text, "b32")


ONE_TYPE = ("add", "sub", "fma", "div", "rem", "rcp", "ex2", "lg2", "min", "max", "abs", "neg", "and", "or", "xor", "not")
ARITHMETIC: dict[str, Handler] = {
    **dict.fromkeys(ONE_TYPE, arithmetic),
    "mul": multiply,
    "mad": multiply,
    "shl": shift,
    "shr": shift,
    "dp2a": dot_product,
    "shf": funnel_shift,
    "setp": compare,
    "selp": select,
    "cvt": convert,
    "prmt": permute,
    "popc": count_bits,
}
