"""Handlers of instructions that lanes or warps run together: shuffles, votes, barriers, products of matrices."""

from __future__ import annotations

import re

import numpy as np

from .emitter import TYPES, Emitter, Handler, unknown
from .numbers import LANE
from .ptx import Instruction, Operand

WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)$")
MMA = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(bf16|f16)\.f32$")
TRY_WAIT, TEST_WAIT = "mbarrier.try_wait.parity.shared.b64", "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64"


def registers(emitter: Emitter, operand: Operand, kind: str = "b32") -> str:
    """A tuple of a vector's registers."""
    assert isinstance(operand, tuple)
    return f"({', '.join(emitter.source(part, kind) for part in operand)},)"


def put_rows(emitter: Emitter, operand: Operand, name: str) -> None:
    """Writes the rows of an array to the registers of a vector."""
    assert isinstance(operand, tuple)
    for i, part in enumerate(operand):
        emitter.put(part, f"{name}[{i}]", "b32")


def shuffle(emitter: Emitter, instruction: Instruction) -> None:
    """Reads another lane's value."""
    _, mode, kind = instruction.parts
    if kind != "b32" or mode not in ("idx", "up", "down", "bfly"):
        raise unknown(instruction)
    *results, value, place, clamp, _ = instruction.operands
    emitter.line(f"t, p = shuffled({mode!r}, {', '.join(emitter.source(o, 'u32') for o in (value, place, clamp))})")
    emitter.namespace["shuffled"] = shuffled
    emitter.put(results[0], "t", "b32")
    if len(results) > 1:
        emitter.put(results[1], "p", "pred")


def shuffled(mode: str, value: np.ndarray, place: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the value that each lane gets, whether its source is in its segment)."""
    place, limit, segment = (part.astype(np.int64) for part in (place & 31, clamp & 31, clamp >> 8 & 31))
    first = LANE & segment
    last = first | (limit & ~segment)
    if mode == "up":
        source = LANE - place
        inside = source >= last
    else:
        source = {"down": LANE + place, "bfly": LANE ^ place, "idx": first | (place & ~segment)}[mode]
        inside = source <= last
    return value[np.where(inside, source, LANE)], inside


def vote(emitter: Emitter, instruction: Instruction) -> None:
    """Votes over the lanes that run, which are the lanes of the instruction's mask."""
    _, how, kind = instruction.parts
    chosen = emitter.source(instruction.operands[1], "pred")
    inside = chosen if emitter.mask == "None" else f"({chosen} & {emitter.mask})"
    outside = "" if emitter.mask == "None" else f" | ~{emitter.mask}"
    texts = {
        ("ballot", "b32"): f"np.full(32, bits_of({inside}), uint32)",
        ("any", "pred"): f"np.full(32, {inside}.any())",
        ("all", "pred"): f"np.full(32, ({chosen}{outside}).all())",
    }
    if (how, kind) not in texts:
        raise unknown(instruction)
    emitter.put(instruction.operands[0], texts[how, kind], "b32" if kind == "b32" else "pred")


def reduce(emitter: Emitter, instruction: Instruction) -> None:
    """Takes a sum or an extremum over the lanes that run, which are the lanes of the instruction's mask."""
    _, how, kind = instruction.parts
    if how not in ("add", "min", "max") or kind not in ("s32", "u32"):
        raise unknown(instruction)
    value = emitter.source(instruction.operands[1], kind)
    chosen = value if emitter.mask == "None" else f"{value}[{emitter.mask}]"
    dtype = TYPES[kind].__name__
    total = f"{chosen}.sum(dtype={dtype})" if how == "add" else f"{chosen}.{how}()"
    emitter.put(instruction.operands[0], f"np.full(32, {total}, {dtype})", kind)


def elect(emitter: Emitter, instruction: Instruction) -> None:
    """Elects the first lane that runs."""
    lane, chosen, _ = instruction.operands
    emitter.line(f"t = w.first({emitter.mask})")
    emitter.put(lane, "np.full(32, t, uint32)", "b32")
    emitter.put(chosen, "w.lane == t", "pred")


def barrier(emitter: Emitter, instruction: Instruction) -> None:
    """Meets a CTA's named barriers; a warp's own barrier needs nothing once the warp's lanes are together."""
    if instruction.opcode == "bar.warp.sync":
        return
    if instruction.opcode not in ("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive"):
        raise unknown(instruction)
    number, *count = (emitter.source(operand, "u32") for operand in instruction.operands)
    threads = f"int({count[0]}[0])" if count else "w.cta.threads"
    emitter.line(f"w.meet(int({number}[0]), {threads}, {'arrive' not in instruction.opcode}, {emitter.mask})")


