"""PagedAttentionBackwardPlan on the host: descriptors, the choice and its reasons, typed errors before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported
from cute_kernels.backward.variants import explain, kernel_spec
from cute_kernels.config.backward import backward_supports
from cute_kernels.planning.variants import PRETEND
from tests.support.backward_cases import CASES, make_backward
from tests.support.backward_harness import assert_filled, bits, run, select
from tests.support.harness import BACKENDS, device_of

BF16, F32 = torch.bfloat16, torch.float32
A = ck.PagedAttentionDescriptor(3, 8, 2, 64, 16, BF16, 8, num_pages=12, max_pages=4)
D = ck.PagedAttentionBackwardDescriptor(A)
NAMED = {one.name: one for one in CASES}


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments of `run`, the gradients prefilled with 7."""
    lengths = torch.tensor([0, 33, 64], dtype=torch.int32)
    rows, cache = (9, 8, 64), (12, 2, 16, 64)
    made = {
        **{name: torch.randn(rows).to(BF16) for name in ("dout", "q", "out")},
        **{name: torch.randn(cache).to(BF16) for name in ("k_cache", "v_cache")},
        "lse": torch.zeros(9, 8),
        "page_table": ck.PageTable.dense(torch.arange(12, dtype=torch.int32).view(3, 4), lengths),
        "qo_indptr": torch.tensor([0, 3, 4, 9], dtype=torch.int32),
        "dq": torch.full(rows, 7.0, dtype=BF16),
        **{name: torch.full(cache, 7.0, dtype=BF16) for name in ("dk_cache", "dv_cache")},
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"attention": None}, InvalidProblem, "attention"),
        ({"shared_pages": 1}, InvalidProblem, "shared_pages = 1"),
        ({"unread": "ones"}, InvalidProblem, "unread = 'ones'"),
        ({"max_total_q": 0}, InvalidProblem, "max_total_q = 0"),
        ({"attention": replace(A, kv_dtype=ck.KVDtype.E4M3)}, Unsupported, "kv_dtype = e4m3: .* whose gradient is zero"),
        ({"attention": replace(A, v_dtype=ck.KVDtype.INT8)}, Unsupported, "v_dtype = int8"),
        ({"attention": replace(A, kv_dtype=ck.KVDtype.F16)}, Unsupported, "kv_dtype = f16: must be q's dtype, bf16"),
        ({"attention": replace(A, k_scale=ck.KVScale.HEAD)}, Unsupported, "k_scale"),
        ({"attention": replace(A, tree_mask=True)}, Unsupported, "tree_mask = True"),
    ],
    ids=str,
)
def test_a_bad_descriptor_names_the_parameter_and_its_value(changes: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        replace(D, **changes)
    assert isinstance(caught.value, ck.CuteKernelsError)


def test_contiguous_caches_have_no_shared_pages() -> None:
    contiguous = replace(A, page_size=None, num_pages=None, max_pages=None, table_format="lengths")
    assert ck.PagedAttentionBackwardDescriptor(contiguous).shared_pages is False and D.shared_pages is True
    with pytest.raises(InvalidProblem, match="shared_pages = True: must be False beside table_format"):
        ck.PagedAttentionBackwardDescriptor(contiguous, shared_pages=True)


def test_descriptors_are_frozen_keys_of_one_plan() -> None:
    assert replace(D, shared_pages=None) == D and hash(replace(D)) == hash(D) != hash(replace(D, unread="untouched"))
    plan = ck.PagedAttentionBackwardPlan.select(D, "cpu")
    assert ck.PagedAttentionBackwardPlan.select(replace(D), "cpu") is plan
    assert plan.sku.operation == "paged_attention_backward" and plan.precision_guarantee.deterministic
    assert plan.workspace_size() == 0 and plan.workspace_regions() == ()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("arch", "target"), [("sm90", "sm_90a"), ("sm80", "sm_80"), ("sm80", "sm_90a")])
