"""Arguments of the calls that are no choice, no table and no plain tensor: a typed error that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem

BF16, I32 = torch.bfloat16, torch.int32
Args = dict[str, Any]
Call = Callable[..., object]


def given(call: Call) -> Args:
    """Good arguments of a call over two rows of 4 query heads, 2 KV heads and pages of 16 tokens."""
    q, k, v = torch.randn(2, 4, 64, dtype=BF16), *torch.randn(2, 6, 2, 16, 64, dtype=BF16)
    table = ck.PageTable.dense(torch.tensor([[0, 1], [2, 3]], dtype=I32), torch.tensor([20, 5], dtype=I32))
    cache: Args = {"k_cache": k, "page_table": table}
    if call is ck.append_kv:
        new = torch.randn(2, 2, 64, dtype=BF16)
        return {"k": new, "v": new.clone(), "k_cache": k, "v_cache": v, "slots": table}
    if call is ck.merge_states:
        return {"outs": torch.randn(2, 2, 4, 64), "lses": torch.randn(2, 2, 4)}
    if call is ck.attention_weights:
        return {"q": q, **cache, "lse": torch.zeros(2, 4)}
    rows = q[:, None] if call is ck.paged_attention else q
    return {"q": rows, **cache, "v_cache": v, "out": torch.zeros_like(rows), "lse": torch.zeros(2, 4)}


UNHASHABLE = {"list": [1], "dict": {}, "array": np.zeros(3), "array of one": np.zeros(1)}
CHOICES = [
    *[(ck.decode_attention, n) for n in ("softmax_scale", "lse_base", "max_seq_len", "layout", "window_left", "softcap")],
    *[(ck.paged_attention, n) for n in ("softmax_scale", "lse_base", "max_seq_len", "layout", "causal", "max_q_len", "softcap")],
    *[(ck.attention_weights, n) for n in ("softmax_scale", "lse_base", "max_seq_len", "layout", "window_left", "softcap")],
    *[(ck.attention_weights, n) for n in ("weights_dtype", "mean", "page_mass")],
    (ck.merge_states, "lse_base"),
    (ck.append_kv, "layout"),
    (ck.append_kv, "pairing"),
]


@pytest.mark.parametrize("value", UNHASHABLE.values(), ids=UNHASHABLE)
@pytest.mark.parametrize(("call", "name"), CHOICES, ids=lambda one: getattr(one, "__name__", one))
def test_what_has_no_hash_or_compares_by_element_is_no_choice(call: Call, name: str, value: object) -> None:
    with pytest.raises(InvalidProblem) as caught:
        call(**{**given(call), name: value})
    assert caught.value.parameter == name


def test_choices_of_a_contiguous_cache_and_of_gradients() -> None:
    q, k = torch.randn(2, 4, 64), torch.randn(2, 2, 9, 64)
    for name in ("softmax_scale", "lse_base", "layout"):
        with pytest.raises(InvalidProblem, match=f"^{name} = "):
            ck.decode_attention(q, k, k.clone(), **{name: np.zeros(3)})
        with pytest.raises(InvalidProblem, match=f"^{name} = "):
            ck.paged_attention(q[:, None].requires_grad_(), k, k.clone(), **{name: np.zeros(3)})


T, S = torch.tensor([[0, 1], [2, 3]], dtype=I32), torch.tensor([20, 5], dtype=I32)
MADE_BY_HAND = {
    "two operands": (ck.PageTable("dense", (T, S)), "has operands of another format, must be made by PageTable.dense"),
    "four operands": (ck.PageTable("dense", (T, S, None, None)), "must be made by PageTable.dense"),
    "no operands": (ck.PageTable("dense", None), "must be made by PageTable.dense"),
    "an operand too many": (ck.PageTable("dense", (T, S, S)), "must be made by PageTable.dense"),
    "lengths of two": (ck.PageTable("lengths", (S, S, None)), "must be made by PageTable.lengths"),
    "no last_page_len": (ck.PageTable("csr", (T, S, None)), "page_table.last_page_len: got NoneType, must be a tensor"),
    "no table": (ck.PageTable("dense", (None, S, None)), "page_table.table: got NoneType, must be a tensor"),
    "unknown": (ck.PageTable("coo", (T, S, None)), "has format 'coo', must be one of dense, csr, lengths, packed, none"),
    "a list": (ck.PageTable([1], (T, S, None)), "has format [1], must be one of"),
    "an array": (ck.PageTable(np.zeros(2), (T, S, None)), "has format array([0., 0.]), must be one of"),
}
OVER_TABLES = (ck.decode_attention, ck.paged_attention, ck.attention_weights, ck.append_kv)


@pytest.mark.parametrize(("table", "rule"), MADE_BY_HAND.values(), ids=MADE_BY_HAND)
@pytest.mark.parametrize("call", OVER_TABLES)
def test_a_page_table_that_no_method_made(call: Call, table: ck.PageTable, rule: str) -> None:
    name = "slots" if call is ck.append_kv else "page_table"
    with pytest.raises(InvalidArgument) as caught:
        call(**{**given(call), name: table})
    assert rule in str(caught.value)
    assert str(caught.value).startswith((name, "page_table."))


@pytest.mark.parametrize(("table", "rule"), MADE_BY_HAND.values(), ids=MADE_BY_HAND)
def test_a_page_table_that_no_method_made_in_a_plan_and_beside_gradients(table: ck.PageTable, rule: str) -> None:
    plan = ck.PagedDecodePlan.select(ck.PagedDecodeDescriptor(2, 4, 2, 64, 16, BF16), "cpu")
    good = given(ck.decode_attention)
    for attempt in (plan.run, plan.can_implement):
        with pytest.raises(InvalidArgument) as caught:
            attempt(**{**good, "page_table": table})
        assert rule in str(caught.value)
    rows = {"q": good["q"][:, None].requires_grad_(), "page_table": table}
    with pytest.raises(InvalidArgument) as caught:
        ck.paged_attention(**{**good, **rows, "out": None, "lse": None})
    assert rule in str(caught.value)


UNPLAIN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (torch.Tensor.to_sparse, "torch.sparse_coo"),
    "sparse rows": (lambda t: t.flatten(1).to_sparse_csr(), "torch.sparse_csr"),
    "mkldnn": (lambda t: t.float().to_mkldnn(), "torch._mkldnn"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "is nested"),
    "jagged": (lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged), "is nested"),
    "negative": (lambda t: torch._neg_view(t.clone()), "is_neg"),
}
OPERANDS = ("q", "k_cache", "v_cache", "out", "lse", "table", "seq_lens")
OF_TWO_AXES = ("sparse rows", "jagged")  # and more: there are none of one axis, as seq_lens has


def with_operand(args: Args, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Args:
    """The arguments with one tensor changed, which may be one of the page table's."""
    if name in args:
        return {**args, name: change(args[name])}
    operands = zip(("table", "seq_lens", None), args["page_table"].operands, strict=True)
    return {**args, "page_table": ck.PageTable("dense", tuple(change(t) if n == name else t for n, t in operands))}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in OPERANDS for kind in UNPLAIN if name != "seq_lens" or kind not in OF_TWO_AXES],
)
def test_tensors_that_lie_in_no_plain_memory(name: str, kind: str) -> None:
    change, said = UNPLAIN[kind]
    plan = ck.PagedDecodePlan.select(ck.PagedDecodeDescriptor(2, 4, 2, 64, 16, BF16), "cpu")
    good = given(ck.decode_attention)
    broken = with_operand(good, name, change)
    for attempt in (plan.run, plan.can_implement, ck.decode_attention):
        with pytest.raises(InvalidArgument) as caught:
            attempt(**broken)
        assert caught.value.arg == (name if name in good else f"page_table.{name}")
        assert said in str(caught.value)
    assert not good["out"].any() and not good["lse"].any()


