"""Scale tensors and 8-bit caches as `run`, `can_implement`, `decode_attention` and the torch ops take and refuse them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, MisalignedOperand
from cute_kernels.attention import checks
from tests.support.inputs import Shape, make_operands

E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
NONE, TENSOR, HEAD, TOKEN, TOKEN_F16 = (getattr(ck.KVScale, name) for name in ("NONE", "TENSOR", "HEAD", "TOKEN", "TOKEN_F16"))
F16, F32, U8 = torch.float16, torch.float32, torch.uint8
CASE = Shape(lengths=(0, 5, 40, 17), head_dim=64, name="scales")
POOL = (9, 16, 2)  # pages, page_size and KV heads of the case
Args = dict[str, Any]


def plan_of(kv_dtype: ck.KVDtype | None, k_scale: ck.KVScale = NONE, v_scale: ck.KVScale = NONE) -> ck.PagedDecodePlan:
    """A plan for CASE with other caches."""
    descriptor = replace(CASE.descriptor(), kv_dtype=kv_dtype or ck.KVDtype.BF16, k_scale=k_scale, v_scale=v_scale)
    return ck.PagedDecodePlan.select(descriptor, "cpu")


def scales(scale: ck.KVScale, value: float = 0.5) -> torch.Tensor | None:
    """Scales of that kind for CASE."""
    shape = {"none": None, "tensor": (1,), "head": (2,), "token": POOL}[scale.granularity]
    return None if shape is None else torch.full(shape, value, dtype=scale.dtype)


def arguments(kv_dtype: ck.KVDtype | None, k_scale: ck.KVScale = NONE, v_scale: ck.KVScale = NONE) -> Args:
    """Good arguments of run."""
    inputs = make_operands(CASE, dead=0.0)
    dtype = kv_dtype.torch_dtype if kv_dtype else torch.bfloat16
    caches = {name: getattr(inputs, name).mul(3).to(dtype) for name in ("k_cache", "v_cache")}
    written = {"out": torch.full_like(inputs.q, 7.0), "lse": torch.full((4, 8), 7.0)}
    return {**inputs._asdict(), **caches, "k_scale": scales(k_scale), "v_scale": scales(v_scale), **written}


def test_the_case_has_this_pool() -> None:
    k = make_operands(CASE).k_cache
    assert (k.shape[0], k.shape[2], k.shape[1]) == POOL


def misaligned(shape: tuple[int, ...]) -> torch.Tensor:
    """f32 one byte past where an f32 may be."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(bytearray(4 * count + 8), dtype=F32, offset=1, count=count).view(shape)


SCALES = [
    (NONE, torch.ones(1), InvalidArgument, ("got Tensor", "must be None")),
    (NONE, 1.0, InvalidArgument, ("got float", "must be None")),
    *[(scale, None, InvalidArgument, ("got NoneType", "must be a tensor")) for scale in (TENSOR, HEAD, TOKEN, TOKEN_F16)],
    (TENSOR, 0.5, InvalidArgument, ("got float", "must be a tensor")),
    (TENSOR, torch.ones(2), InvalidProblem, ("shape = (2,)", "[] or [1]", "per tensor")),
    (TENSOR, torch.ones(1, 1), InvalidProblem, ("shape = (1, 1)", "[] or [1]")),
    (TENSOR, torch.ones(1, dtype=F16), InvalidArgument, ("torch.float16", "torch.float32")),
    (HEAD, torch.ones(8), InvalidProblem, ("shape = (8,)", "[num_kv_heads] = [2]", "per head")),
    (HEAD, torch.ones(()), InvalidProblem, ("shape = ()", "[num_kv_heads] = [2]")),
    (HEAD, torch.ones(POOL), InvalidProblem, ("shape = (9, 16, 2)", "[num_kv_heads] = [2]")),
    (HEAD, torch.ones(2, dtype=torch.float64), InvalidArgument, ("torch.float64", "torch.float32")),
    (TOKEN, torch.ones(9, 2, 16), InvalidProblem, ("shape = (9, 2, 16)", "[num_pages, page_size, num_kv_heads] = [9, 16, 2]")),
    (TOKEN, torch.ones(8, 16, 2), InvalidProblem, ("shape = (8, 16, 2)", "[9, 16, 2], or [288]")),
    (TOKEN, torch.ones(287), InvalidProblem, ("shape = (287,)", "or [288]", "per token")),
    (TOKEN, torch.ones(2), InvalidProblem, ("shape = (2,)", "[9, 16, 2]")),
    (TOKEN, torch.ones(POOL, dtype=F16), InvalidArgument, ("torch.float16", "torch.float32")),
    (TOKEN_F16, torch.ones(POOL), InvalidArgument, ("torch.float32", "torch.float16")),
    (TOKEN_F16, torch.ones(POOL, dtype=torch.bfloat16), InvalidArgument, ("torch.bfloat16", "torch.float16")),
    *[(s, torch.ones(1, device="meta"), InvalidArgument, ("meta", "plan's device, cpu")) for s in (TENSOR, HEAD, TOKEN)],
    (HEAD, misaligned((2,)), MisalignedOperand, ("data_ptr", "multiple of 4")),
]


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("scale", "value", "error", "fragments"), SCALES, ids=lambda value: str(value)[:20])
def test_bad_scales(scale: ck.KVScale, value: object, error: type[Exception], fragments: tuple[str, ...], name: str) -> None:
    plan, good = plan_of(INT8, **{name: scale}), arguments(INT8, **{name: scale})
    with pytest.raises(error) as caught:
        plan.run(**{**good, name: value})
    assert all(fragment in str(caught.value) for fragment in (name, *fragments)), str(caught.value)
    assert (good["out"] == 7).all() and (good["lse"] == 7).all()
    with pytest.raises(error):
        plan.can_implement(**{**good, name: value})
    plan.can_implement(**good)
    plan.run(**good)


