"""The work of a layer in a step, as calls over tensors of this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api.attention import decode_attention, paged_attention
from ..api.functional import append_kv
from ..errors import InvalidArgument
from ..kv.page_table import PageTable
from ..kv.types import KVDtype
from .models import Layers, Model

DTYPE = torch.bfloat16
L2_BYTES = 256 << 20  # bytes that calls read before one reads the same bytes again, so that no cache serves it


@dataclass(frozen=True)
class Size:
    """`batch` requests of `context` tokens each, including the new token; prompt: tokens of the one prompt."""

    batch: int
    context: int
    prompt: int


@dataclass(frozen=True)
class Job:
    """calls: one per set of inputs. nbytes: bytes that a call must read and write; flops: of its products; count: layers."""

    name: str
    calls: tuple[Callable[[], object], ...]
    nbytes: int
    flops: int
    count: int


class Bench:
    """The layers of a model on a device, with pages of page_size tokens stored as kv_dtype; None stands for bf16."""

    def __init__(self, model: Model, size: Size, page_size: int, kv_dtype: KVDtype | None, device: torch.device) -> None:
        self.model, self.size, self.page_size, self.device = model, size, page_size, device
        self.stored = DTYPE if kv_dtype is None else kv_dtype.torch_dtype
        self.pages = -(-size.context // page_size)
        self.sets = max(1, min(8, -(-L2_BYTES // self._cache_bytes(size.context))))
        self._check_memory()
        axes = (self.sets * size.batch * self.pages, model.num_kv_heads, page_size, model.head_dim)
        self.k_cache, self.v_cache = (self._values(axes).to(self.stored) for _ in range(2))
        order = torch.randperm(axes[0], device=device).int()
        self.tables = order.view(self.sets, size.batch, self.pages).unbind()
        self.seq_lens = torch.full((size.batch,), size.context, dtype=torch.int32, device=device)
        self.sinks = torch.randn(model.num_heads, device=device) if model.sinks else None
        one = torch.ones(1, device=device)
        self.scales: dict[str, Any] = {} if kv_dtype is None else {"k_scale": one, "v_scale": one}

    def jobs(self) -> Iterator[Job]:
        """The append, then a decode step in each kind of layer, then a prompt in each kind."""
        yield self._append()
        for layers in self.model.layers:
            yield self._decode(layers)
        for layers in self.model.layers:
            yield self._prompt(layers)

    def _decode(self, layers: Layers) -> Job:
        m, batch = self.model, self.size.batch
        seen = min(self.size.context, layers.window or self.size.context)
        q, out = self._values((batch, m.num_heads, m.head_dim)), self._values((batch, m.num_heads, m.head_dim))
        options = {**self._scores(layers), **self.scales, "out": out, "seq_lens": self.seq_lens}
        calls = tuple(partial(decode_attention, q, self.k_cache, self.v_cache, page_table=t, **options) for t in self.tables)
        flops = 4 * batch * m.num_heads * m.head_dim * seen
        return Job(f"decode{_of(layers)}", calls, self._cache_bytes(seen) + 2 * q.nbytes, flops, layers.count)

    def _append(self) -> Job:
        m = self.model
        k, v = (self._values((self.size.batch, m.num_kv_heads, m.head_dim)) for _ in range(2))
        tables = [PageTable.dense(table, self.seq_lens) for table in self.tables]
        calls = tuple(partial(append_kv, k, v, self.k_cache, self.v_cache, table, **self.scales) for table in tables)
        nbytes = k.nbytes + v.nbytes + self._cache_bytes(1)
        return Job("append", calls, nbytes, 0, sum(layers.count for layers in m.layers))

    def _prompt(self, layers: Layers) -> Job:
        m, rows = self.model, self.size.prompt
        q = self._values((rows, m.num_heads, m.head_dim))
        k, v = (self._values((rows, m.num_kv_heads, m.head_dim)) for _ in range(2))
        indptr = torch.tensor([0, rows], dtype=torch.int32, device=self.device)
        options = {**self._scores(layers), "qo_indptr": indptr, "max_q_len": rows, "out": torch.empty_like(q)}
        call = partial(paged_attention, q, k, v, page_table=PageTable.packed(indptr), **options)
        window = min(rows, layers.window or rows)
        seen = window * (window + 1) // 2 + (rows - window) * window
        nbytes = 2 * q.nbytes + k.nbytes + v.nbytes
        return Job(f"prompt of {rows:,}{_of(layers)}", (call,), nbytes, 4 * m.num_heads * m.head_dim * seen, layers.count)

    def _scores(self, layers: Layers) -> dict[str, Any]:
        window_left = None if layers.window is None else layers.window - 1
        return {"window_left": window_left, "softcap": self.model.softcap, "sinks": self.sinks}

    def _cache_bytes(self, tokens: int) -> int:
        """Bytes of K and V for `tokens` tokens of each request."""
        return 2 * self.size.batch * tokens * self.model.num_kv_heads * self.model.head_dim * self.stored.itemsize

    def _values(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self.device)

    def _check_memory(self) -> None:
        """Raises InvalidArgument if the caches, and the bf16 values that they are rounded from, do not fit."""
        if self.device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self.device)
        needed = self.sets * self._cache_bytes(self.pages * self.page_size)
        needed += 0 if self.stored is DTYPE else needed // self.stored.itemsize
        if needed > 0.9 * free:
            sizes = f"{self.size.batch} x {self.size.context:,} tokens of a layer take {needed / 1e9:.1f} GB"
            raise InvalidArgument("batch", f"{sizes}, and {free / 1e9:.1f} GB are free: ask for fewer or shorter requests")


def _of(layers: Layers) -> str:
    return "" if layers.window is None else f", window {layers.window:,}"
