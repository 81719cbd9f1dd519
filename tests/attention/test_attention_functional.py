"""paged_attention(): the numbers of the plan in one call, opcheck, torch.compile(fullgraph=True), FakeTensors, bad arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import cute_kernels as ck
from cute_kernels.api import plan_cache, torch_ops
from tests.support.attention_cases import CASES, CONTIGUOUS, AttentionInputs, Case, make_attention
from tests.support.attention_harness import run, select
from tests.support.harness import assert_bitwise

NAMED = {c.name: c for c in CASES}
MASKS = ("causal", "window_left", "window_right", "softcap")


def rules_of(case: Case) -> dict[str, Any]:
    """What a call says that the tensors do not."""
    cache = case.cache
    rules = {"softmax_scale": cache.softmax_scale, "layout": cache.order, "lse_base": cache.lse_base}
    return {**rules, **{name: getattr(case, name) for name in MASKS}, "max_q_len": case.max_q_len}


def call(inputs: AttentionInputs, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales = dict(inputs.scales)
    if inputs.case.cache.order == "NHD" and inputs.case.table in CONTIGUOUS:  # then a call's scales have the cache's axes
        scales = {n: s.transpose(1, 2) if s is not None and s.dim() == 3 else s for n, s in scales.items()}
    given = {"page_table": inputs.table, **inputs.extras, **scales, **rules_of(inputs.case), **changes}
    return ck.paged_attention(inputs.q, inputs.k, inputs.v, **given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_plan(case: Case) -> None:
    """Into outputs that are given, so that padding can be compared; and into new ones."""
    inputs = make_attention(case)
    expected = run(select(case, "cpu"), inputs)
    total = sum(case.q_lens)
    out, lse = torch.full_like(inputs.q, torch.nan), torch.full_like(expected[1], torch.nan)
    assert call(inputs, out=out, lse=lse)[0] is out
    assert_bitwise((out.reshape(expected[0].shape), lse), expected)
    new = call(inputs)
    assert new[0].shape == inputs.q.shape
    assert_bitwise((new[0].reshape(expected[0].shape)[:total], new[1][:total]), (expected[0][:total], expected[1][:total]))


@pytest.mark.parametrize("name", ["causal", "uniform_fewer", "tree", "uniform_tree", "prefill", "lengths", "packed", "csr"])
def test_max_q_len_has_a_default(name: str) -> None:
    """Every number of rows that a q may hold for one request is served; a mask's width says its own."""
    inputs = make_attention(NAMED[name])
    total = sum(NAMED[name].q_lens)
    got, expected = call(inputs, max_q_len=None), call(inputs)
    assert_bitwise((got[0].flatten(0, -3)[:total], got[1][:total]), (expected[0].flatten(0, -3)[:total], expected[1][:total]))


def test_the_default_seldom_changes_plans() -> None:
    def hints(rows: Any, mask: torch.Tensor | None = None) -> list[int]:
        return [plan_cache.rows_hint(torch.zeros(1, n, 1, 1), mask, ragged=False) for n in rows]

    assert hints(range(1, 17)) == list(range(1, 17))
    assert hints((17, 32, 33, 100)) == [32, 32, 64, 128]
    assert hints((33, 40), torch.zeros(1, 2)) == [33, 40]
    assert plan_cache.rows_hint(torch.zeros(20, 1, 1), torch.zeros(20, 2), ragged=True) == 64
    assert plan_cache.rows_hint(torch.zeros(0, 1, 1), None, ragged=True) == 1


