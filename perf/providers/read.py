"""The floor: a kernel that reads as many bytes as the case has to, and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from perf.cases import READ, WGMMA, Operation
from perf.inputs import Inputs
from perf.providers.base import Candidate, Floor, require, sm_count_of


class Read(Floor):
    """perf.read_kernel over the first kv_bytes / 2 bytes of K and of V, each with its scales, in several launch shapes.

    For attention it also reads q twice: for q, and for the result.

    Version 2 also has shapes with programmatic dependent launch, which lowers the floor of small cases.
    """

    name: ClassVar[str] = READ
    operation: ClassVar[Operation] = "decode"

    def version(self) -> str:
        return "perf.read_kernel 2"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        from perf.read_kernel import READ_SHAPES, VECTOR_BYTES, compile_read

        require(not inputs.case.long, f"the tensor core limits long queries: {WGMMA} stands in its place")
        num_vectors = inputs.case.kv_bytes // (2 * VECTOR_BYTES)
        buffers = []
        for s in inputs.sets:
            beside = (s.q,) if inputs.case.operation == "attention" else ()
            buffers.append((vectors(s.k, s.k_scale, num_vectors, *beside), vectors(s.v, s.v_scale, num_vectors, *beside)))
        device = inputs.sets[0].k.device
        sink = torch.zeros(1, dtype=torch.int32, device=device)
        sm_count = sm_count_of(device)
        candidates = []
        for shape in READ_SHAPES:
            read = compile_read(shape.threads, shape.unroll, shape.overlap)
            num_ctas = shape.num_ctas(num_vectors, sm_count)
            calls = [partial(read, k, v, sink, num_ctas) for k, v in buffers]
            candidates.append(Candidate(calls, {"shape": shape.label, "num_ctas": num_ctas}))
        return candidates


class ReadAttention(Read):
    """The read kernel as the floor of attention."""

    operation: ClassVar[Operation] = "attention"


def vectors(cache: torch.Tensor, scale: torch.Tensor | None, count: int, *beside: torch.Tensor) -> torch.Tensor:
    """The first `count` 16-byte vectors of a compact cache, as int32 [count, 4].

    With a scale or `beside`, they are those of a copy in which these tensors come before the cache.
    """
    stream = cache.view(-1).view(torch.uint8)[: 16 * count]
    parts = [tensor.view(-1).view(torch.uint8) for tensor in (scale, *beside) if tensor is not None]
    if parts:
        stream = torch.cat([*parts, stream])
    return stream[: 16 * count].view(torch.int32).view(-1, 4)