CACHES = [
    (E4M3, lambda k: k.view(torch.float8_e5m2), ("torch.float8_e5m2", "torch.float8_e4m3fn or torch.uint8")),
    (E5M2, lambda k: k.view(torch.float8_e4m3fn), ("torch.float8_e4m3fn", "torch.float8_e5m2 or torch.uint8")),
    (E4M3, lambda k: k.view(torch.int8), ("torch.int8", "torch.float8_e4m3fn or torch.uint8")),
    (INT8, lambda k: k.view(U8), ("torch.uint8", "torch.int8")),
    (INT8, lambda k: k.view(torch.float8_e4m3fn), ("torch.float8_e4m3fn", "torch.int8")),
    (INT8, lambda k: k.to(torch.bfloat16), ("torch.bfloat16", "torch.int8")),
    (None, lambda k: k.to(U8), ("torch.uint8", "torch.bfloat16")),
]


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize(("kv_dtype", "change", "fragments"), CACHES)
def test_a_cache_that_contradicts_its_encoding(
    kv_dtype: ck.KVDtype | None, change: Callable, fragments: tuple[str, ...], name: str
) -> None:
    plan, good = plan_of(kv_dtype), arguments(kv_dtype)
    with pytest.raises(InvalidArgument) as caught:
        plan.run(**{**good, name: change(good[name])})
    assert all(fragment in str(caught.value) for fragment in (name, *fragments)), str(caught.value)
    plan.run(**good)


def test_out_may_not_overlap_a_scale() -> None:
    plan, good = plan_of(None, k_scale=TOKEN_F16), arguments(None, k_scale=TOKEN_F16)
    good["k_scale"] = torch.ones(4 * 8 * 64, dtype=F16)[: 9 * 16 * 2]
    with pytest.raises(InvalidArgument, match=r"out: .* overlap k_scale's"):
        plan.run(**{**good, "out": good["k_scale"].as_strided((4, 8, 64), (512, 64, 1)).view(torch.bfloat16)})


def test_scales_of_an_empty_pool() -> None:
    plan, good = plan_of(INT8, HEAD, TOKEN), arguments(INT8, HEAD, TOKEN)
    good |= {name: good[name][:0] for name in ("k_cache", "v_cache", "v_scale")}
    for v_scale in (good["v_scale"], good["v_scale"].view(-1)):
        out, lse = plan.run(**{**good, "v_scale": v_scale})
        assert not out.any() and torch.isneginf(lse).all()
    empty = ck.FlashDecodingDescriptor(2, 8, 2, 0, 64, F16, kv_dtype=INT8, k_scale=TOKEN)
    cache = torch.zeros(2, 2, 0, 64, dtype=torch.int8)
    out, lse = ck.FlashDecodingPlan.select(empty, "cpu").run(
        torch.ones(2, 8, 64).half(), cache, cache, k_scale=torch.ones(2, 2, 0)
    )
    assert not out.any() and torch.isneginf(lse).all()


