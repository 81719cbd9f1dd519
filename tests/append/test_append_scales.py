"""Scales per token on every backend: values are divided by what is stored of a scale, also at the ends of f16's range."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import cute_kernels as ck
from tests.support.append_cases import (
    LARGEST,
    Memory,
    append,
    cos_sin_of,
    expected,
    fp8_values,
    fresh,
    random_kv,
    run_scales,
    select,
)
from tests.support.harness import BACKENDS, device_of

F16, BF16 = torch.float16, torch.bfloat16
K, S = ck.KVDtype, ck.KVScale
TYPES = [K.INT8, K.E4M3, K.E5M2]
NAN, INF = float("nan"), float("inf")
TOKENS, HEADS, PAGES = 24, 3, 3
LARGEST_HALF, LEAST_HALF = 65504.0, 2.0**-24
D = ck.KVAppendDescriptor(TOKENS, HEADS, 64, 8, BF16, K.INT8, ck.KVLayout.NHD, k_scale=S.TOKEN_F16, v_scale=S.TOKEN_F16)
SLOTS = torch.arange(TOKENS)


def stored_as(kv_dtype: ck.KVDtype, scale: ck.KVScale = S.TOKEN_F16, dtype: torch.dtype = BF16) -> ck.KVAppendDescriptor:
    return replace(D, kv_dtype=kv_dtype, k_scale=scale, v_scale=scale, dtype=dtype)


def values_of(kv_dtype: ck.KVDtype) -> np.ndarray:
    """What the codes stand for, ascending."""
    positive = np.arange(128) if kv_dtype is K.INT8 else np.array(fp8_values(kv_dtype))
    return np.concatenate([-positive[:0:-1], positive])


def read(memory: Memory, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(the codes' values [tokens, heads, head_dim], the scales [tokens, heads, 1]), f64."""
    codes = getattr(memory, f"{name}_cache").float().view(TOKENS, HEADS, -1).cpu().double().numpy()
    return codes, getattr(memory, f"{name}_scale").float().view(TOKENS, HEADS, 1).cpu().double().numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-3, 3e-3, 1e-2, 0.1, 3.0, 1e3], ids=str)
@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
def test_each_code_is_the_nearest_under_the_scale_that_is_stored(
    kv_dtype: ck.KVDtype, size: float, dtype: torch.dtype, backend: str
) -> None:
    """In f64, element by element: no other code times the stored scale is nearer to the value."""
    d, (k, v) = stored_as(kv_dtype, dtype=dtype), random_kv(D, TOKENS, scale=size)
    k, v, levels = k.to(dtype), v.to(dtype), values_of(kv_dtype)
    memory = append(d, backend, k, v, SLOTS, PAGES)
    for name, x in (("k", k), ("v", v)):
        codes, scales = read(memory, name)
        exact = x.double().numpy()
        quotients = exact / scales
        above = np.searchsorted(levels, quotients).clip(1, len(levels) - 1)
        nearest = np.minimum(abs(quotients - levels[above - 1]), abs(quotients - levels[above]))
        assert (abs(quotients - codes) <= nearest + 1e-6 * abs(quotients)).all()
        assert (abs(quotients) <= LARGEST[kv_dtype] * (1 + 2.0**-11)).all(), "nothing is cut off"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-4, 1e-3, 3e-3, 1.0], ids=str)
