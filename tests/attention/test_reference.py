"""The reference against a naive f64 loop, on named cases and on random shapes and tables."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.attention import reference
from tests.support.inputs import CASES, INT_MAX, INT_MIN, Operands, Shape, make_operands
from tests.support.naive import naive_row


def naive(case: Shape, inputs: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in f64, from the page table read entry by entry."""
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    k, v = ((c.transpose(1, 2) if case.order == "HND" else c).double() for c in (inputs.k_cache, inputs.v_cache))
    first, second, _ = inputs.page_table.operands
    outs, lses = [], []
    for row, length in enumerate(case.lengths):
        pages = first[row] if case.table_format == "dense" else first[second[row] :]
        places = [(int(pages[t // case.page_size]), t % case.page_size) for t in range(length)]
        keys = [k[page, slot].tolist() for page, slot in places]
        values = [v[page, slot].tolist() for page, slot in places]
        out, lse = naive_row(inputs.q[row], keys, values, scale)
        outs.append(out)
        lses.append([x / math.log(2) if case.lse_base == "2" else x for x in lse])
    return torch.tensor(outs, dtype=torch.float64), torch.tensor(lses, dtype=torch.float64)


def run_reference(case: Shape, inputs: Operands, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (c if case.order == "HND" else c.transpose(1, 2) for c in (inputs.k_cache, inputs.v_cache))
    rules = {"softmax_scale": case.softmax_scale, "lse_base": case.lse_base, "dtype": dtype}
    return reference.decode_paged(inputs.q, k, v, inputs.page_table, **rules)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_equals_the_naive_loop(case: Shape) -> None:
    inputs = make_operands(case)
    expected_out, expected_lse = naive(case, inputs)
    out, lse = run_reference(case, inputs, torch.float64)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    out, lse = run_reference(case, inputs, torch.float32)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_equals_the_naive_loop(case: Shape) -> None:
    """Each element within 2 ulp of f64 at its own size, which is more than the plan promises."""
    inputs = make_operands(case)
    expected_out, expected_lse = naive(case, inputs)
    plan = ck.PagedDecodePlan.select(case.descriptor(), device="cpu")
    out, lse = plan.run(*inputs)
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    ulps = 2 * torch.finfo(case.dtype).eps * expected_out.abs() + torch.finfo(case.dtype).tiny
    assert ((out.double() - expected_out).abs() <= ulps).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seq_lens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    group_size=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 24),
    page_size=st.integers(1, 19),
    layout=st.sampled_from(["HND", "NHD"]),
    table_format=st.sampled_from(["dense", "csr"]),
    lse_base=st.sampled_from(["e", "2"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_random_shapes_and_tables(
    seq_lens, group_size, num_kv_heads, head_dim, page_size, layout, table_format, lse_base, dtype, seed
) -> None:
    heads = (group_size * num_kv_heads, num_kv_heads)
    case = Shape(*heads, head_dim, page_size, tuple(seq_lens), dtype, layout, table_format, lse_base)
    inputs = make_operands(case, seed=seed)
    expected_out, expected_lse = naive(case, inputs)
    out, lse = ck.PagedDecodePlan.select(case.descriptor(), device="cpu").run(*inputs)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    assert ((out.double() - expected_out).abs() <= 2 * eps * expected_out.abs() + 4e-6).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 7), pool=st.integers(1, 6))
def test_hostile_device_metadata_is_masked(data, page_size: int, pool: int) -> None:
    """Ids outside the pool, lengths past capacity and negative lengths: those tokens do not exist, others are unchanged."""
    ids = st.one_of(st.integers(-2, pool + 1), st.sampled_from([INT_MIN, INT_MAX]))
    lengths = st.one_of(st.integers(-3, 4 * page_size + 2), st.sampled_from([INT_MIN, INT_MAX]))
    table = data.draw(st.lists(st.lists(ids, min_size=3, max_size=3), min_size=3, max_size=3))
    seq_lens = data.draw(st.lists(lengths, min_size=3, max_size=3))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 8, generator=generator)
    k, v = (torch.randn(pool, 1, page_size, 8, generator=generator) for _ in range(2))
    page_table = ck.PageTable.dense(torch.tensor(table, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32))
    out, lse = reference.decode_paged(q, k, v, page_table, dtype=torch.float64)
    for row in range(3):
        tokens = range(max(0, min(seq_lens[row], 3 * page_size)))
        places = [(table[row][t // page_size], t % page_size) for t in tokens if 0 <= table[row][t // page_size] < pool]
        keys, values = ([c[p, :, s].tolist() for p, s in places] for c in (k.double(), v.double()))
        expected_out, expected_lse = naive_row(q[row], keys, values, 8**-0.5)
        torch.testing.assert_close(out[row], torch.tensor(expected_out, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse[row], torch.tensor(expected_lse, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("indptr", "last_page_len", "lengths"),
    [
        ([0, 2, 4], [3, 3], [7, 7]),
        ([0, 0, 4], [2, 4], [0, 16]),
        ([0, 2, 4], [0, -9], [4, 0]),
        ([0, 2, 4], [9, INT_MAX], [8, 8]),
        ([-1, 2, 9], [1, 1], [0, 0]),
        ([3, 1, 4], [1, 1], [0, 9]),
    ],
)
def test_csr_lengths_stay_inside_the_table(indptr: list[int], last_page_len: list[int], lengths: list[int]) -> None:
    """Page size 4, four entries: a row's tokens are those its own part of the table can hold."""
    k = torch.zeros(4, 1, 4, 8)
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (indptr, [0, 1, 2, 3], last_page_len)]
    table = ck.PageTable.csr(*tensors)
    _, lse = reference.decode_paged(torch.zeros(2, 1, 8), k, k, table)
    expected = [math.log(n) if n else -math.inf for n in lengths]
    torch.testing.assert_close(lse[:, 0], torch.tensor(expected))


def test_poison_changes_no_bit() -> None:
    for case in CASES:
        clean = run_reference(case, make_operands(case, dead=0.0), torch.float32)
        for poison in (float("nan"), float("inf"), -6e4):
            poisoned = run_reference(case, make_operands(case, dead=poison), torch.float32)
            assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True)), case.name


def test_one_token_returns_its_value() -> None:
    case = next(case for case in CASES if case.name == "one_token")
    inputs = make_operands(case)
    out, _ = ck.PagedDecodePlan.select(case.descriptor(), device="cpu").run(*inputs)
    page = int(inputs.page_table.operands[0][0, 0])
    expected = inputs.v_cache[page, :, 0].repeat_interleave(case.num_heads // case.num_kv_heads, 0)
    assert torch.equal(out[0], expected)


@pytest.mark.parametrize("logit", [-6e4, -5e5, 0.0, 5e5])
def test_extreme_logits(logit: float) -> None:
    """Equal logits of any size average V and give lse = logit + log(tokens)."""
    q, k = torch.full((1, 1, 8), logit, dtype=torch.float32), torch.full((1, 1, 5, 8), 0.125)
    v = torch.arange(40, dtype=torch.float32).view(1, 1, 5, 8)
    out, lse = reference.decode_contiguous(q, k, v, softmax_scale=1.0, dtype=torch.float64)
    torch.testing.assert_close(out[0, 0], v[0, 0].double().mean(0))
    torch.testing.assert_close(lse[0, 0].item(), logit + math.log(5))
