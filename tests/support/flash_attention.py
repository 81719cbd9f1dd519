"""flash-attention's semantics in dense f64 PyTorch, one request and row at a time: shares nothing with the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """window: (left, right), negative for no bound. slopes, sinks: [num_heads]. first: keys before it are not seen."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    def sees(self, position: int, key: int) -> bool:
        left, right = self.window
        return not (
            (self.causal and key > position)
            or (left >= 0 and key < position - left)
            or (not self.causal and right >= 0 and key > position + right)
        )


def dense(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks, first: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """q [rows, num_heads, dim], k and v [keys, num_kv_heads, dim] of one request -> (out as q, lse [rows, num_heads]).

    Row i of n stands at position keys - n + i. first: keys before it are padding, which no row sees.
    """
    rows, heads, dim = q.shape
    group, scale = heads // k.shape[1], dim**-0.5 if masks.scale is None else masks.scale
    out = torch.zeros(rows, heads, dim, dtype=dtype, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=dtype, device=q.device)
    for row in range(rows):
        position = len(k) - rows + row
        seen = [key for key in range(first, len(k)) if masks.sees(position, key)]
        for head in range(heads):
            keys = k[seen, head // group].to(dtype)
            scores = (keys @ q[row, head].to(dtype)) * scale
            if masks.softcap:
                scores = masks.softcap * torch.tanh(scores / masks.softcap)
            if masks.slopes is not None:
                far = (torch.tensor(seen, device=q.device) - position).abs().to(dtype)
                scores = scores - masks.slopes[head].to(dtype) * far
            joined = scores if masks.sinks is None else torch.cat([scores, masks.sinks[head : head + 1].to(dtype)])
            if not len(joined):
                continue
            lse[row, head] = joined.logsumexp(0)
            if seen:
                out[row, head] = (scores - lse[row, head]).exp() @ v[seen, head // group].to(dtype)
    return out, lse


@dataclass
class Filled:
    """A cache whose rows hold `lengths` tokens, with NaN in slots that no row owns.

    k, v: [rows, room, num_kv_heads, dim], or pages with a page_table int32 [rows, max_pages]; its entries past a row are invalid.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    lengths: Tensor

    def tokens(self, cache: Tensor, row: int) -> Tensor:
        """All slots of a row, [room, num_kv_heads, dim]."""
        if self.page_table is None:
            return cache[row]
        pages = self.page_table[row]
        return cache[pages[(pages >= 0) & (pages < len(cache))].long()].flatten(0, 1)

    def held(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of a row's first tokens, on the CPU."""
        return self.tokens(self.k, row)[:length].cpu(), self.tokens(self.v, row)[:length].cpu()


def filled(
    lengths: tuple[int, ...],
    device: str,
    *,
    room: int = 64,
    page_size: int | None = None,
    heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    spare: int = 0,
) -> Filled:
    """A random cache, contiguous without a page_size. spare: slots that each row owns past its length."""
    generator = torch.Generator().manual_seed(len(lengths) + room)
    rows = torch.randn(2, len(lengths), room, heads, dim, generator=generator).to(torch.bfloat16)
    for row, length in enumerate(lengths):
        rows[:, row, length:] = torch.nan
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    if page_size is None:
        k, v = rows.to(dtype).to(device)
        return Filled(k, v, None, counts)
    columns = room // page_size
    pages = torch.full((2, len(lengths) * columns + 3, page_size, heads, dim), torch.nan, dtype=torch.bfloat16)
    table = torch.randperm(pages.shape[1], generator=generator)[: len(lengths) * columns].view(len(lengths), columns).int()
    pages[:, table.flatten().long()] = rows.view(2, -1, page_size, heads, dim)
    for row, length in enumerate(lengths):
        table[row, -(-(length + spare) // page_size) :] = 2**31 - 1
    k, v = pages.to(dtype).to(device)
    return Filled(k, v, table.to(device), counts)
