"""MergeStatesPlan on the host: descriptors, the choice and its reasons, typed errors before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported
from cute_kernels.config.merge import merge_supports
from cute_kernels.merge import plan as merge
from cute_kernels.merge.reference import reference_merge
from cute_kernels.merge.variants import explain, kernel_spec
from cute_kernels.planning.variants import PRETEND
from tests.support.choices import assert_first_that_serves
from tests.support.launches import recorded

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
D = ck.MergeStatesDescriptor(3, 4, 5, 64, BF16)
Args = dict[str, Any]


def arguments(d: ck.MergeStatesDescriptor = D) -> Args:
    """Good arguments of `run`, the outputs prefilled with 7."""
    return {
        "outs": torch.randn(d.num_states, *d.shape).to(d.dtype),
        "lses": torch.randn(d.num_states, *d.shape[:2]),
        "out": torch.full(d.shape, 7.0, dtype=d.dtype),
        "lse": torch.full(d.shape[:2], 7.0),
    }


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[
            (name, value, InvalidProblem)
            for name in ("num_states", "num_heads", "head_dim")
            for value in (0, -1, 2**31, 1.0, True)
        ],
        *[("batch_size", value, InvalidProblem) for value in (-1, 2**31, "4", None)],
        *[("dtype", value, InvalidProblem) for value in ("bf16", None, ck.KVDtype.F16)],
        *[("dtype", value, Unsupported) for value in (torch.float64, torch.int8, torch.float8_e4m3fn)],
        *[("lse_base", value, InvalidProblem) for value in ("10", 2, None)],
        *[("alignment_bytes", value, InvalidProblem) for value in (0, 1, 3, 32, True)],
        *[("sinks", value, InvalidProblem) for value in (1, None, "yes")],
    ],
)
def test_a_bad_descriptor_names_the_parameter_and_its_value(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=name) as caught:
        replace(D, **{name: value})
    assert (str(value) if isinstance(value, torch.dtype) else repr(value)) in str(caught.value)
    assert isinstance(caught.value, ck.CuteKernelsError)


def test_descriptors_are_frozen_keys() -> None:
    assert replace(D) == D and hash(replace(D)) == hash(D) != hash(replace(D, lse_base="2"))
    with pytest.raises(FrozenInstanceError):
        D.num_states = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({}, 2),
        ({"head_dim": 5}, 1),
        ({"head_dim": 1, "dtype": F32}, 1),
        ({"dtype": F32}, 2),
        ({"alignment_bytes": 2}, 1),
        ({"alignment_bytes": 4}, 2),
        ({"alignment_bytes": 4, "dtype": F32}, 1),
        ({"alignment_bytes": 2, "dtype": F32}, 1),
        ({"alignment_bytes": 16, "head_dim": 6}, 2),
    ],
    ids=str,
)
def test_a_thread_merges_two_columns_where_they_are_aligned(changes: dict[str, Any], columns: int) -> None:
    d = replace(D, **changes)
    assert d.columns == columns
    assert merge_supports(kernel_spec(d, "sm_90a")) == []


@pytest.mark.parametrize(
    ("changes", "loads", "chunked", "warps"),
    [
        ({"num_states": 1}, 2, False, 4),
        ({"num_states": 2}, 2, False, 4),
        ({"num_states": 5}, 8, False, 4),
        ({"num_states": 8}, 8, False, 4),
        ({"num_states": 33, "num_heads": 1}, 8, True, 1),
        ({"num_states": 9, "num_heads": 2}, 8, True, 2),
    ],
    ids=str,
)
def test_a_kernel_is_no_larger_than_its_problem(changes: dict[str, Any], loads: int, chunked: bool, warps: int) -> None:
    spec = kernel_spec(replace(D, **changes), "sm_80")
    assert (spec.in_flight, spec.chunked, spec.num_warps) == (loads, chunked, warps)


@pytest.mark.parametrize(
    "change", [{"columns": 3}, {"columns": 2, "head_dim": 5}, {"head_dim": 0}, {"in_flight": 16}, {"num_warps": 8}]
)
def test_supports_gives_its_reason(change: dict[str, int]) -> None:
    assert len(merge_supports(replace(kernel_spec(D, "sm_80"), **change))) == 1


@pytest.mark.parametrize(
    ("gpu", "chosen"), [("h200", "sm90_merge"), ("a100", "sm80_merge"), ("l40s", "sm80_merge"), ("cpu", "cpu_reference")]
)
def test_the_first_variant_that_serves_is_chosen(gpu: str, chosen: str) -> None:
    assert_first_that_serves(explain(D, PRETEND[gpu]), "merge", chosen, "merge of 3 states")


def test_a_preference_is_followed_or_refused() -> None:
    forced = explain(D, PRETEND["h200"], ck.PlanPreference(arch="sm80"))
    assert [c.verdict for c in forced.candidates] == ["excluded", "chosen", "excluded"]
    with pytest.raises(Unsupported, match=r"needs a CUDA device of capability 9\.0"):
        ck.MergeStatesPlan.select(D, "cpu", ck.PlanPreference(arch="sm90"))


def test_more_heads_than_a_grid_holds_are_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"num_heads = 1,000,000 .* must be at most 65,535"):
        _ = explain(replace(D, num_heads=1_000_000), PRETEND["h200"]).chosen
    assert explain(replace(D, num_heads=131_072), PRETEND["h200"]).chosen.num_ctas == 4 * 32_768


def test_no_more_sms_than_the_devices() -> None:
    assert ck.MergeStatesPlan.select(D, "cpu", ck.PlanPreference(sm_count=1)).sm_count == 1
    with pytest.raises(InvalidArgument, match="sm_count: got 2, must be at most 1, the SMs of cpu"):
        ck.MergeStatesPlan.select(D, "cpu", ck.PlanPreference(sm_count=2))


def test_what_a_plan_says_of_itself() -> None:
    plan = ck.MergeStatesPlan.select(D, "cpu")
    assert plan is ck.MergeStatesPlan.select(replace(D), "cpu")
    assert plan.descriptor == D and plan.device == torch.device("cpu")
    assert plan.workspace_size() == 0 and plan.workspace_regions() == ()
    assert (plan.sku.operation, plan.sku.out_dtype, plan.sku.arch, plan.sku.variant) == (
        "merge_states",
        "bf16",
        "cpu",
        "cpu_reference",
    )
    assert plan.precision_guarantee.batch_invariant and plan.precision_guarantee.deterministic


@pytest.mark.parametrize("bad", [None, "D", 3])
def test_select_takes_its_own_descriptor(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a MergeStatesDescriptor"):
        ck.MergeStatesPlan.select(bad, "cpu")


def test_the_kernel_is_given_the_operands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200: one launch a run, none for an empty batch."""
    specs, launches = recorded(monkeypatch, merge)
    cpu = torch.device("cpu")
    plan, args = ck.MergeStatesPlan(D, cpu, ck.PlanPreference()), arguments()
    assert specs == [kernel_spec(D, "sm_90a")] == [plan.sku.config] and plan.sku.arch == "sm90a"
    for _ in range(2):
        assert plan.run(**args) == (args["out"], args["lse"])
    assert all(sinks is None for *_, sinks in launches)
    assert [[x.data_ptr() for x in given[:-1]] for given in launches] == [[x.data_ptr() for x in args.values()]] * 2
    empty = replace(D, batch_size=0)
    ck.MergeStatesPlan(empty, cpu, ck.PlanPreference()).run(**arguments(empty))
    assert len(launches) == 2


