"""Bad qo_indptr, lengths, indptr and page ids on the device, with several query rows: masked, reported, and no other row's."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.kv.faults import Fault, first_fault, first_query_fault
from tests.support.attention_cases import CASES, AttentionInputs, Case, case, make_attention
from tests.support.attention_harness import Result, assert_close, run, select
from tests.support.harness import BACKENDS, assert_bitwise, device_of
from tests.support.inputs import INT_MAX, INT_MIN

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
NAMED = {c.name: c for c in CASES}
BASE = case("base", window_left=50, softcap=2.0)  # qo_indptr 0 2 5 5 6 14 19 26, of 29 rows
TREE = case("tree", tree=True, sinks=True)
FILL = 3.0


def meaning(qo_indptr: list[int], total_q: int, max_q_len: int) -> tuple[list[int], list[int], set[tuple[int, str]]]:
    """(first rows, numbers of rows, faults) of the requests of a qo_indptr, in plain Python."""
    begins, counts, faults = [], [], set()
    for request, (begin, end) in enumerate(pairwise(qo_indptr)):
        sound = 0 <= begin <= end <= total_q
        begins.append(begin if sound else 0)
        counts.append(min(end - begin, max_q_len) if sound else 0)
        if not sound:
            faults.add((request, "query_indptr"))
        elif end - begin > max_q_len:
            faults.add((request, "query_length"))
    return begins, counts, faults


def check_meant(inputs: AttentionInputs, got: Result, begins: list[int], counts: list[int]) -> None:
    """Rows that are meant are right, and no other is written."""
    meant = replace(inputs, case=replace(inputs.case, starts=tuple(begins), q_lens=tuple(counts)))
    assert_close(meant, got)
    rows = {begin + i for begin, count in zip(begins, counts, strict=True) for i in range(count)}
    rest = [row for row in range(len(got[0])) if row not in rows]
    assert (got[0][rest] == FILL).all() and (got[1][rest] == FILL).all()


# of the entries of qo_indptr: which is changed, to what; no two requests then share a row
BROKEN = [
    *[(index, value) for index in (0, 3, 5, 7) for value in (-1, INT_MIN, 30, INT_MAX)],
    (0, 1),
    (7, 29),
    (7, 19),
    (4, 5),
]


@EVERY_BACKEND
@pytest.mark.parametrize("described", [BASE, TREE, NAMED["csr_everything"], NAMED["packed"]], ids=str)
def test_bad_query_rows(described: Case, backend: str) -> None:
    inputs = make_attention(described, device_of(backend), dead=0.5)
    plan = select(described, backend)
    good = inputs.extras["qo_indptr"].tolist()
    for index, value in BROKEN:
        broken = [value if i == index else entry for i, entry in enumerate(good)]
        begins, counts, faults = meaning(broken, len(inputs.q), described.max_q_len)
        plan.clear_status()
        got = run(plan, inputs, FILL, qo_indptr=torch.tensor(broken, dtype=torch.int32, device=inputs.q.device))
        check_meant(inputs, got, begins, counts)
        fault = plan.status()
        assert (None if fault is None else (fault.row, fault.kind)) in (faults or {None}), (index, value)
    plan.clear_status()
    check_meant(inputs, run(plan, inputs, FILL), described.begins, list(described.q_lens))
    assert plan.status() is None


# requests of one query row, under a plan for up to 300: where phases share a kernel, the last one has no request at all
DECODE_ROWS = case("decode rows", {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}, q_lens=(1,) * 7, max_q_len=300)


@EVERY_BACKEND
@pytest.mark.parametrize(("index", "value"), [(3, 11), (7, INT_MAX), (2, -1)])
def test_bad_query_rows_that_no_phase_serves(index: int, value: int, backend: str) -> None:
    inputs, plan = make_attention(DECODE_ROWS, device_of(backend), dead=0.5), select(DECODE_ROWS, backend)
    broken = inputs.extras["qo_indptr"].clone()
    broken[index] = value
    begins, counts, faults = meaning(broken.tolist(), len(inputs.q), DECODE_ROWS.max_q_len)
    plan.clear_status()
    check_meant(inputs, run(plan, inputs, FILL, qo_indptr=broken), begins, counts)
    fault = plan.status()
    assert faults and fault is not None and (fault.row, fault.kind) in faults


@EVERY_BACKEND
@pytest.mark.parametrize("max_q_len", [1, 3, 5, 7])
@pytest.mark.parametrize("tree", [False, True])
def test_rows_beyond_max_q_len(max_q_len: int, tree: bool, backend: str) -> None:
    """The first max_q_len rows of a longer request count, and stand at its last keys."""
    short = case("short", max_q_len=max_q_len, tree=tree, alibi=True)
    inputs, plan = make_attention(short, device_of(backend), dead=0.5), select(short, backend)
    plan.clear_status()
    got = run(plan, inputs, FILL)
    counts = [min(n, max_q_len) for n in short.q_lens]
    check_meant(inputs, got, short.begins, counts)
    fault = plan.status()
    assert fault is not None and fault.kind == "query_length" and short.q_lens[fault.row] == fault.value > max_q_len


def broken_table(inputs: AttentionInputs, operand: int, place: Any, value: int) -> ck.PageTable:
    operands = [t if t is None else t.clone() for t in inputs.table.operands]
    operands[operand][place] = value
    return ck.PageTable(inputs.table.format, tuple(operands))


@EVERY_BACKEND
@pytest.mark.parametrize(("name", "operand"), [("lengths", 0), ("causal", 1), ("everything", 1)])
def test_lengths_out_of_range(name: str, operand: int, backend: str) -> None:
    """Below 0: no key; beyond what the row holds: all of that. The others' bits stay, but for how rows are cut."""
    described = NAMED[name]
    inputs, plan = make_attention(described, device_of(backend), dead=0.5), select(described, backend, batch_invariant=True)
    clean, request = run(plan, inputs, FILL), 5
    mine = slice(described.begins[request], described.begins[request] + described.q_lens[request])
    capacity = inputs.k.shape[2] if name == "lengths" else inputs.table.operands[0].shape[1] * 16
    if name != "lengths":  # entries past the row's end are garbage: its whole part of the table shall be pages
        inputs.table.operands[0][request] = torch.arange(inputs.table.operands[0].shape[1])
    for value, meant in ((-1, 0), (INT_MIN, 0), (capacity + 1, capacity), (INT_MAX, capacity)):
        plan.clear_status()
        got = run(plan, inputs, FILL, page_table=broken_table(inputs, operand, request, value))
        assert plan.status() == Fault(request, "length", value)
        expected = run(plan, inputs, FILL, page_table=broken_table(inputs, operand, request, meant))
        assert_bitwise(got, expected)
        others = [row for row in range(len(clean[0])) if not mine.start <= row < mine.stop]
        assert_bitwise((got[0][others], got[1][others]), (clean[0][others], clean[1][others]))
        if meant == 0 and not described.sinks:
            assert not got[0][mine].any() and (got[1][mine] == -torch.inf).all()


