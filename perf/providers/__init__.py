"""The competitors by name, in the order in which they are gated: competitors that must not read unused memory come first.

One name may stand for a competitor in each operation.
"""

from collections.abc import Sequence

from perf.cases import PLAIN
from perf.providers.append import Copy, OursAppend, OursSm80Append
from perf.providers.backward import FlashAttention4Backward, OursBackward, OursSm80Backward
from perf.providers.base import Candidate, CompilesAhead, NotSupported, Provider
from perf.providers.flash_attention import FlashAttention3, FlashAttention3Attention
from perf.providers.flash_attention_4 import FlashAttention4
from perf.providers.flashinfer import FlashInferFa2, FlashInferXqa
from perf.providers.flashinfer_attention import Fa2Attention, Fa3Attention, XqaAttention
from perf.providers.ours import Ours, OursAttention, OursParts, OursPlain, OursSm80, OursSm80Attention, OursWide
from perf.providers.read import Read, ReadAttention
from perf.providers.sdpa import Cudnn, FlashAttention2, Sdpa
from perf.providers.vllm_triton import VllmTriton
from perf.providers.weights import OursSm80Weights, OursWeights, ReadWeights
from perf.providers.wgmma import Wgmma

PEER_DECODERS: tuple[type[Provider], ...] = (FlashInferFa2, FlashInferXqa, FlashAttention3, VllmTriton)
DECODERS: tuple[type[Provider], ...] = (Ours, OursSm80, Read, Sdpa, *PEER_DECODERS)
OURS_ATTENDING: tuple[type[Provider], ...] = (OursAttention, OursPlain, OursWide, OursParts, OursSm80Attention)
FLOORS_OF_ATTENTION: tuple[type[Provider], ...] = (ReadAttention, Wgmma)
PEER_ATTENDERS: tuple[type[Provider], ...] = (
    *(Fa2Attention, Fa3Attention, XqaAttention),
    *(FlashAttention3Attention, FlashAttention4, Cudnn, FlashAttention2),
)
ATTENDERS: tuple[type[Provider], ...] = (*OURS_ATTENDING, *FLOORS_OF_ATTENTION, *PEER_ATTENDERS)
APPENDERS: tuple[type[Provider], ...] = (OursAppend, OursSm80Append, Copy)
WEIGHERS: tuple[type[Provider], ...] = (OursWeights, OursSm80Weights, ReadWeights)
GRADERS: tuple[type[Provider], ...] = (OursBackward, OursSm80Backward, FlashAttention4Backward)
ALL = (*DECODERS, *ATTENDERS, *APPENDERS, *WEIGHERS, *GRADERS)
PROVIDERS: dict[str, type[Provider]] = {cls.name: cls for cls in DECODERS}
PROVIDER_NAMES = tuple(dict.fromkeys(cls.name for cls in ALL))


def providers_of(names: Sequence[str]) -> list[Provider]:
    """One instance of each competitor with one of `names`, in every operation. Raises ValueError for a name that none has.

    Plain decode comes with `ours`, since our attention is compared with it.
    """
    for name in names:
        if name not in PROVIDER_NAMES:
            raise ValueError(f"providers: {name!r} is none of {', '.join(PROVIDER_NAMES)}")
    wanted = {*names, PLAIN} if Ours.name in names else {*names}
    return [cls() for cls in ALL if cls.name in wanted]


__all__ = ["PROVIDERS", "PROVIDER_NAMES", "Candidate", "CompilesAhead", "NotSupported", "Provider", "providers_of"]