def test_every_head_dim_fits(head_dim: int, arch: Any, target: Any) -> None:
    for dtype in (BF16, F32):
        spec = kernel_spec(replace(D, attention=replace(A, head_dim=head_dim, q_dtype=dtype, kv_dtype=None)), arch, target)
        assert backward_supports(spec) == []


def test_the_choice_and_its_reasons() -> None:
    assert explain(D, PRETEND["h200"]).chosen.variant == "sm90_backward"
    assert explain(D, PRETEND["a100"]).chosen.variant == "sm80_backward"
    assert explain(D, PRETEND["cpu"]).chosen.variant == "cpu_reference"
    unsized = replace(D, attention=replace(A, num_pages=None))
    with pytest.raises(Unsupported, match="num_pages = None: must be given beside shared_pages"):
        _ = explain(unsized, PRETEND["h200"]).chosen
    assert explain(replace(unsized, shared_pages=False), PRETEND["h200"]).chosen.variant == "sm90_backward"
    in_f32 = replace(D, attention=replace(A, kv_dtype=None, q_dtype=F32, head_dim=60))
    assert explain(in_f32, PRETEND["h200"]).chosen.spec.mma == "warp"
    for dtype, head_dim, least in ((BF16, 60, 8), (F32, 58, 4)):
        with pytest.raises(Unsupported, match=f"head_dim={head_dim} is not a multiple of {least}"):
            _ = explain(replace(D, attention=replace(A, kv_dtype=None, q_dtype=dtype, head_dim=head_dim)), PRETEND["h200"]).chosen
    assert "backward of attention" in str(explain(D, PRETEND["h200"]))


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        *[(name, None, InvalidArgument, f"{name}: got NoneType, must be a tensor") for name in ("dout", "q", "out", "lse")],
        ("dout", torch.zeros(9, 8, 64), InvalidArgument, "dout: has dtype torch.float32"),
        ("dout", torch.zeros(8, 8, 64, dtype=BF16), InvalidProblem, "dout.shape"),
        ("out", torch.zeros(9, 8, 32, dtype=BF16), InvalidProblem, "out.shape"),
        ("dout", torch.zeros(1, 1, 1, dtype=BF16).expand(9, 8, 64), Unsupported, "dout.stride"),
        ("dout", torch.zeros(9, 8, 68, dtype=BF16)[..., 2:66], MisalignedOperand, "dout"),
        ("lse", torch.zeros(9, 4), InvalidProblem, "lse.shape"),
        ("lse", torch.zeros(9, 8, dtype=BF16), InvalidArgument, "lse: has dtype"),
        ("dq", torch.zeros(9, 8, 64), InvalidArgument, "dq: has dtype"),
        ("dk_cache", torch.zeros(11, 2, 16, 64, dtype=BF16), InvalidProblem, "dk_cache.shape"),
        ("dv_cache", torch.zeros(12, 2, 16, 64), InvalidArgument, "dv_cache: has dtype"),
        ("dsinks", torch.zeros(8), InvalidArgument, "dsinks: got Tensor, must be None"),
        ("sinks", torch.zeros(8), InvalidArgument, "sinks: got Tensor, must be None"),
        ("qo_indptr", None, InvalidArgument, "qo_indptr: got NoneType"),
        ("k_cache", torch.zeros(12, 2, 16, 64, dtype=torch.int8), InvalidArgument, "k_cache: has dtype torch.int8"),
        ("q", torch.zeros(64, 8, 64, dtype=BF16), InvalidProblem, "at most max_total_q = 24"),
    ],
    ids=str,
)
def test_a_bad_tensor_is_refused_before_anything_is_written(name: str, value: object, error: type[Exception], match: str) -> None:
    plan, given = ck.PagedAttentionBackwardPlan.select(D, "cpu"), arguments(**{name: value})
    for call in (plan.run, plan.can_implement):
        with pytest.raises(error, match=match):
            call(**given)
    for gradient in ("dq", "dk_cache", "dv_cache"):
        assert name == gradient or (given[gradient] == 7).all()