def bad(name: str, change: Callable[[Args], Args], error: type[Exception], *fragments: str) -> Any:
    """One malformed run: what is changed of good arguments, the error, and what its message names."""
    return pytest.param(change, error, fragments, id=name)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = BF16, offset: int = 0) -> torch.Tensor:
    return torch.zeros(1 << 16, dtype=dtype).as_strided(shape, strides, offset)


RUNS = [
    *[
        bad(f"{name} is {kind}", lambda a, n=name, v=value: {n: v}, InvalidArgument, name, kind, "tensor")
        for name in ("outs", "lses", "out", "lse")
        for kind, value in (("list", [1.0]), ("ndarray", np.zeros(3)), ("float", 1.0))
    ],
    *[bad(f"{name} is missing", lambda a, n=name: {n: None}, InvalidArgument, name, "NoneType") for name in ("outs", "lses")],
    *[
        bad(f"{name} is f16", lambda a, n=name: {n: a[n].to(F16)}, InvalidArgument, name, "torch.float16", "must be")
        for name in ("outs", "lses", "out", "lse")
    ],
    *[
        bad(f"{name} is elsewhere", lambda a, n=name: {n: a[n].to("meta")}, InvalidArgument, name, "meta", "cpu")
        for name in ("outs", "lses", "out", "lse")
    ],
    *[
        bad(f"{name} lacks a row", lambda a, n=name, x=axis: {n: a[n].narrow(x, 0, 3)}, InvalidProblem, f"{name}.shape", "[")
        for name, axis in (("outs", 1), ("lses", 1), ("out", 0), ("lse", 0))
    ],
    *[
        bad(f"{name} lacks a state", lambda a, n=name: {n: a[n][:2]}, InvalidProblem, f"{name}.shape", "num_states")
        for name in ("outs", "lses")
    ],
    *[
        bad(f"{name} has one axis more", lambda a, n=name: {n: a[n][None]}, InvalidProblem, f"{name}.shape")
        for name in ("outs", "lses", "out", "lse")
    ],
    bad("outs batch first", lambda a: {"outs": a["outs"].transpose(0, 1)}, InvalidProblem, "outs.shape", "(4, 3, 5, 64)"),
    bad(
        "outs columns apart", lambda a: {"outs": strided((3, 4, 5, 64), (2560, 640, 128, 2))}, Unsupported, "outs.stride", "last"
    ),
    bad("out columns apart", lambda a: {"out": strided((4, 5, 64), (640, 128, 2))}, Unsupported, "out.stride", "last"),
    bad(
        "outs rows odd",
        lambda a: {"outs": strided((3, 4, 5, 64), (1300, 325, 65, 1))},
        MisalignedOperand,
        "outs.stride",
        "4 bytes",
    ),
    bad("out rows odd", lambda a: {"out": strided((4, 5, 64), (325, 65, 1))}, MisalignedOperand, "out.stride", "4 bytes"),
    bad(
        "outs shifted",
        lambda a: {"outs": strided((3, 4, 5, 64), (1280, 320, 64, 1), offset=1)},
        MisalignedOperand,
        "outs.data_ptr",
    ),
    bad("out shifted", lambda a: {"out": strided((4, 5, 64), (320, 64, 1), offset=1)}, MisalignedOperand, "out.data_ptr"),
    bad("out is a state", lambda a: {"out": a["outs"][1]}, InvalidArgument, "out", "overlap outs"),
    bad("lse is a state's", lambda a: {"lse": a["lses"][0]}, InvalidArgument, "lse", "overlap lses"),
    bad("lse in out", lambda a: {"lse": a["out"].view(F32)[..., 0]}, InvalidArgument, "out", "overlap lse"),
    bad("out within itself", lambda a: {"out": strided((4, 5, 64), (0, 64, 1))}, InvalidArgument, "out", "share memory"),
    bad("lse within itself", lambda a: {"lse": a["lse"][:1].expand(4, 5)}, InvalidArgument, "lse", "share memory"),
    bad("a stream on the cpu", lambda a: {"stream": "default"}, InvalidArgument, "stream", "default"),
]


