"""Models of transformers whose layers are not like the others': what is served, what is refused, and what the log says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations.transformers import NAME, continuous, forward, masks, models
from tests.support import transformers as support
from tests.support.transformers import block_tables, registered

__all__ = ["block_tables", "registered"]

PADDING = torch.ones_like(support.IDS).index_put_((torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0])), torch.tensor(0))


@pytest.mark.parametrize(("kind", "said"), [("deepseek_v32", "index_topk = 8"), ("doge", "a mask of their own (DogeAttention)")])
def test_a_model_that_keeps_its_attention(kind: str, said: str, caplog) -> None:
    model = support.tiny(kind)
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        wanted = support.generated(model, "sdpa", **options)
        assert torch.equal(support.generated(model, NAME, taken="sdpa", **options), wanted)
    (line,) = support.lines(caplog)
    assert said in line and type(model).__name__ in line


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("axk2", "AXK2Attention"),
        ("deepseek_v32", "DeepseekV32Attention"),
        ("deepseek_v4", "DeepseekV4Attention"),
        ("glm_moe_dsa", "GlmMoeDsaAttention"),
        ("glm5_next", "Glm5NextTextAttention"),
        ("minimax_m3_vl", "MiniMaxM3VLAttention"),
        ("qwen4_exp", "Qwen4ExpTextAttention"),
        *((kind, None) for kind in ("llama", "gemma2", "gemma3n", "gpt2", "gpt_oss", "mistral", "phi3", "qwen2_moe", "zaya")),
    ],
)
def test_sources_say_which_layers_make_masks(kind: str, layer: str | None) -> None:
    name = f"transformers.models.{kind}.modeling_{kind}"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"transformers {support.transformers.__version__} has no {kind}")
    importlib.import_module(name)
    assert models.mask_maker(name) == layer


OWN_FILE = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

class Layer:
    def forward(self, query, key, value, attention_mask, other=None):
        {change}
        attend: object = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return attend(self, query, key, value, {mask})
"""


@pytest.mark.parametrize(
    ("change", "mask", "makes"),
    [
        ("", "attention_mask", False),
        ("", "attention_mask=None", False),
        ("attention_mask = other if other is not None else attention_mask", "attention_mask=attention_mask", False),
        ("mask = attention_mask['full']", "mask", False),
        ("mask = attention_mask.get('full')", "mask", False),
        ("attention_mask += other", "attention_mask", True),
        ("attention_mask = attention_mask[:, :, :, :5]", "attention_mask", True),
        ("mask, other = self.made(attention_mask)", "attention_mask=mask", True),
        ("", "attention_mask & other", True),
    ],
)
def test_a_file_of_the_users_own(change: str, mask: str, makes: bool, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "own_layers.py"
    path.write_text(OWN_FILE.format(change=change or "pass", mask=mask))
    spec = importlib.util.spec_from_file_location("own_layers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_layers", module)
    spec.loader.exec_module(module)
    models.mask_maker.cache_clear()
    assert models.mask_maker("own_layers") == ("Layer" if makes else None)
    models.mask_maker.cache_clear()


def test_a_module_without_its_source_is_served(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "no_source", type(sys)("no_source"))
    assert models.mask_maker("no_source") is None and models.mask_maker("no_such_module") is None


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_window_of_the_mask_alone(cache: str | None, caplog) -> None:
    model = support.tiny("qwen2_moe")
    options: dict[str, Any] = {"cache_implementation": cache, **({} if cache is None else {"disable_compile": True})}
    wanted = support.generated(model, "eager", **options)
    assert torch.equal(support.generated(model, NAME, **options), wanted)
    (line,) = support.lines(caplog)
    assert "has none beside a mask that is sliding" in line


def test_a_window_of_the_mask_hides_keys(caplog) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    for offset in (4, torch.tensor(4)):
        lengths = masks.lengths_mask(2, 5, 9, offset, 0, local_size=3, allow_is_causal_skip=True, use_vmap=False)
        out, _ = forward.attention_forward(torch.nn.Module(), q, k, v, lengths)
        seen = torch.ones(5, 9, dtype=torch.bool).tril(4).triu(2)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        torch.testing.assert_close(out.transpose(1, 2), wanted)
    assert len(support.lines(caplog)) == 1


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("kind", ["gemma3n", "qwen2_moe"])
def test_batches(kind: str, tables: bool, request, monkeypatch, caplog) -> None:
    """Of layers that share K and V, and of layers whose window is that of the cache alone."""
    if tables:
        request.getfixturevalue("block_tables")
    requests, model = support.prompts(5, 60, 1, 13, 33), support.tiny(kind, torch.float16)
    model.set_attn_implementation(NAME)
    with support.counted(monkeypatch, continuous, "paged_attention") as calls:
        answers = support.batched(model, requests, support.NEW_TOKENS)
    assert calls and support.excess(support.tiny(kind, torch.float16), requests, answers) < 1
    assert support.lines(caplog) == []


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_a_layer_that_names_its_keys_is_refused(name: str) -> None:
    q = torch.randn(2, 4, 5, 16)
    for attend in (forward.attention_forward, continuous.continuous_forward):
        with pytest.raises(ck.Unsupported, match=f"Module gives {name}, which no plan takes"):
            attend(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(2, 5, 3)})


