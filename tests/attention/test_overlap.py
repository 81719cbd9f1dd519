"""A launch starts while the one before still runs: nothing that this one writes late is read early.

The predecessors here trigger the launch early and write afterwards: lengths, page table, q, K, V and scales (late_writer.py), the
SM90 append, and a decode whose out is the next one's q. The controls at the end plant what a mistake would be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cutlass import Boolean, Int32

import cute_kernels as ck
from cute_kernels.device.kv import source as kv_source
from cute_kernels.device.schedule import opening
from tests.support.bits import Result, differing_rows
from tests.support.harness import assert_close, run, select, select_patched
from tests.support.inputs import NAN, Inputs, Shape, make_inputs
from tests.support.late_writer import LateWriter
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
TRIALS = 100
ROWS = (700, 0, 33, 1500, 1, 2048, 17, 400)
SHAPES = {
    "dense": Shape(num_heads=16, num_kv_heads=4, lengths=ROWS),
    "csr": Shape(num_heads=8, num_kv_heads=1, lengths=ROWS, table_format="csr"),
    "one row": Shape(num_heads=32, num_kv_heads=8, lengths=(4000,)),
    "contiguous": Shape(num_heads=8, num_kv_heads=2, lengths=(1000,) * 6, page_size=0),
    "e4m3": Shape(num_heads=16, num_kv_heads=4, lengths=ROWS, **STORAGES["e4m3"]),
    "int8 token": Shape(num_heads=32, num_kv_heads=8, lengths=ROWS, **STORAGES["int8 token"]),
    "129 rows": Shape(num_heads=8, num_kv_heads=2, lengths=(*(ROWS * 16), 5)),
}
WHOLE = {"max_workspace_bytes": 0}  # no CTA waits for another: what a planted mistake spoils cannot hang


class Late:
    """A problem whose every operand is written late by the kernel before."""

    def __init__(self, plan: ck.PagedDecodePlan, inputs: Inputs, seed: int = 0) -> None:
        self.plan, self.inputs, self.table = plan, inputs, inputs.table() if inputs.shape.page_size else None
        self.out, self.lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:2], device="cuda")
        self.workspace = plan.new_workspace()
        tables = [] if self.table is None else [t for t in self.table.operands if t is not None]
        values = [inputs.q, inputs.k, inputs.v, *(s for s in inputs.scales.values() if s is not None)]
        generator = torch.Generator("cuda").manual_seed(seed)
        spoiled = [other_lengths_and_pages(t, generator) for t in tables] + [
            torch.full_like(t.view(torch.uint8), 0xFF) for t in values
        ]
        self.writer = LateWriter(tables + [t.view(torch.uint8) for t in values], spoiled)

    def launch(self) -> None:
        self.writer.launch()
        kept = {**self.inputs.scales, "out": self.out, "lse": self.lse, "workspace": self.workspace}
        table = () if self.table is None else (self.table,)
        self.plan.run(self.inputs.q, self.inputs.k, self.inputs.v, *table, **kept)

    def wrong(self, launch: Callable[[], None], expected: Result, trials: int = TRIALS) -> int:
        """Rows that differ from `expected` over so many launches."""
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(trials):
            self.writer.spoil()
            self.out.fill_(NAN), self.lse.fill_(NAN)
            torch.cuda.synchronize()
            launch()
            wrong += differing_rows((self.out, self.lse), expected).sum()
        return int(wrong)


def other_lengths_and_pages(table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other entries of the same table tensor: in another order, which lengths, pages and indptr all survive, or out of range."""
    flat = table.flatten()
    order = torch.randperm(len(flat), device="cuda", generator=generator)
    return flat[order].view_as(table).contiguous() if len(flat) > 1 else table // 2


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