def mbarrier(emitter: Emitter, instruction: Instruction) -> None:
    """Operates on barriers in shared memory."""
    opcode, operands, mask = instruction.opcode, instruction.operands, emitter.mask
    if opcode == "mbarrier.init.shared.b64":
        where, count = emitter.address(operands[0], "u32"), emitter.source(operands[1], "u32")
        emitter.line(f"w.cta.barriers.init({where}, {count}, {mask})")
    elif opcode == "mbarrier.arrive.shared.b64":
        count = emitter.source(operands[2], "u32") if len(operands) > 2 else emitter.immediate("1", TYPES["u32"])
        emitter.line(f"w.cta.barriers.arrive({emitter.address(operands[1], 'u32')}, {count}, {mask})")
    elif opcode == "mbarrier.arrive.expect_tx.shared.b64":
        where, count = emitter.address(operands[1], "u32"), emitter.source(operands[2], "u32")
        emitter.line(f"w.cta.barriers.expect({where}, {count}, {mask})")
    elif opcode in (TRY_WAIT, TEST_WAIT):
        where, parity = emitter.address(operands[1], "u32"), emitter.source(operands[2], "u32")
        emitter.line(f"t = w.test({where}, {parity}, {mask}, {opcode == TRY_WAIT})")
        emitter.put(operands[0], "t", "pred")
    else:
        raise unknown(instruction)


def load_matrix(emitter: Emitter, instruction: Instruction) -> None:
    """Loads four 8 x 8 matrices of 16 bits."""
    if instruction.opcode not in (f"ldmatrix.sync.aligned.m8n8.x4.{how}shared.b16" for how in ("", "trans.")):
        raise unknown(instruction)
    results, address = instruction.operands
    emitter.line(f"w.whole({emitter.mask})")
    emitter.line(f"t = w.load_matrix({emitter.address(address, 'u32')}, {'trans' in instruction.parts})")
    put_rows(emitter, results, "t")


def multiply(emitter: Emitter, instruction: Instruction) -> None:
    """Multiplies the matrices of a warp."""
    match = MMA.match(instruction.opcode)
    if not match or match[1] != match[2]:
        raise unknown(instruction)
    result, a, b, c = instruction.operands
    emitter.line(f"w.whole({emitter.mask})")
    emitter.line(f"t = w.product({match[1]!r}, {', '.join(registers(emitter, operand) for operand in (a, b, c))})")
    put_rows(emitter, result, "t")


def multiply_group(emitter: Emitter, instruction: Instruction) -> None:
    """Multiplies a warp's rows of a warpgroup's product, or waits for it."""
    opcode, operands = instruction.opcode, instruction.operands
    emitter.line(f"w.whole({emitter.mask})")
    if opcode == "wgmma.fence.sync.aligned":
        return
    if opcode == "wgmma.commit_group.sync.aligned":
        emitter.line("w.steps.commit()")
        return
    if opcode == "wgmma.wait_group.sync.aligned":
        emitter.line(f"w.steps.wait({int(str(operands[0]))})")
        return
    match = WGMMA.match(opcode)
    if not match or match[2] != match[3]:
        raise unknown(instruction)
    result, a, b, added, *scales = operands
    transposed = [int(str(value)) for value in scales[2:]]
    if [int(str(value)) for value in scales[:2]] != [1, 1] or len(transposed) != (1 if isinstance(a, tuple) else 2):
        raise unknown(instruction)
    left = registers(emitter, a) if isinstance(a, tuple) else emitter.source(a, "u64")
    arguments = f"{match[2]!r}, {int(match[1])}, {left}, {emitter.source(b, 'u64')}, {transposed}"
    assert isinstance(added, str)
    keeps = f"bool({emitter.source(added, 'pred')}[0])"
    emitter.line(f"t = w.steps.product({arguments}, {registers(emitter, result)} if {keeps} else None)")
    put_rows(emitter, result, "t")


TOGETHER: dict[str, Handler] = {
    "shfl": shuffle,
    "vote": vote,
    "redux": reduce,
    "elect": elect,
    "bar": barrier,
    "barrier": barrier,
    "mbarrier": mbarrier,
    "ldmatrix": load_matrix,
    "mma": multiply,
    "wgmma": multiply_group,
}
