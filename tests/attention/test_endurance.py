"""Adversarial cases 12, 18, 19 and 21: repetition under load, streams, threads at first use, and very large problems."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

import cute_kernels as ck
from cute_kernels.compile.kernels import compiled_specs
from tests.support.bits import Result, differing_rows
from tests.support.harness import assert_bitwise, assert_close, run, select
from tests.support.inputs import NAN, Inputs, Shape, make_inputs, store
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
ARCHES = pytest.mark.parametrize("arch", ["sm90", "sm80"])
PLANS = pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "invariant"])
REPEATS = 10_000
SPARE_BYTES = 1 << 30  # what the test of full memory leaves free
LONGEST = 2_000_000
CUT = Shape(num_heads=16, num_kv_heads=4, lengths=(3000, 1, 700, 4096), max_seq_len=4096)  # CTAs share its long rows
HUGE = Shape(num_heads=4, num_kv_heads=1, head_dim=64, page_size=64, max_seq_len=LONGEST)


class Buffers:
    """Outputs and a workspace of a plan's own; `run` poisons the outputs first."""

    def __init__(self, plan: ck.PagedDecodePlan, inputs: Inputs) -> None:
        self.plan, self.inputs, self.table = plan, inputs, inputs.table()
        self.out, self.lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:2], device="cuda")
        self.workspace = plan.new_workspace()

    def run(self) -> Result:
        self.out.fill_(NAN), self.lse.fill_(NAN)
        kept = {**self.inputs.scales, "out": self.out, "lse": self.lse, "workspace": self.workspace}
        return self.plan.run(self.inputs.q, self.inputs.k, self.inputs.v, self.table, **kept)


def repeat(plan: ck.PagedDecodePlan, inputs: Inputs, rival: Rival | None = None) -> None:
    """REPEATS runs that equal the first, bit for bit; the first is right."""
    first, buffers = run(plan, inputs), Buffers(plan, inputs)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        if rival is not None:
            rival.work()
        wrong += differing_rows(buffers.run(), first).sum()
    assert int(wrong) == 0
    assert_close(inputs, *first)


class Rival:
    """Matrix products and copies on a stream of their own, which take SMs, L2 and bandwidth."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.factor = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty_like(self.factor)
        self.source, self.target = torch.zeros(2, 16 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def work(self) -> None:
        with torch.cuda.stream(self.stream):
            torch.mm(self.factor, self.factor, out=self.product)
            self.target.copy_(self.source)


@pytest.mark.parametrize(
    ("contended", "arch", "batch_invariant", "storage"),
    [
        *product((False, True), ("sm90", "sm80"), (False, True), ("16 bits",)),
        (False, "sm90", False, "e4m3"),
        (True, "sm90", True, "e4m3"),
        (True, "sm90", False, "int8 token"),
        (False, "sm90", True, "int8 token"),
        (True, "sm80", False, "int8 token"),
    ],
)
def test_ten_thousand_repeats(contended: bool, arch: str, batch_invariant: bool, storage: str) -> None:
    """Idle, and with a rival for SMs and bandwidth."""
    shape = replace(CUT, **STORAGES[storage])
    plan = select(shape, arch, batch_invariant=batch_invariant)
    assert plan.workspace_size() > 0
    rival = Rival() if contended else None
    repeat(plan, make_inputs(shape, "cuda"), rival)
    torch.cuda.synchronize()  # the rival's memory is its own until it is done


@contextlib.contextmanager
def memory_nearly_full() -> Iterator[None]:
    """All of the device's memory but SPARE_BYTES is taken inside."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - SPARE_BYTES), dtype=torch.uint8, device="cuda")
    try:
        assert torch.cuda.mem_get_info()[0] < 2 * SPARE_BYTES
        yield
    finally:
        del hog
        torch.cuda.empty_cache()


@pytest.mark.exclusive
@PLANS
@ARCHES
def test_ten_thousand_repeats_with_memory_nearly_full(arch: str, batch_invariant: bool) -> None:
    shape = replace(HUGE, lengths=CUT.lengths)
    with memory_nearly_full():
        plan = select(shape, arch, batch_invariant=batch_invariant)
        assert plan.workspace_size() > 0
        repeat(plan, make_inputs(shape, "cuda"))


def captured(buffers: Buffers, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of one run into the buffers; they are on `stream`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        buffers.run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            buffers.run()
    return graph


@PLANS
@ARCHES
def test_two_graphs_on_two_streams(arch: str, batch_invariant: bool) -> None:
    """One plan, two graphs of different inputs with workspaces of their own, replayed at the same time."""
    plan = select(CUT, arch, batch_invariant=batch_invariant)
    streams = [torch.cuda.Stream() for _ in range(2)]
    shapes = CUT, replace(CUT, lengths=(9, 4000, 0, 3100))
    inputs = [make_inputs(shape, "cuda", seed=seed) for seed, shape in enumerate(shapes)]
    expected, buffers = [run(plan, i) for i in inputs], [Buffers(plan, i) for i in inputs]
    torch.cuda.synchronize()
    graphs = [captured(*pair) for pair in zip(buffers, streams, strict=True)]
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(1000):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                graphs[i].replay()
                wrong[i] += differing_rows((buffers[i].out, buffers[i].lse), expected[i]).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]
    for pair in zip(inputs, expected, strict=True):
        assert_close(pair[0], *pair[1])


