"""Handlers of moves, loads, stores and copies."""

from __future__ import annotations

import re

from .emitter import TYPES, Emitter, Handler, unknown
from .numbers import U64
from .ptx import Instruction, Operand

CACHED = {"cg", "cs", "ca", "nc", "L1::no_allocate", "L2::cache_hint"}  # cache hints, which are ignored
RELAXED = ["relaxed", "gpu"]
COORDINATES = re.compile(r"\[(\S+), \{(.*)\}\]$")
BULK_TENSOR = re.compile(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::cta\.global\.tile\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?$"
)


def move(emitter: Emitter, instruction: Instruction) -> None:
    """Copies a register, or moves words to their parts and back."""
    kind, (result, value) = instruction.parts[0], instruction.operands
    if isinstance(value, tuple):
        emitter.put(result, _joined(emitter, instruction, kind, value), kind)
    elif isinstance(result, tuple):
        _take_apart(emitter, instruction, kind, result, value)
    elif kind == "b128":
        emitter.put(result, f"R[{emitter.place(value)}]", kind)
    else:
        emitter.put(result, emitter.source(value, kind), kind)


def _joined(emitter: Emitter, instruction: Instruction, kind: str, parts: tuple[str, ...]) -> str:
    of = {"b128": "b64", "b64": "b32", "b32": "b16"}.get(kind)
    if of is None or len(parts) != 2:
        raise unknown(instruction)
    lower, upper = (emitter.source(part, of) for part in parts)
    return {"b128": f"np.stack(({lower}, {upper}))", "b64": f"joined_word({lower}, {upper})", "b32": f"packed({upper}, {lower})"}[
        kind
    ]


def _take_apart(emitter: Emitter, instruction: Instruction, kind: str, parts: tuple[str, ...], value: Operand) -> None:
    assert isinstance(value, str)
    if kind not in ("b128", "b64", "b32") or len(parts) != 2:
        raise unknown(instruction)
    if kind == "b128":
        emitter.line(f"t = R[{emitter.place(value)}]")
    else:
        emitter.line(f"t = {'split_word' if kind == 'b64' else 'halves'}({emitter.source(value, kind)})")
    for i, part in enumerate(parts):
        emitter.put(part, f"t[{i}]", {"b128": "b64", "b64": "b32", "b32": "b16"}[kind])


def _space(instruction: Instruction) -> tuple[str, int, str, bool]:
    """(space, elements, type, relaxed) of a load or store."""
    parts = [part for part in instruction.parts if part not in CACHED]
    relaxed = parts[:2] == RELAXED
    parts = parts[2:] if relaxed else parts
    if parts[0] not in ("global", "shared", "param"):
        raise unknown(instruction)
    count = int(parts[1][1]) if parts[1] in ("v2", "v4") else 1
    if len(parts) != 2 + (count > 1) or (parts[-1] not in TYPES and parts[-1] != "b128"):
        raise unknown(instruction)
    return parts[0], count, parts[-1], relaxed


def load(emitter: Emitter, instruction: Instruction) -> None:
    """Loads one to four elements."""
    space, count, kind, relaxed = _space(instruction)
    result, address = instruction.operands
    results = result if isinstance(result, tuple) else (result,)
    size = 16 if kind == "b128" else int(kind[1:]) // 8
    if space == "param":
        _load_param(emitter, address, results, kind, size)
        return
    where = emitter.address(address, "u32" if space == "shared" else "u64")
    if relaxed:
        emitter.line(f"w.look({instruction.pc})")
    if kind == "b128":
        emitter.put(results[0], f"w.load_wide({where}, {emitter.mask})", kind)
        return
    unsigned = TYPES["u" + kind[1:]].__name__
    emitter.line(f"t = w.load_{space}({where}, {size}, {count}, {unsigned}, {emitter.mask})")
    for i, part in enumerate(results):
        text = f"t[{i}]" if kind[0] in "ub" else f"t[{i}].view({TYPES[kind].__name__})"
        emitter.put(part, text, kind)


def _load_param(emitter: Emitter, address: Operand, results: tuple[str, ...], kind: str, size: int) -> None:
    assert isinstance(address, str)
    symbol, _, offset = address[1:-1].partition("+")
    begin = emitter.offsets[symbol] + int(offset or 0)
    for i, part in enumerate(results):
        emitter.put(part, f"w.cta.param({begin + i * size}, {size})", "u" + kind[1:])


