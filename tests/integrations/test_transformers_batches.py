"""transformers' generate_batch over our attention: chunks of prompts, mixed steps, block tables, 8-bit pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations.transformers import NAME, continuous, register
from cute_kernels.integrations.transformers.continuous import Pages, continuous_forward
from tests.support.transformers import (
    MODELS,
    batched,
    block_tables,
    counted,
    eager_of_8_bits,
    excess,
    lines,
    prompts,
    registered,
    tiny,
    transformers,
)

__all__ = ["block_tables", "registered"]

F16 = torch.float16
NEW_TOKENS = 20
REQUESTS = prompts(5, 60, 1, 13, 33)  # steps of 24 tokens: one prompt takes three, beside others' next tokens
UNITS = 0.5  # 0.06 was seen


def ours(kind: str, **changed: Any) -> list[list[int]]:
    model = tiny(kind, F16)
    model.set_attn_implementation(NAME)
    answers = batched(model, REQUESTS, NEW_TOKENS, **changed)
    assert model.config._attn_implementation == NAME, "as before"
    return answers


@pytest.mark.parametrize("num_blocks", [16, 64])  # 16: as many as the requests take
@pytest.mark.parametrize("kind", MODELS)
def test_chunks_and_mixed_steps(kind: str, num_blocks: int, monkeypatch, caplog) -> None:
    with counted(monkeypatch, continuous, "paged_attention") as calls:
        answers = ours(kind, num_blocks=num_blocks)
    assert excess(tiny(kind, F16), REQUESTS, answers) < UNITS
    pages = {call[-1]["page_table"].format for call in calls}
    assert pages == {"packed", "dense"}, "the first chunks are packed, later ones lie in pages"
    assert lines(caplog) == []


@pytest.mark.parametrize("kind", MODELS)
def test_padded_steps(kind: str, block_tables: None) -> None:
    """As with CUDA graphs: more rows, requests and keys than there are, and block tables where no layer has a window."""
    assert excess(tiny(kind, F16), REQUESTS, ours(kind)) < UNITS


def test_block_tables(block_tables: None, monkeypatch) -> None:
    with counted(monkeypatch, continuous, "_decode") as calls:
        assert excess(tiny("llama", F16), REQUESTS, ours("llama")) < UNITS
    steps = [call[3] for call in calls]
    assert len(steps) > 2 * NEW_TOKENS / 2
    assert any(bool((layer.cu_seq_lens.diff() == 0).any()) and bool((layer.block_table == -1).any()) for layer in steps), (
        "padding"
    )


def test_the_units_tell_wrong_attention_apart(monkeypatch) -> None:
    """A control: one key of each request is left out."""
    real = continuous.paged_attention

    def shorter(*args: Any, page_table: ck.PageTable, **kwargs: Any) -> Any:
        if page_table.format == "dense":
            table, lengths, _ = page_table.operands
            page_table = ck.PageTable.dense(table, (lengths - 1).clamp(min=0))
        return real(*args, page_table=page_table, **kwargs)

    monkeypatch.setattr(continuous, "paged_attention", shorter)
    assert excess(tiny("llama", F16), REQUESTS, ours("llama")) > 4 * UNITS


@pytest.mark.parametrize("tables", [False, True])
def test_pages_of_8_bits(tables: bool, request) -> None:
    if tables:
        request.getfixturevalue("block_tables")
    register(ck.KVDtype.E4M3)
    answers = ours("llama")
    assert excess(tiny("llama", F16), REQUESTS, answers) > UNITS, "something was rounded"
    assert excess(tiny("llama", F16), REQUESTS, answers, eager_of_8_bits()) < 2


def test_8_bits_take_the_first_half_of_each_page() -> None:
    k, v = torch.randn(2, 3, 16, 2, 8).bfloat16().unbind()
    before, pages = k.clone(), Pages(k, v, 16).stored_as(torch.float8_e4m3fn)
    assert pages.k.shape == k.shape and pages.page_size == 16
    tokens = torch.randn(5, 2, 8).bfloat16()
    slots = torch.tensor([0, 17, 31, 32, -1])
    ck.append_kv(tokens, tokens, pages.k, pages.v, slots, layout="NHD")
    stored = pages.k.flatten(0, 1)[slots[:4]]
    assert torch.equal(stored.float(), tokens[:4].to(torch.float8_e4m3fn).float())
    assert torch.equal(k.flatten(1)[:, 128:], before.flatten(1)[:, 128:])
    assert pages.k[1].data_ptr() - pages.k.data_ptr() == k[1].data_ptr() - k.data_ptr()


def test_a_model_in_f32_is_refused_by_name() -> None:
    model = tiny("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ck.Unsupported, match=r"generate_batch of a model in torch\.float32"):
        batched(model, REQUESTS, 1)
    assert model.config._attn_implementation == NAME


def test_the_name_for_batches_alone_says_so() -> None:
    model = tiny("llama", F16)
    model.set_attn_implementation("cute_flash_3")
    with torch.no_grad(), pytest.raises(ck.Unsupported, match="continuous batching alone"):
        model.generate(torch.tensor([REQUESTS[0]]), max_new_tokens=2)


class Cache:
    """A cache that no version of transformers has."""


@pytest.mark.parametrize("missing", ["cache", "read_index", "write_index", "cu_seq_lens_k", "cu_seq_lens_q"])
def test_a_step_in_other_words_names_the_version(missing: str, monkeypatch) -> None:
    model = tiny("llama", F16)
    model.set_attn_implementation(NAME)
    with counted(monkeypatch, continuous, "_layer") as calls:
        batched(model, REQUESTS[:1], 2)
    module, step, _, _ = calls[0]
    step = {**step, "cache": Cache()} if missing == "cache" else {name: value for name, value in step.items() if name != missing}
    q, k = torch.zeros(1, 4, 5, 16).half(), torch.zeros(1, 2, 5, 16).half()
    with pytest.raises(
        ck.Unsupported, match=rf"transformers {transformers.__version__}: .*{'Cache' if missing == 'cache' else missing}"
    ):
        continuous_forward(module, q, k, k, None, **step)


def test_a_step_without_a_cache_names_the_version_and_the_call() -> None:
    q, step = torch.zeros(1, 4, 5, 16).half(), {"write_index": [torch.arange(5)], "read_index": [torch.arange(5)]}
    said = rf"transformers {transformers.__version__}: .* has no cache, and PagedAttentionCache\.update was not called"
    with pytest.raises(ck.Unsupported, match=said):
        continuous_forward(torch.nn.Module(), q, q, q, None, **step)
