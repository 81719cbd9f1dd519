"""select of a known descriptor: the same plan, at once, for every thread, also inside a graph capture; errors are not kept."""

from __future__ import annotations

import threading
import timeit
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention import plan as plan_module
from cute_kernels.attention.variants import explain
from cute_kernels.compile import kernels as compiler
from cute_kernels.kv import faults
from cute_kernels.planning import base as plan_base
from cute_kernels.planning.variants import PRETEND
from tests.support.inputs import Shape

DESCRIPTOR = Shape(lengths=(5, 40), head_dim=64, name="selection").descriptor()
FLASH = ck.FlashDecodingDescriptor(2, 8, 2, 33, 64, torch.bfloat16)
KNOWN_SELECT = 20e-6  # seconds
SLOW_MACHINE = 10  # a busy machine's factor on it

pytestmark = pytest.mark.usefixtures("no_plans")


def test_the_same_descriptor_device_and_preference_give_the_sameplan_of() -> None:
    plan = ck.PagedDecodePlan.select(DESCRIPTOR, "cpu")
    equal = [
        (replace(DESCRIPTOR), "cpu", None),
        (DESCRIPTOR, torch.device("cpu"), ck.PlanPreference()),
        (DESCRIPTOR, "cpu", ck.PlanPreference(arch=None)),
    ]
    assert all(ck.PagedDecodePlan.select(*arguments) is plan for arguments in equal)
    others = [
        (replace(DESCRIPTOR, batch_size=3), "cpu", None),
        (DESCRIPTOR, "cpu", ck.PlanPreference(arch="cpu")),
        (DESCRIPTOR, "cpu", ck.PlanPreference(validate=True)),
    ]
    plans = [plan, *(ck.PagedDecodePlan.select(*arguments) for arguments in others)]
    assert len({id(plan) for plan in plans}) == 4
    assert ck.FlashDecodingPlan.select(FLASH, "cpu") is ck.FlashDecodingPlan.select(replace(FLASH), "cpu")


def test_the_least_recently_selected_plan_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_base, "MAX_PLANS", 3)
    descriptors = [replace(DESCRIPTOR, batch_size=batch) for batch in range(1, 5)]
    plans = [ck.PagedDecodePlan.select(descriptor, "cpu") for descriptor in descriptors[:3]]
    assert ck.PagedDecodePlan.select(descriptors[0], "cpu") is plans[0]
    ck.PagedDecodePlan.select(descriptors[3], "cpu")  # drops the second
    assert len(plan_base._plans) == 3
    assert ck.PagedDecodePlan.select(descriptors[0], "cpu") is plans[0]
    assert ck.PagedDecodePlan.select(descriptors[2], "cpu") is plans[2]
    assert ck.PagedDecodePlan.select(descriptors[1], "cpu") is not plans[1]


def test_as_many_plans_are_kept_as_promised() -> None:
    assert plan_base.MAX_PLANS == 256
    for batch in range(300):
        ck.PagedDecodePlan.select(replace(DESCRIPTOR, batch_size=batch), "cpu")
    assert len(plan_base._plans) == 256
    plan_base.forget_plans()
    assert not plan_base._plans


def test_errors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ck.CompileFailed("ptxas says no")

    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "_launch_of", refuse)
        for _ in range(2):
            with pytest.raises(ck.CompileFailed, match="ptxas"):
                ck.PagedDecodePlan.select(DESCRIPTOR, "cpu")
    with pytest.raises(ck.Unsupported, match="f16"):
        ck.PagedDecodePlan.select(replace(DESCRIPTOR, kv_dtype=ck.KVDtype.F16), "cpu")
    assert not plan_base._plans
    assert ck.PagedDecodePlan.select(DESCRIPTOR, "cpu").sku.arch == "cpu"


def test_32_threads_get_oneplan_of(monkeypatch: pytest.MonkeyPatch) -> None:
    start, real = threading.Barrier(32), plan_module._launch_of
    monkeypatch.setattr(plan_module, "_launch_of", lambda *operands: (start.wait(), real(*operands))[1])
    plans: list[ck.PagedDecodePlan] = []
    threads = [threading.Thread(target=lambda: plans.append(ck.PagedDecodePlan.select(DESCRIPTOR, "cpu"))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 32
    assert len({id(plan) for plan in plans}) == 1
    assert ck.PagedDecodePlan.select(DESCRIPTOR, "cpu") is plans[0]


def test_inside_a_capture_only_a_known_plan_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended H200: a kernel that is not compiled yet is refused, and the refusal is not kept."""
    compiled: list[object] = []
    monkeypatch.setattr(plan_module, "explain", lambda problem, _, preference: explain(problem, PRETEND["h200"], preference))
    monkeypatch.setattr(compiler, "compile_decode", lambda spec: compiled.append(spec))
    monkeypatch.setattr(compiler, "compiled_specs", lambda: list(compiled))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ck.CompileFailed, match="capture"):
        ck.PagedDecodePlan.select(DESCRIPTOR, "cpu")
    assert compiled == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plan = ck.PagedDecodePlan.select(DESCRIPTOR, "cpu")
    assert len(compiled) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ck.PagedDecodePlan.select(DESCRIPTOR, "cpu") is plan


def test_a_known_plan_is_selected_in_microseconds() -> None:
    """With the descriptor made anew, as callers do."""

    def select() -> object:
        return ck.PagedDecodePlan.select(replace(DESCRIPTOR), "cpu")

    select()
    assert min(timeit.repeat(select, number=100, repeat=20)) / 100 < KNOWN_SELECT * SLOW_MACHINE


def test_status_words_are_zeroed_apart_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan has its own 16 bytes, also past the end of a block; a block is not made inside a graph capture."""
    monkeypatch.setattr(faults, "BLOCK_PLANS", 3)
    monkeypatch.setattr(faults, "_unused", {})
    device = torch.device("cpu")
    with torch.inference_mode():
        words = [faults.new_status(device) for _ in range(7)]
    assert len({w.data_ptr() for w in words}) == 7
    assert all((w.dtype, w.tolist(), w.data_ptr() % 16) == (torch.int32, [0] * 4, 0) for w in words)
    words[0].fill_(7)  # a caller outside of inference mode
    assert words[1].tolist() == [0] * 4
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ck.CompileFailed, match="cuda:0 must not be selected inside a graph capture"):
        faults.new_status(torch.device("cuda:0"))
