"""8-bit caches and scales against f64 on what they stand for, poisoned, strided, and by the two systems' own tolerances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode.harness import (
    BACKENDS,
    Inputs,
    Shape,
    assert_bitwise,
    assert_close,
    attend,
    device_of,
    make_inputs,
    poison,
    run,
    select,
)

import cute_kernels as ck

E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
NONE, TENSOR, HEAD, TOKEN, TOKEN_F16 = (getattr(ck.KVScale, name) for name in ("NONE", "TENSOR", "HEAD", "TOKEN", "TOKEN_F16"))
SHORT = (0, 1, 17, 64, 129)
PLACES = {
    "HND dense": {"order": "HND", "lengths": SHORT},
    "HND csr": {"order": "HND", "table_format": "csr", "lengths": SHORT},
    "NHD dense": {"order": "NHD", "lengths": SHORT},
    "NHD csr": {"order": "NHD", "table_format": "csr", "lengths": SHORT},
    "contiguous": {"page_size": 0, "lengths": (129,) * 3},
}

backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=lambda d: d.value)
scales = pytest.mark.parametrize("scale", [NONE, TENSOR, HEAD, TOKEN, TOKEN_F16], ids=str)
places = pytest.mark.parametrize("place", PLACES)


def shape_of(place: str, kv_dtype: ck.KVDtype | None, k_scale: ck.KVScale, v_scale: ck.KVScale, **changes: object) -> Shape:
    """A small shape at a place, with these caches."""
    return Shape(**{"head_dim": 64, **PLACES[place], **changes}, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale)


def check(shape: Shape, backend: str) -> None:
    inputs = make_inputs(shape, device_of(backend))
    assert_close(inputs, *run(select(shape, backend), inputs))


@backends
@places
@scales
@dtypes
def test_every_dtype_and_scale_everywhere(kv_dtype: ck.KVDtype, scale: ck.KVScale, place: str, backend: str) -> None:
    check(shape_of(place, kv_dtype, scale, scale), backend)


@backends
@pytest.mark.parametrize("v_scale", [NONE, TENSOR, HEAD, TOKEN, TOKEN_F16], ids=str)
@pytest.mark.parametrize("k_scale", [NONE, TENSOR, HEAD, TOKEN, TOKEN_F16], ids=str)
def test_k_and_v_are_scaled_independently(k_scale: ck.KVScale, v_scale: ck.KVScale, backend: str) -> None:
    check(shape_of("NHD dense", INT8, k_scale, v_scale), backend)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize(("kv_dtype", "v_dtype"), [(INT8, E4M3), (E4M3, INT8), (E5M2, E4M3), (INT8, None), (None, E4M3)], ids=str)
def test_k_and_v_are_stored_independently(kv_dtype: ck.KVDtype | None, v_dtype: object, dtype: torch.dtype, backend: str) -> None:
    """None: as q."""
    own = ck.KVDtype.F16 if dtype == torch.float16 else ck.KVDtype.BF16
    shape = shape_of("HND csr", kv_dtype or own, HEAD, TOKEN_F16, v_dtype=v_dtype or own, dtype=dtype)
    check(shape, backend)


@backends
@scales
@places
def test_16_bit_caches_take_scales(place: str, scale: ck.KVScale, backend: str) -> None:
    check(shape_of(place, None, scale, scale, dtype=torch.float16), backend)


@backends
@dtypes
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 256])
def test_page_sizes_and_lse_bases(page_size: int, base: str, kv_dtype: ck.KVDtype, backend: str) -> None:
    check(shape_of("NHD dense", kv_dtype, TOKEN, TOKEN_F16, page_size=page_size, lse_base=base), backend)


@backends
@dtypes
@pytest.mark.parametrize("dead", [float("nan"), float("inf"), -6e4], ids=str)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "contiguous"])  # which has no dead slots
def test_dead_slots_and_scale_tails_never_reach_a_result(place: str, dead: float, kv_dtype: ck.KVDtype, backend: str) -> None:
    shape = shape_of(place, kv_dtype, TOKEN, TOKEN_F16)
    plan, inputs = select(shape, backend), make_inputs(replace(shape, order="HND"), device_of(backend), dead=None)
    inputs = replace(inputs, shape=shape)
    clean = run(plan, inputs)
    assert_close(inputs, *clean)
    poison(inputs, dead)
    assert torch.isfinite(inputs.k_scale).all() == torch.isfinite(torch.tensor(dead))
    assert_bitwise(run(plan, inputs), clean)


@backends
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_nan_in_a_live_scale_is_not_hidden(name: str, backend: str) -> None:
    """The control of the poison test."""
    shape = shape_of("HND dense", INT8, TOKEN, TOKEN)
    inputs = make_inputs(shape, device_of(backend))
    getattr(inputs, name)[inputs.rows[-1][0].long(), 3, 0] = float("nan")
    out, _ = run(select(shape, backend), inputs)
    assert torch.isnan(out[-1, :4]).all() and not torch.isnan(out[-1, 4:]).any() and not torch.isnan(out[:-1]).any()


@backends
def test_an_empty_row_does_not_see_the_scale(backend: str) -> None:
    shape = shape_of("HND dense", E4M3, TENSOR, HEAD)
    inputs = make_inputs(shape, device_of(backend))
    inputs.k_scale.fill_(float("nan"))
    inputs.v_scale.fill_(float("nan"))
    out, lse = run(select(shape, backend), inputs)
    assert not out[0].view(torch.int16).any() and torch.isneginf(lse[0]).all()
    assert torch.isnan(out[1:]).all()


@backends
@places
@pytest.mark.parametrize("scale", [TENSOR, HEAD, TOKEN, TOKEN_F16], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, E4M3, E5M2, INT8], ids=str)
def test_a_scale_of_one_is_no_scale(kv_dtype: ck.KVDtype | None, scale: ck.KVScale, place: str, backend: str) -> None:
    shape = shape_of(place, kv_dtype, NONE, NONE)
    inputs = make_inputs(shape, device_of(backend))
    expected = run(select(shape, backend), inputs)
    scaled = replace(shape, k_scale=scale, v_scale=scale)
    with_scales = make_inputs(scaled, device_of(backend))
    for one in (with_scales.k_scale, with_scales.v_scale):
        one.fill_(1)
    assert_bitwise(run(select(scaled, backend), replace(with_scales, k=inputs.k, v=inputs.v)), expected)


def strided(scale: torch.Tensor) -> torch.Tensor:
    """The same scales in the middle of wider memory full of NaN, the axes in another order."""
    axes = list(reversed(range(scale.dim())))
    wide = torch.full([3 * extent for extent in scale.permute(axes).shape], float("nan"), dtype=scale.dtype, device=scale.device)
    view = wide[tuple(slice(1, None, 3) for _ in axes)].permute(axes)
    return view.copy_(scale)


@backends
@places
@pytest.mark.parametrize("scale", [TENSOR, HEAD, TOKEN, TOKEN_F16], ids=str)
def test_scales_may_have_any_strides(scale: ck.KVScale, place: str, backend: str) -> None:
    shape = shape_of(place, INT8, scale, scale)
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    expected = run(plan, inputs)
    views = {name: strided(getattr(inputs, name)) for name in ("k_scale", "v_scale")}
    assert_bitwise(run(plan, replace(inputs, **views)), expected)


@backends
@pytest.mark.parametrize("scale", [TENSOR, TOKEN_F16], ids=str)
def test_scales_without_axes_or_in_one(scale: ck.KVScale, backend: str) -> None:
    """A 0-d tensor, and the flat token-major pool that an int8 cache is often kept with; strided as well."""
    shape = shape_of("NHD csr", INT8, scale, scale)
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    expected = run(plan, inputs)
    flat = [s.reshape(-1) if scale == TOKEN_F16 else s[0] for s in (inputs.k_scale, inputs.v_scale)]
    assert_bitwise(run(plan, replace(inputs, k_scale=flat[0], v_scale=flat[1])), expected)
    assert_bitwise(run(plan, replace(inputs, k_scale=strided(flat[0]), v_scale=strided(flat[1]))), expected)


@backends
def test_a_broadcast_token_scale_is_a_head_scale(backend: str) -> None:
    shape = shape_of("HND dense", E5M2, HEAD, HEAD)
    inputs = make_inputs(shape, device_of(backend))
    expected = run(select(shape, backend), inputs)
    token = replace(shape, k_scale=TOKEN, v_scale=TOKEN)
    expanded = [s.expand(inputs.k.shape[0], shape.page_size, -1) for s in (inputs.k_scale, inputs.v_scale)]
    got = run(select(token, backend), replace(inputs, shape=token, k_scale=expanded[0], v_scale=expanded[1]))
    assert_bitwise(got, expected) if backend == "cpu" else assert_close(inputs, *got)


@backends
@places
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=lambda d: d.value)
def test_fp8_may_come_as_bytes(kv_dtype: ck.KVDtype, place: str, backend: str) -> None:
    shape = shape_of(place, kv_dtype, HEAD, NONE)
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    as_bytes = replace(inputs, k=inputs.k.view(torch.uint8), v=inputs.v.view(torch.uint8))
    assert_bitwise(run(plan, as_bytes), run(plan, inputs))


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, None], ids=str)
def test_a_paged_plan_with_a_csr_table_and_base_2(kv_dtype: ck.KVDtype | None, dtype: torch.dtype, backend: str) -> None:
    """HND pages, no scales, lse in base 2; with one KV token the output is the dequantised V."""
    shape = shape_of("HND csr", kv_dtype, NONE, NONE, lse_base="2", dtype=dtype, lengths=(1, 40, 1, 300), head_dim=128)
    inputs = make_inputs(shape, device_of(backend))
    plan = select(shape, backend)
    out, lse = run(plan, inputs)
    assert_close(inputs, out, lse)
    for row in (0, 2):
        assert torch.equal(out[row].double(), inputs.real("v", row)[:, 0].repeat_interleave(4, 0))
    assert (plan.sku.kv_dtype, plan.precision_guarantee.accumulator) == (shape.descriptor().problem.cache_type, "f32")


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values with f16 scales per row of the last axis: amax / 127, nearest even, clamped."""
    scale = values.float().abs().amax(-1).clamp(min=1e-8) / 127
    return (values.float() / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale.half()


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("length", [200, 6000])
def test_an_int8_pool_with_f16_scales(length: int, dtype: torch.dtype, backend: str) -> None:
    """NHD, flat scales; against f32 attention on the values before quantisation: cosine over 0.999, difference below 2%."""
    plain = Shape(order="NHD", lengths=(length, 33, 1), dtype=dtype)
    before = make_inputs(plain, device_of(backend), dead=None)
    before.k, before.v = before.k * 0.1, before.v * 0.1
    shape = replace(plain, kv_dtype=INT8, k_scale=TOKEN_F16, v_scale=TOKEN_F16)
    (k, k_scale), (v, v_scale) = (quantised(cache.transpose(1, 2)) for cache in (before.k, before.v))
    inputs = Inputs(shape, before.q, k.transpose(1, 2), v.transpose(1, 2), before.rows)
    assert (inputs.k.transpose(1, 2).double() * k_scale[..., None] - before.k.transpose(1, 2).double()).abs().max() < 0.002
    inputs = replace(inputs, k_scale=k_scale.reshape(-1), v_scale=v_scale.reshape(-1))
    out, lse = run(select(shape, backend), inputs)
    assert_close(inputs, out, lse)
    for row in range(3):
        exact, got = attend(before, row)[0].flatten(), out[row].double().flatten()
        assert torch.nn.functional.cosine_similarity(exact, got, dim=0) > 0.999
        assert (exact - got).abs().max() / exact.abs().max() < 0.02
