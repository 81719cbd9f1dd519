"""Fixtures: of the tests that pretend a GPU, and of the kernels on disk. One torch thread: processes share the cores.

GPU tests take kernels from the user's cache, so that a second run compiles only what has changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import tvm_ffi
from _pytest.mark.expression import Expression

from cute_kernels.api import plan_cache
from cute_kernels.attention import plan
from cute_kernels.attention.reference import cpu_variant
from cute_kernels.attention.variants import explain as explain_problem
from cute_kernels.compile.cache import ENVIRONMENT
from cute_kernels.planning import base as plan_base
from cute_kernels.planning import variants as dispatch
from tests.support.launches import refuse

torch.set_num_threads(1)

MARKS = ("gpu", "browser", "exclusive")


def pytest_configure(config: pytest.Config) -> None:
    """One line where -m selects GPU tests alone and there is no GPU: each of them would fail by itself."""
    if asks_for_gpu_tests(config.option.markexpr) and not config.option.collectonly and not torch.cuda.is_available():
        raise pytest.UsageError("the GPU tests need a CUDA device; none is here")


def asks_for_gpu_tests(expression: str) -> bool:
    """Whether a -m expression selects tests that are marked gpu, and no others."""
    if not expression:
        return False
    compiled = Expression.compile(expression)
    subsets = itertools.chain.from_iterable(itertools.combinations(MARKS, count) for count in range(len(MARKS) + 1))
    selected = ["gpu" in marks for marks in subsets if compiled.evaluate(lambda name, marks=marks, **_: name in marks)]
    return bool(selected) and all(selected)


@pytest.fixture(autouse=True)
def cache_of_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether kernels come from disk and are kept there: in GPU tests, but for those that may patch what they are made of."""
    if request.node.get_closest_marker("gpu") and "monkeypatch" not in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, "off")
        yield


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Every plan that is selected here is made here, and none is kept for other tests."""

    def forget() -> None:
        plan_base.forget_plans()
        plan_cache.plan_of.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def pretend_h200(monkeypatch: pytest.MonkeyPatch, no_plans: None) -> list[tuple[Any, ...]]:
    """Plans made here choose as on an H200 but hold CPU tensors; the list records what each launch was given."""
    launches: list[tuple[Any, ...]] = []

    def launch_of(spec: Any, descriptor: Any) -> Callable[..., None]:
        def launch(*operands: Any) -> None:
            refuse(spec, operands)
            launches.append(operands)

        return launch

    launches_of(monkeypatch, launch_of)
    return launches


@pytest.fixture
def computing_h200(monkeypatch: pytest.MonkeyPatch, no_plans: None) -> None:
    """The same, but that each launch is computed, by the CPU variant."""

    def launch_of(spec: Any, descriptor: Any) -> Callable[..., None]:
        compute, words = cpu_variant(descriptor.problem), torch.zeros(4, dtype=torch.int32)

        def launch(*operands: Any) -> None:
            refuse(spec, operands)
            *tensors, scale, num_ctas, _ = (torch.from_dlpack(t) if isinstance(t, tvm_ffi.Tensor) else t for t in operands)
            compute(*tensors, scale, num_ctas, words)

        return launch

    launches_of(monkeypatch, launch_of)


def launches_of(monkeypatch: pytest.MonkeyPatch, launch_of: Callable[..., Any]) -> None:
    """Plans choose as on an H200, and launch_of(spec, descriptor) stands for what they compile."""

    def explain(problem: Any, facts: Any, preference: Any) -> dispatch.Explanation:
        return explain_problem(problem, dispatch.PRETEND["h200"], preference)

    monkeypatch.setattr(plan, "explain", explain)
    monkeypatch.setattr(plan, "_launch_of", launch_of)
