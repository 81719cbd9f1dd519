"""The backend's classes for vLLM, which imports this module: what it serves, its metadata, and its attention of a layer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...append.descriptor import APPEND_DTYPES
from ...config.append import MAX_HEAD_DIM
from ...errors import Unsupported
from ...planning.variants import VARIANTS
from ..engine import Call
from .cache import STORED, content_bytes, stored_as
from .layer import LayerAttention
from .register import ENGINE, NAME
from .step import Step, step_of

BACKEND = "v1.attention.backend"
try:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        MultipleOf,
    )
except ImportError as error:
    raise ENGINE.moved(BACKEND, f"has not all that is taken from it: {error}") from error

STEP = ("query_start_loc", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")
LAYER = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale")
CALLS = (
    Call(BACKEND, "AttentionBackend.validate_configuration", ("head_size", "dtype", "kv_cache_dtype", "block_size")),
    Call(BACKEND, "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata", "fast_build")),
    Call(BACKEND, "AttentionImpl.forward", LAYER),
    Call(BACKEND, "CommonAttentionMetadata", (*STEP, "block_table_tensor", "slot_mapping", "causal")),
)
AXES = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3)}  # the order in memory of the axes [blocks, heads, tokens, content]
LAYERED_AXES = {"NHD": (1, 0, 3, 2, 4), "HND": (1, 2, 0, 3, 4)}  # and of [layers, blocks, heads, tokens, content]
ENGINE._replace(calls=(Call(BACKEND, "AttentionCGSupport.UNIFORM_BATCH", ()),)).check_calls()
BLOCK_MULTIPLE = 16  # tokens
HEAD_MULTIPLE = 8  # elements: the scale of a token is then aligned


class CuteKernelsBackend(AttentionBackend):
    """Decoder attention over vLLM's paged cache. `validate_configuration` tells vLLM what is not served, and why."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(APPEND_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(STORED)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[CuteKernelsImpl]:
        return CuteKernelsImpl

    @staticmethod
    def get_builder_cls() -> type[CuteKernelsMetadataBuilder]:
        return CuteKernelsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK_MULTIPLE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[num_blocks, num_kv_heads, block_size, content], content in elements. vLLM 0.26 calls it; 0.33 calls customize_spec."""
        stored = stored_as(cache_dtype_str)
        element_bytes = 2 if stored.dtype is None else stored.dtype.itemsize
        content = content_bytes(stored, head_size, element_bytes) // element_bytes
        return num_blocks, num_kv_heads, block_size, content

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order of the axes in memory, for the layout that vLLM 0.26 is set to; 0.33 does not call it."""
        layout = ENGINE.part("v1.attention.backends.utils").get_kv_cache_layout()
        orders = LAYERED_AXES if include_num_layers_dimension else AXES
        if layout not in orders:
            raise Unsupported([f"KV cache layout = {layout!r}: must be one of {', '.join(orders)}"])
        return orders[layout]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A layer's cache spec, with room for one scale per token and KV head if its kv_cache_dtype has such scales."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        return replace(spec, state_content_bytes=content_bytes(stored_as("int8_per_token_head"), spec.head_size, 1))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= MAX_HEAD_DIM and head_size % HEAD_MULTIPLE == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        served = {served for variant in VARIANTS for served, _ in variant.targets}
        return (capability.major, capability.minor) in served

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        wanted = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kv_cache_dtype or "auto", dtype)
        return None if wanted == dtype else f"kv_cache_dtype = {kv_cache_dtype}: must be the model's dtype, or have 8 bits"

    @classmethod
    def validate_configuration(cls, *given: Any, **named: Any) -> list[str]:
        """Every reason why a model's layers are not served. If vLLM has changed, the reason names the version and the call."""
        try:
            _check_vllm()
        except Unsupported as error:
            return list(error.reasons)
        reasons: list[str] = super().validate_configuration(*given, **named)
        return reasons


class CuteKernelsMetadataBuilder(AttentionMetadataBuilder[Step]):
    """Describes a step without a schedule: kernels divide the work between CTAs on the device."""

    # graphs are captured for batches whose requests all have the same rows: one, or one and the drafts, the kernel's bound
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """Returns the step. common_prefix_len is not used: every request attends to all of its keys."""
        return step_of(common_attn_metadata)

    def update_block_table(self, metadata: Step, blk_table: Tensor, slot_mapping: Tensor) -> Step:
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table[: len(metadata.seq_lens)], slot_mapping
        return updated


class CuteKernelsImpl(AttentionImpl[Step]):
    """Attention of one layer. Raises Unsupported for an argument that is not served, naming it."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        refused = [f"{name} = {value!r}: is not served" for name, value in others.items()]
        if attn_type != "decoder":
            refused.append(f"attn_type = {attn_type!r}: must be decoder")
        if refused:
            raise Unsupported(refused)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.alibi_slopes, self.sliding_window, self.logits_soft_cap = alibi_slopes, sliding_window, logits_soft_cap
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        masks = (alibi_slopes, sliding_window, logits_soft_cap, sinks)
        self.attention = LayerAttention(num_heads, head_size, scale, kv_cache_dtype, *masks)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.attention.load_sinks()

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        if kv_cache.numel():  # the cache is empty while vLLM measures memory
            self.attention.store(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes output [tokens, num_heads, head_size] and returns it; zeros if there is no metadata: vLLM measures memory."""
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        refused = [f"{name}: an output in 8 bits is not served" for name, scale in scales.items() if scale is not None]
        if refused:
            raise Unsupported(refused)
        if attn_metadata is None:
            return output.zero_()
        self.attention.attend(layer, query, kv_cache, attn_metadata, output)
        return output


def _check_vllm() -> None:
    """Raises Unsupported for a vLLM whose calls have changed, or whose base classes ask for methods that ours lack."""
    ENGINE._replace(calls=CALLS).check_calls()
    for mine in (CuteKernelsBackend, CuteKernelsMetadataBuilder, CuteKernelsImpl):
        missing = sorted(getattr(mine, "__abstractmethods__", ()))
        if missing:
            raise ENGINE.moved(f"{BACKEND}.{mine.__mro__[1].__name__}", f"asks for {', '.join(missing)}")
