"""One case: prepare and gate each provider, pick its fastest candidate, then time all of them interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from perf.append_inputs import AppendInputs, check_append, make_append_inputs
from perf.case_sets import bar_of
from perf.cases import Bar, Case
from perf.correctness import EXACT, OURS, GateResult, check, worst_of
from perf.inputs import ROTATED_BYTES, Inputs, make_inputs
from perf.providers.base import Candidate, NotSupported, Provider, Result
from perf.timing import Clock, Rotation, Timing, host_time

HOST_BYTES = 64 * 2**20  # host time does not depend on the size: it is taken on cases up to this one
HOST_CHUNKS = 10  # pauses in which the device catches up, so that the launch queue never fills
DEVICE = "device"
IN_STREAM = "in_stream"


class DeviceFailed(Exception):
    """The device reports an error that outlasts the call that caused it: nothing more can be measured in this process."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(f"{outcome.provider}: {outcome.error}")


@dataclass(frozen=True)
class Limits:
    """How much is measured.

    replays: of a measurement; trials: replays that choose among a provider's candidates. memory_bytes: what K and V of all
    sets may take; rotated_bytes: what they have to exceed. host_calls: calls of a host time; 0 records none.
    """

    replays: int
    trials: int
    memory_bytes: int
    rotated_bytes: int = ROTATED_BYTES
    host_calls: int = 2000


@dataclass(frozen=True)
class Outcome:
    """What came of one provider on one case; a record is made of it.

    metric: "device", or "host." and the step. us: microseconds of one call. Without it, `not_supported`, `error` or a
    failed gate says why. strict: whether a failure makes the run fail.
    """

    case: Case
    provider: str
    version: str
    strict: bool
    metric: str = DEVICE
    us: Timing | None = None
    read_us: float | None = None
    gate: GateResult | None = None
    detail: dict[str, object] | None = None
    not_supported: str | None = None
    error: str | None = None

    @property
    def ratio_to_read(self) -> float | None:
        """Device time over that of the case's floor on the same bytes in the same run."""
        return None if self.us is None or self.read_us is None else self.us.median / self.read_us

    @property
    def failed(self) -> bool:
        """Whether a strict provider crashed or gave a wrong result."""
        return self.strict and (self.error is not None or (self.gate is not None and not self.gate.passed))

    @property
    def bar(self) -> Bar | None:
        """What the case asks of this outcome: of the device time of a plan's own choice."""
        return bar_of(self.case) if self.provider == "ours" and self.metric == DEVICE else None

    @property
    def bar_met(self) -> bool | None:
        """Whether the bar is met; None where there is no bar, or no time to hold against it."""
        return None if self.bar is None or self.us is None else self.bar.met(self.us.median, self.read_us)

    @property
    def reason(self) -> str:
        """Why there is no time; empty where there is one."""
        if self.gate is not None and not self.gate.passed:
            return self.gate.reason
        return self.error or (f"not supported: {self.not_supported}" if self.not_supported else "")

    def fields(self) -> dict[str, object]:
        """The part of a record that is this outcome's: what is None is left out."""
        fields = {
            "provider": self.provider,
            "version": self.version,
            "metric": self.metric,
            "us": self.us,
            "bytes": self.case.kv_bytes if self.metric == DEVICE else None,
            "ratio_to_read": self.ratio_to_read,
            "bar": self.bar and vars(self.bar) | {"met": self.bar_met},
            "gate": self.gate,
            "not_supported": self.not_supported,
            "error": self.error,
        }
        return {name: value for name, value in (fields | (self.detail or {})).items() if value is not None}


@dataclass(frozen=True)
class Contender:
    """A provider that is ready to be timed: its fastest candidate, captured, and the outcome so far."""

    outcome: Outcome
    candidate: Candidate
    rotation: Rotation