def test_scales_of_a_contiguous_cache() -> None:
    """[batch, num_kv_heads, seq_len], never flat."""
    descriptor = ck.FlashDecodingDescriptor(3, 8, 2, 10, 64, F16, kv_dtype=INT8, k_scale=TOKEN, v_scale=HEAD)
    plan = ck.FlashDecodingPlan.select(descriptor, "cpu")
    cache = torch.ones(3, 2, 10, 64, dtype=torch.int8)
    good = {"q": torch.ones(3, 8, 64).half(), "k": cache, "v": cache.clone(), "k_scale": torch.ones(3, 2, 10)}
    good["v_scale"] = torch.tensor([2.0, 3.0])
    out, _ = plan.run(**good)
    assert torch.equal(out[0, :, 0], torch.tensor([2.0] * 4 + [3.0] * 4).half())
    for bad in (torch.ones(3, 10, 2), torch.ones(60)):
        with pytest.raises(InvalidProblem, match=r"\[batch_size, num_kv_heads, seq_len\] = \[3, 2, 10\]"):
            plan.run(**{**good, "k_scale": bad})


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("flat", [False, True])
def test_what_a_kernel_is_given(pretend_h200: list, layout: str, flat: bool) -> None:
    """fp8 as HND bytes, scales in one shape, the same memory; from the first run to the shortcut."""
    descriptor = replace(CASE.descriptor(), kv_dtype=E4M3, layout=ck.KVLayout(layout), k_scale=TENSOR, v_scale=TOKEN_F16)
    plan, good = ck.PagedDecodePlan.select(descriptor, "cpu"), arguments(E4M3, TENSOR, TOKEN_F16)
    if layout == "NHD":
        good |= {name: good[name].transpose(1, 2).contiguous() for name in ("k_cache", "v_cache")}
    if flat:
        good |= {"k_scale": good["k_scale"][0], "v_scale": good["v_scale"].view(-1)}
    good["workspace"] = plan.new_workspace()
    for _ in range(4):
        plan.run(**good)
    assert len(pretend_h200) == 4 and len(plan._shortcuts) == 1
    for launched in pretend_h200:
        k, v, k_scale, v_scale = (torch.from_dlpack(launched[i]) for i in (1, 2, 6, 7))
        assert (k.dtype, tuple(k.shape[1:]), v.dtype, tuple(v.shape[1:])) == (U8, (2, 16, 64), U8, (2, 16, 64))
        assert (tuple(k_scale.shape), tuple(v_scale.shape)) == ((1,), POOL)
        for given, name in ((k, "k_cache"), (v, "v_cache"), (k_scale, "k_scale"), (v_scale, "v_scale")):
            assert given.data_ptr() == good[name].data_ptr()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, computing_h200: None) -> tuple[ck.PagedDecodePlan, Args, list[object]]:
    """A plan whose next run with these arguments takes the shortcut, and the runs that do not."""
    plan, good, checked = plan_of(INT8, HEAD, TOKEN), arguments(INT8, HEAD, TOKEN), []
    good["workspace"] = plan.new_workspace()
    real = checks.Operands.signature
    monkeypatch.setattr(checks.Operands, "signature", lambda operands: (checked.append(operands), real(operands))[1])
    for _ in range(2):
        plan.run(**good)
    checked.clear()
    plan.run(**good)
    assert checked == []
    return plan, good, checked


def test_a_shortcut_reads_what_the_scales_hold(settled: tuple[ck.PagedDecodePlan, Args, list[object]]) -> None:
    plan, good, checked = settled
    good["k_scale"].fill_(0.01)
    good["v_scale"].fill_(3.0)
    plan.run(**good)
    assert checked == []
    fresh = {**good, "out": None, "lse": None, "q": good["q"].clone()}
    assert all(torch.equal(a, b) for a, b in zip(plan.run(**fresh), (good["out"], good["lse"]), strict=True))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dead", [False, True], ids=["alive", "dead"])
def test_other_scales_are_checked(settled: tuple[ck.PagedDecodePlan, Args, list[object]], name: str, dead: bool) -> None:
    plan, good, checked = settled
    kept = None if dead else good[name]
    other = good[name].clone()
    for value in (None, 1.0, [1.0]):
        good[name] = value
        gc.collect()
        with pytest.raises(InvalidArgument, match=name):
            plan.run(**good)
    checked.clear()
    plan.run(**{**good, name: other})
    assert len(checked) == 1
    if kept is not None:
        moved = kept.clone()
        kept.set_(moved[:1])
        with pytest.raises(InvalidProblem, match=name):
            plan.run(**{**good, name: kept})


