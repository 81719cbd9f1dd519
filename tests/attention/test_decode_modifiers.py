"""Decode of one query row with a window, a soft cap, ALiBi and sinks: both plans and the one call, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from tests.support.attention_cases import Case, case, make_attention
from tests.support.attention_harness import assert_close
from tests.support.harness import BACKENDS, assert_bitwise, device_of
from tests.support.storage import STORAGES

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
MODIFIERS: dict[str, dict[str, Any]] = {
    "window_0": {"window_left": 0},
    "window_15": {"window_left": 15},
    "window_16": {"window_left": 16},
    "window_1000": {"window_left": 1000},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "everything": {"window_left": 40, "softcap": 2.0, "alibi": True, "sinks": True},
}
LENGTHS = (0, 1, 15, 16, 17, 100, 3000)
FIELDS = ("window_left", "softcap", "alibi", "sinks")


def one_row(modifiers: dict[str, Any], lengths: tuple[int, ...] = LENGTHS, **cache: Any) -> Case:
    """A problem of decode, as one of attention with a uniform row."""
    return case(
        "one", {"lengths": lengths, "head_dim": 128, **cache}, uniform=True, q_lens=(1,) * len(lengths), max_q_len=1, **modifiers
    )


def paged_plan(described: Case, backend: str) -> ck.PagedDecodePlan:
    descriptor = replace(described.cache.descriptor(), **{name: getattr(described, name) for name in FIELDS})
    return ck.PagedDecodePlan.select(descriptor, device_of(backend), ck.PlanPreference(arch=backend))


def test_soft_caps_of_several_layers_in_one_process() -> None:
    """Layers with other caps, compiled one by one: the second cap is traced as a number that changes."""

    def layer(q: torch.Tensor, softcap: float) -> torch.Tensor:
        return ck.decode_attention(q, k, k, softcap=softcap)[0]

    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 8, 64), (2, 2, 50, 64)))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for softcap in (5.0, 6.0, 7.5):
        assert_bitwise((compiled(q, softcap),), (layer(q, softcap),))


@EVERY_BACKEND
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("modifiers", MODIFIERS)
def test_pages(modifiers: str, storage: str, backend: str) -> None:
    described = one_row(MODIFIERS[modifiers], **STORAGES[storage])
    inputs, plan = make_attention(described, device_of(backend)), paged_plan(described, backend)
    q, workspace = inputs.q[:, 0].contiguous(), plan.new_workspace()
    got = plan.run(q, inputs.k, inputs.v, inputs.table, **inputs.scales, **inputs.extras, workspace=workspace)
    assert_close(inputs, got)
    assert not workspace.any()
    for _ in range(3):  # the second run with the same tensors may take another way
        out, lse = torch.full_like(got[0], torch.nan), torch.full_like(got[1], torch.nan)
        plan.run(q, inputs.k, inputs.v, inputs.table, **inputs.scales, **inputs.extras, out=out, lse=lse, workspace=workspace)
        assert_bitwise((out, lse), got)
    values = {name: getattr(described, name) for name in ("window_left", "softcap")}
    called = ck.decode_attention(q, inputs.k, inputs.v, page_table=inputs.table, **inputs.scales, **inputs.extras, **values)
    assert_close(inputs, called)


@EVERY_BACKEND
@pytest.mark.parametrize("modifiers", MODIFIERS)
def test_contiguous_rows(modifiers: str, backend: str) -> None:
    described = one_row(MODIFIERS[modifiers], lengths=(700,) * 3)
    described = replace(described, table="none")
    inputs = make_attention(described, device_of(backend))
    values = {name: getattr(described, name) for name in FIELDS}
    descriptor = ck.FlashDecodingDescriptor(3, 8, 2, 700, 128, torch.bfloat16, **values)
    plan = ck.FlashDecodingPlan.select(descriptor, device_of(backend), ck.PlanPreference(arch=backend))
    q = inputs.q[:, 0].contiguous()
    assert_close(inputs, plan.run(q, inputs.k, inputs.v, **inputs.extras, workspace=plan.new_workspace()))
    called = ck.decode_attention(
        q, inputs.k, inputs.v, **inputs.extras, window_left=described.window_left, softcap=described.softcap
    )
    assert_close(inputs, called)


@EVERY_BACKEND
def test_sinks_changed_in_place_are_read(backend: str) -> None:
    described = one_row(MODIFIERS["sinks"])
    inputs, plan = make_attention(described, device_of(backend)), paged_plan(described, backend)
    q, workspace = inputs.q[:, 0].contiguous(), plan.new_workspace()
    for shift in (0.0, 1.0, -3.0):
        inputs.extras["sinks"] += shift
        assert_close(inputs, plan.run(q, inputs.k, inputs.v, inputs.table, **inputs.extras, workspace=workspace))


def test_a_window_reads_no_page_before_it() -> None:
    """Nor is such a page at fault; a page in the window is."""
    described = one_row({"window_left": 20})
    inputs, plan = make_attention(described), paged_plan(described, "cpu")
    plan.clear_status()
    clean = plan.run(inputs.q[:, 0], inputs.k, inputs.v, inputs.table)
    ids = inputs.table.operands[0]
    last_visible = (3000 - 1 - 20) // 16
    ids[6, :last_visible] = -1
    assert_bitwise(plan.run(inputs.q[:, 0], inputs.k, inputs.v, inputs.table), clean)
    assert plan.status() is None
    ids[6, last_visible] = -1
    plan.run(inputs.q[:, 0], inputs.k, inputs.v, inputs.table)
    assert str(plan.status()).startswith("row 6 names page -1")


def test_plain_plans_launch_as_before(pretend_h200: list[tuple[Any, ...]]) -> None:
    """By the shorter signature, and by a shortcut from the third run with the same tensors on."""
    described = one_row({})
    plan = ck.PagedDecodePlan.select(described.cache.descriptor(), "cpu")
    inputs = make_attention(described)
    q, out, lse, workspace = (
        inputs.q[:, 0].contiguous(),
        torch.empty(7, 8, 128).bfloat16(),
        torch.empty(7, 8),
        plan.new_workspace(),
    )
    for _ in range(4):
        plan.run(q, inputs.k, inputs.v, inputs.table, out=out, lse=lse, workspace=workspace)
    assert [len(launch) for launch in pretend_h200] == [14] * 4 and len(plan._shortcuts) == 1
    with pytest.raises(ck.InvalidArgument, match="sinks: got Tensor, must be None"):
        plan.run(q, inputs.k, inputs.v, inputs.table, out=out, lse=lse, workspace=workspace, sinks=torch.ones(8))
    assert len(pretend_h200) == 4
