"""flash-attention's own test of a KV cache over our plans: `python -m tests.integrations.flash_attention_suite FOLDER`.

FOLDER holds a copy of flash-attention's hopper/ tests (test_flash_attn.py, padding.py, test_util.py), outside this repository;
they need einops. Their module flash_attn_interface is a stand-in that is ours. A case that raises Unsupported is skipped, and
each reason is printed with its count. Their loops over attention_chunk and scheduler metadata run without either.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console

import cute_kernels as ck
from cute_kernels.integrations import flash_attn
from tests.attention.flashinfer_suite import Every, Share, Shares, Suite
from tests.support.flashinfer.on_cpu import OnCPU

TEST = "test_flash_attn_kvcache"


def put_in_place() -> None:
    """flash_attn_interface becomes ours. What there is no such thing as here, metadata of a schedule, is None."""
    module = ModuleType("flash_attn_interface")
    functions = {name: getattr(flash_attn, name) for name in flash_attn.__all__}
    module.__dict__.update(functions, get_scheduler_metadata=lambda *_given, **_named: None, flash_attn_combine=None)
    sys.modules["flash_attn_interface"] = module


def product(values: list[Any], others: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Their loops: over head sizes and chunks, and over splits and metadata; without chunks and metadata."""
    return itertools.product(values, [other for other in others if not other])


@dataclass
class KVCacheSuite(Suite):
    """Chooses the cases of at most so many query rows and keys, and runs each with their loops shortened."""

    most_rows: int = 0
    most_keys: int = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        described: list[Any] = items
        for limit, name in ((self.most_rows, "seqlen_q"), (self.most_keys, "seqlen_k")):
            described = [item for item in described if not limit or item.callspec.params[name] <= limit]
        items[:] = described
        super().pytest_collection_modifyitems(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None, None, None]:
        item.module.itertools = SimpleNamespace(product=product)
        with OnCPU() if self.device == "cpu" else nullcontext():
            try:
                yield
            except ck.Unsupported as error:
                pytest.skip(str(error))


def run(
    folder: Annotated[
        Path, typer.Argument(help="Holds a copy of flash-attention's hopper/ tests.", exists=True, file_okay=False)
    ],
    every: Every = 1,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the test's cuda is then the CPU.")] = "cuda",
    most_rows: Annotated[int, typer.Option(help="Leave out cases of more query rows; 0 for none.", min=0)] = 0,
    most_keys: Annotated[int, typer.Option(help="Leave out cases of more keys; 0 for none.", min=0)] = 0,
    share: Share = 0,
    shares: Shares = 1,
) -> None:
    """Runs flash-attention's test over our plans and prints the counts; fails where a case fails or none is found."""
    if device == "cpu":
        os.environ["FLASH_ATTENTION_DISABLE_FP8"] = "TRUE"  # their file asks the GPU otherwise
    folder = folder.resolve()
    sys.path.insert(0, str(folder))  # their file imports its neighbours
    put_in_place()
    suite = KVCacheSuite((), every, share, shares, device, most_rows=most_rows, most_keys=most_keys)
    options = ["-q", "--tb=short", "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-c", "/dev/null", f"--rootdir={folder}"]
    status = pytest.main([*options, f"{folder / 'test_flash_attn.py'}::{TEST}"], plugins=[suite])
    suite.show(Console(highlight=False))
    sys.exit(int(status))


if __name__ == "__main__":
    typer.run(run)
