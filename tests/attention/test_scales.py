"""8-bit caches and scales against f64 on what they stand for, poisoned, strided, and by the two systems' own tolerances.

The CPU variant runs full products of what can be combined, the GPU variants what decode/storage_pairs.py picks of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

import cute_kernels as ck
from tests.support.harness import BACKENDS, assert_bitwise, assert_close, attend, device_of, run, select
from tests.support.inputs import Inputs, Shape, make_inputs, poison
from tests.support.storage_pairs import (
    AXES,
    E4M3,
    E5M2,
    HEAD,
    HEADS,
    INT8,
    NONE,
    PAIRS,
    POOL,
    ROWS,
    SHORT,
    SM80_PAIRS,
    TENSOR,
    TOKEN,
    TOKEN_F16,
    TOKENS,
    UNIFORM,
    UNIFORM_ON,
    arch_cases,
    uniform,
)

PLACES = {
    "HND dense": {"order": "HND", "lengths": SHORT},
    "HND csr": {"order": "HND", "table_format": "csr", "lengths": SHORT},
    "NHD dense": {"order": "NHD", "lengths": SHORT},
    "NHD csr": {"order": "NHD", "table_format": "csr", "lengths": SHORT},
    "contiguous": {"page_size": 0, "lengths": (129,) * 3},
}
PAGED = [place for place in PLACES if place != "contiguous"]
DTYPES, SCALES, FORMS = (E4M3, E5M2, INT8), (NONE, TENSOR, HEAD, TOKEN, TOKEN_F16), (TENSOR, HEAD, TOKEN, TOKEN_F16)

backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("kv_dtype", DTYPES, ids=lambda d: d.value)
scales = pytest.mark.parametrize("scale", SCALES, ids=str)
places = pytest.mark.parametrize("place", PLACES)


def shape_of(place: str, kv_dtype: ck.KVDtype | None, k_scale: ck.KVScale, v_scale: ck.KVScale, **changes: object) -> Shape:
    """A small shape at a place, with these caches."""
    return Shape(**{"head_dim": 64, **PLACES[place], **changes}, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale)


def shapes(on_cpu: Iterable[Shape], **by_arch: Iterable[Shape]) -> pytest.MarkDecorator:
    """A test's (shape, backend): `on_cpu` on the CPU variant, and on the others by default what is UNIFORM."""
    return pytest.mark.parametrize(("shape", "backend"), arch_cases(tuple(on_cpu), by_arch or UNIFORM_ON))


