"""FlashInfer's interface over the plans, beside dense attention; what it refuses; the suite's stand-ins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from tests.support.flashinfer import described, reference, wrappers
from tests.support.flashinfer.on_cpu import RecordedGraph, capture, moved, recorded
from tests.support.flashinfer.slopes import alibi_slopes
from tests.support.flashinfer.stand_in import StandIn, ours_where_modified, repeat_sinks
from tests.support.naive import naive_row

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 5
LENGTHS = [1, 7, 20, 33]
WORKSPACE = torch.empty(0)
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


class Paged:
    """Requests of LENGTHS tokens over shuffled pages; NaN in what no request owns. keys, values: [tokens, kv_heads, dim] each."""

    def __init__(self, layout: str, device: str) -> None:
        torch.manual_seed(0)
        dtype = DTYPES[device]
        counts = [-(-n // PAGE) for n in LENGTHS]
        self.indptr = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        self.indices = torch.randperm(sum(counts)).int().to(device)
        self.last = torch.tensor([n - PAGE * (count - 1) for n, count in zip(LENGTHS, counts, strict=True)]).int().to(device)
        nhd = torch.full((sum(counts), 2, PAGE, KV_HEADS, DIM), torch.nan, dtype=dtype, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for row, length in enumerate(LENGTHS):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            both = torch.randn(length, 2, KV_HEADS, DIM, device=device).to(dtype)
            places = torch.arange(length, device=device)
            nhd[pages[places // PAGE], :, places % PAGE] = both
            self.keys.append(both[:, 0])
            self.values.append(both[:, 1])
        self.cache = nhd if layout == "NHD" else nhd.transpose(2, 3).contiguous()

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last


def sizes(device: str = "cpu") -> dict[str, Any]:
    types = dict.fromkeys(("q_data_type", "kv_data_type"), DTYPES[device])
    return {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "page_size": PAGE, **types}


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device).to(DTYPES[device])


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One row's out [heads, dim] and natural lse [heads] once the sinks have joined the denominator."""
    joined = torch.logaddexp(lse, sinks)
    return out.float() * (lse - joined).exp()[:, None], joined


def natural_lse(q: Tensor, k: Tensor, scores: dict[str, Any]) -> Tensor:
    """[heads] of the last row, without ALiBi."""
    keys = k.float().repeat_interleave(HEADS // KV_HEADS, 1)
    logits = torch.einsum("hd,khd->hk", q.float(), keys) * scores.get("sm_scale", DIM**-0.5)
    if cap := scores.get("logits_soft_cap"):
        logits = cap * torch.tanh(logits / cap)
    first = max(0, len(k) - 1 - scores.get("window_left", len(k)))
    return logits[:, first:].logsumexp(-1)


def close(ours: Tensor, expected: Tensor) -> None:
    """f32 on the CPU, f16 on a GPU."""
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if ours.is_cuda else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours.float(), expected.float(), **tolerance)


