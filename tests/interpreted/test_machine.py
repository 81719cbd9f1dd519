"""The interpreter itself: accesses that it refuses, deadlocks that it finds, and lanes that part and meet."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreted.machine import copies, numbers
from tests.interpreted.machine.barriers import BarrierFault, Mbarriers
from tests.interpreted.machine.grid import Deadlock, Grid
from tests.interpreted.machine.memory import READ, WRITE, GlobalMemory, MemoryFault
from tests.interpreted.machine.program import Program
from tests.interpreted.machine.ptx import parse
from tests.interpreted.machine.registers import RegisterFault
from tests.interpreted.machine.warp import Fault

BOTH = READ | WRITE
KERNEL = """
.visible .entry test(.param .u64 test_param_0, .param .u64 test_param_1)
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<9>;
    .reg .b32 %r<99>;
    .reg .b64 %rd<99>;
    ld.param.b64 %rd1, [test_param_0];
    ld.param.b64 %rd2, [test_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
{body}
    ret;
}}
"""


def run(body: str, source: torch.Tensor, threads: int = 32, ctas: int = 1, **schedule: Any) -> torch.Tensor:
    """Runs a kernel with this body; returns the int32 [threads] at %rd2. The source is at %rd1."""
    (kernel,) = parse(KERNEL.format(body=body, threads=threads)).values()
    memory, found = GlobalMemory(), torch.full((threads,), -1, dtype=torch.int32)
    params = struct.pack("<QQ", memory.add(source, READ), memory.add(found, BOTH))
    Grid(Program(kernel), memory, params, (ctas, 1, 1), 1024, **schedule).run()
    return found


SOURCE = torch.arange(32, dtype=torch.int32)


def test_lanes_that_part_meet_at_the_shuffle() -> None:
    """Each lane loops as often as its number says, then reads the next lane's value."""
    body = """
    mov.b32 %r2, 0;
$AGAIN:
    setp.ge.s32 %p1, %r2, %r1;
    @%p1 bra $END;
    add.s32 %r2, %r2, 1;
    bra.uni $AGAIN;
$END:
    shfl.sync.down.b32 %r3, %r2, 1, 31, -1;
    st.global.b32 [%rd5], %r3;
    """
    assert run(body, SOURCE).tolist() == [*range(1, 32), 31]


def test_a_shuffle_that_not_all_reach_is_a_deadlock() -> None:
    body = """
    setp.eq.s32 %p1, %r1, 3;
    @%p1 bra $END;
    shfl.sync.idx.b32 %r3, %r1, 0, 31, -1;
$END:
    shfl.sync.idx.b32 %r3, %r1, 0, 31, -1;
    """
    with pytest.raises(Deadlock, match=r"lanes 0xfffffff7 at 8: shfl(.|\n)*lanes 0x00000008 at 9"):
        run(body, SOURCE)


