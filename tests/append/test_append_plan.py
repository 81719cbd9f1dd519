"""KVAppendPlan on the host: descriptors, the choice and its reasons, typed errors before anything is written; quantize_kv."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported
from cute_kernels.append import plan as append
from cute_kernels.append.variants import explain, kernel_spec
from cute_kernels.config.append import append_supports
from cute_kernels.planning.variants import PRETEND
from tests.support.choices import assert_first_that_serves
from tests.support.launches import recorded

F16, BF16, F32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int64
K, S = ck.KVDtype, ck.KVScale
TOKEN = {"k_scale": S.TOKEN_F16, "v_scale": S.TOKEN_F16}
PLAIN = {"k_scale": S.NONE, "v_scale": S.NONE}
D = ck.KVAppendDescriptor(6, 2, 64, 8, BF16, K.INT8, ck.KVLayout.NHD, **TOKEN)
COPY = replace(D, kv_dtype=None, **PLAIN)
STATIC = replace(D, kv_dtype=K.E4M3, k_scale=S.HEAD, v_scale=S.HEAD)
TENSOR = replace(STATIC, k_scale=S.TENSOR, v_scale=S.TENSOR)
Args = dict[str, Any]
NAMES = ("k", "v", "k_cache", "v_cache", "slots", "k_scale", "v_scale")


def arguments(d: ck.KVAppendDescriptor = D, pages: int = 4) -> Args:
    """Good arguments of `run`, what is written prefilled with 7."""
    inner = (d.page_size, d.num_kv_heads) if d.layout.order == "NHD" else (d.num_kv_heads, d.page_size)
    args: Args = {name: torch.randn(d.num_tokens, d.num_kv_heads, d.head_dim).to(d.dtype) for name in ("k", "v")}
    for name, stored in zip(("k_cache", "v_cache"), d.stored, strict=True):
        args[name] = torch.full((pages, *inner, d.head_dim), 7.0).to(stored.torch_dtype)
    args["slots"] = torch.arange(d.num_tokens).to(d.slot_dtype)
    for name, scale in zip(("k_scale", "v_scale"), d.scales, strict=True):
        args[name] = torch.full(scale.shapes(d.scale_axes(pages))[0], 7.0, dtype=scale.dtype) if scale else None
    return args


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[
            (name, value, InvalidProblem)
            for name in ("num_kv_heads", "head_dim", "page_size", "num_pages")
            for value in (0, -1, 2**31, 1.0, True)
        ],
        *[("num_tokens", value, InvalidProblem) for value in (-1, 2**31, "4", None)],
        *[(name, value, InvalidProblem) for name in ("dtype", "slot_dtype") for value in ("f16", None, K.F16)],
        *[("dtype", value, Unsupported) for value in (F32, torch.float64, torch.int8)],
        *[("slot_dtype", value, Unsupported) for value in (F32, torch.int16, torch.uint32)],
        *[(name, value, InvalidProblem) for name in ("kv_dtype", "v_dtype") for value in ("int8", torch.int8)],
        ("layout", "HND", InvalidProblem),
        *[(name, value, InvalidProblem) for name in ("k_scale", "v_scale") for value in ("token", None, 1)],
        *[("table_format", value, InvalidProblem) for value in ("paged", None, 1)],
        *[("rotary", value, InvalidProblem) for value in ("half", 64)],
        *[("alignment_bytes", value, InvalidProblem) for value in (0, 1, 3, 32, True)],
        *[("head_dim", value, Unsupported) for value in (257, 512)],
        ("num_tokens", 2**30, Unsupported),
    ],
)
def test_a_bad_descriptor_names_the_parameter_and_its_value(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=name) as caught:
        replace(D, **{name: value})
    shown = {2**30: f"{2**31:,}"}.get(value, str(value) if isinstance(value, torch.dtype) else repr(value))
    assert shown in str(caught.value)
    assert isinstance(caught.value, ck.CuteKernelsError)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (PLAIN, "k_scale = none.*int8"),
        ({"v_scale": S.NONE}, "v_scale = none.*int8"),
        ({"kv_dtype": K.BF16}, "k_scale = token f16.*bf16"),
        ({"v_dtype": K.BF16, "v_scale": S.HEAD}, "v_scale = head.*v_dtype = bf16"),
        ({"kv_dtype": K.F16, **PLAIN}, "kv_dtype = f16: must be dtype's, bf16"),
        ({"v_dtype": K.F16, "v_scale": S.NONE}, "v_dtype = f16: must be dtype's, bf16"),
        ({"kv_dtype": K.F32, **PLAIN}, "kv_dtype = f32"),
    ],
    ids=str,
)
def test_what_has_no_conversion_is_unsupported(changes: Args, match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        replace(D, **changes)


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({"kv_dtype": None, **PLAIN}, "kv_dtype = bf16"),
        ({"kv_dtype": K.BF16, "v_dtype": K.E4M3, **PLAIN}, "kv_dtype = bf16"),
        ({"kv_dtype": K.E4M3, "v_dtype": K.BF16, **PLAIN}, "v_dtype = bf16"),
    ],
    ids=str,
)
def test_an_alignment_below_an_element_is_refused(changes: Args, stored: str) -> None:
    """An 8-bit cache may be aligned to single bytes: kernels then move one column at a time."""
    rule = f"layout.alignment_bytes = 1: must be at least 2, the bytes of an element, where {stored}"
    with pytest.raises(InvalidProblem, match=rule):
        replace(D, layout=ck.KVLayout.HND.with_alignment(1), **changes)
    for kind in (K.E4M3, K.INT8):
        d = replace(D, kv_dtype=kind, layout=ck.KVLayout.HND.with_alignment(1))
        assert [explain(d, PRETEND[name]).chosen.spec.columns for name in ("h200", "a100")] == [1, 1]
        assert explain(d, PRETEND["cpu"]).chosen.variant == "cpu_reference"


def test_extents_come_before_dtypes() -> None:
    with pytest.raises(InvalidProblem, match="page_size"):
        replace(D, page_size=0, dtype=F32, head_dim=512)


def test_descriptors_are_frozen_keys() -> None:
    assert replace(D) == D and hash(replace(D)) == hash(D) != hash(replace(D, k_scale=S.HEAD))
    assert COPY.kv_dtype is K.BF16 and replace(COPY, kv_dtype=K.BF16) == COPY
    with pytest.raises(FrozenInstanceError):
        D.num_tokens = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "columns", "lanes", "rounds"),
    [
        ({}, 8, 8, 1),
        ({"head_dim": 128}, 8, 16, 1),
        ({"head_dim": 256}, 8, 32, 1),
        ({"head_dim": 80}, 8, 16, 1),
        ({"head_dim": 252}, 4, 32, 2),
        ({"head_dim": 255}, 1, 32, 8),
        ({"head_dim": 1}, 1, 1, 1),
        ({"alignment_bytes": 4}, 2, 32, 1),
        ({"layout": ck.KVLayout("HND", 2)}, 2, 32, 1),
        ({"layout": ck.KVLayout("HND", 2), "kv_dtype": K.BF16, **PLAIN}, 1, 32, 2),
    ],
    ids=str,
)
def test_a_load_is_as_wide_as_the_alignment_allows(changes: Args, columns: int, lanes: int, rounds: int) -> None:
    spec = kernel_spec(replace(D, **changes), "sm90", "sm_90a")
    assert (spec.columns, spec.lanes, spec.rounds) == (columns, lanes, rounds)
    assert spec.lanes * spec.rounds >= spec.pieces and spec.row_groups * spec.lanes == 128
    assert append_supports(spec) == []


@pytest.mark.parametrize("change", [{"columns": 3}, {"columns": 16}, {"head_dim": 264}, {"target": "sm_80"}])
def test_supports_gives_its_reason(change: dict[str, Any]) -> None:
    assert len(append_supports(replace(kernel_spec(D, "sm90", "sm_90a"), **change))) == 1


@pytest.mark.parametrize(
    ("gpu", "chosen"), [("h200", "sm90_append"), ("a100", "sm80_append"), ("l40s", "sm80_append"), ("cpu", "cpu_reference")]
)
def test_the_first_variant_that_serves_is_chosen(gpu: str, chosen: str) -> None:
    assert_first_that_serves(explain(D, PRETEND[gpu]), "append", chosen, "append of 6 tokens")


def test_a_preference_is_followed_or_refused() -> None:
    forced = explain(D, PRETEND["h200"], ck.PlanPreference(arch="sm80"))
    assert [c.verdict for c in forced.candidates] == ["excluded", "chosen", "excluded"]
    with pytest.raises(Unsupported, match=r"needs a CUDA device of capability 9\.0"):
        ck.KVAppendPlan.select(D, "cpu", ck.PlanPreference(arch="sm90"))


def test_no_more_sms_than_the_devices() -> None:
    assert ck.KVAppendPlan.select(D, "cpu", ck.PlanPreference(sm_count=1)).sm_count == 1
    with pytest.raises(InvalidArgument, match="sm_count: got 2, must be at most 1, the SMs of cpu"):
        ck.KVAppendPlan.select(D, "cpu", ck.PlanPreference(sm_count=2))


def test_what_a_plan_says_of_itself() -> None:
    plan = ck.KVAppendPlan.select(D, "cpu")
    assert plan is ck.KVAppendPlan.select(replace(D), "cpu")
    assert plan.descriptor == D and plan.workspace_size() == 0 and plan.status() is None
    assert (plan.sku.operation, plan.sku.kv_dtype, plan.sku.arch) == ("kv_append", "int8", "cpu")


@pytest.mark.parametrize("bad", [None, "D", 3])
def test_select_takes_its_own_descriptor(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a KVAppendDescriptor"):
        ck.KVAppendPlan.select(bad, "cpu")


@pytest.mark.parametrize("d", [D, COPY, STATIC, TENSOR], ids=str)
def test_the_kernel_is_given_the_operands_as_they_are(d: ck.KVAppendDescriptor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200: one launch a run, none without tokens; fp8 caches as bytes."""
    specs, launches = recorded(monkeypatch, append)
    plan, args = ck.KVAppendPlan(d, torch.device("cpu"), ck.PlanPreference()), arguments(d)
    assert specs == [kernel_spec(d, "sm90", "sm_90a")] == [plan.sku.config] and plan.sku.arch == "sm90a"
    for _ in range(2):
        plan.run(**args)
    for *given, status in launches:
        assert [x.data_ptr() for x in given if x is not None] == [x.data_ptr() for x in args.values() if x is not None]
        assert [x is None for x in given[4:]] == [False, True, True, d is COPY, d is COPY, True, True, True, True]
        assert status == plan._words.data_ptr()
        assert given[2].dtype == (torch.uint8 if d.kv_dtype is K.E4M3 else d.stored[0].torch_dtype)
    plan.run(**{**args, **{name: args[name][:0] for name in ("k", "v", "slots")}})
    assert len(launches) == 2


