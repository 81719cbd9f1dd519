"""The installed transformers: the calls that the integration builds upon, and whether they are still there."""

from __future__ import annotations

from ..engine import Call, Engine, tell_once

__all__ = ["CALLS", "Call", "check_calls", "moved", "part", "tell_once"]

CALLS = (
    Call("modeling_utils", "AttentionInterface.register", ("key", "value")),
    Call("masking_utils", "AttentionMaskInterface.register", ("key", "value")),
    Call("masking_utils", "sdpa_mask", ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask")),
    Call("integrations.sdpa_attention", "sdpa_attention_forward", ("module", "query", "key", "value", "attention_mask")),
    Call("modeling_flash_attention_utils", "_lazy_imports", ("implementation",)),
    Call("modeling_utils", "PreTrainedModel._check_and_adjust_attn_implementation", ("attn_implementation",)),
    Call("generation.continuous_batching.continuous_api", "ContinuousBatchingManager.switch_to_cb_friendly_attn", ("model",)),
    Call("generation.continuous_batching.cache", "PagedAttentionCache.update", ("key_states", "value_states", "layer_idx")),
)

_engine = Engine("transformers", "5.17.0, 5.23.0 and 5.24.0", CALLS)
part, moved, check_calls = _engine.part, _engine.moved, _engine.check_calls