def test_a_name_that_run_does_not_know_is_named() -> None:
    with pytest.raises(TypeError, match=r"can_implement\(\) got an unexpected keyword argument 'dk'"):
        ck.PagedAttentionBackwardPlan.select(D, "cpu").can_implement(**arguments(), dk=None)


@pytest.mark.parametrize(("first", "second"), [("dq", "q"), ("dk_cache", "k_cache"), ("dk_cache", "dv_cache"), ("dq", "dout")])
def test_gradients_have_memory_of_their_own(first: str, second: str) -> None:
    given = arguments()
    with pytest.raises(InvalidArgument, match=f"{first}: bytes"):
        ck.PagedAttentionBackwardPlan.select(D, "cpu").run(**{**given, first: given[second]})


def test_gradients_that_are_not_given_are_new() -> None:
    """Also where no row is written: padding of dq, and tokens that nobody reads."""
    plan, given = ck.PagedAttentionBackwardPlan.select(D, "cpu"), arguments()
    given["lse"] += 5.0
    expected = plan.run(**given)
    for name in ("dq", "dk_cache", "dv_cache"):
        given.pop(name)
    made = plan.run(**given)
    for ours, theirs in zip(made[:3], expected[:3], strict=True):
        assert torch.equal(ours, theirs)
    assert made.dsinks is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse", [-float("inf"), -300.0, 0.0, 300.0, float("inf")])
