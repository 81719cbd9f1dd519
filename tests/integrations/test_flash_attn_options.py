"""Forms of arguments that flash-attention's callers use, and its functions of packed tensors, against dense f64 PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.integrations import flash_attn
from cute_kernels.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.integrations.test_flash_attn import DEVICES, DIM, HEADS, LENGTHS, check_ragged, check_request, cu_seqlens, queries
from tests.integrations.test_flash_attn import Q_LENS as ROWS
from tests.integrations.test_flash_attn_append import normal
from tests.support.bits import same_bits
from tests.support.flash_attention import Filled, Masks, filled

KV_HEADS = 2
CAUSAL = Masks(causal=True)
WITH_ROOM = (0, 5, 33, 60)  # of 64 tokens


def paged(device: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> tuple[Filled, dict[str, Any]]:
    cache = filled(lengths, device, page_size=16, **options)
    return cache, {"cache_seqlens": cache.lengths, "page_table": cache.page_table, "return_softmax_lse": True}


def check_all(got: tuple[Tensor, Tensor], q: Tensor, cache: Filled, masks: Masks, lengths: tuple[int, ...] = LENGTHS) -> None:
    for row, length in enumerate(lengths):
        check_request(got[0][row], got[1][row], q[row], cache.held(row, length), masks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", ["tensor", "each request", "a number"])
def test_descales_of_16_bit_caches_are_ignored(scale: str, device: str) -> None:
    """Also where new tokens are appended: neither what is stored nor what is computed is scaled."""
    cache, given = paged(device, WITH_ROOM, spare=1)
    q, (k, v) = queries(4, 1, device=device), normal(2, 4, 1, KV_HEADS, DIM, device=device)
    two = {"tensor": torch.full((1,), 2.0), "each request": torch.arange(8.0).view(4, 2), "a number": 2.0}[scale]
    descales = dict.fromkeys(("k_descale", "v_descale"), two.to(device) if isinstance(two, Tensor) else two)
    got = flash_attn_with_kvcache(q, cache.k, cache.v, **given, **descales)
    check_all(got, q, cache, Masks(), WITH_ROOM)
    got = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given, **descales)
    check_all(got, q, cache, Masks(), tuple(n + 1 for n in WITH_ROOM))
    for row, length in enumerate(WITH_ROOM):
        keys, values = cache.held(row, length + 1)
        assert same_bits(keys[-1], k[row, 0].cpu()) and same_bits(values[-1], v[row, 0].cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_one_of_two_caches_has_8_bits(device: str) -> None:
    """A descale counts for the cache that it is of."""
    cache, given = paged(device)
    q, two = queries(4, 1, device=device), torch.full((1,), 2.0, device=device)
    mixed = Filled(cache.k, cache.v.to(torch.float8_e4m3fn), cache.page_table, cache.lengths)
    out, lse = flash_attn_with_kvcache(q, mixed.k, mixed.v, **given, k_descale=two, v_descale=two)
    for row, length in enumerate(LENGTHS):
        k, v = mixed.held(row, length)
        check_request(out[row], lse[row], q[row], (k, v.float() * 2), Masks())


@pytest.mark.parametrize("device", DEVICES)
def test_a_decode_call_with_cu_seqlens_of_no_new_tokens(device: str) -> None:
    cache, given = paged(device)
    q = queries(4, device=device)
    rows = {"cu_seqlens_q": cu_seqlens((1, 1, 1, 1), device), "max_seqlen_q": 1}
    more = {"cu_seqlens_k_new": cu_seqlens(LENGTHS, device), "num_splits": 0, "causal": True}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **given, **rows, **more)
    for row, length in enumerate(LENGTHS):
        check_request(out[row : row + 1], lse[:, row : row + 1], q[row : row + 1], cache.held(row, length), CAUSAL)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_call_as_vllm_makes_it(version: int, device: str) -> None:
    cache, q = filled(LENGTHS, device, page_size=16), queries(sum(ROWS), device=device)
    out = torch.full_like(q, torch.nan)
    theirs = {"window_size": None, "softcap": 0, "alibi_slopes": None, "scheduler_metadata": None, "num_splits": 0, "s_aux": None}
    theirs |= {"q_v": None, "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None, "fa_version": version, "dropout_p": 0.0}
    theirs |= {name: torch.ones(1, device=device).expand(len(LENGTHS), KV_HEADS) for name in ("q_descale", "k_descale")}
    # fmt: off
    got, lse = flash_attn_varlen_func(
        q=q, k=cache.k, v=cache.v, out=out, cu_seqlens_q=cu_seqlens(ROWS, device), max_seqlen_q=max(ROWS),
        seqused_k=cache.lengths, max_seqlen_k=max(LENGTHS), causal=True, block_table=cache.page_table,
        return_softmax_lse=True, **theirs,
    )
    # fmt: on
    assert got is out
    check_ragged(out, lse, q, cache, CAUSAL)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["numpy", "tensor", "other device"])
def test_bounds_of_other_libraries(kind: str, device: str) -> None:
    """A tensor on another device than the host has a value that no call waits for: there is no bound then."""
    elsewhere = device if device == "cuda" else "meta"
    form: Any = {
        "numpy": np.int64,
        "tensor": torch.tensor,
        "other device": lambda n: torch.tensor(n, device=elsewhere),
    }[kind]
    cache, q = filled(LENGTHS, device, page_size=16), queries(sum(ROWS), device=device)
    cu_q, cu_k = cu_seqlens(ROWS, device), cu_seqlens(LENGTHS, device)
    k, v = (torch.cat([cache.held(row, n)[i] for row, n in enumerate(LENGTHS)]).to(device) for i in (0, 1))
    for _ in range(2):  # the second time by the plan that the first has kept
        most = {"max_seqlen_q": form(max(ROWS)), "max_seqlen_k": form(max(LENGTHS))}
        out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, **most, causal=True, return_lse=True)
        check_ragged(out, lse, q, cache, CAUSAL)


def test_a_tensor_that_bounds_rows_is_read_anew() -> None:
    """A plan is kept under its value, whichever object holds it."""
    cache, given = paged("cpu")
    most = torch.tensor(3)
    for counts in ((3, 3, 3, 3), ROWS):
        most.fill_(max(counts))
        q = queries(sum(counts), device="cpu")
        rows = {"cu_seqlens_q": cu_seqlens(counts, "cpu"), "max_seqlen_q": most}
        out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, **given, **rows, causal=True)
    check_ragged(out, lse, q, cache, CAUSAL)


def test_numbers_of_numpy() -> None:
    cache, q = filled((64, 64), "cpu"), queries(2, 3, device="cpu")
    given = {"softmax_scale": np.float32(0.25), "softcap": np.float32(2.0), "causal": np.True_, "sm_margin": np.int64(0)}
    window = np.int64(9), np.int64(-1)
    length = np.int64(17)
    got = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=length, **given, window_size=window, return_softmax_lse=True)
    check_all(got, q, cache, Masks(causal=True, softcap=2.0, scale=0.25, window=(9, -1)), (17, 17))
    got = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=length, causal=0, return_softmax_lse=True)
    check_all(got, q, cache, Masks(), (17, 17))


def test_a_tensor_as_causal_is_refused_at_every_call() -> None:
    """Also one that was equal to another value before: nothing is kept under its identity."""
    q, k = torch.randn(2, 3, HEADS, DIM), torch.randn(2, 3, KV_HEADS, DIM)
    causal = torch.tensor([True])
    for _ in range(2):
        with pytest.raises(ck.InvalidArgument, match=r"^causal: is a tensor \[1\] on cpu"):
            flash_attn_func(q, k, k.clone(), causal=causal)
        causal.fill_(False)


@pytest.mark.parametrize("device", DEVICES)
def test_calls_without_rows(device: str) -> None:
    """No request with several rows; and requests without a row, whose new tokens are stored all the same."""
    cache = filled((5, 33), device, spare=2)
    none = {"cache_seqlens": cache.lengths[:0], "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(queries(0, 3, device=device), cache.k[:0], cache.v[:0], **none)
    assert (out.shape, lse.shape, lse.dtype) == ((0, 3, HEADS, DIM), (0, HEADS, 3), torch.float32)
    out, lse = flash_attn_func(*(torch.zeros(0, 3, h, DIM, device=device) for h in (HEADS, 2, 2)), return_attn_probs=True)
    assert (out.shape, lse.shape) == ((0, 3, HEADS, DIM), (0, HEADS, 3))
    k, v = normal(2, 2, 2, KV_HEADS, DIM, device=device)
    angles = torch.zeros(80, 8, device=device)
    for rotary in ({}, {"rotary_cos": angles.cos(), "rotary_sin": angles}):
        given = {"cache_seqlens": cache.lengths, "return_softmax_lse": True, **rotary}
        out, lse = flash_attn_with_kvcache(queries(2, 0, device=device), cache.k, cache.v, k, v, **given)
        assert (out.shape, out.dtype) == ((2, 0, HEADS, DIM), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, HEADS, 0), torch.float32)
    assert same_bits(cache.k[1, 33:35], k[1]) and same_bits(cache.v[0, 5:7], v[0])
    mine = queries(2, 0, device=device)
    assert flash_attn_with_kvcache(mine, cache.k, cache.v, cache_seqlens=cache.lengths, out=mine) is mine


def turned(x: Tensor) -> Tensor:
    """The same values, with the strides of the last two axes exchanged."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary", [False, True])
