"""The model over a paged KV cache: one new token per row through a PagedDecodePlan, several through a PagedAttentionPlan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck

from .model import ByteLM, attend_whole_prefix

PAGE_SIZE = 16


class PagedModel:
    """The model, and one pool of f16 pages per layer.

    Pools are HND [num_layers, pages, num_kv_heads, page_size, head_dim]. Rows own shuffled pages, the same pages in each layer.
    """

    def __init__(self, model: ByteLM, batch_size: int, capacity: int, device: str) -> None:
        """Allocates the pools. capacity: tokens that a row can hold."""
        config, max_pages = model.config, -(-capacity // PAGE_SIZE)
        self.model, self.device = model, device
        num_pages = batch_size * max_pages
        pool = (config.num_layers, num_pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        self.k_cache = torch.zeros(pool, dtype=torch.float16, device=device)
        self.v_cache = torch.zeros_like(self.k_cache)
        pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
        self.table = pages.view(batch_size, max_pages).to(device)
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.page_table = ck.PageTable.dense(self.table, self.seq_lens)
        self.shape: dict[str, Any] = {  # the fields that every attention descriptor over this cache has
            "batch_size": batch_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": PAGE_SIZE,
            "q_dtype": torch.float16,
            "layout": ck.KVLayout.HND,
            "max_seq_len": capacity,
        }

    def prefill(self, prompts: Sequence[bytes]) -> Tensor:
        """Fills the cache with the prompts, one per row, and returns the logits f32 [batch, 256] of the next tokens."""
        last = []
        for row, prompt in enumerate(prompts):
            tokens = torch.tensor([list(prompt)], device=self.device)
            positions = torch.arange(len(prompt), device=self.device)
            attend = partial(self._attend_prompt, torch.full_like(positions, row), positions)
            last.append(self.model(tokens, positions[None], attend)[0, -1])
        self.seq_lens.copy_(torch.tensor([len(p) for p in prompts], dtype=torch.int32))
        return torch.stack(last)

    def append(self, layer: int, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v [n, num_kv_heads, head_dim] as f16 at int64 [n] positions of rows [n]."""
        pages, slots = self.slots(rows, positions)
        self.k_cache[layer, pages, :, slots] = k.half()
        self.v_cache[layer, pages, :, slots] = v.half()

    def slots(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(pages, slots within them), int64 [n] each, for positions [n] of rows [n]."""
        return self.table[rows, positions // PAGE_SIZE].long(), positions % PAGE_SIZE

    def _attend_prompt(self, rows: Tensor, positions: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.append(layer, rows, positions, k[0], v[0])
        return attend_whole_prefix(layer, q, k, v)


class PagedDecoder(PagedModel):
    """One new token per row and step, through a PagedDecodePlan."""

    def __init__(self, model: ByteLM, batch_size: int, capacity: int, device: str) -> None:
        super().__init__(model, batch_size, capacity, device)
        config = model.config
        self.plan = ck.PagedDecodePlan.select(ck.PagedDecodeDescriptor(**self.shape), device=device)
        self.rows = torch.arange(batch_size, device=device)
        self.out = torch.empty(batch_size, config.num_heads, config.head_dim, dtype=torch.float16, device=device)
        self.lse = torch.empty(batch_size, config.num_heads, dtype=torch.float32, device=device)
        self.workspace = self.plan.new_workspace()

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token per row, int64 [batch]; returns the logits f32 [batch, 256] of the next. No host-device sync."""
        positions = self.seq_lens.long()
        self.seq_lens += 1
        return self.model(tokens[:, None], positions[:, None], self._attend_paged)[:, 0]

    def _attend_paged(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.append(layer, self.rows, self.seq_lens.long() - 1, k[:, 0], v[:, 0])
        out, _ = self.plan.run(
            q[:, 0].half(),
            self.k_cache[layer],
            self.v_cache[layer],
            self.page_table,
            out=self.out,
            lse=self.lse,
            workspace=self.workspace,
        )
        return out[:, None].float()


class PagedVerifier(PagedModel):
    """Several new tokens per row and step, their number differing by row, through one PagedAttentionPlan run per layer."""

    def __init__(self, model: ByteLM, batch_size: int, capacity: int, device: str, max_new: int, tree_mask: bool = False) -> None:
        """max_new: the most new tokens of a row in a step. tree_mask: whether they may be a tree of continuations."""
        super().__init__(model, batch_size, capacity, device)
        rows: dict[str, Any] = {"max_q_len": max_new, "query_format": "ragged", "causal": "bottom_right", "tree_mask": tree_mask}
        self.plan = ck.PagedAttentionPlan.select(ck.PagedAttentionDescriptor(**self.shape, **rows), device=device)
        self.workspace = self.plan.new_workspace()

    def verify(
        self, fed: Sequence[bytes], depths: Sequence[Sequence[int]] | None = None, tree_mask: Tensor | None = None
    ) -> Tensor:
        """Appends the tokens of `fed`, none or more per row, and returns the logits f32 [total, 256] of each one's next token.

        The rows' tokens lie end to end. depths: how many positions each token stands after its row's first new token (None: a
        chain's 0, 1, 2 ...). tree_mask: int32 [total, words], which new tokens of its row each token sees (None: those up to
        itself).
        """
        counts = torch.tensor([len(tokens) for tokens in fed])
        ends = counts.cumsum(0)
        rows = torch.arange(len(fed)).repeat_interleave(counts)
        offsets = torch.arange(len(rows)) - (ends - counts)[rows]  # a token's index among the new tokens of its row
        tokens = torch.tensor(list(b"".join(fed)), device=self.device)
        turns = offsets if depths is None else torch.tensor([depth for row in depths for depth in row])
        qo_indptr = torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()]).to(self.device)
        rows, offsets, turns = (t.to(self.device) for t in (rows, offsets, turns))
        before = self.seq_lens.long()[rows]
        self.seq_lens += counts.int().to(self.device)
        attend = partial(self._attend_new, rows, before + offsets, qo_indptr, tree_mask)
        return self.model(tokens[None], (before + turns)[None], attend)[0]

    def drop(self, counts: Sequence[int]) -> None:
        """Drops the last counts[i] tokens of each row i: values that the cache holds past a row's length are never read."""
        self.seq_lens -= torch.tensor(counts, dtype=torch.int32, device=self.device)

    def _attend_new(
        self,
        rows: Tensor,
        positions: Tensor,
        qo_indptr: Tensor,
        tree_mask: Tensor | None,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        self.append(layer, rows, positions, k[0], v[0])
        out, _ = self.plan.run(
            q[0].half(),
            self.k_cache[layer],
            self.v_cache[layer],
            self.page_table,
            qo_indptr=qo_indptr,
            tree_mask=tree_mask,
            workspace=self.workspace,
        )
        return out[None].float()