def test_superfluous_scales_are_seen_by_a_shortcut(pretend_h200: list) -> None:
    plan, good = plan_of(INT8), arguments(INT8)
    good["workspace"] = plan.new_workspace()
    for _ in range(3):
        plan.run(**good)
    assert len(plan._shortcuts) == 1
    for name in ("k_scale", "v_scale"):
        with pytest.raises(InvalidArgument, match=f"{name}: got Tensor, must be None"):
            plan.run(**{**good, name: torch.ones(1)})


def test_no_scale_is_kept_alive(settled: tuple[ck.PagedDecodePlan, Args, list[object]]) -> None:
    _, good, checked = settled
    references = [weakref.ref(good.pop(name)) for name in ("k_scale", "v_scale")]
    checked.clear()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("kv_dtype", [None, E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("scale", [NONE, TENSOR, HEAD, TOKEN, TOKEN_F16], ids=str)
def test_decode_attention_equals_theplan_of(kv_dtype: ck.KVDtype | None, scale: ck.KVScale) -> None:
    """The kind of scale comes from the tensor; the encoding from the cache's dtype, or from kv_dtype for bytes."""
    good = arguments(kv_dtype, scale, scale)
    expected = plan_of(kv_dtype, scale, scale).run(**good)
    got = ck.decode_attention(**{**good, "out": None, "lse": None})
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    flat = {name: good[name].view(-1) if scale.granularity == "token" else good[name] for name in ("k_scale", "v_scale")}
    got = ck.decode_attention(**{**good, **flat, "out": None, "lse": None}, kv_dtype=kv_dtype)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if kv_dtype is not None and kv_dtype.is_float8:
        as_bytes = {name: good[name].view(U8) for name in ("k_cache", "v_cache")}
        got = ck.decode_attention(**{**good, **as_bytes, "out": None, "lse": None}, kv_dtype=kv_dtype)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_decode_attention_over_different_caches() -> None:
    good = arguments(INT8)
    good |= {"v_cache": arguments(E4M3)["v_cache"], "k_scale": torch.tensor(0.25)}
    descriptor = replace(CASE.descriptor(), kv_dtype=INT8, v_dtype=E4M3, k_scale=TENSOR)
    expected = ck.PagedDecodePlan.select(descriptor, "cpu").run(**{**good, "out": None, "lse": None})
    got = ck.decode_attention(**good)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(InvalidArgument, match=r"v_cache: has dtype torch\.float8_e4m3fn, must be torch\.int8"):
        ck.decode_attention(**good, kv_dtype=INT8)


def test_decode_attention_over_a_contiguous_nhd_cache() -> None:
    """Scales per token have the cache's axes."""
    q, cache = torch.randn(2, 8, 64), torch.randint(-127, 128, (2, 2, 33, 64), dtype=torch.int8)
    scale = torch.rand(2, 2, 33) / 40
    expected = ck.decode_attention(q, cache, cache, k_scale=scale, v_scale=scale)
    swapped = scale.transpose(1, 2)
    got = ck.decode_attention(q, *[cache.transpose(1, 2)] * 2, k_scale=swapped, v_scale=swapped, layout="NHD")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.isfinite(expected[0]).all()


def test_an_odd_stride_of_an_8_bit_cache_is_served() -> None:
    good = arguments(INT8)
    expected = ck.decode_attention(**good)
    wide = torch.zeros(9, 2, 16, 65, dtype=torch.int8)
    wide[..., :64] = good["k_cache"]
    got = ck.decode_attention(**{**good, "k_cache": wide[..., :64], "out": None, "lse": None})
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_compiles_as_one_graph_with_scales() -> None:
    good = arguments(E4M3, HEAD, TOKEN_F16)
    table, seq_lens, _ = good.pop("page_table").operands
    good |= {"out": None, "lse": None}

    def layer(k_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        others = {name: value for name, value in good.items() if name != "k_cache"}
        return ck.decode_attention(k_cache=k_cache, **others, page_table=table, seq_lens=seq_lens, kv_dtype=E4M3)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, expected = compiled(good["k_cache"].view(U8)), layer(good["k_cache"].view(U8))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
