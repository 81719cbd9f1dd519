"""New tokens of flash_attn_with_kvcache: where they land, what they are there, and attention over them, against dense f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.integrations.flash_attn import flash_attn_with_kvcache
from tests.support.bits import same_bits
from tests.support.flash_attention import Filled, Masks, dense, filled
from tests.support.tolerance import check_states

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
LENGTHS, ROOM, HEADS, KV_HEADS, DIM = (0, 5, 31, 60), 64, 4, 2, 64
NEW = (3, 0, 1, 4)  # of each request, where they differ
Q_LENS = (2, 1, 0, 4)
pytestmark = pytest.mark.parametrize("device", DEVICES)


def normal(*size: int, device: str, seed: int = 3) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def starts(counts: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)


def expected(cache: Filled, news: list[tuple[Tensor, Tensor]], lengths: tuple[int, ...], rows: tuple[int, ...]) -> Filled:
    """The cache with each request's new tokens written one by one, through the table; all else as it was."""
    grown = Filled(cache.k.clone(), cache.v.clone(), cache.page_table, cache.lengths)
    for (k, v), length, row in zip(news, lengths, rows, strict=True):
        for i in range(len(k)):
            for stored, token in ((grown.k, k[i]), (grown.v, v[i])):
                page_size = stored.shape[1]
                if cache.page_table is None:
                    stored[row, length + i] = token
                else:
                    page = int(cache.page_table[row, (length + i) // page_size])
                    stored[page, (length + i) % page_size] = token
    return grown


def check_caches(cache: Filled, wanted: Filled) -> None:
    assert same_bits(cache.k, wanted.k) and same_bits(cache.v, wanted.v)


def check_request(out: Tensor, lse: Tensor, q: Tensor, kv: tuple[Tensor, Tensor], masks: Masks) -> None:
    q = q.cpu()
    check_states((out.cpu(), lse.T.cpu()), dense(q, *kv, masks), dense(q, *kv, masks, dtype=torch.bfloat16)[0])


@pytest.mark.parametrize("page_size", [None, 16, 1])
@pytest.mark.parametrize("index", [None, (2, 0, 3, 1)])
@pytest.mark.parametrize(("count", "q_len"), [(1, 1), (4, 4), (4, 2), (2, 5)])
def test_as_many_new_tokens_each(
    count: int, q_len: int, index: tuple[int, ...] | None, page_size: int | None, device: str
) -> None:
    cache, rows = filled(LENGTHS, device, page_size=page_size, spare=4), index or (0, 1, 2, 3)
    lengths, masks = tuple(LENGTHS[row] for row in rows), Masks(causal=True, window=(40, 0))
    q, k, v = normal(4, q_len, HEADS, DIM, device=device), *normal(2, 4, count, KV_HEADS, DIM, device=device, seed=4)
    wanted = expected(cache, list(zip(k, v, strict=True)), lengths, rows)
    given: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device)}
    given |= {"page_table": cache.page_table, "causal": True, "window_size": (40, 0), "return_softmax_lse": True}
    if index:
        given["cache_batch_idx"] = torch.tensor(index, dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given)
    check_caches(cache, wanted)
    for request, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        check_request(out[request], lse[request], q[request], wanted.held(row, length + count), masks)
    assert given["cache_seqlens"].tolist() == list(lengths)


@pytest.mark.parametrize("page_size", [None, 16])
def test_another_number_of_new_tokens_each(page_size: int | None, device: str) -> None:
    """Ragged q and k; the rows of both past the last request's are padding."""
    cache = filled(LENGTHS, device, page_size=page_size, spare=4)
    q, (k, v) = normal(sum(Q_LENS) + 2, HEADS, DIM, device=device), normal(2, sum(NEW) + 3, KV_HEADS, DIM, device=device, seed=4)
    for padded, used in ((q, sum(Q_LENS)), (k, sum(NEW)), (v, sum(NEW))):
        padded[used:] = torch.nan
    cu_q, cu_k = starts(Q_LENS, device), starts(NEW, device)
    news = [(k[a:b], v[a:b]) for a, b in zip(cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)]
    wanted = expected(cache, news, LENGTHS, (0, 1, 2, 3))
    given = {"cache_seqlens": cache.lengths, "page_table": cache.page_table, "cu_seqlens_q": cu_q, "max_seqlen_q": 4}
    out, lse = flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, **given, cu_seqlens_k_new=cu_k, causal=True, return_softmax_lse=True
    )
    check_caches(cache, wanted)
    for row, (a, b) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)):
        check_request(out[a:b], lse[:, a:b], q[a:b], wanted.held(row, LENGTHS[row] + NEW[row]), Masks(causal=True))


