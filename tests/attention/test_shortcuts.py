"""A run with the tensors of the last: no checks beyond identity and address, and nothing that should be noticed is missed."""

from __future__ import annotations

import gc
import timeit
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import tvm_ffi

import cute_kernels as ck
from cute_kernels.attention import checks
from cute_kernels.attention import plan as plan_module
from cute_kernels.compile.kernels import as_operand
from tests.support.inputs import Shape, make_operands

CASE = Shape(lengths=(0, 5, 40, 17), head_dim=64, name="shortcuts")
BESIDE_THE_LAUNCH = 1.5e-6  # seconds
SLOW_MACHINE = 10  # a busy machine's factor on it
Arguments = dict[str, Any]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The runs whose operands were described, in order: those that took no shortcut."""
    seen: list[tuple[Any, ...]] = []
    real = checks.Operands.signature
    monkeypatch.setattr(checks.Operands, "signature", lambda operands: (seen.append(operands), real(operands))[1])
    return seen


def arguments(plan: ck.PagedDecodePlan, case: Shape = CASE) -> Arguments:
    """Everything of one run, preallocated."""
    inputs = make_operands(case)
    workspace = torch.zeros(plan.workspace_size() + 16, dtype=torch.uint8)
    out, lse = torch.full_like(inputs.q, 7.0), torch.full(inputs.q.shape[:2], 7.0)
    return {**inputs._asdict(), "out": out, "lse": lse, "workspace": workspace}


def settle(plan: ck.PagedDecodePlan, good: Arguments, checked: list[tuple[Any, ...]]) -> None:
    """Two runs, after which the next with the same tensors takes the shortcut."""
    for _ in range(2):
        plan.run(**good)
    checked.clear()
    plan.run(**good)
    assert checked == []


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("table_format", ["dense", "csr"])
@pytest.mark.parametrize("max_workspace_bytes", [None, 0])
def test_a_shortcut_launches_the_same(
    pretend_h200: list, checked: list, layout: str, table_format: str, max_workspace_bytes: int | None
) -> None:
    """The third run on, also with a PageTable made anew; operand for operand what the first launched."""
    case = replace(CASE, order=layout, table_format=table_format)
    preference = ck.PlanPreference(max_workspace_bytes=max_workspace_bytes)
    plan = ck.PagedDecodePlan.select(case.descriptor(), "cpu", preference)
    good = arguments(plan, case)
    for _ in range(4):
        table = ck.PageTable(table_format, tuple(good["page_table"].operands))
        out, lse = plan.run(**{**good, "page_table": table})
        assert (out is good["out"], lse is good["lse"]) == (True, True)
    assert len(checked) == 2
    first, *others = pretend_h200
    assert len(others) == 3
    for launched in others:
        assert all(_same_operand(a, b) for a, b in zip(launched, first, strict=True))
    assert (first[10] is None) == (max_workspace_bytes == 0)


def _same_operand(a: object, b: object) -> bool:
    """Whether two operands of a launch are the same; a shortcut's are held as TVM FFI tensors."""
    a, b = (torch.from_dlpack(t) if isinstance(t, tvm_ffi.Tensor) else t for t in (a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
    return a == b


def test_results_follow_what_the_tensors_hold(computing_h200: None, checked: list) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    good["q"].mul_(2)
    good["page_table"].operands[1][2] = 30
    plan.run(**good)
    assert checked == []
    fresh = (good["q"].clone(), good["k_cache"], good["v_cache"], good["page_table"])
    out, lse = plan.run(*fresh, workspace=good["workspace"])
    assert torch.equal(good["out"], out)
    assert torch.equal(good["lse"], lse)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out", "lse", "workspace"])
def test_another_tensor_is_checked(pretend_h200: list, checked: list, name: str) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    plan.run(**{**good, name: good[name].clone()})
    assert len(checked) == 1


MUTATIONS: list[tuple[str, Callable[[torch.Tensor], object], type[Exception] | None]] = [
    ("q", lambda t: t.set_(t.clone()), None),
    ("k_cache", lambda t: t.set_(t.clone()), None),
    ("v_cache", lambda t: setattr(t, "data", t.clone()), None),
    ("lse", lambda t: t.set_(t.clone()), None),
    ("out", lambda t: setattr(t, "data", t.clone()), None),
    ("q", lambda t: setattr(t, "data", t.half()), ck.InvalidArgument),
    ("q", lambda t: t.resize_(2, 8, 64), ck.InvalidProblem),
    ("q", lambda t: t.resize_(400, 8, 64), ck.InvalidProblem),
    ("out", lambda t: t.resize_(400, 8, 64), ck.InvalidProblem),
    ("v_cache", lambda t: t.set_(t[:, :, :8].clone()), ck.InvalidProblem),
    ("workspace", lambda t: t.set_(t[:32].clone()), ck.WorkspaceTooSmall),
    ("workspace", lambda t: t.set_(torch.zeros(2**21, dtype=torch.uint8)[8:]), ck.MisalignedOperand),
]


@pytest.mark.parametrize(("name", "mutate", "error"), MUTATIONS)
def test_a_tensor_that_moved_is_checked(
    pretend_h200: list, checked: list, name: str, mutate: Callable[[torch.Tensor], object], error: type[Exception] | None
) -> None:
    """set_, .data =, a resize that moves: an output elsewhere is checked anew; an input reaches the launch where it is now."""
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    launches = len(pretend_h200)
    mutate(good[name])
    if error is None:
        plan.run(**good)
    else:
        with pytest.raises(error, match=name):
            plan.run(**good)
    inputs = {"q": 0, "k_cache": 1, "v_cache": 2}
    assert len(checked) == (error is not None or name not in inputs)
    assert len(pretend_h200) == launches + (error is None)
    if error is None and name in inputs:
        assert pretend_h200[-1][inputs[name]].data_ptr() == good[name].data_ptr()


SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.float32}  # another dtype of so many bytes; of f32 int32
TABLE = {"table": 0, "seq_lens": 1}


def operand_of(good: Arguments, name: str) -> torch.Tensor:
    return good["page_table"].operands[TABLE[name]] if name in TABLE else good[name]


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out", "lse", "workspace", "table", "seq_lens"])
@pytest.mark.parametrize("change", ["dtype", "shorter"])
def test_data_at_the_same_address_is_checked(pretend_h200: list, checked: list, name: str, change: str) -> None:
    """`.data =` of the same memory as another dtype, or of less of it: checked anew, so refused."""
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    launches, tensor = len(pretend_h200), operand_of(good, name)
    address, before = tensor.data_ptr(), tensor.dtype
    other = torch.int32 if before == torch.float32 else SAME_SIZE[before.itemsize]
    tensor.data = tensor.data.view(other) if change == "dtype" else tensor.data[: max(1, len(tensor) // 8)]
    assert tensor.data_ptr() == address
    with pytest.raises(ck.CuteKernelsError):
        plan.run(**good)
    assert len(checked) == 1
    assert len(pretend_h200) == launches


def test_scales_at_the_same_address_are_checked(pretend_h200: list, checked: list) -> None:
    descriptor = replace(CASE.descriptor(), kv_dtype=ck.KVDtype.E4M3, k_scale=ck.KVScale.HEAD, v_scale=ck.KVScale.HEAD)
    plan = ck.PagedDecodePlan.select(descriptor, "cpu")
    good = arguments(plan)
    for cache in ("k_cache", "v_cache"):
        good[cache] = good[cache].nan_to_num().to(torch.float8_e4m3fn)
    good["workspace"] = plan.new_workspace()
    for name, change in (("k_scale", lambda t: t.view(torch.int32)), ("v_scale", lambda t: t[:1])):
        good |= {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
        settle(plan, good, checked)
        good[name].data = change(good[name].data)
        with pytest.raises(ck.CuteKernelsError, match=name):
            plan.run(**good)
        assert len(checked) == 1


ABSENT: list[tuple[str, object, type[Exception]]] = [
    ("q", None, ck.InvalidArgument),
    ("v_cache", None, ck.InvalidArgument),
    ("workspace", None, ck.WorkspaceTooSmall),
    ("page_table", None, ck.InvalidArgument),
    ("page_table", ("dense", None), ck.InvalidArgument),
]


@pytest.mark.parametrize("dead", [False, True], ids=["alive", "dead"])
@pytest.mark.parametrize(("name", "value", "error"), ABSENT)
def test_none_is_never_taken_for_a_remembered_tensor(
    pretend_h200: list, checked: list, name: str, value: object, error: type[Exception], dead: bool
) -> None:
    """A weak reference whose tensor has died gives None."""
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    pretend_h200.clear()
    kept = None if dead else good[name]
    good[name] = value
    gc.collect()
    with pytest.raises(error, match=name):
        plan.run(**good)
    assert pretend_h200 == []
    del kept


@pytest.mark.parametrize("operand", [0, 1])
def test_a_dead_operand_of_the_table_is_missed(pretend_h200: list, checked: list, operand: int) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    operands: list[Any] = list(good["page_table"].operands)
    operands[operand] = None
    good["page_table"] = ck.PageTable("dense", tuple(operands))
    pretend_h200.clear()
    gc.collect()
    with pytest.raises(ck.InvalidArgument, match="NoneType"):
        plan.run(**good)


def test_missing_outputs_are_allocated_afresh(computing_h200: None, checked: list) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    expected = good.pop("out").clone(), good.pop("lse").clone()
    gc.collect()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(plan.run(**good), expected, strict=True))


def test_runs_without_outputs_make_no_shortcut(pretend_h200: list, checked: list) -> None:
    """It would know outputs that no later run is given; making one takes longer than a run."""
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    for missing in ("out", "lse"):
        for _ in range(4):
            plan.run(**{name: value for name, value in good.items() if name != missing})
    assert plan._shortcuts == {}


def test_a_plan_that_looks_for_no_shortcut_makes_none(pretend_h200: list, checked: list) -> None:
    fields = CASE.descriptor().__dict__
    descriptor = ck.PagedAttentionDescriptor(**fields, max_q_len=1, query_format="uniform")
    plan = ck.PagedAttentionPlan.select(descriptor, "cpu")
    good = arguments(plan)
    for _ in range(4):
        plan.run(**good)
    assert plan._shortcuts == {}


def test_no_tensor_is_kept_alive(pretend_h200: list, checked: list) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    settle(plan, good, checked)
    tensors = [*good["page_table"].operands[:2], *(value for name, value in good.items() if name != "page_table")]
    references = [weakref.ref(tensor) for tensor in tensors]
    pretend_h200.clear()
    del good, tensors
    gc.collect()
    assert [reference() for reference in references] == [None] * 8
    assert plan._shortcuts == {}


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "out", "lse", "workspace"])
def test_memory_is_freed_with_the_first_tensor_that_dies(pretend_h200: list, checked: list, name: str) -> None:
    """The storage that a shortcut holds, of this tensor and of the others."""
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    memory = {n: good[n].view(torch.uint8).numpy().copy() for n in (name, "q")}
    for n, array in memory.items():
        good[n] = torch.from_numpy(array).view(good[n].dtype)
    references = {n: weakref.ref(array) for n, array in memory.items()}
    del memory, array
    settle(plan, good, checked)
    pretend_h200.clear()
    gc.collect()
    assert all(reference() is not None for reference in references.values())
    assert len(plan._shortcuts) == 1
    del good[name]
    gc.collect()
    assert references[name]() is None
    assert references["q"]() is not None
    assert plan._shortcuts == {}


def test_an_operand_keeps_its_strides() -> None:
    """Whatever DLPack makes of an axis of length 1."""
    cache = torch.zeros(6, 1, 16, 64, dtype=torch.bfloat16)
    for tensor in (cache, cache[::2], cache[:1], cache.transpose(1, 2), cache[:, :, :1]):
        operand = as_operand(tensor)
        assert (tuple(operand.strides), tuple(operand.shape)) == (tensor.stride(), tuple(tensor.shape))
        assert torch.from_dlpack(operand).data_ptr() == tensor.data_ptr()


def test_an_operand_whose_strides_would_change_stays_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(4, 1, 16)
    other = tvm_ffi.from_dlpack(torch.zeros(4, 1, 16).as_strided((4, 1, 16), (16, 1, 1)))
    monkeypatch.setattr(tvm_ffi, "from_dlpack", lambda _: other)
    assert as_operand(tensor) is tensor


def test_shortcuts_are_bounded(pretend_h200: list, checked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each K cache, as layers have; each is taken until there are too many."""
    monkeypatch.setattr(plan_module, "MAX_SHORTCUTS", 4)
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    good = arguments(plan)
    layers = [{**good, "k_cache": good["k_cache"].clone()} for _ in range(6)]
    for _ in range(2):
        for layer in layers[:4]:
            plan.run(**layer)
    assert len(plan._shortcuts) == 4
    checked.clear()
    for layer in layers[:4]:
        plan.run(**layer)
    assert checked == []
    for layer in layers * 3:
        plan.run(**layer)
        assert len(plan._shortcuts) <= len(plan._last_q) <= 4


def test_a_failing_launch_is_typed(pretend_h200: list, checked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    failing: list[bool] = []

    def launch(*_: object) -> None:
        if failing:
            raise RuntimeError("Mismatched q.shape[1]")

    monkeypatch.setattr(plan, "_launch", launch)
    good = arguments(plan)
    settle(plan, good, checked)
    failing.append(True)
    with pytest.raises(ck.LaunchFailed, match="sm90_tma on cpu: Mismatched q"):
        plan.run(**good)
    assert len(checked) == 1, "the checks come first: they name what is wrong where they can"


def test_a_contiguous_plan_takes_shortcuts(computing_h200: None, checked: list) -> None:
    preference = ck.PlanPreference(max_workspace_bytes=0)
    plan = ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor(2, 8, 2, 33, 64, torch.float16), "cpu", preference)
    q, k, v = torch.randn(2, 8, 64).half(), torch.randn(2, 2, 33, 64).half(), torch.randn(2, 2, 33, 64).half()
    expected = plan.run(q, k, v)
    out, lse = torch.empty_like(q), torch.empty(2, 8)
    checked.clear()
    for _ in range(4):
        out.fill_(7)
        plan.run(q, k, v, out=out, lse=lse)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    assert 1 <= len(checked) <= 2


def test_a_known_run_costs_little_beside_its_launch(pretend_h200: list, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    monkeypatch.setattr(plan, "_launch", lambda *_: None)
    good = arguments(plan)
    seconds = min(timeit.repeat(lambda: plan.run(**good), number=200, repeat=30)) / 200
    assert seconds < BESIDE_THE_LAUNCH * SLOW_MACHINE
