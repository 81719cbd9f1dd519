"""What only a GPU can show of several query rows: graphs over other rows and lengths, streams, fewer SMs, no synchronisation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from tests.support.attention_cases import CASES, Case, case, make_attention
from tests.support.attention_harness import assert_close, run, select, tensors_of
from tests.support.bits import differing_rows
from tests.support.harness import assert_bitwise
from tests.support.inputs import NAN
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
ARCHES = ("sm90", "sm80")
NAMED = {c.name: c for c in CASES}
SETS, REPLAYS = 24, 10_000
LENGTHS = (0, 1, 17, 64, 300, 1000, 2500, 90)
Q_LENS = (1, 4, 0, 8, 2, 5, 16, 3)


def mixed(**fields: object) -> Case:
    """Rows of all lengths, some cut between CTAs, of a cache of 4 query heads a KV head."""
    storage = STORAGES[fields.pop("storage", "16 bits")]
    cache = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "lengths": LENGTHS, **storage}
    return case("mixed", cache, q_lens=Q_LENS, max_q_len=16, **fields)


def shuffled(described: Case, rng: random.Random) -> Case:
    """The same numbers of keys and of query rows, each in another order: every tensor keeps its shape."""
    lengths, q_lens = list(described.cache.lengths), list(described.q_lens)
    rng.shuffle(lengths), rng.shuffle(q_lens)
    return replace(described, cache=replace(described.cache, lengths=tuple(lengths)), q_lens=tuple(q_lens))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window_left": 100, "softcap": 3.0, "alibi": True, "sinks": True},
        {"tree": True},
        {"table": "csr", "sinks": True},
        {"table": "lengths"},
        {"table": "packed", "window_left": 64},
        {"storage": "e4m3"},
        {"storage": "int8 token", "window_left": 200},
        {"causal": "top_left"},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "invariant"])
def test_graph_replays_equal_eager_runs(fields: dict[str, object], batch_invariant: bool, arch: str) -> None:
    """One graph over other qo_indptr, lengths, tables and queries, which all change on the device between replays."""
    rng = random.Random(20)
    first = mixed(**fields)
    plan = select(first, arch, batch_invariant=batch_invariant)
    sets = [make_attention(first if index == 0 else shuffled(first, rng), "cuda", seed=index) for index in range(SETS)]
    eager = [run(plan, inputs) for inputs in sets]
    for inputs, result in list(zip(sets, eager, strict=True))[:4]:
        assert_close(inputs, result)
    held = make_attention(first, "cuda", seed=0)
    out, lse, workspace = torch.full_like(held.q, NAN), torch.full((len(held.q), 32), NAN, device="cuda"), plan.new_workspace()
    given = {**held.scales, **held.extras, "out": out, "lse": lse, "workspace": workspace}
    plan.run(held.q, held.k, held.v, held.table, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(held.q, held.k, held.v, held.table, **given)
    wrong = torch.zeros(SETS, dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS // SETS):
        for index in rng.sample(range(SETS), SETS):
            for target, source in zip(tensors_of(held), tensors_of(sets[index]), strict=True):
                target.copy_(source)
            out.fill_(NAN), lse.fill_(NAN)
            graph.replay()
            wrong[index] += differing_rows((out, lse), eager[index]).sum()
    assert wrong.tolist() == [0] * SETS, "rows that differ from the eager run, by set"
    assert not workspace.any()
    assert differing_rows(eager[1], eager[2]).any(), "sets that agree would hide a graph that ignores them"


@pytest.mark.parametrize("arch", ARCHES)
def test_rows_that_grow_and_shrink_in_a_graph(arch: str) -> None:
    """Uniform rows over a table whose lengths grow by a draft and shrink by what was refused, as in speculative decoding."""
    described = case("draft", {"lengths": (500,) * 6, "head_dim": 128}, uniform=True, q_lens=(5,) * 6, max_q_len=5)
    plan, inputs = select(described, arch), make_attention(described, "cuda", dead=0.5)
    lengths = inputs.table.operands[1]
    out, lse, workspace = torch.empty_like(inputs.q), torch.empty(30, 8, device="cuda"), plan.new_workspace()
    plan.run(inputs.q, inputs.k, inputs.v, inputs.table, out=out, lse=lse, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(inputs.q, inputs.k, inputs.v, inputs.table, out=out, lse=lse, workspace=workspace)
    for seed in range(20):
        now = torch.randint(0, 501, (6,), generator=torch.Generator().manual_seed(seed))
        lengths.copy_(now)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        meant = replace(described, cache=replace(described.cache, lengths=tuple(now.tolist())))
        rows = [pages[: -(-length // 16)] for pages, length in zip(inputs.kv.rows, now.tolist(), strict=True)]
        kv = replace(inputs.kv, shape=meant.cache, rows=rows)
        assert_close(replace(inputs, case=meant, kv=kv), (out.flatten(0, 1), lse))


@pytest.mark.parametrize("lengths", [(1000, 64, 31, 700), (512,), (1024, 1023, 0)], ids=["uneven", "one length", "long"])
def test_two_kv_heads_a_cta(lengths: tuple[int, ...]) -> None:
    """On few SMs a CTA takes two KV heads: right, bit for bit the same again, and in a graph over other lengths."""
    described = replace(NAMED["two_kv_heads"], cache=replace(NAMED["two_kv_heads"].cache, lengths=(lengths * 12)[:12]))
    plan = select(described, "sm90", sm_count=16)
    assert plan.explain().chosen.spec.unit_heads == 2, plan.explain()
    inputs = make_attention(described, "cuda", dead=0.5)
    result = run(plan, inputs)
    assert_close(inputs, result)
    assert_bitwise(run(plan, inputs), result)
    out, lse, workspace = torch.full_like(inputs.q, NAN), torch.full_like(result[1], NAN), plan.new_workspace()
    given = {**inputs.scales, "out": out, "lse": lse, "workspace": workspace}
    plan.run(inputs.q, inputs.k, inputs.v, inputs.table, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(inputs.q, inputs.k, inputs.v, inputs.table, **given)
    now = torch.tensor(described.cache.lengths).roll(1).minimum(torch.tensor(described.cache.lengths))
    inputs.table.operands[1].copy_(now)
    out.fill_(NAN), lse.fill_(NAN)
    graph.replay()
    rows = [pages[: -(-length // 16)] for pages, length in zip(inputs.kv.rows, now.tolist(), strict=True)]
    meant = replace(described, cache=replace(described.cache, lengths=tuple(now.tolist())))
    assert_close(replace(inputs, case=meant, kv=replace(inputs.kv, shape=meant.cache, rows=rows)), (out.flatten(0, 1), lse))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["everything", "long", "tree_2_words", "uniform_strided", "packed", "verify_32_e4m3_ragged"])
def test_a_side_stream_and_another_grid_agree(name: str, arch: str) -> None:
    """On a stream of the caller's the same bits; with any number of SMs right, and the same bits again."""
    plan, inputs = select(NAMED[name], arch), make_attention(NAMED[name], "cuda")
    assert_bitwise(run(plan, inputs, stream=torch.cuda.Stream()), run(plan, inputs))
    for sm_count in (1, 7, 64):
        fewer = select(NAMED[name], arch, sm_count=sm_count)
        assert fewer.sm_count == sm_count
        got = run(fewer, inputs)
        assert_close(inputs, got)
        assert_bitwise(got, run(fewer, inputs))
    with pytest.raises(ck.InvalidArgument, match="sm_count: got 100000, must be at most"):
        select(NAMED[name], arch, sm_count=100_000)