def test_a_ring_of_no_window_names_the_version() -> None:
    version = support.transformers.__version__
    with pytest.raises(ck.Unsupported, match=rf"transformers {version}: object\.config\.sliding_window is not there"):
        continuous._window_of(object())


@pytest.mark.parametrize("name", ["position_bias", "sinks"])
def test_batches_refuse_what_changes_scores(name: str) -> None:
    q = torch.randn(1, 4, 5, 16)
    with pytest.raises(ck.Unsupported, match=f"Module gives {name}, which no plan takes"):
        continuous.continuous_forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(4)})


@pytest.mark.parametrize("shape", [(3, 1, 13, 13), (1, 1, 13, 13), (1, 1, 1, 5), (3, 1, 1, 3)])
def test_a_mask_of_integers_that_is_the_callers(shape: tuple[int, ...]) -> None:
    model = support.tiny("llama")
    model.set_attn_implementation(NAME)
    for dtype in (torch.int32, torch.int64):
        with torch.no_grad(), pytest.raises(ck.InvalidProblem, match=rf"attention_mask = '{dtype} of shape .*must be bool, or"):
            model(support.IDS, attention_mask=torch.ones(shape, dtype=dtype))


def test_a_mask_of_booleans_that_is_the_callers() -> None:
    model, seen = support.tiny("llama"), torch.ones(13, 13, dtype=torch.bool).tril().triu(-3)[None, None].expand(3, -1, -1, -1)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        wanted = model(support.IDS, attention_mask=seen).logits
        model.set_attn_implementation(NAME)
        torch.testing.assert_close(model(support.IDS, attention_mask=seen).logits, wanted)


def test_rejected_drafts_are_not_called_padding_alone(caplog) -> None:
    """In a model of sliding layers alone transformers hides the tokens that an assistant was wrong about."""
    seen = torch.ones(1, 20, dtype=torch.bool)
    seen[0, 13] = False
    given: dict[str, Any] = {"allow_is_causal_skip": True, "use_vmap": False, "local_size": support.WINDOW}
    mask = masks.lengths_mask(1, 2, 10, 18, 10, attention_mask=seen, **given)
    assert mask is not None and mask.dtype is torch.bool and not mask[0, 0, :, 3].any()
    assert len(support.lines(caplog)) == 1 and "drafts that were rejected" in support.lines(caplog)[0]


def test_layers_of_a_users_subclass_find_eager_attention(caplog) -> None:
    """Its file has no eager_attention_forward, but that of the class it is derived from."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

    class Attention(Gemma2Attention):
        pass

    model = support.tiny("gemma2")
    wanted = support.generated(model, "eager", attention_mask=PADDING)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    assert torch.equal(support.generated(model, NAME, attention_mask=PADDING), wanted)
    assert len(support.lines(caplog)) == 1 and "padding" in support.lines(caplog)[0]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "qwen2_moe"])
def test_what_goes_to_transformers_compiles_into_one_graph(kind: str) -> None:
    model = support.tiny(kind)
    wanted = support.generated(model, "eager", attention_mask=PADDING)
    config = support.transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    config.mode, config._compile_all_devices = None, True
    torch._dynamo.reset()
    options = {"cache_implementation": "static", "compile_config": config}
    assert torch.equal(support.generated(model, NAME, attention_mask=PADDING, **options), wanted)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_a_whole_forward_compiles_into_one_graph(kind: str) -> None:
    """Its masks too: a compiled model cannot look for padding."""
    model = support.tiny(kind)
    torch._dynamo.reset()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = [model(support.IDS, attention_mask=mask, use_cache=False).logits for mask in (None, PADDING)]
        model.set_attn_implementation(NAME)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for mask, logits in zip((None, PADDING), wanted, strict=True):
            seen = torch.ones_like(PADDING) if mask is None else mask
            found = compiled(support.IDS, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(found[seen.bool()], logits[seen.bool()], rtol=2e-4, atol=2e-4)
