"""vLLM's own tests of attention backends over CUTE_KERNELS: `python -m tests.integrations.vllm_suite FOLDER`.

FOLDER holds a copy of vLLM's tests/v1/attention (test_attention_backends.py and utils.py), outside this repository. vLLM has to
be importable; its Python files alone will do, since nothing of its kernels or its engine runs. Each case runs our backend,
through vLLM's registry, where the file lists others, with blocks of 16 and of 128. A model is its shape, without a hub's files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
import typer
from rich.console import Console

import tests
from cute_kernels import Unsupported
from cute_kernels.integrations.vllm import register
from tests.attention.flashinfer_suite import Every, Suite

FILES = ("tests/v1/attention/test_attention_backends.py", "tests/v1/attention/dense/test_attention_backends.py")  # 0.26, later
TESTS = ("test_causal_backend_correctness", "test_sliding_window_backend_correctness", "test_non_causal_backend_correctness")
SHAPES = {"meta-llama/Meta-Llama-3-8B": (32, 8, 128, None), "microsoft/Phi-tiny-MoE-instruct": (16, 4, 128, 2047)}
NUM_BLOCKS = 8192  # as the file asks for: a cache of 0.5 GB with blocks of 16, of 4 GB with 128


EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C", "_C")  # what vLLM's CUDA platform imports


def without_extensions() -> None:
    """Empty modules for those of vLLM's extensions that are not there: the file calls none of their kernels."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise typer.BadParameter("vLLM cannot be imported: its Python files have to be on the path", param_hint="vllm")
    folder = Path(found.submodule_search_locations[0])
    for name in EXTENSIONS:
        if not any(folder.glob(f"{name}.*")):
            sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")


class Model:
    """What the file asks a ModelConfig: query heads, KV heads, head_dim, and a sliding window or None."""

    dtype = torch.bfloat16

    def __init__(self, model: str, **_ignored: Any) -> None:
        heads, kv_heads, self.head_dim, self.window = SHAPES[model]
        self.hf_text_config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)

    def get_num_attention_heads(self, _parallel: Any) -> int:
        return self.hf_text_config.num_attention_heads

    def get_num_kv_heads(self, _parallel: Any) -> int:
        return self.hf_text_config.num_key_value_heads

    def get_head_size(self) -> int:
        return self.head_dim

    def get_sliding_window(self) -> int | None:
        return self.window


def config_of(
    model_name: str, block_size: int = 16, hf_config_override: dict[str, int] | None = None, **_ignored: Any
) -> SimpleNamespace:
    """What the file asks a VllmConfig."""
    model = Model(model_name)
    vars(model.hf_text_config).update(hf_config_override or {})
    cache = SimpleNamespace(block_size=block_size, num_gpu_blocks=NUM_BLOCKS)
    return SimpleNamespace(model_config=model, parallel_config=None, cache_config=cache)


@dataclass
class BackendSuite(Suite):
    """Puts our backend, models and device into the file, and counts."""

    most_keys: int = 0

    @pytest.fixture
    def default_vllm_config(self) -> None:
        """The file's conftest sets a config for backends that ask for one; ours asks for none."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept = [item for item in items if not self.most_keys or self._longest(item) <= self.most_keys]
        items[:] = kept[:: self.every]

    def _longest(self, item: Any) -> int:
        return max(item.module.BATCH_SPECS[item.callspec.params["batch_spec_name"]].seq_lens)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None, None, None]:
        module, ours = item.module, register()
        if not hasattr(module, "correctness_of_others"):
            module.correctness_of_others = correctness = module._test_backend_correctness
            module._test_backend_correctness = lambda batch, model, _others, *given, **named: correctness(
                batch, model, [ours], *given, **named
            )
        module.DEVICE_TYPE, module.create_vllm_config, module.set_random_seed = self.device, config_of, torch.manual_seed
        module.ModelConfig = import_module("vllm.config").ModelConfig = Model
        try:
            yield
        except Unsupported as error:
            pytest.skip(str(error))


def run(
    folder: Annotated[Path, typer.Argument(help="Holds a copy of vLLM's tests/v1/attention.", exists=True, file_okay=False)],
    every: Every = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    most_keys: Annotated[int, typer.Option(help="Leave out cases of more keys; 0 for none.", min=0)] = 0,
    layout: Annotated[str, typer.Option(help="NHD or HND: the order of the cache's axes.")] = "NHD",
    num_blocks: Annotated[int, typer.Option(help="Blocks of the cache.", min=1)] = NUM_BLOCKS,
) -> None:
    """Runs vLLM's tests over our backend and prints the counts; fails where a case fails or none is found."""
    globals()["NUM_BLOCKS"] = num_blocks
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="0", VLLM_KV_CACHE_LAYOUT=layout)
    without_extensions()
    folder = folder.resolve()
    tests.__path__.append(str(folder / "tests"))  # their file imports tests.v1.attention.utils
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise typer.BadParameter(f"has neither {' nor '.join(FILES)}", param_hint="FOLDER")
    suite = BackendSuite((), every, 0, 1, device, most_keys=most_keys)
    options = [
        "-q",
        "--tb=short",
        "--noconftest",
        "--show-capture=no",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    options += ["-W", "ignore", "-c", "/dev/null", f"--rootdir={folder}"]
    status = pytest.main([*options, *(f"{file}::{test}" for test in TESTS)], plugins=[suite])
    suite.show(Console(highlight=False))
    sys.exit(int(status))


if __name__ == "__main__":
    typer.run(run)
