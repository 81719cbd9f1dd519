"""Decodes a batch of rows of different lengths through a paged KV cache and a PagedDecodePlan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import cute_kernels as ck

from .model import ByteLM, attend_whole_prefix

PAGE_SIZE = 16


class PagedDecoder:
    """The model, one pool of f16 pages a layer, and the plan that attends over them.

    Pools are HND [num_layers, pages, num_kv_heads, page_size, head_dim]. Rows own shuffled pages, the same ones in each layer.
    """

    def __init__(self, model: ByteLM, batch_size: int, capacity: int, device: str) -> None:
        """capacity: tokens that a row can hold."""
        config, max_pages = model.config, -(-capacity // PAGE_SIZE)
        self.model, self.device = model, device
        self.plan = ck.PagedDecodePlan.select(
            ck.PagedDecodeDescriptor(
                batch_size=batch_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                page_size=PAGE_SIZE,
                q_dtype=torch.float16,
                layout=ck.KVLayout.HND,
                max_seq_len=capacity,
            ),
            device=device,
        )
        num_pages = batch_size * max_pages
        pool = (config.num_layers, num_pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        self.k_cache = torch.zeros(pool, dtype=torch.float16, device=device)
        self.v_cache = torch.zeros_like(self.k_cache)
        pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
        self.table = pages.view(batch_size, max_pages).to(device)
        self.seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.page_table = ck.PageTable.dense(self.table, self.seq_lens)
        self.rows = torch.arange(batch_size, device=device)
        self.out = torch.empty(batch_size, config.num_heads, config.head_dim, dtype=torch.float16, device=device)
        self.lse = torch.empty(batch_size, config.num_heads, dtype=torch.float32, device=device)
        self.workspace = torch.empty(self.plan.workspace_size(), dtype=torch.uint8, device=device)

    def prefill(self, prompts: Sequence[bytes]) -> Tensor:
        """Fills the cache with the prompts, one a row, and returns the logits f32 [batch, 256] of what follows them."""
        last = []
        for row, prompt in enumerate(prompts):
            tokens = torch.tensor([list(prompt)], device=self.device)
            positions = torch.arange(len(prompt), device=self.device)
            attend = partial(self._attend_prompt, torch.full_like(positions, row), positions)
            last.append(self.model(tokens, positions[None], attend)[0, -1])
        self.seq_lens.copy_(torch.tensor([len(p) for p in prompts], dtype=torch.int32))
        return torch.stack(last)

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token a row, int64 [batch], and returns the logits f32 [batch, 256] of the next. No host-device sync."""
        positions = self.seq_lens.long()
        self.seq_lens += 1
        return self.model(tokens[:, None], positions[:, None], self._attend_paged)[:, 0]

    def _attend_prompt(self, rows: Tensor, positions: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._append(layer, rows, positions, k[0], v[0])
        return attend_whole_prefix(layer, q, k, v)

    def _attend_paged(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._append(layer, self.rows, self.seq_lens.long() - 1, k[:, 0], v[:, 0])
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

    def _append(self, layer: int, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v [n, num_kv_heads, head_dim] as f16 at int64 [n] positions of rows [n]."""
        pages, slots = self.table[rows, positions // PAGE_SIZE].long(), positions % PAGE_SIZE
        self.k_cache[layer, pages, :, slots] = k.half()
        self.v_cache[layer, pages, :, slots] = v.half()