@pytest.mark.parametrize(("page_size", "pad"), [(None, 0), (16, -1), (16, 2)])
@pytest.mark.parametrize("count", [1, 6])
def test_a_token_without_room_is_not_stored(count: int, page_size: int | None, pad: int, device: str) -> None:
    """Neither in the next row nor in another page; a padded request, of length -1, takes none and sees no key."""
    lengths = (ROOM, ROOM - 2, -1)
    cache = filled((ROOM, ROOM - 2, 0), device, page_size=page_size, spare=2)
    if cache.page_table is not None:
        cache.page_table[2] = pad
    k, v = normal(2, 3, count, KV_HEADS, DIM, device=device)
    news = [(k[row, :n], v[row, :n]) for row, n in enumerate((0, min(count, 2), 0))]
    wanted = expected(cache, news, (ROOM, ROOM - 2, 0), (0, 1, 2))
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = normal(3, 1, HEADS, DIM, device=device)
    out = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=seqlens, page_table=cache.page_table)
    check_caches(cache, wanted)
    assert not out[2].any(), "no key: zeros"


def turned(x: Tensor, positions: list[int], cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, dim] rotated pair by pair, in f64, rounded once."""
    y, width = x.double().clone(), cos.shape[1]
    for token, position in enumerate(positions):
        for pair in range(width):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width)
            c, s = cos[position, pair].double(), sin[position, pair].double()
            first, second = x[token, :, a].double(), x[token, :, b].double()
            y[token, :, a], y[token, :, b] = first * c - second * s, second * c + first * s
    return y.to(x.dtype)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("causal", "count", "q_len", "width"), [(True, 1, 1, 16), (True, 3, 3, 32), (True, 2, 4, 16), (False, 3, 3, 16)]
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_rotary(elsewhere: bool, causal: bool, count: int, q_len: int, width: int, interleaved: bool, device: str) -> None:
    """In order under a mask, else every query row at its request's first new position; also of positions given apart."""
    cache = filled(LENGTHS, device, page_size=16, spare=4)
    angles = torch.rand(80, width, generator=torch.Generator().manual_seed(1)) * 6.28
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    q, (k, v) = normal(4, q_len, HEADS, DIM, device=device), normal(2, 4, count, KV_HEADS, DIM, device=device, seed=4)
    first = [length // 2 if elsewhere else length for length in LENGTHS]
    q_at = [[f + (i if causal else 0) for i in range(q_len)] for f in first]
    q_turned = [turned(q[b].cpu(), q_at[b], cos, sin, interleaved) for b in range(4)]
    k_turned = [turned(k[b].cpu(), [f + i for i in range(count)], cos, sin, interleaved) for b, f in enumerate(first)]
    wanted = expected(cache, [(kt.to(device), vb) for kt, vb in zip(k_turned, v, strict=True)], LENGTHS, (0, 1, 2, 3))
    given: dict[str, Any] = {"rotary_cos": cos.to(device), "rotary_sin": sin.to(device), "rotary_interleaved": interleaved}
    if elsewhere:
        given["rotary_seqlens"] = torch.tensor(first, dtype=torch.int32, device=device)
    given |= {"cache_seqlens": cache.lengths, "page_table": cache.page_table, "causal": causal, "return_softmax_lse": True}
    before = q.clone()
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given)
    assert torch.equal(q, before), "the caller's q is left as it is"
    assert same_bits(cache.v, wanted.v)
    torch.testing.assert_close(cache.k, wanted.k, rtol=2**-7, atol=1e-6, equal_nan=True)  # f32 and f64 round to neighbours
    for row, length in enumerate(LENGTHS):
        check_rotated(out[row], lse[row], q_turned[row], cache.held(row, length + count), Masks(causal=causal))


