"""The provider of attention weights: this package. The floor is a read of as many bytes as K and the result have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

import cute_kernels as ck
from cute_kernels.planning.variants import VariantArch
from perf.cases import Operation
from perf.inputs import Inputs
from perf.providers.base import Candidate
from perf.providers.ours import OurPlan, page_table
from perf.providers.read import Read
from perf.weights import weights_descriptor


class OursWeights(OurPlan):
    """The variant that a plan selects by itself. Attention makes the lse beforehand."""

    operation: ClassVar[Operation] = "weights"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        device, described = inputs.sets[0].q.device, weights_descriptor(inputs.case)
        plan = self.make(ck.AttentionWeightsPlan, described, device)
        if inputs.pages is None:
            table = ck.PageTable.lengths(torch.tensor(inputs.case.tokens(), dtype=torch.int32, device=device))
        else:
            table = page_table(inputs.case, inputs.pages)
        run: Callable[..., Any] = plan.run
        outputs: dict[str, Any] = {name: torch.empty(shape, device=device) for name, shape in described.shapes.items()}
        calls = []
        for s in inputs.sets:
            beside: dict[str, Any] = {"layout": inputs.case.layout, "k_scale": s.k_scale, "v_scale": s.v_scale}
            lse = ck.paged_attention(s.q[:, None], s.k, s.v, page_table=table, max_q_len=1, **beside)[1]
            calls.append(partial(run, s.q, s.k, lse, table, k_scale=s.k_scale, **outputs))
        return [self.candidate(plan, calls)]


class OursSm80Weights(OursWeights):
    """The SM80 variant, forced."""

    name: ClassVar[str] = "ours-sm80"
    arch: ClassVar[VariantArch | None] = "sm80"


class ReadWeights(Read):
    """Reads as many bytes as K and the result have, half from K and half from V: sets exceed L2 as much as the case's."""

    operation: ClassVar[Operation] = "weights"