def test_gradients_are_finite_with_the_lse_of_another_run(lse: float, backend: str) -> None:
    """A weight is at most 2, and 0 with an lse of -inf, as of a row without keys."""
    inputs, plan = make_backward(NAMED["causal"], device_of(backend)), select(NAMED["causal"], backend)
    inputs.lse.fill_(lse)
    inputs.out[: sum(inputs.case.attention.q_lens)] *= 3
    result = run(plan, inputs, fill=0.0)
    assert all(t.isfinite().all() for t in result if t is not None)
    assert lse != -float("inf") or not any(t.any() for t in result if t is not None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_is_held_to_2(backend: str) -> None:
    """The lse is far below the scores, so each key has twice the sum of dout as its dV."""
    device, dtype = device_of(backend), F32 if backend == "cpu" else BF16
    own = ck.PagedAttentionDescriptor(
        2, 4, 2, 64, None, dtype, 5, query_format="uniform", table_format="none", causal=None, sinks=True
    )
    d = ck.PagedAttentionBackwardDescriptor(own)
    plan = ck.PagedAttentionBackwardPlan.select(d, device, ck.PlanPreference(arch=backend))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 5, 4, 64, generator=generator).to(device, dtype) for _ in range(3)]
    caches = [torch.randn(2, 2, 7, 64, generator=generator).to(device, dtype) for _ in range(2)]
    lse, whole, sinks = torch.full((10, 4), -300.0, device=device), ck.PageTable.whole(), torch.zeros(4, device=device)
    result = plan.run(rows[0], rows[1], *caches, rows[2], lse, whole, sinks=sinks, workspace=plan.new_workspace())
    want = 2 * rows[0].double().unflatten(2, (2, 2)).sum((1, 3))[:, :, None].expand(2, 2, 7, 64)
    step = torch.finfo(dtype).eps * want.abs().amax(-1, keepdim=True)
    assert ((result.dv_cache.double() - want).abs() <= 8 * step).all()
    delta = (rows[0].double() * rows[2].double()).sum(-1)
    want, terms = -2 * delta.sum((0, 1)), (rows[0].double() * rows[2].double()).abs().sum((0, 1, 3))
    assert ((result.dsinks.double() - want).abs() <= 2**-20 * terms).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_metadata_is_masked_and_reported(backend: str) -> None:
    """A page outside the pool, a length past the table and a qo_indptr that falls: what is left is as if they were not there."""
    one = NAMED["causal"]
    inputs, plan = make_backward(one, device_of(backend)), select(one, backend)
    clean = run(plan, inputs, fill=0.0)
    assert plan.status() is None
    table = inputs.attention.table.operands[0]
    table[5, 1] = 2**31 - 1
    broken = run(plan, inputs, fill=0.0)
    assert plan.status() == ck.Fault(5, "page", 2**31 - 1)
    plan.clear_status()
    begins = inputs.case.attention.begins
    others = [i for b, first in enumerate(begins) if b != 5 for i in range(first, first + inputs.case.attention.q_lens[b])]
    assert torch.equal(broken.dq[others], clean.dq[others])
    page = inputs.attention.kv.rows[5][1].long()
    assert_filled(broken.dk_cache[page], 0.0)
    inputs.extras["qo_indptr"][1] = -1
    broken = run(plan, inputs, fill=0.0)
    fault = plan.status()
    assert fault is not None and fault.kind in ("query_indptr", "page")
    assert torch.equal(broken.dq[begins[6] :], clean.dq[begins[6] :]) and not broken.dq[: begins[2]].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_refuses_bad_metadata(backend: str) -> None:
    one = NAMED["causal"]
    inputs, plan = make_backward(one, device_of(backend)), select(one, backend, validate=True)
    wanted = bits(run(plan, inputs))
    assert all(torch.equal(a, b) for a, b in zip(bits(run(plan, inputs)), wanted, strict=True))
    inputs.attention.table.operands[1][6] = -1
    with pytest.raises(InvalidArgument, match="row 6 has length -1"):
        run(plan, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pages", [0, 12])
def test_nothing_to_read(pages: int, backend: str) -> None:
    """No page in the pool, or no column in the table: dq of the requests' rows is 0, and padding keeps its bits."""
    d = replace(D, attention=replace(A, num_pages=None, sinks=True), shared_pages=False)
    plan = ck.PagedAttentionBackwardPlan.select(d, device_of(backend), ck.PlanPreference(arch=backend))
    given = arguments(sinks=torch.zeros(8), dsinks=torch.full((8,), 7.0))
    given = {name: t.to(device_of(backend)) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    table, lengths, _ = given["page_table"].operands
    table = table[:, : 4 * (pages == 0)].contiguous()
    given["page_table"] = ck.PageTable.dense(table.to(device_of(backend)), lengths.to(device_of(backend)))
    for name in ("k_cache", "v_cache", "dk_cache", "dv_cache"):
        given[name] = given[name][:pages]
    given["qo_indptr"][-1] = 7
    result = plan.run(**given, workspace=plan.new_workspace())
    assert_filled(result.dq[:7], 0.0)
    assert_filled(result.dq[7:], 7.0)
    assert_filled(result.dsinks, 0.0)
    assert_filled(result.dk_cache, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_none(backend: str) -> None:
    d = ck.PagedAttentionBackwardDescriptor(replace(A, batch_size=0))
    plan = ck.PagedAttentionBackwardPlan.select(d, device_of(backend), ck.PlanPreference(arch=backend))
    device = device_of(backend)
    rows = torch.zeros(0, 8, 64, dtype=BF16, device=device)
    cache = torch.ones(12, 2, 16, 64, dtype=BF16, device=device)
    indptr = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.zeros(0, 4, dtype=torch.int32, device=device)
    table = ck.PageTable.dense(table, torch.zeros(0, dtype=torch.int32, device=device))
    lse = torch.zeros(0, 8, device=device)
    result = plan.run(rows, rows.clone(), cache, cache.clone(), rows.clone(), lse, table, qo_indptr=indptr)
    assert result.dq.shape == (0, 8, 64) and not result.dk_cache.any()
