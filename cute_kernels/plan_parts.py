"""What the plans besides decode are made of: the choice among answers, checks that are remembered, no compile in a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch

from .compile import Spec, compiled_specs
from .dispatch import Candidate, DeviceFacts, Explanation, PlanPreference
from .errors import CompileFailed

MAX_CHECKED = 4096  # signatures that a plan remembers


class _Signed(Protocol):
    def signature(self) -> tuple[object, ...]: ...


_Operands = TypeVar("_Operands", bound=_Signed)
_Verdict = TypeVar("_Verdict")


def choice(answers: Iterable[Candidate], problem: str, facts: DeviceFacts, preference: PlanPreference) -> Explanation:
    """Chooses the first of the answers ("fits" or "rejected" each, in order) that fits and that `preference` allows."""
    candidates: list[Candidate] = []
    taken = False
    for candidate in answers:
        if preference.arch not in (None, candidate.arch):
            forced = f'preference forces arch "{preference.arch}"'
            rejected = candidate.reasons if candidate.verdict == "rejected" else ()
            candidate = replace(candidate, verdict="excluded", reasons=(forced, *rejected))
        elif candidate.verdict == "fits" and taken:
            candidate = replace(candidate, reasons=("an earlier variant serves it",))
        elif candidate.verdict == "fits":
            taken = True
            candidate = replace(candidate, verdict="chosen")
        candidates.append(candidate)
    return Explanation(problem, str(facts), tuple(candidates))


class Checked(Generic[_Operands, _Verdict]):
    """A check of operands that runs once a signature: `checked(operands)` gives what the check gave, `now` always runs it."""

    def __init__(self, check: Callable[[_Operands], _Verdict]) -> None:
        self.now = check
        self._known: dict[object, _Verdict] = {}

    def __call__(self, operands: _Operands) -> _Verdict:
        key: object = None
        try:
            key = operands.signature()
            if key in self._known:
                return self._known[key]
        except (AttributeError, TypeError):
            pass  # not a tensor: the check names it
        verdict = self.now(operands)
        if len(self._known) >= MAX_CHECKED:
            self._known.clear()
        self._known[key] = verdict
        return verdict


def refuse_compile_in_capture(spec: Spec) -> None:
    """Raises CompileFailed inside a graph capture where `spec` has not been compiled yet."""
    if torch.cuda.is_current_stream_capturing() and spec not in compiled_specs():
        raise CompileFailed(f"spec = {spec}: is not compiled yet, must not be compiled inside a graph capture; select before it")
