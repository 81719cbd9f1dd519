"""Results of plans are detached, whichever variant runs; one-call functions without a backward refuse to be recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from tests.support.harness import BACKENDS, ONE_CALL, device_of

F16, I32 = torch.float16, torch.int32
WHOLE = ck.PageTable.whole()


@dataclass(frozen=True)
class Run:
    """A plan's run: its descriptor, its tensors by name, in order, and its table. outputs: names that it may be given."""

    plan: Any
    descriptor: Any
    shapes: dict[str, tuple[int, ...]]
    table: str | None = None
    outputs: tuple[str, ...] = ("out", "lse")


ROWS, CACHE, LSE = (2, 3, 4, 64), (2, 2, 7, 64), (6, 4)
ATTENTION = ck.PagedAttentionDescriptor(2, 4, 2, 64, None, F16, 3, query_format="uniform", table_format="none")
QKV = {"q": (2, 4, 64), "k": CACHE, "v": CACHE}
RUNS = {
    "decode": Run(ck.FlashDecodingPlan, ck.FlashDecodingDescriptor(2, 4, 2, 7, 64, F16), QKV),
    "attention": Run(
        ck.PagedAttentionPlan, ATTENTION, {"q": ROWS, "k_cache": CACHE, "v_cache": CACHE}, table="page_table"
    ),
    "backward": Run(
        ck.PagedAttentionBackwardPlan,
        ck.PagedAttentionBackwardDescriptor(ATTENTION),
        {"dout": ROWS, "q": ROWS, "k_cache": CACHE, "v_cache": CACHE, "out": ROWS, "lse": LSE},
        table="page_table",
        outputs=("dq", "dk_cache", "dv_cache"),
    ),
    "merge": Run(ck.MergeStatesPlan, ck.MergeStatesDescriptor(3, 2, 4, 64, F16), {"outs": (3, 2, 4, 64), "lses": (3, 2, 4)}),
    "weights": Run(
        ck.AttentionWeightsPlan,
        ck.AttentionWeightsDescriptor(2, 4, 2, 64, None, F16, 7, table_format="none", mean=True),
        {"q": (2, 4, 64), "k_cache": CACHE, "lse": (2, 4)},
        table="page_table",
        outputs=("weights", "mean"),
    ),
}  # fmt: skip


def leaf(shape: tuple[int, ...], name: str, device: str) -> Tensor:
    dtype = torch.float32 if name.startswith("lse") else F16
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_writes_is_detached(name: str, backend: str) -> None:
    """So it is in outputs that are given again and again; the bits are those of a run without gradients."""
    one, device = RUNS[name], device_of(backend)
    plan = one.plan.select(one.descriptor, device, ck.PlanPreference(arch=backend))
    given: dict[str, Any] = {key: leaf(shape, key, device) for key, shape in one.shapes.items()}
    given |= {one.table: WHOLE} if one.table else {}
    given |= {} if name in ("merge", "weights") else {"workspace": plan.new_workspace()}
    made = plan.run(**given)
    outputs = dict(zip(one.outputs, made, strict=False))
    with torch.no_grad():
        want = [tensor.clone() for tensor in plan.run(**given)[: len(outputs)]]
    for _ in range(3):
        again = plan.run(**given, **outputs)
        for output, tensor, wanted in zip(outputs.values(), again, want, strict=False):
            assert tensor is output and not tensor.requires_grad and tensor.grad_fn is None and torch.equal(tensor, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RUNS)
def test_modes_of_the_caller_change_nothing(name: str, backend: str) -> None:
    """Autocast rounds no product of a run, and outputs may be inference tensors, also where there is no key."""
    one, device = RUNS[name], device_of(backend)
    plan = one.plan.select(one.descriptor, device, ck.PlanPreference(arch=backend))
    given: dict[str, Any] = {key: leaf(shape, key, device).detach() for key, shape in one.shapes.items()}
    given |= {one.table: WHOLE} if one.table else {}
    given |= {} if name in ("merge", "weights") else {"workspace": plan.new_workspace()}
    want = [tensor.clone() for tensor in plan.run(**given)[: len(one.outputs)]]
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got = plan.run(**given)
    with torch.inference_mode():
        outputs = {key: torch.empty_like(tensor) for key, tensor in zip(one.outputs, want, strict=True)}
    plan.run(**given, **outputs)
    for tensor, output, wanted in zip(got, outputs.values(), want, strict=False):
        assert torch.equal(tensor, wanted) and torch.equal(output, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_there_is_no_key_nothing_is_recorded(backend: str) -> None:
    """Nothing is launched, and lse is the sinks, which require gradients; the gradients are written to leaves."""
    device, preference = device_of(backend), ck.PlanPreference(arch=backend)
    plan = ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor(2, 4, 2, 0, 64, F16, sinks=True), device, preference)
    q, none, sinks = leaf((2, 4, 64), "q", device), leaf((2, 2, 0, 64), "k", device), torch.ones(4, device=device)
    out, lse = plan.run(q, none, none, sinks=sinks.requires_grad_())
    assert not out.requires_grad and not lse.requires_grad and not out.any() and (lse == 1).all()
    back = ck.PagedAttentionBackwardPlan.select(ck.PagedAttentionBackwardDescriptor(ATTENTION), device, preference)
    rows, written = [leaf(ROWS, "q", device) for _ in range(3)], [leaf(ROWS, "q", device), none.clone(), none.clone()]
    given = dict(zip(("dq", "dk_cache", "dv_cache"), (t.detach().requires_grad_() for t in written), strict=True))
    workspace = back.new_workspace()
    back.run(rows[0], rows[1], none, none, rows[2], leaf(LSE, "lse", device), WHOLE, **given, workspace=workspace)
    assert given["dq"].is_leaf and not given["dq"].detach().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_append_into_leaves_is_not_recorded(backend: str) -> None:
    d, device = ck.KVAppendDescriptor(3, 2, 64, 16, F16), device_of(backend)
    plan = ck.KVAppendPlan.select(d, device, ck.PlanPreference(arch=backend))
    k, v = (leaf((3, 2, 64), "k", device) for _ in range(2))
    caches = [torch.zeros(2, 2, 16, 64, dtype=F16, device=device).requires_grad_() for _ in range(2)]
    plan.run(k, v, *caches, torch.tensor([0, 1, 17], device=device))
    for cache, x in zip(caches, (k, v), strict=True):
        assert cache.is_leaf and torch.equal(cache.detach()[0, :, :2].transpose(0, 1), x.detach()[:2])


