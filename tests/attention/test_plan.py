"""The plan's verbs: select, can_implement, workspace_size, run; on the CPU variant and on a pretended H200."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention import plan as plan_module
from cute_kernels.attention.variants import explain
from cute_kernels.compile import kernels as compiler
from cute_kernels.planning import checked as checked_module
from cute_kernels.planning.variants import PRETEND
from tests.support.inputs import CASES, Shape, make_operands

CASE = Shape(lengths=(0, 5, 40, 17), head_dim=64, name="plan")


@pytest.fixture
def plan() -> ck.PagedDecodePlan:
    return ck.PagedDecodePlan.select(CASE.descriptor(), device="cpu")


def test_select_on_the_cpu(plan: ck.PagedDecodePlan) -> None:
    assert (plan.sku.operation, plan.sku.arch, plan.sku.variant) == ("paged_decode", "cpu", "cpu_reference")
    assert (plan.sku.q_dtype, plan.sku.kv_dtype, plan.sku.out_dtype) == ("bf16", "bf16", "bf16")
    assert plan.precision_guarantee.accumulator == "f32"
    assert plan.precision_guarantee.deterministic
    assert plan.precision_guarantee.bit_stable_on_same_hardware
    assert (plan.workspace_size(), plan.workspace_regions()) == (0, ())
    assert plan.descriptor == CASE.descriptor()
    assert "cpu_reference" in str(plan.explain())
    json.dumps(plan.explain().to_dict())


def test_forced_variants_that_this_machine_lacks() -> None:
    for arch in ("sm90", "sm80"):
        with pytest.raises(ck.Unsupported, match="capability"):
            ck.PagedDecodePlan.select(CASE.descriptor(), "cpu", ck.PlanPreference(arch=arch))
    assert ck.PagedDecodePlan.select(CASE.descriptor(), preference=ck.PlanPreference(arch="cpu")).sku.arch == "cpu"


def test_run_writes_every_row_and_allocates_what_is_missing(plan: ck.PagedDecodePlan) -> None:
    inputs = make_operands(CASE)
    out, lse = plan.run(*inputs)
    assert (tuple(out.shape), tuple(lse.shape)) == ((4, 8, 64), (4, 8))
    given_out, given_lse = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    returned = plan.run(*inputs, out=given_out, lse=given_lse)
    assert returned[0] is given_out
    assert returned[1] is given_lse
    assert torch.equal(given_out, out)
    assert torch.equal(given_lse, lse)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert (lse[0] == -math.inf).all()


def test_a_workspace_is_welcome_where_none_is_needed(pretend_h200: list) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu", ck.PlanPreference(max_workspace_bytes=0))
    plan.run(*make_operands(CASE), workspace=torch.empty(64, dtype=torch.uint8))
    assert pretend_h200.pop()[10] is None  # a kernel without splits takes none


@pytest.mark.parametrize("axis", [1, 2])
def test_a_unit_query_axis_is_accepted(plan: ck.PagedDecodePlan, axis: int) -> None:
    inputs = make_operands(CASE)
    expected, expected_lse = plan.run(*inputs)
    out, lse = plan.run(inputs.q.unsqueeze(axis), *inputs[1:])
    assert out.shape == inputs.q.unsqueeze(axis).shape
    assert torch.equal(out.squeeze(axis), expected)
    assert torch.equal(lse, expected_lse)


def test_can_implement_accepts_what_run_accepts(plan: ck.PagedDecodePlan) -> None:
    inputs = make_operands(CASE)
    assert plan.can_implement(*inputs) is None
    assert plan.can_implement(*inputs, out=torch.empty_like(inputs.q), lse=torch.empty(4, 8)) is None


def test_results_follow_lengths_changed_in_place(plan: ck.PagedDecodePlan) -> None:
    inputs = make_operands(CASE)
    plan.run(*inputs)
    _, seq_lens, _ = inputs.page_table.operands
    seq_lens.fill_(0)
    out, lse = plan.run(*inputs)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_strided_outputs_and_fused_inputs(plan: ck.PagedDecodePlan) -> None:
    """q as a slice of a fused projection, K and V as views of one pool, out and lse into wider buffers."""
    inputs = make_operands(CASE)
    expected, expected_lse = plan.run(*inputs)
    q = torch.cat([inputs.q, torch.full_like(inputs.q, math.nan)], 1)[:, :8]
    pool = torch.stack([inputs.k_cache, inputs.v_cache], 1)
    out, lse = torch.zeros(4, 16, 64, dtype=torch.bfloat16)[:, 4:12], torch.zeros(8, 4).T
    plan.run(q, pool[:, 0], pool[:, 1], inputs.page_table, out=out, lse=lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_batch_zero_launches_nothing(pretend_h200: list) -> None:
    case = replace(CASE, lengths=())
    inputs = make_operands(case)
    plan = ck.PagedDecodePlan.select(case.descriptor(), device="cpu")
    out, lse = plan.run(*inputs)
    assert (tuple(out.shape), tuple(lse.shape), pretend_h200) == ((0, 8, 64), (0, 8), [])
    assert plan.workspace_size() == 0


def test_an_empty_pool_or_table_launches_nothing(pretend_h200: list) -> None:
    inputs = make_operands(CASE)
    descriptor = replace(CASE.descriptor(), max_seq_len=16)
    plan = ck.PagedDecodePlan.select(descriptor, device="cpu", preference=ck.PlanPreference(max_workspace_bytes=0))
    table, seq_lens, _ = inputs.page_table.operands
    empty_pool, no_columns = inputs.k_cache[:0], ck.PageTable.dense(table[:, :0], seq_lens)
    for k, v, page_table in ((empty_pool, empty_pool, inputs.page_table), (inputs.k_cache, inputs.v_cache, no_columns)):
        out, lse = plan.run(inputs.q, k, v, page_table)
        assert not out.any()
        assert (lse == -math.inf).all()
    assert pretend_h200 == []


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("table_format", ["dense", "csr"])
def test_what_a_kernel_is_given(pretend_h200: list, layout: str, table_format: str) -> None:
    """HND views of the same memory, the table's operands, the workspace, the scale and the splits; again on a second run."""
    case = Shape(lengths=(2000, 64), head_dim=128, order=layout, table_format=table_format, name="h200")
    inputs = make_operands(case)
    plan = ck.PagedDecodePlan.select(replace(case.descriptor(), max_seq_len=131_072), device="cpu")
    assert plan.num_ctas > 1
    assert plan.sku.arch == "sm90a"
    regions = plan.workspace_regions()
    assert [region.name for region in regions] == ["partial_states", "announcements"]
    assert plan.workspace_size() >= regions[-1].offset + regions[-1].nbytes
    workspace = plan.new_workspace()
    for _ in range(2):
        out, lse = plan.run(*inputs, workspace=workspace)
        q, k, v, *table, k_scale, v_scale, launched_out, launched_lse = (launched := pretend_h200.pop())[:-4]
        launched_workspace, scale, num_ctas, status = launched[-4:]
        assert k_scale is None and v_scale is None
        assert q is inputs.q
        assert tuple(k.shape[1:]) == tuple(v.shape[1:]) == (2, 16, 128)
        assert k.data_ptr() == inputs.k_cache.data_ptr()
        assert v.data_ptr() == inputs.v_cache.data_ptr()
        assert all(a is b for a, b in zip(table, inputs.page_table.operands, strict=True))
        assert launched_out is out
        assert launched_lse is lse
        assert launched_workspace is workspace
        assert (scale, num_ctas) == (128**-0.5, plan.num_ctas)
        assert status > 0
        assert status % 16 == 0


