"""What a provider is: something that computes a case's attention, or appends what it says, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from perf.cases import Case, EightBit, Operation
from perf.correctness import Tolerance
from perf.inputs import Inputs, Pages

# out, of the case's query_shape or with its query rows in one axis, and, where it is promised, lse f32 [rows, num_heads], base e
Result = tuple[torch.Tensor, torch.Tensor | None]


class NotSupported(Exception):
    """The provider has no kernel for this case; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a case: a call for each input set that launches the whole step on the current stream.

    A call allocates nothing that a CUDA graph could not hold, and never waits for the device. It returns its result, or None
    for a provider that computes nothing. The fastest candidate of a provider is the one that is measured.
    detail: what a record says of it, and how a provider's candidates differ. host: steps by name whose host time is recorded.
    device: steps by name whose device time is recorded beside that of the calls, which have no part in them. Both have what an
    engine makes once a model step, however many layers it has, as the step "plan".
    tolerance: what the gate allows on this case where that is not what it allows the provider. inputs: what the results are
    judged by, where the calls are not of the case itself.
    """

    calls: Sequence[Callable[[], Result | None]]
    detail: Mapping[str, object] = field(default_factory=dict)
    host: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    device: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    inputs: Inputs | None = None


class Provider(Protocol):
    """A competitor in one operation. tolerance: what the gate allows; None for one without a result.

    reads_unused: whether slots that no row owns may reach its result, so that they are cleared of NaN before it runs.
    """

    name: ClassVar[str]
    operation: ClassVar[Operation]
    tolerance: ClassVar[Tolerance | None]
    reads_unused: ClassVar[bool]

    def available(self) -> str | None:
        """Why this machine cannot run it, or None."""

    def version(self) -> str:
        """The version of what is measured."""

    def prepare(self, inputs: Any) -> Sequence[Candidate]:
        """The ways to run the case of `inputs`, which are Inputs, or AppendInputs where the operation is an append.

        Raises NotSupported. Anything it plans or compiles is outside the timing.
        """


@runtime_checkable
class CompilesAhead(Protocol):
    """A competitor that can compile what several cases need at once, faster than one after the other in `prepare`."""

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """Compile for those of `cases` that it supports. What fails here fails in `prepare` again, where it is recorded."""


class Floor:
    """What the providers without a result share that run on compute capability 9.0. Its calls return None."""

    tolerance: ClassVar[Tolerance | None] = None
    reads_unused: ClassVar[bool] = False

    def available(self) -> str | None:
        return require_sm90()


def require(supported: bool, reason: str) -> None:
    """Raise NotSupported with `reason` unless `supported`."""
    if not supported:
        raise NotSupported(reason)


def require_storage(case: Case, *eight_bit: EightBit) -> None:
    """Raise NotSupported unless the caches are 16-bit or one of `eight_bit`, without scales."""
    if case.kv_dtype is not None:
        require(case.kv_dtype in eight_bit, f"no kernel for {case.kv_dtype} caches")
    if case.kv_scale is not None:
        raise NotSupported(f"scales ({case.kv_scale}) are not passed to it")


def try_once(call: Callable[[], object], *refusals: type[Exception]) -> None:
    """Call it; raise NotSupported with the first line of one of `refusals`, which say what a provider has no kernel for."""
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
    """The page table of a paged case. Raises NotSupported for a contiguous one."""
    if inputs.pages is None:
        raise NotSupported("its cache is paged")
    return inputs.pages


def tokens_first(cache: torch.Tensor, case: Case) -> torch.Tensor:
    """A paged cache as a view [pages, page_size, num_kv_heads, head_dim]."""
    return cache.transpose(1, 2) if case.layout == "HND" else cache


def require_scores(case: Case, *known: str) -> None:
    """Raise NotSupported where a case has another modifier than `known`: of window_left, softcap, alibi, sinks and tree_mask."""
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
