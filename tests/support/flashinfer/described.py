"""What FlashInfer's plan() is given, in the words of our descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import cute_kernels as ck

KV_DTYPES = {kv_dtype.torch_dtype: kv_dtype for kv_dtype in ck.KVDtype}


class Refused(NotImplementedError):
    """A combination that the plans leave out on purpose."""


@dataclass(frozen=True)
class Heads:
    """Sizes and types of a planned call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    def fields(self) -> dict[str, Any]:
        """What every descriptor is given of it."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "q_dtype": self.q_dtype,
            "kv_dtype": KV_DTYPES[self.kv_dtype],
        }


@dataclass(frozen=True)
class Scores:
    """What FlashInfer's plan() says of scores."""

    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    sm_scale: float | None = None

    @property
    def alibi(self) -> bool:
        return self.pos_encoding_mode == "ALIBI"

    @property
    def softcap(self) -> float | None:
        return self.logits_soft_cap or None

    @property
    def modified(self) -> bool:
        """Whether they are more than scaled and causal."""
        return self.window_left >= 0 or self.softcap is not None or self.pos_encoding_mode != "NONE"

    def fields(self, sinks: bool) -> dict[str, Any]:
        """What every descriptor is given of it; raises Refused for what the plans leave out."""
        if self.pos_encoding_mode not in ("NONE", "ALIBI"):
            raise Refused(f"pos_encoding_mode {self.pos_encoding_mode}: rotary positions are applied before attention")
        if self.alibi and self.softcap is not None:
            raise Refused("ALiBi beside a cap: FlashInfer adds the bias before its cap")
        if self.alibi and not self.causal:
            raise Refused("ALiBi without a causal mask: FlashInfer's bias goes on growing for keys ahead of the query")
        return {
            "window_left": self.window_left if self.window_left >= 0 else None,
            "softcap": self.softcap,
            "alibi": self.alibi,
            "sinks": sinks,
            "softmax_scale": self.sm_scale,
            "lse_base": "2",
        }


def refuse_the_rest(options: dict[str, Any]) -> None:
    """Raises Refused for an option of plan() or run() that has another value than its default and no counterpart here."""
    ignored = {"non_blocking", "rope_scale", "rope_theta", "enable_pdl", "disable_split_kv", "fixed_split_size", "backend"}
    ignored |= {"use_tensor_cores"}
    for name, value in options.items():
        if name not in ignored and value is not None and value is not False:
            raise Refused(f"{name}: the plans have no such option")
