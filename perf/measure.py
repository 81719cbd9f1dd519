"""Measures one case: prepares and gates each provider, picks its fastest candidate, then times all providers interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from perf.append_inputs import AppendInputs
from perf.case_sets import bar_of
from perf.cases import PLAIN, Bar, Case
from perf.correctness import EXACT, OURS, GateResult, worst_of
from perf.inputs import ROTATED_BYTES, Inputs
from perf.operations import PROCEDURES
from perf.providers.base import Candidate, NotSupported, Provider
from perf.record import machine, ratio_field
from perf.streams import Stream, reader_of_weights, writer
from perf.timing import Clock, Preceded, Rotation, Timing, added, host_time

HOST_BYTES = 64 * 2**20  # host time does not depend on the size: it is taken on cases up to this size
HOST_CHUNKS = 10  # pauses in which the device catches up, so that the launch queue never fills
DEVICE = "device"
IN_STREAM = "in_stream"
BEHIND_WEIGHTS = "behind_weights"
RESULTS = (DEVICE, IN_STREAM, BEHIND_WEIGHTS)  # the metrics that time the call whose result is gated
PREPARE_S = "prepare_s"


class DeviceFailed(Exception):
    """The device reports an error that outlasts the call that caused it: nothing more can be measured in this process."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(f"{outcome.provider}: {outcome.error}")


@dataclass(frozen=True)
class Limits:
    """How much is measured.

    replays: of a measurement; trials: replays that choose among a provider's candidates. memory_bytes: bytes that K and V of
    all sets may take; rotated_bytes: bytes that they must exceed. host_calls: calls of a host time; 0 records none.
    in_stream: replays for the time behind a kernel that writes q; behind_weights: behind one that reads weights of weights_bytes,
    more than L2 holds; 0 records none.
    """

    replays: int
    trials: int
    memory_bytes: int
    rotated_bytes: int = ROTATED_BYTES
    host_calls: int = 2000
    in_stream: int = 11
    behind_weights: int = 0
    weights_bytes: int = 128 * 2**20


@dataclass(frozen=True)
class Outcome:
    """The outcome of one provider on one case; a record is made of it.

    metric: "device"; "in_stream" or "behind_weights", the time that a call adds to a stream behind a kernel that writes its q, or
    that reads weights; or "device." or "host." and a step. us: microseconds of one call. If absent, `not_supported`, `error` or
    a failed gate says why. floor_us, others: the microseconds of the case's floor, and of every provider, by the same metric in
    the same run. strict: whether a failure makes the run fail. machine: as record.machine has it, read during the replays.
    """

    case: Case
    provider: str
    version: str
    strict: bool
    metric: str = DEVICE
    us: Timing | None = None
    floor_us: float | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    gate: GateResult | None = None
    detail: dict[str, object] | None = None
    not_supported: str | None = None
    error: str | None = None
    machine: Mapping[str, object] | None = None

    @property
    def ratio_to_floor(self) -> float | None:
        """The time over that of the case's floor, by the same metric in the same run."""
        return None if self.us is None or self.floor_us is None else self.us.median / self.floor_us

    @property
    def ratio_to_plain(self) -> float | None:
        """The time over that of plain decode on the same caches, by the same metric in the same run."""
        plain = self.others.get(PLAIN)
        return None if self.us is None or plain is None else self.us.median / plain

    @property
    def failed(self) -> bool:
        """Whether a strict provider crashed or gave a wrong result."""
        return self.strict and (self.error is not None or (self.gate is not None and not self.gate.passed))

    @property
    def bar(self) -> Bar | None:
        """The case's bar, if this outcome is the device time of a plan's own choice."""
        return bar_of(self.case) if self.provider == "ours" and self.metric == DEVICE else None

    @property
    def bar_met(self) -> bool | None:
        """Whether the bar is met; None if there is no bar, or no time to compare with it."""
        return None if self.bar is None or self.us is None else self.bar.met(self.us.median, self.floor_us, self.others)

    @property
    def reason(self) -> str:
        """The reason why there is no time; empty if there is one."""
        if self.gate is not None and not self.gate.passed:
            return self.gate.reason
        return self.error or (f"not supported: {self.not_supported}" if self.not_supported else "")

    def fields(self) -> dict[str, object]:
        """This outcome's part of a record; fields that are None are left out."""
        fields = {
            "provider": self.provider,
            "version": self.version,
            "metric": self.metric,
            "us": self.us,
            "bytes": self.case.kv_bytes if self.metric in RESULTS else None,
            ratio_field(self.case): self.ratio_to_floor,
            "ratio_to_plain": self.ratio_to_plain,
            "bar": self.bar and self.bar.fields() | {"met": self.bar_met},
            "gate": self.gate,
            "not_supported": self.not_supported,
            "error": self.error,
            "machine": self.machine,
        }
        return {name: value for name, value in (fields | (self.detail or {})).items() if value is not None}