@pytest.mark.parametrize(("change", "error", "fragments"), RUNS)
def test_bad_operands_are_named_before_anything_is_written(
    change: Callable[[Args], Args], error: type[Exception], fragments: tuple[str, ...]
) -> None:
    plan, good = ck.MergeStatesPlan.select(D, "cpu"), arguments()
    args = {**good, **change(good)}
    before = [good[name].clone() for name in ("outs", "lses", "out", "lse")]
    for call in (plan.run, plan.can_implement):
        if call == plan.can_implement and args.pop("stream", None):
            continue
        with pytest.raises(error) as caught:
            call(**args)
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
        assert isinstance(caught.value, ck.CuteKernelsError)
    assert all(torch.equal(good[name], old) for name, old in zip(("outs", "lses", "out", "lse"), before, strict=True))


def test_a_checked_signature_is_remembered_and_a_changed_one_is_not() -> None:
    plan, args = ck.MergeStatesPlan.select(replace(D, num_states=2), "cpu"), arguments(replace(D, num_states=2))
    first = [x.clone() for x in plan.run(**args)]
    args["outs"].neg_()
    assert torch.equal(plan.run(**args)[0], -first[0])
    with pytest.raises(InvalidProblem, match=r"outs\.shape"):
        plan.run(**{**args, "outs": args["outs"][:1]})