def test_the_reference_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    outs = reference.single_prefill_with_kv_cache(q, k, v, causal=True)
    for row in range(7):
        expected, _ = naive_row(q[row], k[: row + 1].tolist(), v[: row + 1].tolist(), DIM**-0.5)
        close(outs[row], torch.tensor(expected))
    close(reference.single_decode_with_kv_cache(q[6], k, v), outs[6])
    mask = torch.ones(7, 7, dtype=torch.bool).tril() & ~torch.ones(7, 7, dtype=torch.bool).tril(-3)
    windowed = reference.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=2)
    close(windowed, reference.single_prefill_with_kv_cache(q, k, v, custom_mask=mask))


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    close(alibi_slopes(6), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_decode_of_one_row(scores: dict[str, Any], sinks: bool, layout: str, device: str) -> None:
    paged = Paged(layout, device)
    q = random(len(LENGTHS), HEADS, DIM, device=device)
    logits = torch.randn(HEADS, device=device) if sinks else None
    wrapper = wrappers.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE.to(device), layout)
    wrapper.plan(*paged.tables, head_dim=DIM, **sizes(device), **scores)
    alibi = "pos_encoding_mode" in scores
    out = torch.empty_like(q)
    got = wrapper.run(q, paged.cache, sinks=logits, out=out, return_lse=not alibi)
    lse = None if alibi else got[1]
    assert (got if alibi else got[0]) is out
    for row, (k, v) in enumerate(zip(paged.keys, paged.values, strict=True)):
        expected = reference.single_decode_with_kv_cache(q[row], k, v, **scores)
        if alibi and logits is not None:
            continue  # the lse that joins with the sinks is not FlashInfer's
        natural = natural_lse(q[row], k, scores)
        if logits is not None:
            expected, natural = with_sinks(expected, natural, logits)
        close(out[row], expected)
        if lse is not None:
            close(lse[row], natural / math.log(2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_several_rows_a_request_are_causal_and_ragged_ones_may_be(scores: dict[str, Any], device: str) -> None:
    """One request is shorter than its new tokens: its first rows see no key."""
    paged, rows = Paged("NHD", device), 3
    q = random(len(LENGTHS) * rows, HEADS, DIM, device=device)
    uniform = wrappers.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE.to(device), use_tensor_cores=True)
    uniform.plan(*paged.tables, head_dim=DIM, q_len_per_req=rows, **sizes(device), **scores)
    out = torch.empty_like(q)
    assert uniform.run(q, paged.cache, out=out) is out
    qo_indptr = torch.arange(len(LENGTHS) + 1) * rows
    ragged = wrappers.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE.to(device))
    for causal in (True, False):
        if not causal and "pos_encoding_mode" in scores:
            continue
        ragged.plan(qo_indptr, *paged.tables, head_dim_qk=DIM, causal=causal, **sizes(device), **scores)
        got = ragged.run(q, paged.cache.unbind(1))
        beside = reference.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        beside.plan(qo_indptr, *paged.tables, causal=causal, **scores)
        expected = beside.run(q, paged.cache.nan_to_num())
        close(got, expected)
        if causal:
            close(out, expected)
    assert bool((out[:2] == 0).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 4])
def test_sinks_over_packed_tokens_and_over_pages_of_one(window_left: int, causal: bool, device: str) -> None:
    torch.manual_seed(0)
    rows = [1, 3, 4, 2]
    qo_indptr, kv_indptr = (torch.tensor([0, *counts]).cumsum(0).int() for counts in (rows, LENGTHS))
    q = random(sum(rows), HEADS, DIM, device=device)
    k, v = random(2, sum(LENGTHS), KV_HEADS, DIM, device=device)
    sinks = torch.randn(HEADS, device=device)
    packed = wrappers.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE.to(device), jit_args=())
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    packed.plan(qo_indptr, kv_indptr, HEADS, KV_HEADS, DIM, causal=causal, window_left=window_left, **types)
    paged = wrappers.BatchAttentionWithAttentionSinkWrapper(WORKSPACE.to(device), window_left=window_left)
    tables = (kv_indptr, torch.arange(sum(LENGTHS)).int(), torch.ones(len(LENGTHS)).int())
    paged.plan(qo_indptr, *tables, HEADS, KV_HEADS, DIM, 1, causal=causal, window_left=window_left, **types)
    for got in (packed.run(q, k, v, sinks, 0.2), paged.run(q, (k, v), sinks, 0.2)):
        for request, length in enumerate(LENGTHS):
            keys, values = (t[kv_indptr[request] : kv_indptr[request + 1]] for t in (k, v))
            for i in range(rows[request]):
                position = length - rows[request] + i
                last = position + 1 if causal else length
                first = max(0, position - window_left) if window_left >= 0 else 0
                row = q[qo_indptr[request] + i]
                expected = torch.zeros_like(row)
                if last > first:
                    out = reference.single_decode_with_kv_cache(row, keys[first:last], values[first:last], sm_scale=0.2)
                    expected, _ = with_sinks(out, natural_lse(row, keys[first:last], {"sm_scale": 0.2}), sinks)
                close(got[qo_indptr[request] + i], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_single_calls_go_over_pages(tokens: int, device: str) -> None:
    torch.manual_seed(0)
    q, k, v = (random(tokens, heads, DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    for scores in SCORES:
        decoded = wrappers.single_decode_with_kv_cache(q[-1], k, v, **scores)
        close(decoded, reference.single_decode_with_kv_cache(q[-1], k, v, **scores))
        prefilled = wrappers.single_prefill_with_kv_cache(q, k, v, causal=True, **scores)
        close(prefilled, reference.single_prefill_with_kv_cache(q, k, v, causal=True, **scores))


def test_a_graphs_buffers_are_filled_at_their_front_and_read_again() -> None:
    paged = Paged("NHD", "cpu")
    q = torch.randn(len(LENGTHS), HEADS, DIM)
    buffers = [torch.full((len(table) + 3 * (i == 1),), -7, dtype=torch.int32) for i, table in enumerate(paged.tables)]
    wrapper = wrappers.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    one_page = torch.arange(len(LENGTHS) + 1).int()
    wrapper.plan(one_page, paged.indptr[:-1].int(), torch.ones(len(LENGTHS)).int(), head_dim=DIM, **sizes())
    graph = RecordedGraph()
    with capture(graph):
        out = recorded(wrappers.BatchDecodeWithPagedKVCacheWrapper.run)(wrapper, q, paged.cache)
    wrapper.plan(*paged.tables, head_dim=DIM, **sizes())
    assert wrapper.table.operands[0] is buffers[1]
    graph.replay()
    for row, (k, v) in enumerate(zip(paged.keys, paged.values, strict=True)):
        close(out[row], reference.single_decode_with_kv_cache(q[row], k, v))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "rotary positions"),
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0}, "before its cap"),
        ({"pos_encoding_mode": "ALIBI", "causal": False}, "keys ahead"),
        ({"use_fp16_qk_reduction": True}, "use_fp16_qk_reduction"),
        ({"custom_mask": torch.ones(3, 3)}, "custom_mask"),
    ],
)
def test_what_the_plans_leave_out_is_refused(options: dict[str, Any], reason: str) -> None:
    q = torch.randn(3, HEADS, DIM)
    k = torch.randn(3, KV_HEADS, DIM)
    with pytest.raises(described.Refused, match=reason):
        wrappers.single_prefill_with_kv_cache(q, k, k, **{"causal": True, **options})


