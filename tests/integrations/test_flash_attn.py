"""flash-attention's functions over our plans against dense f64 PyTorch, row by row: attention, without new tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.support.flash_attention import Filled, Masks, dense, filled
from tests.support.tolerance import check_states

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
LENGTHS, Q_LENS = (0, 5, 33, 64), (2, 3, 0, 7)
HEADS, DIM = 4, 64
SLOPES, SINKS = torch.tensor([0.5, 0.1, 0.02, 1.0]), torch.tensor([1.0, -2.0, 0.0, 3.0])
MASKS = {
    "none": Masks(),
    "causal": Masks(causal=True),
    "window": Masks(window=(7, 3)),
    "left": Masks(window=(7, -1)),
    "right_0": Masks(window=(-1, 0)),
    "causal_window": Masks(causal=True, window=(9, 5)),
    "softcap": Masks(causal=True, softcap=2.0, scale=0.3),
    "alibi": Masks(causal=True, slopes=SLOPES),
    "sinks": Masks(window=(4, 0), sinks=SINKS),
    "everything": Masks(causal=True, window=(20, 0), softcap=3.0, slopes=SLOPES, sinks=SINKS),
}
pytestmark = pytest.mark.parametrize("device", DEVICES)


def queries(*size: int, device: str) -> Tensor:
    return torch.randn(*size, HEADS, DIM, generator=torch.Generator().manual_seed(7)).bfloat16().to(device)


def arguments(masks: Masks, device: str) -> dict[str, Any]:
    """The masks as a call takes them."""
    given: dict[str, Any] = {"causal": masks.causal, "window_size": masks.window, "softcap": masks.softcap}
    given |= {"softmax_scale": masks.scale, "alibi_slopes": None if masks.slopes is None else masks.slopes.to(device)}
    return given | {"s_aux": None if masks.sinks is None else masks.sinks.to(device)}


def check_request(out: Tensor, lse: Tensor, q: Tensor, kv: tuple[Tensor, Tensor], masks: Masks, first: int = 0) -> None:
    """out [rows, num_heads, dim] and lse [num_heads, rows] of one request."""
    q = q.cpu()
    same, _ = dense(q, *kv, masks, first, torch.bfloat16)
    check_states((out.cpu(), lse.T.cpu()), dense(q, *kv, masks, first), same)


def cu_seqlens(counts: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)


def check_ragged(out: Tensor, lse: Tensor, q: Tensor, cache: Filled, masks: Masks) -> None:
    begin = 0
    for row, count in enumerate(Q_LENS):
        mine = slice(begin, begin + count)
        check_request(out[mine], lse[:, mine], q[mine], cache.held(row, LENGTHS[row]), masks)
        begin += count


@pytest.mark.parametrize("page_size", [None, 16, 1])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_masks_of_uniform_rows(masks: Masks, q_len: int, page_size: int | None, device: str) -> None:
    cache, q = filled(LENGTHS, device, page_size=page_size), queries(len(LENGTHS), q_len, device=device)
    given = {"cache_seqlens": cache.lengths, "page_table": cache.page_table, **arguments(masks, device)}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **given, return_softmax_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (len(LENGTHS), HEADS, q_len), torch.float32)
    for row, length in enumerate(LENGTHS):
        check_request(out[row], lse[row], q[row], cache.held(row, length), masks)
    assert torch.equal(flash_attn_with_kvcache(q, cache.k, cache.v, **given), out)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("masks", [MASKS["causal"], MASKS["everything"]], ids=["causal", "everything"])
def test_ragged_rows(masks: Masks, page_size: int | None, device: str) -> None:
    cache, q = filled(LENGTHS, device, page_size=page_size), queries(sum(Q_LENS), device=device)
    given = {"cu_seqlens_q": cu_seqlens(Q_LENS, device), "max_seqlen_q": max(Q_LENS), **arguments(masks, device)}
    paged = {"cache_seqlens": cache.lengths, "page_table": cache.page_table}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **paged, **given, return_softmax_lse=True)
    assert lse.shape == (HEADS, sum(Q_LENS))
    check_ragged(out, lse, q, cache, masks)


@pytest.mark.parametrize("keys", ["packed", "pages", "pages_by_cu_seqlens"])
@pytest.mark.parametrize("masks", [MASKS["causal"], MASKS["window"], MASKS["everything"]], ids=["causal", "window", "everything"])
def test_varlen(masks: Masks, keys: str, device: str) -> None:
    cache, q = filled(LENGTHS, device, page_size=16), queries(sum(Q_LENS), device=device)
    cu_q, cu_k = cu_seqlens(Q_LENS, device), cu_seqlens(LENGTHS, device)
    given = {**arguments(masks, device), "return_attn_probs": True}
    if keys == "packed":
        k, v = (torch.cat([cache.held(row, n)[i] for row, n in enumerate(LENGTHS)]).to(device) for i in (0, 1))
        out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(Q_LENS), max(LENGTHS), **given)
    elif keys == "pages":
        paged = {"block_table": cache.page_table, "seqused_k": cache.lengths}
        out, lse = flash_attn_varlen_func(q, cache.k, cache.v, cu_q, None, max(Q_LENS), max(LENGTHS), **paged, **given)
    else:
        out, lse = flash_attn_varlen_func(q, cache.k, cache.v, cu_q, cu_k, 7, 64, page_table=cache.page_table, **given)
    check_ragged(out, lse, q, cache, masks)


@pytest.mark.parametrize("masks", [MASKS["none"], MASKS["causal"], MASKS["everything"]], ids=["none", "causal", "everything"])
def test_dense(masks: Masks, device: str) -> None:
    cache, q = filled((20, 20), device, room=20), queries(2, 5, device=device)
    out, lse = flash_attn_func(q, cache.k, cache.v, **arguments(masks, device), return_attn_probs=True)
    for row in range(2):
        check_request(out[row], lse[row], q[row], cache.held(row, 20), masks)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("length", [None, 0, 17, 64])
def test_one_length_for_all(length: int | None, page_size: int | None, device: str) -> None:
    cache, q = filled((64, 64), device, page_size=page_size), queries(2, 2, device=device)
    given = {"cache_seqlens": length, "page_table": cache.page_table, "causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **given)
    for row in range(2):
        check_request(out[row], lse[row], q[row], cache.held(row, 64 if length is None else length), MASKS["causal"])


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("index", [None, (3, 1, 1, 2)])
@pytest.mark.parametrize("padding", [None, (0, 4, 33, 10)])
def test_rows_behind_an_index_and_a_padding(
    padding: tuple[int, ...] | None, index: tuple[int, ...] | None, page_size: int | None, device: str
) -> None:
    cache, masks = filled((64, 33, 40, 64), device, page_size=page_size), MASKS["causal_window"]
    lengths, q = (64, 20, 33, 40) if index else (64, 33, 40, 1), queries(4, 3, device=device)

    def tensor(x):
        return None if x is None else torch.tensor(x, dtype=torch.int32, device=device)

    given = {"cache_seqlens": tensor(lengths), "cache_batch_idx": tensor(index), "cache_leftpad": tensor(padding)}
    given |= {"page_table": cache.page_table, **arguments(masks, device)}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **given, return_softmax_lse=True)
    for request, length in enumerate(lengths):
        row = index[request] if index else request
        check_request(out[request], lse[request], q[request], cache.held(row, length), masks, padding[request] if padding else 0)


@pytest.mark.parametrize("scales", ["tensor", "heads", "expanded", "expanded_heads", "none"])
def test_caches_of_8_bits(scales: str, device: str) -> None:
    cache = filled(LENGTHS, device, page_size=16, dtype=torch.float8_e4m3fn)
    q, (k_scale, v_scale) = queries(len(LENGTHS), 1, device=device), torch.tensor([[0.5, 2.0], [3.0, 0.25]], device=device)
    if scales in ("tensor", "expanded"):
        k_scale, v_scale = k_scale[:1], v_scale[:1]
    expanded = [s.expand(len(LENGTHS), 2) if "expanded" in scales else s for s in (k_scale, v_scale)]
    given = {} if scales == "none" else dict(zip(("k_descale", "v_descale"), expanded, strict=True))
    paged = {"cache_seqlens": cache.lengths, "page_table": cache.page_table}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **paged, **given, return_softmax_lse=True)
    for row, length in enumerate(LENGTHS):
        k, v = (t.float() for t in cache.held(row, length))
        if scales != "none":
            k, v = k * k_scale.cpu()[:, None], v * v_scale.cpu()[:, None]
        check_request(out[row], lse[row], q[row], (k, v), Masks())


def test_other_names_and_forms_of_an_argument(device: str) -> None:
    cache, q = filled(LENGTHS, device, page_size=16), queries(len(LENGTHS), 1, device=device)
    theirs = {"block_table": cache.page_table, "learnable_sink": SINKS.bfloat16().to(device), "num_splits": 3, "pack_gqa": True}
    theirs |= {
        "window_size": torch.tensor([7, 3]),
        "alibi_slopes": SLOPES.to(device).expand(len(LENGTHS), HEADS),
        "dropout_p": 0.0,
    }
    masks = replace(MASKS["window"], slopes=SLOPES, sinks=SINKS)
    given = {"cache_seqlens": cache.lengths, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **given, **theirs)
    for row, length in enumerate(LENGTHS):
        check_request(out[row], lse[row], q[row], cache.held(row, length), masks)
    mine = torch.empty_like(q)
    assert flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=cache.lengths, **theirs, out=mine) is mine
    assert torch.equal(mine, out)


def test_more_rows_a_request_than_before(device: str) -> None:
    """The same tensors' shapes and another max_seqlen_q: another plan, where the first one's rows would be too few."""
    cache = filled(LENGTHS, device, page_size=16)
    given = {"cache_seqlens": cache.lengths, "page_table": cache.page_table, "causal": True}
    q = queries(sum(Q_LENS), device=device)
    few = {"cu_seqlens_q": cu_seqlens((3, 3, 3, 3), device), "max_seqlen_q": 3}
    flash_attn_with_kvcache(q, cache.k, cache.v, **given, **few)
    many = {"cu_seqlens_q": cu_seqlens(Q_LENS, device), "max_seqlen_q": max(Q_LENS)}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **given, **many, return_softmax_lse=True)
    check_ragged(out, lse, q, cache, MASKS["causal"])
