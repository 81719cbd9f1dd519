"""Tests import shared modules from this folder: `from decode.harness import ...`. One torch thread: processes share the cores.

GPU tests take kernels from the user's cache, so that a second run compiles only what has changed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cute_kernels.compile.cache import ENVIRONMENT

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache_of_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether kernels come from disk and are kept there: in GPU tests, but for those that may patch what they are made of."""
    if request.node.get_closest_marker("gpu") and "monkeypatch" not in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, "off")
        yield