@dataclass(frozen=True)
class Contender:
    """A provider that is ready to be timed: its fastest candidate, captured, and the outcome so far."""

    outcome: Outcome
    candidate: Candidate
    rotation: Rotation


def measure(case: Case, providers: Sequence[Provider], limits: Limits, clock: Clock, device: torch.device) -> list[Outcome]:
    """Measures `providers` on one case; those that may read unused slots are prepared last, after NaN is cleared there.

    A provider that fails leaves an outcome and does not stop the others. Raises DeviceFailed if the device is lost.
    """
    strict = {provider.name: provider.tolerance in (OURS, EXACT) for provider in providers}
    pairs = [(provider, Outcome(case, provider.name, provider.version(), strict[provider.name])) for provider in providers]
    try:
        inputs = PROCEDURES[case.operation].make(case, device, limits.memory_bytes, limits.rotated_bytes)
    except (MemoryError, torch.OutOfMemoryError) as error:
        facts = machine(device)
        return [replace(blank, not_supported=str(error), machine=facts) for _, blank in pairs]
    entries = [enter(provider, blank, inputs, limits, clock) for provider, blank in pairs if not provider.reads_unused]
    inputs.fill_unused(0.0)
    entries += [enter(provider, blank, inputs, limits, clock) for provider, blank in pairs if provider.reads_unused]
    contenders = [entry for entry in entries if isinstance(entry, Contender)]
    rotations = [contender.rotation for contender in contenders]
    with surviving(pairs[0][1], contenders):
        timings = iter(clock.times(rotations, limits.replays))
        facts = clock.under_load(rotations, partial(machine, device))
    outcomes = beside_the_floor(replace(e.outcome, us=next(timings)) if isinstance(e, Contender) else e for e in entries)
    if contenders and PROCEDURES[case.operation].has_query:
        for stream in streams(inputs, limits, device):
            outcomes += stream_outcomes(contenders, stream, clock)
    outcomes += [outcome for contender in contenders for outcome in step_outcomes(contender, limits, clock)]
    return [replace(outcome, machine=facts) for outcome in outcomes]


@contextmanager
def surviving(blank: Outcome, contenders: Sequence[Contender]) -> Iterator[None]:
    """A context to time contenders together. Raises DeviceFailed, with `blank` as the outcome, if the device is lost."""
    try:
        yield
    except RuntimeError as error:
        names = ", ".join(contender.outcome.provider for contender in contenders)
        raise DeviceFailed(replace(blank, error=f"while timing {names}: {error}")) from error


