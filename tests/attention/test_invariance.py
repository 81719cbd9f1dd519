"""Adversarial case 20: a row's bits alone and at any place of a batch of 2 to 1,024 rows with other lengths.

The same harness must find differences under the default plan and after one flipped bit: it can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch

import cute_kernels as ck
from tests.support.bits import Result, differing_rows
from tests.support.harness import BACKENDS, assert_close, device_of, select
from tests.support.inputs import NAN, Inputs, Shape, store
from tests.support.storage import STORAGES

PAGE, POOL = 16, 2048  # tokens a page; pages that the rows of every batch share
SHAPE = Shape(page_size=PAGE)
GPU_PROBES = (1, 2, 15, 16, 17, 63, 64, 65, 200, 255, 256, 257, 511, 777, 1000, 1024, 1025, 1600, 2047, 2048, 2500, 3001, 4096)
CPU_PROBES = (1, 15, 16, 17, 65, 200)
GPU_BATCHES = {2: 200, 3: 200, 7: 100, 32: 60, 64: 50, 256: 16, 1024: 10}  # rows of a batch: batches
CPU_BATCHES = {2: 10, 3: 10, 7: 10, 32: 5}
GPU_RUNS = [
    *((arch, captured, "16 bits") for arch in ("sm90", "sm80") for captured in (False, True)),
    *(("sm90", captured, storage) for captured in (False, True) for storage in ("e4m3", "int8 token")),
    ("sm80", False, "int8 token"),
]
RUNS = [
    *(pytest.param("cpu", False, storage, id=f"cpu-{storage}") for storage in STORAGES),
    *(pytest.param(*run, id=f"{run[0]}-{'graph' if run[1] else 'eager'}-{run[2]}", marks=pytest.mark.gpu) for run in GPU_RUNS),
]


class Batch(NamedTuple):
    """Rows of a launch; row places[i] is probe probes[i]."""

    q: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    places: torch.Tensor
    probes: torch.Tensor


@dataclass
class Probes:
    """Probe rows, one of each length, over one pool of pages; fields: what a Shape says of the pool's storage."""

    pool: Inputs
    table: torch.Tensor
    lengths: tuple[int, ...]
    fields: dict[str, Any]

    @classmethod
    def make(cls, device: str, lengths: tuple[int, ...], storage: str = "16 bits") -> Probes:
        generator = torch.Generator(device).manual_seed(20)
        size = (POOL, SHAPE.num_kv_heads, PAGE, SHAPE.head_dim)
        k, v, q = (
            torch.randn(s, device=device, generator=generator).to(SHAPE.dtype)
            for s in (size, size, (len(lengths), SHAPE.num_heads, SHAPE.head_dim))
        )
        width = -(-max(lengths) // PAGE)
        table = torch.rand(len(lengths), POOL, device=device, generator=generator).argsort(1)[:, :width].int()
        pool = Inputs(replace(SHAPE, **STORAGES[storage]), q, k, v)
        return cls(store(pool, (POOL, PAGE, SHAPE.num_kv_heads), seed=20), table, lengths, STORAGES[storage])

    @property
    def q(self) -> torch.Tensor:
        """The probes' queries."""
        return self.pool.q

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.q.device)

    def shape(self, batch_size: int) -> Shape:
        return Shape(page_size=PAGE, lengths=(0,) * batch_size, max_seq_len=max(self.lengths), **self.fields)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Probes in half of the places, rows of random lengths and pages in the others."""

        def below(limit: int, *extents: int) -> torch.Tensor:
            return torch.randint(limit, extents, device=self.q.device, generator=generator)

        places = torch.randperm(size, device=self.q.device, generator=generator)[: max(1, size // 2)]
        probes = below(len(self.lengths), len(places))
        q = torch.randn(size, *self.q.shape[1:], device=self.q.device, generator=generator).to(self.q.dtype)
        table, seq_lens = below(POOL, size, self.table.shape[1]).int(), below(max(self.lengths) + 1, size).int()
        q[places], table[places], seq_lens[places] = self.q[probes], self.table[probes], self.seq_lens[probes]
        return Batch(q, table, seq_lens, places, probes)

    def alone(self, plan: ck.PagedDecodePlan) -> Result:
        """(out, lse) of every probe, each in a launch of its own."""
        launch = launcher(plan, self, plan.new_workspace())
        rows = zip(self.q.split(1), self.table.split(1), self.seq_lens.split(1), strict=True)
        results = [launch(*row) for row in rows]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def launcher(plan: ck.PagedDecodePlan, probes: Probes, workspace: torch.Tensor) -> Callable[..., Result]:
    """launch(q, table, seq_lens, out=, lse=) with the probes' pool and one workspace from launch to launch."""
    pool, kept = probes.pool, {**probes.pool.scales, "workspace": workspace}

    def launch(q: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor, **outputs: torch.Tensor) -> Result:
        return plan.run(q, pool.k, pool.v, ck.PageTable.dense(table, seq_lens), **kept, **outputs)

    return launch


def replayer(plan: ck.PagedDecodePlan, probes: Probes, workspace: torch.Tensor, first: Batch) -> Callable[..., Result]:
    """The same by a graph captured on `first`; whoever replays it keeps the workspace alive."""
    held = [tensor.clone() for tensor in first[:3]]
    out, lse = torch.empty_like(first.q), torch.empty(first.q.shape[:2], device="cuda")
    launch, graph = launcher(plan, probes, workspace), torch.cuda.CUDAGraph()
    launch(*held, out=out, lse=lse)
    with torch.cuda.graph(graph):
        launch(*held, out=out, lse=lse)

    def replay(*inputs: torch.Tensor) -> Result:
        for target, source in zip(held, inputs, strict=True):
            target.copy_(source)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        return out, lse

    return replay