def test_tables_in_other_words() -> None:
    """A table and lengths as tensors, a length as an int, contiguous rows with lengths and without."""
    inputs = make_attention(NAMED["uniform"])
    table, seq_lens, _ = inputs.table.operands
    assert_bitwise(call(inputs, page_table=table, seq_lens=seq_lens), call(inputs))
    same = torch.full_like(seq_lens, 1)
    expected = call(inputs, page_table=ck.PageTable.dense(table[-1:].repeat(7, 1), same))
    assert_bitwise(call(inputs, page_table=table[-1:].repeat(7, 1), seq_lens=1), expected)
    inputs = make_attention(NAMED["lengths"])
    total = sum(inputs.case.q_lens)
    got, expected = call(inputs, page_table=None, seq_lens=inputs.table.operands[0]), call(inputs)
    assert_bitwise((got[0][:total], got[1][:total]), (expected[0][:total], expected[1][:total]))
    inputs = make_attention(NAMED["whole"])
    total = sum(inputs.case.q_lens)
    got, expected = call(inputs, page_table=None), call(inputs)
    assert_bitwise((got[0][:total], got[1][:total]), (expected[0][:total], expected[1][:total]))


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("causal", {"qo_indptr": None}, ck.InvalidProblem, "q.shape = (29, 8, 64): must be [batch_size, q_len"),
    ("causal", {"qo_indptr": [0]}, ck.InvalidArgument, "qo_indptr: got list, must be a tensor or None"),
    ("causal", {"qo_indptr": torch.zeros(2, 4).int()}, ck.InvalidProblem, "qo_indptr.shape = (2, 4)"),
    ("causal", {"qo_indptr": torch.zeros(8)}, ck.InvalidArgument, "qo_indptr: has dtype torch.float32, must be torch.int32"),
    ("causal", {"page_table": ck.PageTable.whole()}, ck.InvalidProblem, "k_cache.shape"),
    ("causal", {"page_table": [1]}, ck.InvalidArgument, "page_table: got list"),
    ("causal", {"seq_lens": 3}, ck.InvalidArgument, "seq_lens: given beside a PageTable"),
    ("causal", {"max_q_len": 0}, ck.InvalidProblem, "max_q_len = 0: must be an int from 1"),
    ("causal", {"causal": True}, ck.InvalidProblem, 'causal = True: must be "bottom_right", "top_left" or None'),
    ("causal", {"causal": []}, ck.InvalidProblem, "causal = []"),
    ("causal", {"window_left": -1}, ck.InvalidProblem, "window_left = -1: must be an int from 0"),
    ("causal", {"window_left": [1]}, ck.InvalidProblem, "window_left = [1]"),
    ("causal", {"window_right": 1}, ck.InvalidProblem, 'window_right = 1: must be None beside causal = "bottom_right"'),
    ("causal", {"softcap": 0.0}, ck.InvalidProblem, "softcap = 0.0"),
    ("causal", {"sinks": 1.0}, ck.InvalidArgument, "sinks: got float, must be a tensor"),
    ("causal", {"alibi_slopes": torch.ones(9)}, ck.InvalidProblem, "alibi_slopes.shape = (9,)"),
    ("causal", {"tree_mask": True}, ck.InvalidArgument, "tree_mask: got bool"),
    ("causal", {"tree_mask": torch.zeros(29).int()}, ck.InvalidProblem, "tree_mask.shape = (29,)"),
    ("causal", {"tree_mask": torch.zeros(29, 2).int()}, ck.InvalidProblem, "tree_mask.shape = (29, 2)"),
    ("causal", {"layout": "HDN"}, ck.InvalidProblem, "layout = 'HDN'"),
    ("causal", {"kv_dtype": "int8"}, ck.InvalidProblem, "kv_dtype = 'int8'"),
    ("uniform", {"qo_indptr": torch.zeros(8).int()}, ck.InvalidProblem, "q.shape = (7, 4, 8, 64): must be [total_q"),
    ("uniform", {"max_q_len": 3}, ck.InvalidProblem, "q_len from 1 to max_q_len = 3"),
    ("lengths", {"page_table": None, "seq_lens": 3}, ck.InvalidArgument, "seq_lens: got int"),
    ("packed", {"page_table": ck.PageTable.lengths(torch.zeros(7).int())}, ck.InvalidProblem, "must have four axes"),
    ("lengths", {"page_table": ck.PageTable.packed(torch.zeros(8).int())}, ck.InvalidProblem, "must have three axes"),
]


