"""Tests import shared modules from this folder: `from decode.harness import ...`. One torch thread: processes share the cores.

GPU tests take kernels from the user's cache, so that a second run compiles only what has changed. The others have none.
"""

import sys
from pathlib import Path

import pytest
import torch

from cute_kernels.compile.cache import ENVIRONMENT

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_cache_without_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test without a GPU compiles is neither kept for others nor taken from them."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv(ENVIRONMENT, "off")