def test_e5m2_keeps_its_precision_whatever_the_size(size: float, backend: str) -> None:
    """Row by row, in the 2-norm: 0.05 of e5m2's own rounding (it was 0.28 of values near 1e-3, divided by the f32 scale)."""
    (k, v), d = random_kv(D, TOKENS, scale=size), stored_as(K.E5M2)
    memory = append(d, backend, k, v, SLOTS, PAGES)
    for name, x in (("k", k), ("v", v)):
        codes, scales = read(memory, name)
        exact = x.double().numpy()
        errors = np.linalg.norm(codes * scales - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        assert (errors <= 0.08).all() and errors.mean() <= 0.055


TINY = [  # magnitude, storage, scale in f16, whether it is flagged, what it reads back as in units of the f16 scale
    (0.0, K.INT8, LEAST_HALF, False, 0.0),
    (0.0, K.E4M3, LEAST_HALF, False, 0.0),
    (0.0, K.E5M2, LEAST_HALF, False, 0.0),
    (1e-8, K.INT8, LEAST_HALF, True, 0.0),
    (1e-8, K.E4M3, LEAST_HALF, True, 0.171875),
    (1e-8, K.E5M2, LEAST_HALF, True, 0.15625),
    (1e-6, K.INT8, LEAST_HALF, True, 17.0),
    (1e-6, K.E4M3, LEAST_HALF, True, 16.0),
    (1e-6, K.E5M2, LEAST_HALF, True, 16.0),
    (1e-5, K.INT8, 2 * LEAST_HALF, False, 84.0),
    (1e-5, K.E4M3, LEAST_HALF, True, 160.0),
    (1e-5, K.E5M2, LEAST_HALF, True, 160.0),
    (1e-3, K.INT8, 133 * LEAST_HALF, False, 126.0),
    (1e-3, K.E4M3, 38 * LEAST_HALF, False, 448.0),
    (1e-3, K.E5M2, LEAST_HALF, True, 16384.0),
    (1e-2, K.E5M2, 3 * LEAST_HALF, False, 57344.0),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "kv_dtype", "f16_scale", "flagged", "code"), TINY, ids=str)
def test_tiny_rows(size: float, kv_dtype: ck.KVDtype, f16_scale: float, flagged: bool, code: float, backend: str) -> None:
    """One row of +-size among ordinary ones: never a scale of 0, infinity or NaN; zeros read as zeros and are no fault."""
    (k, v), d = random_kv(D, TOKENS), stored_as(kv_dtype)
    v[7, 2] = torch.tensor([size, -size] * 32)
    plan = select(d, backend)
    plan.clear_status()
    memory = append(d, backend, k, v, SLOTS, PAGES)
    memory.assert_equals(expected(d, k, v, SLOTS, PAGES))
    codes, scales = read(memory, "v")
    assert scales[7, 2] == f16_scale and (codes[7, 2] == [code, -code] * 32).all()
    assert plan.status() == (ck.Fault(7, "scale", 2) if flagged else None)
    plan.clear_status()
    exact = stored_as(kv_dtype, S.TOKEN)
    memory = append(exact, backend, k, v, SLOTS, PAGES)
    codes, scales = read(memory, "v")
    wanted = v[7, 2].double().numpy()
    assert (abs(codes[7, 2] * scales[7, 2] - wanted) <= 1e-6 * abs(wanted)).all(), "f32 has a scale for each"
    assert (scales[7, 2] > 0).all() and select(exact, backend).status() is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
