"""Mixed batches through the peers that take ragged rows: stand-ins that compute what they have to from what they are given."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from perf.cases import Case, mixed_case
from perf.correctness import FP8_QUERY, PEERS
from perf.inputs import make_inputs
from perf.providers.base import NotSupported, Provider
from perf.providers.flash_attention import FlashAttention3Attention
from perf.providers.flash_attention_4 import FlashAttention4
from perf.providers.flashinfer_attention import Fa2Attention, Fa3Attention, XqaAttention
from tests.perf.test_flash_attention import interface
from tests.perf.test_long_query_peers import causal, measured
from tests.support.flash_attention_3 import extension

CPU = torch.device("cpu")
BATCH = mixed_case((2, 40, 1), (1, 23, 4), (1, 41, 20), max_q_len=24, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
ALONE = mixed_case((3, 40, 1), max_q_len=24, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
STARTS, TOKENS = [0, 1, 2, 6, 26], [40, 40, 23, 41]


def serve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """bf16 [query rows, heads, d]: each request by itself. k and v are pages [pages, page_size, kv_heads, d]."""
    outs = []
    for pages, length, first, last in zip(table, tokens, starts[:-1], starts[1:], strict=True):
        keys = (cache.double()[pages.long()].flatten(0, 1)[:length] for cache in (k, v))
        outs.append(causal(q[first:last].double(), *keys, scale))
    return torch.cat(outs).bfloat16()


@pytest.mark.parametrize("case", [BATCH, ALONE, replace(BATCH, kv_dtype="e4m3")], ids=["batch", "decode rows", "e4m3"])
def test_fa3_is_given_where_the_rows_of_each_request_are(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[dict] = []

    def get_scheduler_metadata(batch_size, max_seqlen_q, cache_seqlens, cu_seqlens_q, **given):
        plans.append({"batch_size": batch_size, "most": max_seqlen_q, "starts": cu_seqlens_q.tolist(), **given})
        return cache_seqlens

    def flash_attn_with_kvcache(q, k, v, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, **given):
        assert q.dim() == 3 and max_seqlen_q == case.q_rows and given.get("causal", False) == (case.q_rows > 1)
        assert q.dtype == k.dtype and (given["q_descale"] is None) == (case.kv_dtype is None)
        return serve(q, k, v, cu_seqlens_q, cache_seqlens, page_table, softmax_scale)

    interface(monkeypatch, get_scheduler_metadata, flash_attn_with_kvcache)
    outcome = measured(FlashAttention3Attention(), case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.tolerance == (FP8_QUERY if case.kv_dtype else PEERS)
    starts = STARTS if case.batch_size == 4 else [0, 1, 2, 3]
    assert all((p["batch_size"], p["most"], p["starts"]) == (len(starts) - 1, case.q_rows, starts) for p in plans)
    assert all(p.get("causal", False) == (case.q_rows > 1) for p in plans)
    assert [p["num_splits"] for p in plans] == [0, 1, 2, 4, 8, 16, 32, 0], "the last one is timed"


def test_the_extension_is_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts: list[list[int]] = []

    def fwd(q, k, v, *rest):
        out, bounds, lengths, most, table, scale = rest[3], rest[4], rest[8], rest[9], rest[11], rest[20]
        assert most == 20 and rest[5:8] == (None, None, None) and rest[21:24] == (True, -1, -1)
        out.copy_(serve(q, k, v, bounds, lengths, table, scale))
        return [out]

    def schedule(batch_size, max_seqlen_q, *rest):
        assert (batch_size, max_seqlen_q) == (4, 20)
        starts.append(rest[7].tolist())
        return rest[6]

    with extension(monkeypatch, tmp_path, fwd, schedule):
        outcome = measured(FlashAttention3Attention(), BATCH, monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed and starts == [STARTS] * 8


def test_flash_attention_4_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_varlen_func(q, k, v, **given):
        assert given["causal"] is True and given["max_seqlen_q"] == 20 and given["cu_seqlens_q"].tolist() == STARTS
        table, scale = given["page_table"], given["softmax_scale"]
        return serve(q, k, v, given["cu_seqlens_q"], given["seqused_k"], table, scale), None

    module = ModuleType("flash_attn.cute.interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    outcome = measured(FlashAttention4(), BATCH, monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed
    assert measured(FlashAttention4(), replace(BATCH, kv_dtype="e4m3"), monkeypatch).not_supported


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """FlashInfer's prefill wrapper: what it was made and planned with. It has no other wrapper here."""
    seen: list[dict] = []

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph, backend, qo_indptr_buf, **buffers):
            assert use_cuda_graph and kv_layout == "HND" and qo_indptr_buf.tolist() == STARTS
            seen.append({"backend": backend})

        def plan(self, starts, indptr, indices, last_page_len, *shape, **options):
            assert shape == (4, 2, 64, 16)
            self.starts, self.pages = starts, [indices[a:b] for a, b in pairwise(indptr)]
            self.lengths = 16 * (indptr[1:] - indptr[:-1] - 1) + last_page_len
            seen.append(options)

        def run(self, q, caches, out):
            k, v = (cache.transpose(1, 2) for cache in caches)
            out.copy_(serve(q, k, v, self.starts, self.lengths, self.pages, 64**-0.5))
            return out

    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return seen


@pytest.mark.parametrize(
    ("provider", "kv_dtype", "backend"), [(Fa2Attention, None, "fa2"), (Fa2Attention, "e4m3", "fa2"), (Fa3Attention, None, "fa3")]
)
def test_flashinfer_prefills_it(
    provider: type[Provider], kv_dtype: str | None, backend: str, flashinfer: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = measured(provider(), replace(BATCH, kv_dtype=kv_dtype), monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed and outcome.gate.tolerance == PEERS
    stored = torch.float8_e4m3fn if kv_dtype else torch.bfloat16
    assert flashinfer == [
        {"backend": backend},
        {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": stored},
    ]


@pytest.mark.parametrize(
    ("provider", "change", "reason"),
    [
        (XqaAttention, {}, "every request must have as many query rows"),
        (Fa2Attention, {"softcap": 2.0}, "it has no soft cap"),
        (Fa2Attention, {"kv_dtype": "int8", "kv_scale": "token-f16"}, "no kernel for int8 caches"),
        (Fa3Attention, {"kv_dtype": "e4m3"}, "no kernel for e4m3 caches"),
    ],
)
def test_what_a_peer_has_no_kernel_for(
    provider: type[Provider], change: dict, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotSupported, match=reason):
        provider().prepare(make_inputs(replace(BATCH, **change), CPU, 2**24, 1))


def test_xqa_builds_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple] = []
    module = ModuleType("flashinfer.xqa")
    module.get_xqa_module = lambda *key: built.append(key)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", module)
    XqaAttention().compile_ahead([BATCH, BATCH.parts()[1]])
    assert len(built) == 1 and built[0][-2] == 4
