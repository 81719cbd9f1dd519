"""FlashAttention-3 and FlashInfer on cases of attention, as they are called: stand-ins that compute what the kernels have to."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from perf.cases import Case, Rows, attention_case
from perf.correctness import FP8_QUERY, PEERS, reference_of
from perf.inputs import Inputs, make_inputs
from perf.measure import DEVICE, Limits, Outcome, measure
from perf.operations import PROCEDURES
from perf.providers.flash_attention import FlashAttention3Attention
from perf.providers.flashinfer_attention import FA3_SOURCE, Fa2Attention, Fa3Attention, XqaAttention, has_fa3_source
from perf.scores import bits
from tests.perf.test_flash_attention import interface
from tests.support.flash_attention_3 import extension
from tests.support.perf_fakes import FakeClock

CPU = torch.device("cpu")
SMALL = attention_case(Rows(((2, 9), (1, 40))), num_heads=4, num_kv_heads=2, head_dim=16, page_size=16)
PROVIDERS = {
    "fa3": FlashAttention3Attention,
    "flashinfer-fa2": Fa2Attention,
    "flashinfer-fa3": Fa3Attention,
    "flashinfer-xqa": XqaAttention,
}


def limits_of(case: Case) -> Limits:
    return Limits(replays=15, trials=2, memory_bytes=2**24, rotated_bytes=3 * case.kv_bytes, host_calls=0, in_stream=0)


def measured(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    provider = PROVIDERS[name]()
    monkeypatch.setattr(provider, "available", lambda: None)
    outcomes = measure(case, [provider], limits_of(case), FakeClock(), CPU)
    assert outcomes[0].metric == DEVICE
    return outcomes[0]


class Oracle:
    """Answers a call by the caches that it is given: the f64 reference of the set that they belong to."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case = case
        self.inputs: Inputs | None = None

        def made(*arguments: object, **keywords: object) -> Inputs:
            self.inputs = make_inputs(*arguments, **keywords)
            return self.inputs

        monkeypatch.setitem(PROCEDURES, "attention", replace(PROCEDURES["attention"], make=made))

    def answer(self, k: torch.Tensor) -> torch.Tensor:
        """bf16 [query rows, num_heads, head_dim]."""
        index = [s.k.data_ptr() for s in self.inputs.sets].index(k.data_ptr())
        return reference_of(self.inputs, index).out.bfloat16()


