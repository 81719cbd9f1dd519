"""The competitors by name, in the order in which they are gated: those that must not read unused memory come first."""

from perf.providers.base import Candidate, CompilesAhead, NotSupported, Provider
from perf.providers.flash_attention import FlashAttention3
from perf.providers.flashinfer import FlashInferFa2, FlashInferXqa
from perf.providers.ours import Ours, OursSm80
from perf.providers.read import Read
from perf.providers.sdpa import Sdpa
from perf.providers.vllm_triton import VllmTriton

PROVIDERS: dict[str, type[Provider]] = {
    cls.name: cls for cls in (Ours, OursSm80, Read, Sdpa, FlashInferFa2, FlashInferXqa, FlashAttention3, VllmTriton)
}

__all__ = ["PROVIDERS", "Candidate", "CompilesAhead", "NotSupported", "Provider"]