@pytest.mark.parametrize(("name", "changes", "error", "fragment"), BAD)
def test_bad_arguments(name: str, changes: dict[str, Any], error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as caught:
        call(make_attention(NAMED[name]), **changes)
    assert isinstance(caught.value, ck.CuteKernelsError)
    assert fragment in str(caught.value)


def test_tables_of_contiguous_rows_are_refused_where_only_pages_are_served() -> None:
    inputs = make_attention(NAMED["uniform"])
    lengths = ck.PageTable.lengths(torch.zeros(7).int())
    with pytest.raises(ck.InvalidArgument, match="page_table: is a lengths table, must be one of pages, dense or csr"):
        ck.decode_attention(inputs.q[:, 0], inputs.k, inputs.v, page_table=lengths)
    k = torch.zeros(7, 2, 64).bfloat16()
    with pytest.raises(ck.InvalidArgument, match="slots: is a lengths table, must be one of pages, dense or csr"):
        ck.append_kv(k, k, inputs.k, inputs.v, lengths)


def op_arguments(inputs: AttentionInputs) -> tuple[Any, ...]:
    case = inputs.case
    extras = [inputs.extras.get(name) for name in ("qo_indptr", "tree_mask", "alibi_slopes", "sinks")]
    rows = inputs.q.numel() // (case.cache.num_heads * case.cache.head_dim)
    outputs = (torch.zeros_like(inputs.q), torch.zeros(rows, case.cache.num_heads))
    tensors = (inputs.q, inputs.k, inputs.v, *inputs.table.operands, *extras, *inputs.scales.values(), *outputs)
    masks = (case.max_q_len, case.causal, case.window_left, case.window_right, case.softcap)
    return *tensors, inputs.table.format, *masks, None, case.cache.order, case.cache.lse_base, None, None


@pytest.mark.parametrize("name", ["everything", "tree_2_words", "uniform_strided", "csr", "lengths", "packed", "whole"])
def test_opcheck(name: str) -> None:
    torch.library.opcheck(torch_ops.paged_attention, op_arguments(make_attention(NAMED[name], dead=0.5)))


@pytest.mark.parametrize("name", ["paged", "flash"])
def test_opcheck_of_decode_with_modifiers(name: str) -> None:
    q, k, given = torch.randn(2, 8, 64), torch.randn(2, 2, 16, 64), (torch.ones(8), torch.ones(8), 3, 2.0)
    outputs = (torch.zeros(2, 8, 64), torch.zeros(2, 8))
    if name == "flash":
        torch.library.opcheck(torch_ops.flash_decoding, (q, k, k.clone(), None, None, *outputs, None, "e", None, *given))
        return
    table = (torch.zeros(2, 1).int(), torch.tensor([3, 16]).int(), None)
    operands = (q, k, k.clone(), *table, None, None, *outputs, None, "HND", "e", None, None, *given)
    torch.library.opcheck(torch_ops.paged_decode, operands)


@pytest.mark.parametrize("name", ["everything", "tree", "uniform_strided", "lengths", "packed"])
def test_compiles_as_one_graph(name: str) -> None:
    """With lengths that change between calls; padding of new outputs is not compared."""
    case = NAMED[name]
    inputs = make_attention(case, dead=0.5)
    operands, format_ = [t for t in inputs.table.operands if t is not None], inputs.table.format
    total = sum(case.q_lens)

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: list[torch.Tensor], extras: dict[str, torch.Tensor]
    ) -> Any:
        table = {"dense": ck.PageTable.dense, "lengths": ck.PageTable.lengths, "packed": ck.PageTable.packed}[format_](*tables)
        out, lse = ck.paged_attention(q * 2, k, v, page_table=table, **extras, **rules_of(case))
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        given = (inputs.q, inputs.k, inputs.v, operands, inputs.extras)
        (got, got_lse), (expected, expected_lse) = compiled(*given), layer(*given)
        assert torch.equal(got.flatten(0, -3)[:total], expected.flatten(0, -3)[:total])
        assert torch.equal(got_lse[:total], expected_lse[:total])
        operands[-1].sub_(operands[-1].clamp(0, 1))


def test_decode_with_modifiers_compiles_as_one_graph() -> None:
    inputs = make_attention(NAMED["one_row_everything"], dead=0.5)
    table, seq_lens, _ = inputs.table.operands

    def layer(q: torch.Tensor, slopes: torch.Tensor, sinks: torch.Tensor) -> Any:
        given = {"alibi_slopes": slopes, "sinks": sinks, "window_left": 40, "softcap": 3.0}
        return ck.decode_attention(q, inputs.k, inputs.v, page_table=table, seq_lens=seq_lens, **given)

    given = (inputs.q[:, 0], inputs.extras["alibi_slopes"], inputs.extras["sinks"])
    assert_bitwise(torch.compile(layer, fullgraph=True, backend="aot_eager")(*given), layer(*given))
    assert_bitwise(layer(*given), run(select(inputs.case, "cpu"), inputs))


def test_fakes_give_fakes_and_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*operands: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(plan_cache, "run_attention", reached)
    for name in ("causal", "uniform"):
        inputs, mode = make_attention(NAMED[name]), FakeTensorMode()
        fake: Callable[[torch.Tensor], FakeTensor] = mode.from_tensor
        table = ck.PageTable.dense(*(fake(t) for t in inputs.table.operands[:2]))
        extras = {n: fake(t) for n, t in inputs.extras.items()}
        out, lse = ck.paged_attention(fake(inputs.q), fake(inputs.k), fake(inputs.v), page_table=table, **extras)
        assert isinstance(out, FakeTensor) and out.shape == inputs.q.shape and out.dtype == inputs.q.dtype
        assert isinstance(lse, FakeTensor) and tuple(lse.shape) == (inputs.q.numel() // 512, 8) and lse.dtype == torch.float32
    with pytest.raises(ck.InvalidArgument, match="FakeTensor"):
        select(NAMED["uniform"], "cpu").run(fake(inputs.q), inputs.k, inputs.v, inputs.table)