@pytest.mark.parametrize("by_graph", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "invariant"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_operands_that_are_written_late(shape: Shape, batch_invariant: bool, by_graph: bool) -> None:
    inputs, plan = make_inputs(shape, "cuda"), select(shape, "sm90", batch_invariant=batch_invariant)
    expected = run(plan, inputs)
    assert_close(inputs, *expected)
    late = Late(plan, inputs)
    late.launch()
    launch = captured(late.launch).replay if by_graph else late.launch
    assert late.wrong(launch, expected) == 0
    assert plan.status() is None, "what was read too early is reported as a fault"
    assert not late.workspace.any()


BATCH, HEADS, KV_HEADS, DIM, PAGE, STEPS = 8, 16, 4, 128, 16, 24


class Steps:
    """Decode steps of one layer: append at the end of each row, attend, and the output is the next step's query."""

    def __init__(self, storage: dict[str, object], layout: ck.KVLayout) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        width = 64
        options = {"kv_dtype": storage.get("kv_dtype", ck.KVDtype.BF16), "layout": layout}
        options |= {name: storage.get(name, ck.KVScale.NONE) for name in ("k_scale", "v_scale")}
        append = ck.KVAppendDescriptor(
            num_tokens=BATCH,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            page_size=PAGE,
            table_format="dense",
            dtype=torch.bfloat16,
            **options,
        )
        decode = ck.PagedDecodeDescriptor(BATCH, HEADS, KV_HEADS, DIM, PAGE, torch.bfloat16, max_seq_len=width * PAGE, **options)
        self.append, self.decode = ck.KVAppendPlan.select(append), ck.PagedDecodePlan.select(decode)
        self.workspace = self.decode.new_workspace()
        pages = BATCH * width
        inner = (KV_HEADS, PAGE) if layout.order == "HND" else (PAGE, KV_HEADS)
        dtype = options["kv_dtype"].torch_dtype
        self.caches = [torch.zeros(pages, *inner, DIM, device="cuda", dtype=dtype) for _ in range(2)]
        self.scales = {
            name: torch.zeros(pages, PAGE, KV_HEADS, device="cuda", dtype=scale.dtype)
            for name in ("k_scale", "v_scale")
            if (scale := options[name]).granularity == "token"
        }
        table = torch.randperm(pages, device="cuda", generator=generator).int().view(BATCH, width)
        self.lengths = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
        self.table = ck.PageTable.dense(table, self.lengths)
        self.first = torch.randn(BATCH, HEADS, DIM, device="cuda", generator=generator).bfloat16()
        self.tokens = torch.randn(2, STEPS, BATCH, KV_HEADS, DIM, device="cuda", generator=generator).bfloat16()

    def run(self, between: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of every step from empty caches; `between` comes between any two launches."""
        for tensor in (*self.caches, *self.scales.values()):
            tensor.view(torch.uint8).fill_(0xFF)
        self.lengths.fill_(1)
        outs = torch.full((STEPS, *self.first.shape), NAN, device="cuda", dtype=torch.bfloat16)
        lses = torch.full((STEPS, BATCH, HEADS), NAN, device="cuda")
        q = self.first
        for step in range(STEPS):
            between()
            self.append.run(*self.tokens[:, step], *self.caches, self.table, **self.scales)
            between()
            self.decode.run(q, *self.caches, self.table, **self.scales, out=outs[step], lse=lses[step], workspace=self.workspace)
            q = outs[step]
            between()
            self.lengths.add_(1)
        torch.cuda.synchronize()
        return outs, lses


@pytest.mark.parametrize("layout", [ck.KVLayout.HND, ck.KVLayout.NHD], ids=["HND", "NHD"])
@pytest.mark.parametrize("storage", STORAGES)
def test_append_then_decode_whose_out_is_the_next_query(storage: str, layout: ck.KVLayout) -> None:
    """In one stream, as when each launch waits for the one before to end."""
    steps = Steps(STORAGES[storage], layout)
    outs, lses = steps.run(torch.cuda.synchronize)
    assert torch.isfinite(lses).all() and outs.flatten(2).any(2).all()
    for _ in range(20):
        got = steps.run(lambda: None)
        assert torch.equal(got[0].view(torch.int16), outs.view(torch.int16))
        assert torch.equal(got[1].view(torch.int32), lses.view(torch.int32))


def differing(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object, shape: Shape) -> int:
    """Rows that a kernel with another `owner.name` gets wrong behind a late writer."""
    inputs = make_inputs(shape, "cuda")
    expected = run(select(shape, "sm90", **WHOLE), inputs)
    plan = select_patched(monkeypatch, owner, name, value, shape, "sm90", **WHOLE)
    late = Late(plan, inputs)
    late.launch()
    return late.wrong(late.launch, expected, trials=10)


CONTROL = SHAPES["dense"]


def test_control_without_the_second_read_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(monkeypatch, opening, "same_rows", lambda rows, others: Boolean(True), CONTROL) > 0


def test_control_with_pages_read_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[Int32] = []
    share_of, first_pages = opening.share_of, opening.first_pages

    def share_then_pages(spec, rows, batch, lanes, many):
        share = share_of(spec, rows, batch, lanes, many)
        early.append(first_pages(spec, rows, share, opening.first_row(spec, lanes, share.row, batch)))
        return share

    monkeypatch.setattr(opening, "share_of", share_then_pages)
    shape = replace(CONTROL, lengths=(600,) * 8)  # in any order the same: only the pages come late
    assert differing(monkeypatch, opening, "first_pages", lambda *_: early[-1], shape) > 0


def test_control_without_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass.cute as cute

    assert differing(monkeypatch, cute.arch, "griddepcontrol_wait", lambda: None, CONTROL) > 0


def test_reads_before_the_wait_may_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.cg` is a hint: reads behind the wait see what the kernel before wrote, also where L1 has kept a line from before it."""
    import cutlass.cute as cute

    load = cute.arch.load
    inputs = make_inputs(CONTROL, "cuda")
    expected = run(select(CONTROL, "sm90"), inputs)
    cached = lambda pointer, dtype, cop=None: load(pointer, dtype, cop="ca")  # noqa: E731
    plan = select_patched(monkeypatch, kv_source.cute.arch, "load", cached, CONTROL, "sm90")
    late = Late(plan, inputs)
    late.launch()
    assert late.wrong(late.launch, expected) == 0


def test_the_late_writer_is_late() -> None:
    """Without a wait for it, a plain kernel of the same stream would come after it: here the values are there, bit for bit."""
    live = torch.arange(1003, dtype=torch.int32, device="cuda")
    writer = LateWriter([live], [torch.full_like(live, -1)])
    writer.spoil()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    writer.launch()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) * 1e3 > 35
    assert math.isclose(float(live.double().sum()), 1003 * 1002 / 2)
