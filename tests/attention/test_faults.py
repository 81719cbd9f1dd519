"""Bad lengths, page ids and indptrs on the device: masked, recorded until cleared, and errors that name the row on request."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.kv.faults import Fault, first_fault
from tests.support.inputs import INT_MAX, INT_MIN, SPARE_PAGES, Shape, make_operands

DENSE = Shape(lengths=(5, 40, 17, 0), num_heads=2, num_kv_heads=1, head_dim=8, name="faults")
CSR = replace(DENSE, table_format="csr")
NUM_PAGES = 1 + 3 + 2 + SPARE_PAGES
WIDTH = 5  # columns of the dense table, 80 tokens

pytestmark = pytest.mark.usefixtures("no_plans")

# case, operand of the table, place in it, value, the fault, what the row then is: a length, or None where a page is left out
BROKEN: list[Any] = [
    (DENSE, 0, (1, 0), -1, Fault(1, "page", -1), None),
    (DENSE, 0, (1, 2), NUM_PAGES, Fault(1, "page", NUM_PAGES), None),
    (DENSE, 0, (1, 1), INT_MIN, Fault(1, "page", INT_MIN), None),
    (DENSE, 0, (1, 1), INT_MAX, Fault(1, "page", INT_MAX), None),
    (DENSE, 1, 1, -1, Fault(1, "length", -1), 0),
    (DENSE, 1, 1, INT_MIN, Fault(1, "length", INT_MIN), 0),
    (DENSE, 1, 1, 16 * WIDTH + 1, Fault(1, "length", 16 * WIDTH + 1), 16 * WIDTH),
    (DENSE, 1, 1, INT_MAX, Fault(1, "length", INT_MAX), 16 * WIDTH),
    (CSR, 0, 1, NUM_PAGES, Fault(1, "page", NUM_PAGES), None),
    (CSR, 0, 3, INT_MIN, Fault(1, "page", INT_MIN), None),
    (CSR, 2, 1, -33, Fault(1, "length", -1), 0),
    (CSR, 2, 1, INT_MIN, Fault(1, "length", INT_MIN + 32), 0),
    (CSR, 2, 1, 17, Fault(1, "length", 49), 48),
    (CSR, 2, 1, INT_MAX, Fault(1, "length", INT_MAX), 48),
    (CSR, 1, 4, 7, Fault(3, "indptr", 6), 0),
    (CSR, 1, 4, INT_MIN, Fault(3, "indptr", 6), 0),
]


def broken_inputs(case: Shape, operand: int, place: Any, value: int) -> Any:
    """Operands of `case` with one entry of the table replaced; the whole pool is finite, so that a longer row is too."""
    inputs = make_operands(case, dead=0.5)
    inputs.page_table.operands[operand][place] = value
    return inputs


@pytest.mark.parametrize(("case", "operand", "place", "value", "fault", "length"), BROKEN)
def test_a_fault_is_masked_and_recorded(
    case: Shape, operand: int, place: Any, value: int, fault: Fault, length: int | None
) -> None:
    plan = ck.PagedDecodePlan.select(case.descriptor(), "cpu")
    clean_inputs, inputs = make_operands(case, dead=0.5), broken_inputs(case, operand, place, value)
    clean = plan.run(*clean_inputs)
    assert plan.status() is None
    out, lse = plan.run(*inputs)
    assert plan.status() == fault
    others = [row for row in range(4) if row != fault.row]
    assert torch.equal(out[others], clean[0][others])
    assert torch.equal(lse[others], clean[1][others])
    if length == 0:
        assert not out[fault.row].any()
        assert (lse[fault.row] == -torch.inf).all()
    elif length is not None:
        if case is DENSE:
            inputs.page_table.operands[1][1] = length
        else:
            inputs.page_table.operands[2][1] = 16
        expected = plan.run(*inputs)
        assert all(torch.equal(a, b) for a, b in zip((out, lse), expected, strict=True))
    else:
        tokens = 40 - (8 if place == (1, 2) or place == 3 else 16)
        plan.run(inputs.q.zero_(), *inputs[1:], lse=lse)  # equal logits: the lse counts the tokens
        torch.testing.assert_close(lse[1].exp(), torch.full((2,), float(tokens)))


@pytest.mark.parametrize(("last", "length"), [(-5, 27), (-32, 0)])
def test_a_negative_last_page_len_is_recorded_though_the_length_is_not_negative(last: int, length: int) -> None:
    """The row keeps the tokens that the sum leaves it. Garbage beside a row without pages is no fault."""
    plan = ck.PagedDecodePlan.select(CSR.descriptor(), "cpu")
    inputs = broken_inputs(CSR, 2, 1, last)
    inputs.page_table.operands[2][3] = last  # of the row without pages
    plan.run(inputs.q.zero_(), *inputs[1:], lse=(lse := torch.zeros(4, 2)))  # equal logits: the lse counts the tokens
    torch.testing.assert_close(lse[1].exp(), torch.full((2,), float(length)))
    assert plan.status() == Fault(1, "length", last)
    validating = ck.PagedDecodePlan.select(CSR.descriptor(), "cpu", ck.PlanPreference(validate=True))
    with pytest.raises(ck.InvalidArgument, match=f"^page_table.last_page_len: row 1 has length {last}: must be from 0"):
        validating.run(*inputs)
    inputs.page_table.operands[2][1] = 0  # a last page may be empty still
    plan.clear_status()
    validating.run(*inputs)
    plan.run(*inputs)
    assert plan.status() is None


def test_a_fault_is_recorded_whatever_the_default_device() -> None:
    plan = ck.PagedDecodePlan.select(DENSE.descriptor(), "cpu")
    inputs = broken_inputs(DENSE, 1, 2, -4)
    with torch.device("meta"):
        plan.run(*inputs)
    assert plan.status() == Fault(2, "length", -4)


def test_a_fault_stays_until_it_is_cleared() -> None:
    plan = ck.PagedDecodePlan.select(DENSE.descriptor(), "cpu")
    inputs = make_operands(DENSE)
    plan.run(*broken_inputs(DENSE, 1, 2, -4))
    plan.run(*inputs)
    plan.run(*broken_inputs(DENSE, 0, (0, 0), -9))
    assert plan.status() == Fault(2, "length", -4)
    plan.clear_status()
    assert plan.status() is None
    plan.run(*inputs)
    assert plan.status() is None
    plan.run(*broken_inputs(DENSE, 0, (0, 0), -9))
    assert plan.status() == Fault(0, "page", -9)


def test_each_plan_has_its_own_status() -> None:
    plans = [ck.PagedDecodePlan.select(replace(DENSE.descriptor(), max_seq_len=n), "cpu") for n in (16, 32)]
    plans[0].run(*broken_inputs(DENSE, 1, 2, -4))
    assert plans[0].status() is not None
    assert plans[1].status() is None
    assert ck.PagedDecodePlan.select(replace(DENSE.descriptor(), max_seq_len=16), "cpu").status() == plans[0].status()


def test_a_contiguous_cache_has_no_metadata() -> None:
    descriptor = ck.FlashDecodingDescriptor(2, 2, 1, 5, 8, torch.float16)
    q, k = torch.randn(2, 2, 8).half(), torch.randn(2, 1, 5, 8).half()
    for preference in (None, ck.PlanPreference(validate=True)):
        plan = ck.FlashDecodingPlan.select(descriptor, "cpu", preference)
        plan.run(q, k, k.clone())
        assert plan.status() is None


def test_what_a_kernel_writes_is_read(pretend_h200: list) -> None:
    """[kind, row, value, 0]; words of zeros say nothing."""
    plan = ck.PagedDecodePlan.select(DENSE.descriptor(), "cpu")
    *_, address = plan._constants
    assert address == plan._words.data_ptr()
    for kind, name in enumerate(("page", "length", "indptr"), 1):
        plan._words.copy_(torch.tensor([kind, 3, -5, 0], dtype=torch.int32))
        assert plan.status() == Fault(3, name, -5)
        plan._words[0] = 0
        assert plan.status() is None
    plan.clear_status()
    assert plan._words.tolist() == [0] * 4


def test_faults_are_frozen_and_say_what_is_wrong() -> None:
    with pytest.raises(FrozenInstanceError):
        Fault(1, "page", 2).row = 3  # type: ignore[misc]
    assert str(Fault(1, "page", 9)) == "row 1 names page 9: must be from 0 to num_pages - 1"
    assert str(Fault(2, "length", -1)).startswith("row 2 has length -1: must be from 0")
    assert str(Fault(3, "indptr", -7)).startswith("row 3 begins at indptr -7: must be from 0")


ARGUMENTS = {
    (DENSE, "page"): "page_table.table: row",
    (DENSE, "length"): "page_table.seq_lens: row",
    (CSR, "page"): "page_table.indices: row",
    (CSR, "length"): "page_table.last_page_len: row",
    (CSR, "indptr"): "page_table.indptr: row",
}


@pytest.mark.parametrize(("case", "operand", "place", "value", "fault", "length"), BROKEN)
def test_validate_raises_before_anything_is_written(
    case: Shape, operand: int, place: Any, value: int, fault: Fault, length: int | None
) -> None:
    plan = ck.PagedDecodePlan.select(case.descriptor(), "cpu", ck.PlanPreference(validate=True))
    out, lse = torch.full((4, 2, 8), 7.0, dtype=torch.bfloat16), torch.full((4, 2), 7.0)
    with pytest.raises(ck.InvalidArgument) as caught:
        plan.run(*broken_inputs(case, operand, place, value), out=out, lse=lse)
    text = str(caught.value)
    assert text.startswith(f"{ARGUMENTS[case, fault.kind]} {fault.row} ")
    assert str(fault.value) in text
    assert "must be" in text
    assert (out == 7).all()
    assert (lse == 7).all()
    assert plan.status() is None
    plan.run(*make_operands(case), out=out, lse=lse)  # also every time with the same tensors
    assert not (lse == 7).any()


@pytest.mark.parametrize("case", [DENSE, CSR], ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_validate_changes_no_bit_of_good_runs(case: Shape, layout: str) -> None:
    """Garbage past the rows' pages is not looked at; every run is checked, also one with the tensors of the last."""
    case = replace(case, order=layout)
    validating = ck.PagedDecodePlan.select(case.descriptor(), "cpu", ck.PlanPreference(validate=True))
    inputs = make_operands(case)
    expected = ck.PagedDecodePlan.select(case.descriptor(), "cpu").run(*inputs)
    out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    for _ in range(4):
        validating.run(*inputs, out=out, lse=lse)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    inputs.page_table.operands[0].fill_(-1)
    with pytest.raises(ck.InvalidArgument, match="row 0 names page -1"):
        validating.run(*inputs, out=out, lse=lse)


