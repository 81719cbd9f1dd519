"""vLLM's interfaces as far as a backend sees them, and an engine's steps over one cache tensor, checked by dense attention."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

from tests.support.flash_attention import Masks, dense
from tests.support.tolerance import check_states

BACKEND = "cute_kernels.integrations.vllm.backend"
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 32, 16
T = TypeVar("T")


class AttentionBackend:
    """The base class of a backend: default answers, and the collection of reasons."""

    @classmethod
    def validate_configuration(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, **more: Any
    ) -> list[str]:
        served: Any = cls
        answers = {
            "head_size": served.supports_head_size(head_size),
            "dtype": dtype in served.supported_dtypes,
            "kv_cache_dtype": kv_cache_dtype in served.supported_kv_cache_dtypes,
            "compute capability": served.supports_compute_capability(more["device_capability"]),
        }
        reasons = [f"{name} not supported" for name, served_too in answers.items() if not served_too]
        combination = served.supports_combination(head_size, dtype, kv_cache_dtype, block_size, False, False, False, False, None)
        return reasons + ([combination] if combination else [])


class AttentionMetadataBuilder(ABC, Generic[T]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.device = kv_cache_spec, device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> T: ...


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass
class MultipleOf:
    base: int


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


def put_in_place(monkeypatch: pytest.MonkeyPatch, backends: Any, register_backend: Callable[..., Any]) -> Any:
    """Replaces vllm by the stand-ins here; returns the package's backend module, imported over them."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.0.stand-in"},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": backends, "register_backend": register_backend},
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "NHD"},
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform batch"),
            "AttentionImpl": AttentionImpl,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "CommonAttentionMetadata": CommonAttentionMetadata,
            "MultipleOf": MultipleOf,
        },
    }
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, held in names.items():
        module = ModuleType(name)
        module.__dict__.update(held, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    module = import_module(BACKEND)
    monkeypatch.setitem(sys.modules, BACKEND, module)  # removed together with the stand-ins
    return module


@dataclass
class Requests:
    """A step. rows: each request's new tokens; lengths: its keys, new ones included. padding: empty requests, unowned tokens."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    padding: tuple[int, int] = (0, 0)


STEPS = {
    "decode": Requests((1, 1, 1, 1), (5, 16, 17, 40)),
    "padded decode": Requests((1, 1, 1), (33, 2, 16), (2, 2)),
    "decode with fewer tokens than requests": Requests((1, 0, 1), (33, 7, 16), (2, 0)),
    "prefill": Requests((7, 20, 1), (7, 20, 1)),
    "chunked prefill": Requests((4, 18), (20, 50)),
    "mixed": Requests((1, 1, 6, 17), (18, 47, 30, 17), (1, 3)),
    "drafts": Requests((3, 3, 3), (3, 20, 41)),
    "padded drafts": Requests((4, 4), (16, 35), (2, 8)),
}


@dataclass
class Layer:
    """The fields of a layer that a backend reads, and the options that the layer was made with."""

    kv_cache_dtype: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    order: str = "NHD"
    scales: tuple[Any, Any] = (0.5, 0.125)
    options: dict[str, Any] = field(default_factory=dict)
    causal: bool = True
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, DIM)

    def on(self, device: str) -> Any:
        k_scale, v_scale = (torch.tensor(scale, dtype=torch.float32, device=device) for scale in self.scales)
        return SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)

    @property
    def masks(self) -> Masks:
        window = self.options.get("sliding_window")
        left = -1 if window is None else window - 1
        return Masks(
            causal=self.causal,
            window=(left, left),
            softcap=self.options.get("logits_soft_cap") or 0.0,
            scale=self.options.get("scale"),
            slopes=None if "alibi_slopes" not in self.options else torch.tensor(self.options["alibi_slopes"]),
            sinks=None if self.options.get("sinks") is None else self.options["sinks"].cpu(),
        )


@dataclass
class Engine:
    """One layer of a model in an engine: the cache, its contents, and the tables of a step."""

    backend: Any
    layer: Layer
    requests: Requests
    device: str = "cpu"
    spare: int = 0  # tokens that each request may grow by

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(sum(self.requests.lengths))
        heads, kv_heads, dim = self.layer.heads
        columns = -(-(max(self.requests.lengths) + self.spare) // BLOCK)
        count = len(self.requests.lengths)
        shape = self.backend.CuteKernelsBackend.get_kv_cache_shape(
            count * columns + 2, BLOCK, kv_heads, dim, self.layer.kv_cache_dtype
        )
        storage = {"auto": self.layer.dtype, "int8_per_token_head": torch.int8}.get(self.layer.kv_cache_dtype, torch.uint8)
        axes = (0, 1, 2, 3) if self.layer.order == "HND" else (0, 2, 1, 3)
        raw = torch.full([shape[axis] for axis in axes], 0x7F, dtype=torch.uint8 if storage.itemsize == 1 else storage)
        if storage.itemsize > 1:
            raw.fill_(torch.nan)
        if self.layer.order == "strided":  # every other head of a larger cache
            raw = raw.repeat_interleave(2, 2)
        cache = raw.to(self.device).view(storage).permute(axes)  # both orders are their own inverse
        self.kv_cache = cache[:, ::2, :, :] if self.layer.order == "strided" else cache
        pages = torch.randperm(count * columns, generator=self.generator) + 2
        self.table = torch.full((count + self.requests.padding[0], columns), 2**31 - 1, dtype=torch.int32)
        self.table[:count] = pages.view(count, columns).int()
        options = {"scale": dim**-0.5, "alibi_slopes": None, "sliding_window": None, **self.layer.options}
        self.impl = self.backend.CuteKernelsImpl(
            heads, dim, num_kv_heads=kv_heads, kv_cache_dtype=self.layer.kv_cache_dtype, **options
        )
        self.module = self.layer.on(self.device)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.layer.dtype).to(self.device)

    def slots(self, request: int, first: int, last: int) -> Tensor:
        tokens = torch.arange(first, last)
        return self.table[request, tokens // BLOCK].long() * BLOCK + tokens % BLOCK

    def metadata(self, common: Any, requests: Requests) -> Any:
        """The step's metadata from the backend's builder. common: vLLM's CommonAttentionMetadata, or its stand-in."""
        more, extra = requests.padding
        starts = torch.tensor([0, *requests.rows] + [0] * more).cumsum(0).int()
        slots = [self.slots(r, n - rows, n) for r, (rows, n) in enumerate(zip(requests.rows, requests.lengths, strict=True))]
        batch = common(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*requests.lengths] + [0] * more, dtype=torch.int32, device=self.device),
            num_reqs=len(requests.rows) + more,
            num_actual_tokens=sum(requests.rows) + extra,
            max_query_len=max(requests.rows),
            max_seq_len=max(requests.lengths),
            block_table_tensor=self.table.to(self.device),
            slot_mapping=torch.cat([*slots, torch.full((extra,), -1)]).to(self.device),
            causal=self.layer.causal,
        )
        builder = self.backend.CuteKernelsMetadataBuilder(None, ["layer"], None, torch.device(self.device))
        return builder.build(0, batch)

    def tokens(self, extra: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the step's new tokens, and of `extra` more tokens that pad the tensors."""
        heads, kv_heads, dim = self.layer.heads
        count = sum(self.requests.rows) + self.requests.padding[1] + extra
        return self.randn(count, heads, dim), self.randn(count, kv_heads, dim), self.randn(count, kv_heads, dim)

    def fill(self) -> None:
        """Stores the tokens from before the step, in one call for each request."""
        _, kv_heads, dim = self.layer.heads
        for request, (rows, length) in enumerate(zip(self.requests.rows, self.requests.lengths, strict=True)):
            before = length - rows
            k, v = self.randn(before, kv_heads, dim), self.randn(before, kv_heads, dim)
            slots = self.slots(request, 0, before).to(self.device)
            self.impl.do_kv_cache_update(self.module, k, v, self.kv_cache, slots)

    def held(self, request: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of a request's first tokens, read from the cache's bytes, [length, kv_heads, dim], on the CPU."""
        slots, dim = self.slots(request, 0, length), self.layer.heads[2]
        page, slot = slots // BLOCK, slots % BLOCK
        name = self.layer.kv_cache_dtype
        if name.endswith("per_token_head"):
            return self._scaled(page, slot)
        content = self.kv_cache.cpu()[page, :, slot].contiguous()
        if name == "auto":
            return content[..., :dim], content[..., dim:]
        scales = (scale.cpu().reshape(-1, 1) for scale in vars(self.module).values())
        k, v = (x * scale for x, scale in zip(content.view(self.kind).double().chunk(2, -1), scales, strict=True))
        return k, v

    @property
    def kind(self) -> torch.dtype:
        """The element type of an 8-bit cache."""
        name = self.layer.kv_cache_dtype
        return torch.int8 if name.startswith("int8") else torch.float8_e5m2 if "e5m2" in name else torch.float8_e4m3fn

    def _scaled(self, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of tokens with scales per token, which lie after the elements that the order keeps contiguous."""
        _, heads, dim = self.layer.heads
        order, head = self.layer.order, torch.arange(heads)
        memory = self.kv_cache.cpu().view(torch.uint8)
        if order == "strided":
            halves = memory[page, :, slot].chunk(2, -1)
            k, v = (
                half[..., :dim].contiguous().view(self.kind).double() * half[..., dim:].contiguous().view(torch.float32)
                for half in halves
            )
            return k, v
        planes = memory.transpose(1, 2).flatten(1)[:, None] if order == "NHD" else memory.flatten(2)
        row = slot[:, None] * heads + head if order == "NHD" else slot[:, None].expand(-1, heads)
        count = BLOCK * heads if order == "NHD" else BLOCK
        plane = planes[page[:, None], 0 if order == "NHD" else head]
        values = plane[..., : 2 * count * dim].contiguous().view(self.kind).double().unflatten(-1, (2, count, dim))
        scales = plane[..., 2 * count * dim :].contiguous().view(torch.float32).unflatten(-1, (2, count))
        rows, heads_of = torch.arange(len(slot))[:, None], head[None] * (order != "NHD")
        k, v = (values[rows, heads_of, which, row] * scales[rows, heads_of, which, row][..., None] for which in (0, 1))
        return k, v

    def check(self, output: Tensor, q: Tensor, requests: Requests) -> None:
        """Compares each request's rows of output with dense attention in f64 over the cache's contents."""
        first = 0
        for request, (rows, length) in enumerate(zip(requests.rows, requests.lengths, strict=True)):
            mine, kv = q[first : first + rows].cpu(), self.held(request, length)
            exact, same = dense(mine, *kv, self.layer.masks), dense(mine, *kv, self.layer.masks, dtype=self.layer.dtype)[0]
            check_states((output[first : first + rows].cpu(), exact[1]), exact, same)
            first += rows

    def check_stored(self, k: Tensor, v: Tensor) -> None:
        """Compares the step's new tokens with the cache's contents: they differ by rounding to its numbers at most."""
        first = 0
        for request, (rows, length) in enumerate(zip(self.requests.rows, self.requests.lengths, strict=True)):
            for given, held in zip((k, v), self.held(request, length), strict=True):
                wanted = given[first : first + rows].cpu().double()
                error, largest = (held[length - rows :].double() - wanted).abs(), wanted.abs().amax(-1, keepdim=True)
                name = self.layer.kv_cache_dtype
                if name == "auto":
                    assert (error == 0).all()
                elif name.startswith("int8"):
                    assert (error <= largest / 127 * 0.51).all()
                else:  # half a unit of 3 or 2 bits of mantissa, and of the smallest number
                    bits = 3 if "e5m2" in name else 4
                    assert (error <= wanted.abs() * 2.0**-bits + largest * 2.0**-9).all()
            first += rows


def run(engine: Engine, common: Any, extra: int = 0) -> None:
    """Stores the step's new tokens and attends; checks both. extra: tokens that pad q, k and v, in addition to the step's."""
    engine.fill()
    step = engine.metadata(common, engine.requests)
    q, k, v = engine.tokens(extra)
    engine.impl.process_weights_after_loading(q.dtype)
    engine.impl.do_kv_cache_update(engine.module, k, v, engine.kv_cache, step.slot_mapping)
    engine.check_stored(k, v)
    output = torch.full_like(q, torch.nan)
    found = engine.impl.forward(engine.module, q, k, v, engine.kv_cache, step, output)
    assert found is output
    engine.check(output, q, engine.requests)


def run_later(engine: Engine, common: Any, prepared: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Four steps over the first step's tensors: each request grows by its rows; in the last, one is gone and pads the step.

    prepared: takes a step's calls and returns a function that runs them, such as a captured graph's replay.
    """
    engine.fill()
    step, (q, k, v) = engine.metadata(common, engine.requests), engine.tokens()
    output, first = torch.full_like(q, torch.nan), engine.requests

    def calls() -> None:
        engine.impl.do_kv_cache_update(engine.module, k, v, engine.kv_cache, step.slot_mapping)
        engine.impl.forward(engine.module, q, k, v, engine.kv_cache, step, output)

    launch = prepared(calls)
    for time in range(4):
        now = replace(first, lengths=tuple(n + time * rows for rows, n in zip(first.rows, first.lengths, strict=True)))
        if time == 3:
            more, extra = now.padding
            now = Requests(now.rows[:-1], now.lengths[:-1], (more + 1, extra + now.rows[-1]))
        described = engine.metadata(common, now)
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            getattr(step, name).copy_(getattr(described, name))
        for tensor, fresh in zip((q, k, v), engine.tokens(), strict=True):
            tensor.copy_(fresh)
        launch()
        engine.check(output, q, now)