def check(shape: Shape, backend: str) -> None:
    inputs = make_inputs(shape, device_of(backend))
    out, lse = run(select(shape, backend), inputs)
    assert_close(inputs, out, lse)
    for row, length in enumerate(shape.lengths):
        if length == 1 and not shape.v_scale:  # the output is V, exactly
            value = inputs.real("v", row)[:, 0].repeat_interleave(shape.num_heads // shape.num_kv_heads, 0)
            assert torch.equal(out[row].double(), value)


def test_the_rows_cover_every_pair() -> None:
    """Of the values of any two axes; one scale for all is read as one a KV head is, and a contiguous cache has no pages."""
    rows = [tuple(HEAD if value == TENSOR else value for value in row) for row in ROWS]
    for a, b in combinations(range(len(AXES)), 2):
        values = [{row[axis] for row in rows} for axis in (a, b)]
        possible = {
            pair for pair in product(*values) if not ({AXES[a], AXES[b]} == {"source", "page_size"} and "contiguous" in pair)
        }
        if {AXES[a], AXES[b]} == {"source", "page_size"}:
            possible = {pair for pair in possible if 0 not in pair} | {("contiguous", 0)}
        assert {(row[a], row[b]) for row in rows} == possible, (AXES[a], AXES[b])


@pytest.mark.parametrize(("shape", "backend"), arch_cases((*PAIRS, *SM80_PAIRS), {"sm90": PAIRS, "sm80": SM80_PAIRS}))
def test_pairs_of_everything(shape: Shape, backend: str) -> None:
    check(shape, backend)


@shapes(UNIFORM)
def test_one_storage_for_both(shape: Shape, backend: str) -> None:
    check(shape, backend)


@places
@scales
@dtypes
def test_every_dtype_and_scale_everywhere(kv_dtype: ck.KVDtype, scale: ck.KVScale, place: str) -> None:
    check(shape_of(place, kv_dtype, scale, scale), "cpu")


@pytest.mark.parametrize("v_scale", SCALES, ids=str)
@pytest.mark.parametrize("k_scale", SCALES, ids=str)
def test_k_and_v_are_scaled_independently(k_scale: ck.KVScale, v_scale: ck.KVScale) -> None:
    check(shape_of("NHD dense", INT8, k_scale, v_scale), "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize(("kv_dtype", "v_dtype"), [(INT8, E4M3), (E4M3, INT8), (E5M2, E4M3), (INT8, None), (None, E4M3)], ids=str)
def test_k_and_v_are_stored_independently(kv_dtype: ck.KVDtype | None, v_dtype: object, dtype: torch.dtype) -> None:
    """None: as q."""
    own = ck.KVDtype.F16 if dtype == torch.float16 else ck.KVDtype.BF16
    check(shape_of("HND csr", kv_dtype or own, HEAD, TOKEN_F16, v_dtype=v_dtype or own, dtype=dtype), "cpu")


@scales
@places
def test_16_bit_caches_take_scales(place: str, scale: ck.KVScale) -> None:
    check(shape_of(place, None, scale, scale, dtype=torch.float16), "cpu")


@dtypes
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 256])
def test_page_sizes_and_lse_bases(page_size: int, base: str, kv_dtype: ck.KVDtype) -> None:
    check(shape_of("NHD dense", kv_dtype, TOKEN, TOKEN_F16, page_size=page_size, lse_base=base), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize("shape", [HEADS, POOL], ids=["e4m3", "int8"])
def test_pages_that_tma_cannot_serve_are_refused(shape: Shape, page_size: int) -> None:
    with pytest.raises(ck.Unsupported, match=f"TMA needs page_size to be a multiple of 8, got {page_size}"):
        select(replace(shape, page_size=page_size), "sm90")


@shapes(
    [shape_of(place, kv_dtype, TOKEN, TOKEN_F16) for place, kv_dtype in product(PAGED, DTYPES)],
    sm90=[shape for shape in PAIRS if shape.page_size] + [TOKENS, POOL],
    sm80=[shape for shape in SM80_PAIRS if shape.page_size] + [TOKENS, POOL],
)
@pytest.mark.parametrize("dead", [float("nan"), float("inf"), -6e4], ids=str)
def test_dead_slots_and_scale_tails_never_reach_a_result(dead: float, shape: Shape, backend: str) -> None:
    plan, inputs = select(shape, backend), make_inputs(replace(shape, order="HND"), device_of(backend), dead=None)
    inputs = replace(inputs, shape=shape)
    clean = run(plan, inputs)
    assert_close(inputs, *clean)
    poison(inputs, dead)
    for scale in (inputs.k_scale, inputs.v_scale):
        assert scale is None or scale.dim() != 3 or torch.isfinite(scale).all() == torch.isfinite(torch.tensor(dead))
    assert_bitwise(run(plan, inputs), clean)


@shapes([shape_of("HND dense", INT8, TOKEN, TOKEN), TOKENS, POOL], sm90=[TOKENS, POOL], sm80=[TOKENS, POOL])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_nan_in_a_live_scale_is_not_hidden(name: str, shape: Shape, backend: str) -> None:
    """The control of the poison test."""
    inputs = make_inputs(shape, device_of(backend))
    getattr(inputs, name)[inputs.rows[-1][0].long(), 3, 0] = float("nan")
    out, _ = run(select(shape, backend), inputs)
    assert torch.isnan(out[-1, :4]).all() and not torch.isnan(out[-1, 4:]).any() and not torch.isnan(out[:-1]).any()


@shapes([shape_of("HND dense", E4M3, TENSOR, HEAD), *UNIFORM])
def test_an_empty_row_does_not_see_the_scale(shape: Shape, backend: str) -> None:
    inputs = make_inputs(shape, device_of(backend))
    inputs.k_scale.fill_(float("nan"))
    inputs.v_scale.fill_(float("nan"))
    out, lse = run(select(shape, backend), inputs)
    assert not out[0].view(torch.int16).any() and torch.isneginf(lse[0]).all()
    assert torch.isnan(out[1:]).all()


@shapes([*(shape_of(*case, case[-1]) for case in product(PLACES, (None, *DTYPES), FORMS)), *UNIFORM])
def test_a_scale_of_one_is_no_scale(shape: Shape, backend: str) -> None:
    unscaled = replace(shape, k_scale=NONE, v_scale=NONE)
    inputs = make_inputs(unscaled, device_of(backend))
    expected = run(select(unscaled, backend), inputs)
    with_scales = make_inputs(shape, device_of(backend))
    for one in (with_scales.k_scale, with_scales.v_scale):
        one.fill_(1)
    assert_bitwise(run(select(shape, backend), replace(with_scales, k=inputs.k, v=inputs.v)), expected)


def strided(scale: torch.Tensor | None) -> torch.Tensor | None:
    """The same scales in the middle of wider memory full of NaN, the axes in another order."""
    if scale is None:
        return None
    axes = list(reversed(range(scale.dim())))
    wide = torch.full([3 * extent for extent in scale.permute(axes).shape], float("nan"), dtype=scale.dtype, device=scale.device)
    view = wide[tuple(slice(1, None, 3) for _ in axes)].permute(axes)
    return view.copy_(scale)


@shapes(
    [*(shape_of(place, INT8, scale, scale) for place, scale in product(PLACES, FORMS)), *UNIFORM],
    sm90=[*UNIFORM, *PAIRS],
    sm80=[*UNIFORM_ON["sm80"], *SM80_PAIRS],
)
def test_scales_may_have_any_strides(shape: Shape, backend: str) -> None:
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    expected = run(plan, inputs)
    views = {name: strided(getattr(inputs, name)) for name in ("k_scale", "v_scale")}
    assert_bitwise(run(plan, replace(inputs, **views)), expected)


ONE = uniform(E4M3, TENSOR, TENSOR)  # the kernel of HEADS


@shapes(
    [shape_of("NHD csr", INT8, TENSOR, TENSOR), shape_of("NHD csr", INT8, TOKEN_F16, TOKEN_F16), ONE, TOKENS, POOL],
    sm90=[ONE, TOKENS, POOL],
    sm80=[ONE, TOKENS, POOL],
)
def test_scales_without_axes_or_in_one(shape: Shape, backend: str) -> None:
    """A 0-d tensor, and the flat token-major pool that an int8 cache is often kept with; strided as well."""
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    expected = run(plan, inputs)
    flat = [s[0] if shape.k_scale == TENSOR else s.reshape(-1) for s in (inputs.k_scale, inputs.v_scale)]
    assert_bitwise(run(plan, replace(inputs, k_scale=flat[0], v_scale=flat[1])), expected)
    assert_bitwise(run(plan, replace(inputs, k_scale=strided(flat[0]), v_scale=strided(flat[1]))), expected)


@backends
def test_a_broadcast_token_scale_is_a_head_scale(backend: str) -> None:
    inputs = make_inputs(HEADS, device_of(backend))
    expected = run(select(HEADS, backend), inputs)
    expanded = [s.expand(inputs.k.shape[0], HEADS.page_size, -1) for s in (inputs.k_scale, inputs.v_scale)]
    got = run(select(TOKENS, backend), replace(inputs, shape=TOKENS, k_scale=expanded[0], v_scale=expanded[1]))
    assert_bitwise(got, expected) if backend == "cpu" else assert_close(inputs, *got)


@shapes([shape_of(place, kv_dtype, HEAD, NONE) for place, kv_dtype in product(PLACES, (E4M3, E5M2))], sm90=PAIRS, sm80=SM80_PAIRS)
def test_fp8_may_come_as_bytes(shape: Shape, backend: str) -> None:
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    as_bytes = {
        n: c.view(torch.uint8) for n, c in (("k", inputs.k), ("v", inputs.v)) if c.dtype.itemsize == 1 and c.is_floating_point()
    }
    assert_bitwise(run(plan, replace(inputs, **as_bytes)), run(plan, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, None], ids=str)
def test_a_paged_plan_with_a_csr_table_and_base_2(kv_dtype: ck.KVDtype | None, dtype: torch.dtype) -> None:
    """HND pages, no scales, lse in base 2; with one KV token the output is the dequantised V."""
    shape = shape_of("HND csr", kv_dtype, NONE, NONE, lse_base="2", dtype=dtype, lengths=(1, 40, 1, 300), head_dim=128)
    check(shape, "cpu")
    plan = select(shape, "cpu")
    assert (plan.sku.kv_dtype, plan.precision_guarantee.accumulator) == (shape.descriptor().problem.cache_type, "f32")


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values with f16 scales per row of the last axis: amax / 127, nearest even, clamped."""
    scale = values.float().abs().amax(-1).clamp(min=1e-8) / 127
    return (values.float() / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale.half()


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("length", [200, 6000])
def test_an_int8_pool_with_f16_scales(length: int, dtype: torch.dtype, backend: str) -> None:
    """NHD, flat scales; against f32 attention on the values before quantisation: cosine over 0.999, difference below 2%.

    Values reach 0.45, so that half a step of 0.45 / 127 is below the 0.002 that a stored value may be off.
    """
    plain = Shape(order="NHD", lengths=(length, 33, 1), dtype=dtype)
    before = make_inputs(plain, device_of(backend), dead=None)
    before.k, before.v = (cache.clamp(-4.5, 4.5) * 0.1 for cache in (before.k, before.v))
    shape = replace(plain, kv_dtype=INT8, k_scale=TOKEN_F16, v_scale=TOKEN_F16)
    (k, k_scale), (v, v_scale) = (quantised(cache.transpose(1, 2)) for cache in (before.k, before.v))
    inputs = Inputs(shape, before.q, k.transpose(1, 2), v.transpose(1, 2), before.rows)
    assert (inputs.k.transpose(1, 2).double() * k_scale[..., None] - before.k.transpose(1, 2).double()).abs().max() < 0.002
    inputs = replace(inputs, k_scale=k_scale.reshape(-1), v_scale=v_scale.reshape(-1))
    out, lse = run(select(shape, backend), inputs)
    assert_close(inputs, out, lse)
    for row in range(3):
        exact, got = attend(before, row)[0], out[row].double()
        assert (torch.nn.functional.cosine_similarity(exact, got, dim=-1) > 0.999).all()
        assert ((exact - got).abs().amax(-1) < 0.02 * exact.abs().amax(-1)).all()