def test_queries_and_new_tokens_of_any_strides(rotary: bool, device: str) -> None:
    """As of compact ones, bit by bit."""
    results = []
    q, (k, v) = queries(4, 3, device=device), normal(2, 4, 3, KV_HEADS, DIM, device=device)
    angles = torch.rand(80, 8, generator=torch.Generator().manual_seed(1)).to(device) * 6
    more = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()} if rotary else {}
    for form in (lambda x: x, turned):
        cache, given = paged(device, WITH_ROOM, spare=3)
        out, lse = flash_attn_with_kvcache(form(q), cache.k, cache.v, form(k), form(v), **given, **more, causal=True)
        results.append((out, lse.contiguous(), cache.k, cache.v))
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))
    if not rotary:
        check_all((out, lse), q, cache, CAUSAL, tuple(n + 3 for n in WITH_ROOM))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_keys_of_any_strides(device: str) -> None:
    cache, q = filled((20, 20), device, room=20), queries(2, 5, device=device)
    out, lse = flash_attn_func(turned(q), turned(cache.k), turned(cache.v), causal=True, return_lse=True)
    check_all((out, lse), q, cache, CAUSAL, (20, 20))
    cu_q, cu_k = cu_seqlens((5, 5), device), cu_seqlens((20, 20), device)
    flat = [turned(x.flatten(0, 1)) for x in (q, cache.k, cache.v)]
    out, lse = flash_attn_varlen_func(*flat, cu_q, cu_k, 5, 20, causal=True, return_lse=True)
    for row in range(2):
        mine = slice(5 * row, 5 * row + 5)
        check_request(out[mine], lse[:, mine], q[row], cache.held(row, 20), CAUSAL)


