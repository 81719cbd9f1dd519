"""The ordered variants, which problems each can serve on which device, and the choice among them, with every reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch

from ..checks.fields import is_int
from ..config.tiling import Arch, Target
from ..errors import InvalidArgument, Unsupported

VariantArch = Literal["sm90", "sm80", "cpu"]
Verdict = Literal["chosen", "fits", "rejected", "excluded"]
Launch = Callable[..., object]


@dataclass(frozen=True)
class DeviceFacts:
    """The device facts that the choice depends on: kind, name, compute capability (CPU: None) and SM count (CPU: 1)."""

    kind: str
    name: str
    capability: tuple[int, int] | None
    sm_count: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceFacts:
        """The facts of one of this machine's devices."""
        if device.type != "cuda":
            return cls(device.type, device.type, None, 1)
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return cls("cuda", properties.name, capability, properties.multi_processor_count)

    @property
    def slug(self) -> str:
        """The name of the device's plan table: "h200" for "NVIDIA H200"."""
        model = re.search(r"[a-z]+\d+[a-z]*", self.name.lower())
        return model.group() if model else self.kind

    def __str__(self) -> str:
        if self.capability is None:
            return self.name
        return f"{self.name} (capability {self.capability[0]}.{self.capability[1]}, {self.sm_count} SMs)"