def compare(probes: Probes, alone: Result, plan: ck.PagedDecodePlan, batches: int, captured: bool) -> tuple[int, int]:
    """(comparisons, differences) of probes in `batches` random batches of the plan's size with the same probes alone."""
    size, generator = plan.descriptor.batch_size, torch.Generator(probes.q.device).manual_seed(plan.descriptor.batch_size)
    compared, wrong = 0, torch.zeros((), dtype=torch.int64, device=probes.q.device)
    first, workspace = probes.batch(size, generator) if captured else None, plan.new_workspace()
    launch = replayer(plan, probes, workspace, first) if first else launcher(plan, probes, workspace)
    for _ in range(batches):
        batch = probes.batch(size, generator)
        out, lse = launch(*batch[:3])
        expected = alone[0][batch.probes], alone[1][batch.probes]
        wrong += differing_rows((out[batch.places], lse[batch.places]), expected).sum()
        compared += len(batch.places)
    assert not workspace.any()
    return compared, int(wrong)


@pytest.mark.parametrize(("backend", "captured", "storage"), RUNS)
def test_a_row_alone_equals_the_row_in_any_batch(backend: str, captured: bool, storage: str) -> None:
    on_gpu = backend != "cpu"
    probes = Probes.make(device_of(backend), GPU_PROBES if on_gpu else CPU_PROBES, storage)
    single = select(probes.shape(1), backend, batch_invariant=True)
    assert single.precision_guarantee.batch_invariant and (single.workspace_size() > 0) == on_gpu
    alone = probes.alone(single)
    found = [
        compare(probes, alone, select(probes.shape(size), backend, batch_invariant=True), batches, captured)
        for size, batches in (GPU_BATCHES if on_gpu else CPU_BATCHES).items()
    ]
    compared, wrong = map(sum, zip(*found, strict=True))
    assert compared >= (10_000 if on_gpu else 100)
    assert wrong == 0, f"of {compared} comparisons; (comparisons, differences) by batch size: {found}"
    rows = [pages[: -(-length // PAGE)] for pages, length in zip(probes.table, probes.lengths, strict=True)]
    shape = Shape(page_size=PAGE, lengths=probes.lengths, **probes.fields)
    assert_close(replace(probes.pool, shape=shape, rows=rows), *alone)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_the_default_plan_is_not_batch_invariant(backend: str) -> None:
    """The failing control: plans that cut rows where the batch says must show differences in this harness."""
    probes = Probes.make("cuda", GPU_PROBES)
    single = select(probes.shape(1), backend)
    assert not single.precision_guarantee.batch_invariant
    alone = probes.alone(single)
    found = [compare(probes, alone, select(probes.shape(size), backend), 5, False) for size in (7, 64, 1024)]
    assert sum(wrong for _, wrong in found) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_flipped_bit_is_found(backend: str) -> None:
    """The other control: the last bit of one element of one probe makes every comparison with that probe a difference."""
    probes = Probes.make(device_of(backend), CPU_PROBES)
    out, lse = probes.alone(select(probes.shape(1), backend, batch_invariant=True))
    out[-1].view(torch.int16)[-1, -1] ^= 1
    plan = select(probes.shape(32), backend, batch_invariant=True)
    _, wrong = compare(probes, (out, lse), plan, 3, False)
    generator = torch.Generator(probes.q.device).manual_seed(32)
    assert wrong == sum(int((probes.batch(32, generator).probes == len(CPU_PROBES) - 1).sum()) for _ in range(3)) > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [65, 1000, 3000])
def test_contiguous_rows(length: int, backend: str) -> None:
    """Contiguous rows alone and in random places of batches of 2 to 64 rows, which all have the same length."""
    total = 8 if backend == "cpu" else 64
    shape = Shape(page_size=0, lengths=(length,) * total)
    device, generator = device_of(backend), torch.Generator(device_of(backend)).manual_seed(length)
    sizes = ((total, SHAPE.num_heads, SHAPE.head_dim), *[(total, SHAPE.num_kv_heads, length, SHAPE.head_dim)] * 2)
    q, k, v = (torch.randn(size, device=device, generator=generator).to(shape.dtype) for size in sizes)

    def results(rows: torch.Tensor, plan: ck.FlashDecodingPlan) -> Result:
        workspace = plan.new_workspace()
        return plan.run(q[rows], k[rows], v[rows], workspace=workspace)

    def plan_of(size: int) -> ck.FlashDecodingPlan:
        return select(Shape(page_size=0, lengths=(length,) * size), backend, batch_invariant=True)

    singles = [results(row, plan_of(1)) for row in torch.arange(total, device=device).split(1)]
    alone = torch.cat([out for out, _ in singles]), torch.cat([lse for _, lse in singles])
    assert_close(Inputs(shape, q, k, v), *alone)
    for size in (2, 7, total):
        rows = torch.randperm(total, device=device, generator=generator)[:size]
        assert not differing_rows(results(rows, plan_of(size)), (alone[0][rows], alone[1][rows])).any()
