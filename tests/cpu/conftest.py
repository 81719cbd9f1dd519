"""Fixtures of the CPU tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_kernels import dispatch, plan, plan_base, plan_cache


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Every plan that is selected here is made here, and none is kept for other tests."""

    def forget() -> None:
        plan_base.forget_plans()
        plan_cache._plan.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def pretend_h200(monkeypatch: pytest.MonkeyPatch, no_plans: None) -> list[tuple[Any, ...]]:
    """Plans made here choose as on an H200 but hold CPU tensors; the list records what each launch was given."""
    launches: list[tuple[Any, ...]] = []

    def explain(problem: Any, facts: Any, preference: Any) -> dispatch.Explanation:
        return dispatch.explain(problem, dispatch.PRETEND["h200"], preference)

    def launch_of(spec: Any, descriptor: Any) -> Callable[..., None]:
        return launch

    def launch(q: torch.Tensor, *others: Any) -> None:
        """Refuses, as a compiled kernel does, a q of another dtype or shape than its out."""
        out = torch.from_dlpack(others[7])
        if (q.dtype, q.shape) != (out.dtype, out.shape):
            raise TypeError(f"Mismatched q: {q.dtype} {tuple(q.shape)}")
        launches.append((q, *others))

    monkeypatch.setattr(plan, "explain", explain)
    monkeypatch.setattr(plan, "_launch_of", launch_of)
    return launches
