"""The interface of a provider: it computes a case's attention, or makes a case's append, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from perf.cases import Case, EightBit, Operation
from perf.correctness import Tolerance
from perf.inputs import Inputs, Pages

# (out, in the case's query_shape or with its query rows in one axis; lse f32 [rows, num_heads], base e, if it is promised)
Result = tuple[torch.Tensor, torch.Tensor | None]


class NotSupported(Exception):
    """The provider has no kernel for this case; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a case: a call for each input set that launches the whole step on the current stream.

    A call allocates nothing that a CUDA graph could not hold, and never waits for the device. It returns its result, or None
    for a provider that computes nothing. The fastest candidate of a provider is the one that is measured.
    detail: fields of the record, in which a provider's candidates differ. host: steps by name whose host time is recorded.
    device: steps by name whose device time is recorded in addition to the calls', which do not contain them. In both, the step
    "plan" is the work that an engine does once per model step, however many layers the model has.
    tolerance: the gate's tolerance on this case, if it differs from the provider's. inputs: the inputs that the results are
    judged by, if the calls are not of the case itself.
    """

    calls: Sequence[Callable[[], Result | None]]
    detail: Mapping[str, object] = field(default_factory=dict)
    host: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    device: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    inputs: Inputs | None = None


class Provider(Protocol):
    """A competitor in one operation. tolerance: what the gate allows; None for a provider without a result.

    reads_unused: whether slots that no row owns may reach its result, so that NaN is cleared there before it runs.
    """

    name: ClassVar[str]
    operation: ClassVar[Operation]
    tolerance: ClassVar[Tolerance | None]
    reads_unused: ClassVar[bool]

    def available(self) -> str | None:
        """Why this machine cannot run the provider, or None."""

    def version(self) -> str:
        """The version of the measured code."""

    def prepare(self, inputs: Any) -> Sequence[Candidate]:
        """The ways to run the case of `inputs`, which are Inputs, or AppendInputs for an append.

        Raises NotSupported. Its planning and compiling are outside the timing.
        """


@runtime_checkable
class CompilesAhead(Protocol):
    """A competitor that can compile the kernels of several cases at once, faster than one after the other in `prepare`."""

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """Compiles for the cases that it supports. A failure here repeats in `prepare`, where it is recorded."""


class Floor:
    """The base of providers without a result that run on compute capability 9.0. Their calls return None."""

    tolerance: ClassVar[Tolerance | None] = None
    reads_unused: ClassVar[bool] = False

    def available(self) -> str | None:
        return require_sm90()


def require(supported: bool, reason: str) -> None:
    """Raises NotSupported with `reason` unless `supported`."""
    if not supported:
        raise NotSupported(reason)


def require_storage(case: Case, *eight_bit: EightBit) -> None:
    """Raises NotSupported unless the caches are 16-bit or one of `eight_bit`, without scales."""
    if case.kv_dtype is not None:
        require(case.kv_dtype in eight_bit, f"no kernel for {case.kv_dtype} caches")
    if case.kv_scale is not None:
        raise NotSupported(f"scales ({case.kv_scale}) are not passed to it")


def try_once(call: Callable[[], object], *refusals: type[Exception]) -> None:
    """Makes the call; raises NotSupported with the first line of one of `refusals`, by which a provider says it has no kernel."""
    try:
        call()
    except refusals as error:
        raise NotSupported(str(error).splitlines()[0] if str(error) else "it refuses the shape") from error


def served(check: Callable[[Case], None], case: Case) -> bool:
    """Whether `check` raises no NotSupported for a case."""
    try:
        check(case)
    except NotSupported:
        return False
    return True


def paged(inputs: Inputs) -> Pages:
    """The page table of a paged case. Raises NotSupported for a contiguous case."""
    if inputs.pages is None:
        raise NotSupported("its cache is paged")
    return inputs.pages


def tokens_first(cache: torch.Tensor, case: Case) -> torch.Tensor:
    """A paged cache as a view [pages, page_size, num_kv_heads, head_dim]."""
    return cache.transpose(1, 2) if case.layout == "HND" else cache


def require_scores(case: Case, *known: str) -> None:
    """Raises NotSupported if a case has a modifier (window_left, softcap, alibi, sinks or tree_mask) that is not in `known`."""
    words = {"window_left": "window", "softcap": "soft cap", "alibi": "ALiBi", "sinks": "sinks", "tree_mask": "tree mask"}
    for name, what in words.items():
        if getattr(case, name) is not None and name not in known:
            raise NotSupported(f"it has no {what}")


def sm_count_of(device: torch.device) -> int:
    """SMs of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def require_sm90() -> str | None:
    """Why kernels for compute capability 9.0 cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"compute capability {major}.{minor} is not 9.0"
