"""The mask that transformers makes once per forward: only the keys' number, if kernels know the pattern of the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidProblem
from .fallback import Own, tell_fallback

FULL, SLIDING = 1, 2  # the first extent of a mask of lengths


class Lengths(NamedTuple):
    """seq_lens: int32 [batch], the keys of each request; its new tokens count.

    window: int32 [1], how many keys a row sees, and its own key counts; None if a row sees all keys up to its own.
    """

    seq_lens: Tensor
    window: Tensor | None

    @property
    def sliding(self) -> bool:
        """Whether a window hides keys."""
        return self.window is not None


def lengths_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **pattern: Any,
) -> Tensor | None:
    """transformers' mask interface: returns int32 lengths [1 or 2, 1, 1, batch], or transformers' own mask for sdpa.

    Query row i stands at q_offset + i, key j at kv_offset + j. Lengths say that a row sees all keys up to its own. A mask whose
    first extent is SLIDING has in its second row the window: how many keys a row sees. transformers passes a mask of four axes
    on unchanged. transformers describes the mask in `pattern`: allow_is_causal_skip is False for rows that see more or less, but
    also for one row over a static cache; use_vmap is True for a caller's mask function; local_size is a window or a chunk.

    Left padding, chunks, packed sequences and bidirectional rows get sdpa's mask. Reads the device if there is a padding mask
    and no compiler traces.
    """
    device = pattern.get("device", "cpu")
    why = _not_lengths(q_length, attention_mask, pattern)
    if why:
        tell_fallback(why)
        operands = (batch_size, q_length, kv_length, q_offset, kv_offset)
        more = {} if mask_function is None else {"mask_function": mask_function}
        mask: Tensor | None = Own.mask(*operands, attention_mask=attention_mask, **more, **pattern)
        return mask
    keys = q_offset + q_length - kv_offset
    if isinstance(keys, Tensor):
        lengths = keys.to(device=device, dtype=torch.int32).clamp(max=kv_length)
        lengths = lengths.reshape(1, 1, 1, 1).expand(1, 1, 1, batch_size).contiguous()
    else:
        lengths = torch.full((1, 1, 1, batch_size), min(keys, kv_length), dtype=torch.int32, device=device)
    window = pattern.get("local_size")
    return lengths if window is None else torch.cat([lengths, torch.full_like(lengths, window)])


def lengths_of(mask: Tensor | None, batch: int) -> Lengths | None:
    """Returns the lengths that `lengths_mask` has put into a mask for `batch` requests, or None for a mask that sdpa takes.

    Raises InvalidProblem for any other mask of integers: a caller gave it, or a layer made it from lengths.
    """
    if mask is None or mask.dtype is torch.bool or mask.is_floating_point():
        return None
    if mask.dtype is not torch.int32 or tuple(mask.shape) not in ((FULL, 1, 1, batch), (SLIDING, 1, 1, batch)):
        rule = "must be bool, or of a floating-point dtype that is added to the scores"
        raise InvalidProblem("attention_mask", f"{mask.dtype} of shape {tuple(mask.shape)}", rule)
    return Lengths(mask[0, 0, 0], mask[1, 0, 0, :1] if mask.shape[0] == SLIDING else None)


def dense_mask(lengths: Lengths, q_length: int, kv_length: int) -> Tensor:
    """The mask of `lengths` as sdpa takes it, bool [batch, 1, q_length, kv_length]."""
    keys = torch.arange(kv_length, device=lengths.seq_lens.device)
    rows = lengths.seq_lens[:, None] - q_length + torch.arange(q_length, device=keys.device)
    seen = keys <= rows[:, :, None]
    if lengths.window is not None:
        seen &= keys > rows[:, :, None] - lengths.window
    return seen[:, None]


def _not_lengths(q_length: int, attention_mask: Tensor | None, pattern: dict[str, Any]) -> str | None:
    """The reason why lengths cannot describe a mask; None if they can."""
    plain = pattern.get("allow_is_causal_skip") or (q_length == 1 and "allow_is_causal_skip" in pattern)
    if "allow_is_bidirectional_skip" in pattern or pattern.get("use_vmap", True) or not plain:
        return "query rows that see other keys than those up to their own"
    if pattern.get("local_size") is not None and getattr(pattern.get("config"), "attention_chunk_size", None) is not None:
        return "attention within chunks (attention_chunk_size)"
    if attention_mask is None:
        return None
    if torch.compiler.is_compiling():
        return "an attention_mask in a compiled model, which may hide tokens"
    return None if bool(attention_mask.all()) else "a batch whose mask hides tokens (padding, or drafts that were rejected)"
