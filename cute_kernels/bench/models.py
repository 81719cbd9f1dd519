"""The attention layers of models, by the models' names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ..errors import InvalidArgument
from ..kv.types import KVDtype


class Stored(str, Enum):
    """The types that a cache may store when q is bf16."""

    bf16 = "bf16"
    e4m3 = "e4m3"
    e5m2 = "e5m2"
    int8 = "int8"

    @property
    def eight_bit(self) -> KVDtype | None:
        """The 8-bit type; None for q's own dtype."""
        return None if self is Stored.bf16 else KVDtype(self.value)


@dataclass(frozen=True)
class Layers:
    """How many layers of one kind a model has. window: keys that a row sees, its own included; None: all."""

    count: int
    window: int | None = None


@dataclass(frozen=True)
class Model:
    """A model's attention as the config of its checkpoint says. softcap: of scores. sinks: whether each head has a sink."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layers, ...]
    softcap: float | None = None
    sinks: bool = False


MODELS = {
    "llama-3-8b": Model(32, 8, 128, (Layers(32),)),
    "llama-3-70b": Model(64, 8, 128, (Layers(80),)),
    "mistral-7b": Model(32, 8, 128, (Layers(32),)),
    "qwen3-8b": Model(32, 8, 128, (Layers(36),)),
    "qwen3-32b": Model(64, 8, 128, (Layers(64),)),
    "qwen3-30b-a3b": Model(32, 4, 128, (Layers(48),)),
    "gemma-2-9b": Model(16, 8, 256, (Layers(21), Layers(21, 4096)), softcap=50.0),
    "gpt-oss-20b": Model(64, 8, 64, (Layers(12), Layers(12, 128)), sinks=True),
    "gpt-oss-120b": Model(64, 8, 64, (Layers(18), Layers(18, 128)), sinks=True),
}


def model_named(name: str) -> Model:
    """The model `name`. Raises InvalidArgument for a name that is not one of MODELS."""
    if name.lower() not in MODELS:
        raise InvalidArgument("model", f"{name!r} is not one of {', '.join(MODELS)}")
    return MODELS[name.lower()]


def tokens_of(text: str) -> int:
    """The number in a text such as 8k, which is 8,192. Raises InvalidArgument for a text without one from 1 on."""
    found = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    count = int(found[1]) << {"": 0, "k": 10, "m": 20}[found[2]] if found else 0
    if not 1 <= count < 2**31:
        raise InvalidArgument("context", f"{text!r} is no number of tokens, such as 8k or 8192")
    return count