class Seen(list[tuple[str, dict]]):
    """What each wrapper was made with, planned with and run with, by name. oracle: what answers the runs."""

    oracle: Oracle

    def first(self, name: str) -> dict:
        """What the first call of that name was given."""
        return next(given for called, given in self if called == name)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """FlashInfer's interface by its names."""
    seen = Seen()

    class Wrapper:
        def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph, backend, **buffers):
            assert use_cuda_graph and kv_layout == "HND"
            seen.append((type(self).__name__, {"backend": backend, **buffers}))

        def plan(self, *table, **options):
            seen.append(("plan", {"table": table, **options}))

        def run(self, q, caches, *more, out):
            assert q.dim() == 3 and out.shape == q.shape
            seen.append(("run", {"more": more}))
            out.copy_(seen.oracle.answer(caches[0]))
            return out

    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        pass

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        pass

    class BatchAttentionWithAttentionSinkWrapper(Wrapper):
        pass

    def xqa_batch_decode_with_kv_cache(
        query, kv_cache, workspace, table, seq_lens, max_seq_len, bmm1_scale, kv_layout, out, **options
    ):
        assert query.dim() == 3 and seq_lens.dtype == torch.uint32
        seen.append(("xqa", options))
        out.view(query.shape).copy_(seen.oracle.answer(kv_cache[0]))

    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    for wrapper in Wrapper.__subclasses__():
        setattr(package, wrapper.__name__, wrapper)
    decode.xqa_batch_decode_with_kv_cache = xqa_batch_decode_with_kv_cache
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    return seen


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"q_len": 4}, {"q_len_per_req": 4}),
        ({"q_len": 1}, {}),
        ({"window_left": 5}, {"window_left": 5}),
        ({"softcap": 2.0}, {"logits_soft_cap": 2.0}),
        ({"alibi": True}, {"pos_encoding_mode": "ALIBI"}),
        ({"q_len": 4, "kv_dtype": "e4m3", "softcap": 2.0}, {"q_len_per_req": 4, "logits_soft_cap": 2.0}),
    ],
)
def test_fa2_decodes_several_rows_with_modifiers(flashinfer, change: dict, options: dict, monkeypatch) -> None:
    case = replace(SMALL, **change)
    flashinfer.oracle = Oracle(case, monkeypatch)
    outcome = measured("flashinfer-fa2", case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed and outcome.gate.tolerance == PEERS
    name, made = flashinfer[0]
    assert (name, made["backend"]) == ("BatchDecodeWithPagedKVCacheWrapper", "fa2")
    planned = flashinfer.first("plan")
    table, *_ = planned.pop("table")
    stored = torch.float8_e4m3fn if case.kv_dtype else torch.bfloat16
    assert planned == {"q_data_type": torch.bfloat16, "kv_data_type": stored, **options}
    assert torch.equal(table, flashinfer.oracle.inputs.pages.indptr)


def test_fa2_takes_a_tree_as_a_mask_over_all_keys(flashinfer, monkeypatch) -> None:
    case = replace(SMALL, q_len=4, tree_mask=True)
    flashinfer.oracle = Oracle(case, monkeypatch)
    outcome = measured("flashinfer-fa2", case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed
    name, buffers = flashinfer[0]
    assert (name, buffers["backend"]) == ("BatchPrefillWithPagedKVCacheWrapper", "fa2")
    assert buffers["custom_mask_buf"].numel() >= 2 * 5 + 20
    planned = flashinfer.first("plan")
    inputs, mask = flashinfer.oracle.inputs, planned["custom_mask"]
    assert planned["uniform_q_len"] == 4 and planned["table"][0].tolist() == [0, 4, 8, 12]
    start = 0
    for row, tokens in enumerate(case.tokens()):
        of_row = mask[start : start + 4 * tokens].view(4, tokens)
        start += 4 * tokens
        assert of_row[:, : tokens - 4].all()
        assert torch.equal(of_row[:, tokens - 4 :], bits(inputs.operands.tree_mask[4 * row : 4 * row + 4], 4))
    assert start == len(mask)


def test_fa2_takes_sinks_through_the_wrapper_that_has_them(flashinfer, monkeypatch) -> None:
    case = replace(SMALL, sinks=True)
    flashinfer.oracle = Oracle(case, monkeypatch)
    outcome = measured("flashinfer-fa2", case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed
    name, made = flashinfer[0]
    assert (name, made["backend"]) == ("BatchAttentionWithAttentionSinkWrapper", "fa2")
    assert (made["head_dim_qk"], made["window_left"], made["kv_data_type"]) == (16, -1, torch.bfloat16)
    sink, scale = flashinfer.first("run")["more"]
    assert torch.equal(sink, flashinfer.oracle.inputs.operands.sinks) and scale == 0.25
    refused = measured("flashinfer-fa2", replace(case, kv_dtype="e4m3"), monkeypatch)
    assert refused.not_supported.startswith("its kernel with sinks") and refused.error is None


@pytest.mark.parametrize("change", [{"q_len": 4}, {"q_len": 4, "query": "ragged"}], ids=["uniform", "ragged"])
def test_flashinfers_fa3_takes_causal_rows_over_pages(flashinfer, change: dict, monkeypatch) -> None:
    case = replace(SMALL, head_dim=64, **change)
    flashinfer.oracle = Oracle(case, monkeypatch)
    outcome = measured("flashinfer-fa3", case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed and outcome.gate.tolerance == PEERS
    name, made = flashinfer[0]
    assert (name, made["backend"]) == ("BatchPrefillWithPagedKVCacheWrapper", "fa3")
    planned, pages = flashinfer.first("plan"), flashinfer.oracle.inputs.pages
    rows, indptr, indices, last_page_len, *shape = planned.pop("table")
    assert rows.tolist() == [0, 4, 8, 12] and shape == [4, 2, 64, 16]
    assert torch.equal(indptr, pages.indptr) and torch.equal(indices, pages.indices)
    assert torch.equal(last_page_len, pages.last_page_len)
    assert planned == {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def test_flashinfers_prefill_modules_are_built_once_each(monkeypatch) -> None:
    """What its prefill kernels are compiled for: types, head_dims, position encoding, window, soft cap, f16 scores."""
    built: list[tuple] = []
    module = ModuleType("flashinfer.prefill")
    module.get_batch_prefill_module = lambda *key: built.append(key)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    rows = replace(SMALL, head_dim=64, q_len=4)
    refused = [replace(rows, q_len=1), replace(rows, kv_dtype="e4m3"), replace(rows, head_dim=96), replace(rows, softcap=2.0)]
    Fa3Attention().compile_ahead([rows, replace(rows, page_size=64), *refused])
    bf16, none = torch.bfloat16, (0, False, False, False)
    assert built == [("fa3", bf16, bf16, bf16, torch.int32, 64, 64, *none)]
    built.clear()
    Fa2Attention().compile_ahead([replace(rows, kv_dtype="e4m3", softcap=2.0)])
    assert built == [("fa2", bf16, torch.float8_e4m3fn, bf16, torch.int32, 64, 64, 0, False, True, False)]


def test_flashinfers_fa3_needs_its_source(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr("perf.providers.flashinfer.require_sm90", lambda: None)
    assert Fa3Attention().available() == "package flashinfer is not installed"
    source = tmp_path / "flashinfer" / FA3_SOURCE
    source.parent.mkdir(parents=True)
    (tmp_path / "flashinfer" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert not has_fa3_source()
    assert Fa3Attention().available() == "the package flashinfer has no batch_prefill_sm90.cu"
    source.touch()
    assert Fa3Attention().available() is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"q_len": 1}, set()),
        ({"window_left": 5}, {"window_left"}),
        ({"sinks": True}, {"sinks"}),
        ({"q_len": 4}, {"q_len_per_req", "mask"}),
        ({"q_len": 20, "lengths": Rows(((3, 40),))}, {"q_len_per_req", "mask"}),
        ({"q_len": 4, "tree_mask": True}, {"q_len_per_req", "mask"}),
        ({"q_len": 4, "window_left": 5, "kv_dtype": "e4m3"}, {"q_len_per_req", "mask", "window_left"}),
    ],
)
def test_xqa_takes_drafts_with_their_mask(flashinfer, change: dict, names: set[str], monkeypatch) -> None:
    case = replace(SMALL, **change)
    flashinfer.oracle = Oracle(case, monkeypatch)
    outcome = measured("flashinfer-xqa", case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.tolerance == (FP8_QUERY if case.kv_dtype else PEERS)
    options = flashinfer.first("xqa")
    assert set(options) == names and options.get("window_left") == case.window_left
    if "mask" not in options:
        return
    mask, n = options["mask"], case.q_len
    assert mask.shape == (3, n, 2) and mask.dtype == torch.uint16 and options["q_len_per_req"] == n
    words = mask.to(torch.int64)
    for request in range(3):
        for i in range(n):
            seen = [bool(words[request, i, j // 16] >> j % 16 & 1) for j in range(n)]
            tree = flashinfer.oracle.inputs.operands.tree_mask
            wanted = [j <= i for j in range(n)] if tree is None else bits(tree[request * n + i], n).tolist()
            assert seen == wanted


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("fa3", {"alibi": True}, "it has no ALiBi"),
        ("fa3", {"q_len": 4, "tree_mask": True}, "it has no tree mask"),
        ("fa3", {"q_len": 4, "kv_dtype": "int8", "kv_scale": "token-f16"}, "no kernel for int8 caches"),
        ("flashinfer-fa2", {"q_len": 4, "kv_dtype": "int8", "kv_scale": "token-f16"}, "no kernel for int8 caches"),
        ("flashinfer-fa2", {"sinks": True, "softcap": 2.0}, "it has no soft cap"),
        ("flashinfer-fa2", {"q_len": 4, "tree_mask": True, "window_left": 5}, "it has no window"),
        ("flashinfer-fa3", {"q_len": 4, "softcap": 2.0}, "it has no soft cap"),
        ("flashinfer-fa3", {"q_len": 4, "kv_dtype": "e4m3"}, "no kernel for e4m3 caches"),
        ("flashinfer-fa3", {"q_len": 1}, "one query row is decode"),
        ("flashinfer-fa3", {"q_len": 4}, "head_dim 16 is not one of (64, 128, 256)"),
        ("flashinfer-xqa", {"softcap": 2.0}, "it has no soft cap"),
        ("flashinfer-xqa", {"alibi": True}, "it has no ALiBi"),
        ("flashinfer-xqa", {"q_len": 4, "tree_mask": True, "window_left": 5}, "no tree of drafts under a window"),
        ("flashinfer-xqa", {"q_len": 4, "page_size": 4}, "page_size 4 is not one of (16, 32, 64, 128)"),
    ],
)
def test_what_a_peer_cannot_do_is_no_error(flashinfer, name: str, change: dict, reason: str, monkeypatch) -> None:
    outcome = measured(name, replace(SMALL, **change), monkeypatch)
    assert (outcome.not_supported, outcome.error) == (reason, None)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"q_len": 4}, {"causal": True, "window_size": (-1, -1)}),
        ({"q_len": 1}, {}),
        ({"window_left": 5}, {"causal": True, "window_size": (5, 0)}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"q_len": 4, "softcap": 2.0, "kv_dtype": "e4m3"}, {"causal": True, "window_size": (-1, -1), "softcap": 2.0}),
    ],
)
def test_fa3_takes_rows_windows_and_caps(change: dict, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, **change)
    oracle = Oracle(case, monkeypatch)
    schedules: list[dict] = []

    def get_scheduler_metadata(batch_size, max_seqlen_q, cache_seqlens, **given):
        assert (batch_size, max_seqlen_q) == (3, case.q_rows)
        schedules.append({name: given[name] for name in ("causal", "window_size", "has_softcap") if name in given})
        return cache_seqlens

    def flash_attn_with_kvcache(q, k, v, **given):
        assert q.shape == (3, case.q_rows, 4, 16)
        assert {name: given[name] for name in ("causal", "window_size", "softcap") if name in given} == options
        return oracle.answer(k).view(q.shape)

    interface(monkeypatch, get_scheduler_metadata, flash_attn_with_kvcache)
    outcome = measured("fa3", case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.tolerance == (FP8_QUERY if case.kv_dtype else PEERS)
    capped = {"has_softcap": True} if case.softcap else {}
    assert schedules[0] == {name: value for name, value in options.items() if name != "softcap"} | capped


def test_fa3s_package_has_no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_with_kvcache(q, k, v, **given):
        raise AssertionError("called")

    interface(monkeypatch, flash_attn_with_kvcache)
    assert measured("fa3", replace(SMALL, sinks=True), monkeypatch).not_supported == "the package's interface has no sinks"


@pytest.mark.parametrize(
    ("said", "not_supported"),
    [("This flash attention build does not support softcap.\nmore", True), ("an illegal memory access", False)],
)
def test_a_build_that_lacks_the_kernel_is_no_error(said: str, not_supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_with_kvcache(q, k, v, **given):
        raise RuntimeError(said)

    interface(monkeypatch, flash_attn_with_kvcache)
    outcome = measured("fa3", replace(SMALL, softcap=2.0), monkeypatch)
    assert outcome.not_supported == (said.splitlines()[0] if not_supported else None)
    assert outcome.error == (None if not_supported else f"RuntimeError: {said}")


@pytest.mark.parametrize(
    ("change", "causal", "window", "softcap"),
    [
        ({"sinks": True}, False, (-1, -1), 0.0),
        ({"q_len": 4, "sinks": True, "kv_dtype": "e4m3"}, True, (-1, -1), 0.0),
        ({"window_left": 5, "softcap": 2.0}, True, (5, 0), 2.0),
    ],
)
def test_the_extension_takes_sinks_windows_and_caps(
    change: dict, causal: bool, window: tuple[int, int], softcap: float, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    case = replace(SMALL, **change)
    oracle = Oracle(case, monkeypatch)
    calls: list[torch.Tensor | None] = []

    def fwd(q, k, v, *rest):
        assert q.shape == (3, case.q_rows, 4, 16) and rest[21:25] == (causal, *window, softcap)
        rest[3].copy_(oracle.answer(k).view(q.shape))
        calls.append(rest[30])
        return [rest[3]]

    def schedule(batch_size, max_seqlen_q, *rest):
        assert max_seqlen_q == case.q_rows and rest[14:18] == (causal, *window, softcap > 0)
        return rest[6]

    with extension(monkeypatch, tmp_path, fwd, schedule):
        outcome = measured("fa3", case, monkeypatch)
    assert outcome.reason == "" and outcome.gate.passed and calls
    sinks = oracle.inputs.operands.sinks
    for given in calls:
        assert (given is None) == (sinks is None)
        assert given is None or (given.dtype == torch.bfloat16 and torch.equal(given.float(), sinks))