def test_validate_comes_after_the_checks_of_the_tensors() -> None:
    plan = ck.PagedDecodePlan.select(DENSE.descriptor(), "cpu", ck.PlanPreference(validate=True))
    inputs = broken_inputs(DENSE, 1, 0, -1)
    with pytest.raises(ck.InvalidProblem, match=r"q\.shape"):
        plan.run(inputs.q[:2], *inputs[1:])


@pytest.mark.parametrize("empty", ["pool", "columns", "batch"])
def test_validate_without_pages(empty: str) -> None:
    """A pool or a table without pages holds no tokens; a batch without rows needs none."""
    case = replace(DENSE, lengths=()) if empty == "batch" else DENSE
    inputs = make_operands(case)
    plan = ck.PagedDecodePlan.select(case.descriptor(), "cpu", ck.PlanPreference(validate=True))
    table, seq_lens, _ = inputs.page_table.operands
    if empty == "batch":
        plan.run(*inputs)
        return
    cache = inputs.k_cache[:0] if empty == "pool" else inputs.k_cache
    page_table = ck.PageTable.dense(table[:, :0] if empty == "columns" else table, seq_lens)
    with pytest.raises(ck.InvalidArgument, match="row 0 names page" if empty == "pool" else "row 0 has length 5"):
        plan.run(inputs.q, cache, cache.clone(), page_table)
    seq_lens.zero_()
    out, _ = plan.run(inputs.q, cache, cache.clone(), page_table)
    assert not out.any()