def test_a_cache_keeps_its_unit_stride() -> None:
    cache, q = filled((20, 20), "cpu", room=20), queries(2, 5, device="cpu")
    with pytest.raises(ck.Unsupported, match=r"^k_cache\.stride"):
        flash_attn_with_kvcache(q, turned(cache.k), cache.v, cache_seqlens=20)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_tensors(device: str) -> None:
    """q, k and v of one tensor, by an axis of three, by heads beside each other, and packed rows; k and v of one."""
    qkv, rows = normal(2, 9, 3, HEADS, DIM, device=device), (9, 9)
    q, k, v = qkv.unbind(2)
    cache = Filled(k, v, None, torch.tensor(rows))
    given = {"causal": True, "return_attn_probs": True}
    shared = torch.cat((q, k, v), 2)
    got = flash_attn.flash_attn_qkvpacked_func(qkv, **given)
    for other in (
        flash_attn.flash_attn_qkvpacked_func(shared, num_heads_q=HEADS, **given),
        flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **given),
    ):
        assert all(torch.equal(x, y) for x, y in zip(got, other, strict=True))
    check_all(got, q, cache, CAUSAL, rows)
    flat, cu = qkv.flatten(0, 1), cu_seqlens(rows, device)
    for out, lse in (
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 9, **given),
        flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 9, 9, **given),
    ):
        for row in range(2):
            mine = slice(9 * row, 9 * row + 9)
            check_request(out[mine], lse[:, mine], q[row], cache.held(row, 9), CAUSAL)


def test_packed_tensors_of_other_axes() -> None:
    x = torch.zeros(2, 9, 3, HEADS, DIM)
    with pytest.raises(ck.InvalidProblem, match=r"^qkv\.shape = .*3, num_heads"):
        flash_attn.flash_attn_qkvpacked_func(x[:, :, :2])
    with pytest.raises(ck.InvalidProblem, match=r"^qkv\.shape = .*num_heads_q = 4"):
        flash_attn.flash_attn_qkvpacked_func(x[:, :, 0, :3], num_heads_q=4)
    with pytest.raises(ck.InvalidProblem, match=r"^kv\.shape"):
        flash_attn.flash_attn_kvpacked_func(x[:, :, 0], x)
    with pytest.raises(ck.InvalidProblem, match=r"^kv\.shape"):
        flash_attn.flash_attn_varlen_kvpacked_func(x[0, :, 0], x[:, :, :2], torch.tensor([0, 9]))
    with pytest.raises(ck.InvalidArgument, match=r"^qkv: got list"):
        flash_attn.flash_attn_qkvpacked_func([x], num_heads_q=4)  # type: ignore[arg-type]


def test_there_is_no_metadata_of_a_schedule() -> None:
    cache, given = paged("cpu")
    metadata = flash_attn.get_scheduler_metadata(4, 1, 64, HEADS, KV_HEADS, DIM, cache.lengths, causal=True, page_size=16)
    q = queries(4, 1, device="cpu")
    assert metadata is None
    check_all(flash_attn_with_kvcache(q, cache.k, cache.v, **given, scheduler_metadata=metadata), q, cache, Masks())
