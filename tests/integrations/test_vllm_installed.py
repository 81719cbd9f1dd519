"""The backend in the vLLM that is installed, where one is: what test_vllm.py shows over stand-ins, with vLLM's own classes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.integrations.vllm import register
from cute_kernels.integrations.vllm.step import Step
from tests.support.vllm import BLOCK, DIM, HEADS, KV_HEADS, STEPS, Engine, Layer, run

pytest.importorskip("vllm", reason="test_vllm.py has the same steps over stand-ins of vLLM's interfaces")

CACHES = ("auto", "fp8", "int8_per_token_head")


@pytest.fixture(scope="module")
def backend() -> Any:
    """The module that vLLM finds by the name."""
    register()
    return sys.modules[enumeration()["CUTE_KERNELS"].get_class().__module__]


def enumeration() -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_stores_and_attends(backend: Any, step: str, cache: str, order: str) -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    run(Engine(backend, Layer(cache, order=order), STEPS[step]), CommonAttentionMetadata)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("step", ["decode", "mixed", "padded drafts"])
def test_a_layer_of_a_model(backend: Any, step: str, cache: str) -> None:
    """vLLM's Attention makes the backend's, hands it the cache and the slots, and views its output."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata

    config, name = VllmConfig(device_config=DeviceConfig(device="cpu")), "model.layers.0.attn"
    engine = Engine(backend, Layer(cache), STEPS[step])
    engine.fill()
    metadata, (q, k, v) = engine.metadata(CommonAttentionMetadata, engine.requests), engine.tokens()
    kept = torch.get_default_dtype()
    torch.set_default_dtype(q.dtype)
    try:
        with set_current_vllm_config(config):
            given = {"num_kv_heads": KV_HEADS, "prefix": name, "attn_backend": backend.CuteKernelsBackend}
            layer = Attention(HEADS, DIM, DIM**-0.5, cache_config=CacheConfig(cache_dtype=cache, block_size=BLOCK), **given)
            layer.kv_cache = engine.kv_cache
            for scale in ("_k_scale", "_v_scale"):
                getattr(layer, scale).copy_(getattr(engine.module, scale))
            with set_forward_context({name: metadata}, config, slot_mapping={name: metadata.slot_mapping}):
                output = layer(q.flatten(1), k.flatten(1), v.flatten(1))
    finally:
        torch.set_default_dtype(kept)
    assert layer.backend.name == "CUTE_KERNELS" and isinstance(layer.impl, backend.CuteKernelsImpl)
    engine.check_stored(k, v)
    engine.check(output.view_as(q), q, engine.requests)


def test_a_config_takes_the_name_and_reaches_a_new_process(backend: Any) -> None:
    """A process that unpickles a config before it has loaded plugins."""
    from vllm.config.attention import AttentionConfig

    config = AttentionConfig(backend="CUTE_KERNELS")
    assert config.backend is enumeration()["CUTE_KERNELS"]
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend.get_path())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(config),
        capture_output=True,
        check=True,
        env=environment,
    )
    assert found.stdout.decode().strip().endswith("cute_kernels.integrations.vllm.backend.CuteKernelsBackend")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"kv_cache_dtype": "int8_per_token_head", "has_sink": True, "has_sliding_window": True}, None),
        ({"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8"}, None),
        ({"head_size": 320}, "head_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype = float16: must be the model's dtype, or have 8 bits"),
    ],
)
def test_what_vllm_hears(backend: Any, change: dict[str, Any], reason: str | None) -> None:
    given: dict[str, Any] = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    flags = dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False)
    rest = {"device_capability": SimpleNamespace(major=9, minor=0), "attn_type": "decoder"}
    found = backend.CuteKernelsBackend.validate_configuration(**{**given, **flags, **rest, **change})
    assert found == ([] if reason is None else [reason])


@pytest.mark.parametrize("cache", CACHES)
def test_pages_have_the_bytes_that_vllm_allots(backend: Any, cache: str) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    dtype = {"auto": torch.bfloat16, "fp8": torch.uint8}.get(cache, torch.int8)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=dtype, kv_quant_mode=get_kv_quant_mode(cache))
    if hasattr(spec, "state_content_bytes"):
        spec = backend.CuteKernelsBackend.customize_spec(spec)
    _, heads, tokens, content = backend.CuteKernelsBackend.get_kv_cache_shape(1, 16, 2, 64, cache)
    assert spec.page_size_bytes == heads * tokens * content * dtype.itemsize


def test_layers_that_share_pages_derive_the_metadata(backend: Any) -> None:
    """vLLM copies every field of a builder's metadata into a class of its own, which frozen fields would not let it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    shared = create_fast_prefill_custom_backend("Fast", backend.CuteKernelsBackend)
    module = SimpleNamespace(**{**vars(backend), "CuteKernelsMetadataBuilder": shared.get_builder_cls()})
    last: dict[str, Any] = {"logits_indices_padded": torch.tensor([0, 1, 7, 24]), "num_logits_indices": 4}
    if "max_logits_per_req" in {each.name for each in fields(CommonAttentionMetadata)}:  # of 0.33
        last["max_logits_per_req"] = 1
    step = Engine(module, Layer(), STEPS["mixed"]).metadata(
        partial(CommonAttentionMetadata, **last), replace(STEPS["mixed"], padding=(0, 0))
    )
    assert isinstance(step, Step) and type(step) is not Step and step.num_logits_indices == 4
    assert step.query_start_loc.tolist() == [0, 1, 2, 3, 4] and step.seq_lens.tolist() == [18, 47, 30, 17]


def test_the_example_names_arguments_that_vllm_has() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert {"model", "attention_backend", "kv_cache_dtype"} <= {each.name for each in fields(EngineArgs)}
