"""The floor of long queries: what its loop compiles to, how much it multiplies, and which cases it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from perf import wgmma_kernel
from perf.case_sets import case_sets
from perf.cases import FLOORS, Case, attention_case, fixed
from perf.inputs import make_inputs
from perf.providers import providers_of, wgmma
from perf.providers.base import NotSupported
from perf.providers.read import ReadAttention
from perf.providers.wgmma import Wgmma
from perf.wgmma_kernel import LOOP_SHAPES, LoopShape, compile_loop
from tests.support import machine_code

H200_SMS = 132
SHORT = attention_case(fixed(2, 300), q_len=255, num_heads=4, num_kv_heads=2, head_dim=16)
LONG = attention_case(fixed(2, 300), q_len=256, num_heads=4, num_kv_heads=2, head_dim=16)


def loop_of(sass: str) -> str:
    """The code from the label that the first wgmma follows to the branch back to it."""
    start = sass.rindex(".L_x_", 0, sass.index("HGMMA"))
    label = re.match(r"\.L_x_\d+", sass[start:])
    assert label is not None
    back = re.compile(rf"BRA `\({re.escape(label[0])}\)").search(sass, start)
    assert back is not None
    return sass[start : back.end()]


@pytest.mark.parametrize("shape", LOOP_SHAPES, ids=lambda shape: shape.label)
def test_the_loop_does_nothing_but_multiply(shape: LoopShape, tmp_path: Path) -> None:
    """Its FLOP are those of its instructions; no product waits for the one before it, and no accumulator is dropped."""
    ptx, sass = machine_code.dump(compile_loop, shape, tmp_path)
    started = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.f32\.bf16", ptx)
    loop = loop_of(sass)
    assert re.findall(r"HGMMA\.(\d+)x(\d+)x(\d+)\.F32\.BF16", loop) == started and sass.count("HGMMA") == len(started)
    steps = [tuple(map(int, step)) for step in started]
    assert shape.turn_flop == shape.threads // 128 * sum(2 * m * n * k for m, n, k in steps)
    assert {n for _, n, _ in steps} == {shape.columns}
    waits = ["gsb0" in line for line in loop.splitlines() if "HGMMA" in line]
    assert waits == [False] * (len(steps) - 1) + [True], "a product is waited for before the last"
    assert re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", loop) == ["0x1"] and sass.count("WARPGROUP.DEPBAR") == 2
    assert not re.search(r"\b(LD[GS]M?|ST[GS]M?|BAR|SYNCS|MEMBAR)\b", loop)
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"
    stores = re.findall(r"\bSTG\.E(\.64|\.128)?\b", sass[sass.index(loop) :])
    floats = sum({"": 1, ".64": 2, ".128": 4}[width] for width in stores)
    assert floats == 64 * shape.columns // 128, "what a thread stores behind the loop"


def flop_of(case: Case) -> int:
    """Of a causal case: 4 a head, element and pair of a query row and a key, counted row by row."""
    requests = zip(case.tokens(), case.query_rows(), strict=True)
    pairs = sum(length - rows + i + 1 for length, rows in requests for i in range(rows))
    return 4 * case.num_heads * case.head_dim * pairs


@pytest.mark.parametrize("shape", LOOP_SHAPES, ids=lambda shape: shape.label)
def test_it_multiplies_as_much_as_a_case_has(shape: LoopShape) -> None:
    """A step m64nNk16 is 2 x 64 x N x 16; 4 steps a turn, 2 warpgroups on each of 132 SMs."""
    cases = [case for cases in case_sets().values() for case in cases if case.long and case.operation == "attention"]
    assert len(cases) == 53 + 12
    few = set(case_sets()["uneven"])  # so few operations that half a turn is more of them
    for case in cases:
        wanted, turn = flop_of(case), 4 * 2 * H200_SMS * 2 * 64 * shape.columns * 16
        done = shape.turns(1e12 * case.tflop, H200_SMS) * turn
        assert done == pytest.approx(wanted, abs=0.51 * turn), case.name
        assert case in few or done == pytest.approx(wanted, rel=1.3e-3), case.name
    assert shape.turns(1.0, H200_SMS) == 1


def test_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[LoopShape, tuple]] = []
    monkeypatch.setattr(wgmma, "sm_count_of", lambda device: 3)
    monkeypatch.setattr(wgmma_kernel, "compile_loop", lambda shape: lambda *given: launches.append((shape, given)))
    inputs = make_inputs(LONG, torch.device("cpu"), 2**24, 3 * LONG.kv_bytes)
    candidates = Wgmma().prepare(inputs)
    assert len(candidates) == len(LOOP_SHAPES) and len(inputs.sets) > 1
    for shape, candidate in zip(LOOP_SHAPES, candidates, strict=True):
        assert len(candidate.calls) == len(inputs.sets)
        candidate.calls[-1]()
        launched, (a, b, out, num_ctas, turns, stored) = launches[-1]
        assert (launched, num_ctas, stored) == (shape, 3, 0)
        assert turns == candidate.detail["turns"] == max(1, round(flop_of(LONG) / (3 * 2 * 2 * 64 * shape.columns * 64)))
        assert (tuple(a.shape), tuple(b.shape)) == ((2, 128, 64), (2, shape.columns, 64)) and out.shape[1:] == (
            128,
            shape.columns,
        )
        for operand in (a, b):
            assert operand.dtype == torch.bfloat16 and operand.is_contiguous()
            assert operand.float().std() == pytest.approx(1, abs=0.05) and (operand == 0).sum() < 0.01 * operand.numel()


def test_each_case_has_one_floor() -> None:
    """From 256 query rows on the tensor core's, below the memory's; the other provider refuses."""
    assert (SHORT.floor, LONG.floor) == ("read", "wgmma") and {SHORT.floor, LONG.floor} < set(FLOORS)
    assert {case.floor for case in case_sets()["prefill"] + case_sets()["chunks"]} == {"wgmma"}
    assert {case.floor for case in case_sets()["verify"] + case_sets()["throughput"]} == {"read"}
    assert [(p.name, p.operation) for p in providers_of(["wgmma"])] == [("wgmma", "attention")]
    for case, provider, reason in (
        (SHORT, Wgmma(), "the memory limits it: read is its floor"),
        (LONG, ReadAttention(), "the tensor core limits long queries: wgmma stands in its place"),
    ):
        with pytest.raises(NotSupported, match=re.escape(reason)):
            provider.prepare(make_inputs(case, torch.device("cpu"), 2**24, case.kv_bytes))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LOOP_SHAPES, ids=lambda shape: shape.label)
@pytest.mark.parametrize("turns", [0, 1, 6, 7])
def test_its_accumulators_are_the_products(shape: LoopShape, turns: int) -> None:
    """A turn adds A B^T of one of two stages, in order; CTAs beyond those that store leave memory as it is."""
    a, b = (torch.randn(dims, device="cuda").bfloat16() for dims in shape.operand_shapes)
    out = torch.full((4, shape.rows, shape.columns), torch.nan, device="cuda")
    compile_loop(shape)(a, b, out, 4, turns, 3)
    products = a.double() @ b.double().mT
    wanted = products[0] * -(-turns // 2) + products[1] * (turns // 2)
    torch.testing.assert_close(out[:3].double(), wanted.expand(3, -1, -1), rtol=1e-4, atol=1e-3)
    assert out[3].isnan().all()