def store(emitter: Emitter, instruction: Instruction) -> None:
    """Stores one to four elements. An L2 policy behind them is ignored."""
    space, count, kind, _ = _space(instruction)
    address, value, *policy = instruction.operands
    if space == "param" or len(policy) != ("L2::cache_hint" in instruction.parts):
        raise unknown(instruction)
    values = value if isinstance(value, tuple) else (value,)
    where = emitter.address(address, "u32" if space == "shared" else "u64")
    if kind == "b128":
        assert isinstance(value, str)
        emitter.line(f"w.store_wide({where}, R[{emitter.place(value)}], {emitter.mask})")
        return
    sources = ", ".join(emitter.source(part, "u" + kind[1:]) for part in values)
    emitter.line(f"w.store_{space}({where}, {count * int(kind[1:]) // 8}, ({sources},), {emitter.mask})")


def address_of(emitter: Emitter, instruction: Instruction) -> None:
    """Makes a parameter's generic address."""
    if instruction.opcode != "cvta.param.u64":
        raise unknown(instruction)
    base = emitter.constant(0x5000_0000_0000, U64)
    emitter.put(instruction.operands[0], f"{emitter.source(instruction.operands[1], 'u64')} + {base}", "u64")


def copy(emitter: Emitter, instruction: Instruction) -> None:
    """Starts or awaits asynchronous copies, of lanes and of tensors."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode.startswith("cp.async.bulk.prefetch.tensor."):
        return
    if match := BULK_TENSOR.match(opcode):
        _copy_box(emitter, operands, int(match[1]))
    elif opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
        to, of = emitter.address(operands[0], "u32"), emitter.address(operands[1], "u64")
        size = int(str(operands[2]))
        given = emitter.source(operands[3], "u32") if len(operands) > 3 else emitter.immediate(str(size), TYPES["u32"])
        emitter.line(f"w.copies.start({to}, {of}, {size}, {given}, {emitter.mask})")
    elif opcode == "cp.async.commit_group":
        emitter.line(f"w.copies.commit({emitter.mask})")
    elif opcode == "cp.async.wait_group":
        emitter.line(f"w.copies.wait({int(str(operands[0]))}, {emitter.mask})")
    elif opcode == "cp.async.mbarrier.arrive.noinc.shared.b64":
        emitter.line(f"w.copies.arrive({emitter.address(operands[0], 'u32')}, {emitter.mask})")
    else:
        raise unknown(instruction)


def _copy_box(emitter: Emitter, operands: list[Operand], dims: int) -> None:
    match = COORDINATES.match(str(operands[1]))
    assert match, operands[1]
    coordinates = [emitter.source(part.strip(), "s32") for part in match[2].split(",")]
    assert len(coordinates) == dims
    to, barrier = emitter.address(operands[0], "u32"), emitter.address(operands[2], "u32")
    tensor_map = emitter.source(match[1], "u64")
    emitter.line(f"w.copy_box({to}, {tensor_map}, ({', '.join(coordinates)},), {barrier}, {emitter.mask})")


def atomic(emitter: Emitter, instruction: Instruction) -> None:
    """Takes atomic maxima and sums in global memory."""
    sums = dict.fromkeys(("atom.global.add.u32", "atom.global.acq_rel.add.u32"), "np.add")
    operation = ({"atom.global.max.s32": "np.maximum"} | sums).get(instruction.opcode)
    if operation is None:
        raise unknown(instruction)
    result, address, value = instruction.operands
    operands = emitter.address(address, "u64"), emitter.source(value, "s32")
    text = f"w.atomic({operation}, {', '.join(operands)}, {emitter.mask})"
    emitter.line(f"t = {text}")
    emitter.put(result, "t", "s32")


def prefetch(emitter: Emitter, instruction: Instruction) -> None:
    """Notes what is prefetched of global memory; prefetches of tensor maps do nothing."""
    if instruction.opcode == "prefetch.global.L2":
        emitter.line(f"w.prefetch({emitter.address(instruction.operands[0], 'u64')}, {emitter.mask})")
    elif instruction.opcode != "prefetch.tensormap":
        raise unknown(instruction)


def nothing(emitter: Emitter, instruction: Instruction) -> None:
    """Does nothing for instructions that change no value: fences, waits for another grid."""
    fences = ("fence.mbarrier_init.release.cluster", "fence.proxy.async.shared::cta")
    others = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
    if instruction.opcode not in (*fences, *others):
        raise unknown(instruction)


def exchange_registers(emitter: Emitter, instruction: Instruction) -> None:
    """Takes registers from other warps, or hands some over."""
    method = {"setmaxnreg.inc.sync.aligned.u32": "take", "setmaxnreg.dec.sync.aligned.u32": "hand_over"}.get(instruction.opcode)
    if method is None:
        raise unknown(instruction)
    emitter.line(f"w.cta.registers.{method}(w.number, {int(instruction.operands[0])})")


MOVEMENT: dict[str, Handler] = {
    "mov": move,
    "ld": load,
    "st": store,
    "cvta": address_of,
    "cp": copy,
    "atom": atomic,
    "setmaxnreg": exchange_registers,
    "prefetch": prefetch,
    **dict.fromkeys(("fence", "griddepcontrol"), nothing),
}