def test_an_lse_under_alibi_and_wrong_rows_are_refused() -> None:
    paged = Paged("NHD", "cpu")
    wrapper = wrappers.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*paged.tables, head_dim=DIM, pos_encoding_mode="ALIBI", **sizes())
    with pytest.raises(described.Refused, match="lse under ALiBi"):
        wrapper.run_return_lse(torch.randn(len(LENGTHS), HEADS, DIM), paged.cache)
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(torch.randn(3, HEADS, DIM), paged.cache)


def test_the_older_verbs() -> None:
    paged = Paged("HND", "cpu")
    wrapper = wrappers.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND")
    wrapper.begin_forward(*paged.tables, head_dim=DIM, **sizes())
    q = torch.randn(len(LENGTHS), HEADS, DIM)
    got = wrapper.forward(q, paged.cache, logits_soft_cap=1.5)
    for row, (k, v) in enumerate(zip(paged.keys, paged.values, strict=True)):
        close(got[row], reference.single_decode_with_kv_cache(q[row], k, v, logits_soft_cap=1.5))


def test_stand_ins() -> None:
    module = StandIn("flashinfer.jit")
    assert (module.Spec | None) is not None
    with pytest.raises(NotImplementedError, match=r"flashinfer.jit.build has no stand-in"):
        module.build([])
    assert repeat_sinks(torch.arange(2.0), "h -> b h m 1", b=3, m=4).shape == (3, 2, 4, 1)
    call = ours_where_modified(lambda *_args, **_options: "ours", lambda *_args, **_options: "reference")
    some: tuple[Any, Any, Any] = (None, None, None)
    assert [call(*some), call(*some, logits_soft_cap=0.0), call(*some, window_left=-1)] == ["reference"] * 3
    assert [call(*some, logits_soft_cap=1.0), call(*some, window_left=0), call(*some, pos_encoding_mode="ALIBI")] == ["ours"] * 3
    cpu = torch.device("cpu")
    assert [moved("cuda:0", False), moved(torch.device("cuda"), False), moved(0, True)] == [cpu] * 3
    assert (moved(0, False), moved(True, True), moved("cpu", True)) == (0, True, "cpu")


def test_every_kv_dtype_has_its_torch_dtype() -> None:
    assert {described.KV_DTYPES[dtype] for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn)} == {
        ck.KVDtype.F16,
        ck.KVDtype.BF16,
        ck.KVDtype.E4M3,
    }