def test_odd_strides_of_unit_extents_are_normalised(pretend_h200: list) -> None:
    """An extent of one may have any stride; a kernel's signature would refuse one that is no multiple of 16 bytes."""
    descriptor = ck.PagedDecodeDescriptor(1, 4, 1, 64, 16, torch.float16, max_seq_len=16)
    plan = ck.PagedDecodePlan.select(descriptor, device="cpu")
    cache = torch.randn(5, 1, 16, 64).half().as_strided((5, 1, 16, 64), (1024, 7, 64, 1))
    q = torch.randn(1, 4, 64).half().as_strided((1, 4, 64), (3, 64, 1))
    table = ck.PageTable.dense(torch.zeros(1, 1, dtype=torch.int32), 3)
    workspace = plan.new_workspace()
    plan.run(q, cache, cache.clone().as_strided(cache.shape, cache.stride()), table, workspace=workspace)
    launched_q, launched_k, *_ = pretend_h200.pop()
    assert launched_k.stride() == (1024, 64, 64, 1)
    assert launched_q.stride() == (64, 64, 1)
    assert launched_k.data_ptr() == cache.data_ptr()


def test_a_plan_shows_what_it_runs() -> None:
    paged = repr(ck.PagedDecodePlan.select(CASE.descriptor(), "cpu"))
    assert paged.startswith("<PagedDecodePlan paged_decode by cpu_reference on cpu: decode, batch ")
    assert "head_dim" in paged and paged.endswith(">")
    append = ck.KVAppendPlan.select(ck.KVAppendDescriptor(6, 2, 64, 16, torch.float16), "cpu")
    merge = ck.MergeStatesPlan.select(ck.MergeStatesDescriptor(2, 3, 4, 64, torch.float16), "cpu")
    assert repr(append).startswith("<KVAppendPlan kv_append by cpu_reference on cpu: append of 6 tokens")
    assert repr(merge).startswith("<MergeStatesPlan merge_states by cpu_reference on cpu: merge of 2 states")