def beside_the_floor(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes of one metric of a case, each with the times of all providers, and the floor's time as floor_us."""
    found = list(outcomes)
    times = {outcome.provider: outcome.us.median for outcome in found if outcome.us}
    return [replace(outcome, floor_us=times.get(outcome.case.floor), others=times) for outcome in found]


def enter(provider: Provider, blank: Outcome, inputs: Inputs | AppendInputs, limits: Limits, clock: Clock) -> Contender | Outcome:
    """Prepares, gates and captures one provider: returns a contender, or the outcome that says why there is none."""
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
        detail = {PREPARE_S: round(prepare_s, 3), **candidates[chosen].detail}
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
    judged = candidate.inputs or inputs
    judge = PROCEDURES[judged.case.operation].judge
    results: list[GateResult] = []
    for index, call in zip(range(len(judged.sets)), candidate.calls, strict=True):
        results.append(judge(judged, index, call, tolerance))
        if not results[-1].passed:
            break
    return worst_of(results)


def fastest(rotations: Sequence[Rotation], replays: int, clock: Clock) -> int:
    """The index of the fastest of several rotations, by a short interleaved trial."""
    if len(rotations) == 1:
        return 0
    medians = [timing.median for timing in clock.times(rotations, replays)]
    return medians.index(min(medians))


def streams(inputs: Inputs, limits: Limits, device: torch.device) -> list[Stream]:
    """What runs before each call, one input set after the other, where its time behind other kernels is asked for."""
    found = []
    if limits.in_stream:
        found.append(Stream(IN_STREAM, [writer(s.q) for s in inputs.sets], limits.in_stream))
    if limits.behind_weights:
        reader = reader_of_weights(limits.weights_bytes, device)
        found.append(Stream(BEHIND_WEIGHTS, [reader] * len(inputs.sets), limits.behind_weights))
    return found


def stream_outcomes(contenders: Sequence[Contender], stream: Stream, clock: Clock) -> list[Outcome]:
    """The time that each contender's calls add to a stream in which another kernel runs before each call.

    Replays of such pairs are interleaved with replays of the other kernels alone; the difference within a round is a sample.
    """
    entries: list[Contender | Outcome] = []
    for contender in contenders:
        detail = {name: value for name, value in (contender.outcome.detail or {}).items() if name != PREPARE_S}
        blank = replace(contender.outcome, metric=stream.metric, detail=detail)
        try:
            calls = [Preceded(*pair) for pair in zip(stream.before, contender.candidate.calls, strict=True)]
            entries.append(replace(contender, outcome=blank, rotation=clock.capture(calls)))
        except Exception as error:
            entries.append(failed(blank, error, clock))
    behind = [entry for entry in entries if isinstance(entry, Contender)]
    with surviving(replace(contenders[0].outcome, metric=stream.metric, gate=None, detail=None), behind):
        rotations = [clock.capture(stream.before), *(contender.rotation for contender in behind)]
        alone, *together = clock.times(rotations, stream.replays)
    timings = iter(together)
    return beside_the_floor(beyond(e.outcome, next(timings), alone) if isinstance(e, Contender) else e for e in entries)


def beyond(blank: Outcome, together: Timing, alone: Timing) -> Outcome:
    """The outcome of calls that were timed together with others; the others' time alone is subtracted."""
    try:
        return replace(blank, us=added(together, alone))
    except ValueError as lost:
        return replace(blank, not_supported=str(lost))


def step_outcomes(contender: Contender, limits: Limits, clock: Clock) -> list[Outcome]:
    """The device and host times of the steps that the contender names, one outcome each; host times for small cases only."""
    candidate, blank = contender.candidate, replace(contender.outcome, gate=None, floor_us=None, others={}, detail=None)
    timed: list[tuple[str, Callable[[], Timing]]] = [
        (f"{DEVICE}.{step}", partial(device_time, call, limits.replays, clock)) for step, call in candidate.device.items()
    ]
    if limits.host_calls and blank.case.kv_bytes <= HOST_BYTES:
        chunk = max(1, limits.host_calls // HOST_CHUNKS)
        timed += [
            (f"host.{step}", partial(host_time, call, limits.host_calls, chunk, clock.synchronize))
            for step, call in candidate.host.items()
        ]
    return [timed_outcome(replace(blank, metric=metric), time_of, clock) for metric, time_of in timed]


def device_time(call: Callable[[], object], replays: int, clock: Clock) -> Timing:
    """Device time of a call that needs no input sets."""
    (timing,) = clock.times([clock.capture([call])], replays)
    return timing


def timed_outcome(blank: Outcome, time_of: Callable[[], Timing], clock: Clock) -> Outcome:
    """The outcome of a step: the time that `time_of` returns, or the error that it raised."""
    try:
        return replace(blank, us=time_of())
    except Exception as error:
        return failed(blank, error, clock)


def failed(blank: Outcome, error: Exception, clock: Clock) -> Outcome:
    """The outcome of a provider that raised `error`. Raises DeviceFailed if the device did not survive it."""
    outcome = replace(blank, error=f"{type(error).__name__}: {error}")
    try:
        clock.synchronize()
    except RuntimeError as lost:
        raise DeviceFailed(outcome) from lost
    return outcome
