"""Builds the append to a paged cache for every target without a GPU and reads the machine code."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cutlass import BFloat16, Float16

import cute_kernels as ck
from cute_kernels.append.variants import kernel_spec
from cute_kernels.compile import kernels as compiler
from cute_kernels.config.append import AppendSpec, append_supports
from cute_kernels.device.kv.encode import (
    BEYOND,
    HALF_UNIT,
    LARGEST,
    LARGEST_DIVISOR,
    LEAST_DIVISOR,
    NUDGE,
    rounded_down,
    zeros_of_middles,
)
from cute_kernels.device.tracing.append import build_append
from cute_kernels.kv.quantize import LEAST_AMAX, rounded_scale
from tests.support import machine_code

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
K, S, HND, NHD = ck.KVDtype, ck.KVScale, ck.KVLayout.HND, ck.KVLayout.NHD
TOKEN = {"k_scale": S.TOKEN_F16, "v_scale": S.TOKEN_F16}
BACKENDS = [("sm90", "sm_90a"), ("sm80", "sm_80"), ("sm80", "sm_90a")]


def spec_of(
    arch: str, target: str, head_dim: int = 128, dtype: torch.dtype = BF16, tokens: int = 64, **changes: object
) -> AppendSpec:
    return kernel_spec(ck.KVAppendDescriptor(tokens, 8, head_dim, 16, dtype, **changes), arch, target)


def dump(spec: AppendSpec, folder: Path) -> tuple[str, str]:
    """(PTX, SASS) of the kernel."""
    assert append_supports(spec) == []
    return machine_code.dump(build_append, spec, folder)


@pytest.mark.parametrize(("arch", "target"), BACKENDS)
@pytest.mark.parametrize(
    ("changes", "conversion"),
    [
        ({}, None),
        ({"kv_dtype": K.INT8, **TOKEN, "layout": NHD}, "cvt.rni.s32.f32"),
        ({"kv_dtype": K.INT8, "k_scale": S.TOKEN, "v_scale": S.TOKEN, "head_dim": 255, "dtype": F16}, "cvt.rni.s32.f32"),
        ({"kv_dtype": K.E4M3, "k_scale": S.HEAD, "v_scale": S.HEAD}, "cvt.rn.satfinite.e4m3x2.f32"),
        ({"kv_dtype": K.E4M3, "head_dim": 5, "slot_dtype": torch.int32}, "cvt.rn.satfinite.e4m3x2.f32"),
        ({"kv_dtype": K.E5M2, "k_scale": S.TENSOR, "v_scale": S.TENSOR, "head_dim": 80}, "cvt.rn.satfinite.e5m2x2.f32"),
        ({"tokens": 8192}, None),
        ({"tokens": 8192, "kv_dtype": K.INT8, **TOKEN}, "cvt.rni.s32.f32"),
        ({"kv_dtype": K.E4M3, "table_format": "dense"}, "cvt.rn.satfinite.e4m3x2.f32"),
        ({"kv_dtype": K.INT8, **TOKEN, "table_format": "csr"}, "cvt.rni.s32.f32"),
        ({"kv_dtype": K.E5M2, **TOKEN, "head_dim": 252, "dtype": F16}, "cvt.rn.satfinite.e5m2x2.f32"),
    ],
    ids=str,
)
def test_append(changes: dict, conversion: str | None, arch: str, target: str, tmp_path: Path) -> None:
    """Both rows are loaded before anything is converted or stored, by wide accesses, and nothing goes to local memory."""
    spec = spec_of(arch, target, **changes)
    ptx, sass = dump(spec, tmp_path)
    assert f".target {target}" in ptx
    assert ("griddepcontrol.wait" in ptx) == (target == "sm_90a")
    if conversion is not None:
        by_instruction = "satfinite" not in conversion or arch == "sm90"
        pairs = 2 if "x2" in conversion and spec.columns > 1 else 1
        count = 2 * spec.unroll * spec.rounds * spec.columns // pairs if by_instruction else 0
        assert len(re.findall(rf"{re.escape(conversion)} ", ptx)) == count
        by_products = spec.k_type == "int8" and spec.computes
        assert ("div.rn.f32" in ptx) == (spec.k_scale != "none" and not by_products)
    if spec.columns == 8:
        loads = [found.start() for found in re.finditer(r"ld\.global\.v4\.b32 ", ptx)]
        waits = [ptx.find(store) for store in ("st.global.", "st.relaxed.gpu.global.b128")]
        assert len(loads) == 2 * spec.unroll * spec.rounds and max(loads) < min(at for at in waits if at >= 0), (
            "16 bytes each, then stores"
        )
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"


@pytest.mark.parametrize(("arch", "target"), BACKENDS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotary(pairing: str, arch: str, target: str, tmp_path: Path) -> None:
    """Each column of K and of q is two products and a sum, none of them fused; angles are loaded 16 bytes at a time."""
    spec = spec_of(arch, target, kv_dtype=K.E4M3, rotary=ck.Rotary(pairing, 64, num_heads=32))
    ptx, sass = dump(spec, tmp_path)
    assert spec.columns == 8 and spec.unroll == 1
    assert [len(re.findall(rf"{name}\.rn\.f32 ", ptx)) for name in ("mul", "add")] == [2 * 2 * 8, 2 * 8]
    assert "fma" not in ptx and "FFMA" not in sass
    incoming, angles = (5, 2 * 4) if pairing == "half" else (3, 2 * 2)  # K and q, where halves pair up with the other; V
    assert len(re.findall(r"ld\.global\.v4\.", ptx)) == incoming + angles
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"


@pytest.mark.parametrize(
    ("tokens", "changes", "unroll"),
    [
        (64, {}, 1),
        (2048, {}, 1),
        (4096, {}, 2),
        (8192, {}, 4),
        (8192, {"kv_dtype": K.E4M3}, 2),
        (8192, {"v_dtype": K.E4M3}, 2),
        (8192, {"rotary": ck.Rotary()}, 1),
        (8192, {"kv_dtype": K.INT8, "k_scale": ck.KVScale.TOKEN, "v_scale": ck.KVScale.TOKEN}, 1),
    ],
)
def test_threads_take_several_rows_where_the_sms_stay_full(tokens: int, changes: dict, unroll: int) -> None:
    spec = spec_of("sm90", "sm_90a", tokens=tokens, **changes)
    assert spec.unroll == unroll and spec.rows_per_cta * spec.lanes == 128 * unroll
    assert spec.rounds == (2 if spec.computes and tokens == 8192 else 1)


def test_the_cache_serves_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_kernels", {})
    spec = spec_of("sm90", "sm_90a")
    kernel = compiler.compile_append(spec)
    assert compiler.compile_append(spec) is kernel and compiler.compiled_specs() == [spec]
    with pytest.raises(ck.Unsupported, match="columns"):
        compiler.compile_append(replace(spec, columns=3))


def divisors(count: int) -> np.ndarray:
    """f32 of the whole range of `divide`: any mantissa, those near a power of two, dynamic scales."""
    generator = np.random.default_rng(0)
    mantissas = generator.integers(0, 2**23, count)
    mantissas[::3] = np.where(mantissas[::3] % 2, 2**23 - 1 - mantissas[::3] % 64, mantissas[::3] % 64)
    exponents = generator.integers(-60, 122, count)
    found = np.ldexp(1 + mantissas / 2**23, exponents).astype(np.float32)
    found[::4] = generator.integers(1, 0x7C00, len(found[::4])).astype(np.uint16).view(np.float16)  # scales of f16
    found[1::3] = np.abs(generator.standard_normal(count)[1::3]).astype(np.float16).astype(np.float32) / np.float32(127)
    return np.concatenate([found, np.array([LEAST_DIVISOR, LARGEST_DIVISOR, 1e-8 / 127], dtype=np.float32)])


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 of a * b + c, in 64 bits of mantissa in between."""
    return (np.longdouble(1) * a * b + c).astype(np.float32)


