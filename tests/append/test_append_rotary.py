"""Appends with a rotary embedding on every backend: the bits of a rotation followed by an append, of K and of q."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from tests.support.append_cases import (
    Memory,
    cos_sin_of,
    expected,
    fresh,
    naive_rotary,
    random_kv,
    random_slots,
    run_scales,
    select,
)
from tests.support.harness import BACKENDS, device_of

F16, BF16 = torch.float16, torch.bfloat16
K, S, R = ck.KVDtype, ck.KVScale, ck.Rotary
PAGES, TOKENS, POSITIONS = 6, 24, 1000
TOKEN = {"k_scale": S.TOKEN_F16, "v_scale": S.TOKEN_F16}
INT8 = ck.KVAppendDescriptor(TOKENS, 3, 64, 8, BF16, K.INT8, ck.KVLayout.NHD, **TOKEN, rotary=R(num_heads=6))
COPY = replace(INT8, kv_dtype=None, k_scale=S.NONE, v_scale=S.NONE)


def rotary_inputs(d: ck.KVAppendDescriptor, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(q where there is one, cos_sin_cache, positions; a random row of them for each token), and the slots. On the CPU."""
    generator, rotary = torch.Generator().manual_seed(seed), d.rotary
    positions = torch.randint(0, POSITIONS, (TOKENS,), generator=generator).to(rotary.position_dtype)
    given = {"cos_sin_cache": cos_sin_of(POSITIONS, rotary.rotary_dim), "positions": positions}
    if rotary.num_heads:
        given["q"] = torch.randn(TOKENS, rotary.num_heads, d.head_dim, generator=generator).to(d.dtype)
    return given, random_slots(d, TOKENS, PAGES, seed)


def run(
    d: ck.KVAppendDescriptor, backend: str, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, given: dict[str, Any]
) -> tuple[Memory, torch.Tensor | None]:
    device = device_of(backend)
    memory = fresh(d, PAGES, device)
    operands = [t.to(device) for t in (k, v)], (memory.k_cache, memory.v_cache), (slots.to(device),)
    on_device = {name: tensor.to(device) for name, tensor in given.items()}
    out = select(d, backend).run(*operands[0], *operands[1], *operands[2], **run_scales(d, memory, device), **on_device)
    return memory, out


def assert_appends(d: ck.KVAppendDescriptor, backend: str) -> None:
    (k, v), (given, slots) = random_kv(d, TOKENS), rotary_inputs(d)
    angles = (given["cos_sin_cache"], given["positions"], d.rotary)
    memory, q_out = run(d, backend, k, v, slots, given)
    memory.assert_equals(expected(d, ck.apply_rotary(k, *angles), v, slots, PAGES))
    if d.rotary.num_heads:
        assert torch.equal(q_out.cpu(), ck.apply_rotary(given["q"], *angles))
    else:
        assert q_out is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("d", [INT8, COPY, replace(INT8, kv_dtype=K.E4M3, k_scale=S.NONE, v_scale=S.HEAD)], ids=str)
def test_bits_of_a_rotation_and_an_append(d: ck.KVAppendDescriptor, pairing: Any, dtype: torch.dtype, backend: str) -> None:
    assert_appends(replace(d, dtype=dtype, kv_dtype=None if d is COPY else d.kv_dtype, rotary=R(pairing, num_heads=6)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(2, 2), (5, 4), (64, 6), (64, 32), (80, 40), (128, 128), (255, 254), (256, 256), (256, 64)]
)
def test_any_head_dim_and_part_of_it(head_dim: int, rotary_dim: int, pairing: Any, backend: str) -> None:
    assert_appends(replace(INT8, head_dim=head_dim, rotary=R(pairing, rotary_dim, 3)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"rotary": R()},
        {"rotary": R("interleaved", position_dtype=torch.int32)},
        {"rotary": R(num_heads=21), "num_kv_heads": 7},
        {"alignment_bytes": 2, "rotary": R("interleaved", num_heads=3)},
        {"layout": ck.KVLayout("HND", 4)},
    ],
    ids=str,
)
def test_other_shapes(changes: dict[str, Any], backend: str) -> None:
    assert_appends(replace(INT8, **changes), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_what_is_stored_is_a_complex_product(pairing: Any, backend: str) -> None:
    """Against f64: K and q within half a unit of bf16 and f32's own error at the size of a pair."""
    d = replace(COPY, rotary=R(pairing, num_heads=3))
    (k, v), (given, _) = random_kv(d, TOKENS), rotary_inputs(d)
    memory, q_out = run(d, backend, k, v, torch.arange(TOKENS), given)
    for x, got in ((k, memory.k_cache.view(-1, 3, 64)[:TOKENS]), (given["q"], q_out)):
        exact, size = naive_rotary(x, given["cos_sin_cache"], given["positions"], pairing)
        error = (got.cpu().double().numpy() - exact).__abs__()
        assert (error <= 2.0**-8 * abs(exact) + 2.0**-22 * size).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_q_in_place_and_strided(backend: str) -> None:
    """q, K and V of one projection; q is rotated where it is."""
    d = replace(INT8, rotary=R(num_heads=6))
    (k, v), (given, slots) = random_kv(d, TOKENS), rotary_inputs(d)
    angles, device = (given["cos_sin_cache"], given["positions"], d.rotary), device_of(backend)
    fused = torch.cat([given["q"], k, v], 1).to(device)
    q, k_in, v_in = fused.split([6, 3, 3], 1)
    memory = fresh(d, PAGES, device)
    on_device = {name: given[name].to(device) for name in ("cos_sin_cache", "positions")}
    caches, scales = (memory.k_cache, memory.v_cache), run_scales(d, memory, device)
    out = select(d, backend).run(k_in, v_in, *caches, slots.to(device), **scales, q=q, q_out=q, **on_device)
    assert out is q and torch.equal(q.cpu(), ck.apply_rotary(given["q"], *angles))
    assert torch.equal(k_in.cpu(), k) and torch.equal(v_in.cpu(), v)
    memory.assert_equals(expected(d, ck.apply_rotary(k, *angles), v, slots, PAGES))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64], ids=str)
