"""decode_attention and its torch ops: the same numbers as the plan, opcheck, torch.compile(fullgraph=True)."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.api import plan_cache, torch_ops
from cute_kernels.planning import base as plan_base
from tests.support.inputs import CASES, Shape, make_operands

CASE = Shape(lengths=(0, 5, 40), head_dim=64, name="functional")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_theplan_of(case: Shape) -> None:
    inputs = make_operands(case)
    expected = ck.PagedDecodePlan.select(case.descriptor(), "cpu").run(*inputs)
    rules = {"softmax_scale": case.softmax_scale, "layout": case.order, "lse_base": case.lse_base}
    got = ck.decode_attention(*inputs[:3], page_table=inputs.page_table, **rules)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if case.table_format == "dense":
        table, seq_lens, _ = inputs.page_table.operands
        got = ck.decode_attention(*inputs[:3], page_table=table, seq_lens=seq_lens, **rules)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_int_length_is_broadcast() -> None:
    case = replace(CASE, lengths=(20, 20, 20))
    inputs = make_operands(case)
    expected = ck.decode_attention(*inputs[:3], page_table=inputs.page_table)
    got = ck.decode_attention(*inputs[:3], page_table=inputs.page_table.operands[0], seq_lens=20)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_contiguous_caches_in_both_layouts() -> None:
    q = torch.randn(2, 8, 64)
    k, v = torch.randn(2, 2, 33, 64), torch.randn(2, 2, 33, 64)
    out, lse = ck.decode_attention(q, k, v)
    plan = ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor.new_gqa(2, 8, 2, 33, 64, torch.float32), "cpu")
    assert torch.equal(out, plan.run(q, k, v)[0])
    nhd = ck.decode_attention(q, k.transpose(1, 2), v.transpose(1, 2), layout="NHD")
    assert torch.equal(nhd[0], out)
    assert torch.equal(nhd[1], lse)


def test_given_outputs_and_a_unit_query_axis() -> None:
    inputs = make_operands(CASE)
    expected = ck.decode_attention(*inputs[:3], page_table=inputs.page_table)
    out, lse = torch.empty(3, 1, 8, 64, dtype=torch.bfloat16), torch.empty(3, 8)
    got = ck.decode_attention(inputs.q[:, None], *inputs[1:3], page_table=inputs.page_table, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert torch.equal(out[:, 0], expected[0])
    assert torch.equal(lse, expected[1])


def test_plans_are_kept() -> None:
    inputs = make_operands(CASE)
    ck.decode_attention(*inputs[:3], page_table=inputs.page_table)
    before = plan_cache.plan_of.cache_info()
    ck.decode_attention(*inputs[:3], page_table=inputs.page_table)
    after = plan_cache.plan_of.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)


def test_forgotten_plans_are_given_back(no_plans: None) -> None:
    inputs = make_operands(CASE)
    ck.decode_attention(*inputs[:3], page_table=inputs.page_table)
    plan = weakref.ref(next(iter(plan_base._plans.values())))
    plan_base.forget_plans()
    gc.collect()
    assert plan() is None
    assert plan_cache.plan_of.cache_info().currsize == 0


def test_alignment_comes_from_the_tensors() -> None:
    storage = torch.zeros(8 * 64 + 64, dtype=torch.float16)
    start = -storage.data_ptr() % 64 // 2
    assert plan_cache.alignment(storage[start : start + 512].view(8, 64)) == 16
    assert plan_cache.alignment(storage[start + 2 : start + 514].view(8, 64)) == 4
    assert plan_cache.alignment(storage[start : start + 8 * 66].view(8, 66)) == 4
    assert plan_cache.alignment(storage[start : start + 33].view(1, 33)) == 16
    assert plan_cache.alignment(storage.view(torch.int8)[2 * start : 2 * start + 8 * 65].view(8, 65)) == 1


def test_misaligned_caches_are_served() -> None:
    """Tensors that no aligned variant takes select a plan of their own alignment."""
    inputs = make_operands(CASE)
    expected = ck.decode_attention(*inputs[:3], page_table=inputs.page_table)
    k = torch.zeros(inputs.k_cache.numel() + 1, dtype=torch.bfloat16)[1:].view(inputs.k_cache.shape).copy_(inputs.k_cache)
    got = ck.decode_attention(inputs.q, k, inputs.v_cache, page_table=inputs.page_table)
    assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize(
    ("changes", "error", "fragment"),
    [
        ({"q": None}, ck.InvalidArgument, "q: got NoneType"),
        ({"k_cache": torch.zeros(3)}, ck.InvalidProblem, "four axes"),
        ({"q": torch.zeros(3)}, ck.InvalidProblem, "q.shape = (3,)"),
        ({"layout": "XYZ"}, ck.InvalidProblem, "layout = 'XYZ'"),
        ({"lse_base": "10"}, ck.InvalidProblem, "lse_base = '10'"),
        ({"seq_lens": None}, ck.InvalidArgument, "seq_lens: is None"),
        ({"seq_lens": 2**31}, ck.InvalidProblem, "seq_lens = 2147483648: must be an int32 tensor [batch] or an int from 0"),
        ({"seq_lens": -1}, ck.InvalidProblem, "seq_lens = -1: must be"),
        ({"page_table": None}, ck.InvalidArgument, "seq_lens: given without a page_table"),
        ({"page_table": 3}, ck.InvalidArgument, "page_table: got int"),
        ({"k_cache": torch.zeros(3, 2, 16, 64, dtype=torch.int64)}, ck.InvalidArgument, "k_cache: has dtype torch.int64"),
        ({"k_cache": torch.zeros(3, 3, 16, 64, dtype=torch.bfloat16)}, ck.InvalidProblem, "multiple of num_kv_heads = 3"),
        ({"k_cache": torch.zeros(3, 2, 16, 64, dtype=torch.float16)}, ck.Unsupported, "kv_dtype = f16: must be q's, bf16"),
        ({"v_cache": torch.zeros(3, 2, 16, 64, dtype=torch.float16)}, ck.Unsupported, "v_dtype = f16: must be q's, bf16"),
        ({"k_cache": torch.zeros(3, 2, 16, 64, dtype=torch.uint8)}, ck.InvalidArgument, "k_cache: has dtype torch.uint8"),
        ({"kv_dtype": "e4m3"}, ck.InvalidProblem, "kv_dtype = 'e4m3': must be a KVDtype"),
        ({"kv_dtype": ck.KVDtype.INT8}, ck.InvalidArgument, "k_cache: has dtype torch.bfloat16, must be torch.int8"),
        ({"k_scale": 0.5}, ck.InvalidArgument, "k_scale: got float"),
        ({"v_scale": torch.ones(5)}, ck.InvalidProblem, "v_scale.shape = (5,)"),
        ({"v_scale": torch.ones(1, dtype=torch.float16)}, ck.InvalidArgument, "v_scale: has dtype torch.float16"),
        ({"softmax_scale": -1.0}, ck.InvalidProblem, "softmax_scale = -1.0"),
    ],
)
def test_bad_arguments(changes: dict, error: type[Exception], fragment: str) -> None:
    inputs = make_operands(CASE)
    table, seq_lens, _ = inputs.page_table.operands
    good = {**inputs._asdict(), "page_table": table, "seq_lens": seq_lens}
    with pytest.raises(error) as caught:
        ck.decode_attention(**{**good, **changes})
    assert fragment in str(caught.value)


@pytest.mark.parametrize("table_format", ["dense", "csr"])
def test_opcheck_paged(table_format: str) -> None:
    inputs = make_operands(replace(CASE, table_format=table_format))
    outputs = (torch.empty_like(inputs.q), torch.empty(3, 8))
    operands = (*inputs[:3], *inputs.page_table.operands, None, torch.ones(2), *outputs, None, "HND", "e", None, None)
    torch.library.opcheck(torch_ops.paged_decode, operands)


def test_opcheck_flash() -> None:
    q, k = torch.randn(2, 8, 64), torch.randn(2, 2, 33, 64)
    operands = (q, k, k.clone(), torch.ones(1), None, torch.empty_like(q), torch.empty(2, 8), None, "e", None)
    torch.library.opcheck(torch_ops.flash_decoding, operands)


def test_compiles_as_one_graph() -> None:
    inputs = make_operands(CASE, dead=1.0)  # lengths grow into slots that were free
    table, seq_lens, _ = inputs.page_table.operands

    def layer(q, k_cache, v_cache, table, seq_lens):
        out, lse = ck.decode_attention(q * 2, k_cache, v_cache, page_table=table, seq_lens=seq_lens, lse_base="2")
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        expected, got = (f(*inputs[:3], table, seq_lens) for f in (layer, compiled))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        seq_lens.add_(1)


def test_contiguous_compiles_as_one_graph() -> None:
    q, k = torch.randn(2, 8, 64), torch.randn(2, 2, 33, 64)
    compiled = torch.compile(ck.decode_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, k)[0], ck.decode_attention(q, k, k)[0])