@pytest.mark.parametrize("kind", ["sparse", "nested", "negative"])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        *[(ck.paged_attention, name) for name in ("q", "k_cache", "out")],
        *[(ck.attention_weights, name) for name in ("q", "k_cache", "lse")],
        *[(ck.append_kv, name) for name in ("k", "v", "k_cache", "v_cache")],
        *[(ck.merge_states, name) for name in ("outs", "lses")],
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_no_call_takes_them(call: Call, name: str, kind: str) -> None:
    args = given(call)
    with pytest.raises(InvalidArgument) as caught:
        call(**{**args, name: UNPLAIN[kind][0](args[name])})
    assert caught.value.arg == name


@pytest.mark.parametrize("name", ["q", "k_cache", "seq_lens"])
def test_a_transform_of_functions_has_no_memory(name: str) -> None:
    good = given(ck.decode_attention)
    plan = ck.PagedDecodePlan.select(ck.PagedDecodeDescriptor(2, 4, 2, 64, 16, BF16), "cpu")
    whole = good[name] if name in good else good["page_table"].operands[1]

    def each(part: torch.Tensor) -> torch.Tensor:
        for attempt in (plan.run, ck.decode_attention):
            with pytest.raises(InvalidArgument, match=f"{name}: has no address"):
                attempt(**with_operand(good, name, lambda _: part))
        return part

    torch.vmap(each)(torch.stack([whole, whole]))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_requests_without_rows_and_rows_without_requests(requires_grad: bool) -> None:
    good = {**given(ck.paged_attention), "out": None, "lse": None}
    rows = torch.zeros(2, 0, 4, 64, dtype=BF16, requires_grad=requires_grad)
    with pytest.raises(InvalidProblem, match=r"^q\.shape = \(2, 0, 4, 64\): must be \[batch_size, .* with a q_len from 1$"):
        ck.paged_attention(**{**good, "q": rows})
    rows = torch.zeros(8, 4, 64, dtype=BF16, requires_grad=requires_grad)
    with pytest.raises(InvalidProblem, match=r"^qo_indptr\.shape = \(0,\): must be \[batch_size \+ 1\]"):
        ck.paged_attention(**{**good, "q": rows, "qo_indptr": torch.zeros(0, dtype=I32)})
