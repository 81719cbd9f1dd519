"""Kernels of the other operations, run on CPU tensors as their plans launch them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.config.append import CTA_THREADS, AppendSpec, append_supports
from cute_kernels.config.decode import LOG2_E
from cute_kernels.config.merge import MergeSpec, merge_supports
from cute_kernels.config.weights import WeightsSpec, weights_supports
from cute_kernels.device.tracing import append as append_tracing
from cute_kernels.device.tracing import merge as merge_tracing
from cute_kernels.device.tracing import weights as weights_tracing
from cute_kernels.kv.tensors import as_bytes

from .launch import Launch, compiled
from .memory import READ, WRITE

BOTH = READ | WRITE


def fast_divisor(launch: Launch, divisor: int) -> None:
    """Adds a divisor with the multiplier and the two shifts that divide by it, and the divisor once more."""
    bits = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << bits) - divisor)) // divisor + 1
    launch.numbers("IIBBxx", divisor, multiplier, min(bits, 1), max(bits - 1, 0))
    launch.numbers("I", divisor)


def run_append(
    spec: AppendSpec,
    incoming: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    tables: tuple[Tensor | None, ...],
    scales: tuple[Tensor | None, Tensor | None],
    rotary: tuple[Tensor | None, ...] = (None,) * 4,
    seed: int = 0,
) -> Tensor:
    """Returns the status words. rotary: q, q_out, cos_sin_cache, positions."""
    assert append_supports(spec) == []
    launch, fakes = Launch(), append_tracing.arguments(spec)
    status = torch.zeros(4, dtype=torch.int32)
    for tensor, fake in zip(incoming, fakes[:2], strict=True):
        launch.tensor(tensor, fake)
    for tensor, fake in zip(caches, fakes[2:4], strict=True):
        launch.tensor(as_bytes(tensor), fake, WRITE)
    for tensor, fake in zip(tables, fakes[4:7], strict=True):
        launch.tensor(tensor, fake)
    for tensor, fake in zip(scales, fakes[7:9], strict=True):
        view = tensor.view(1) if tensor is not None and not tensor.dim() else tensor
        launch.tensor(view, fake, WRITE if view is not None and view.dim() == 3 else READ)
    for tensor, fake, rights in zip(rotary, fakes[9:13], (READ, WRITE, READ, READ), strict=True):
        launch.tensor(tensor, fake, rights)
    launch.numbers("q", launch.memory.add(status, BOTH))
    rows = [tensor for tensor in (incoming[0], rotary[0]) if tensor is not None]
    for tensor in rows:
        fast_divisor(launch, tensor.shape[1])
    ctas = sum(-(-tensor.shape[0] * tensor.shape[1] // spec.rows_per_cta) for tensor in rows)
    (program,) = compiled(append_tracing.build_append, spec)
    assert program.kernel.threads == CTA_THREADS
    launch.run(program, (ctas, 1, 1), 0, seed=seed)
    return status


def run_merge(spec: MergeSpec, outs: Tensor, lses: Tensor, sinks: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Merges states [num_states, batch, num_heads, ...]; returns (out, lse)."""
    assert merge_supports(spec) == []
    launch, fakes = Launch(), merge_tracing.arguments(spec)
    out, lse = torch.full_like(outs[0], torch.nan), torch.full_like(lses[0], torch.nan)
    given: list[tuple[Any, int]] = [(outs, READ), (lses, READ), (out, WRITE), (lse, WRITE), (sinks, READ)]
    for (tensor, rights), fake in zip(given, fakes[:5], strict=True):
        launch.tensor(tensor, fake, rights)
    (program,) = compiled(merge_tracing.build_merge, spec)
    launch.run(program, (lse.shape[0], spec.ctas_per_row(lse.shape[1]), 1), 0, seed=seed)
    return out, lse


def run_weights(
    spec: WeightsSpec,
    tensors: tuple[Tensor, Tensor, tuple[Tensor | None, ...], Tensor | None, Tensor, Tensor | None],
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    values: tuple[float, int, int, float],
    seed: int = 0,
) -> Tensor:
    """Returns the status words.

    tensors: q, k as HND, the table's tensors, k_scale, lse, slopes. outputs: weights, mean, page_mass.
    values: softmax_scale, max_seq_len, window_left, softcap.
    """
    assert weights_supports(spec) == []
    launch, fakes = Launch(), weights_tracing.arguments(spec)
    q, k, tables, k_scale, lse, slopes = tensors
    status = torch.zeros(4, dtype=torch.int32)
    scale, max_seq_len, window_left, softcap = values
    launch.tensor(q, fakes[0])
    launch.tensor(k, fakes[1])
    if spec.arch == "sm90":
        launch.tensor_map(k, spec.rings[0], slots_are_open=not spec.page_size)
    else:
        launch.tensor(k, fakes[1])
    launch.tensor(k_scale, fakes[5], whole_words=spec.k_scale == "token_f16")
    for tensor, fake in zip(tables, fakes[2:5], strict=True):
        launch.tensor(tensor, fake)
    for value in (1, 1, window_left, 0):
        launch.numbers("i", value)
    launch.tensor(lse, fakes[6])
    launch.tensor(slopes, fakes[7])
    launch.numbers("f", softcap)
    for tensor, fake in zip(outputs, fakes[8:11], strict=True):
        launch.tensor(tensor, fake, WRITE)
    chunks = -(-max_seq_len // spec.chunk)
    launch.numbers("i", max_seq_len)
    launch.numbers("f", scale * LOG2_E)
    launch.numbers("i", chunks)
    launch.numbers("q", launch.memory.add(status, BOTH))
    (program,) = compiled(weights_tracing.build_weights, spec)
    launch.run(program, (q.shape[0] * chunks, 1, 1), spec.smem_bytes, seed=seed)
    return status
