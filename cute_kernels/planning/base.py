"""What every plan shares: its device and streams, what was chosen and why, and the memory of the plans selected so far."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import InvalidArgument, LaunchFailed, Unsupported
from ..kv.faults import Fault, new_status, read
from .variants import Explanation, Launch, PlanPreference
from .workspace import WorkspaceRegion, new_workspace

MAX_PLANS = 256  # plans that `remembered` keeps
LAUNCH_ERRORS = (RuntimeError, TypeError, ValueError)  # what a compiled kernel raises where it refuses its operands
SKU_ARCH = {"sm90": "sm90a", "sm80": "sm80", "cpu": "cpu"}
F32_ULPS = 8  # 3 were measured of the CPU variant; a merge's exp2, log2 and reciprocal are the GPU's approximations
ANY_VARIANT = PlanPreference()

_Plan = TypeVar("_Plan", bound="Plan")
_Cache = TypeVar("_Cache", bound="functools._lru_cache_wrapper[Any]")
_Descriptor = TypeVar("_Descriptor", bound=Hashable)
_plans: OrderedDict[Hashable, Any] = OrderedDict()  # the least recently selected first
_other_caches: list[Callable[[], None]] = []  # each empties a cache that holds plans beside _plans
_lock = threading.Lock()


@dataclass(frozen=True)
class PrecisionGuarantee:
    """What a plan promises about its numbers.

    The error against f64 of each row and head by itself is bounded beside that of PyTorch's math backend in the same dtype. The
    2-norm of the error: norm_factor times PyTorch's, plus norm_ulps ulp (the output dtype's epsilon times the exact vector's
    2-norm). Each element's: element_factor times PyTorch's largest, plus element_ulps ulp at the exact vector's largest element.
    batch_invariant: a row's bits do not depend on the other rows.
    """

    accumulator: str = "f32"
    deterministic: bool = True
    bit_stable_on_same_hardware: bool = True
    batch_invariant: bool = False
    norm_factor: float = 1.25
    norm_ulps: int = 1
    element_factor: float = 2.0
    element_ulps: int = 2

    @classmethod
    def of(cls, out_dtype: torch.dtype, batch_invariant: bool) -> PrecisionGuarantee:
        """That of attention with such outputs. An f32 output is no coarser than the f32 arithmetic behind it: F32_ULPS."""
        if out_dtype == torch.float32:
            return cls(batch_invariant=batch_invariant, norm_ulps=F32_ULPS, element_ulps=F32_ULPS)
        return cls(batch_invariant=batch_invariant)


@dataclass(frozen=True)
class Sku:
    """What really runs. config: the knobs of the variant's kernel; None for the CPU variant, which has none."""

    operation: str
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    arch: str
    variant: str
    config: Any
    precision_guarantee: PrecisionGuarantee


class Plan:
    """A chosen variant on one device. Its attributes are read-only facts: callers of one descriptor share the plan.

    What a run writes is detached: autograd records nothing of it, whichever variant runs.
    """

    _launch: Launch  # a compiled kernel, or the CPU variant

    def __init__(
        self,
        device: torch.device,
        sm_count: int,
        sku: Sku,
        explanation: Explanation,
        workspace_bytes: int = 0,
        workspace_regions: tuple[WorkspaceRegion, ...] = (),
    ) -> None:
        self.device = device
        self.sm_count = sm_count
        self.sku = sku
        self._explanation = explanation
        self._workspace_bytes = workspace_bytes
        self._workspace_regions = workspace_regions
        self._name = f"{sku.variant} on {device}"
        self._several_gpus = device.type == "cuda" and torch.cuda.device_count() > 1

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the plan promises about its numbers."""
        return self.sku.precision_guarantee

    def explain(self) -> Explanation:
        """Every variant and why it was taken or rejected; print it, or take its `to_dict()`."""
        return self._explanation

    def workspace_size(self) -> int:
        """Exact bytes of the workspace that `run` needs; 0 where none is needed."""
        return self._workspace_bytes

    def new_workspace(self) -> Tensor:
        """A zeroed workspace for `run`, uint8 [workspace_size()] on the plan's device.

        From now on it is left to launches of plans, of this one and any others, one launch at a time; a graph that was captured
        with it needs it alive. Waits for its zeroing; inside a graph capture the zeroing is a node of the graph.
        """
        return new_workspace(self._workspace_bytes, self.device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.sku.operation} by {self._name}: {self._explanation.problem}>"

    def workspace_regions(self) -> tuple[WorkspaceRegion, ...]:
        """The named regions of the workspace, in bytes."""
        return self._workspace_regions

    def _elsewhere(self) -> bool:
        """Whether another GPU than the plan's is current, so that a launch must go through `_on`."""
        return self._several_gpus and torch.cuda.current_device() != self.device.index

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """The plan's device and the given stream are current inside, the caller's again after. Autograd records nothing there."""
        if stream is None and self.device.type != "cuda":
            with torch.inference_mode():
                yield
            return
        if stream is not None and (not isinstance(stream, torch.cuda.Stream) or stream.device != self.device):
            raise InvalidArgument("stream", f"got {stream!r}, must be a torch.cuda.Stream of the plan's device, {self.device}")
        with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.inference_mode():
            yield

    def _launch_failed(self, error: Exception) -> LaunchFailed:
        """One of LAUNCH_ERRORS, typed: `raise self._launch_failed(error) from error`."""
        return LaunchFailed(f"{self._name}: {error}")


