"""A model with random weights, prompts, and the attention implementations that are compared."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import cute_kernels as ck
from cute_kernels.integrations import flash_attn as ours
from cute_kernels.integrations.transformers import NAME, register

FA3_NAME = "fa3_flash_3"  # transformers uses block tables only for a name of this form
LLAMA_3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
TINY = {**LLAMA_3_8B, "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The work of a run: prompts, all different, the tokens of each prompt, and the new tokens for each."""

    prompts: int
    prompt_len: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return self.prompts * self.new_tokens

    def __str__(self) -> str:
        return f"{self.prompts} x {self.prompt_len:,} + {self.new_tokens}"


def model_of(layers: int, tiny: bool, device: torch.device) -> Any:
    """A Llama in bf16, shaped like Llama-3-8B except for the number of layers, or tiny."""
    longest, ids = 8192, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": longest, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**{**(TINY if tiny else LLAMA_3_8B), **sizes, **ids})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def prompts_of(work: Work, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    ids: list[list[int]] = torch.randint(1, vocabulary, (work.prompts, work.prompt_len), generator=generator).tolist()
    return ids


def use(provider: str, model: Any) -> None:
    """Gives a model the attention of a provider: "ours", "ours e4m3", "fa3", "sdpa" or "eager"."""
    if provider.startswith("ours"):
        register(ck.KVDtype.E4M3 if provider.endswith("e4m3") else None)
    if provider == "fa3":
        register_fa3()
    model.set_attn_implementation({"fa3": FA3_NAME, "sdpa": "sdpa", "eager": "eager"}.get(provider, NAME))


def register_fa3() -> None:
    """Makes transformers call FlashAttention-3 from the library that FA3_SO names; without a GPU ours takes its place."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations import flash_attention

    functions: tuple[Any, Any, Any] = (ours.flash_attn_func, ours.flash_attn_varlen_func, ours.flash_attn_with_kvcache)
    if torch.cuda.is_available():
        torch.ops.load_library(os.environ["FA3_SO"])
        functions = (None, fa3_varlen, fa3_with_kvcache)
    transformers.AttentionInterface.register(FA3_NAME, flash_attention.flash_attention_forward)
    if transformers.__version__ < "5.18":
        from transformers.integrations.flash_paged import paged_attention_forward

        transformers.AttentionInterface.register(f"paged|{FA3_NAME}", paged_attention_forward)
    original = utils._lazy_imports
    if not getattr(original, "has_fa3", False):

        def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            if (implementation or "").endswith(FA3_NAME):
                return *functions, utils._pad_input, utils._unpad_input
            return original(implementation, *args, **kwargs)

        lazy_imports.has_fa3 = True  # type: ignore[attr-defined]
        utils._lazy_imports = lazy_imports


def fa3_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    softmax_scale: float, causal: bool, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """flash_attn_varlen_func by the operator of vLLM's build, whose arguments are positional."""
    out = torch.empty_like(q)
    lengths = (cu_seqlens_q, cu_seqlens_k, None, None, None, max_seqlen_q, max_seqlen_k)
    return _fwd((q, k, v, None, None, None, out), lengths, None, softmax_scale, causal, window_size)


def fa3_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
    softmax_scale: float, causal: bool, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """flash_attn_with_kvcache by the same operator, which is built without appends: ours stores k and v of one token."""
    if k.shape[1] != 1:
        raise NotImplementedError(f"k of {k.shape[1]} tokens a request: only decode steps have a cache here")
    seq_lens = cache_seqlens + 1
    ck.append_kv(k[:, 0], v[:, 0], k_cache, v_cache, ck.PageTable.dense(page_table, seq_lens), layout="NHD")
    lengths = (None, None, None, None, seq_lens, None, None)
    out = torch.empty_like(q)
    return _fwd((q, k_cache, v_cache, None, None, None, out), lengths, page_table, softmax_scale, causal, window_size)


def _fwd(
    cache: tuple[Any, ...], lengths: tuple[Any, ...], table: Tensor | None, scale: float, causal: bool, window: tuple[int, int]
) -> Tensor:
    placement = (table, None, None, None, None, None, None, None, None)  # kv_batch_idx, leftpad, 3 of rotary, 3 descales
    softmax, schedule = (scale, causal, *window, 0.0, True), (None, 0, None, 0, None, 1, 0, None)
    torch.ops._vllm_fa3_C.fwd(*cache, *lengths, *placement, *softmax, *schedule)
    out: Tensor = cache[-1]
    return out