def test_quotients_are_those_of_ieee_division() -> None:
    """`ieee_quotient` in numpy, every 16-bit value: its bits, but for what every 8-bit type stores as a zero or as its largest.

    A fused multiply-add is one in 64 bits of mantissa, rounded again: it could only be wrong where this test then fails.
    """
    f32 = np.float32
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = np.concatenate([patterns.view(dtype).float().numpy() for dtype in (F16, BF16)])

    with np.errstate(all="ignore"):
        for divisor in divisors(60):
            assert LEAST_DIVISOR <= divisor <= LARGEST_DIVISOR
            inverse, wanted = f32(1) / divisor, values / divisor
            rough = values * inverse
            near = fma(fma(-rough, divisor, values), inverse, rough)
            got = np.copysign(fma(fma(-near, divisor, values), inverse, near), rough)
            got = np.where(np.abs(rough) > BEYOND, rough, got)
            for zero in (wanted, got):
                zero[np.abs(zero) < 2.0**-18] *= 0
                zero[np.abs(zero) > 1e5] *= np.inf
            same = (got.view(np.int32) == wanted.view(np.int32)) | (np.isnan(got) & np.isnan(wanted))
            assert same.all(), (divisor, values[~same][:4])


def magnitudes(dtype: torch.dtype) -> np.ndarray:
    """f32 of every 16-bit value that is not negative: zero, subnormals, infinity and NaN too."""
    return torch.arange(2**15).to(torch.int16).view(dtype).float().numpy()