def test_a_position_without_angles_skips_its_token(position_dtype: torch.dtype, backend: str) -> None:
    d = replace(INT8, rotary=R(num_heads=3, position_dtype=position_dtype))
    (k, v), (given, slots) = random_kv(d, TOKENS), rotary_inputs(d)
    assert slots[10] < 0 <= slots[11], "a token that is skipped, and one that is not"
    given["positions"][10] = POSITIONS
    plan = select(d, backend)
    plan.clear_status()
    run(d, backend, k, v, slots, given)
    assert plan.status() is None, "what a padding token's position holds is no fault"
    beyond = (2**32 + 1, -(2**40)) if position_dtype == torch.int64 else ()
    for bad in (POSITIONS, -1, 2**31 - 1, *beyond):
        given["positions"][11] = bad
        kept = slots.clone()
        kept[11] = -1
        angles = (given["cos_sin_cache"], given["positions"], d.rotary)
        memory, q_out = run(d, backend, k, v, slots, given)
        memory.assert_equals(expected(d, ck.apply_rotary(k, *angles), v, kept, PAGES))
        assert torch.equal(q_out.cpu(), ck.apply_rotary(given["q"], *angles)) and torch.equal(q_out[11].cpu(), given["q"][11])
        value = max(-(2**31), min(bad, 2**31 - 1))
        assert plan.status() == ck.Fault(11, "position", value)
        plan.clear_status()
        device, memory = device_of(backend), fresh(d, PAGES, device_of(backend))
        operands = (k.to(device), v.to(device), memory.k_cache, memory.v_cache, slots.to(device))
        on_device = {name: tensor.to(device) for name, tensor in given.items()}
        with pytest.raises(ck.InvalidArgument, match=f"positions: token 11 has position {value}"):
            select(d, backend, validate=True).run(*operands, **run_scales(d, memory, device), **on_device)
        memory.assert_equals(fresh(d, PAGES))


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_a_graph_equals_an_eager_run(arch: str) -> None:
    (k, v), (given, slots) = [t.cuda() for t in random_kv(INT8, TOKENS)], rotary_inputs(INT8)
    given, slots, memory = {name: t.cuda() for name, t in given.items()}, slots.cuda(), fresh(INT8, PAGES, "cuda")
    plan, scales, q_out = select(INT8, arch), run_scales(INT8, memory, "cuda"), torch.empty_like(given["q"])
    operands = (k, v, memory.k_cache, memory.v_cache, slots)
    plan.run(*operands, **scales, **given, q_out=q_out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(*operands, **scales, **given, q_out=q_out)
    for seed in range(3):
        fresh_kv, (fresh_given, fresh_slots) = random_kv(INT8, TOKENS, seed), rotary_inputs(INT8, seed)
        k.copy_(fresh_kv[0]), v.copy_(fresh_kv[1]), slots.copy_(fresh_slots)
        for name, tensor in given.items():
            tensor.copy_(fresh_given[name])
        for tensor in (memory.k_cache, memory.v_cache, memory.k_scale, memory.v_scale):
            tensor.view(torch.uint8).fill_(0x55)
        graph.replay()
        angles = (fresh_given["cos_sin_cache"], fresh_given["positions"], INT8.rotary)
        memory.assert_equals(expected(INT8, ck.apply_rotary(fresh_kv[0], *angles), fresh_kv[1], fresh_slots, PAGES))
        assert torch.equal(q_out.cpu(), ck.apply_rotary(fresh_given["q"], *angles))
