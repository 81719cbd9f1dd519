"""CUTE_KERNELS on a GPU, over stand-ins of vLLM's interfaces: steps, and captured graphs of them, as test_vllm.py on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch

from tests.integrations.test_flash_attn_graphs import no_synchronisation
from tests.integrations.test_vllm import CACHES, MODIFIERS
from tests.support import vllm
from tests.support.vllm import STEPS, CommonAttentionMetadata, Engine, Layer, run, run_later

pytestmark = pytest.mark.gpu
WIDE = (8, 2, 128)  # query heads, KV heads, head_dim


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    return vllm.put_in_place(monkeypatch, Enum("Backends", {"CUSTOM": None}), lambda backend, class_path=None: None)


def captured(calls: Callable[[], None]) -> Callable[[], None]:
    calls()  # compiles
    with no_synchronisation():
        calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_stores_and_attends(backend: Any, step: str, cache: str, order: str) -> None:
    run(Engine(backend, Layer(cache, order=order, heads=WIDE), STEPS[step], "cuda"), CommonAttentionMetadata)


@pytest.mark.parametrize("step", ["decode", "mixed", "drafts"])
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_masks_and_scores(backend: Any, modifier: str, step: str) -> None:
    options = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in MODIFIERS[modifier].items()}
    run(Engine(backend, Layer(options=options), STEPS[step], "cuda"), CommonAttentionMetadata)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("step", ["decode", "padded decode", "drafts", "padded drafts", "mixed"])
def test_a_captured_step_follows_its_tensors(backend: Any, step: str, cache: str) -> None:
    spare = 3 * max(STEPS[step].rows)
    run_later(Engine(backend, Layer(cache, heads=WIDE), STEPS[step], "cuda", spare), CommonAttentionMetadata, captured)