@EVERY_BACKEND
@pytest.mark.parametrize(("index", "value"), [(i, v) for i in (0, 3, 7) for v in (-1, INT_MIN, 413, INT_MAX)])
def test_packed_rows_out_of_range(index: int, value: int, backend: str) -> None:
    """The rows on both sides of the entry become empty."""
    described = NAMED["packed"]
    inputs, plan = make_attention(described, device_of(backend)), select(described, backend, batch_invariant=True)
    clean = run(plan, inputs, FILL)
    plan.clear_status()
    out, lse = run(plan, inputs, FILL, page_table=broken_table(inputs, 0, index, value))
    fault, affected = plan.status(), {index - 1, index} & set(range(described.batch))
    assert fault is not None and fault.kind == "indptr" and fault.row in affected
    for request, (begin, n) in enumerate(zip(described.begins, described.q_lens, strict=True)):
        mine = slice(begin, begin + n)
        if request in affected:
            assert not out[mine].any() and (lse[mine] == -torch.inf).all()
        else:
            assert_bitwise((out[mine], lse[mine]), (clean[0][mine], clean[1][mine]))


@EVERY_BACKEND
@pytest.mark.parametrize("table", ["dense", "csr"])
def test_pages_outside_the_pool(table: str, backend: str) -> None:
    """Keys of a page that some row may see and that is none do not exist; the page of no row's keys is not looked at."""
    described = case("pages", {"lengths": (40, 700, 64)}, table=table, q_lens=(3, 4, 2), window_left=100, sinks=True)
    inputs, plan = make_attention(described, device_of(backend)), select(described, backend)
    clean = run(plan, inputs, FILL)
    first_entry = 3 if table == "csr" else 0
    for index, value in ((40, -1), (43, INT_MAX), (41, len(inputs.k)), (1, -1)):
        place = first_entry + index if table == "csr" else (1, index)
        plan.clear_status()
        out, lse = run(plan, inputs, FILL, page_table=broken_table(inputs, 0, place, value))
        assert_bitwise((out[[0, 1, 2, 7, 8]], lse[[0, 1, 2, 7, 8]]), (clean[0][[0, 1, 2, 7, 8]], clean[1][[0, 1, 2, 7, 8]]))
        if index == 1:
            assert plan.status() is None
            assert_bitwise((out, lse), clean)
            continue
        assert plan.status() == Fault(1, "page", value)
        holed = _without_page(inputs, 1, index)
        assert_close_holed(inputs, holed, (out, lse), 1)