def bad(name: str, change: Callable[[Args], Args], error: type[Exception], *fragments: str, d: Any = D) -> Any:
    """One malformed run: what is changed of good arguments, the error, and what its message names."""
    return pytest.param(d, change, error, fragments, id=name)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = BF16, offset: int = 0) -> torch.Tensor:
    return torch.zeros(1 << 16, dtype=dtype).as_strided(shape, strides, offset)


RUNS = [
    *[
        bad(f"{name} is {kind}", lambda a, n=name, v=value: {n: v}, InvalidArgument, name, kind, "tensor")
        for name in NAMES
        for kind, value in (("list", [1.0]), ("ndarray", np.zeros(3)), ("NoneType", None))
    ],
    *[
        bad(f"{name} is f64", lambda a, n=name: {n: a[n].double()}, InvalidArgument, name, "torch.float64", "must be")
        for name in NAMES
    ],
    *[
        bad(f"{name} is elsewhere", lambda a, n=name: {n: a[n].to("meta")}, InvalidArgument, name, "meta", "cpu")
        for name in NAMES
    ],
    *[bad(f"{name} has one axis more", lambda a, n=name: {n: a[n][None]}, InvalidProblem, f"{name}.shape") for name in NAMES],
    *[
        bad(f"{name} lacks a head", lambda a, n=name, x=axis: {n: a[n].narrow(x, 0, 1)}, InvalidProblem, f"{name}.shape")
        for name, axis in (("k", 1), ("v", 1), ("k_cache", 2), ("v_cache", 2), ("k_scale", 2), ("v_scale", 2))
    ],
    *[
        bad(f"{name} lacks a token", lambda a, n=name: {n: a[n][:5]}, InvalidProblem, f"{m}.shape")
        for name, m in (("v", "v"), ("slots", "slots"), ("k", "v"))
    ],
    *[
        bad(f"{name} lacks a page", lambda a, n=name: {n: a[n][:3]}, InvalidProblem, f"{m}.shape")
        for name, m in (("v_cache", "v_cache"), ("k_cache", "v_cache"), ("k_scale", "k_scale"))
    ],
    bad("more tokens", lambda a: {"k": a["k"].repeat(2, 1, 1)}, InvalidProblem, "k.shape", "num_tokens = 6"),
    bad("a flat scale too short", lambda a: {"v_scale": a["v_scale"].flatten()[1:]}, InvalidProblem, "v_scale.shape", "64"),
    bad("HND caches", lambda a: {"k_cache": a["k_cache"].transpose(1, 2)}, InvalidProblem, "k_cache.shape", "page_size"),
    bad("another num_pages", lambda a: {}, InvalidProblem, "k_cache.shape", "num_pages", "5", d=replace(D, num_pages=5)),
    bad("k columns apart", lambda a: {"k": strided((6, 2, 64), (256, 128, 2))}, Unsupported, "k.stride", "last"),
    bad("k rows odd", lambda a: {"k": strided((6, 2, 64), (130, 65, 1))}, MisalignedOperand, "k.stride", "16 bytes"),
    bad("v shifted", lambda a: {"v": strided((6, 2, 64), (128, 64, 1), offset=1)}, MisalignedOperand, "v.data_ptr"),
    bad(
        "cache rows odd",
        lambda a: {"v_cache": strided((4, 8, 2, 64), (1040, 130, 65, 1), torch.int8)},
        MisalignedOperand,
        "v_cache.stride",
        "8 bytes",
    ),
    bad("one cache for both", lambda a: {"v_cache": a["k_cache"]}, InvalidArgument, "k_cache", "v_cache", "memory of its own"),
    bad(
        "caches that meet",
        lambda a: {"k_cache": (pool := strided((5, 8, 2, 64), (1024, 128, 64, 1), torch.int8))[1:], "v_cache": pool[:4]},
        InvalidArgument,
        "k_cache",
        "v_cache",
    ),
    bad("one scale for both", lambda a: {"v_scale": a["k_scale"]}, InvalidArgument, "k_scale", "v_scale"),
    bad("a cache within itself", lambda a: {"k_cache": a["k_cache"][:1].expand(4, 8, 2, 64)}, InvalidArgument, "share memory"),
    bad("a scale within itself", lambda a: {"k_scale": a["k_scale"][:1].expand(4, 8, 2)}, InvalidArgument, "share memory"),
    bad("k in its cache", lambda a: {"k": a["k_cache"].view(BF16)[:3].view(6, -1, 64)[:, :2]}, InvalidArgument, "k_cache"),
    bad("a scale that is not asked for", lambda a: {"k_scale": torch.ones(1)}, InvalidArgument, "k_scale", "no k_scale", d=COPY),
    bad("a scale of f16", lambda a: {"k_scale": torch.ones(2, dtype=F16)}, InvalidArgument, "k_scale", "float32", d=STATIC),
    bad("a scale too many", lambda a: {"v_scale": torch.ones(3)}, InvalidProblem, "v_scale.shape", "num_kv_heads", d=STATIC),
    bad("two scales", lambda a: {"v_scale": torch.ones(2)}, InvalidProblem, "must be [] or [1]", d=TENSOR),
    bad("an fp8 cache of int8", lambda a: {"k_cache": a["k_cache"].view(torch.int8)}, InvalidArgument, "float8", d=STATIC),
    bad("a stream on the cpu", lambda a: {"stream": "default"}, InvalidArgument, "stream", "default"),
]


