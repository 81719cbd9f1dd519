"""Pieces of plans: checks that are remembered, names that are known, no compile inside a graph capture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Generic, Protocol, TypeVar, cast

import torch

from ..compile import kernels as compiler
from ..errors import CompileFailed

MAX_CHECKED = 4096  # signatures that a plan remembers


_UNKNOWN = object()


class _Signed(Protocol):
    def signature(self) -> tuple[object, ...]: ...


_Operands = TypeVar("_Operands", bound=_Signed)
_Verdict = TypeVar("_Verdict")


class Checked(Generic[_Operands, _Verdict]):
    """A check of operands that runs once a signature: `checked(operands)` gives what the check gave, `now` always runs it."""

    def __init__(self, check: Callable[[_Operands], _Verdict]) -> None:
        self.now = check
        self._known: dict[object, _Verdict] = {}

    def __call__(self, operands: _Operands) -> _Verdict:
        key: object = None
        try:
            key = operands.signature()
            known = self._known.get(key, _UNKNOWN)  # a key is hashed once: that takes as long as making it
            if known is not _UNKNOWN:
                return cast(_Verdict, known)
        except (AttributeError, TypeError, RuntimeError):
            pass  # not a tensor, or one without an address: the check names it
        verdict = self.now(operands)
        if len(self._known) >= MAX_CHECKED:
            self._known.clear()
        self._known[key] = verdict
        return verdict


def refuse_unknown(given: Mapping[str, object], known: Collection[str]) -> None:
    """Raises TypeError for the first name that can_implement is given and `run` does not know."""
    for name in given:
        if name not in known:
            raise TypeError(f"can_implement() got an unexpected keyword argument {name!r}")


def refuse_compile_in_capture(spec: compiler.Spec) -> None:
    """Raises CompileFailed inside a graph capture where `spec` has not been compiled yet."""
    if torch.cuda.is_current_stream_capturing() and spec not in compiler.compiled_specs():
        raise CompileFailed(f"spec = {spec}: is not compiled yet, must not be compiled inside a graph capture; select before it")