@pytest.mark.parametrize("stored_type", LARGEST)
def test_scales_are_those_of_ieee_division(stored_type: str) -> None:
    """`divide_largest` in numpy, for every largest magnitude that a row may have."""
    largest = np.concatenate([magnitudes(F16), magnitudes(BF16), [np.float32(LEAST_AMAX)]])
    largest = largest[~(largest < np.float32(LEAST_AMAX))]
    inverse = 1.0 / LARGEST[stored_type]
    upper = rounded_down(inverse)
    assert np.float32(upper) == upper <= inverse
    with np.errstate(invalid="ignore"):
        got = fma(largest, np.float32(upper), largest * np.float32(inverse - upper))
        assert np.array_equal(got, largest / np.float32(LARGEST[stored_type]), equal_nan=True)


def codes_by(x: np.ndarray, scale: np.ndarray, inverse: np.ndarray, nudge: np.ndarray, doubtful: np.ndarray) -> np.ndarray:
    """Codes [x, scale] of `quantize`: by products with a nudged inverse, by corrected quotients where `doubtful`.

    A product of 11 and 24 bits is exact in 64, so rint rounds it once, as a multiply-add with a large summand does.
    """
    products = np.rint(x[:, None].astype(np.float64) * fma(inverse, nudge, inverse))
    over, by = scale[doubtful], inverse[doubtful]
    rough = x[:, None] * by
    near = np.rint(fma(fma(-rough, over, x[:, None]), by, rough))
    products[:, doubtful] = np.nan_to_num(near, nan=0.0, posinf=127.0, neginf=-127.0).clip(-127, 127)
    return products


