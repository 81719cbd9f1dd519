"""transformers' generate over our attention: tokens of its eager attention, with windows, soft caps and sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations.transformers import NAME, engine, forward, masks, register
from tests.support.transformers import (
    IDS,
    MODELS,
    NEW_TOKENS,
    WINDOW,
    counted,
    generated,
    lines,
    prompts,
    registered,
    tiny,
    transformers,
)

__all__ = ["registered"]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", MODELS)
def test_generate_gives_the_tokens_of_eager_attention(kind: str, cache: str | None, monkeypatch, caplog) -> None:
    model = tiny(kind)
    wanted = generated(model, "eager")
    with counted(monkeypatch, forward, "paged_attention") as calls:
        assert torch.equal(generated(model, NAME, cache_implementation=cache), wanted)
    assert len(calls) == NEW_TOKENS * model.config.num_hidden_layers  # the prompt's rows too
    assert lines(caplog) == []


@pytest.mark.parametrize("kind", MODELS)
def test_logits_of_a_plain_forward(kind: str) -> None:
    model = tiny(kind)
    ids = torch.tensor(prompts(3 * WINDOW, 3 * WINDOW))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(ids).logits
        model.set_attn_implementation(NAME)
        torch.testing.assert_close(model(ids).logits, wanted, rtol=2e-4, atol=2e-4)


def test_a_static_cache_compiles_into_one_graph() -> None:
    from torch._dynamo.utils import counters

    model = tiny("llama")
    wanted = generated(model, "eager")
    config = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    config.mode, config._compile_all_devices = None, True
    torch._dynamo.reset()
    counters.clear()
    assert torch.equal(generated(model, NAME, cache_implementation="static", compile_config=config), wanted)
    assert counters["stats"]["unique_graphs"] == 1, "one for every length"


@pytest.mark.parametrize("kind", MODELS)
def test_a_padded_batch_goes_to_transformers_with_one_line(kind: str, monkeypatch, caplog) -> None:
    model, padding = tiny(kind), torch.ones_like(IDS)
    padding[0, :4] = padding[2, :1] = 0
    for cache in (None, "static"):
        wanted = generated(model, "eager", attention_mask=padding, cache_implementation=cache)
        with counted(monkeypatch, forward, "paged_attention") as calls:
            assert torch.equal(generated(model, NAME, attention_mask=padding, cache_implementation=cache), wanted)
        assert calls == []
    assert len(lines(caplog)) == 1 and "padding" in lines(caplog)[0]


@pytest.mark.parametrize(
    ("q_length", "past", "static"), [(1, 0, 32), (1, 20, 32), (5, 0, 32), (5, 7, 32), (12, 0, None), (3, 20, None)]
)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("on_device", [False, True])
def test_lengths_say_what_sdpas_mask_says(
    q_length: int, past: int, static: int | None, window: int | None, on_device: bool
) -> None:
    """For the sizes and offsets that transformers' own caches give, full and sliding, static and dynamic."""
    cache_utils, masking = transformers.cache_utils, transformers.masking_utils
    if window is None:
        layer = cache_utils.DynamicLayer() if static is None else cache_utils.StaticLayer(static)
    else:
        sliding = cache_utils.DynamicSlidingWindowLayer, cache_utils.StaticSlidingWindowLayer
        layer = sliding[0](sliding_window=window) if static is None else sliding[1](max_cache_len=static, sliding_window=window)
    for tokens in [past] if past else []:
        layer.update(torch.zeros(2, 1, tokens, 4), torch.zeros(2, 1, tokens, 4))
    kv_length, kv_offset = layer.get_mask_sizes(q_length)
    pattern = masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)
    given: dict[str, Any] = {"mask_function": pattern, "local_size": window, "use_vmap": False, "device": "cpu"}
    skip = q_length > 1
    sizes = (2, q_length, kv_length, torch.tensor(past) if on_device else past, kv_offset)
    found = masks.lengths_of(masks.lengths_mask(*sizes, allow_is_causal_skip=skip, **given), 2)
    assert found is not None and found.sliding == (window is not None)
    wanted = masking.sdpa_mask(*sizes, allow_is_causal_skip=False, **given)
    assert torch.equal(masks.dense_mask(found, q_length, kv_length), wanted.expand(2, -1, -1, -1))


