"""One append on real tensors, and the memory it must leave, by numpy and plain loops that share nothing with the package."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import cute_kernels as ck
from tests.support.harness import device_of
from tests.support.metadata import to_device

K = ck.KVDtype
LARGEST = {K.INT8: 127.0, K.E4M3: 448.0, K.E5M2: 57344.0}
FORMAT = {K.E4M3: (3, 7, 0x7E), K.E5M2: (2, 15, 0x7B)}  # bits of the mantissa, bias, code of the largest value
FILL = 0x55  # the value of every byte before an append
BYTES = {torch.float16: np.uint16, torch.float32: np.uint32}


@dataclass
class Memory:
    """The tensors that an append writes; scales are None if it writes none. Compared byte for byte; any two NaN scales match."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def assert_equals(self, other: Memory) -> None:
        for name in ("k_cache", "v_cache"):
            ours, theirs = (getattr(m, name).cpu().contiguous().view(torch.uint8) for m in (self, other))
            assert torch.equal(ours, theirs), f"{name}: {(ours != theirs).sum().item()} bytes differ"
        for name in ("k_scale", "v_scale"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None:
                assert torch.equal(ours.cpu().nan_to_num(-1.0), theirs.cpu().nan_to_num(-1.0)), name


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """A tensor of FILL bytes."""
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.full((count,), FILL, dtype=torch.uint8, device=device).view(dtype).view(shape)


def fresh(d: ck.KVAppendDescriptor, pages: int, device: str = "cpu") -> Memory:
    """Compact caches, and scales if they are per token; all bytes are FILL."""
    inner = (d.page_size, d.num_kv_heads) if d.layout.order == "NHD" else (d.num_kv_heads, d.page_size)
    caches = [filled((pages, *inner, d.head_dim), stored.torch_dtype, device) for stored in d.stored]
    shape = (pages, d.page_size, d.num_kv_heads)
    return Memory(*caches, *(filled(shape, s.dtype, device) if s.granularity == "token" else None for s in d.scales))


def given_scales(d: ck.KVAppendDescriptor, device: str) -> dict[str, torch.Tensor]:
    """The scales that a run must be given by the descriptor, none a power of two."""
    steps = torch.arange(d.num_kv_heads, device=device, dtype=torch.float32)
    one = {"k_scale": torch.tensor(0.037, device=device), "v_scale": torch.tensor([1.7], device=device)}
    each = {"k_scale": 0.03 + steps / 7, "v_scale": 5.3 / (1 + steps)}
    choices = {"tensor": one, "head": each}
    kinds = {"k_scale": d.k_scale.granularity, "v_scale": d.v_scale.granularity}
    return {name: choices[kind][name] for name, kind in kinds.items() if kind in choices}


def run_scales(d: ck.KVAppendDescriptor, memory: Memory, device: str) -> dict[str, torch.Tensor]:
    """The scale tensors of a run: the given ones, and the ones that it writes."""
    written = {"k_scale": memory.k_scale, "v_scale": memory.v_scale}
    return {name: scale for name, scale in written.items() if scale is not None} | given_scales(d, device)


def select(d: ck.KVAppendDescriptor, backend: str, **preference: Any) -> ck.KVAppendPlan:
    return ck.KVAppendPlan.select(d, device_of(backend), ck.PlanPreference(arch=backend, **preference))


def append(
    d: ck.KVAppendDescriptor, backend: str, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor | ck.PageTable, pages: int
) -> Memory:
    """Appends to fresh memory."""
    device = device_of(backend)
    memory = fresh(d, pages, device)
    caches = (memory.k_cache, memory.v_cache)
    on_device = to_device(slots, device) if isinstance(slots, ck.PageTable) else slots.to(device)
    select(d, backend).run(k.to(device), v.to(device), *caches, on_device, **run_scales(d, memory, device))
    return memory


def expected(d: ck.KVAppendDescriptor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pages: int) -> Memory:
    """The memory that `append` must leave, by a loop over tokens and heads."""
    memory = fresh(d, pages)
    given = given_scales(d, "cpu")
    for name, x, stored, kind in zip("kv", (k, v), d.stored, d.scales, strict=True):
        cache, scale = getattr(memory, f"{name}_cache"), getattr(memory, f"{name}_scale")
        by_token = cache if d.layout.order == "NHD" else cache.transpose(1, 2)
        for token, slot in enumerate(slots.tolist()):
            if not 0 <= slot < pages * d.page_size:
                continue
            page, place = divmod(slot, d.page_size)
            for head in range(d.num_kv_heads):
                row = x[token, head]
                if stored not in LARGEST:
                    by_token[page, place, head] = row
                    continue
                divisor = np.float32(1.0)
                if f"{name}_scale" in given:
                    divisor = given[f"{name}_scale"].reshape(-1).numpy()[head if kind == ck.KVScale.HEAD else 0]
                codes, found = naive_row(row.float().numpy(), stored, kind, divisor)
                by_token[page, place, head] = torch.from_numpy(codes).view(stored.torch_dtype)
                if scale is not None:
                    scale[page, place, head] = float(found)
    return memory


def naive_row(values: np.ndarray, kv_dtype: ck.KVDtype, kind: ck.KVScale, divisor: np.float32) -> tuple[np.ndarray, np.float32]:
    """(codes uint8, the stored scale) of f32 values [head_dim]."""
    with np.errstate(all="ignore"):
        if kind.granularity == "token":
            amax = np.maximum(np.abs(values).max(), np.float32(1e-8))
            divisor = naive_scale(np.float32(amax / np.float32(LARGEST[kv_dtype])), kind.dtype)
        quotients = values if not kind else (values / divisor).astype(np.float32)
        if kv_dtype is K.INT8:
            whole = np.clip(np.rint(quotients.astype(np.float64)), -127, 127)
            return np.where(np.isnan(quotients), 0, whole).astype(np.int8).view(np.uint8), divisor
        return naive_fp8(quotients.astype(np.float64), kv_dtype), divisor


def naive_scale(exact: np.float32, dtype: torch.dtype) -> np.float32:
    """A scale as it is stored: in f16 the nearest number; subnormals are rounded up, finite scales are held to the largest."""
    if dtype == torch.float32 or not np.isfinite(exact):
        return exact
    if exact < 2.0**-14:
        return np.float32(math.ceil(float(exact) * 2.0**24) * 2.0**-24)
    return np.float32(np.float16(min(exact, 65504.0)))


def naive_fp8(values: np.ndarray, kv_dtype: ck.KVDtype) -> np.ndarray:
    """The codes of the nearest values: at a tie the even code, past the largest value its code; NaN is 0x7f."""
    table = np.array(fp8_values(kv_dtype))
    middles = (table[1:] + table[:-1]) / 2
    magnitude = np.where(np.isnan(values), 0.0, np.abs(values))
    above = np.searchsorted(middles, magnitude, side="left")  # a middle itself goes down
    tie = (above < len(middles)) & (magnitude == middles[np.minimum(above, len(middles) - 1)])
    codes = (above + (tie & (above % 2 == 1))) | (np.signbit(values) * 0x80)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def fp8_values(kv_dtype: ck.KVDtype) -> list[float]:
    """The values of the codes from 0 to the largest."""
    mantissa, bias, last = FORMAT[kv_dtype]
    values = []
    for code in range(last + 1):
        exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return values


def random_kv(d: ck.KVAppendDescriptor, tokens: int, seed: int = 0, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [tokens, num_kv_heads, head_dim], compact, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, d.num_kv_heads, d.head_dim)
    k, v = (torch.randn(shape, generator=generator) * scale for _ in range(2))
    return k.to(d.dtype), v.to(d.dtype)


def random_slots(d: ck.KVAppendDescriptor, tokens: int, pages: int, seed: int = 0) -> torch.Tensor:
    """Different slots [tokens], some of them negative."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * d.page_size, generator=generator)[:tokens]
    slots[::5] = torch.tensor([-1, -(2**31), -7] * tokens)[: len(slots[::5])]
    return slots.to(d.slot_dtype)


def cos_sin_of(positions: int, rotary_dim: int) -> torch.Tensor:
    """f32 [positions, rotary_dim]: the cosines, then the sines, of angles that fall by powers of 10,000."""
    frequency = 10000.0 ** -(torch.arange(rotary_dim // 2, dtype=torch.float64) * 2 / rotary_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def naive_rotary(
    x: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor, pairing: str
) -> tuple[np.ndarray, np.ndarray]:
    """(x rotated as complex numbers in f64, the size of each pair) of the first rotary_dim columns."""
    width = cos_sin_cache.shape[1]
    pairs = np.arange(width).reshape(2, -1) if pairing == "half" else np.arange(width).reshape(-1, 2).T
    values = x.double().numpy()
    angles = cos_sin_cache.double().numpy()[positions.numpy(), None]
    turn = angles[..., : width // 2] + 1j * angles[..., width // 2 :]
    turned = (values[..., pairs[0]] + 1j * values[..., pairs[1]]) * turn
    out, size = np.empty((*x.shape[:2], width)), np.empty((*x.shape[:2], width))
    out[..., pairs[0]], out[..., pairs[1]] = turned.real, turned.imag
    size[..., pairs[0]] = size[..., pairs[1]] = np.abs(turned)
    return out, size