@pytest.mark.parametrize(("d", "change", "error", "fragments"), RUNS)
def test_bad_operands_are_named_before_anything_is_written(
    d: ck.KVAppendDescriptor, change: Callable[[Args], Args], error: type[Exception], fragments: tuple[str, ...]
) -> None:
    plan, good = ck.KVAppendPlan.select(d, "cpu"), arguments(replace(d, num_pages=None))
    args = {**good, **change(good)}
    tensors = [tensor for tensor in good.values() if tensor is not None]
    before = [tensor.clone() for tensor in tensors]
    for call in (plan.run, plan.can_implement):
        if call == plan.can_implement and args.pop("stream", None):
            continue
        with pytest.raises(error) as caught:
            call(**args)
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
        assert isinstance(caught.value, ck.CuteKernelsError)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(tensors, before, strict=True))


def test_a_cache_of_more_slots_than_int32_counts_is_unsupported() -> None:
    d = ck.KVAppendDescriptor(1, 1, 1, 2**30, F16)
    cache = torch.empty(1, dtype=F16).expand(3, 1, 2**30, 1)
    with pytest.raises(Unsupported, match=r"must be at most 2\*\*31 - 1 slots"):
        ck.KVAppendPlan.select(d, "cpu").run(torch.ones(1, 1, 1).half(), torch.ones(1, 1, 1).half(), cache, cache, torch.zeros(1))


