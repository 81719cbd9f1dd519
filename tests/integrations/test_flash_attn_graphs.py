"""What only a GPU can show of flash-attention's functions: captured calls over other lengths, and no synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from cute_kernels.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.support.flash_attention import Filled, Masks, dense, filled
from tests.support.tolerance import check_states

pytestmark = pytest.mark.gpu
LENGTHS, HEADS, KV_HEADS, DIM = (0, 5, 31, 57), 4, 2, 64


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(out: Tensor, lse: Tensor, q: Tensor, cache: Filled, lengths: list[int], masks: Masks, first: list[int]) -> None:
    for row, length in enumerate(lengths):
        kv, mine = cache.held(row, length), q[row].cpu()
        same, _ = dense(mine, *kv, masks, first[row], torch.bfloat16)
        check_states((out[row].cpu(), lse[row].T.cpu()), dense(mine, *kv, masks, first[row]), same)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_captured_append_and_attention_follow_the_lengths(count: int, padded: bool, page_size: int | None) -> None:
    """Replayed with other lengths, paddings, new tokens and queries in the tensors that were captured."""
    cache, masks = filled(LENGTHS, "cuda", page_size=page_size, spare=7), Masks(causal=True)
    q = torch.randn(4, count, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 4, count, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    padding = torch.zeros(4, dtype=torch.int32, device="cuda")
    given = {"cache_seqlens": cache.lengths, "page_table": cache.page_table, "causal": True, "return_softmax_lse": True}
    given["cache_leftpad"] = padding if padded else None

    def call() -> tuple[Tensor, Tensor]:
        return flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given)

    call()
    with no_synchronisation():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for step in range(2):
        q.normal_(), k.normal_(), v.normal_()
        cache.lengths.add_(count * step)
        padding.copy_(torch.tensor([0, 2 * step, 5, 40 * step]))
        graph.replay()
        torch.cuda.synchronize()
        lengths = (cache.lengths + count).tolist()
        for row, length in enumerate(lengths):
            held = cache.held(row, length)
            assert torch.equal(held[0][length - count :], k[row].cpu()) and torch.equal(held[1][length - count :], v[row].cpu())
        check(out, lse, q, cache, lengths, masks, padding.tolist() if padded else [0] * 4)


def test_packed_rows_do_not_synchronise() -> None:
    cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32, device="cuda")
    q, k = (torch.randn(10, heads, DIM, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS))
    most = torch.tensor(7, device="cuda")
    for bound in (7, most):
        flash_attn_varlen_func(q, k, k, cu, cu, bound, bound, causal=True)
    with no_synchronisation():
        flash_attn_varlen_func(q, k, k, cu, cu, most, most, causal=True)
        out, lse = flash_attn_varlen_func(q, k, k, cu, cu, 7, 7, causal=True, return_attn_probs=True)
    for a, b in ((0, 3), (3, 10)):
        exact = dense(q[a:b].cpu(), k[a:b].cpu(), k[a:b].cpu(), Masks(causal=True))
        same, _ = dense(q[a:b].cpu(), k[a:b].cpu(), k[a:b].cpu(), Masks(causal=True), dtype=torch.bfloat16)
        check_states((out[a:b].cpu(), lse[:, a:b].T.cpu()), exact, same)
