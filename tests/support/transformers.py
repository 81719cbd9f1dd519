"""Tiny models of transformers with random weights, and continuous batching on the CPU as it runs on a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.integrations.transformers import register

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[transformers]'")

WINDOW = 9
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {**SLIDING, "use_sliding_window": True}),
    "gemma2": ("Gemma2", {**SLIDING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOss", {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    # layers that pass no window, under a mask that has one
    "qwen2_moe": ("Qwen2Moe", {**SLIDING, "use_sliding_window": True, "num_experts": 4, "num_experts_per_tok": 2}),
    # the last two layers take K and V of the two layers before them
    "gemma3n": (
        "Gemma3n",
        {
            "sliding_window": WINDOW,
            "layer_types": 2 * ["sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": None,
        },
    ),
    # layers that choose their keys, and a layer that does arithmetic on its mask
    "deepseek_v32": (
        "DeepseekV32",
        {**LATENT, **EXPERTS, "num_key_value_heads": 4, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "doge": ("Doge", {"keep_window_size": 8}),
}
VOCABULARY = 97


def tiny(kind: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """A model of two layers, 4 query heads over 2 KV heads; its weights keep the best tokens' logits far apart."""
    name, more = (MODELS | OTHERS)[kind]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    made = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = made(**{**sizes, **heads, **ids, **more, **changed})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or parameter.numel() == config.num_attention_heads:  # includes sinks
                parameter.normal_(std=0.3 if parameter.dim() > 1 else 1.0)
    return model.to(dtype)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


NEW_TOKENS = 12
IDS = torch.tensor(prompts(13, 13, 13))


def generated(model: Any, attention: str, taken: str | None = None, **options: Any) -> Tensor:
    """IDS and the tokens that generate adds. taken: the implementation that the model takes, by default the one asked for."""
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == (taken or attention)
    with torch.no_grad():
        return model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers for each test of a file that imports this, as an earlier test may have registered otherwise; renews the log."""
    register()
    monkeypatch.setattr("cute_kernels.integrations.engine._told", set())


def teacher_forced(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """f32 [tokens, vocabulary]: the logits that each token is chosen from, when all tokens are given at once."""
    with torch.no_grad():
        return model(torch.tensor([prompt + tokens], device=model.device)).logits[0, len(prompt) - 1 : -1].float()


def excess(model: Any, requests: list[list[int]], answers: list[list[int]], rounding: str = "eager") -> float:
    """The most by which the answers' logits are below the best in f32, in units of the logits' largest change by rounding.

    model: of 16 bits; it is f32 afterwards. rounding: the attention whose logits, by the 16-bit model, give that change. f32
    logits are by eager attention. Two logits that are rounded may change places if they are up to 2 such units apart.
    """
    forced = list(zip(requests, answers, strict=True))
    model.set_attn_implementation(rounding)
    rounded = [teacher_forced(model, *each) for each in forced]
    model.float().set_attn_implementation("eager")
    exact = [teacher_forced(model, *each) for each in forced]
    unit = max(float((a - b).abs().max()) for a, b in zip(rounded, exact, strict=True))
    return max(_lost(logits, tokens) for logits, tokens in zip(exact, answers, strict=True)) / unit


def _lost(logits: Tensor, tokens: list[int]) -> float:
    """The most by which a token's logit is below the best."""
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def eager_of_8_bits() -> str:
    """The name of eager attention over K and V that are rounded to e4m3."""

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        return eager(module, query, k, v, *args, **kwargs)

    transformers.AttentionInterface.register("eager_of_8_bits", rounded)
    transformers.AttentionMaskInterface.register("eager_of_8_bits", transformers.masking_utils.eager_mask)
    return "eager_of_8_bits"


def batched(model: Any, requests: list[list[int]], new_tokens: int, **changed: Any) -> list[list[int]]:
    """The tokens that generate_batch adds to each request: pages have 16 tokens, steps 24, so that prompts come in chunks."""
    page_size = "page_size" if hasattr(transformers.generation.ContinuousBatchingConfig(), "page_size") else "block_size"
    sizes = {page_size: 16, "num_blocks": 64, "max_batch_tokens": 24, "max_memory_percent": 0.5}
    config = transformers.generation.ContinuousBatchingConfig(**{**sizes, **changed})
    greedy = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(requests, generation_config=greedy, continuous_batching_config=config, warmup=False)
    answers = sorted(found.values(), key=lambda answer: int(answer.request_id.split("_")[-1]))
    assert [answer.error for answer in answers] == [None] * len(requests)
    assert [list(answer.prompt_ids) for answer in answers] == requests
    return [answer.generated_tokens for answer in answers]


@pytest.fixture
def block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes continuous batching use block tables and pad its steps, as it does with CUDA graphs."""
    from transformers.generation.continuous_batching import initialization, model_runner

    ensure, init = initialization.ensure_decode_fast_path_is_available, model_runner.ModelRunner.__init__

    def ensured(*args: Any, **kwargs: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            ensure(*args, **kwargs)

    def padding(runner: Any, *args: Any, **kwargs: Any) -> None:
        init(runner, *args, **kwargs)
        runner.pad_inputs = True

    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", ensured)
    monkeypatch.setattr(model_runner.ModelRunner, "__init__", padding)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """A context that records the calls of a function: a list of each call's arguments."""
    calls: list[tuple[Any, ...]] = []
    real: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((*args, kwargs))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "cute_kernels" and record.levelno >= logging.WARNING
    ]
