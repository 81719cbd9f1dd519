"""transformers' own attention, for layers that no plan serves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .engine import moved, part, tell_once


class Own:
    """transformers' own attention and mask for sdpa. `take_own` fills this class, since a compiler cannot trace an import."""

    attention: ClassVar[Callable[..., Any]]
    mask: ClassVar[Callable[..., Any]]


def take_own() -> None:
    """Fills `Own` with the functions of the installed transformers."""
    Own.attention = staticmethod(part("integrations.sdpa_attention").sdpa_attention_forward)
    Own.mask = staticmethod(part("masking_utils").sdpa_mask)


def tell_fallback(why: str) -> None:
    """Writes one line to the log for each reason; none while a compiler traces."""
    if not torch.compiler.is_compiling():
        tell_once(f"cute_kernels: {why}: this is attended to by transformers' own attention")


def own_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: dict[str, Any], **others: Any
) -> tuple[Tensor, Any]:
    """Runs sdpa, or the eager attention of the model's file if there is a soft cap or sinks, which sdpa lacks.

    mask: as transformers makes it for sdpa. scores: dropout, scaling, is_causal, sliding_window, softcap and s_aux.
    """
    if scores["softcap"] is None and scores["s_aux"] is None:
        result: tuple[Tensor, Any] = Own.attention(module, query, key, value, mask, **scores, **others)
        return result
    result = _eager(module)(module, query, key, value, _added(mask, query, key), **scores, **others)
    return result[0], None


def _eager(module: Any) -> Callable[..., Any]:
    """Returns eager_attention_forward from the file of a layer's class, or from the file of a class that it is derived from.

    Raises Unsupported if no such file has the function.
    """
    for each in type(module).__mro__:
        eager: Callable[..., Any] | None = getattr(sys.modules.get(each.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise moved(f"{type(module).__module__}.eager_attention_forward", "is not there, which soft caps and sinks need")


def _added(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """A mask as a term that is added to scores. None stands for sdpa's: row i sees keys 0 to i; a single row sees all keys."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device)
        mask = (mask.tril() if q_len > 1 else mask)[None, None]
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