def test_a_scale_past_f16_saturates_and_is_flagged(kv_dtype: ck.KVDtype, name: str, backend: str) -> None:
    """A bf16 row of up to 3e38: the largest f16, largest codes, other rows as ever; an error under validate."""
    (k, v), d, device = random_kv(D, TOKENS), stored_as(kv_dtype), device_of(backend)
    x = {"k": k, "v": v}[name]
    plan, limit = select(d, backend), LARGEST[kv_dtype]
    plan.clear_status()
    for largest in (65504.0 * limit, 65536.0 * limit, 3e38):
        x[11, 1] = torch.linspace(-1, 1, 64) * largest
        memory = append(d, backend, k, v, SLOTS, PAGES)
        memory.assert_equals(expected(d, k, v, SLOTS, PAGES))
        codes, scales = read(memory, name)
        within = float(x[11, 1].float().abs().max()) < 65520.0 * limit
        assert scales[11, 1] == LARGEST_HALF and abs(codes[11, 1]).max() == limit and np.isfinite(codes).all()
        assert plan.status() == (None if within else ck.Fault(11, "scale", 1))
        plan.clear_status()
    memory = fresh(d, PAGES, device)
    operands = (k.to(device), v.to(device), memory.k_cache, memory.v_cache, SLOTS.to(device))
    with pytest.raises(ck.InvalidArgument, match=rf"{name}: token 11 needs a scale for KV head 1 that f16 lacks"):
        select(d, backend, validate=True).run(*operands, **run_scales(d, memory, device))
    memory.assert_equals(fresh(d, PAGES))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_fault(backend: str) -> None:
    """A row with NaN or infinity, which reads as NaN; a token that is skipped; scales in f32; scales that are given."""
    (k, v), d = random_kv(D, TOKENS), D
    k[3, 0, 5], v[4, 1, 6], k[5, 2, 7] = NAN, INF, -INF
    k[9, :] = 3e38
    slots = SLOTS.clone()
    slots[9] = -1
    for kv_dtype in TYPES:
        d = stored_as(kv_dtype)
        plan = select(d, backend)
        plan.clear_status()
        memory = append(d, backend, k, v, slots, PAGES)
        memory.assert_equals(expected(d, k, v, slots, PAGES))
        assert plan.status() is None
        for name, token, head in (("k", 3, 0), ("v", 4, 1), ("k", 5, 2)):
            codes, scales = read(memory, name)
            with np.errstate(invalid="ignore"):
                assert not np.isfinite(scales[token, head]) and np.isnan((codes * scales)[token, head]).all()
    for scale in (S.TOKEN, S.HEAD):
        d = stored_as(K.INT8, scale)
        append(d, backend, k, v, SLOTS, PAGES)
        assert select(d, backend).status() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_k_is_judged_as_it_is_rotated(backend: str) -> None:
    """A pair that a rotation shrinks to nothing, or keeps: the scale is of what is stored."""
    d = replace(stored_as(K.INT8), rotary=ck.Rotary(rotary_dim=2))
    (k, v), device = random_kv(D, TOKENS), device_of(backend)
    k[2, 0], k[6, 1] = 0.0, 0.0
    k[2, 0, :2] = k[6, 1, :2] = 1e-4
    table = cos_sin_of(2, 2)
    table[1] = 1e-3  # both cosine and sine: what is no rotation shows that the scale is of the product
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    positions[6] = 1
    plan, memory = select(d, backend), fresh(d, PAGES, device)
    plan.clear_status()
    operands = (k.to(device), v.to(device), memory.k_cache, memory.v_cache, SLOTS.to(device))
    plan.run(*operands, **run_scales(d, memory, device), cos_sin_cache=table.to(device), positions=positions.to(device))
    rotated = ck.apply_rotary(k, table, positions, ck.Rotary(rotary_dim=2))
    memory.assert_equals(expected(d, rotated, v, SLOTS, PAGES))
    assert plan.status() == ck.Fault(6, "scale", 1)
    plan.clear_status()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("magnitude", "least", "most"), [(1.0, 1, 1), (1e-2, 1, 1), (1e-4, 3, 7), (1e-5, 20, 42)])
def test_codes_beside_those_of_the_f32_scale(magnitude: float, least: int, most: int, backend: str) -> None:
    """They differ by at most one under normal f16 scales; under subnormal ones, which are rounded up, they are smaller."""
    d = ck.KVAppendDescriptor(2000, 1, 64, 16, BF16, K.INT8, k_scale=S.TOKEN_F16, v_scale=S.TOKEN_F16)
    x = (torch.randn(2000, 1, 64, generator=torch.Generator().manual_seed(0)) * magnitude).bfloat16()
    memory = append(d, backend, x, x, torch.arange(2000), 125)
    codes = memory.k_cache.cpu().transpose(1, 2).flatten(0, 1).double()
    exact = x.double().abs().amax(-1, keepdim=True) / 127
    theirs = (x.double() / exact).round()
    off = codes.abs() - theirs.abs()
    assert least <= off.abs().max() <= most and (magnitude > 1e-3 or off.max() <= 0)
