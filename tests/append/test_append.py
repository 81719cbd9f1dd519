"""Appends to a paged cache on every backend: the same bytes as a naive loop, whatever the values, slots and strides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from tests.support.append_cases import (
    Memory,
    append,
    cos_sin_of,
    expected,
    filled,
    fresh,
    given_scales,
    naive_fp8,
    naive_row,
    random_kv,
    random_slots,
    select,
)
from tests.support.harness import BACKENDS, ONE_CALL, device_of

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
K, S, HND, NHD = ck.KVDtype, ck.KVScale, ck.KVLayout.HND, ck.KVLayout.NHD
TOKEN = {"k_scale": S.TOKEN_F16, "v_scale": S.TOKEN_F16}
HEAD = {"k_scale": S.HEAD, "v_scale": S.HEAD}
PLAIN = {"k_scale": S.NONE, "v_scale": S.NONE}
NAN, INF = float("nan"), float("inf")
INT8 = ck.KVAppendDescriptor(24, 3, 64, 8, BF16, K.INT8, NHD, **TOKEN)
E4M3 = replace(INT8, kv_dtype=K.E4M3, layout=HND)
PAGES = 6
QUANTISED = [
    *[(kv, scale) for kv in (K.E4M3, K.E5M2) for scale in (S.NONE, S.TENSOR, S.HEAD, S.TOKEN_F16)],
    *[(K.INT8, scale) for scale in (S.TENSOR, S.HEAD, S.TOKEN_F16)],
]


def assert_appends(d: ck.KVAppendDescriptor, backend: str, tokens: int = 24, pages: int = PAGES, scale: float = 3.0) -> None:
    (k, v), slots = random_kv(d, tokens, scale=scale), random_slots(d, tokens, pages)
    append(d, backend, k, v, slots, pages).assert_equals(expected(d, k, v, slots, pages))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [HND, NHD], ids=["hnd", "nhd"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("kv_dtype", "scale"), QUANTISED, ids=str)
def test_quantised(kv_dtype: ck.KVDtype, scale: ck.KVScale, dtype: torch.dtype, layout: ck.KVLayout, backend: str) -> None:
    assert_appends(replace(INT8, kv_dtype=kv_dtype, k_scale=scale, v_scale=scale, dtype=dtype, layout=layout), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [HND, NHD], ids=["hnd", "nhd"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_copied(dtype: torch.dtype, layout: ck.KVLayout, backend: str) -> None:
    kv_dtype = {F16: K.F16, BF16: K.BF16}[dtype]
    assert_appends(replace(INT8, dtype=dtype, kv_dtype=kv_dtype, layout=layout, **PLAIN), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [1, 2, 5, 80, 128, 252, 255, 256])
@pytest.mark.parametrize("d", [INT8, replace(E4M3, **HEAD), replace(E4M3, kv_dtype=None, **PLAIN)], ids=str)
def test_any_head_dim(d: ck.KVAppendDescriptor, head_dim: int, backend: str) -> None:
    assert_appends(replace(d, head_dim=head_dim), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 17, "num_kv_heads": 1},
        {"num_kv_heads": 7, "slot_dtype": torch.int32},
        {"k_scale": S.TOKEN},
        {"v_dtype": K.E4M3, "v_scale": S.HEAD},
        {"v_dtype": K.BF16, "v_scale": S.NONE, "num_kv_heads": 4, "num_tokens": 2**16},
        {"kv_dtype": K.E5M2, "k_scale": S.NONE, "v_dtype": K.INT8, "v_scale": S.TENSOR},
        {"alignment_bytes": 2},
        {"layout": ck.KVLayout("HND", 4)},
        {"num_pages": 30, "num_tokens": 1000},
    ],
    ids=str,
)
def test_other_shapes(changes: dict, backend: str) -> None:
    assert_appends(replace(INT8, **changes), backend, pages=30)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("kv_dtype", "scale"), QUANTISED, ids=str)
def test_every_16_bit_value(kv_dtype: ck.KVDtype, scale: ck.KVScale, dtype: torch.dtype, backend: str) -> None:
    """Zeros of both signs, subnormals, ties, infinities and NaNs; 64 neighbouring bit patterns a row."""
    d = replace(INT8, kv_dtype=kv_dtype, k_scale=scale, v_scale=scale, dtype=dtype, num_tokens=256, num_kv_heads=4, page_size=256)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 4, 64)
    shuffled = patterns.view(-1)[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(patterns.shape)
    slots = torch.arange(256)
    got, want = append(d, backend, patterns, shuffled, slots, 1), fresh(d, 1)
    given = given_scales(d, "cpu")
    for name, x in (("k", patterns), ("v", shuffled)):
        cache, found_scale = getattr(want, f"{name}_cache"), getattr(want, f"{name}_scale")
        for token in range(256):
            for head in range(4):
                divisor = given[f"{name}_scale"].reshape(-1).numpy()[head if scale == S.HEAD else 0] if given else None
                codes, found = naive_row(x[token, head].float().numpy(), kv_dtype, scale, divisor)
                cache[0, token, head] = torch.from_numpy(codes).view(cache.dtype)
                if found_scale is not None:
                    found_scale[0, token, head] = float(found)
    got.assert_equals(want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_an_int8_round_trip(dtype: torch.dtype, backend: str) -> None:
    """Inputs * 0.1: within 0.002, the scales rounded to f16 as they are."""
    d = replace(INT8, dtype=dtype, head_dim=128, num_tokens=48)
    k, v = random_kv(d, 48, scale=0.1)
    memory = append(d, backend, k, v, torch.arange(48), PAGES)
    for x, cache, scale in ((k, memory.k_cache, memory.k_scale), (v, memory.v_cache, memory.v_scale)):
        real = cache.float() * scale.float()[..., None]
        assert (real.view(48, 3, 128).cpu() - x.float()).abs().max() <= 0.002


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_saturation_and_nan(backend: str) -> None:
    """Written out: halves go to the even code, what is beyond is the largest, NaN stays; int8 knows no NaN."""
    d = replace(INT8, head_dim=8, num_kv_heads=1, dtype=F16, num_tokens=1, page_size=1)
    x = torch.tensor([0.5, 1.5, 2.5, -2.5, 300.0, -INF, NAN, 126.5], dtype=F16).view(1, 1, 8)
    slots = torch.zeros(1, dtype=torch.int64)
    one = {"k_scale": torch.ones(1, device=device_of(backend)), "v_scale": torch.ones((), device=device_of(backend))}
    for kv_dtype, codes in (
        (K.INT8, [0, 2, 2, -2, 127, -127, 0, 126]),
        (K.E4M3, [0x30, 0x3C, 0x42, 0xC2 - 256, 0x79, 0xFE - 256, 0x7F, 0x70]),
        (K.E5M2, [0x38, 0x3E, 0x41, 0xC1 - 256, 0x5D, 0xFB - 256, 0x7F, 0x58]),
    ):
        plan = select(replace(d, kv_dtype=kv_dtype, k_scale=S.TENSOR, v_scale=S.TENSOR), backend)
        memory = fresh(plan.descriptor, 1, device_of(backend))
        operands = (x.to(device_of(backend)),) * 2
        plan.run(*operands, memory.k_cache, memory.v_cache, slots.to(device_of(backend)), **one)
        assert memory.k_cache.view(torch.int8).flatten().tolist() == codes
        assert torch.equal(memory.k_cache.view(torch.int8), memory.v_cache.view(torch.int8))
        if kv_dtype is not K.INT8:
            assert naive_fp8(x.flatten().double().numpy(), kv_dtype).view("int8").tolist() == codes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", [K.INT8, K.E4M3, K.E5M2], ids=str)
def test_rows_of_zeros_and_of_infinity(kv_dtype: ck.KVDtype, backend: str) -> None:
    """Zeros have the least scale, not a division by zero; a row with infinity or NaN reads as NaN, its neighbours do not."""
    d = replace(INT8, kv_dtype=kv_dtype, k_scale=S.TOKEN, v_scale=S.TOKEN)
    k, v = random_kv(d, 24)
    k[0], v[1, 1], k[2, 0, 3], v[3, 2, 63] = 0.0, -0.0, INF, NAN
    slots = torch.arange(24)
    memory = append(d, backend, k, v, slots, PAGES)
    memory.assert_equals(expected(d, k, v, slots, PAGES))
    k_scale, v_scale = memory.k_scale.view(-1, 3), memory.v_scale.view(-1, 3)
    assert (k_scale[0] > 0).all() and k_scale[0].max() < 1e-9
    assert k_scale[2, 0].isinf() and v_scale[3, 2].isnan()
    assert k_scale[2, 1:].isfinite().all() and v_scale[3, :2].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_slots_past_the_cache_are_masked_and_flagged(slot_dtype: torch.dtype, backend: str) -> None:
    d = replace(INT8, slot_dtype=slot_dtype)
    (k, v), slots = random_kv(d, 24), random_slots(d, 24, PAGES)
    plan = select(d, backend)
    plan.clear_status()
    append(d, backend, k, v, slots, PAGES)
    assert plan.status() is None, "a skipped token is no fault"
    for bad in (PAGES * 8, 2**31 - 1, *((2**31, 2**32, 2**32 + 3, 2**63 - 1) if slot_dtype == torch.int64 else ())):
        slots[11] = bad
        append(d, backend, k, v, slots, PAGES).assert_equals(expected(d, k, v, slots, PAGES))
        assert plan.status() == ck.Fault(11, "slot", min(bad, 2**31 - 1))
        plan.clear_status()
        memory, device = fresh(d, PAGES, device_of(backend)), device_of(backend)
        operands = (k.to(device), v.to(device), memory.k_cache, memory.v_cache, slots.to(device))
        validating = select(d, backend, validate=True)
        with pytest.raises(ck.InvalidArgument, match=rf"slots: token 11 has slot {min(bad, 2**31 - 1)}"):
            validating.run(*operands, k_scale=memory.k_scale, v_scale=memory.v_scale)
        memory.assert_equals(fresh(d, PAGES))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_strided_inputs_caches_and_scales(order: str, backend: str) -> None:
    """A fused projection; K and V interleaved in one pool; scales behind the values of each page; strided slots."""
    d = replace(INT8, layout=ck.KVLayout(order), num_kv_heads=4)
    device = device_of(backend)
    (k, v), slots = random_kv(d, 24), random_slots(d, 24, PAGES)
    want = expected(d, k, v, slots, PAGES)
    fused = torch.zeros(24, 12 * d.head_dim, dtype=BF16, device=device)  # q of 4 heads, k, v
    k_in, v_in = (fused[:, part * 256 : (part + 1) * 256].view(24, 4, 64) for part in (1, 2))
    k_in.copy_(k), v_in.copy_(v)
    values, scales = 8 * 4 * 64, 8 * 4 * 2  # bytes a page of one cache
    pool = filled((PAGES, 2 * (values + scales)), torch.int8, device)
    inner = (8, 4) if order == "NHD" else (4, 8)
    k_cache, v_cache = (pool[:, i * values : (i + 1) * values].unflatten(1, (*inner, 64)) for i in (0, 1))
    k_scale, v_scale = (pool.view(F16)[:, values + i * 32 : values + (i + 1) * 32].unflatten(1, (8, 4)) for i in (0, 1))
    spread = torch.full((24, 3), 10**6, dtype=torch.int64, device=device)
    spread[:, 1] = slots.to(device)
    plan = select(d, backend)
    plan.run(k_in, v_in, k_cache, v_cache, spread[:, 1], k_scale=k_scale, v_scale=v_scale)
    Memory(k_cache, v_cache, k_scale, v_scale).assert_equals(want)
    flat = fresh(d, PAGES, device)
    plan.run(
        k_in,
        v_in,
        flat.k_cache,
        flat.v_cache,
        spread[:, 1],
        k_scale=flat.k_scale.view(-1),
        v_scale=flat.v_scale.view(-1),
    )
    flat.assert_equals(want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", [K.E4M3, K.E5M2], ids=str)
def test_fp8_caches_as_bytes(kv_dtype: ck.KVDtype, backend: str) -> None:
    d = replace(E4M3, kv_dtype=kv_dtype, **PLAIN)
    device = device_of(backend)
    (k, v), slots = random_kv(d, 24), random_slots(d, 24, PAGES)
    memory = fresh(d, PAGES, device)
    caches = (memory.k_cache.view(torch.uint8), memory.v_cache.view(torch.uint8))
    select(d, backend).run(k.to(device), v.to(device), *caches, slots.to(device))
    memory.assert_equals(expected(d, k, v, slots, PAGES))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 24])
def test_any_number_of_tokens_up_to_the_maximum(tokens: int, backend: str) -> None:
    assert_appends(INT8, backend, tokens=tokens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 37, 400])
@pytest.mark.parametrize("d", [INT8, replace(E4M3, **HEAD), replace(E4M3, kv_dtype=None, **PLAIN)], ids=str)
def test_threads_of_several_rows(d: ck.KVAppendDescriptor, tokens: int, backend: str) -> None:
    """A plan for many tokens, whose threads take two or four rows, or two loads of one: the last ones have none."""
    plan = select(replace(d, num_tokens=2**17), backend)
    if backend != "cpu":
        unroll, rounds = (1, 2) if d.k_scale.granularity == "token" else (4 if d.kv_dtype is K.BF16 else 2, 1)
        assert (plan.sku.config.unroll, plan.sku.config.rounds) == (unroll, rounds)
    assert_appends(plan.descriptor, backend, tokens=tokens, pages=60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_strides_of_extents_of_one(backend: str) -> None:
    d = replace(INT8, num_kv_heads=1, page_size=1, num_tokens=1)
    device = device_of(backend)
    k, v = random_kv(d, 1)
    slots = torch.zeros(1, dtype=torch.int64)
    memory = fresh(d, 1, device)
    odd = [t.to(device).as_strided(t.shape, (3, 7, 1)) for t in (k, v)]
    caches = [t.as_strided(t.shape, (1, 5, 3, 1)) for t in (memory.k_cache, memory.v_cache)]
    select(d, backend).run(*odd, *caches, slots.to(device), k_scale=memory.k_scale, v_scale=memory.v_scale)
    memory.assert_equals(expected(d, k, v, slots, 1))


@pytest.mark.parametrize("backend", ONE_CALL)
@pytest.mark.parametrize("head_dim", [7, 16])
@pytest.mark.parametrize("rotary_dim", [0, 6])
@pytest.mark.parametrize(("k_stored", "v_stored"), [(K.E4M3, K.F16), (K.F16, K.E5M2), (K.E4M3, None)], ids=str)
def test_an_8_bit_cache_aligned_to_single_bytes(
    k_stored: ck.KVDtype, v_stored: ck.KVDtype | None, rotary_dim: int, head_dim: int, backend: str
) -> None:
    """One call serves an odd head_dim and an odd address, also beside a cache of 16 bits."""
    d = ck.KVAppendDescriptor(24, 3, head_dim, 8, F16, k_stored, v_dtype=v_stored)
    (k, v), slots, memory = random_kv(d, 24), random_slots(d, 24, PAGES), fresh(d, PAGES, device_of(backend))
    for name in ("k_cache", "v_cache"):
        cache = getattr(memory, name)
        if cache.itemsize == 1:
            odd = torch.zeros(cache.numel() + 1, dtype=torch.uint8, device=cache.device)[1:]
            setattr(memory, name, odd.view(cache.dtype).view(cache.shape).copy_(cache))
    rotated, given = k, {"k": k, "v": v, "slots": slots}
    if rotary_dim:
        angles = {"cos_sin_cache": cos_sin_of(50, rotary_dim), "positions": torch.arange(24)}
        rotated, given = ck.apply_rotary(k, **angles, rotary=ck.Rotary("half", rotary_dim)), given | angles
    given = {name: tensor.to(memory.k_cache.device) for name, tensor in given.items()}
    ck.append_kv(**given, k_cache=memory.k_cache, v_cache=memory.v_cache)
    memory.assert_equals(expected(d, rotated, v, slots, PAGES))


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_a_graph_and_a_side_stream_equal_an_eager_run(arch: str) -> None:
    (k, v), plan = [t.cuda() for t in random_kv(INT8, 24)], select(INT8, arch)
    slots, memory = random_slots(INT8, 24, PAGES).cuda(), fresh(INT8, PAGES, "cuda")
    operands = (k, v, memory.k_cache, memory.v_cache, slots)
    scales = {"k_scale": memory.k_scale, "v_scale": memory.v_scale}
    plan.run(*operands, **scales)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        plan.run(*operands, **scales)
    for seed in range(3):
        fresh_k, fresh_v = random_kv(INT8, 24, seed)
        k.copy_(fresh_k), v.copy_(fresh_v), slots.copy_(random_slots(INT8, 24, PAGES, seed))
        want = expected(INT8, fresh_k, fresh_v, slots.cpu(), PAGES)
        for launch in (graph.replay, lambda: plan.run(*operands, **scales, stream=side)):
            for tensor in (memory.k_cache, memory.v_cache, memory.k_scale, memory.v_scale):
                tensor.view(torch.uint8).fill_(0x55)
            side.wait_stream(torch.cuda.current_stream())
            launch()
            torch.cuda.current_stream().wait_stream(side)
            memory.assert_equals(want)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_offsets_past_32_bits(arch: str) -> None:
    d = ck.KVAppendDescriptor(8, 8, 128, 16, BF16, K.E4M3, HND)
    pages = 2**32 // (8 * 16 * 128) + 9
    k, v = random_kv(d, 8)
    slots = torch.tensor([0, 2**17 * 16 + 5, 2**18 * 16 - 1, 2**18 * 16, pages * 16 - 1, 77, -1, pages * 16])
    caches = [torch.zeros(pages, 8, 16, 128, dtype=torch.uint8, device="cuda") for _ in range(2)]
    select(d, arch).run(k.cuda(), v.cuda(), *caches, slots.cuda())
    for x, cache in ((k, caches[0]), (v, caches[1])):
        for token in range(6):
            page, slot = divmod(int(slots[token]), 16)
            codes = naive_fp8(x[token].double().numpy(), K.E4M3)
            assert torch.equal(cache[page, :, slot].cpu(), torch.from_numpy(codes))
        assert cache.count_nonzero() <= 6 * 8 * 128
