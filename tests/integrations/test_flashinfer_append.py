"""FlashInfer's append of 8-bit values, which keeps their bits, and what its functions of tables and states refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.integrations import flashinfer
from tests.integrations.test_flashinfer import DEVICES, DIM, HEADS, KV_HEADS, PAGE, indptr_of
from tests.support.bits import same_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLACES = ((0, 3), (2, 0), (-1, 0), (0, 9), (1, 1))  # (request, position) of each new token
INDPTR, INDICES = indptr_of([2, 1, 1]), torch.tensor([3, 0, 4, 1]).int()


def any_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(len(shape)))


def all_bytes(dtype: torch.dtype) -> Tensor:
    """[tokens, KV_HEADS, DIM] in which every byte is there, those of every NaN too; some pairs are signalling NaN of f16."""
    assert len(PLACES) * KV_HEADS * DIM >= 256
    return torch.arange(len(PLACES) * KV_HEADS * DIM).to(torch.uint8).view(len(PLACES), KV_HEADS, DIM).view(dtype)


def append(k: Tensor, v: Tensor, cache: Any, layout: str = "NHD", places: tuple[tuple[int, int], ...] = PLACES) -> None:
    requests, positions = torch.tensor(places, dtype=torch.int32, device=k.device).unbind(1)
    tables = (INDICES.to(k.device), INDPTR.to(k.device), torch.ones(3, dtype=torch.int32, device=k.device))
    flashinfer.append_paged_kv_cache(k, v, requests, positions, cache, *tables, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "dtypes", [(E4M3, E4M3), (E5M2, E5M2), (torch.int8, torch.int8), (torch.uint8, torch.uint8), (E4M3, E5M2)], ids=str
)
def test_values_of_the_caches_8_bit_type_keep_their_bits(dtypes: tuple[torch.dtype, ...], layout: str, device: str) -> None:
    """Written one by one into a copy of the bytes; caches of one type are one tensor, K and V of two a pair."""
    shape = (5, 2, PAGE, KV_HEADS, DIM) if layout == "NHD" else (5, 2, KV_HEADS, PAGE, DIM)
    cache = any_bytes(*shape).to(device)
    wanted = cache.clone()
    k, v = all_bytes(dtypes[0]), all_bytes(torch.uint8).flip(0, 2).view(dtypes[1])
    for token, (request, position) in enumerate(PLACES):
        page = wanted[INDICES[INDPTR[request] + position // PAGE]] if request >= 0 else None
        for i, new in enumerate((k, v)) if page is not None else ():
            page[i].select(0 if layout == "NHD" else 1, position % PAGE).copy_(new[token].view(torch.uint8))
    given: Any = (cache[:, 0].view(dtypes[0]), cache[:, 1].view(dtypes[1]))
    append(k.to(device), v.to(device), cache.view(dtypes[0]) if dtypes[0] == dtypes[1] else given, layout)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_16_bits_are_still_rounded_to_8(dtype: torch.dtype, device: str) -> None:
    k, v = torch.randn(2, len(PLACES), KV_HEADS, DIM).to(dtype).to(device)
    cache = torch.zeros(5, 2, PAGE, KV_HEADS, DIM, device=device).to(E4M3)
    append(k, v, cache)
    for token, (request, position) in enumerate(PLACES):
        if request >= 0:
            page = cache[INDICES[INDPTR[request] + position // PAGE], :, position % PAGE]
            assert same_bits(page[0], k[token].to(E4M3)) and same_bits(page[1], v[token].to(E4M3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_new_tokens_of_any_strides(dtype: torch.dtype, device: str) -> None:
    k, v = torch.randn(2, len(PLACES), KV_HEADS, DIM).to(dtype).to(device)
    caches = [torch.zeros(5, 2, PAGE, KV_HEADS, DIM, device=device).to(dtype) for _ in range(2)]
    append(k, v, caches[0])
    append(turned(k), turned(v), caches[1])
    assert same_bits(*caches) and caches[0].float().any()


def turned(x: Tensor) -> Tensor:
    """The same values, with the strides of the last two axes exchanged."""
    return torch.empty(x.shape[0], x.shape[2], x.shape[1], dtype=x.dtype, device=x.device).transpose(1, 2).copy_(x)


def new(dtype: torch.dtype, tokens: int = len(PLACES), dim: int = DIM) -> Tensor:
    return torch.zeros(tokens, KV_HEADS, dim).to(dtype)


def pages(dtype: torch.dtype, dim: int = DIM) -> Tensor:
    return torch.zeros(5, 2, PAGE, KV_HEADS, dim).to(dtype)


HALF, BF16 = torch.float16, torch.bfloat16
REFUSED: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((new(HALF), new(HALF), pages(BF16)), ck.InvalidArgument, "^append_key: .*float16 beside a cache of torch.bfloat16"),
    ((new(E4M3), new(E4M3), pages(E5M2)), ck.InvalidArgument, "^append_key: has dtype torch.float8_e4m3fn beside"),
    ((new(E4M3), new(E4M3), pages(HALF)), ck.InvalidArgument, "^append_key: has dtype torch.float8_e4m3fn beside"),
    ((new(HALF), new(HALF), pages(torch.int8)), ck.InvalidArgument, "^append_key: has dtype torch.float16 beside"),
    ((new(torch.float32), new(torch.float32), pages(torch.float32)), ck.InvalidArgument, "^append_key: has dtype torch.float32"),
    ((new(HALF), new(BF16), pages(HALF)), ck.InvalidArgument, "^append_value: has dtype torch.bfloat16 beside"),
    ((new(HALF), new(BF16), pages(E4M3)), ck.InvalidArgument, "^append_value: has dtype torch.bfloat16, must be append_key's"),
    ((new(E4M3), new(HALF), pages(E4M3)), ck.InvalidArgument, "^append_value: has dtype torch.float16, must be append_key's"),
    ((new(E4M3, dim=3), new(E4M3, dim=3), pages(E4M3, dim=3)), ck.Unsupported, "^append_key .*must be even"),
    ((new(E4M3), new(E4M3), pages(E4M3, dim=DIM + 1)[..., :DIM]), ck.Unsupported, "^K of paged_kv_cache .*must be even"),
    ((new(HALF), new(HALF, 4), pages(HALF)), ck.InvalidProblem, r"^append_value\.shape = \(4,"),
    ((new(HALF), new(HALF), pages(HALF), "NHD", PLACES[:4]), ck.InvalidProblem, r"^batch_indices\.shape = \(4,\)"),
    ((None, new(HALF), pages(HALF)), ck.InvalidArgument, "^append_key: got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "named"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_an_append_names_what_is_wrong(given: tuple[Any, ...], error: type[Exception], named: str) -> None:
    if given[0] is None:
        one = torch.zeros(1).int()
        with pytest.raises(error, match=named):
            flashinfer.append_paged_kv_cache(*given[:2], one, one, given[2], INDICES, INDPTR, one)
        return
    before = given[2].clone()
    with pytest.raises(error, match=named):
        append(*given)
    assert same_bits(given[2].contiguous(), before.contiguous())


def test_positions_are_as_many_as_tokens() -> None:
    one = torch.zeros(1).int()
    with pytest.raises(ck.InvalidProblem, match=r"^positions\.shape = \(1,\)"):
        flashinfer.append_paged_kv_cache(new(HALF), new(HALF), torch.zeros(5).int(), one, pages(HALF), INDICES, INDPTR, one)


def test_tables_and_states_name_what_is_wrong() -> None:
    none = torch.zeros(0).int()
    with pytest.raises(ck.InvalidProblem, match=r"^nnz = 3: must be 0 where append_indptr and seq_lens have no request"):
        flashinfer.get_batch_indices_positions(torch.zeros(1).int(), none, 3)
    assert [x.shape for x in flashinfer.get_batch_indices_positions(torch.zeros(1).int(), none, 0)] == [(0,), (0,)]
    v, s = torch.randn(2, 5, HEADS, DIM), torch.randn(2, 5, HEADS)
    with pytest.raises(ck.InvalidArgument, match=r"^s: has dtype torch.float16, must be torch.float32"):
        flashinfer.merge_state_in_place(v[0], s[0].half(), v[1], s[1])
