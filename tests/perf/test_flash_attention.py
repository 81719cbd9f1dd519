"""FlashAttention-3 as it is called, with stand-ins of the interfaces' signatures that compute what the kernels have to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from perf.cases import Case, Rows
from perf.correctness import FP8_QUERY, PEERS, attention_f64
from perf.measure import Limits, measure
from perf.providers import PROVIDERS
from tests.support.flash_attention_3 import extension as stand_in
from tests.support.perf_fakes import FakeClock

CPU = torch.device("cpu")
CASE = Case(4, 2, 16, 4, Rows(((2, 9), (1, 4))))
LIMITS = Limits(replays=15, trials=2, memory_bytes=2**20, rotated_bytes=3 * CASE.kv_bytes, host_calls=20)


def attend(q, k, v, seq_lens, table, scale):
    """bf16 [batch, 1, num_heads, head_dim] from pages [pages, page_size, num_kv_heads, head_dim]."""
    outs = []
    for row, length in enumerate(seq_lens.tolist()):
        keys, values = (c[table[row].long()].double().flatten(0, 1)[:length].transpose(0, 1) for c in (k, v))
        outs.append(attention_f64(q[row, 0].double(), keys, values, scale)[0])
    return torch.stack(outs)[:, None].to(torch.bfloat16)


def metadata_of(num_splits, seq_lens):
    """What a stand-in's call checks: made for so many splits and these lengths."""
    return torch.cat([torch.tensor([num_splits], dtype=torch.int32), seq_lens])


def fa3(monkeypatch):
    provider = PROVIDERS["fa3"]()
    monkeypatch.setattr(provider, "available", lambda: None)
    return provider


def interface(monkeypatch, *functions):
    """Install flash_attn_interface with these functions."""
    module = ModuleType("flash_attn_interface")
    for function in functions:
        setattr(module, function.__name__, function)
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


@pytest.mark.parametrize("kv_dtype", [None, "e4m3"])
def test_the_interface_is_called_with_metadata_made_beforehand(monkeypatch, kv_dtype):
    made, served = [], []

    def get_scheduler_metadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        qkv_dtype,
        page_size,
        num_splits,
    ):
        assert (batch_size, max_seqlen_q, max_seqlen_k) == (3, 1, 12)  # 3 pages of 4
        assert (num_heads_q, num_heads_kv, headdim, page_size) == (4, 2, 16, 4)
        assert qkv_dtype == (torch.float8_e4m3fn if kv_dtype else torch.bfloat16)
        made.append(num_splits)
        return metadata_of(num_splits, cache_seqlens)

    def flash_attn_with_kvcache(
        q, k, v, cache_seqlens, page_table, softmax_scale, scheduler_metadata, num_splits, q_descale, k_descale, v_descale
    ):
        assert q.dtype == k.dtype == v.dtype == (torch.float8_e4m3fn if kv_dtype else torch.bfloat16)
        assert k.shape[1:] == (4, 2, 16)  # page_size, num_kv_heads, head_dim
        for descale in (q_descale, k_descale, v_descale):
            assert descale is None if kv_dtype is None else descale.shape == (3, 2) and descale.eq(1).all()
        assert torch.equal(scheduler_metadata, metadata_of(num_splits, cache_seqlens))
        served.append(len(made))
        return attend(q, k, v, cache_seqlens, page_table, softmax_scale)

    interface(monkeypatch, get_scheduler_metadata, flash_attn_with_kvcache)
    outcomes = measure(replace(CASE, kv_dtype=kv_dtype), [fa3(monkeypatch)], LIMITS, FakeClock(), CPU)
    assert [(o.metric, o.reason) for o in outcomes] == [(m, "") for m in ("device", "in_stream", "device.plan", "host.plan")]
    device = outcomes[0]
    assert device.gate.passed and device.detail["scheduler_metadata"] == "beforehand"
    assert device.gate.tolerance == (FP8_QUERY if kv_dtype else PEERS)
    assert device.detail.get("q_dtype") == kv_dtype
    assert kv_dtype is None or device.gate.relative_error > 2**-8
    assert made[:7] == [0, 1, 2, 4, 8, 16, 32], "once for each number of splits"
    assert set(served) == {7}, "no call makes any"
    assert outcomes[2].us.median == 10.0 and outcomes[3].us.median > 0


def test_an_interface_without_metadata_makes_it_in_the_call(monkeypatch):
    def flash_attn_with_kvcache(q, k, v, cache_seqlens, page_table, softmax_scale, num_splits, q_descale, k_descale, v_descale):
        return attend(q, k, v, cache_seqlens, page_table, softmax_scale)

    interface(monkeypatch, flash_attn_with_kvcache)
    outcomes = measure(CASE, [fa3(monkeypatch)], LIMITS, FakeClock(), CPU)
    assert [(o.metric, o.reason) for o in outcomes] == [("device", ""), ("in_stream", "")]
    assert outcomes[0].gate.passed and outcomes[0].detail["scheduler_metadata"] == "in the call"


@pytest.fixture
def extension(monkeypatch, tmp_path) -> Iterator[list[int]]:
    """vLLM's operators by their schemas, over the CPU; the list has what each call of `fwd` found as num_splits."""
    splits: list[int] = []

    def fwd(q, k, v, *rest):
        out, seq_lens, table, scale = rest[3], rest[8], rest[11], rest[20]
        metadata, num_splits = rest[26:28]
        assert torch.equal(metadata, metadata_of(num_splits, seq_lens))
        splits.append(num_splits)
        out.copy_(attend(q, k, v, seq_lens, table, scale))
        return [out]

    def schedule(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, dtype, seqused_k, *rest):
        assert (batch_size, max_seqlen_q, max_seqlen_k) == (3, 1, 12)
        assert (num_heads, num_heads_k, headdim, headdim_v, dtype) == (4, 2, 16, 16, torch.float8_e4m3fn)
        assert rest[:5] == (None,) * 5 and rest[5:11] == (4, 0, False, -1, -1, False) and rest[12:] == (None, 0)
        return metadata_of(rest[11], seqused_k)

    with stand_in(monkeypatch, tmp_path, fwd, schedule):
        yield splits


def test_the_extension_is_called_by_its_schema_with_metadata_made_beforehand(monkeypatch, extension):
    monkeypatch.setenv("FA3_VERSION", "vllm 0.26.0")
    outcomes = measure(replace(CASE, kv_dtype="e4m3"), [fa3(monkeypatch)], LIMITS, FakeClock(), CPU)
    assert [(o.metric, o.reason) for o in outcomes] == [(m, "") for m in ("device", "in_stream", "device.plan", "host.plan")]
    assert outcomes[0].gate.passed and set(extension) == {0, 1, 2, 4, 8, 16, 32}
    assert outcomes[0].detail["scheduler_metadata"] == "beforehand"
    assert outcomes[0].version == "vllm 0.26.0's FA3, sha256 of the .so 1b1ee7db"


def test_a_version_is_never_made_up(monkeypatch, tmp_path):
    for name in ("FA3_SO", "FA3_VERSION"):
        monkeypatch.delenv(name, raising=False)
    assert PROVIDERS["fa3"]().version() == "unknown"
    (tmp_path / "fa3.so").write_bytes(b"an extension")
    monkeypatch.setenv("FA3_SO", str(tmp_path / "fa3.so"))
    assert PROVIDERS["fa3"]().version() == "FA3, sha256 of the .so 1b1ee7db"
    monkeypatch.setattr("perf.providers.flash_attention.package_version", {"flash_attn_3": "3.0.0b1"}.get)
    assert PROVIDERS["fa3"]().version() == "flash_attn_3 3.0.0b1"
