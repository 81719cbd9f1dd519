"""The cases of long queries, their rates, and their peers: flash-attn-4 by a stand-in, cuDNN by PyTorch's own backend."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from perf.case_sets import bar_of, select_cases
from perf.cases import WIDE, Case, attention_case, fixed
from perf.measure import Limits, Outcome, measure
from perf.prefill_cases import CONTIGUOUS
from perf.providers.base import Provider
from perf.providers.flash_attention_4 import FlashAttention4
from perf.providers.ours import OursAttention, descriptor
from perf.providers.sdpa import Cudnn, FlashAttention2, PromptBySdpa
from perf.report import cell
from perf.timing import Timing
from tests.support.perf_fakes import FakeClock

CPU = torch.device("cpu")
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
CHUNK = attention_case(fixed(2, 40), q_len=5, page_size=16, **HEADS)
PROMPT = attention_case(fixed(2, 12), q_len=12, **HEADS, **CONTIGUOUS)


def measured(provider: Provider, case: Case, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """What the harness makes of a provider on the CPU, its gate included."""
    monkeypatch.setattr(provider, "available", lambda: None)
    limits = Limits(replays=15, trials=2, memory_bytes=2**24, rotated_bytes=3 * case.kv_bytes, host_calls=0, in_stream=0)
    return measure(case, [provider], limits, FakeClock(), CPU)[0]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Bottom-right causal attention of one request: q [rows, heads, d], k and v [tokens, kv_heads, d]."""
    rows, tokens = len(q), len(k)
    seen = torch.arange(tokens) <= torch.arange(tokens - rows, tokens)[:, None]
    operands = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(*operands, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The keywords that flash-attn-4's functions were called with; stand-ins compute what they have to."""
    calls: list[dict] = []

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> tuple[torch.Tensor, None]:
        calls.append(options)
        return torch.stack([causal(*one, options["softmax_scale"]) for one in zip(q, k, v, strict=True)]), None

    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
        calls.append(options)
        out = torch.empty_like(q)
        for row, (table, length) in enumerate(zip(options["page_table"], options["seqused_k"], strict=True)):
            part = slice(options["cu_seqlens_q"][row], options["cu_seqlens_q"][row + 1])
            keys = (cache[table.long()].flatten(0, 1)[:length] for cache in (k, v))
            out[part] = causal(q[part], *keys, options["softmax_scale"])
        return out

    interface = ModuleType("flash_attn.cute.interface")
    interface.flash_attn_func, interface.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    for name, module in {"flash_attn": ModuleType("flash_attn"), "flash_attn.cute": ModuleType("flash_attn.cute")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return calls


@pytest.mark.parametrize("case", [CHUNK, PROMPT], ids=["paged", "contiguous"])
def test_flash_attention_4_is_called_as_its_interface_wants(
    case: Case, seen: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = measured(FlashAttention4(), case, monkeypatch)
    assert outcome.gate is not None and outcome.gate.passed, outcome
    assert all(options["causal"] is True and options["softmax_scale"] == 16**-0.5 for options in seen)
    if case.page_size:
        assert (seen[0]["page_table"] >= 0).all() and seen[0]["max_seqlen_q"] == 5
        assert seen[0]["seqused_k"].tolist() == [40, 40] and seen[0]["cu_seqlens_q"].tolist() == [0, 5, 10]


@pytest.mark.parametrize(
    ("provider", "case", "reason"),
    [
        (FlashAttention4, replace(CHUNK, kv_dtype="e4m3"), "no kernel for e4m3 caches"),
        (FlashAttention4, replace(CHUNK, softcap=3.0), "it has no soft cap"),
        (FlashAttention4, replace(CHUNK, q_len=None, sinks=True), "it has no sinks"),
        (Cudnn, CHUNK, "its keys are contiguous"),
        (Cudnn, replace(PROMPT, q_len=5), "it knows no tokens before the first query row"),
    ],
)
def test_what_peers_have_no_kernel_for(
    provider: type[Provider], case: Case, reason: str, seen: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured(provider(), case, monkeypatch).not_supported == reason


def test_flash_attention_4_says_what_it_refuses(seen: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("head_dim 16 is not served\nmore")

    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "flash_attn_varlen_func", refuse)
    assert measured(FlashAttention4(), CHUNK, monkeypatch).not_supported == "head_dim 16 is not served"


@pytest.mark.parametrize("provider", [Cudnn, FlashAttention2])
def test_backends_of_sdpa_attend_to_whole_prompts(provider: type[PromptBySdpa], monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's math backend here, in the same call."""
    monkeypatch.setattr(provider, "backend", SDPBackend.MATH)
    outcome = measured(provider(), PROMPT, monkeypatch)
    assert outcome.gate is not None and outcome.gate.passed, outcome


@pytest.mark.parametrize("case", [CHUNK, PROMPT], ids=["paged", "contiguous"])
def test_ours_serves_both(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU variant here; contiguous keys go by their lengths."""
    assert descriptor(PROMPT).table_format == "lengths"
    outcome = measured(OursAttention(), case, monkeypatch)
    assert outcome.gate is not None and outcome.gate.passed, outcome


def test_the_sets_and_their_bars() -> None:
    prompts, chunks = select_cases(["prefill"]), select_cases(["chunks"])
    uneven = select_cases(["uneven"])
    assert (len(prompts), len(chunks), len(uneven)) == (24, 18, 8)
    assert all(case.long for case in (*prompts, *chunks, *uneven))
    barred = {case: bar_of(case) for case in (*prompts, *chunks, *uneven)}
    assert all(bar is None or bar.beside == (WIDE if case.kv_dtype else "fa4") for case, bar in barred.items())
    without = {case for case, bar in barred.items() if bar is None}
    assert without == {
        *(case for case in barred if case.page_size in (1, 128)),
        *(case for case in (*chunks, *uneven) if case.kv_dtype and (case.q_len, case.tokens()) != (512, (64 * 1024,))),
    }


def test_a_rate_counts_what_rows_see() -> None:
    """5 rows of 40 keys see 36 to 40 of them; the products of each pair are 2 x 2 x 16 operations a head."""
    assert CHUNK.tflop == pytest.approx(2 * sum(range(36, 41)) * 4 * 4 * 16 / 1e12)
    case = select_cases(["gqa_contiguous_attention_h32_kv8_d128_bf16_q8192_b1_l8k"])[0]
    assert case.tflop == pytest.approx(4 * 32 * 128 * 8192 * 8193 / 2 / 1e12)
    timing = Timing(1000.0, 990.0, 1010.0, 15, (1000.0,))
    assert "550 TFLOPS" in str(cell(Outcome(case, "ours", "1", strict=True, us=timing)))
