"""Attention with several query rows against a dense f64 softmax, on every backend: masks, modifiers, formats, storage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.attention.variants import explain
from cute_kernels.planning.variants import PRETEND
from tests.support.attention_cases import CASES, CONTIGUOUS, Case, case, make_attention
from tests.support.attention_harness import assert_close, assert_padding, run, select, visible
from tests.support.bits import differing_rows
from tests.support.harness import BACKENDS, assert_bitwise, device_of
from tests.support.inputs import INT_MAX, INT_MIN, NAN
from tests.support.storage import STORAGES, fill

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
NAMED = {c.name: c for c in CASES}


@pytest.mark.parametrize("case", [case for case in CASES if not case.tma], ids=str)
def test_no_tma_box_holds_these_pages(case: Case) -> None:
    """Which the cp.async variant serves on the same GPU."""
    forced = explain(case.descriptor().problem, PRETEND["h200"], ck.PlanPreference(arch="sm90"))
    with pytest.raises(ck.Unsupported, match="TMA needs"):
        assert forced.chosen
    assert explain(case.descriptor().problem, PRETEND["h200"]).chosen.arch == "sm80"


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, *backend.values, id=f"{case}-{backend.id}", marks=backend.marks)
        for case in CASES
        for backend in BACKENDS
        if case.tma or backend.id != "sm90"
    ],
)
def test_every_row_is_right(case: Case, backend: str) -> None:
    """Over NaN in every slot that no row owns; rows of no request are left alone."""
    plan, inputs = select(case, backend), make_attention(case, device_of(backend))
    plan.clear_status()
    got = run(plan, inputs)
    assert_close(inputs, got)
    assert_padding(inputs, got, NAN)
    assert_padding(inputs, run(plan, inputs, fill=3.0), 3.0)
    assert plan.status() is None


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["everything", "tree", "uniform_strided", "lengths", "packed", "int8_token_scales"])
def test_poison_of_any_kind_changes_no_bit(name: str, backend: str) -> None:
    plan = select(NAMED[name], backend)
    clean = run(plan, make_attention(NAMED[name], device_of(backend), dead=0.0), fill=0.0)
    for dead in (NAN, math.inf, -6e4):
        assert_bitwise(run(plan, make_attention(NAMED[name], device_of(backend), dead=dead), fill=0.0), clean)


WINDOW = case("window", {"lengths": (900, 2000, 40)}, q_lens=(4, 1, 3), window_left=100)


@EVERY_BACKEND
@pytest.mark.parametrize("storage", STORAGES)
def test_what_no_row_sees_harms_none(storage: str, backend: str) -> None:
    """Poison in every key before the windows, and garbage for the ids of pages far from them, which are no fault."""
    windowed = replace(WINDOW, cache=replace(WINDOW.cache, **STORAGES[storage]))
    plan, inputs = select(windowed, backend), make_attention(windowed, device_of(backend))
    plan.clear_status()
    clean = run(plan, inputs)
    page, far = windowed.cache.page_size, 0 if backend == "cpu" else 512  # a tile may reach beyond the window
    ids = inputs.table.operands[0]
    for request, pages in enumerate(inputs.kv.rows):
        hidden = int(visible(inputs, request).any(0).byte().argmax())  # keys before the first that is seen
        dead = torch.zeros(len(pages) * page, dtype=torch.bool, device=ids.device)
        dead[:hidden] = True
        for cache in (inputs.k, inputs.v):
            part = cache[pages.long()]
            fill(part, dead.view(len(pages), 1, page, 1), NAN)
            cache[pages.long()] = part
        for index in range(max(0, hidden - far) // page):
            ids[request, index] = (-1, INT_MIN, INT_MAX, len(inputs.k))[index % 4]
    assert (ids == INT_MIN).any(), "the rows are long enough for this test"
    assert_bitwise(run(plan, inputs), clean)
    assert plan.status() is None


@pytest.mark.parametrize("name", ["causal", "tree", "top_left", "window_both", "alibi", "packed"])
def test_a_key_that_some_row_does_not_see_cannot_harm_it(name: str) -> None:
    """On the CPU every row reads its own keys alone: NaN in one reaches the rows that see it, and no other."""
    chosen = NAMED[name]
    plan, inputs = select(chosen, "cpu"), make_attention(chosen)
    clean = run(plan, inputs)
    request, key = 5, chosen.cache.lengths[5] - 2
    where = chosen.cache.lengths[:5]
    if name == "packed":
        inputs.v[sum(where) + key] = NAN
    else:
        inputs.v[inputs.kv.rows[request][key // 16].long(), :, key % 16] = NAN
    sees = visible(inputs, request)[:, key]
    begin = chosen.begins[request]
    wrong = differing_rows(run(plan, inputs), clean).tolist()
    assert wrong == [begin <= row < begin + len(sees) and bool(sees[row - begin]) for row in range(len(wrong))]
    assert any(wrong) != (name == "top_left")


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["causal", "everything", "uniform_strided", "long", "int8_token_scales", "tree_2_words"])
def test_repeats_are_bitwise_equal(name: str, backend: str) -> None:
    plan, inputs = select(NAMED[name], backend), make_attention(NAMED[name], device_of(backend))
    first = run(plan, inputs)
    for _ in range(2 if backend == "cpu" else 200):
        assert_bitwise(run(plan, inputs), first)


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["causal", "everything", "long", "long_tree", "int8_token_scales", "csr"])
def test_a_row_does_not_depend_on_the_others(name: str, backend: str) -> None:
    """Bit for bit, under a batch-invariant plan: each request with all others empty, over the same tensors."""
    chosen = NAMED[name]
    plan, inputs = select(chosen, backend, batch_invariant=True), make_attention(chosen, device_of(backend))
    together = run(plan, inputs)
    assert_close(inputs, together)
    for request, n in enumerate(chosen.q_lens):
        begin = chosen.begins[request]
        qo_indptr = torch.full_like(inputs.extras["qo_indptr"], begin + n)
        qo_indptr[: request + 1] = begin
        table, mine = inputs.table, slice(begin, begin + n)
        if table.format == "dense":
            alone = torch.zeros_like(table.operands[1])
            alone[request] = table.operands[1][request]
            table = ck.PageTable.dense(table.operands[0], alone)
        out, lse = run(plan, inputs, page_table=table, qo_indptr=qo_indptr)
        assert_bitwise((out[mine], lse[mine]), (together[0][mine], together[1][mine]))
        assert out[: mine.start].isnan().all() and out[mine.stop :].isnan().all()


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["one_row", "one_row_everything"])
def test_one_row_is_decode_bit_for_bit(name: str, backend: str) -> None:
    """Uniform rows of one are a problem of decode: the same kernel, also where it is modified."""
    chosen = NAMED[name]
    inputs = make_attention(chosen, device_of(backend))
    fields = {field: getattr(chosen, field) for field in ("window_left", "softcap", "alibi", "sinks")}
    descriptor, preference = replace(chosen.cache.descriptor(), **fields), ck.PlanPreference(arch=backend)
    decode = ck.PagedDecodePlan.select(descriptor, device_of(backend), preference)
    expected = decode.run(inputs.q[:, 0], inputs.k, inputs.v, inputs.table, workspace=decode.new_workspace(), **inputs.extras)
    assert_bitwise(run(select(chosen, backend), inputs), expected)


def test_one_row_over_lengths_is_decode_over_each_length() -> None:
    inputs = make_attention(NAMED["lengths_one_row"])
    out, lse = run(select(inputs.case, "cpu"), inputs)
    for row, length in enumerate(inputs.case.cache.lengths):
        k, v = (t[row : row + 1, :, :length] for t in (inputs.k, inputs.v))
        expected = ck.decode_attention(inputs.q[row : row + 1, 0], k, v)
        assert_bitwise((out[row : row + 1], lse[row : row + 1]), expected)


def test_a_query_longer_than_its_keys_sees_none_at_first() -> None:
    """n rows over n - 2 keys: the first two see nothing; under top_left all see the keys up to their own."""
    long = case("long_query", {"lengths": (3, 0)}, q_lens=(5, 2), sinks=False)
    inputs = make_attention(long)
    out, lse = run(select(long, "cpu"), inputs)
    assert (lse[:2] == -math.inf).all() and (lse[5:7] == -math.inf).all() and not out[:2].any() and not out[5:7].any()
    assert lse[2:5].isfinite().all()
    _, lse = run(select(replace(long, causal="top_left"), "cpu"), inputs)
    assert lse[:5].isfinite().all() and (lse[3] == lse[4]).sum() == 0
    assert (lse[5:7] == -math.inf).all()


@pytest.mark.parametrize("name", ["everything", "tree", "packed"])
def test_f32_on_the_cpu(name: str) -> None:
    single = replace(NAMED[name], cache=replace(NAMED[name].cache, dtype=torch.float32))
    inputs = make_attention(single)
    assert_close(inputs, run(select(single, "cpu"), inputs))


@st.composite
def problems(draw: st.DrawFn) -> Case:
    """Small problems of every kind."""
    batch = draw(st.integers(1, 4))
    table = draw(st.sampled_from(["dense", "csr", "lengths", "packed", "none"]))
    lengths = tuple(draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch)))
    if table == "none":
        lengths = (draw(st.integers(1, 40)),) * batch
    max_q_len = draw(st.integers(1, 40))
    uniform = draw(st.booleans())
    q_lens = tuple(draw(st.lists(st.integers(0, max_q_len), min_size=batch, max_size=batch)))
    if uniform:
        q_lens = (draw(st.integers(1, max_q_len)),) * batch
    tree = draw(st.booleans())
    causal = "bottom_right" if tree else draw(st.sampled_from(["bottom_right", "top_left", None]))
    window = st.one_of(st.none(), st.integers(0, 45))
    kv_heads = draw(st.integers(1, 3))
    cache = {
        "lengths": lengths,
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.integers(4, 20)),  # a single column may cancel to nothing, and the rule is relative
        "page_size": draw(st.integers(1, 17)),
        "order": "HND" if table == "packed" else draw(st.sampled_from(["HND", "NHD"])),
        "lse_base": draw(st.sampled_from(["e", "2"])),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16])),
        **draw(st.sampled_from([STORAGES["16 bits"], STORAGES["int8 token"]])),
    }
    fields = {name: draw(st.booleans()) for name in ("strided", "alibi", "sinks")}
    fields |= {"uniform": uniform, "q_lens": q_lens, "max_q_len": max_q_len, "tree": tree, "causal": causal}
    fields |= {"window_left": draw(window), "window_right": None if causal else draw(window)}
    return case("random", cache, table=table, softcap=draw(st.sampled_from([None, 1.5])), **fields)


@settings(max_examples=150, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**31))
def test_random_problems(problem: Case, seed: int) -> None:
    plan, inputs = select(problem, "cpu"), make_attention(problem, seed=seed)
    plan.clear_status()
    got = run(plan, inputs)
    assert_close(inputs, got)
    assert_padding(inputs, got, NAN)
    assert plan.status() is None
    assert (problem.table in CONTIGUOUS) == (plan.descriptor.page_size is None)
