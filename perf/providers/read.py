"""The floor: a kernel that reads as many bytes as the case has to, and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from perf.cases import READ, Operation
from perf.correctness import Tolerance
from perf.inputs import Inputs
from perf.providers.base import Candidate, require_sm90


class Read:
    """perf.read_kernel over the first kv_bytes / 2 bytes of K and of V, each with its scales, in several launch shapes.

    Version 2 has them with programmatic dependent launch too, which lowers the floor of small cases.
    """

    name: ClassVar[str] = READ
    operation: ClassVar[Operation] = "decode"
    tolerance: ClassVar[Tolerance | None] = None
    reads_unused: ClassVar[bool] = False

    def available(self) -> str | None:
        return require_sm90()

    def version(self) -> str:
        return "perf.read_kernel 2"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        from perf.read_kernel import READ_SHAPES, VECTOR_BYTES, compile_read

        num_vectors = inputs.case.kv_bytes // (2 * VECTOR_BYTES)
        pairs = [((s.k, s.k_scale), (s.v, s.v_scale)) for s in inputs.sets]
        buffers = [(vectors(*k, num_vectors), vectors(*v, num_vectors)) for k, v in pairs]
        device = inputs.sets[0].k.device
        sink = torch.zeros(1, dtype=torch.int32, device=device)
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        candidates = []
        for shape in READ_SHAPES:
            read = compile_read(shape.threads, shape.unroll, shape.overlap)
            num_ctas = shape.num_ctas(num_vectors, sm_count)
            calls = [partial(read, k, v, sink, num_ctas) for k, v in buffers]
            candidates.append(Candidate(calls, {"shape": shape.label, "num_ctas": num_ctas}))
        return candidates


def vectors(cache: torch.Tensor, scale: torch.Tensor | None, count: int) -> torch.Tensor:
    """The first `count` 16-byte vectors of a compact cache, as int32 [count, 4]; of a copy of both where it has scales."""
    stream = cache.view(-1).view(torch.uint8)
    if scale is not None:
        stream = torch.cat([scale.view(-1).view(torch.uint8), stream])
    return stream[: 16 * count].view(torch.int32).view(-1, 4)
