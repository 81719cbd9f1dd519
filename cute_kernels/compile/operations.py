"""What can be compiled: for each type of spec its operation, with its limits and the function that builds its kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..config.append import AppendSpec, append_supports
from ..config.backward import BackwardSpec, backward_supports
from ..config.decode import KernelSpec
from ..config.limits import supports
from ..config.merge import MergeSpec, merge_supports
from ..config.mixed import MixedSpec, mixed_supports
from ..config.weights import WeightsSpec, weights_supports

Spec = KernelSpec | MixedSpec | MergeSpec | AppendSpec | WeightsSpec | BackwardSpec


@dataclass(frozen=True)
class Operation:
    """supports: gives every reason why a spec cannot be built. builder: a function in device/tracing/<name>.py, not imported."""

    name: str
    supports: Callable[[Any], list[str]]
    builder: str

    def build(self, spec: Spec) -> Any:
        """The compiled kernel of `spec`; imports the compiler."""
        return getattr(import_module(f"..device.tracing.{self.name}", __package__), self.builder)(spec)


OPERATIONS: dict[type, Operation] = {
    KernelSpec: Operation("decode", supports, "build"),
    MixedSpec: Operation("mixed", mixed_supports, "build_mixed"),
    MergeSpec: Operation("merge", merge_supports, "build_merge"),
    AppendSpec: Operation("append", append_supports, "build_append"),
    WeightsSpec: Operation("weights", weights_supports, "build_weights"),
    BackwardSpec: Operation("backward", backward_supports, "build_backward"),
}
