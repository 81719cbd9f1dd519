"""Attention weights on every backend: numbers against f64, hostile memory, bad metadata, bits that depend on nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from tests.support.attention_harness import run as run_attention
from tests.support.attention_harness import select as select_attention
from tests.support.harness import BACKENDS, device_of
from tests.support.inputs import INT_MAX, INT_MIN
from tests.support.weights_cases import (
    CASES,
    EVERYTHING,
    INT8,
    TOKEN_F16,
    Case,
    assert_bitwise,
    assert_close,
    bits,
    case,
    make_weights,
    outputs,
    run,
    select,
)

NAMED = {one.name: one for one in CASES}
SOME = [NAMED[name] for name in ("usual", "csr_p128_bf16", "int8_token_f16", "everything", "e4m3_head", "lengths")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_weight_is_near_f64(case: Case, backend: str) -> None:
    if backend == "sm90" and not case.tma:
        with pytest.raises(ck.Unsupported, match="TMA needs"):
            select(case, backend)
        return
    inputs, plan = make_weights(case, device_of(backend)), select(case, backend)
    assert_close(inputs, run(plan, inputs))
    assert plan.status() is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [one for one in SOME if not one.attention.sinks], ids=str)
def test_rows_sum_to_one_by_the_lse_that_attention_returned(case: Case, backend: str) -> None:
    """Within what an lse may be off, and a rounding of each weight."""
    inputs = make_weights(case, device_of(backend))
    _, lse = run_attention(select_attention(case.attention, backend), inputs.attention)
    result = run(select(case, backend), inputs, lse=lse)
    live = torch.tensor([length > 0 for length in case.attention.cache.lengths], device=lse.device)
    rounding = torch.finfo(case.weights_dtype).eps
    sums = result.weights.double().sum(-1)
    assert (sums[live] - 1).abs().max() <= 1e-5 * lse[live].abs().clamp(min=1).max() + rounding
    assert (sums[~live] == 0).all()
    assert (result.mean.double().sum(-1)[live] - 1).abs().max() <= 1e-5 * lse[live].abs().clamp(min=1).max()
    if result.page_mass is not None:
        assert (result.page_mass.double().sum(-1)[live] - 1).abs().max() <= 1e-5 * lse[live].abs().clamp(min=1).max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_no_byte_outside_the_rows_reaches_a_bit(case: Case, backend: str) -> None:
    plan = select(case, backend)
    results = [
        run(plan, make_weights(case, device_of(backend), dead=dead), fill) for dead, fill in ((math.nan, math.nan), (0.5, 7))
    ]
    assert_bitwise(*results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["usual", "everything_int8"])
def test_an_output_is_the_same_whatever_else_is_asked_for(name: str, backend: str) -> None:
    """But for page masses, whose chunks are whole pages: a mean sums the heads of a key, never keys."""
    whole = NAMED[name]
    inputs = make_weights(whole, device_of(backend))
    together = run(select(whole, backend), inputs)
    nothing = {"weights_dtype": None, "mean": False, "page_mass": False}
    for field, value in (("weights_dtype", whole.weights_dtype), ("mean", True), ("page_mass", True)):
        result = run(select(replace(whole, **{**nothing, field: value}), backend), inputs)
        for ours, theirs in zip(result, together, strict=True):
            assert ours is None or torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse", [-math.inf, math.inf, 1e30, -1e30, 3.0])
@pytest.mark.parametrize("name", ["usual", "everything", "bf16_head"])
def test_another_lse_gives_finite_or_infinite_weights(name: str, lse: float, backend: str) -> None:
    one = NAMED[name]
    inputs = make_weights(one, device_of(backend))
    result = run(select(one, backend), inputs, lse=torch.full_like(inputs.lse, lse))
    for row, length in enumerate(one.attention.cache.lengths):
        assert not result.weights[row].isnan().any()
        assert (bits(result.weights[row][:, length:]) == 0).all()
        assert not result.mean[row].isnan().any() and (bits(result.mean[row][length:]) == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_key_that_counts_holds_shows(value: float, backend: str) -> None:
    """The control of the poison tests: NaN in a key of a row is NaN in its weights and its page, and nowhere else."""
    one, row, token = NAMED["usual"], 9, 70
    inputs = make_weights(one, device_of(backend))
    clean = run(select(one, backend), inputs)
    page = inputs.attention.kv.rows[row][token // 16].long()
    inputs.attention.k[page, 0, token % 16] = value
    result = run(select(one, backend), inputs)
    heads = one.attention.cache.num_heads // 2
    assert not result.weights[row, :heads, token].isfinite().all()
    assert torch.equal(result.weights[row, heads:], clean.weights[row, heads:])
    result.weights[row, :heads, token] = clean.weights[row, :heads, token]
    assert_bitwise(ck.AttentionWeights(result.weights, None, None), ck.AttentionWeights(clean.weights, None, None))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [-1, INT_MIN, INT_MAX, "num_pages"])
def test_a_page_outside_the_pool_is_a_hole(page: Any, backend: str) -> None:
    one, row = NAMED["usual"], 10
    inputs = make_weights(one, device_of(backend))
    plan = select(one, backend)
    plan.clear_status()
    clean = run(plan, inputs)
    table = inputs.attention.table.operands[0]
    table[row, 3] = len(inputs.attention.k) if page == "num_pages" else page
    result = run(plan, inputs)
    assert (bits(result.weights[row, :, 48:64]) == 0).all() and (bits(result.page_mass[row, 3]) == 0).all()
    fault = plan.status()
    assert fault is not None and (fault.kind, fault.row, fault.value) == ("page", row, int(table[row, 3]))
    plan.clear_status()
    kept = [key for key in range(one.keys) if not 48 <= key < 64]
    torch.testing.assert_close(result.weights[row][:, kept], clean.weights[row][:, kept], rtol=1e-5, atol=0)
    for ours, theirs in zip(result, clean, strict=True):
        ours[row] = theirs[row]
    assert_bitwise(result, clean)
    with pytest.raises(ck.InvalidArgument, match=r"page_table.table: row 10 names page"):
        run(select(one, backend, validate=True), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("length", "held"), [(-1, 0), (INT_MIN, 0), (INT_MAX, None), (10_000, None)])
def test_a_bad_length_is_masked_and_reported(length: int, held: int | None, backend: str) -> None:
    """A negative one counts as 0; one past the table as what the table holds, here with pages that are none of the pool."""
    one, row = NAMED["usual"], 4
    inputs = make_weights(one, device_of(backend))
    plan = select(one, backend)
    plan.clear_status()
    clean = run(plan, inputs)
    inputs.attention.table.operands[1][row] = length
    result = run(plan, inputs)
    fault = plan.status()
    assert fault is not None and fault.row == row and (fault.kind, fault.value) in (("length", length), ("page", fault.value))
    plan.clear_status()
    if held == 0:
        assert (bits(result.weights[row]) == 0).all()
    else:  # its own keys are as before, what garbage entries name is left out
        torch.testing.assert_close(result.weights[row, :, :31], clean.weights[row, :, :31], rtol=1e-5, atol=0)
        assert (bits(result.weights[row][:, 32:]) == 0).all()
    for ours, theirs in zip(result, clean, strict=True):
        ours[row] = theirs[row]
    assert_bitwise(result, clean)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("table", ["dense", "csr", "lengths"])
def test_a_row_of_more_keys_than_there_is_room_for(table: str, backend: str) -> None:
    """Its first max_seq_len keys have their weights; it is reported, and with validate raises."""
    one = case("short", {"lengths": (300, 20, 100)}, table=table, max_seq_len=100)
    inputs, plan = make_weights(one, device_of(backend)), select(one, backend)
    plan.clear_status()
    assert_close(inputs, run(plan, inputs))
    assert plan.status() == ck.Fault(0, "length", 300)
    plan.clear_status()
    with pytest.raises(ck.InvalidArgument, match="row 0 has length 300"):
        run(select(one, backend, validate=True), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_of_any_strides_and_nothing_beside_them(backend: str) -> None:
    one = NAMED["usual"]
    inputs, d = make_weights(one, device_of(backend)), one.descriptor()
    expected = run(select(one, backend), inputs)
    batch, heads, keys = d.shapes["weights"]
    wide = torch.full((batch, 3, heads, keys + 8), 7.0, device=inputs.lse.device)
    means = torch.full((keys, batch, 2), 7.0, device=inputs.lse.device)
    pages = torch.full((d.max_pages, batch), 7.0, device=inputs.lse.device)
    views = {"weights": wide[:, 1, :, :keys], "mean": means[:, :, 0].T, "page_mass": pages.T}
    assert_bitwise(run(select(one, backend), inputs, **views), expected)
    wide[:, 1, :, :keys], means[:, :, 0] = 7.0, 7.0
    assert (wide == 7).all() and (means == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_q_with_a_unit_axis_and_an_lse_of_any_strides(backend: str) -> None:
    one = NAMED["usual"]
    inputs = make_weights(one, device_of(backend))
    expected, q = run(select(one, backend), inputs), inputs.given["q"]
    lse = torch.stack([inputs.lse, inputs.lse], -1)[..., 0]
    for view in (q[:, None], q[:, :, None]):
        assert_bitwise(run(select(one, backend), inputs, q=view, lse=lse), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_of_one_page_and_one_key(backend: str) -> None:
    """Extents of one everywhere, whose strides are anything."""
    one = case("one", {"lengths": (1,), "num_heads": 1, "num_kv_heads": 1}, max_seq_len=1)
    inputs = make_weights(one, device_of(backend))
    assert_close(inputs, run(select(one, backend), inputs))
    view = inputs.given["q"].as_strided((1, 1, 64), (1, 3, 1))
    assert_close(inputs, run(select(one, backend), inputs, q=view))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_read(backend: str) -> None:
    """No row: nothing is written. No page in the cache, or no column in the table: zeros."""
    d = NAMED["usual"].descriptor()
    device = device_of(backend)
    preference = ck.PlanPreference(arch=backend)
    none = ck.AttentionWeightsPlan.select(replace(d, batch_size=0), device, preference)
    q, lse = torch.zeros(d.batch_size, 8, 64, dtype=d.q_dtype, device=device), torch.zeros(d.batch_size, 8, device=device)
    lengths = torch.full((d.batch_size,), 5, dtype=torch.int32, device=device)
    for pages, width in ((0, 4), (3, 0)):
        k = torch.zeros(pages, 2, 16, 64, dtype=d.q_dtype, device=device)
        table = torch.zeros(d.batch_size, width, dtype=torch.int32, device=device)
        empty = none.run(q[:0], k, lse[:0], ck.PageTable.dense(table[:0], lengths[:0]))
        assert [tuple(t.shape) for t in empty] == [(0, 8, 1024), (0, 1024), (0, 64)]
        given = outputs(d, device)
        plan = ck.AttentionWeightsPlan.select(d, device, preference)
        result = plan.run(q, k, lse, ck.PageTable.dense(table, lengths), **given)
        assert all((bits(t) == 0).all() for t in result)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["usual", "everything_int8"])
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(name: str, backend: str) -> None:
    one = NAMED[name]
    inputs = make_weights(one, device_of(backend))
    expected = run(select(one, backend), inputs)
    for row in (1, 7, 11):
        table, given = inputs.attention.table, inputs.given
        if table.format == "csr":
            indices, indptr, last = table.operands
            table = ck.PageTable.csr(indptr[row : row + 2], indices, last[row : row + 1])
        else:
            table = ck.PageTable.dense(table.operands[0][row : row + 1], table.operands[1][row : row + 1])
        d = replace(one.descriptor(), batch_size=1)
        plan = ck.AttentionWeightsPlan.select(d, device_of(backend), ck.PlanPreference(arch=backend))
        alone = plan.run(**{**given, "q": given["q"][row : row + 1], "lse": given["lse"][row : row + 1], "page_table": table})
        assert_bitwise(alone, ck.AttentionWeights(*(t[row : row + 1] for t in expected)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend: str) -> None:
    """Scores in the thousands: a weight is as exact as its lse."""
    one = case("large", {"softmax_scale": 300.0})
    inputs = make_weights(one, device_of(backend))
    assert inputs.lse.abs().amax() > 5000
    assert_close(inputs, run(select(one, backend), inputs))


def test_modifiers_all_at_once_are_told_apart() -> None:
    """Each modifier changes the weights: a case that tests one could not pass without it."""
    base = make_weights(case("plain"))
    plain = run(select(base.case, "cpu"), base)
    for name, value in EVERYTHING.items():
        if name == "sinks":  # in the lse alone
            continue
        one = case(name, modifiers={name: value})
        inputs = make_weights(one)
        changed = run(select(one, "cpu"), replace(inputs, lse=base.lse))
        assert not torch.equal(changed.weights, plain.weights), name
    token = case("token", {"kv_dtype": INT8, "k_scale": TOKEN_F16})
    inputs = make_weights(token)
    expected = run(select(token, "cpu"), inputs)
    twice = run(select(token, "cpu"), inputs, k_scale=inputs.given["k_scale"] * 2)
    assert not torch.equal(twice.weights, expected.weights)