@pytest.mark.parametrize(
    "pattern",
    [
        {"allow_is_causal_skip": False, "use_vmap": False},  # packed sequences, blocks of an image
        {"allow_is_causal_skip": True, "use_vmap": True},  # a caller's function
        {"allow_is_causal_skip": False, "use_vmap": False, "allow_is_bidirectional_skip": False},
        {
            "allow_is_causal_skip": True,
            "use_vmap": False,
            "local_size": 4,
            "config": transformers.LlamaConfig(attention_chunk_size=4),
        },
        {"use_vmap": False},  # not told whether rows see what they seem to
        {"allow_is_causal_skip": True},
    ],
    ids=lambda pattern: "-".join(pattern),
)
def test_other_patterns_keep_sdpas_mask(pattern: dict[str, Any], caplog) -> None:
    mask = masks.lengths_mask(2, 5, 9, 4, 0, **pattern)
    assert masks.lengths_of(mask, 2) is None and len(lines(caplog)) == 1


def test_a_layer_whose_window_is_not_its_masks_goes_to_transformers(caplog) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    lengths = masks.lengths_mask(2, 5, 9, 4, 0, allow_is_causal_skip=True, use_vmap=False)
    module = torch.nn.Module()
    out, _ = forward.attention_forward(module, q, k, v, lengths, sliding_window=3)
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4)  # the mask decides
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    assert len(lines(caplog)) == 1 and "sliding_window = 3" in lines(caplog)[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dropout": 0.5}, "dropout = 0.5"),
        ({"grad": True}, "gradients"),
        ({"head_dim": 272}, "head_dim = 272"),
        ({"v_head_dim": 8}, "V of head_dim 8"),
        ({"position_bias": True}, "position_bias"),
    ],
    ids=str,
)
def test_what_no_plan_serves_goes_to_transformers_with_one_line(changed: dict[str, Any], said: str, caplog) -> None:
    torch.manual_seed(0)
    changed = dict(changed)
    dim, v_dim = changed.pop("head_dim", 16), changed.pop("v_head_dim", None)
    q, k, v = torch.randn(2, 4, 5, dim), torch.randn(2, 4, 5, dim), torch.randn(2, 4, 5, v_dim or dim)
    q.requires_grad_(changed.pop("grad", False))
    if "position_bias" in changed:
        changed["position_bias"] = torch.randn(1, 4, 5, 5)
    lengths = masks.lengths_mask(2, 5, 5, allow_is_causal_skip=True, use_vmap=False)
    for _ in range(2):
        torch.manual_seed(1)
        out, _ = forward.attention_forward(torch.nn.Module(), q, k, v, lengths, **changed)
    torch.manual_seed(1)
    bias = torch.zeros(5, 5).masked_fill_(torch.ones(5, 5).triu(1).bool(), -torch.inf) + changed.pop("position_bias", 0)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=changed.pop("dropout", 0.0))
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    assert [said in line for line in lines(caplog)] == [True]


def test_a_model_whose_heads_are_too_wide_keeps_its_attention(caplog) -> None:
    model = tiny("llama", head_dim=512)
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "sdpa"
    assert len(lines(caplog)) == 1 and "head_dim = 512" in lines(caplog)[0] and "LlamaForCausalLM" in lines(caplog)[0]


@pytest.mark.parametrize("call", engine.CALLS, ids=lambda call: call.name)
def test_a_version_that_has_moved_is_named_with_the_call(call: engine.Call, monkeypatch) -> None:
    owner: Any = engine.part(call.module)
    *path, name = call.name.split(".")
    for attribute in path:
        owner = getattr(owner, attribute)
    where = next((base for base in getattr(owner, "__mro__", ()) if name in vars(base)), owner)
    with monkeypatch.context() as patch:
        patch.delattr(where, name)
        with pytest.raises(ck.Unsupported, match=rf"transformers {transformers.__version__}.*{name}.*(is not there|takes no)"):
            register()
        patch.setattr(where, name, lambda self: None, raising=False)
        with pytest.raises(
            ck.Unsupported, match=rf"transformers {transformers.__version__}.*{name}.*takes no {call.parameters[0]}"
        ):
            register()
    register()


def test_without_transformers(monkeypatch) -> None:
    missing = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    monkeypatch.setattr("cute_kernels.integrations.engine.import_module", lambda name: (_ for _ in ()).throw(missing))
    with pytest.raises(ck.errors.MissingDependency, match="pip install transformers"):
        register()


def test_the_kv_dtype_is_checked() -> None:
    with pytest.raises(ck.InvalidProblem, match="kv_dtype"):
        register(ck.KVDtype.INT8)
