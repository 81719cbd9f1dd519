"""Who gives attention weights: this package. The floor is a read of as many bytes as K and the result have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

import cute_kernels as ck
from cute_kernels.planning.variants import VariantArch
from perf.cases import Operation
from perf.correctness import OURS, Tolerance
from perf.inputs import Inputs
from perf.providers.base import Candidate, NotSupported
from perf.providers.ours import page_table
from perf.providers.read import Read
from perf.weights import weights_descriptor


class OursWeights:
    """The variant that a plan selects by itself. The lse is what decode gives, made beforehand."""

    name: ClassVar[str] = "ours"
    operation: ClassVar[Operation] = "weights"
    arch: ClassVar[VariantArch | None] = None
    tolerance: ClassVar[Tolerance | None] = OURS
    reads_unused: ClassVar[bool] = False

    def available(self) -> str | None:
        return None

    def version(self) -> str:
        return ck.__version__

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        device, preference = inputs.sets[0].q.device, ck.PlanPreference(arch=self.arch)
        described = weights_descriptor(inputs.case)
        try:
            plan = ck.AttentionWeightsPlan.select(described, device, preference)
        except ck.Unsupported as unsupported:
            raise NotSupported(str(unsupported)) from unsupported
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
        again: Callable[..., object] = ck.AttentionWeightsPlan.select
        select = partial(again, described, device, preference)  # of a known descriptor
        host: dict[str, Callable[[], object]] = {"run": calls[0], "select": select}
        return [Candidate(calls, {"sku": plan.sku}, host)]


class OursSm80Weights(OursWeights):
    """The SM80 variant, forced."""

    name: ClassVar[str] = "ours-sm80"
    arch: ClassVar[VariantArch | None] = "sm80"


class ReadWeights(Read):
    """Half of the bytes of K and of the result from K, and half from V: a set is as far past L2 as the case's."""

    operation: ClassVar[Operation] = "weights"