class FlaggingPlan(Plan):
    """A plan whose kernels report bad metadata in status words of its own."""

    def __init__(
        self,
        device: torch.device,
        sm_count: int,
        sku: Sku,
        explanation: Explanation,
        workspace_bytes: int = 0,
        workspace_regions: tuple[WorkspaceRegion, ...] = (),
    ) -> None:
        super().__init__(device, sm_count, sku, explanation, workspace_bytes, workspace_regions)
        self._words = new_status(device)

    def status(self) -> Fault | None:
        """Bad metadata that a run has met since `clear_status`: one such fault, None where there was none.

        Waits for the plan's device; raises InvalidArgument inside a graph capture. Callers that select the same descriptor,
        device and preference share the plan and so its status. A run that launches nothing records nothing, such as one over
        a cache or a table without pages.
        """
        self._refuse_capture("status")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a run may be on any stream
        return read(self._words)

    def clear_status(self) -> None:
        """Forgets the fault that `status` tells of, in the order of the current stream; nothing else does."""
        self._words.zero_()

    def _refuse_capture(self, name: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(name, "reads from the device and waits for it, must not be used inside a graph capture")


def _apart(launch: Launch) -> Launch:
    """The CPU variant, apart from the modes of its caller as a kernel is: autograd records nothing, autocast rounds nothing."""

    def run(*operands: Any) -> None:
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            launch(*operands)

    return run


def remembered(
    kind: Callable[[_Descriptor, torch.device, PlanPreference], _Plan],
    descriptor: _Descriptor,
    device: torch.device,
    preference: PlanPreference,
) -> _Plan:
    """The plan `kind(descriptor, device, preference)`, made once and kept while it is among the last MAX_PLANS selected.

    What `kind` raises is not kept. Threads that select the same at the same time all get the plan of the first to finish.
    """
    key = (kind, descriptor, device, preference)
    with _lock:
        plan: _Plan | None = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
            return plan
    plan = kind(descriptor, device, preference)  # outside the lock: a compile takes seconds
    if isinstance(plan, Plan) and plan.sku.arch == "cpu":
        plan._launch = _apart(plan._launch)
    with _lock:
        plan = _plans.setdefault(key, plan)
        if len(_plans) > MAX_PLANS:
            _plans.popitem(last=False)
    return plan


def selected(
    plan: Callable[[_Descriptor, torch.device, PlanPreference], _Plan],
    described_by: type,
    descriptor: _Descriptor,
    device: torch.device | str | None,
    preference: PlanPreference | None,
) -> _Plan:
    """What every `select` does: the remembered plan of a descriptor of its type, on the resolved device."""
    if not isinstance(descriptor, described_by):
        raise InvalidArgument("descriptor", f"got {type(descriptor).__name__}, must be a {described_by.__name__}")
    preference = ANY_VARIANT if preference is None else preference
    return remembered(plan, descriptor, resolved_device(device, preference), preference)


def forgotten_with_plans(cache: _Cache) -> _Cache:
    """Decorates an lru_cache that holds plans: `forget_plans` empties it too."""
    _other_caches.append(cache.cache_clear)
    return cache


def forget_plans() -> None:
    """Empties the memory of `remembered`, and the caches that `forgotten_with_plans` decorates; plans in use live on.

    For tests, and to give back what plans hold on a device.
    """
    with _lock:
        _plans.clear()
    for clear in _other_caches:
        clear()


def resolved_device(device: torch.device | str | None, preference: PlanPreference) -> torch.device:
    """The device with its index. Raises InvalidArgument for what is none, Unsupported for one that this machine lacks."""
    if not isinstance(preference, PlanPreference):
        raise InvalidArgument("preference", f"got {type(preference).__name__}, must be a PlanPreference or None")
    if device is None:
        device = "cuda" if torch.cuda.is_available() and preference.arch != "cpu" else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument("device", f"got {device!r}, must be a torch.device or its name") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise Unsupported([f"device = {found}: must be a CUDA device or the CPU"])
    if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
        raise Unsupported([f"device = {found}: this machine has {torch.cuda.device_count()} CUDA devices"])
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