def nudged_codes(x: np.ndarray, largest: np.ndarray, off: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes [x, largest] of `quantize`, which are by quotients); the inverse is `off` units off."""
    f32 = np.float32
    scale = largest / f32(127)
    inverse = ((f32(1) / scale).view(np.int32) + np.int32(off)).view(f32)
    excess = fma(scale, f32(-127), largest)
    direction = fma(scale, f32(HALF_UNIT), excess)
    exact = ~(np.abs(excess) > 0)
    return codes_by(x, scale, inverse, np.copysign(f32(NUDGE), direction), exact), exact


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize(("dtype", "bits"), [(F16, 11), (BF16, 8)], ids=str)
def test_products_by_a_nudged_inverse_round_as_quotients_do(dtype: torch.dtype, bits: int, off: int) -> None:
    """The int8 codes of `quantize` in numpy, for every pair of mantissas and all powers of two between that give no zero.

    Powers of two that both have change nothing: the divisor is within 2**-34 .. 2**122.
    """
    x = np.arange(2 ** (bits - 1), 2**bits).astype(np.float32)
    ties = exacts = 0
    for exponent in range(10):
        largest = np.ldexp(x, exponent)
        codes, exact = nudged_codes(x, largest, off)
        wanted = np.rint(x[:, None] / (largest / np.float32(127)))
        same = (codes == wanted) | (x[:, None] > largest)
        assert same.all(), (exponent, np.argwhere(~same)[:4])
        ties += int((2 * x[:, None] == largest).sum())
        exacts += int(exact.sum())
    assert ties == x.size, "halves of the largest, whose quotients are 63.5 or next to it"
    assert exacts == 10 * sum(m % 127 == 0 for m in range(2 ** (bits - 1), 2**bits)), "all other ties"


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_codes_of_the_least_largest_magnitude(off: int) -> None:
    """Rows below LEAST_AMAX, which has more bits than the values, and of it."""
    x, least = magnitudes(BF16), np.array([LEAST_AMAX], dtype=np.float32)
    x = x[x <= least]
    codes, exact = nudged_codes(x, least, off)
    assert not exact.any() and codes.max() >= 126
    assert np.array_equal(codes, np.rint(x[:, None] / (least / np.float32(127))))


@pytest.mark.parametrize(("dtype", "offset"), [(F16, 0), (BF16, 2**14), (BF16, 2**15 - 200)], ids=str)
def test_codes_at_the_ends_of_the_range(dtype: torch.dtype, offset: int) -> None:
    """Largest magnitudes and values as they are, no powers of two left out: subnormals of f16, the largest bf16."""
    every = magnitudes(dtype)
    largest = every[offset:][np.isfinite(every[offset:]) & (every[offset:] >= np.float32(LEAST_AMAX))][:72]
    x = every[every <= largest[-1]]
    for off in (-1, 0, 1):
        codes, _ = nudged_codes(x, largest, off)
        wanted = np.rint(x[:, None] / (largest / np.float32(127)))
        assert ((codes == wanted) | (x[:, None] > largest)).all()


def test_codes_of_rows_with_infinity_or_nan_are_zeros() -> None:
    x, largest = magnitudes(BF16), np.array([np.inf, np.nan], dtype=np.float32)
    with np.errstate(all="ignore"):
        codes, by_quotients = nudged_codes(x, largest, 0)
    assert by_quotients.all() and not codes.any()


def halves(mantissas: np.ndarray, exponent: int) -> np.ndarray:
    """f32 of normal f16 values with these 11-bit mantissas."""
    return np.ldexp(mantissas.astype(np.float32), exponent - 10).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize(("dtype", "bits", "kept"), [(F16, 11, Float16), (BF16, 8, BFloat16)], ids=["f16", "bf16"])
def test_products_by_an_f16_scale_round_as_quotients_do(dtype: torch.dtype, bits: int, kept: type, off: int) -> None:
    """The int8 codes of `quantize` under every mantissa of an f16 scale, for every value that gives no zero and none above 127.

    A scale is at most 2**-11 of itself below largest / 127. Powers of two that both have change nothing.
    """
    scale = halves(np.arange(2**10, 2**11), 0)
    inverse = ((np.float32(1) / scale).view(np.int32) + np.int32(off)).view(np.float32)
    doubtful = (scale.view(np.int32) & zeros_of_middles(kept)) == 0
    ties = odd = 0
    for exponent in range(-2, 7):
        x = np.ldexp(np.arange(2 ** (bits - 1), 2**bits).astype(np.float32), exponent + 1 - bits)
        codes = codes_by(x, scale, inverse, np.float32(-NUDGE), doubtful)
        quotients = x[:, None].astype(np.float64) / scale
        same = (codes == np.rint(x[:, None] / scale)) | (quotients > 127.1)
        assert same.all(), (exponent, np.argwhere(~same)[:4])
        middles = (x[:, None] / scale * 2 % 2 == 1) & (quotients < 127)
        ties += int(middles.sum())
        odd += int((middles[:, ~doubtful] & (quotients[:, ~doubtful] > 1)).sum())
    assert ties > 400 and odd == 0, "no middle above 1/2 where products alone give the codes"
    assert doubtful.mean() == 2.0 ** (bits - 12), "one scale in two of f16 values, in 16 of bf16 values"


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_codes_by_the_least_and_the_largest_f16(dtype: torch.dtype) -> None:
    """Subnormal scales, the largest, infinity and NaN: every value that a row of such a scale may hold."""
    every, kept = magnitudes(dtype), Float16 if dtype == F16 else BFloat16
    scales = np.array([2.0**-24, 2.0**-23, 3 * 2.0**-24, 5 * 2.0**-24, 1023 * 2.0**-24, 65504, np.inf, np.nan], dtype=np.float32)
    with np.errstate(all="ignore"):
        for off in (-1, 0, 1):
            inverse = np.float32(1) / scales
            inverse[:6] = (inverse[:6].view(np.int32) + np.int32(off)).view(np.float32)
            doubtful = ((scales.view(np.int32) & zeros_of_middles(kept)) == 0) | ~(scales < 65504)
            got = codes_by(every, scales, inverse, np.float32(-NUDGE), doubtful)
            wanted = np.nan_to_num(np.rint(every[:, None] / scales), nan=0.0, posinf=np.inf).clip(-127, 127)
            held = (every[:, None] <= 127 * scales) | (scales == 65504) | ~np.isfinite(scales)
            held &= np.isfinite(every[:, None]) | ~np.isfinite(scales)
            assert ((got == wanted) | ~held).all() and held[:, 5:7].sum() > 60000


@pytest.mark.parametrize("stored_type", LARGEST)
def test_scales_in_f16_are_those_of_the_reference(stored_type: str) -> None:
    """The kernel's steps in numpy (conversion to nearest, a sum rounded up, the largest) for every magnitude of a row."""
    half, f32 = np.float32(0.5), np.float32
    largest = np.concatenate([magnitudes(F16), magnitudes(BF16), [f32(LEAST_AMAX)]])
    with np.errstate(all="ignore"):
        exact = largest[~(largest < f32(LEAST_AMAX))] / f32(LARGEST[stored_type])
        total = exact + half
        up = np.where(np.longdouble(exact) + half > total, np.nextafter(total, f32(2)), total) - half
        end = np.where(exact < 2.0**-14, up, np.where(exact < np.inf, f32(65504), exact))
        normal = (exact >= 2.0**-14) & (exact <= 65504)
        got = np.where(normal, exact.astype(np.float16).astype(f32), end)
    wanted = rounded_scale(torch.from_numpy(exact), F16).float().numpy()
    assert np.array_equal(got, wanted, equal_nan=True)
    finite = np.isfinite(exact)
    assert (got[finite] > 0).all() and np.isfinite(got[finite]).all() and not np.isfinite(got[~finite]).any()
    assert (abs(got[normal] - exact[normal]) <= 2.0**-11 * exact[normal]).all()
    assert (got >= exact)[finite & (exact < 2.0**-14)].all()