def test_a_barrier_that_a_warp_leaves_out_is_a_deadlock() -> None:
    body = """
    setp.lt.s32 %p1, %r1, 32;
    @%p1 bra $END;
    bar.sync 1, 64;
$END:
    """
    with pytest.raises(Deadlock, match="warp 1 barrier 1"):
        run(body, SOURCE, threads=64)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r2, [%rd4+4];", r"(outside of the tensors|behind a storage)(.|\n)*ld\.global\.b32(.|\n)*warp 0"),
        ("ld.global.b32 %r2, [%rd4+-4];", "lanes touch several tensors"),
        ("st.global.b32 [%rd4], %r1;", "write of 4 bytes outside"),
        ("ld.global.b64 %rd9, [%rd4];", "no multiple of 8"),
        ("ld.shared.b32 %r2, [%r1];", "no multiple of 4"),
        ("mov.b32 %r3, 9000000; ld.shared.b32 %r2, [%r3];", "outside of 1024 bytes"),
    ],
)
def test_what_memory_refuses(body: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(body, SOURCE)


def test_gaps_of_a_tensor_are_outside_of_it() -> None:
    every_other = torch.arange(64, dtype=torch.int32)[::2]
    assert run("ld.global.b32 %r2, [%rd1+8]; st.global.b32 [%rd5], %r2;", every_other).tolist() == [2] * 32
    with pytest.raises(Fault, match="read of 4 bytes outside of the tensors"):
        run("ld.global.b32 %r2, [%rd4];", every_other)


@pytest.mark.parametrize(
    "text", ["sin.approx.f32 %r2, %r1;", "add.sat.s32 %r2, %r1, %r1;", "ld.volatile.global.b32 %r2, [%rd4];"]
)
def test_an_unknown_opcode_is_named(text: str) -> None:
    with pytest.raises(NotImplementedError, match=text.split()[0]):
        run(text, SOURCE)


def test_copies_land_when_they_are_waited_for() -> None:
    """A word that is read before the wait has the bytes of memory that nobody wrote."""
    body = """
    mov.b32 %r2, 1024;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    cp.async.ca.shared.global [%r4], [%rd4], 4;
    cp.async.commit_group;
    {before}
    ld.shared.b32 %r5, [%r4];
    cp.async.wait_group 0;
    st.global.b32 [%rd5], %r5;
    """
    assert run(body.format(before=""), SOURCE).tolist() == [-1] * 32
    assert run(body.format(before="cp.async.wait_group 0;"), SOURCE).tolist() == SOURCE.tolist()


def test_ctas_that_wait_for_each_other_must_run_together() -> None:
    """CTA 0 waits for a word of CTA 1."""
    body = """
    mov.u32 %r2, %ctaid.x;
    setp.eq.s32 %p1, %r2, 1;
    @%p1 st.relaxed.gpu.global.s32 [%rd2], 7;
    @%p1 bra $END;
$AGAIN:
    ld.relaxed.gpu.global.s32 %r3, [%rd2];
    setp.ne.s32 %p2, %r3, 7;
    @%p2 bra $AGAIN;
$END:
    """
    assert run(body, SOURCE, ctas=2)[0] == 7
    with pytest.raises(Deadlock):
        run(body, SOURCE, ctas=2, resident=1)


def test_phases_of_an_mbarrier() -> None:
    lanes = np.full(32, 64), np.full(32, 2)
    first = numbers.mask_of(1)
    barriers = Mbarriers(lambda: None)
    with pytest.raises(BarrierFault, match="no mbarrier at 64"):
        barriers.arrive(lanes[0], np.ones(32), first)
    barriers.init(*lanes, first)
    barriers.expect(lanes[0], np.full(32, 10), first)
    barriers.arrive(lanes[0], np.ones(32), first)
    assert not barriers.test(lanes[0], np.zeros(32), None).any()
    barriers.complete(64, 10)
    assert barriers.test(lanes[0], np.zeros(32), None).all() and not barriers.test(lanes[0], np.ones(32), None).any()
    barriers.arrive(lanes[0], np.full(32, 2), first)
    with pytest.raises(BarrierFault, match="waits for 2, and 3 arrive"):
        barriers.arrive(lanes[0], np.full(32, 3), first)


def test_a_tensor_map_is_what_was_packed() -> None:
    made = copies.TensorMap(1 << 40, (64, 16, 2, 3, 5), (2, 128, 64, 4096, 16384), (64, 16, 1, 1, 1), 128)
    assert copies.TensorMap.unpack(made.pack()) == made and len(made.pack()) == 128
    with pytest.raises(MemoryFault, match="is none"):
        copies.TensorMap.unpack(bytes(128))


def test_conversions_are_those_of_torch() -> None:
    values = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 100
    bits = numbers.bf16_of(values.numpy())
    assert bits.tolist() == values.bfloat16().view(torch.int16).numpy().view(np.uint16).tolist()
    for dtype, back in ((torch.float8_e4m3fn, numbers.f16x2_of_e4m3x2), (torch.float8_e5m2, numbers.f16x2_of_e5m2x2)):
        codes = numbers.fp8x2_of(values.numpy(), -values.numpy(), str(dtype).removeprefix("torch."))
        exact = values.to(dtype).to(torch.float16).numpy()
        lower, upper = numbers.halves(back(codes))
        assert (upper.view(np.float16) == exact).all() and (lower.view(np.float16) == -exact).all()


def test_a_multiply_add_of_halves_scales_an_int8() -> None:
    """Every int8 k, as the subnormal (k + 128) 2**-24, times a factor, less 128 times: k times the factor, rounded once."""
    k = np.arange(-128, 128)
    for factor in np.random.default_rng(0).uniform(2.0**4, 2.0**16 - 32, 16).astype(np.float16):
        wanted = (k + 128) * 2.0**-24, factor + 0.0 * k, -(2.0**-17) * factor + 0.0 * k
        halves = [values.astype(np.float16).view(np.uint16) for values in wanted]
        expected = (k * (float(factor) * 2.0**-24)).astype(np.float16)
        for half in numbers.halves(numbers.fma_f16x2(*(numbers.packed(one, one) for one in halves))):
            assert (half.view(np.float16) == expected).all()


def test_a_multiply_add_of_bf16_scales_an_int8() -> None:
    """The same of the subnormal (k + 128) 2**-133 in bf16, where a factor of 2**126 leaves k 2**-7."""
    k = np.arange(-128, 128)
    for factor in (1.0, *np.random.default_rng(0).uniform(2.0**-20, 2.0, 16)):
        scale = torch.tensor(factor, dtype=torch.bfloat16).double()
        wanted = (k + 128) * 2.0**-133, float(scale) * 2.0**126 + 0.0 * k, -float(scale) + 0.0 * k
        halves = [numbers.bf16_of(values.astype(np.float32)) for values in wanted]
        expected = (torch.tensor(k, dtype=torch.float64) * scale * 2.0**-7).to(torch.bfloat16).view(torch.int16).numpy()
        for half in numbers.halves(numbers.fma_bf16x2(*(numbers.packed(one, one) for one in halves))):
            assert (half.view(np.int16) == expected).all()


@pytest.mark.parametrize("selector", [0x3210, 0x7654, 0x5140, 0x0000, 0xBA98, 0x4321])
def test_bytes_by_a_selector(selector: int) -> None:
    a, b = 0x8311F055, 0x7E9901C2
    both = (b << 32 | a).to_bytes(8, "little")
    expected = 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = both[nibble & 7]
        expected |= ((0xFF if byte > 0x7F else 0) if nibble > 7 else byte) << 8 * place
    found = numbers.prmt(*(np.full(32, word, np.uint32) for word in (a, b, selector)))
    assert found.tolist() == [expected] * 32


REGISTERS = """
    setp.ge.u32 %p1, %r1, 128;
    @%p1 bra $OTHERS;
    setmaxnreg.inc.sync.aligned.u32 {taken};
    bra.uni $END;
$OTHERS:
    setmaxnreg.dec.sync.aligned.u32 {left};
$END:
    st.global.b32 [%rd5], %r1;
"""


@pytest.mark.parametrize(
    ("taken", "left", "fault"),
    [
        (232, 136, None),
        (248, 136, "2080 registers for a lane of each warp exceed 2048"),
        (232, 176, "hands over what leaves it 176 of 168"),
    ],
)
def test_warps_have_no_more_registers_than_an_sm(taken: int, left: int, fault: str | None) -> None:
    """Of 12 warps, which begin with 168 each, four take more and eight hand over."""
    body = REGISTERS.format(taken=taken, left=left)
    if fault is None:
        assert run(body, SOURCE, threads=384).tolist() == list(range(384))
    else:
        with pytest.raises((Fault, RegisterFault), match=fault):
            run(body, SOURCE, threads=384)
