"""Adversarial case 13: page ids, lengths and indptr out of range on the device are masked and reported, and harm no other row."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from tests.support.bits import Result, differing_rows
from tests.support.harness import BACKENDS, assert_bitwise, assert_close, device_of, run, select
from tests.support.inputs import INT_MAX, INT_MIN, Inputs, Shape, make_inputs
from tests.support.metadata import copied, equivalent, to_device
from tests.support.storage import STORAGES

ROW = 1  # the corrupt row of the tests of one fault
LENGTHS = {"gpu": (300, 1000, 129, 64, 0, 777), "cpu": (30, 100, 17, 64, 0, 77)}  # shorter where a row takes milliseconds
BATCH = 6
PLANS = pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "invariant"])
FORMATS = pytest.mark.parametrize("table_format", ["dense", "csr"])
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
Prepared = tuple[ck.PagedDecodePlan, Inputs, Result]


def lengths_for(backend: str, whole_pages: bool = False) -> tuple[int, ...]:
    """LENGTHS; whole_pages: ROW has no dead slot, so that its length may grow."""
    lengths = list(LENGTHS["cpu" if backend == "cpu" else "gpu"])
    lengths[ROW] -= lengths[ROW] % 16 if whole_pages else 0
    return tuple(lengths)


def prepare(backend: str, lengths: tuple[int, ...], **options) -> Prepared:
    """(plan, inputs, result of a clean run, which reports nothing)."""
    preference = {name: options.pop(name) for name in ("batch_invariant", "validate") if name in options}
    shape = Shape(lengths=lengths, max_seq_len=4096, **options)
    plan, inputs = select(shape, backend, **preference), make_inputs(shape, device_of(backend))
    plan.clear_status()
    clean = run(plan, inputs)
    assert plan.status() is None
    return plan, inputs, clean


def status_of(plan: ck.PagedDecodePlan) -> tuple[int, str, int] | None:
    fault = plan.status()
    return fault and (fault.row, fault.kind, fault.value)


def check_reported(plan: ck.PagedDecodePlan, inputs: Inputs, clean: Result, faults: set[tuple[int, str, int]]) -> None:
    """The plan names one of the faults, also after a clean run, until it is told to forget; then clean runs report nothing."""
    reported = status_of(plan)
    assert reported in faults
    assert_bitwise(run(plan, inputs), clean)
    assert status_of(plan) == reported
    plan.clear_status()
    assert plan.status() is None
    assert_bitwise(run(plan, inputs), clean)
    assert plan.status() is None


def check_page_faults(plan: ck.PagedDecodePlan, inputs: Inputs, clean: Result) -> None:
    """Every bad id in the first, a middle, the last and every page of ROW."""
    count, num_pages = inputs.shape.pages[ROW], inputs.k.shape[0]
    places = {"first": [0], "middle": [count // 2], "last": [count - 1], "all": list(range(count))}
    for (name, place), value in itertools.product(places.items(), (-1, num_pages, INT_MAX, INT_MIN)):
        broken = replace(inputs, rows=[pages.clone() for pages in inputs.rows])
        broken.rows[ROW][place] = value
        table = broken.table()
        masked, faults = equivalent(inputs, table)
        assert faults == {(ROW, "page", value)}
        out, lse = run(plan, inputs, table=table)
        changed = differing_rows((out, lse), clean).nonzero().flatten().tolist()
        assert changed == [ROW], f"{name} page = {value}: rows {changed} changed"
        assert masked.shape.lengths[ROW] == 0 or name != "all"
        assert_close(masked, out, lse, [ROW])
        check_reported(plan, inputs, clean, faults)


@EVERY_BACKEND
@PLANS
@FORMATS
def test_pages_outside_the_pool(table_format: str, batch_invariant: bool, backend: str) -> None:
    check_page_faults(*prepare(backend, lengths_for(backend), table_format=table_format, batch_invariant=batch_invariant))


@EVERY_BACKEND
@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "16 bits"])
def test_pages_outside_the_pool_of_8_bits(storage: str, backend: str) -> None:
    """Nor are the scales of such pages read."""
    check_page_faults(*prepare(backend, lengths_for(backend), **STORAGES[storage]))


@EVERY_BACKEND
@pytest.mark.parametrize("page_size", [8, 64, 128])
def test_pages_outside_the_pool_of_other_sizes(page_size: int, backend: str) -> None:
    check_page_faults(*prepare(backend, lengths_for(backend), page_size=page_size))


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.id != "sm90"])
@pytest.mark.parametrize("page_size", [1, 5])
def test_pages_outside_the_pool_of_small_sizes(page_size: int, backend: str) -> None:
    check_page_faults(*prepare(backend, lengths_for(backend), page_size=page_size))


def check_length_fault(prepared: Prepared, table: ck.PageTable, repaired: ck.PageTable) -> None:
    """A corrupt table gives, bit for bit, what `repaired` gives. Rows are cut by all lengths, unless the plan is invariant."""
    plan, inputs, clean = prepared
    meant, faults = equivalent(inputs, table)
    got = run(plan, inputs, table=table)
    assert status_of(plan) in faults
    plan.clear_status()
    assert_bitwise(got, run(plan, inputs, table=repaired))
    assert plan.status() is None, "the repaired table is well formed"
    assert_close(meant, *got)
    if plan.precision_guarantee.batch_invariant:
        others = [row for row in range(BATCH) if meant.shape.lengths[row] == inputs.shape.lengths[row]]
        assert_bitwise((got[0][others], got[1][others]), (clean[0][others], clean[1][others]))
    run(plan, inputs, table=table)
    check_reported(plan, inputs, clean, faults)


@EVERY_BACKEND
@PLANS
def test_lengths_out_of_range(batch_invariant: bool, backend: str) -> None:
    prepared = prepare(backend, lengths_for(backend, whole_pages=True), batch_invariant=batch_invariant)
    inputs, table = prepared[1], prepared[1].table()
    table.operands[0][ROW, -2:] = table.operands[0][ROW, :2]  # its capacity is all pages of the pool
    capacity = table.operands[0].shape[1] * inputs.shape.page_size
    for value, meaning in ((-1, 0), (INT_MIN, 0), (capacity + 1, capacity), (INT_MAX, capacity)):
        broken, repaired = copied(table), copied(table)
        broken.operands[1][ROW], repaired.operands[1][ROW] = value, meaning
        check_length_fault(prepared, broken, repaired)


@EVERY_BACKEND
@PLANS
def test_last_page_lengths_out_of_range(batch_invariant: bool, backend: str) -> None:
    prepared = prepare(backend, lengths_for(backend, whole_pages=True), table_format="csr", batch_invariant=batch_invariant)
    inputs, table = prepared[1], prepared[1].table()
    full = inputs.shape.lengths[ROW]
    size = inputs.shape.page_size
    for value, meaning in ((INT_MIN, 0), (-full, 0), (-3, full - size - 3), (size + 1, full), (INT_MAX, full)):
        broken = copied(table)
        broken.operands[2][ROW] = value
        meant, _ = equivalent(inputs, broken)
        assert meant.shape.lengths[ROW] == meaning
        check_length_fault(prepared, broken, meant.table())


@EVERY_BACKEND
@PLANS
@pytest.mark.parametrize("index", [0, 2, BATCH])
def test_broken_indptr(index: int, batch_invariant: bool, backend: str) -> None:
    """The rows on both sides of the entry become empty; a page that is in the pool may belong to another tenant."""
    prepared = prepare(backend, lengths_for(backend), table_format="csr", batch_invariant=batch_invariant)
    inputs, table = prepared[1], prepared[1].table()
    for value in (-1, INT_MIN, table.operands[0].numel() + 1, INT_MAX):
        broken = copied(table)
        broken.operands[1][index] = value
        meant, faults = equivalent(inputs, broken)
        affected = {row for row in (index - 1, index) if 0 <= row < BATCH}
        assert {row for row, _, _ in faults} == affected
        assert all(meant.shape.lengths[row] == 0 for row in affected)
        check_length_fault(prepared, broken, meant.table())


def corrupt(table: ck.PageTable, shape: Shape, row: int, kind: str, rng: random.Random, num_pages: int) -> set[int]:
    """Breaks `row` of a table on the CPU; returns the rows that this touches."""
    first, second, last_page_len = table.operands
    huge, negative = (
        rng.choice((INT_MAX, INT_MAX - rng.randrange(1 << 20))),
        rng.choice((-1, INT_MIN, -rng.randrange(1, 1 << 31))),
    )
    if kind == "page":
        count, begin = shape.pages[row], 0 if last_page_len is None else sum(shape.pages[:row])
        entries = first[row] if last_page_len is None else first
        for place in rng.sample(range(count), rng.choice((1, min(3, count), count))):
            entries[begin + place] = rng.choice((num_pages, huge, negative))
    elif kind == "length" and last_page_len is None:
        second[row] = rng.choice((first.shape[1] * shape.page_size + 1, huge, negative))
    elif kind == "length":
        last_page_len[row] = rng.choice((shape.page_size + 1, huge, INT_MIN))
    else:
        place = row + rng.randrange(2)
        second[place] = rng.choice((len(first) + 1, huge, negative))
        return {place - 1, place} & set(range(len(shape.lengths)))
    return {row}


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("table_format", "batch_invariant", "storage"),
    [
        *itertools.product(("dense", "csr"), (False, True), ("16 bits",)),
        ("dense", False, "e4m3"),
        ("dense", True, "int8 token"),
    ],
)
def test_random_corruptions(table_format: str, batch_invariant: bool, storage: str, backend: str) -> None:
    """Ten corrupt rows a launch: the others keep every bit, no NaN of a dead slot shows, and what is reported is there.

    Only pages under the default plan, where a row's length decides how others are cut.
    """
    batch, launches, most_pages = (16, 20, 12) if backend == "cpu" else (64, 1000, 64)
    rng = random.Random(f"{table_format} {batch_invariant}")
    lengths = tuple(
        16 * rng.randrange(most_pages + 1) for _ in range(batch)
    )  # whole pages: a length past the end shows no dead slot
    options = {"table_format": table_format, "batch_invariant": batch_invariant, **STORAGES[storage]}
    plan, inputs, clean = prepare(backend, lengths, **options)
    kinds = {"dense": ["page", "length"], "csr": ["page", "length", "indptr"]}[table_format] if batch_invariant else ["page"]
    table = to_device(inputs.table(), "cpu")
    wrong = torch.zeros((), dtype=torch.int64, device=inputs.q.device)
    for launch in range(launches):
        broken, touched = copied(table), set()
        for row in rng.sample([row for row in range(batch) if lengths[row]], 10):
            touched |= corrupt(broken, inputs.shape, row, rng.choice(kinds), rng, inputs.k.shape[0])
        rows = sorted(touched)
        out, lse = run(plan, inputs, table=to_device(broken, inputs.q.device))
        differs = differing_rows((out, lse), clean)
        differs[rows] = False
        wrong += differs.sum() + torch.isnan(out).sum() + torch.isnan(lse).sum()
        meant, faults = equivalent(inputs, broken, rows)
        assert status_of(plan) in faults, f"launch {launch}"
        plan.clear_status()
        if launch % 50 == 0:
            assert_close(meant, out, lse, rows)
    assert int(wrong) == 0
    assert_bitwise(run(plan, inputs), clean)
    assert plan.status() is None


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("table_format", "operand", "place", "value"),
    [
        ("dense", 0, (ROW, 5), -1),
        ("dense", 0, (ROW, 0), INT_MAX),
        ("dense", 1, ROW, -7),
        ("dense", 1, ROW, INT_MAX),
        ("csr", 0, -1, INT_MIN),
        ("csr", 2, ROW, INT_MIN),
        ("csr", 1, ROW, -9),
    ],
)
def test_validate_names_the_row_before_anything_is_written(
    table_format: str, operand: int, place: int | tuple[int, int], value: int, backend: str
) -> None:
    plan, inputs, clean = prepare(backend, lengths_for(backend), table_format=table_format, validate=True)
    broken = inputs.table()
    broken.operands[operand][place] = value
    _, faults = equivalent(inputs, broken)
    out, lse = torch.full_like(clean[0], 3.0), torch.full_like(clean[1], 3.0)
    workspace = plan.new_workspace()
    with pytest.raises(ck.InvalidArgument) as error:
        plan.run(inputs.q, inputs.k, inputs.v, broken, out=out, lse=lse, workspace=workspace)
    row, value = map(int, re.search(r"row (\d+)\b.*? (-?\d+)\b", str(error.value)).groups())
    assert row == min(faults)[0] and (row, value) in {(row, value) for row, _, value in faults}
    assert (out == 3.0).all() and (lse == 3.0).all() and not workspace.any()
    assert_bitwise(run(plan, inputs), clean)