def _without_page(inputs: AttentionInputs, request: int, index: int) -> list[int]:
    """The keys of a request but those of one of its pages."""
    length = inputs.case.cache.lengths[request]
    return [t for t in range(length) if t // 16 != index]


def assert_close_holed(inputs: AttentionInputs, kept: list[int], got: Result, request: int) -> None:
    """A request's rows over these of its keys, in f64, by the definition."""
    described, group = inputs.case, inputs.case.cache.num_heads // inputs.case.cache.num_kv_heads
    n, length, begin = described.q_lens[request], described.cache.lengths[request], described.begins[request]
    k, v = (inputs.kv.real(name, request).repeat_interleave(group, 0) for name in ("k", "v"))
    for i in range(n):
        p = length - n + i
        keys = [t for t in kept if p - described.window_left <= t <= p]
        logits = torch.einsum("hd,htd->ht", inputs.q[begin + i].double(), k[:, keys]) * described.cache.scale
        logits = torch.cat([logits, inputs.extras["sinks"].double()[:, None]], 1)
        expected = torch.einsum("ht,htd->hd", logits.softmax(1)[:, :-1], v[:, keys])
        torch.testing.assert_close(got[0][begin + i].double(), expected, rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(got[1][begin + i].double(), logits.logsumexp(1), rtol=1e-5, atol=1e-5)


VALIDATED: list[Any] = [  # case, changes of the run, message
    ("causal", {"qo_indptr": (3, -1)}, "qo_indptr: row 2 begins at qo_indptr 5: must be from 0, at most the next row's"),
    ("causal", {"qo_indptr": (7, 30)}, "qo_indptr: row 6 begins at qo_indptr 19: must be from 0"),
    ("causal", {"qo_indptr": (7, 29)}, "qo_indptr: row 6 has 10 query rows: must be at most max_q_len"),
    ("causal", {0: ((5, 0), -7)}, "page_table.table: row 5 names page -7: must be from 0 to num_pages - 1"),
    ("causal", {1: (4, -2)}, "page_table.seq_lens: row 4 has length -2: must be from 0"),
    ("csr", {1: (7, 99)}, "page_table.indptr: row 6 begins at indptr "),
    ("lengths", {0: (4, 999)}, "page_table.seq_lens: row 4 has length 999: must be from 0"),
    ("packed", {0: (7, 413)}, "page_table.kv_indptr: row 6 begins at indptr 155: must be from 0"),
    ("packed", {0: (0, -5)}, "page_table.kv_indptr: row 0 begins at indptr -5: must be from 0"),
    ("whole", {"qo_indptr": (0, -5)}, "qo_indptr: row 0 begins at qo_indptr -5"),
]


@pytest.mark.parametrize(("name", "changes", "message"), VALIDATED)
def test_validate_raises_before_anything_is_written(name: str, changes: dict[Any, Any], message: str) -> None:
    plan, inputs = select(NAMED[name], "cpu", validate=True), make_attention(NAMED[name])
    ((operand, (place, value)),) = changes.items()
    if operand == "qo_indptr":
        broken = inputs.extras["qo_indptr"].clone()
        broken[place] = value
        given: dict[str, Any] = {"qo_indptr": broken}
    else:
        given = {"page_table": broken_table(inputs, operand, place, value)}
    out, lse = torch.full_like(inputs.q, 7.0), torch.full(inputs.q.shape[:2], 7.0)
    operands = {"page_table": inputs.table, **inputs.extras, **given, "out": out, "lse": lse}
    with pytest.raises(ck.InvalidArgument) as caught:
        plan.run(inputs.q, inputs.k, inputs.v, **operands)
    assert str(caught.value).startswith(message), str(caught.value)
    assert (out == 7).all() and (lse == 7).all() and plan.status() is None
    expected = run(select(NAMED[name], "cpu"), inputs)
    assert_bitwise(run(plan, inputs), expected)


@pytest.mark.parametrize("name", ["long_window", "window_16", "nhd_p64", "tree", "uniform_strided", "one_row_everything"])
def test_validate_changes_no_bit_of_good_runs(name: str) -> None:
    inputs = make_attention(NAMED[name])
    assert_bitwise(run(select(NAMED[name], "cpu", validate=True), inputs), run(select(NAMED[name], "cpu"), inputs))


@EVERY_BACKEND
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_caches_without_keys(uniform: bool, sinks: bool, backend: str) -> None:
    """No page, no column or no token anywhere: every row of a request is empty, padding is left alone."""
    rows = {"uniform": True, "q_lens": (3, 3)} if uniform else {"q_lens": (2, 3)}
    described = case("empty", {"lengths": (0, 0), "lse_base": "2"}, sinks=sinks, **rows)
    inputs, plan = make_attention(described, device_of(backend)), select(described, backend)
    empty = {
        "no page": {"k_cache": inputs.k[:0], "v_cache": inputs.v[:0]},
        "no column": {"page_table": ck.PageTable.dense(inputs.table.operands[0][:, :0], inputs.table.operands[1])},
    }
    for changes in empty.values():
        out, lse = run(plan, inputs, FILL, **changes)
        total = sum(described.q_lens)
        assert not out[:total].any() and (out[total:] == FILL).all() and (lse[total:] == FILL).all()
        expected = torch.full_like(lse[:total], -torch.inf)
        if sinks:
            expected = (inputs.extras["sinks"] / torch.tensor(2.0).log().item()).expand(total, -1)
        torch.testing.assert_close(lse[:total], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_to_attend_to(batch: int) -> None:
    """No request, or requests without a query row in a q without rows: nothing is written."""
    described = case("nothing", {"lengths": (5,) * batch}, q_lens=(0,) * batch)
    inputs = make_attention(described)
    q = inputs.q[:0] if batch else inputs.q
    out, lse = torch.full_like(q, FILL), torch.full((len(q), 8), FILL)
    plan = select(described, "cpu")
    plan.run(q, inputs.k, inputs.v, inputs.table, **inputs.extras, out=out, lse=lse)
    assert (out == FILL).all() and (lse == FILL).all()


ENTRIES = st.one_of(st.integers(-2, 12), st.sampled_from([INT_MIN, INT_MAX]))


@settings(max_examples=200, deadline=None)
@given(
    indptr=st.lists(ENTRIES, min_size=1, max_size=6),
    total_q=st.integers(0, 10),
    max_q_len=st.integers(1, 5),
    rising=st.booleans(),
)
def test_first_query_fault(indptr: list[int], total_q: int, max_q_len: int, rising: bool) -> None:
    """Against a loop: the first row that is no slice of q, else the first that is too long."""
    indptr = sorted(indptr) if rising else indptr
    rows = list(enumerate(pairwise(indptr)))
    bad = [Fault(row, "query_indptr", begin) for row, (begin, end) in rows if not 0 <= begin <= end <= total_q]
    long = [Fault(row, "query_length", end - begin) for row, (begin, end) in rows if 0 <= begin <= end <= total_q < INT_MAX]
    long = [fault for fault in long if fault.value > max_q_len]
    expected = next(iter([*bad, *long]), None)
    assert first_query_fault(torch.tensor(indptr, dtype=torch.int32), total_q, max_q_len) == expected


@settings(max_examples=100, deadline=None)
@given(entries=st.lists(ENTRIES, min_size=1, max_size=6), capacity=st.integers(0, 10))
def test_first_fault_of_contiguous_tables(entries: list[int], capacity: int) -> None:
    tensor = torch.tensor(entries, dtype=torch.int32)
    expected = next((Fault(row, "length", n) for row, n in enumerate(entries) if not 0 <= n <= capacity), None)
    assert first_fault(ck.PageTable.lengths(tensor), capacity, 1) == expected
    rows = enumerate(pairwise(entries))
    expected = next((Fault(row, "indptr", a) for row, (a, b) in rows if not 0 <= a <= b <= capacity), None)
    assert first_fault(ck.PageTable.packed(tensor), capacity, 1) == expected
