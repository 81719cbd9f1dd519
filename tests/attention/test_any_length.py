"""One plan over a contiguous cache whose length each run decides, on every backend; and the one call over many lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.api import plan_cache
from cute_kernels.compile.kernels import compiled_specs
from tests.support.harness import BACKENDS

HEADS, KV_HEADS, DIM = 8, 2, 128
LENGTHS = (1, 17, 64, 65, 700, 4097, 20_000)
STORAGES = {
    "bf16": {},
    "int8 token": {"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16},
}


def assert_right(got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Each row and head of (out, lse) against f64 attention over k and v [batch, num_kv_heads, seq_len, head_dim]."""
    scores = torch.einsum("bghd,bgnd->bghn", q.double().unflatten(1, (KV_HEADS, -1)), k.double()) * DIM**-0.5
    lse = scores.logsumexp(-1)
    right = torch.einsum("bghn,bgnd->bghd", (scores - lse[..., None]).exp(), v.double()).flatten(1, 2)
    error = (got[0].double() - right).norm(dim=-1) / right.norm(dim=-1)
    assert (error < 2**-8).all(), error.max()  # half an ulp of bf16 is 2**-9 of an element
    lse = lse.flatten(1)
    assert ((got[1] - lse).abs() <= 1e-5 * lse.abs().clamp(min=1)).all()


def contiguous(length: int, device: str, storage: dict) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor, Tensor]:
    """k and v as stored, their scales, and what they stand for."""
    k, v = torch.randn(2, 2, KV_HEADS, length, DIM, device=device).bfloat16()
    if not storage:
        return k, v, {}, k, v
    k, v = ((t * 40).clamp(-127, 127).to(torch.int8) for t in (k, v))
    scales = {name: (torch.rand(2, KV_HEADS, length, device=device) / 40 + 0.01).half() for name in ("k_scale", "v_scale")}
    real = (t.double() * scales[name][..., None].double() for t, name in ((k, "k_scale"), (v, "v_scale")))
    return k, v, scales, *real


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_plan_serves_every_length(backend: str, whole: bool, storage: str) -> None:
    """In an order that grows and shrinks, past its hint, over one workspace."""
    device = "cpu" if backend == "cpu" else "cuda"
    torch.manual_seed(0)
    fields = (2, HEADS, KV_HEADS, None, DIM, torch.bfloat16)
    descriptor = ck.FlashDecodingDescriptor(*fields, **STORAGES[storage], max_seq_len=64)
    preference = ck.PlanPreference(arch=backend, max_workspace_bytes=0 if whole else None)
    plan = ck.FlashDecodingPlan.select(descriptor, device, preference)
    q, workspace = torch.randn(2, HEADS, DIM, device=device).bfloat16(), plan.new_workspace()
    for length in (*LENGTHS, *reversed(LENGTHS)):
        k, v, scales, real_k, real_v = contiguous(length, device, STORAGES[storage])
        assert_right(plan.run(q, k, v, **scales, workspace=workspace), q, real_k, real_v)


@pytest.mark.gpu
def test_many_lengths_in_one_call_make_few_plans_and_kernels() -> None:
    torch.manual_seed(1)
    q = torch.randn(2, HEADS, DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, KV_HEADS, 4096, DIM, device="cuda").bfloat16()
    before, plans = len(compiled_specs()), plan_cache.plan_of.cache_info().misses
    for length in range(1, 4097, 4):
        assert_right(ck.decode_attention(q, k[:, :, :length], v[:, :, :length]), q, k[:, :, :length], v[:, :, :length])
    assert plan_cache.plan_of.cache_info().misses - plans <= 7
    assert len(compiled_specs()) - before <= 4