PRETEND = {
    "h200": DeviceFacts("cuda", "NVIDIA H200", (9, 0), 132),
    "h100": DeviceFacts("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 132),
    "a100": DeviceFacts("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "l40s": DeviceFacts("cuda", "NVIDIA L40S", (8, 9), 142),
    "cpu": DeviceFacts("cpu", "cpu", None, 1),
}


@dataclass(frozen=True)
class PlanPreference:
    """A caller's demands on the choice.

    max_workspace_bytes: rows stay whole if cutting them needs more. arch: force "sm90", "sm80" or "cpu"; Unsupported if it
    cannot serve. deterministic: every variant is. batch_invariant: a row's bits may not depend on the rest of the batch.
    sm_count: SMs that a plan of attention uses, leaving the others to other work; None: all. InvalidArgument if the device
    has fewer. The grid has at least one CTA per KV head and block of query rows, even if that is more than sm_count. Appends,
    merges and attention weights check sm_count too, but their grids follow from their rows, and run on whatever SM is free.
    validate, check_workspace: debugging aids. `run` first checks lengths and page ids on the device, or that the workspace holds
    no foreign bytes; the check synchronises with the device, cannot be captured in a graph, and raises InvalidArgument for the
    first bad row or byte.
    """

    max_workspace_bytes: int | None = None
    arch: VariantArch | None = None
    deterministic: bool = True
    batch_invariant: bool = False
    validate: bool = False
    check_workspace: bool = False
    sm_count: int | None = None

    def __post_init__(self) -> None:
        limit = self.max_workspace_bytes
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise InvalidArgument("max_workspace_bytes", f"got {limit!r}, must be an int of at least 0, or None")
        if self.arch not in (None, "sm90", "sm80", "cpu"):
            raise InvalidArgument("arch", f'got {self.arch!r}, must be "sm90", "sm80", "cpu" or None')
        for name in ("deterministic", "batch_invariant", "validate", "check_workspace"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(name, f"got {getattr(self, name)!r}, must be a bool")
        if self.sm_count is not None and (not is_int(self.sm_count) or self.sm_count < 1):
            raise InvalidArgument("sm_count", f"got {self.sm_count!r}, must be an int of at least 1, or None")

    def part_of(self, facts: DeviceFacts) -> DeviceFacts:
        """The facts of the part of a device that a plan may use. InvalidArgument if the device has fewer than sm_count SMs."""
        if self.sm_count is None:
            return facts
        if self.sm_count > facts.sm_count:
            raise InvalidArgument("sm_count", f"got {self.sm_count}, must be at most {facts.sm_count}, the SMs of {facts.name}")
        return replace(facts, sm_count=self.sm_count)


@dataclass(frozen=True)
class Variant:
    """One implementation: its mainloop and the target it is compiled for on each compute capability it runs on."""

    name: str
    arch: VariantArch
    targets: tuple[tuple[tuple[int, int], Target], ...] = ()

    def target(self, facts: DeviceFacts) -> Target | None:
        """The target to compile for on this device; None if the variant does not run there."""
        return dict(self.targets).get(facts.capability) if facts.capability else None


VARIANTS = (
    Variant("sm90_tma", "sm90", (((9, 0), "sm_90a"),)),
    Variant("sm80_cp_async", "sm80", (*(((8, minor), "sm_80") for minor in (0, 6, 7, 9)), ((9, 0), "sm_90a"))),
    Variant("cpu_reference", "cpu"),
)


def variants_of(operation: str) -> tuple[Variant, ...]:
    """The variants of another operation than decode: same devices and targets; variants with kernels are named after it."""
    return tuple(replace(variant, name=f"{variant.arch}_{operation}") if variant.targets else variant for variant in VARIANTS)


@dataclass(frozen=True)
class Candidate:
    """One variant's answer: the verdict, its reasons, and the kernel it would run. The CPU variant has no spec.

    knobs: the kernel's parameters, in one line. spec: its compile key. num_ctas: its grid. config, config_source, cost: for
    decode, the configuration, its source (and why rows stay whole if they could be cut), and the cost that the model expects.
    phases: for a mixed kernel, each phase as it would be alone; the candidate has the last phase's configuration and cost.
    """

    variant: str
    arch: VariantArch
    verdict: Verdict
    reasons: tuple[str, ...]
    knobs: str = "plain PyTorch"
    spec: Any = None
    num_ctas: int = 1
    config: Any = None
    config_source: str = ""
    cost: Any = None
    phases: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Every variant in order, with the reasons why it was taken or rejected. `str()` is a table, `to_dict()` plain data."""

    problem: str
    device: str
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The candidate that was taken. Raises Unsupported with every reason if none was."""
        for candidate in self.candidates:
            if candidate.verdict == "chosen":
                return candidate
        raise Unsupported([f"{c.variant}: {reason}" for c in self.candidates for reason in c.reasons])

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("variant", "arch", "verdict", "why")]
        for candidate in self.candidates:
            why = candidate.reasons or tuple(phase.knobs for phase in candidate.phases or (candidate,))
            rows.append((candidate.variant, candidate.arch, candidate.verdict, why[0]))
            rows += [("", "", "", reason) for reason in why[1:]]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in rows]
        return "\n".join([f"{self.problem}, on {self.device}", *(f"  {line}" for line in lines)])


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


def device_reasons(variant: Variant, facts: DeviceFacts) -> list[str]:
    """The reasons why a variant does not run on such a device; empty if it does."""
    if variant.arch == "cpu":
        return [] if facts.kind == "cpu" else [f"runs on the cpu, device is {facts}"]
    if variant.target(facts):
        return []
    needed = ", ".join(f"{major}.{minor}" for (major, minor), _ in variant.targets)
    return [f"needs a CUDA device of capability {needed}, device is {facts}"]


class Offer(NamedTuple):
    """A kernel that a variant would run, or every reason why it has none. The other fields are as in Candidate."""

    reasons: list[str]
    knobs: str = ""
    spec: Any = None
    num_ctas: int = 1


def answer(variant: Variant, facts: DeviceFacts, offer: Callable[[Arch, Target], Offer]) -> Candidate:
    """One variant's answer: rejected if it does not run on the device; for a kernel, as `offer` says for its arch and target."""
    reasons, target = device_reasons(variant, facts), variant.target(facts)
    if target is None:
        return Candidate(variant.name, variant.arch, "rejected" if reasons else "fits", tuple(reasons))
    offered = offer(cast(Arch, variant.arch), target)
    if offered.reasons:
        return Candidate(variant.name, variant.arch, "rejected", tuple(offered.reasons))
    return Candidate(variant.name, variant.arch, "fits", (), *offered[1:])