def test_a_run_under_an_unknown_failure_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ck.KVAppendPlan.select(D, "cpu")

    def refuse(*operands: object) -> None:
        raise RuntimeError("invalid configuration")

    monkeypatch.setattr(plan, "_launch", refuse)
    with pytest.raises(ck.LaunchFailed, match="cpu_reference on cpu: invalid configuration"):
        plan.run(**arguments())


def test_quantize_kv() -> None:
    x = torch.tensor([[[0.0, -1.0, 254.0, 3.0]], [[0.0, 0.0, 0.0, 0.0]]], dtype=F16)
    stored, scale = ck.quantize_kv(x, K.INT8, S.TOKEN_F16)
    assert stored.dtype == torch.int8 and stored.flatten().tolist() == [0, 0, 127, 2, 0, 0, 0, 0]
    assert scale is not None and scale.dtype == F16 and scale.flatten().tolist() == [2.0, 2.0**-24], "-1 / 2 goes to even"
    stored, scale = ck.quantize_kv(x, K.E4M3, S.HEAD, scale=torch.tensor([0.5]))
    assert stored.dtype == torch.float8_e4m3fn and stored.float().flatten().tolist()[:4] == [0.0, -2.0, 448.0, 6.0]
    assert scale is not None and scale.tolist() == [0.5]
    stored, scale = ck.quantize_kv(x, K.E5M2)
    assert scale is None and stored.float().flatten().tolist()[:4] == [0.0, -1.0, 256.0, 3.0]
    stored, scale = ck.quantize_kv(x, K.F16)
    assert scale is None and torch.equal(stored, x) and stored.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("kv_dtype", "arguments", "error", "match"),
    [
        (K.INT8, {}, Unsupported, "int8"),
        (K.BF16, {}, Unsupported, "kv_dtype = bf16"),
        (K.F16, {"kv_scale": S.HEAD}, Unsupported, "kv_dtype = f16"),
        (K.E4M3, {"kv_scale": S.HEAD}, InvalidArgument, "scale: is None"),
        (K.E4M3, {"kv_scale": S.TOKEN, "scale": torch.ones(1)}, InvalidArgument, "scale: is given"),
        (K.E4M3, {"scale": torch.ones(1)}, InvalidArgument, "scale: is given"),
        (
            K.E4M3,
            {"kv_scale": S.HEAD, "scale": torch.ones(5)},
            InvalidProblem,
            r"scale\.shape = \(5,\): must be \[num_kv_heads\] = \[2\]",
        ),
        (K.E4M3, {"kv_scale": S.HEAD, "scale": torch.ones(1)}, InvalidProblem, r"scale\.shape = \(1,\)"),
        (K.E4M3, {"kv_scale": S.TENSOR, "scale": torch.ones(2)}, InvalidProblem, r"scale\.shape = \(2,\): must be \[\] or \[1\]"),
        (K.E4M3, {"kv_scale": S.HEAD, "scale": [0.5, 1.0]}, InvalidArgument, "scale: got list, must be a tensor"),
        (
            K.E4M3,
            {"kv_scale": S.HEAD, "scale": torch.ones(2, device="meta")},
            InvalidArgument,
            "scale: is on meta, must be on x's",
        ),
        (K.E4M3, {"kv_scale": "head"}, InvalidProblem, "kv_scale = 'head': must be a KVScale"),
        ("e4m3", {}, InvalidProblem, "kv_dtype = 'e4m3': must be a KVDtype"),
        (K.E4M3, {"x": np.zeros((2, 4))}, InvalidArgument, "x: got ndarray, must be a tensor"),
        (
            K.E4M3,
            {"x": torch.ones(3, 2, 4)},
            InvalidArgument,
            "x: has dtype torch.float32, must be torch.float16 or torch.bfloat16",
        ),
        (
            K.E4M3,
            {"x": torch.ones(4, dtype=F16)},
            InvalidProblem,
            r"x\.shape = \(4,\): must be \[\.\.\., num_kv_heads, head_dim\]",
        ),
        (K.E4M3, {"x": torch.ones(2, 0, dtype=F16)}, InvalidProblem, r"x\.shape = \(2, 0\)"),
        (K.E4M3, {"kv_scale": S.HEAD, "scale": torch.ones(1).half()}, InvalidArgument, "float16"),
    ],
    ids=str,
)
def test_quantize_kv_names_what_it_lacks(kv_dtype: Any, arguments: Args, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        ck.quantize_kv(**{"x": torch.ones(3, 2, 4, dtype=F16), "kv_dtype": kv_dtype, **arguments})
    assert isinstance(caught.value, ck.CuteKernelsError)