def check_rotated(out: Tensor, lse: Tensor, q: Tensor, kv: tuple[Tensor, Tensor], masks: Masks) -> None:
    """As check_request, but that q may be a rounding apart: over keys as they are stored."""
    exact_out, exact_lse = dense(q, *kv, masks)
    torch.testing.assert_close(out.cpu().double(), exact_out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.T.cpu().double(), exact_lse, rtol=0.01, atol=0.01)


def test_into_8_bits(device: str) -> None:
    """Divided by the scales that attention multiplies by: 0.5 and 4 are exact."""
    cache = filled(LENGTHS, device, page_size=16, dtype=torch.float8_e4m3fn, spare=1)
    q, (k, v) = normal(4, 1, HEADS, DIM, device=device), normal(2, 4, 1, KV_HEADS, DIM, device=device, seed=4)
    scales = torch.tensor([0.5, 4.0], device=device)
    stored = [tuple((x[b].float() / scales[:, None]).to(torch.float8_e4m3fn) for x in (k, v)) for b in range(4)]
    wanted = expected(cache, stored, LENGTHS, (0, 1, 2, 3))
    given = {
        "k_descale": scales.expand(4, 2),
        "v_descale": scales,
        "cache_seqlens": cache.lengths,
        "page_table": cache.page_table,
    }
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given, return_softmax_lse=True)
    check_caches(cache, wanted)
    for row, length in enumerate(LENGTHS):
        kv = tuple(t.float() * scales.cpu()[:, None] for t in wanted.held(row, length + 1))
        check_request(out[row], lse[row], q[row], kv, Masks())


def test_a_padding_in_front_of_appended_tokens(device: str) -> None:
    cache, padding = filled(LENGTHS, device, spare=2), (0, 4, 31, 7)
    q, (k, v) = normal(4, 2, HEADS, DIM, device=device), normal(2, 4, 2, KV_HEADS, DIM, device=device, seed=4)
    wanted = expected(cache, list(zip(k, v, strict=True)), LENGTHS, (0, 1, 2, 3))
    given = {"cache_seqlens": cache.lengths, "cache_leftpad": torch.tensor(padding, dtype=torch.int32, device=device)}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given, causal=True, return_softmax_lse=True)
    check_caches(cache, wanted)
    for row, length in enumerate(LENGTHS):
        held = wanted.held(row, length + 2)
        same = dense(q[row].cpu(), *held, Masks(causal=True), padding[row], torch.bfloat16)[0]
        check_states((out[row].cpu(), lse[row].T.cpu()), dense(q[row].cpu(), *held, Masks(causal=True), padding[row]), same)


@pytest.mark.parametrize(("given", "pairs"), [(0, False), (False, False), (np.False_, False), (1, True), (None, True)], ids=str)
def test_pairs_of_a_rotary_embedding_by_any_flag(given: Any, pairs: bool, device: str) -> None:
    cache = filled(LENGTHS, device, spare=1)
    q, (k, v) = normal(4, 1, HEADS, DIM, device=device), normal(2, 4, 1, KV_HEADS, DIM, device=device, seed=4)
    angles = torch.rand(80, 16, generator=torch.Generator().manual_seed(1)).to(device) * 6.28
    cos, sin = angles.cos(), angles.sin()
    options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": given}
    flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=cache.lengths, **options)
    for row, length in enumerate(LENGTHS):
        stored = turned(k[row].cpu(), [length], cos.cpu(), sin.cpu(), pairs)
        torch.testing.assert_close(cache.k[row, length : length + 1].cpu(), stored, rtol=2**-7, atol=1e-6)


def test_a_padded_request_of_ragged_new_tokens_takes_none(device: str) -> None:
    cache = filled((5, 0, 31), device, spare=4)
    k, v = normal(2, 7, KV_HEADS, DIM, device=device, seed=4)
    q, cu = normal(3, 1, HEADS, DIM, device=device), starts((2, 3, 2), device)
    wanted = expected(cache, [(k[:2], v[:2]), (k[:0], v[:0]), (k[5:], v[5:])], (5, 0, 31), (0, 1, 2))
    seqlens = torch.tensor([5, -2, 31], dtype=torch.int32, device=device)
    given = {"cache_seqlens": seqlens, "cu_seqlens_k_new": cu, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given)
    check_caches(cache, wanted)
    for row, length in enumerate((7, 0, 33)):
        check_request(out[row], lse[row], q[row], wanted.held(row, length), Masks())