def test_inside_a_capture_neither_validate_nor_status(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ck.PagedDecodePlan.select(DENSE.descriptor(), "cpu", ck.PlanPreference(validate=True))
    inputs = make_operands(DENSE)
    plan.run(*inputs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(plan, "device", torch.device("cuda:0"))
    monkeypatch.setattr(type(plan), "_on", lambda self, stream: torch.inference_mode(False))
    for name, attempt in (("validate", lambda: plan.run(*inputs)), ("status", plan.status)):
        with pytest.raises(ck.InvalidArgument, match=rf"^{name}: .*graph capture"):
            attempt()


IDS = st.one_of(st.integers(-2, 7), st.sampled_from([INT_MIN, INT_MAX]))
LENGTHS = st.one_of(st.integers(-3, 20), st.sampled_from([INT_MIN, INT_MAX]))


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 5), num_pages=st.integers(0, 6), width=st.integers(0, 3), batch=st.integers(0, 4))
def test_first_fault_of_dense_tables(data: Any, page_size: int, num_pages: int, width: int, batch: int) -> None:
    """Against a loop: the first bad length, else the first bad page id within a length."""
    rows = data.draw(st.lists(st.lists(IDS, min_size=width, max_size=width), min_size=batch, max_size=batch))
    lengths = data.draw(st.lists(LENGTHS, min_size=batch, max_size=batch))
    expected = next((Fault(b, "length", n) for b, n in enumerate(lengths) if not 0 <= n <= width * page_size), None)
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        for page in row[: -(-max(0, length) // page_size)]:
            if expected is None and not 0 <= page < num_pages:
                expected = Fault(b, "page", page)
    table = ck.PageTable.dense(int32(rows).view(batch, width), int32(lengths))
    assert first_fault(table, page_size, num_pages) == expected


@settings(max_examples=300, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 5), num_pages=st.integers(0, 6), entries=st.integers(0, 6))
def test_first_fault_of_csr_tables(data: Any, page_size: int, num_pages: int, entries: int) -> None:
    """Against a loop: the first bad indptr, else the first bad length, else the first bad page id within a length."""
    bound = st.integers(0, entries) if data.draw(st.booleans()) else st.integers(-2, entries + 2)
    indptr = data.draw(st.lists(bound, min_size=1, max_size=5))
    if data.draw(st.booleans()):
        indptr.sort()
    indices = data.draw(st.lists(IDS, min_size=entries, max_size=entries))
    last = data.draw(st.lists(st.one_of(st.integers(1, page_size), LENGTHS), min_size=len(indptr) - 1, max_size=len(indptr) - 1))
    found: dict[str, Fault] = {}
    for b, (begin, end) in enumerate(pairwise(indptr)):
        if not 0 <= begin <= end <= entries:
            found.setdefault("indptr", Fault(b, "indptr", begin))
            continue
        length = (end - begin - 1) * page_size + last[b] if end > begin else 0
        if not 0 <= length <= (end - begin) * page_size:
            found.setdefault("length", Fault(b, "length", min(length, INT_MAX)))
        elif end > begin and last[b] < 0:
            found.setdefault("length", Fault(b, "length", last[b]))
        for page in indices[begin:end][: -(-max(0, length) // page_size)]:
            if not 0 <= page < num_pages:
                found.setdefault("page", Fault(b, "page", page))
    expected = found.get("indptr") or found.get("length") or found.get("page")
    table = ck.PageTable.csr(int32(indptr), int32(indices), int32(last))
    assert first_fault(table, page_size, num_pages) == expected
