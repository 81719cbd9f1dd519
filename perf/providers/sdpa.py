"""torch.nn.functional.scaled_dot_product_attention over a contiguous cache: the alternative to a paged kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perf.cases import Operation
from perf.correctness import PEERS, Tolerance
from perf.inputs import Inputs, InputSet
from perf.providers.base import Candidate, Result, require, require_scores, require_sm90, require_storage, try_once


class Sdpa:
    """PyTorch's SDPA. K and V of a paged case are gathered beforehand, outside the timing, in SDPA's favour."""

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


class PromptBySdpa:
    """A backend of PyTorch's SDPA: whole causal prompts over contiguous keys."""

    operation: ClassVar[Operation] = "attention"
    tolerance: ClassVar[Tolerance | None] = PEERS
    reads_unused: ClassVar[bool] = False
    backend: ClassVar[SDPBackend]

    def available(self) -> str | None:
        return require_sm90()

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        case = inputs.case
        require_storage(case)
        require_scores(case)
        require(case.page_size == 0, "its keys are contiguous")
        require(set(case.tokens()) == {case.q_rows}, "it knows no tokens before the first query row")
        calls = [partial(self.attend, s, inputs.softmax_scale) for s in inputs.sets]
        try_once(calls[0], RuntimeError)  # PyTorch raises it for a backend without a kernel
        return [Candidate(calls)]

    def attend(self, s: InputSet, softmax_scale: float) -> Result:
        """One call: q [batch, q rows, num_heads, head_dim], K and V [batch, num_kv_heads, tokens, head_dim]."""
        with sdpa_kernel(self.backend):
            out = F.scaled_dot_product_attention(
                s.q.transpose(1, 2), s.k, s.v, is_causal=True, scale=softmax_scale, enable_gqa=True
            )
        return out.transpose(1, 2), None


class Cudnn(PromptBySdpa):
    """cuDNN's attention through PyTorch."""

    name: ClassVar[str] = "cudnn"
    backend: ClassVar[SDPBackend] = SDPBackend.CUDNN_ATTENTION

    def version(self) -> str:
        return f"cuDNN {torch.backends.cudnn.version()}, PyTorch {torch.__version__}"


class FlashAttention2(PromptBySdpa):
    """FlashAttention-2 (Dao 2023) as PyTorch carries it: the SM80 variant is compared with it."""

    name: ClassVar[str] = "fa2"
    backend: ClassVar[SDPBackend] = SDPBackend.FLASH_ATTENTION

    def version(self) -> str:
        return f"PyTorch {torch.__version__}"
