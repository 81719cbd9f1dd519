"""The errors of the package: one hierarchy, and every message names the parameter, its value and the rule."""

from __future__ import annotations

from collections.abc import Sequence


class CuteKernelsError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidProblem(CuteKernelsError, ValueError):
    """A problem that makes no sense, or tensors whose extents are not those of the described problem."""

    def __init__(self, parameter: str, value: object, rule: str) -> None:
        self.parameter, self.value, self.rule = parameter, value, rule
        super().__init__(parameter, value, rule)

    def __str__(self) -> str:
        return f"{self.parameter} = {self.value!r}: {self.rule}"


class InvalidArgument(CuteKernelsError, ValueError):
    """An argument or a setting that cannot be used: its type, dtype, device or value, or the memory that it shares."""

    def __init__(self, arg: str, reason: str) -> None:
        self.arg, self.reason = arg, reason
        super().__init__(arg, reason)

    def __str__(self) -> str:
        return f"{self.arg}: {self.reason}"


class Unsupported(CuteKernelsError, NotImplementedError):
    """A valid problem that no variant, or not the forced one, can serve; `reasons` holds every reason."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class WorkspaceTooSmall(CuteKernelsError):
    """The workspace has `got` bytes, 0 when none was given, and the plan needs `needed`."""

    def __init__(self, needed: int, got: int) -> None:
        self.needed, self.got = needed, got
        super().__init__(needed, got)

    def __str__(self) -> str:
        return f"workspace = {self.got} bytes: must hold at least workspace_size() = {self.needed} bytes"


class MisalignedOperand(CuteKernelsError):
    """A pointer or a stride in bytes, `value`, that is not a multiple of the `alignment` bytes that loads or TMA need."""

    def __init__(self, operand: str, value: int, alignment: int) -> None:
        self.operand, self.value, self.alignment = operand, value, alignment
        super().__init__(operand, value, alignment)

    def __str__(self) -> str:
        shown = f"{self.value:#x}" if self.operand.endswith("data_ptr") else f"{self.value} bytes"
        return f"{self.operand} = {shown}: must be a multiple of {self.alignment} bytes"


class CompileFailed(CuteKernelsError):
    """A kernel could not be compiled, or it or a plan's memory would have to be made inside a graph capture."""


class LaunchFailed(CuteKernelsError):
    """A compiled kernel refused its operands, or CUDA refused the launch."""


class InvalidPlanTable(CuteKernelsError, ValueError):
    """A tuned plan table (plans/<gpu>.json) is malformed."""

    def __init__(self, where: str, value: object, rule: str) -> None:
        self.where, self.value, self.rule = where, value, rule
        super().__init__(where, value, rule)

    def __str__(self) -> str:
        return f"{self.where} = {self.value!r}: {self.rule}"


class MissingDependency(CuteKernelsError):
    """`name`, which is not part of the package, is needed and missing; `reason` says how to get it."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(name, reason)

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"
