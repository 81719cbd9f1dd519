"""Appends by page table on every backend: each row's last token, wherever the table says, and nothing where it is wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.append.reference import last_slots
from cute_kernels.kv.faults import first_fault
from tests.support.append_cases import append, expected, fresh, random_kv, run_scales, select
from tests.support.harness import BACKENDS, device_of
from tests.support.metadata import to_device

BF16, I32 = torch.bfloat16, torch.int32
K, S = ck.KVDtype, ck.KVScale
PAGES, PAGE, ROWS = 12, 4, 6
INT_MAX = 2**31 - 1
D = ck.KVAppendDescriptor(ROWS, 3, 64, PAGE, BF16, K.INT8, k_scale=S.TOKEN_F16, v_scale=S.TOKEN, table_format="dense")
LENGTHS = (1, 4, 5, 0, 12, 7)
FORMATS = ["dense", "csr"]


def table_of(table_format: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> ck.PageTable:
    """Rows of three entries over shuffled pages; what no row uses is out of the pool."""
    ids = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [[ids.pop() for _ in range(-(-length // PAGE))] for length in lengths]
    if table_format == "dense":
        full = [row + [INT_MAX, -1, -7][: 3 - len(row)] for row in rows]
        return ck.PageTable.dense(torch.tensor(full, dtype=I32), torch.tensor(lengths, dtype=I32))
    indptr = torch.tensor([sum(map(len, rows[:b])) for b in range(len(rows) + 1)], dtype=I32)
    last = torch.tensor(
        [length - (len(row) - 1) * PAGE if row else 0 for row, length in zip(rows, lengths, strict=True)], dtype=I32
    )
    return ck.PageTable.csr(indptr, torch.tensor([page for row in rows for page in row], dtype=I32), last)


def naive_slot(table: ck.PageTable, row: int, pages: int = PAGES, page_size: int = PAGE) -> int:
    """Where a row's last token goes, -1 for nowhere, in plain Python."""
    if table.format == "dense":
        entries, length = table.operands[0][row].tolist(), int(table.operands[1][row])
    else:
        indices, indptr, last_page_len = (operand.tolist() for operand in table.operands)
        begin, end = indptr[row : row + 2]
        if not 0 <= begin <= end <= len(indices) or not 0 <= last_page_len[row] <= page_size:
            return -1
        entries, length = indices[begin:end], (end - begin - 1) * page_size + last_page_len[row]
    if not 0 < length <= len(entries) * page_size:
        return -1
    page, offset = entries[(length - 1) // page_size], (length - 1) % page_size
    return page * page_size + offset if 0 <= page < pages else -1


def naive_slots(table: ck.PageTable) -> torch.Tensor:
    return torch.tensor([naive_slot(table, row) for row in range(ROWS)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("layout", [ck.KVLayout.HND, ck.KVLayout.NHD], ids=["hnd", "nhd"])
def test_each_rows_last_token(layout: ck.KVLayout, table_format: str, backend: str) -> None:
    d, table = replace(D, layout=layout, table_format=table_format), table_of(table_format)
    k, v = random_kv(d, ROWS)
    plan = select(d, backend)
    plan.clear_status()
    append(d, backend, k, v, table, PAGES).assert_equals(expected(d, k, v, naive_slots(table), PAGES))
    assert plan.status() is None, "an empty row is no fault"


def corrupted(table_format: str) -> list[tuple[ck.PageTable, int, str, int]]:
    """(table, row, kind, value) of one fault each."""
    cases = []
    for row, position, kind, value in FAULTS[table_format]:
        table = table_of(table_format)
        operand = {"page": 0, "length": 1 if table_format == "dense" else 2, "indptr": 1}[kind]
        table.operands[operand][position] = value
        cases.append((table, row, kind, value))
    return cases


FAULTS: dict[str, list[tuple[int, object, str, int]]] = {
    "dense": [
        *[(2, (2, 1), "page", page) for page in (PAGES, INT_MAX, -1, -(2**31))],
        *[(2, 2, "length", length) for length in (-1, 13, INT_MAX, -(2**31))],
    ],
    "csr": [
        *[(2, 3, "page", page) for page in (PAGES, INT_MAX, -1)],
        *[(1, 1, "length", last) for last in (5, INT_MAX, -1)],
        (5, 5, "indptr", -1),
    ],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("table_format", FORMATS)
def test_a_row_at_fault_is_left_out_and_named(table_format: str, backend: str) -> None:
    d = replace(D, table_format=table_format)
    k, v = random_kv(d, ROWS)
    plan, device = select(d, backend), device_of(backend)
    for table, row, kind, value in corrupted(table_format):
        plan.clear_status()
        append(d, backend, k, v, table, PAGES).assert_equals(expected(d, k, v, naive_slots(table), PAGES))
        fault = plan.status()
        assert fault is not None
        if kind != "indptr":  # one entry of indptr ends one row and begins another: either may be named
            assert (fault.row, fault.kind) == (row, kind)
        if kind == "page" or table_format == "dense":
            assert fault.value == value
        memory = fresh(d, PAGES, device)
        validating, scales = select(d, backend, validate=True), run_scales(d, memory, device)
        operands = (k.to(device), v.to(device), memory.k_cache, memory.v_cache, to_device(table, device))
        with pytest.raises(ck.InvalidArgument, match=r"page_table\.(table|seq_lens|indices|indptr|last_page_len): row"):
            validating.run(*operands, **scales)
        memory.assert_equals(fresh(d, PAGES))
    plan.clear_status()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_page_of_the_new_token_counts(backend: str) -> None:
    """An earlier page of the row may hold anything: an append does not read it."""
    table, (k, v) = table_of("dense"), random_kv(D, ROWS)
    want = expected(D, k, v, naive_slots(table), PAGES)
    table.operands[0][4, :2] = INT_MAX
    plan = select(D, backend)
    plan.clear_status()
    append(D, backend, k, v, table, PAGES).assert_equals(want)
    assert plan.status() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_without_pages(backend: str) -> None:
    k, v = random_kv(D, ROWS)
    table = ck.PageTable.dense(torch.zeros(ROWS, 0, dtype=I32), torch.zeros(ROWS, dtype=I32))
    append(D, backend, k, v, table, PAGES).assert_equals(fresh(D, PAGES))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("table_format", FORMATS)
def test_append_then_decode(table_format: str, backend: str) -> None:
    """The same table and the same KVScales: attention over one token gives what its V reads as."""
    d = replace(D, table_format=table_format, kv_dtype=K.E4M3, k_scale=S.HEAD, v_scale=S.TOKEN_F16)
    table, (k, v) = table_of(table_format, (1,) * ROWS), random_kv(d, ROWS)
    device = device_of(backend)
    memory, on_device = fresh(d, PAGES, device), to_device(table, device)
    scales, caches = run_scales(d, memory, device), (memory.k_cache, memory.v_cache)
    select(d, backend).run(k.to(device), v.to(device), *caches, on_device, **scales)
    storage = {"kv_dtype": d.kv_dtype, "layout": d.layout, "k_scale": d.k_scale, "v_scale": d.v_scale}
    decode = ck.PagedDecodeDescriptor(ROWS, 6, 3, 64, PAGE, BF16, table_format=table_format, **storage)
    arch = "sm80" if backend == "sm90" else backend  # TMA brings pages of 8 tokens or more, these have 4
    plan = ck.PagedDecodePlan.select(decode, device, ck.PlanPreference(arch=arch))
    workspace = plan.new_workspace()
    q = torch.randn(ROWS, 6, 64).bfloat16().to(device)
    out, _ = plan.run(q, *caches, on_device, **scales, workspace=workspace)
    codes, found = ck.quantize_kv(v, K.E4M3, S.TOKEN_F16)
    assert found is not None
    want = (codes.float() * found.float()[..., None]).repeat_interleave(2, 1)
    torch.testing.assert_close(out.cpu().float(), want, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_a_graph_follows_lengths_that_grow(arch: str) -> None:
    """Three decode steps of one captured append: each lands one slot further."""
    (k, v), table = [t.cuda() for t in random_kv(D, ROWS)], to_device(table_of("dense"), "cuda")
    plan, memory = select(D, arch), fresh(D, PAGES, "cuda")
    operands, scales = (k, v, memory.k_cache, memory.v_cache, table), run_scales(D, memory, "cuda")
    plan.run(*operands, **scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(*operands, **scales)
    for step in range(3):
        table.operands[1].copy_(torch.tensor([1 + step, 2 + step, 5 + step, 0, 9 + step, 6 + step]).int())
        fresh_k, fresh_v = random_kv(D, ROWS, step)
        k.copy_(fresh_k), v.copy_(fresh_v)
        for tensor in (memory.k_cache, memory.v_cache, memory.k_scale, memory.v_scale):
            tensor.view(torch.uint8).fill_(0x55)
        graph.replay()
        memory.assert_equals(expected(D, fresh_k, fresh_v, naive_slots(to_device(table, "cpu")), PAGES))


VALUES = st.one_of(st.integers(-2, 9), st.sampled_from([INT_MAX, -(2**31)]))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 4), pages=st.integers(0, 6), entries=st.integers(0, 5), csr=st.booleans())
def test_last_slots_and_their_faults(data: st.DataObject, page_size: int, pages: int, entries: int, csr: bool) -> None:
    """Whatever the table holds: the slots of a loop, and a fault where a row that is not empty has no slot."""
    if csr:
        indptr = data.draw(st.lists(st.integers(-1, entries + 1), min_size=1, max_size=5))
        indices, last = (data.draw(st.lists(VALUES, min_size=n, max_size=n)) for n in (entries, len(indptr) - 1))
        table = ck.PageTable.csr(*(torch.tensor(values, dtype=I32) for values in (indptr, indices, last)))
        empty = [begin == end and 0 <= begin <= entries for begin, end in pairwise(indptr)]
        empty = [e or n + (b - a - 1) * page_size == 0 for e, n, (a, b) in zip(empty, last, pairwise(indptr), strict=True)]
    else:
        lengths = data.draw(st.lists(VALUES, max_size=4))
        rows = [data.draw(st.lists(VALUES, min_size=entries, max_size=entries)) for _ in lengths]
        table = ck.PageTable.dense(torch.tensor(rows, dtype=I32).view(len(rows), entries), torch.tensor(lengths, dtype=I32))
        empty = [length == 0 for length in lengths]
    slots = last_slots(table, page_size, pages).tolist()
    assert slots == [naive_slot(table, row, pages, page_size) for row in range(len(empty))]
    fault = first_fault(table, page_size, pages, last_page_only=True)
    missing = [row for row, slot in enumerate(slots) if slot < 0 and not empty[row]]
    if not csr or fault is None or fault.kind == "page":
        assert (fault is None) == (not missing) and (fault is None or fault.row in missing)
