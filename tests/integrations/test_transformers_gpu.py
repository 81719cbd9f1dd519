"""transformers on a GPU: graphs of decode steps, block tables, static caches in torch.compile's graphs, no second compile."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations.transformers import NAME, continuous, register
from tests.support.transformers import MODELS, batched, counted, eager_of_8_bits, excess, prompts, registered, tiny

__all__ = ["registered"]

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
NEW_TOKENS = 24
REQUESTS = prompts(5, 60, 1, 13, 33, 120)
WIDE = {"head_dim": 64, "hidden_size": 256}
NOT_FAR = 1  # units of `excess`: two logits may change places up to 2


def on_gpu(kind: str, dtype: torch.dtype = BF16) -> Any:
    return tiny(kind, dtype, **WIDE).cuda()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("graphs", [(False, False), (False, True), (True, True)], ids=["eager", "decode", "all"])
def test_generate_batch(kind: str, graphs: tuple[bool, bool]) -> None:
    model = on_gpu(kind)
    model.set_attn_implementation(NAME)
    options = {"use_cuda_graph": graphs, "max_blocks_per_request": 16, "max_requests_per_batch": 8}
    answers = batched(model, REQUESTS, NEW_TOKENS, **options)
    assert excess(on_gpu(kind), REQUESTS, answers) < NOT_FAR


def test_decode_steps_take_block_tables(monkeypatch) -> None:
    model = on_gpu("llama")
    model.set_attn_implementation(NAME)
    with counted(monkeypatch, continuous, "_decode") as calls:
        batched(model, REQUESTS, NEW_TOKENS, use_cuda_graph=(False, True), max_blocks_per_request=16)
    assert calls, "block tables were off"


def test_pages_of_8_bits() -> None:
    register(ck.KVDtype.E4M3)
    model = on_gpu("llama")
    model.set_attn_implementation(NAME)
    answers = batched(model, REQUESTS, NEW_TOKENS, use_cuda_graph=(False, True), max_blocks_per_request=16)
    assert excess(on_gpu("llama"), REQUESTS, answers, eager_of_8_bits()) < 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_generate_with_a_static_cache(kind: str, compiled: bool) -> None:
    """Compiled: as transformers does by itself on a GPU, mode "reduce-overhead"."""
    model, ids = on_gpu(kind), torch.tensor(prompts(40, 40, 40))
    model.set_attn_implementation(NAME)
    torch._dynamo.reset()
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "disable_compile": not compiled}
    with torch.no_grad():
        found = model.generate(ids.cuda(), cache_implementation="static", **options)[:, 40:]
    assert excess(on_gpu(kind), ids.tolist(), found.tolist()) < NOT_FAR


def test_a_model_in_f32_keeps_transformers_attention(caplog) -> None:
    model, ids = on_gpu("llama", torch.float32), torch.tensor(prompts(13, 13)).cuda()
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
        model.set_attn_implementation(NAME)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), wanted)
    assert any("a model in torch.float32" in record.getMessage() for record in caplog.records)


def test_other_lengths_compile_nothing_new(caplog) -> None:
    """Kernels of a step serve steps of any length and of as many requests."""
    model = on_gpu("llama")
    model.set_attn_implementation(NAME)
    options = {"use_cuda_graph": (False, True), "max_blocks_per_request": 16}
    batched(model, REQUESTS, NEW_TOKENS, **options)
    with caplog.at_level(logging.INFO, "cute_kernels"):
        batched(model, prompts(6, 70, 2, 9, 40, 100), NEW_TOKENS, **options)
    assert [record.getMessage() for record in caplog.records if record.getMessage().startswith("compiled")] == []
