"""torch.nn.functional.scaled_dot_product_attention over a contiguous cache: what one gets without a paged kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from perf.cases import Operation
from perf.correctness import PEERS, Tolerance
from perf.inputs import Inputs
from perf.providers.base import Candidate, Result, require, require_storage


class Sdpa:
    """K and V of a paged case are gathered beforehand, outside the timing: generous to SDPA."""

    name: ClassVar[str] = "sdpa"
    operation: ClassVar[Operation] = "decode"
    tolerance: ClassVar[Tolerance | None] = PEERS
    reads_unused: ClassVar[bool] = False

    def available(self) -> str | None:
        return None

    def version(self) -> str:
        return str(torch.__version__)

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        lengths = set(inputs.case.tokens())
        require_storage(inputs.case)
        require(len(lengths) == 1, f"rows of {len(lengths)} different lengths need padding and a mask")
        return [Candidate([self._call(inputs, index) for index in range(len(inputs.sets))])]

    def _call(self, inputs: Inputs, index: int) -> Callable[[], Result]:
        q = inputs.sets[index].q[:, :, None]
        rows = [inputs.row(index, row) for row in range(len(q))]
        k, v = (torch.stack(tensors) for tensors in zip(*rows, strict=True))

        def call() -> Result:
            out = F.scaled_dot_product_attention(q, k, v, scale=inputs.softmax_scale, enable_gqa=True)
            return out[:, :, 0], None

        return call
