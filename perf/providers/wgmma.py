"""The floor of long queries: a kernel that multiplies about as much as the case must, and loads nothing meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from perf.cases import READ, WGMMA, Operation
from perf.inputs import Inputs
from perf.providers.base import Candidate, Floor, require, sm_count_of


class Wgmma(Floor):
    """perf.wgmma_kernel on every SM, in several shapes, with the number of loop turns that comes nearest to the case's FLOP.

    The FLOP differ by at most 0.13% in the named cases on 132 SMs. The time includes the launch and the load of two tiles.
    """

    name: ClassVar[str] = WGMMA
    operation: ClassVar[Operation] = "attention"

    def version(self) -> str:
        return "perf.wgmma_kernel"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        from perf.wgmma_kernel import LOOP_SHAPES, compile_loop

        require(inputs.case.long, f"the memory limits it: {READ} is its floor")
        device = inputs.sets[0].q.device
        sm_count = sm_count_of(device)
        random = torch.Generator(device).manual_seed(0)
        candidates = []
        for shape in LOOP_SHAPES:
            turns = shape.turns(1e12 * inputs.case.tflop, sm_count)
            operands = [torch.randn(dims, generator=random, device=device).bfloat16() for dims in shape.operand_shapes]
            out = torch.empty((1, shape.rows, shape.columns), device=device)
            call = partial(compile_loop(shape), *operands, out, sm_count, turns, 0)
            detail = {"shape": shape.label, "num_ctas": sm_count, "turns": turns}
            candidates.append(Candidate([call] * len(inputs.sets), detail))
        return candidates