@ARCHES
def test_a_producer_on_a_side_stream(arch: str) -> None:
    """q, K and the lengths are written late by another stream, which an event orders: no run sees what was there before."""
    plan, inputs = select(CUT, arch), make_inputs(CUT, "cuda")
    expected, buffers, side = run(plan, inputs), Buffers(plan, inputs), torch.cuda.Stream()
    late = [inputs.q, inputs.k, buffers.table.operands[1]]
    kept, wrong = [tensor.clone() for tensor in late], torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        for tensor in late:
            tensor.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)  # cycles
            for tensor, source in zip(late, kept, strict=True):
                tensor.copy_(source)
        torch.cuda.current_stream().wait_stream(side)
        wrong += differing_rows(buffers.run(), expected).sum()
    assert int(wrong) == 0


def test_32_threads_at_first_use_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real compiles and first launches; head_dim 112 is no other test's, so that this is its first use."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "off")  # else a second run of the test would compile nothing
    shape = Shape(head_dim=112, dtype=torch.float16, lengths=(0, 40, 700), max_seq_len=4096)
    inputs, before, start = make_inputs(shape, "cuda"), set(compiled_specs()), threading.Barrier(32)
    results: list[Result] = []
    errors: list[Exception] = []

    def first_use() -> None:
        try:
            start.wait()
            results.append(run(select(shape, "sm90"), inputs))
            torch.cuda.synchronize()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=first_use) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 32
    assert len(set(compiled_specs()) - before) == 1
    for result in results:
        assert_bitwise(result, results[0])
    assert_close(inputs, *results[0])


@ARCHES
@pytest.mark.parametrize(
    ("batch", "batch_invariant", "storage"),
    [
        (65_535, False, "16 bits"),
        (65_536, False, "16 bits"),
        (70_000, False, "16 bits"),
        (70_000, True, "16 bits"),
        (70_000, False, "int8 token"),
    ],
)
def test_large_batches(batch: int, batch_invariant: bool, storage: str, arch: str) -> None:
    """Rows of 0 to 40 tokens: 131,070 and more (row, KV head) work items, past 16,384 and past a grid axis of 65,535."""
    generator, pool, width = torch.Generator("cuda").manual_seed(batch), 4096, 3

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=generator, dtype=torch.float32).bfloat16()

    def below(limit: int, *size: int) -> torch.Tensor:
        return torch.randint(limit, size, device="cuda", generator=generator, dtype=torch.int32)

    shape = Shape(4, 2, 64, lengths=(0,) * batch, max_seq_len=48, **STORAGES[storage])
    q = normal(batch, 4, 64)
    inputs = store(Inputs(shape, q, normal(pool, 2, 16, 64), normal(pool, 2, 16, 64)), (pool, 16, 2), seed=batch)
    table, seq_lens = below(pool, batch, width), below(41, batch)
    plan = select(shape, arch, batch_invariant=batch_invariant)
    out, lse = torch.full_like(q, NAN), torch.full((batch, 4), NAN, device="cuda")
    workspace = plan.new_workspace()
    outputs = {"out": out, "lse": lse, "workspace": workspace}
    plan.run(q, inputs.k, inputs.v, ck.PageTable.dense(table, seq_lens), **inputs.scales, **outputs)
    empty = seq_lens == 0
    assert torch.equal(torch.isneginf(lse), empty[:, None].expand(-1, 4)) and not torch.isnan(lse).any()
    assert torch.isfinite(out).all() and not out[empty].view(torch.int16).any()
    assert out[~empty].flatten(1).any(1).all()
    picked = [*range(4), *range(65_528, batch)[:16], *range(batch - 4, batch), *below(batch, 300).tolist()]
    lengths = tuple(seq_lens[picked].tolist())
    rows = [table[row, : -(-length // 16)] for row, length in zip(picked, lengths, strict=True)]
    found = replace(inputs, shape=replace(shape, lengths=lengths), q=q[picked], rows=rows)
    assert_close(found, out[picked], lse[picked])


@PLANS
@ARCHES
@pytest.mark.parametrize(
    "length", [65_537, 131_072, *(pytest.param(n, marks=pytest.mark.exclusive) for n in (1_048_576, LONGEST))]
)
def test_long_rows(length: int, arch: str, batch_invariant: bool) -> None:
    shape = replace(HUGE, lengths=(length, 0, 3))
    inputs = make_inputs(shape, "cuda")
    assert_close(inputs, *run(select(shape, arch, batch_invariant=batch_invariant), inputs))
