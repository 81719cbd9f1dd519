"""Long queries: items that are dealt to a persistent grid, on few SMs so that a CTA takes many."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.variants import explain, regions_of
from cute_kernels.config.decode import SLOTS
from cute_kernels.planning.variants import PRETEND, Candidate, Explanation, PlanPreference
from tests.support.attention_cases import CASES, AttentionInputs, Case, case, make_attention
from tests.support.attention_harness import assert_close, assert_every_row, run, select, tensors_of
from tests.support.bits import differing_rows
from tests.support.harness import assert_bitwise
from tests.support.inputs import NAN
from tests.support.logit_patterns import LOGITS, follow_logits
from tests.support.storage import STORAGES

WARPGROUP_ROWS = 16  # packed rows: with more, warpgroups attend and items are dealt; over 8 bits with more than 32
SHORT = [c for c in CASES if c.tma and (c.q_lens != (1,) * c.batch or not c.uniform)]
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "lengths": (300, 40, 7, 900, 64), "max_seq_len": 1000}
ROWS = {"q_lens": (300, 1, 7, 200, 64), "max_q_len": 300}
UNIFORM_LENGTHS = {"lengths": (300, 40, 120)}
UNIFORM_ROWS = {"uniform": True, "q_lens": (130,) * 3, "max_q_len": 130}
EVERYTHING = {"window_left": 100, "softcap": 3.0, "alibi": True, "sinks": True}
EIGHT_BITS = (("e4m3", 32, 16), ("e4m3", 64, 64), ("e4m3", 96, 64), ("e4m3", 192, 8), ("e4m3", 256, 16), ("int8 token", 256, 64))
# of 10 blocks a request and many keys: on CUT_SMS SMs they are dealt in pieces
LONG_LENGTHS, CUT_ROWS, CUT_SMS = (
    {"lengths": (10_000,), "max_seq_len": 10_000},
    {"uniform": True, "q_lens": (130,), "max_q_len": 130},
    16,
)
SETS, REPLAYS = 8, 1_000
REGISTERS = 65_536  # of an SM


def long_case(name: str, cache: dict[str, object] | None = None, **fields: object) -> Case:
    """Requests of one to 300 query rows."""
    return case(name, {**HEADS, **(cache or {})}, **{**ROWS, **fields})


BESIDE = {"lengths": (900, 2500, 40, 2700, 700), "max_seq_len": 3000}, (300, 1, 2, 4, 200)  # prompts, and rows of decode
LONG = (
    long_case("long"),
    long_case("long_beside_decode", BESIDE[0], q_lens=BESIDE[1]),
    long_case("long_page_64", {"page_size": 64}),
    long_case("long_page_8", {"page_size": 8}),
    long_case("long_f16", {"dtype": torch.float16}),
    *(long_case(f"long_d{d}", {"head_dim": d}) for d in (64, 80, 96, 192, 256)),
    long_case("long_everything", **EVERYTHING),
    long_case("long_top_left", causal="top_left"),
    long_case("long_no_mask", causal=None),
    long_case("long_both_windows", causal=None, window_left=30, window_right=9),
    long_case("long_csr", table="csr"),
    long_case("long_packed", table="packed", window_left=64),
    long_case("long_lengths", table="lengths"),
    long_case("long_base_2", {"lse_base": "2"}),
    *(long_case(f"long_{name.replace(' ', '_')}", storage) for name, storage in STORAGES.items() if storage),
    *(
        long_case(f"long_{name.replace(' ', '_')}_d{d}", {**STORAGES[name], "head_dim": d, "page_size": page_size})
        for name, d, page_size in EIGHT_BITS
    ),
    long_case("long_e4m3_window", STORAGES["e4m3"], window_left=100),
    long_case("long_odd_group", {"num_heads": 21, "num_kv_heads": 3, "head_dim": 64}),
    long_case("long_uniform", UNIFORM_LENGTHS, **UNIFORM_ROWS),
    *(
        long_case(f"long_int8_token_d{d}_uniform", {**STORAGES["int8 token"], "head_dim": d, **UNIFORM_LENGTHS}, **UNIFORM_ROWS)
        for d in (128, 96, 64)
    ),
    long_case("long_e4m3_token_uniform", {**STORAGES["int8 token"], **STORAGES["e4m3"], **UNIFORM_LENGTHS}, **UNIFORM_ROWS),
    *(long_case(f"long_d{d}_uniform", {"head_dim": d, **UNIFORM_LENGTHS}, **UNIFORM_ROWS) for d in (256, 192, 64)),
    long_case("long_uniform_everything", {"page_size": 8, **UNIFORM_LENGTHS}, **UNIFORM_ROWS, **EVERYTHING),
    long_case("long_uniform_f16", {"page_size": 64, "dtype": torch.float16, **UNIFORM_LENGTHS}, **UNIFORM_ROWS),
    long_case(
        "long_many_requests",
        {"lengths": tuple((53 * i) % 200 for i in range(80)), "max_seq_len": 200},
        q_lens=tuple((37 * i) % 90 if i % 3 else 0 for i in range(80)),
        max_q_len=90,
    ),
)
CUT = (
    long_case("cut", LONG_LENGTHS, **CUT_ROWS),
    long_case("cut_everything", LONG_LENGTHS, **CUT_ROWS, **{**EVERYTHING, "window_left": 7_000}),
    long_case("cut_f16_page_64", {**LONG_LENGTHS, "dtype": torch.float16, "page_size": 64}, **CUT_ROWS),
    long_case("cut_page_1", {**LONG_LENGTHS, "page_size": 1}, **CUT_ROWS),
    long_case("cut_e4m3", {**LONG_LENGTHS, **STORAGES["e4m3"]}, **CUT_ROWS),
    long_case("cut_int8_token", {**LONG_LENGTHS, **STORAGES["int8 token"]}, **CUT_ROWS),
    *(long_case(f"cut_d{d}", {**LONG_LENGTHS, "head_dim": d}, **CUT_ROWS) for d in (64, 256)),
)
# rows of decode, drafts and prompts in one batch, whose last phase cuts blocks
CUT_BESIDE = {"lengths": (6_000, 10_000, 40, 900, 0), "max_seq_len": 10_000}, (1, 130, 4, 20, 3)
CUT_RAGGED = tuple(
    long_case(f"cut_beside_decode_{name}".replace(" ", "_"), {**CUT_BESIDE[0], **cache}, q_lens=CUT_BESIDE[1], **fields)
    for name, cache, fields in (
        ("16 bits", {}, {}),
        ("everything", {}, {**EVERYTHING, "window_left": 7_000}),
        ("e4m3", STORAGES["e4m3"], {}),
        ("int8 token", STORAGES["int8 token"], {}),
        ("d64", {"head_dim": 64}, {}),
        ("d256", {"head_dim": 256}, {}),
    )
)


def packed_rows(described: Case) -> int:
    """Query rows of a request that read the same KV head, at most."""
    return described.max_q_len * described.cache.num_heads // described.cache.num_kv_heads


@pytest.mark.parametrize("described", LONG, ids=str)
def test_items_are_dealt(described: Case) -> None:
    """Without a GPU: the plan of such a case on one SM deals its items, and says why."""
    facts = PRETEND["h200"]
    chosen = explain(described.descriptor().problem, PlanPreference(sm_count=1).part_of(facts)).chosen
    assert chosen.spec is not None and chosen.spec.dealt and chosen.spec.arch == "sm90", chosen
    assert chosen.num_ctas == (1 if described.uniform else described.cache.num_kv_heads), "few query rows: a CTA for each KV head"
    last = (chosen.phases or (chosen,))[-1].spec
    assert ("in pieces" if last.deals_pieces else "whole rows") in chosen.config_source
    if described.uniform:  # others have kernels of several phases
        assert chosen.spec.one_crew == ("token" in described.name), "three warpgroups attend beside scales of tokens"


@pytest.mark.parametrize("described", CUT, ids=str)
def test_few_blocks_are_dealt_in_pieces(described: Case) -> None:
    """Without a GPU: such a plan says so, and has a workspace for pieces; not if it is for any batch, or lacks the memory."""
    facts, problem = PRETEND["h200"], described.descriptor().problem

    def chosen(**fields: object) -> Candidate:
        preference = PlanPreference(sm_count=CUT_SMS, **fields)
        return explain(problem, preference.part_of(facts), preference).chosen

    found = chosen()
    assert found.spec.deals_pieces and found.num_ctas == CUT_SMS and "blocks of query rows in pieces" in found.config_source
    (region,) = regions_of(problem, found)
    assert region.name == "partial_states"
    assert region.nbytes == SLOTS["dealt_pieces"] * CUT_SMS * found.spec.state_words * 16
    for other in (chosen(batch_invariant=True), chosen(max_workspace_bytes=region.nbytes - 1)):
        assert other.spec.partition == "dealt" and regions_of(problem, other) == ()


@pytest.mark.parametrize("described", CUT_RAGGED, ids=str)
def test_blocks_beside_decode_rows_may_be_cut(described: Case) -> None:
    """Without a GPU: the last phase of a plan for ragged queries has states for pieces, where keys may be many."""
    facts, problem = PlanPreference(sm_count=CUT_SMS).part_of(PRETEND["h200"]), described.descriptor().problem
    found, few = (explain(replace(problem, max_seq_len=keys), facts).chosen for keys in (10_000, 500))
    assert [chosen.phases[-1].spec.partition for chosen in (found, few)] == ["dealt_pieces", "dealt"]
    regions = {region.name: region.nbytes for region in regions_of(problem, found)}
    last = f"partial_states_{len(found.phases) - 1}"
    assert regions[last] == SLOTS["dealt_pieces"] * CUT_SMS * found.phases[-1].spec.state_words * 16


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "storage", "partition", "warps"),
    [
        ((32, 8), 512, 65_536, "16 bits", "dealt", 8),  # 128 blocks
        ((32, 8), 384, 65_536, "16 bits", "dealt_pieces", 8),  # 96
        ((32, 8), 384, 1_024, "16 bits", "dealt", 8),  # too few keys
        ((40, 8), 512, 32_768, "16 bits", "dealt_pieces", 8),  # 160
        ((32, 8), 2_048, 32_768, "16 bits", "dealt", 8),  # 512
        ((32, 8), 256, 65_536, "16 bits", "balanced", 8),  # 64, each divided between two CTAs
        ((32, 8), 192, 65_536, "16 bits", "dealt_pieces", 8),  # 48: divided they would have 96 CTAs
        ((32, 8), 192, 32_768, "16 bits", "balanced", 8),
        ((32, 8), 8_192, 8_192, "int8 token", "dealt", 8),  # 2,048 blocks of two warpgroups whose scores are related
        ((32, 8), 512, 65_536, "int8 token", "dealt", 8),  # to a key, three warpgroups are no faster
    ],
)
def test_what_a_chunk_takes(heads: tuple[int, int], rows: int, keys: int, storage: str, partition: str, warps: int) -> None:
    """The schedule of a chunk on all SMs of an H200, as they were measured there (docs/notes/kernel-log.md)."""
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "lengths": (keys,), "max_seq_len": keys, **STORAGES[storage]}
    described = long_case("chunk", shape, uniform=True, q_lens=(rows,), max_q_len=rows)
    spec = explain(described.descriptor().problem, PRETEND["h200"]).chosen.spec
    assert (spec.partition, spec.num_warps) == (partition, warps)


@pytest.mark.parametrize("sm_count", [1, 3, 132])
@pytest.mark.parametrize("described", [c for c in (*LONG, *SHORT) if packed_rows(c) > WARPGROUP_ROWS], ids=str)
def test_exchanged_registers_are_there(described: Case, sm_count: int) -> None:
    """Warpgroups that exchange registers are alone on an SM, and take no more than it has: the GPU stops else."""
    facts = PRETEND["h200"]
    preference = PlanPreference(arch="sm90", sm_count=sm_count)
    chosen = explain(described.descriptor().problem, preference.part_of(facts), preference).chosen
    for spec in (phase.spec for phase in chosen.phases or (chosen,)):
        if spec.register_shares is not None:
            attending, other = spec.register_shares
            taken = 32 * (spec.num_warps * attending + (spec.warps - spec.num_warps) * other)
            assert spec.min_ctas_per_sm == 1 and taken <= REGISTERS, spec


@pytest.mark.parametrize("described", [*LONG, *CUT, *CUT_RAGGED], ids=str)
def test_long_queries_on_the_cpu(described: Case) -> None:
    """The reference serves them too, row by row."""
    inputs = make_attention(described)
    assert_close(inputs, run(select(described, "cpu"), inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("sm_count", [1, 3])
@pytest.mark.parametrize("described", [c for c in (*LONG, *SHORT) if packed_rows(c) > WARPGROUP_ROWS], ids=str)
def test_every_row_of_dealt_items(described: Case, sm_count: int) -> None:
    """Right row by row beside NaN in all memory that is not theirs, and the same bits again."""
    plan, inputs = select(described, "sm90", sm_count=sm_count), make_attention(described, "cuda")
    if sm_count == 1 and described in LONG:
        assert plan.explain().chosen.spec.dealt, plan.explain()
    assert_every_row(plan, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("described", [*CUT, *CUT_RAGGED], ids=str)
def test_every_row_of_pieces(described: Case) -> None:
    """The same where few blocks are cut into pieces, whose states a warp joins."""
    plan = select(described, "sm90", sm_count=CUT_SMS)
    chosen = plan.explain().chosen
    assert (chosen.phases or (chosen,))[-1].spec.deals_pieces
    assert_every_row(plan, make_attention(described, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("sm_count", [12, 20])
@pytest.mark.parametrize("fields", [{}, {"dtype": torch.float16, "page_size": 64}, {"head_dim": 64}], ids=str)
def test_decode_rows_beside_prompts(fields: dict[str, object], sm_count: int) -> None:
    """Every row, where the phase of decode rows leaves CTAs to that of prompts, whose items all CTAs claim."""
    described = long_case("beside", {**BESIDE[0], **fields}, q_lens=BESIDE[1])
    plan = select(described, "sm90", sm_count=sm_count)
    first, *_, last = plan.explain().chosen.phases
    assert first.spec.leaves_ctas and last.spec.claims
    assert_every_row(plan, make_attention(described, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fields", "sm_count"),
    [
        ({}, 2),
        ({"window_left": 100, "sinks": True}, 2),
        ({"storage": "e4m3"}, 2),
        ({"storage": "int8 token"}, 2),
        ({"q_lens": BESIDE[1]}, 12),  # some sets leave CTAs to the prompts
        (CUT_ROWS | {"cache": {"lengths": (10_000, 9_000), "max_seq_len": 10_000}, "q_lens": (130, 130)}, 19),  # in pieces
        ({"cache": CUT_BESIDE[0], "q_lens": CUT_BESIDE[1]}, CUT_SMS),  # in pieces, claimed
    ],
    ids=str,
)
def test_graph_replays_of_dealt_items(fields: dict[str, object], sm_count: int) -> None:
    """One graph over other qo_indptr, lengths and tables, which all change on the device between replays."""
    rng = random.Random(22)
    fields = dict(fields)
    first = long_case("replayed", STORAGES[fields.pop("storage", "16 bits")] | fields.pop("cache", {}), **fields)
    sets = []
    for seed in range(SETS):
        lengths, q_lens = list(first.cache.lengths), list(first.q_lens)
        rng.shuffle(lengths), rng.shuffle(q_lens)
        changed = replace(first, cache=replace(first.cache, lengths=tuple(lengths)), q_lens=tuple(q_lens))
        sets.append(make_attention(changed, "cuda", seed=seed))
    plan = select(first, "sm90", sm_count=sm_count)
    assert plan.explain().chosen.spec.dealt
    eager = [run(plan, inputs) for inputs in sets]
    for inputs, result in zip(sets, eager, strict=True):
        assert_close(inputs, result)
    held = make_attention(first, "cuda", seed=0)
    out, lse = torch.full_like(held.q, NAN), torch.full((held.q.shape[:-2].numel(), 8), NAN, device="cuda")
    given = {**held.scales, **held.extras, "out": out, "lse": lse, "workspace": plan.new_workspace()}
    plan.run(held.q, held.k, held.v, held.table, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(held.q, held.k, held.v, held.table, **given)
    wrong = torch.zeros(SETS, dtype=torch.int64, device="cuda")
    for index in (rng.randrange(SETS) for _ in range(REPLAYS)):
        for target, source in zip(tensors_of(held), tensors_of(sets[index]), strict=True):
            target.copy_(source)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        wrong[index] += differing_rows((out.view(-1, *out.shape[-2:]), lse), eager[index]).sum()
    assert wrong.tolist() == [0] * SETS, "rows that differ from the eager run, by set"
    assert differing_rows(eager[1], eager[2]).any(), "sets that agree would hide a graph that ignores them"


@pytest.mark.gpu
def test_a_request_alone_has_the_same_bits() -> None:
    """Items depend on no other request: the bits of each are those of a batch of it alone, where it has many query rows."""
    described = long_case("alone", q_lens=(300, 17, 70, 200, 64))
    plan, inputs = select(described, "sm90", sm_count=2), make_attention(described, "cuda")
    out, lse = run(plan, inputs)
    indptr, (table, lengths) = inputs.extras["qo_indptr"], inputs.table.operands[:2]
    for request in range(described.batch):
        begin, end = indptr[request].item(), indptr[request + 1].item()
        single = replace(described.descriptor(), batch_size=1)
        alone = ck.PagedAttentionPlan.select(single, "cuda", ck.PlanPreference(sm_count=2))
        pages = ck.PageTable.dense(table[request : request + 1].contiguous(), lengths[request : request + 1].contiguous())
        rows = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        given = {"qo_indptr": rows, "workspace": alone.new_workspace()}
        got = alone.run(inputs.q[begin:end], inputs.k, inputs.v, pages, **given)
        assert_bitwise(got, (out[begin:end], lse[begin:end]))


KINDS = {"bf16": {}, "f16": {"dtype": torch.float16}, "e4m3": STORAGES["e4m3"], "int8": STORAGES["int8 token"]}
PAIRED = {"uniform": True, "q_lens": (8,) * 5, "max_q_len": 8}  # 32 packed rows: two m-tiles in each of eight warps, over 8 bits
QUERY_ROWS = {"long": ROWS, "32 rows": PAIRED}
PATTERNS = [  # e4m3 ends at 448
    *((pattern, kind, "long") for pattern in LOGITS for kind in KINDS if kind != "e4m3" or "far" not in pattern),
    *((pattern, "e4m3", "32 rows") for pattern in LOGITS if "far" not in pattern),
    *((pattern, "int8", "32 rows") for pattern in LOGITS),
]


def patterned(pattern: str, kind: str, rows: str, device: str, **fields: object) -> AttentionInputs:
    """Requests whose logits follow a pattern."""
    described = long_case(f"{pattern}_{kind}", {**KINDS[kind], "softmax_scale": 1.0}, **QUERY_ROWS[rows], **fields)
    return follow_logits(make_attention(described, device), pattern)


def check_kernel(explanation: Explanation, rows: str) -> None:
    """Of the QUERY_ROWS, long ones are dealt, in a mixed kernel by its last phase; 32 join their states before the merge."""
    chosen = explanation.chosen.spec
    last = getattr(chosen, "many", chosen)
    assert last.dealt == (rows == "long") != last.folds


@pytest.mark.parametrize(("kind", "rows"), sorted({(kind, rows) for _, kind, rows in PATTERNS}))
def test_which_kernel_serves_the_rows(kind: str, rows: str) -> None:
    """Without a GPU: what the test below asks of a plan."""
    problem = long_case("kernel", KINDS[kind], **QUERY_ROWS[rows]).descriptor().problem
    check_kernel(explain(problem, PlanPreference(sm_count=1).part_of(PRETEND["h200"])), rows)


@pytest.mark.parametrize(("pattern", "kind", "rows"), PATTERNS)
def test_bases_on_the_cpu(pattern: str, kind: str, rows: str) -> None:
    """The reference, on the logits below."""
    inputs = patterned(pattern, kind, rows, "cpu")
    assert_close(inputs, run(select(inputs.case, "cpu"), inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("pattern", "kind", "rows"), PATTERNS)
def test_bases_that_stay_and_move(pattern: str, kind: str, rows: str, window: int | None) -> None:
    """Every row, where what its weights are relative to moves with each tile, with few of them, with none, or out of range."""
    inputs = patterned(pattern, kind, rows, "cuda", window_left=window)
    plan = select(inputs.case, "sm90", sm_count=1)
    check_kernel(plan.explain(), rows)
    assert_every_row(plan, inputs)