def call_decode(**given: Any) -> tuple[Tensor, ...]:
    return ck.decode_attention(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), **given)


def call_append(**given: Any) -> tuple[Tensor, ...]:
    slots = torch.tensor([0, 1, 17], device=given["k"].device)
    ck.append_kv(given.pop("k"), given.pop("v"), given.pop("k_cache"), given.pop("v_cache"), slots, **given)
    return ()


def call_merge(**given: Any) -> tuple[Tensor, ...]:
    return ck.merge_states(given.pop("outs"), given.pop("lses"), **given)


def call_weights(**given: Any) -> tuple[Tensor, ...]:
    return (ck.attention_weights(given.pop("q"), given.pop("k_cache"), given.pop("lse"), **given).weights,)


TOKEN_CACHE = (2, 2, 16, 64)
CALLS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], dict[str, tuple[int, ...]]]] = {
    "decode_attention": (call_decode, {"q": (2, 4, 64), "k_cache": CACHE, "v_cache": CACHE, "alibi_slopes": (4,), "sinks": (4,)}),
    "append_kv": (
        call_append,
        {"k": (3, 2, 64), "v": (3, 2, 64), "k_cache": TOKEN_CACHE, "v_cache": TOKEN_CACHE, "q": (3, 4, 64)}
        | {"cos_sin_cache": (9, 64)},
    ),
    "merge_states": (call_merge, {"outs": (3, 2, 4, 64), "lses": (3, 2, 4), "sinks": (4,)}),
    "attention_weights": (call_weights, {"q": (2, 4, 64), "k_cache": CACHE, "lse": (2, 4), "alibi_slopes": (4,)}),
}
F32_OPERANDS = ("lse", "lses", "sinks", "alibi_slopes", "cos_sin_cache")


@pytest.mark.parametrize("backend", ONE_CALL)
@pytest.mark.parametrize(("name", "asking"), [(name, asking) for name, (_, shapes) in CALLS.items() for asking in shapes])
def test_one_call_without_a_backward_refuses_to_be_recorded(name: str, asking: str, backend: str) -> None:
    """It names the tensor that requires a gradient; where nothing is recorded it is served, detached."""
    call, shapes = CALLS[name]
    device = device_of(backend)
    given: dict[str, Any] = {
        key: torch.ones(shape, dtype=torch.float32 if key in F32_OPERANDS else F16, device=device)
        for key, shape in shapes.items()
    }
    if name == "append_kv":
        given["positions"] = torch.arange(3, device=device)
    want = [tensor.clone() for tensor in call(**given)]
    given[asking].requires_grad_()
    rule = f"{asking}.requires_grad = True: {name} has no backward, paged_attention has one; torch.no_grad()"
    with pytest.raises(ck.Unsupported, match=rule) as caught:
        call(**given)
    assert len(caught.value.reasons) == 1
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(call(**given), want, strict=True))


@pytest.mark.parametrize("backend", ONE_CALL)
@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_a_scale_that_requires_a_gradient_is_named(scale: str, backend: str) -> None:
    device = device_of(backend)
    q, cache = torch.ones(2, 4, 64, dtype=F16, device=device), torch.ones(CACHE, dtype=torch.int8, device=device)
    scales = {name: torch.ones(1, device=device).requires_grad_(name == scale) for name in ("k_scale", "v_scale")}
    with pytest.raises(ck.Unsupported, match=f"{scale}.requires_grad = True: decode_attention has no backward"):
        ck.decode_attention(q, cache, cache, **scales)


@pytest.mark.parametrize("plan", [ck.AttentionWeightsPlan, ck.KVAppendPlan])
def test_a_name_that_run_does_not_know_is_named(plan: Any) -> None:
    own = {
        ck.AttentionWeightsPlan: (RUNS["weights"].descriptor, 3),
        ck.KVAppendPlan: (ck.KVAppendDescriptor(3, 2, 64, 16, F16), 5),
    }
    descriptor, count = own[plan]
    operands = [torch.zeros(1)] * count + ([WHOLE] if plan is ck.AttentionWeightsPlan else [])
    with pytest.raises(TypeError, match=r"can_implement\(\) got an unexpected keyword argument 'kscale'"):
        plan.select(descriptor, "cpu").can_implement(*operands, kscale=None)
