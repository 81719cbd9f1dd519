"""The reference of FlashInfer's tests, in dense f32 PyTorch: shares nothing with the package."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ROWS = 256  # query rows that are scored at a time


def alibi_slopes(num_heads: int) -> Tensor:
    """f32 [num_heads], as in the paper: the slopes of the largest power of two of heads, then every other slope of twice that."""
    n = 2 ** int(math.log2(num_heads))
    ratio, finer = 2.0 ** (-8 / n), 2.0 ** (-4 / n)
    return torch.tensor([ratio ** (i + 1) if i < n else finer ** (2 * (i - n) + 1) for i in range(num_heads)])


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    custom_mask: Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    pos_encoding_mode: str = "NONE",
    sm_scale: float | None = None,
    **_options: Any,
) -> Tensor:
    """q [rows, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim] -> out like q; the last row is at the last key."""
    tokens, rows, group_size = len(k), len(q), q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group_size, dim=1) for t in (k, v))
    row_position = torch.arange(tokens - rows, tokens, device=q.device)[:, None]
    distance = row_position - torch.arange(tokens, device=q.device)  # [rows, tokens]
    seen = torch.ones_like(distance, dtype=torch.bool) if custom_mask is None else custom_mask.view(rows, tokens).bool()
    if causal:
        seen &= distance >= 0
    if window_left >= 0:
        seen &= distance <= window_left
    outs = []
    for some, gap, visible in zip(q.split(ROWS), distance.split(ROWS), seen.split(ROWS), strict=True):
        scores = torch.einsum("qhd,khd->hqk", some.float(), k) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
        if pos_encoding_mode == "ALIBI":
            scores -= alibi_slopes(q.shape[1]).to(q.device)[:, None, None] * gap
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()  # 0 for a row that sees no key
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype))
    return torch.cat(outs)


def single_decode_with_kv_cache(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """q [num_heads, head_dim] -> out like q."""
    return single_prefill_with_kv_cache(q[None], k, v, **options)[0]


class BatchPrefillWithPagedKVCacheWrapper:
    """Attends to requests one by one, over NHD pages."""

    def __init__(self, _workspace: Tensor, kv_layout: str = "NHD", **_options: Any) -> None:
        assert kv_layout == "NHD"

    def plan(self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **scores: Any) -> None:
        self.rows, self.bounds, self.indices = qo_indptr.tolist(), indptr.tolist(), indices
        self.last, self.scores = last_page_len.tolist(), scores

    def run(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        k, v = paged_kv_cache.unbind(1) if isinstance(paged_kv_cache, Tensor) else paged_kv_cache
        out = torch.empty_like(q)
        for request, last in enumerate(self.last):
            pages = self.indices[self.bounds[request] : self.bounds[request + 1]].long()
            length = (len(pages) - 1) * k.shape[1] + last
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
            rows = slice(self.rows[request], self.rows[request + 1])
            out[rows] = single_prefill_with_kv_cache(q[rows], keys, values, **self.scores)
        return out