def measure(case: Case, providers: Sequence[Provider], limits: Limits, clock: Clock, device: torch.device) -> list[Outcome]:
    """Measure `providers` on one case; those that may read unused slots are prepared last, after the NaN is cleared.

    A provider that fails leaves an outcome and does not stop the others. Raises DeviceFailed where the device is lost.
    """
    strict = {provider.name: provider.tolerance in (OURS, EXACT) for provider in providers}
    pairs = [(provider, Outcome(case, provider.name, provider.version(), strict[provider.name])) for provider in providers]
    try:
        make = make_append_inputs if case.operation == "append" else make_inputs
        inputs: Inputs | AppendInputs = make(case, device, limits.memory_bytes, limits.rotated_bytes)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return [replace(blank, not_supported=str(error)) for _, blank in pairs]
    entries = [enter(provider, blank, inputs, limits, clock) for provider, blank in pairs if not provider.reads_unused]
    inputs.fill_unused(0.0)
    entries += [enter(provider, blank, inputs, limits, clock) for provider, blank in pairs if provider.reads_unused]
    contenders = [entry for entry in entries if isinstance(entry, Contender)]
    try:
        timings = iter(clock.times([contender.rotation for contender in contenders], limits.replays))
    except RuntimeError as error:
        names = ", ".join(contender.outcome.provider for contender in contenders)
        raise DeviceFailed(replace(pairs[0][1], error=f"while timing {names}: {error}")) from error
    outcomes = [replace(e.outcome, us=next(timings)) if isinstance(e, Contender) else e for e in entries]
    read_us = next((outcome.us.median for outcome in outcomes if outcome.provider == case.floor and outcome.us), None)
    outcomes = [replace(outcome, read_us=read_us) for outcome in outcomes]
    if limits.host_calls and case.kv_bytes <= HOST_BYTES:
        outcomes += [outcome for contender in contenders for outcome in host_outcomes(contender, limits, clock)]
    return outcomes


def enter(provider: Provider, blank: Outcome, inputs: Inputs | AppendInputs, limits: Limits, clock: Clock) -> Contender | Outcome:
    """Prepare, gate and capture one provider: a contender, or the outcome that says why it is none."""
    try:
        reason = provider.available()
        if reason:
            raise NotSupported(reason)
        start = time.perf_counter()
        candidates = provider.prepare(inputs)
        prepare_s = time.perf_counter() - start
        gates = [gate(provider, candidate, inputs) for candidate in candidates]
        right = [i for i, result in enumerate(gates) if result is None or result.passed]
        if not right:
            return replace(blank, gate=gates[0])
        rotations = [clock.capture(candidates[i].calls) for i in right]
        best = fastest(rotations, limits.trials, clock)
        chosen = right[best]
        detail = {"prepare_s": round(prepare_s, 3), **candidates[chosen].detail}
        return Contender(replace(blank, gate=gates[chosen], detail=detail), candidates[chosen], rotations[best])
    except NotSupported as reason:
        return replace(blank, not_supported=str(reason))
    except Exception as error:  # whatever a competitor does, the others still run
        return failed(blank, error, clock)


def gate(provider: Provider, candidate: Candidate, inputs: Inputs | AppendInputs) -> GateResult | None:
    """The gate's result over every input set (see correctness.worst_of); None without a tolerance."""
    tolerance = candidate.tolerance or provider.tolerance
    if tolerance is None:
        return None
    results: list[GateResult] = []
    for index, call in zip(range(len(inputs.sets)), candidate.calls, strict=True):
        if isinstance(inputs, AppendInputs):
            inputs.clear(index)
            call()
            results.append(check_append(inputs, index))
        else:
            results.append(check(inputs, index, *cast(Result, call()), tolerance))
        if not results[-1].passed:
            break
    return worst_of(results)


def fastest(rotations: Sequence[Rotation], replays: int, clock: Clock) -> int:
    """The index of the fastest of several rotations, by a short interleaved trial."""
    if len(rotations) == 1:
        return 0
    medians = [timing.median for timing in clock.times(rotations, replays)]
    return medians.index(min(medians))


def host_outcomes(contender: Contender, limits: Limits, clock: Clock) -> list[Outcome]:
    """The host time of each step that the contender names, one outcome each."""
    return [host_outcome(contender, step, call, limits, clock) for step, call in contender.candidate.host.items()]


def host_outcome(contender: Contender, step: str, call: Callable[[], object], limits: Limits, clock: Clock) -> Outcome:
    """The host time of one step, or the error that it raised."""
    blank = replace(contender.outcome, metric=f"host.{step}", gate=None, read_us=None, detail=None)
    try:
        return replace(blank, us=host_time(call, limits.host_calls, max(1, limits.host_calls // HOST_CHUNKS), clock.synchronize))
    except Exception as error:
        return failed(blank, error, clock)


def failed(blank: Outcome, error: Exception, clock: Clock) -> Outcome:
    """The outcome of a provider that raised `error`. Raises DeviceFailed where the device did not survive it."""
    outcome = replace(blank, error=f"{type(error).__name__}: {error}")
    try:
        clock.synchronize()
    except RuntimeError as lost:
        raise DeviceFailed(outcome) from lost
    return outcome