def test_a_launch_that_fails_is_typed(monkeypatch: pytest.MonkeyPatch, plan: ck.PagedDecodePlan) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("invalid configuration")

    monkeypatch.setattr(plan, "_launch", refuse)
    with pytest.raises(ck.LaunchFailed, match="cpu_reference on cpu: invalid configuration"):
        plan.run(*make_operands(CASE))


def test_a_compile_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = explain(CASE.descriptor().problem, PRETEND["h200"]).chosen.spec
    compiled = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(compiler, "compile_decode", lambda spec: compiled.append(spec))
    monkeypatch.setattr(compiler, "compiled_specs", list)
    with pytest.raises(ck.CompileFailed, match="capture"):
        plan_module._launch_of(spec, CASE.descriptor())
    assert compiled == []
    monkeypatch.setattr(compiler, "compiled_specs", lambda: [spec])
    plan_module._launch_of(spec, CASE.descriptor())
    assert compiled == [spec]


def test_batch_invariance_is_guaranteed_only_on_request(pretend_h200: list) -> None:
    plans = [
        ck.PagedDecodePlan.select(CASE.descriptor(), "cpu", ck.PlanPreference(batch_invariant=invariant))
        for invariant in (False, True)
    ]
    assert [plan.precision_guarantee.batch_invariant for plan in plans] == [False, True]
    assert 0 < plans[0].workspace_size() < plans[1].workspace_size()
    for invariant in (False, True):  # whole rows alone promise nothing: their config may see the batch
        preference = ck.PlanPreference(batch_invariant=invariant, max_workspace_bytes=0)
        plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu", preference)
        assert plan.precision_guarantee.batch_invariant == invariant
        assert (plan.workspace_size(), plan.workspace_regions()) == (0, ())


@pytest.mark.parametrize("seq_len", [0, 1, 33])
def test_flash_decoding_equals_the_pagedplan_of(seq_len: int) -> None:
    """A contiguous cache is one page a row."""
    generator = torch.Generator().manual_seed(seq_len)
    q = torch.randn(3, 8, 64, generator=generator).half()
    k, v = (torch.randn(3, 2, seq_len, 64, generator=generator).half() for _ in range(2))
    flash = ck.FlashDecodingPlan.select(
        ck.FlashDecodingDescriptor.new_gqa(3, 8, 2, seq_len, 64, torch.float16).with_scale(0.2), "cpu"
    )
    out, lse = flash.run(q, k, v)
    assert flash.sku.operation == "flash_decoding"
    assert flash.can_implement(q, k, v) is None
    if seq_len == 0:
        assert not out.any()
        assert (lse == -math.inf).all()
        return
    descriptor = ck.PagedDecodeDescriptor(3, 8, 2, 64, seq_len, torch.float16, softmax_scale=0.2)
    table = ck.PageTable.dense(torch.arange(3, dtype=torch.int32)[:, None], seq_len)
    paged_out, paged_lse = ck.PagedDecodePlan.select(descriptor, "cpu").run(q, k, v, table)
    assert torch.equal(out, paged_out)
    assert torch.equal(lse, paged_lse)


def test_checked_signatures_are_bounded(monkeypatch: pytest.MonkeyPatch, no_plans: None) -> None:
    monkeypatch.setattr(checked_module, "MAX_CHECKED", 3)
    plan, inputs = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu"), make_operands(CASE)
    kept = [plan.run(*inputs) for _ in range(8)]
    assert 0 < len(plan._check._known) <= 3
    assert all(torch.equal(out, kept[0][0]) for out, _ in kept)


def test_a_row_alone_equals_the_row_in_its_batch() -> None:
    for case in CASES[:4]:
        inputs = make_operands(case)
        out, lse = ck.PagedDecodePlan.select(case.descriptor(), "cpu").run(*inputs)
        table, seq_lens, _ = inputs.page_table.operands
        alone = ck.PagedDecodePlan.select(replace(case.descriptor(), batch_size=1), "cpu")
        for row in range(len(case.lengths)):
            row_table = ck.PageTable.dense(table[row : row + 1], seq_lens[row : row + 1])
            row_out, row_lse = alone.run(inputs.q[row : row + 1], inputs.k_cache, inputs.v_cache, row_table)
            assert torch.equal(row_out[0], out[row])
            assert torch.equal(row_lse[0], lse[row])
