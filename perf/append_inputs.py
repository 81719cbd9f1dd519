"""Inputs of an append case, and the gate: a run must store, byte for byte, what the CPU variant stores."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

import cute_kernels as ck
from perf.cases import Case
from perf.correctness import GateResult, Tolerance
from perf.inputs import DTYPES, ROTATED_BYTES, num_sets
from perf.storage import static_scale, storage

SLOTS_PER_TOKEN = 2  # the pool's slots per token: tokens are scattered over the pool
DECODE_TOKENS = 256  # up to so many tokens, each belongs to another request, at a random slot; more tokens fill whole pages


@dataclass(frozen=True)
class AppendSet:
    """One layer's tensors. k, v: bf16 or f16 [tokens, num_kv_heads, head_dim]; the caches, and the scales of both, or None."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


@dataclass(frozen=True)
class AppendInputs:
    """The inputs of providers: the sets to rotate over, and the slots int64 [tokens] that all sets share."""

    case: Case
    sets: tuple[AppendSet, ...]
    slots: torch.Tensor

    def fill_unused(self, value: float) -> None:
        """Does nothing: no append reads a cache."""

    def written(self, index: int) -> list[torch.Tensor]:
        """The tensors that an append to set `index` writes: the caches, and scales per token."""
        s = self.sets[index]
        scales = [t for t in (s.k_scale, s.v_scale) if t is not None and t.dim() == 3]
        return [s.k_cache, s.v_cache, *scales]

    def clear(self, index: int) -> None:
        """Zeros the written tensors of set `index`, so that no provider's result passes for another's."""
        for tensor in self.written(index):
            as_bytes(tensor).zero_()

    def on_cpu(self, index: int) -> AppendInputs:
        """Copies of set `index` and of the slots."""
        s = self.sets[index]
        k, v, k_cache, v_cache = (t.cpu().clone() for t in (s.k, s.v, s.k_cache, s.v_cache))
        k_scale, v_scale = (None if t is None else t.cpu().clone() for t in (s.k_scale, s.v_scale))
        return AppendInputs(self.case, (AppendSet(k, v, k_cache, v_cache, k_scale, v_scale),), self.slots.cpu())


def make_append_inputs(case: Case, device: torch.device, memory_bytes: int, rotated_bytes: int = ROTATED_BYTES) -> AppendInputs:
    """Random K and V for `case`, caches of zeros; the same numbers each time. Raises MemoryError (num_sets)."""
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(case.name.encode()))
    d = append_descriptor(case)
    pages = -(-SLOTS_PER_TOKEN * case.batch_size // case.page_size)
    shape = (pages, *((d.page_size, d.num_kv_heads) if d.nhd else (d.num_kv_heads, d.page_size)), d.head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPES[case.dtype], device=device)

    def scale(stored: ck.KVDtype, kind: ck.KVScale) -> torch.Tensor | None:
        if kind.granularity == "token":
            return torch.zeros(pages, d.page_size, d.num_kv_heads, dtype=kind.dtype, device=device)
        return static_scale(stored, kind, d.num_kv_heads, normal)

    def layer() -> AppendSet:
        k, v = (normal(case.batch_size, d.num_kv_heads, d.head_dim) for _ in range(2))
        k_cache, v_cache = (torch.zeros(shape, dtype=s.torch_dtype, device=device) for s in d.stored)
        k_scale, v_scale = (scale(*storage) for storage in zip(d.stored, d.scales, strict=True))
        return AppendSet(k, v, k_cache, v_cache, k_scale, v_scale)

    layers = num_sets(case.kv_bytes, memory_bytes, rotated_bytes)
    return AppendInputs(case, tuple(layer() for _ in range(layers)), make_slots(case, pages).to(device))


def append_descriptor(case: Case) -> ck.KVAppendDescriptor:
    """The descriptor of an append case."""
    shape = (case.batch_size, case.num_kv_heads, case.head_dim, case.page_size, DTYPES[case.dtype])
    return ck.KVAppendDescriptor(*shape, **storage(case), layout=ck.KVLayout(case.layout))


def make_slots(case: Case, pages: int) -> torch.Tensor:
    """Different slots int64 [tokens] of a pool, drawn at random: single ones, or those of whole pages."""
    shuffle = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    if case.batch_size <= DECODE_TOKENS:
        return torch.randperm(pages * case.page_size, generator=shuffle)[: case.batch_size]
    first = torch.randperm(pages, generator=shuffle)[:, None] * case.page_size
    return (first + torch.arange(case.page_size)).flatten()[: case.batch_size]


def check_append(inputs: AppendInputs, index: int) -> GateResult:
    """Compares the caches and scales of set `index` after a run with the CPU variant's. error: the bytes that differ."""
    wanted = inputs.on_cpu(index)
    wanted.clear(0)
    append(ck.KVAppendPlan.select(append_descriptor(inputs.case), "cpu"), wanted, 0)
    pairs = zip(inputs.written(index), wanted.written(0), strict=True)
    wrong = sum(int((as_bytes(ours.cpu()) != as_bytes(theirs)).sum()) for ours, theirs in pairs)
    reason = f"{wrong} bytes differ from those of the CPU variant" if wrong else ""
    return GateResult(float(wrong), None, None, wrong == 0, reason)


def judge_append(inputs: AppendInputs, index: int, call: Callable[[], object], tolerance: Tolerance) -> GateResult:
    """Clears set `index`, runs `call`, and returns `check_append` of it; no tolerance but equality counts."""
    inputs.clear(index)
    call()
    return check_append(inputs, index)


def append(plan: ck.KVAppendPlan, inputs: AppendInputs, index: int) -> None:
    """Runs a plan on set `index`."""
    s = inputs.sets[index]
    plan.run(s.k, s.v, s.k_cache, s.v_cache, inputs.slots, k_scale=s.k_scale, v_scale=s.v_scale)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a compact tensor."""
    return tensor.view(-1).view(torch.uint8)