def test_a_run_never_waits_for_the_device() -> None:
    """Sleeping work ahead on the stream: the call returns while it runs, and allocates nothing where all is given."""
    plan, inputs = select(mixed(window_left=100, sinks=True), "sm90"), make_attention(mixed(window_left=100, sinks=True), "cuda")
    out, lse, workspace = torch.empty_like(inputs.q), torch.empty(len(inputs.q), 32, device="cuda"), plan.new_workspace()
    given = {**inputs.extras, "out": out, "lse": lse, "workspace": workspace}
    plan.run(inputs.q, inputs.k, inputs.v, inputs.table, **given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    plan.run(inputs.q, inputs.k, inputs.v, inputs.table, **given)
    done.record()
    assert not done.query(), "the run waited"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@pytest.mark.parametrize("arch", ARCHES)
def test_paged_attention_and_the_plan_agree(arch: str) -> None:
    """The one call chooses by itself; both are right, in a new out whose padding is not looked at."""
    described = mixed(softcap=3.0, window_left=500)
    inputs = make_attention(described, "cuda")
    assert_close(inputs, run(select(described, arch), inputs))
    masks = {"window_left": 500, "softcap": 3.0, "max_q_len": 16}
    assert_close(inputs, ck.paged_attention(inputs.q, inputs.k, inputs.v, page_table=inputs.table, **inputs.extras, **masks))
    total = sum(described.q_lens)
    assert torch.isfinite(
        ck.paged_attention(inputs.q[:total], inputs.k, inputs.v, page_table=inputs.table, **inputs.extras)[0]
    ).all()
