"""Adversarial case 16: one captured graph, replayed 10,000 times over lengths, tables and live rows changed on the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.api import plan_cache
from cute_kernels.api.workspace_cache import forget_workspaces
from tests.support.bits import Result, differing_rows
from tests.support.harness import assert_bitwise, assert_close, select
from tests.support.inputs import NAN, Inputs, Shape, make_inputs, store
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
REPLAYS = 10_000
SETS = 64  # different inputs among which each replay picks one
CHECKED = 4  # sets whose eager result is compared with f64
BATCH, WIDTH, PAGE = 32, 192, 16  # rows, table columns, tokens a page: up to 3,072 tokens a row
SHAPE = Shape(page_size=PAGE, lengths=(0,) * BATCH, max_seq_len=WIDTH * PAGE)
CONTIGUOUS = Shape(page_size=0, lengths=(2047,) * 8)
Set = tuple[torch.Tensor, ...]  # what a replay changes: q, then a table's operands or the K of a contiguous cache
Launch = Callable[..., Result]


@pytest.mark.parametrize(
    ("arch", "table_format", "batch_invariant", "storage"),
    [
        ("sm90", "dense", False, "16 bits"),
        ("sm90", "csr", False, "16 bits"),
        ("sm80", "dense", False, "16 bits"),
        ("sm90", "dense", True, "16 bits"),
        ("sm90", "dense", False, "e4m3"),
        ("sm90", "csr", False, "int8 token"),
        ("sm80", "dense", False, "int8 token"),
    ],
)
def test_paged_replays_equal_eager_runs(arch: str, table_format: str, batch_invariant: bool, storage: str) -> None:
    """0 to all rows are live; rows have up to 3,072 tokens, so that CTAs cut them."""
    shape = replace(SHAPE, table_format=table_format, **STORAGES[storage])
    plan = select(shape, arch, batch_invariant=batch_invariant)
    assert plan.workspace_size() > 0
    generator = torch.Generator("cuda").manual_seed(16)
    size = (BATCH * WIDTH, shape.num_kv_heads, PAGE, shape.head_dim)
    k, v = (torch.randn(size, device="cuda", generator=generator).to(shape.dtype) for _ in range(2))
    pool = store(Inputs(shape, k[0, :, 0], k, v), (BATCH * WIDTH, PAGE, shape.num_kv_heads), seed=16)
    tables = [_random_table(index, generator) for index in range(SETS)]
    queries = [_random_query(shape, generator) for _ in tables]
    operands = tables if table_format == "dense" else [_csr(*table) for table in tables]

    def launch(inputs: Set, **outputs: torch.Tensor) -> Result:
        table = getattr(ck.PageTable, table_format)(*inputs[1:])
        return plan.run(inputs[0], pool.k, pool.v, table, **pool.scales, **outputs)

    expected = _replay(plan, launch, [(q, *table) for q, table in zip(queries, operands, strict=True)])
    for q, (table, seq_lens), result in list(zip(queries, tables, expected, strict=True))[:CHECKED]:
        lengths = tuple(seq_lens.tolist())
        rows = [table[row, : -(-length // PAGE)] for row, length in enumerate(lengths)]
        assert_close(replace(pool, shape=replace(shape, lengths=lengths), q=q, rows=rows), *result)


def test_contiguous_replays_equal_eager_runs() -> None:
    plan, first = select(CONTIGUOUS, "sm90"), make_inputs(CONTIGUOUS, "cuda")
    assert plan.workspace_size() > 0
    generator = torch.Generator("cuda").manual_seed(16)
    sets = [
        (_random_query(CONTIGUOUS, generator), torch.randn(first.k.shape, device="cuda", generator=generator).to(first.k.dtype))
        for _ in range(SETS)
    ]

    def launch(inputs: Set, **outputs: torch.Tensor) -> Result:
        return plan.run(*inputs, first.v, **outputs)

    expected = _replay(plan, launch, sets)
    for (q, k), result in list(zip(sets, expected, strict=True))[:CHECKED]:
        assert_close(Inputs(CONTIGUOUS, q, k, first.v), *result)


def _replay(plan: ck.PagedDecodePlan | ck.FlashDecodingPlan, launch: Launch, sets: list[Set]) -> list[Result]:
    """Runs every set eagerly, then REPLAYS random ones by a graph; returns the eager results, which each replay equalled."""
    expected = []
    for inputs in sets:
        workspace = plan.new_workspace()
        expected.append(launch(inputs, workspace=workspace))
    held = tuple(torch.empty_like(tensor) for tensor in sets[0])
    out, lse = (torch.empty_like(tensor) for tensor in expected[0])
    workspace = plan.new_workspace()
    _copy(held, sets[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(held, out=out, lse=lse, workspace=workspace)
    wrong = torch.zeros(len(sets), dtype=torch.int64, device="cuda")
    picks = random.Random(16)
    for _ in range(REPLAYS):
        index = picks.randrange(len(sets))
        _copy(held, sets[index])
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        wrong[index] += differing_rows((out, lse), expected[index]).sum()
    assert not workspace.any(), "a launch leaves the workspace as it found it"
    assert wrong.tolist() == [0] * len(sets), "rows that differ from the eager run, by set"
    assert differing_rows(expected[1], expected[2]).any(), "sets that agree would hide a graph that ignores them"
    return expected


def test_the_graphs_of_torch_compile() -> None:
    """Its warm-up run, which selects the plan, may leave nothing in the pool of its graphs; replays follow lengths and tables."""
    generator = torch.Generator("cuda").manual_seed(17)
    size = (BATCH * WIDTH, SHAPE.num_kv_heads, PAGE, SHAPE.head_dim)
    k, v = (torch.randn(size, device="cuda", generator=generator).to(SHAPE.dtype) for _ in range(2))
    sets = [(_random_query(SHAPE, generator), *_random_table(index, generator)) for index in range(5)]

    def layer(q: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor) -> Result:
        return ck.decode_attention(q, k, v, page_table=table, seq_lens=seq_lens)

    forget_workspaces(), plan_cache.plan_of.cache_clear()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    got = [tuple(tensor.clone() for tensor in compiled(*each)) for each in sets]
    for ours, each in zip(got, sets, strict=True):
        assert_bitwise(ours, layer(*each))


def _copy(targets: Set, sources: Set) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _random_query(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    size = (len(shape.lengths), shape.num_heads, shape.head_dim)
    return torch.randn(size, device="cuda", generator=generator).to(shape.dtype)


def _random_table(index: int, generator: torch.Generator) -> Set:
    """(table, seq_lens) over a shuffled pool: set 0 has no live row, set 1 has all, the others a random number of them."""

    def below(limit: int, *size: int) -> torch.Tensor:
        return torch.randint(limit, size, device="cuda", generator=generator)

    live = {0: 0, 1: BATCH}.get(index, int(below(BATCH + 1, 1)))
    longest = 1 + int(below(WIDTH * PAGE, 1)) if index > 1 else WIDTH * PAGE
    order = torch.randperm(BATCH, device="cuda", generator=generator)
    seq_lens = torch.where(order < live, 1 + below(longest, BATCH), 0)
    table = torch.randperm(BATCH * WIDTH, device="cuda", generator=generator).view(BATCH, WIDTH)
    used = torch.arange(WIDTH, device="cuda") * PAGE < seq_lens[:, None]
    return torch.where(used, table, -1).int(), seq_lens.int()


def _csr(table: torch.Tensor, seq_lens: torch.Tensor) -> Set:
    """(indptr, indices, last_page_len) of a dense table; the indices keep room for every table of this width."""
    used = torch.arange(WIDTH, device="cuda") * PAGE < seq_lens[:, None]
    indices = torch.full((BATCH * WIDTH,), -1, dtype=torch.int32, device="cuda")
    pages = table[used]
    indices[: len(pages)] = pages
    indptr = torch.zeros(BATCH + 1, dtype=torch.int32, device="cuda")
    indptr[1:] = used.sum(1).cumsum(0)
    last = torch.where(seq_lens > 0, (seq_lens - 1) % PAGE + 1, 0)
    return indptr, indices, last.int()
