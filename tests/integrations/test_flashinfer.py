"""FlashInfer's interface over the plans, row by row beside dense f64 attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.integrations import flashinfer
from tests.support.flashinfer.reference import alibi_slopes

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 5
GROUP = HEADS // KV_HEADS
LENGTHS = [1, 7, 20, 33]
ROWS = [1, 3, 4, 2]  # query rows of ragged requests; the first of them has none to spare
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}
SCORES: list[dict[str, Any]] = [
    {},
    {"window_left": 0},
    {"window_left": 6},
    {"logits_soft_cap": 1.5},
    {"pos_encoding_mode": "ALIBI"},
    {"window_left": 9, "logits_soft_cap": 2.0, "sm_scale": 0.3},
    {"window_left": 9, "pos_encoding_mode": "ALIBI"},
]
MASKED_SCORES = [(scores, causal) for scores in SCORES for causal in (True, False) if causal or "pos_encoding_mode" not in scores]


def dense_row(
    q: Tensor, k: Tensor, v: Tensor, position: int, *, causal: bool = True, sinks: Tensor | None = None, **scores: Any
) -> tuple[Tensor, Tensor]:
    """f64 out [heads, dim] and lse to base 2 [heads] of the query row q at `position` of keys k and v [tokens, kv_heads, dim]."""
    q, k, v = q.double(), k.double().repeat_interleave(GROUP, 1), v.double().repeat_interleave(GROUP, 1)
    logits = torch.einsum("hd,khd->hk", q, k) * scores.get("sm_scale", DIM**-0.5)
    if cap := scores.get("logits_soft_cap"):
        logits = cap * torch.tanh(logits / cap)
    keys = torch.arange(len(k), device=q.device)
    if scores.get("pos_encoding_mode") == "ALIBI":
        logits += alibi_slopes(HEADS).double().to(q.device)[:, None] * (keys - position)
    window = scores.get("window_left", -1)
    hidden = (keys > position) & causal | (keys < position - window) & (window >= 0)
    logits = logits.masked_fill(hidden, -math.inf)
    if sinks is not None:
        logits, v = torch.cat((logits, sinks.double()[:, None]), 1), torch.cat((v, torch.zeros_like(v[:1])))
    weights = logits.softmax(-1).nan_to_num()  # a row that sees no key: 0
    return torch.einsum("hk,khd->hd", weights, v), logits.logsumexp(-1) / math.log(2)


class Paged:
    """Requests of LENGTHS tokens over shuffled pages; NaN in what no request owns. keys, values: [tokens, kv_heads, dim] each."""

    def __init__(self, layout: str = "NHD", device: str = "cpu", dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        self.device, dtype = device, dtype or DTYPES[device]
        counts = [-(-n // PAGE) for n in LENGTHS]
        self.indptr = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        self.indices = torch.randperm(sum(counts)).int().to(device)
        self.last = torch.tensor([n - PAGE * (count - 1) for n, count in zip(LENGTHS, counts, strict=True)]).int().to(device)
        nhd = torch.full((sum(counts), 2, PAGE, KV_HEADS, DIM), torch.nan).to(dtype).to(device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for row, length in enumerate(LENGTHS):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            both = torch.randn(length, 2, KV_HEADS, DIM).to(dtype).to(device)
            places = torch.arange(length, device=device)
            nhd[pages[places // PAGE], :, places % PAGE] = both
            self.keys.append(both[:, 0])
            self.values.append(both[:, 1])
        self.cache = nhd if layout == "NHD" else nhd.transpose(2, 3).contiguous()

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last

    def sizes(self) -> dict[str, Any]:
        types = {"q_data_type": DTYPES[self.device], "kv_data_type": self.cache.dtype}
        return {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "page_size": PAGE, **types}

    def workspace(self) -> Tensor:
        return torch.empty(0, device=self.device)

    def check(
        self, out: Tensor, lse: Tensor | None, q: Tensor, rows: list[int], k: float = 1, v: float = 1, **scores: Any
    ) -> None:
        """Each row of out and lse beside dense attention, of `rows` query rows a request. k, v: scales of the cache."""
        first = 0
        for length, n, keys, values in zip(LENGTHS, rows, self.keys, self.values, strict=True):
            for i in range(n):
                at = first + i
                expected, expected_lse = dense_row(q[at], keys.float() * k, values.float() * v, length - n + i, **scores)
                close(out[at], expected)
                if lse is not None:
                    close(lse[at], expected_lse)
            first += n


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape).to(DTYPES[device]).to(device)


def indptr_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def close(ours: Tensor, expected: Tensor) -> None:
    """f32 on the CPU, f16 on a GPU."""
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if ours.is_cuda else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours.double(), expected, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_decode_of_one_row(scores: dict[str, Any], layout: str, device: str) -> None:
    paged = Paged(layout, device)
    q = random(len(LENGTHS), HEADS, DIM, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(paged.workspace(), layout)
    wrapper.plan(*paged.tables, head_dim=DIM, **paged.sizes(), **scores)
    alibi = "pos_encoding_mode" in scores
    for sinks in (None, None if alibi else torch.randn(HEADS, device=device)):
        out = torch.full_like(q, torch.nan)
        got = wrapper.run(q, paged.cache, sinks=sinks, out=out, return_lse=not alibi)
        assert (got if alibi else got[0]) is out
        paged.check(out, None if alibi else got[1], q, [1] * len(LENGTHS), sinks=sinks, **scores)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_several_rows_a_request_are_causal(scores: dict[str, Any], device: str) -> None:
    """One request is shorter than its new tokens: its first rows see no key."""
    paged, rows = Paged(device=device), 3
    q = random(len(LENGTHS) * rows, HEADS, DIM, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(paged.workspace(), use_tensor_cores=True)
    wrapper.plan(*paged.tables, head_dim=DIM, q_len_per_req=rows, **paged.sizes(), **scores)
    alibi = "pos_encoding_mode" in scores
    got = wrapper.run(q, paged.cache.unbind(1), return_lse=not alibi)
    paged.check(*((got, None) if alibi else got), q, [rows] * len(LENGTHS), **scores)
    out = torch.full_like(q, torch.nan)
    assert wrapper.run(q, paged.cache, out=out) is out
    paged.check(out, None, q, [rows] * len(LENGTHS), **scores)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("indptr_at", ["host", "device"])
@pytest.mark.parametrize(("scores", "causal"), MASKED_SCORES, ids=str)
def test_ragged_rows_over_pages(scores: dict[str, Any], causal: bool, indptr_at: str, device: str) -> None:
    alibi = "pos_encoding_mode" in scores
    paged = Paged("HND", device)
    q = random(sum(ROWS), HEADS, DIM, device=device)
    qo_indptr = indptr_of(ROWS).to("cpu" if indptr_at == "host" else device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(paged.workspace(), "HND")
    wrapper.plan(qo_indptr, *paged.tables, head_dim_qk=DIM, causal=causal, **paged.sizes(), **scores)
    for sinks in (None, None if alibi else torch.randn(HEADS, device=device)):
        got = wrapper.run(q, paged.cache, sinks=sinks, return_lse=not alibi)
        paged.check(*((got, None) if alibi else got), q, ROWS, causal=causal, sinks=sinks, **scores)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 4])
def test_ragged_rows_over_packed_tokens(window_left: int, causal: bool, device: str) -> None:
    paged = Paged(device=device)
    q, k, v = random(sum(ROWS), HEADS, DIM, device=device), torch.cat(paged.keys), torch.cat(paged.values)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(paged.workspace())
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    scores: dict[str, Any] = {"causal": causal, "window_left": window_left}
    wrapper.plan(indptr_of(ROWS), indptr_of(LENGTHS), HEADS, KV_HEADS, DIM, **scores, **types)
    paged.check(*wrapper.run(q, k, v, return_lse=True), q, ROWS, **scores)
    out = torch.full_like(q, torch.nan)
    assert wrapper.run_return_lse(q, k, v, out=out)[0] is out
    paged.check(out, None, q, ROWS, **scores)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_of_eight_bit_caches(dtype: torch.dtype, device: str) -> None:
    """Floats, a tensor, and q's scale with K's; 1 for V is no scale."""
    paged = Paged(device=device, dtype=dtype)
    q = random(len(LENGTHS), HEADS, DIM, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(paged.workspace())
    wrapper.plan(*paged.tables, head_dim=DIM, **paged.sizes())
    paged.check(*wrapper.run(q, paged.cache, k_scale=0.5, v_scale=3.0, return_lse=True), q, [1] * 4, k=0.5, v=3)
    paged.check(*wrapper.run(q, paged.cache, k_scale=0.5, v_scale=1.0, return_lse=True), q, [1] * 4, k=0.5)
    v_scale = torch.tensor([3.0], device=device)
    paged.check(
        *wrapper.run(q, paged.cache, q_scale=2.0, k_scale=0.125, v_scale=v_scale, return_lse=True), q, [1] * 4, k=0.25, v=3
    )
    paged.check(*wrapper.run(q, paged.cache, q_scale=2.0, return_lse=True), q, [1] * 4, k=2)


@pytest.mark.parametrize("device", DEVICES)
def test_caches_with_odd_strides_and_pages_of_one_token(device: str) -> None:
    torch.manual_seed(0)
    q = random(len(LENGTHS), HEADS, DIM, device=device)
    paged = Paged(device=device)
    odd = random(*paged.cache.shape[:-1], DIM + 1, device=device)[..., :DIM].copy_(paged.cache)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(paged.workspace())
    wrapper.plan(*paged.tables, head_dim=DIM, **paged.sizes())
    for cache in (odd, paged.cache):
        paged.check(*wrapper.run(q, cache, return_lse=True), q, [1] * len(LENGTHS))
    tokens = torch.stack((torch.cat(paged.keys), torch.cat(paged.values)), 1)
    tables = (indptr_of(LENGTHS), torch.arange(sum(LENGTHS)).int(), torch.ones(len(LENGTHS)).int())
    wrapper.plan(*tables, head_dim=DIM, **{**paged.sizes(), "page_size": 1})
    for cache in (tokens, tokens.unbind(1)):
        paged.check(*wrapper.run(q, cache, return_lse=True), q, [1] * len(LENGTHS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_single_calls(tokens: int, layout: str, device: str) -> None:
    torch.manual_seed(0)
    q, k, v = (random(tokens, heads, DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    for scores in SCORES:
        alibi = "pos_encoding_mode" in scores
        options = {**scores, "kv_layout": layout, "v_scale": 2.0, "return_lse": not alibi}
        got = flashinfer.single_decode_with_kv_cache(q[-1], *given, **options)
        out, lse = (got, None) if alibi else got
        expected, expected_lse = dense_row(q[-1], k, v * 2, tokens - 1, **scores)
        close(out, expected)
        assert lse is None or close(lse, expected_lse) is None
        for causal in (True,) if alibi else (True, False):
            got = flashinfer.single_prefill_with_kv_cache(q, *given, causal=causal, **options)
            out, lse = (got, None) if alibi else got
            for row in range(tokens):
                expected, expected_lse = dense_row(q[row], k, v * 2, row, causal=causal, **scores)
                close(out[row], expected)
                assert lse is None or close(lse[row], expected_lse) is None


@pytest.mark.parametrize("device", DEVICES)
def test_older_verbs_and_a_batch_that_does_not_matter(device: str) -> None:
    paged = Paged("HND", device)
    q = random(len(LENGTHS), HEADS, DIM, device=device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(paged.workspace(), "HND")
    decode.begin_forward(*paged.tables, head_dim=DIM, **paged.sizes(), disable_split_kv=True)
    paged.check(*decode.run_return_lse(q, paged.cache), q, [1] * len(LENGTHS))
    paged.check(decode.forward(q, paged.cache, logits_soft_cap=1.5), None, q, [1] * len(LENGTHS), logits_soft_cap=1.5)
    paged.check(*decode.forward_return_lse(q, paged.cache, sm_scale=0.3), q, [1] * len(LENGTHS), sm_scale=0.3)
    decode.end_forward()
    q = random(sum(ROWS), HEADS, DIM, device=device)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(paged.workspace(), "HND")
    prefill.begin_forward(indptr_of(ROWS), *paged.tables, head_dim_qk=DIM, **paged.sizes())
    paged.check(prefill.forward(q, paged.cache, causal=True), None, q, ROWS)
    paged.check(*prefill.forward_return_lse(q, paged.cache, True, window_left=4), q, ROWS, window_left=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merges(dtype: torch.dtype, device: str) -> None:
    """Beside softmax's weights in f64, a row at a time; an empty state and rows outside of a mask change nothing."""
    torch.manual_seed(0)
    rows, states = 9, 3
    v = torch.randn(rows, states, HEADS, DIM).to(dtype).to(device)
    s = (torch.randn(rows, states, HEADS) * 4).to(device)
    s[2, 1] = -math.inf

    def expected(row: int, some: slice) -> tuple[Tensor, Tensor]:
        weights = (s[row, some].double() * math.log(2)).softmax(0)
        return (weights[..., None] * v[row, some].double()).sum(0), s[row, some].double().exp2().sum(0).log2()

    ulp = torch.finfo(dtype).eps
    pair = (v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    for got, some in ((flashinfer.merge_states(v, s), slice(3)), (flashinfer.merge_state(*pair), slice(2))):
        for row in range(rows):
            out, lse = expected(row, some)
            torch.testing.assert_close(got[0][row].double(), out, rtol=ulp, atol=ulp)
            torch.testing.assert_close(got[1][row].double(), lse, rtol=1e-5, atol=1e-5)
    for mask in (None, torch.arange(rows, device=device) % 2 == 0):
        out, lse = v[:, 0].clone(), s[:, 0].clone()
        flashinfer.merge_state_in_place(out, lse, v[:, 1], s[:, 1], mask)
        merged = flashinfer.merge_state(*pair)
        for row in range(rows):
            wanted = merged if mask is None or bool(mask[row]) else pair
            assert torch.equal(out[row], wanted[0][row]) and torch.equal(lse[row], wanted[1][row])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("as_pair", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_stores_each_token_in_its_place(layout: str, as_pair: bool, device: str) -> None:
    """New tokens are the last of their requests, one of which has none; the rest of the cache keeps its bits."""
    paged, counts, spare = Paged(layout, device, torch.float16), [1, 0, 4, 12], 3
    appended = indptr_of(counts).to(device)
    nnz = sum(counts) + spare
    k, v = torch.randn(2, nnz, KV_HEADS, DIM).half().to(device)
    seq_lens = flashinfer.get_seq_lens(paged.indptr, paged.last, PAGE)
    assert seq_lens.tolist() == LENGTHS
    buffers = torch.full((2, nnz), 7, dtype=torch.int32, device=device)
    requests, places = flashinfer.get_batch_indices_positions(appended, seq_lens, nnz, *buffers)
    assert requests.data_ptr() == buffers[0].data_ptr()
    expected = [(b, LENGTHS[b] - n + i) for b, n in enumerate(counts) for i in range(n)] + [(-1, 0)] * spare
    assert list(zip(requests.tolist(), places.tolist(), strict=True)) == expected
    wanted = paged.cache.clone()
    for i, (b, place) in enumerate(expected[:-spare]):
        page = paged.indices[paged.indptr[b] + place // PAGE]
        nhd = wanted[page] if layout == "NHD" else wanted[page].transpose(1, 2)
        nhd[0, place % PAGE], nhd[1, place % PAGE] = k[i], v[i]
    cache = (paged.cache[:, 0], paged.cache[:, 1]) if as_pair else paged.cache
    flashinfer.append_paged_kv_cache(k, v, requests, places, cache, paged.indices, paged.indptr, paged.last, layout)
    assert torch.equal(paged.cache.view(torch.int16), wanted.view(torch.int16))