def test_can_implement_takes_inputs_alone_and_outputs_are_allocated() -> None:
    plan, args = ck.MergeStatesPlan.select(D, "cpu"), arguments()
    plan.can_implement(args["outs"], args["lses"])
    out, lse = plan.run(args["outs"], args["lses"])
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (D.shape, BF16, D.shape[:2], F32)
    assert all(torch.equal(a, b) for a, b in zip((out, lse), plan.run(**args), strict=True))


def test_a_run_under_an_unknown_failure_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, args = ck.MergeStatesPlan.select(D, "cpu"), arguments()

    def refuse(*operands: object) -> None:
        raise RuntimeError("invalid configuration")

    monkeypatch.setattr(plan, "_launch", refuse)
    with pytest.raises(ck.LaunchFailed, match="cpu_reference on cpu: invalid configuration"):
        plan.run(**args)


@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_the_reference_in_f64(lse_base: str) -> None:
    outs, lses = torch.randn(5, 3, 2, 7, dtype=torch.float64), torch.randn(5, 3, 2, dtype=torch.float64) * 4
    out, lse = reference_merge(outs, lses, lse_base)
    mass = 2.0**lses if lse_base == "2" else lses.exp()
    assert torch.allclose(out, (mass[..., None] * outs).sum(0) / mass.sum(0)[..., None], rtol=1e-12)
    assert torch.allclose(lse, mass.sum(0).log2() if lse_base == "2" else mass.sum(0).log(), rtol=1e-12)


SINKS = replace(D, sinks=True)


@pytest.mark.parametrize(
    ("described", "sinks", "error", "message"),
    [
        (SINKS, None, InvalidArgument, "sinks: got NoneType, must be a tensor"),
        (SINKS, torch.zeros(4), InvalidProblem, r"sinks.shape = \(4,\): must be \[num_heads\] = \[5\]"),
        (SINKS, torch.zeros(5, dtype=torch.float64), InvalidArgument, "sinks: has dtype torch.float64, must be torch.float32"),
        (D, torch.zeros(5), InvalidArgument, "sinks: got Tensor, must be None: the descriptor has no sinks"),
    ],
)
def test_sinks_are_what_the_descriptor_says(
    described: ck.MergeStatesDescriptor, sinks: torch.Tensor | None, error: type[Exception], message: str
) -> None:
    args = arguments(described)
    with pytest.raises(error, match=message):
        ck.MergeStatesPlan.select(described, "cpu").run(**args, sinks=sinks)
    assert (args["out"] == 7).all() and (args["lse"] == 7).all()
