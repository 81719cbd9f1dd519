"""append_kv and merge_states on a GPU: the bits of the plans, compiled as one graph, and captured. CPU: test_functional.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from tests.support.append_cases import Memory, cos_sin_of, expected, fresh, random_kv, random_slots

K, S = ck.KVDtype, ck.KVScale
PAGES, TOKENS = 6, 24
D = ck.KVAppendDescriptor(TOKENS, 3, 64, 8, torch.bfloat16, K.INT8, ck.KVLayout.NHD, k_scale=S.TOKEN_F16, v_scale=S.TOKEN_F16)
ROTARY = ck.Rotary("interleaved", 32)


def arguments() -> tuple[dict[str, Any], Memory, Memory, torch.Tensor]:
    """(arguments of append_kv on the GPU, what is written of them, what is to stand there, q as it is to be rotated)."""
    (k, v), slots, memory = random_kv(D, TOKENS), random_slots(D, TOKENS, PAGES), fresh(D, PAGES, "cuda")
    q, table, positions = torch.randn(TOKENS, 6, 64).bfloat16(), cos_sin_of(50, 32), torch.arange(TOKENS)
    want = expected(D, ck.apply_rotary(k, table, positions, ROTARY), v, slots, PAGES)
    given = {"k": k, "v": v, "slots": slots, "q": q, "cos_sin_cache": table, "positions": positions}
    args: dict[str, Any] = {name: x.cuda() for name, x in given.items()} | {"layout": "NHD", "pairing": "interleaved"}
    args |= {"k_cache": memory.k_cache, "v_cache": memory.v_cache, "k_scale": memory.k_scale, "v_scale": memory.v_scale}
    return args, memory, want, ck.apply_rotary(q, table, positions, ROTARY)


def clear(memory: Memory) -> None:
    for tensor in (memory.k_cache, memory.v_cache, memory.k_scale, memory.v_scale):
        tensor.view(torch.uint8).fill_(0x55)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
def test_an_append_is_the_plans(how: str) -> None:
    args, memory, want, want_q = arguments()
    run = torch.compile(ck.append_kv, fullgraph=True, backend="aot_eager") if how == "compiled" else ck.append_kv
    q = run(**args)
    if how == "captured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = ck.append_kv(**args)
        clear(memory)
        graph.replay()
    memory.assert_equals(want)
    assert torch.equal(q.cpu(), want_q)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
def test_a_merge_is_the_plans(how: str) -> None:
    outs, lses = torch.randn(3, 4, 5, 64, device="cuda").bfloat16(), torch.randn(3, 4, 5, device="cuda")
    want = ck.MergeStatesPlan.select(ck.MergeStatesDescriptor(3, 4, 5, 64, torch.bfloat16), "cuda").run(outs, lses)
    run = torch.compile(ck.merge_states, fullgraph=True, backend="aot_eager") if how == "compiled" else ck.merge_states
    got = run(outs, lses)
    if how == "captured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ck.merge_states(outs, lses)
        for tensor in got:
            tensor.fill_(7.0)
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
