"""The providers of appends: this package, and a plain copy of as many bytes, which is the floor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

import cute_kernels as ck
from cute_kernels.planning.variants import VariantArch
from perf.append_inputs import AppendInputs, append, append_descriptor
from perf.cases import COPY, Operation
from perf.correctness import EXACT, Tolerance
from perf.providers.base import Candidate
from perf.providers.ours import OurPlan


class OursAppend(OurPlan):
    """The variant that a plan selects by itself."""

    operation: ClassVar[Operation] = "append"
    tolerance: ClassVar[Tolerance | None] = EXACT

    def prepare(self, inputs: AppendInputs) -> Sequence[Candidate]:
        plan = self.make(ck.KVAppendPlan, append_descriptor(inputs.case), inputs.slots.device)
        return [self.candidate(plan, [partial(append, plan, inputs, index) for index in range(len(inputs.sets))])]


class OursSm80Append(OursAppend):
    """The SM80 variant, forced."""

    name: ClassVar[str] = "ours-sm80"
    arch: ClassVar[VariantArch | None] = "sm80"


class Copy:
    """torch's copy_, which reads half of the case's bytes and writes as many."""

    name: ClassVar[str] = COPY
    operation: ClassVar[Operation] = "append"
    tolerance: ClassVar[Tolerance | None] = None
    reads_unused: ClassVar[bool] = False

    def available(self) -> str | None:
        return None

    def version(self) -> str:
        return torch.__version__

    def prepare(self, inputs: AppendInputs) -> Sequence[Candidate]:
        shape = (len(inputs.sets), 2, inputs.case.kv_bytes // 32, 4)  # a buffer of 16-byte vectors, and its copy, for each set
        buffers = torch.zeros(shape, dtype=torch.int32, device=inputs.slots.device)
        return [Candidate([partial(copied, target, source) for target, source in buffers])]


def copied(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` to `target`."""
    target.copy_(source)
