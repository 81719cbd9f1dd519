"""Queries and scales whose sizes do not fit f16, the type of the tensor cores' operands where a cache has 8 bits."""

from __future__ import annotations

import math

import pytest
import torch

import cute_kernels as ck
from tests.support.harness import BACKENDS, assert_close, device_of, run, select
from tests.support.inputs import Inputs, Shape, make_inputs, make_sinks
from tests.support.storage import STORAGES

LENGTHS = (0, 1, 17, 64, 129, 1000)
INT8_HEAD = {"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.HEAD, "v_scale": ck.KVScale.HEAD}
STORED = pytest.mark.parametrize("storage", STORAGES)
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])


def inputs_of(storage: str, dtype: torch.dtype, backend: str, **changes: object) -> Inputs:
    """Inputs of a batch whose longest row is cut."""
    stored = {**STORAGES, "int8 head": INT8_HEAD}[storage]
    shape = Shape(lengths=LENGTHS, dtype=dtype, max_seq_len=4096, **stored, **changes)
    return make_inputs(shape, device_of(backend))


def check(inputs: Inputs, backend: str) -> None:
    assert_close(inputs, *run(select(inputs.shape, backend), inputs))


def magnitudes(q: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """q, of normal numbers, times `factor` in its dtype, which no element leaves."""
    scaled = (q.double() * factor).to(q.dtype)
    assert torch.isfinite(scaled).all() and scaled.any()
    return scaled


@EVERY_BACKEND
@STORED
@DTYPES
@pytest.mark.parametrize("level", [1.0, 300.0], ids=["moderate logits", "one token wins"])
@pytest.mark.parametrize("magnitude", [1e4, 1e-6])
def test_large_and_small_queries(magnitude: float, level: float, dtype: torch.dtype, storage: str, backend: str) -> None:
    """Their softmax scale makes up for them, or lets one logit stand out by far."""
    inputs = inputs_of(storage, dtype, backend, softmax_scale=level * 128**-0.5 / magnitude)
    inputs.q = magnitudes(inputs.q, magnitude)
    check(inputs, backend)


@EVERY_BACKEND
@STORED
@DTYPES
@pytest.mark.parametrize("largest", [1e4, 1e-6])
def test_queries_at_the_default_softmax_scale(largest: float, dtype: torch.dtype, storage: str, backend: str) -> None:
    """Logits of several 1e4, of which one token takes all, and of 1e-6, an average."""
    inputs = inputs_of(storage, dtype, backend)
    inputs.q = magnitudes(inputs.q, largest / 4)
    check(inputs, backend)


@EVERY_BACKEND
@STORED
@DTYPES
def test_heads_of_one_group_may_differ_by_ten_orders_of_magnitude(dtype: torch.dtype, storage: str, backend: str) -> None:
    """Each row of a tile has its own factor: a small head is as exact as it is alone."""
    inputs = inputs_of(storage, dtype, backend)
    factors = torch.tensor([1e4, 1e-6, 1.0, 1e-3], dtype=torch.float64, device=inputs.q.device).repeat(2)
    inputs.q = magnitudes(inputs.q, factors[:, None] / 4)
    check(inputs, backend)


@EVERY_BACKEND
@STORED
@DTYPES
def test_one_element_of_a_query_dominates(dtype: torch.dtype, storage: str, backend: str) -> None:
    """1e4 in a column where K is zero: the scores are those of the other elements, 2 ** -13 of it and less."""
    inputs = inputs_of(storage, dtype, backend)
    inputs.q[..., 5] = 1e4
    live = torch.zeros((), device=inputs.k.device).to(inputs.k.dtype)
    for row, pages in enumerate(inputs.rows):
        for page in pages.tolist():
            inputs.k[page, :, :, 5] = live
        assert not inputs.tokens(inputs.k, row).float()[..., 5].any()
    check(inputs, backend)


@EVERY_BACKEND
@pytest.mark.parametrize("storage", [*STORAGES, "int8 head"])
@DTYPES
def test_a_token_without_values_takes_nearly_all_weight(dtype: torch.dtype, storage: str, backend: str) -> None:
    """An attention sink: the output is that of the other tokens, of e ** -16 of its weight each."""
    inputs = inputs_of(storage, dtype, backend, softmax_scale=1.0)
    inputs.q.zero_()
    for row, column in make_sinks(inputs, logit=16).items():
        inputs.q[row, :, 0] = column
    check(inputs, backend)


@EVERY_BACKEND
@DTYPES
@pytest.mark.parametrize("scale", [ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16], ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "random"])
def test_scales_of_v_that_outweigh_small_weights(order: str, scale: ck.KVScale, dtype: torch.dtype, backend: str) -> None:
    """V's scales go from 1e-4 to 1e3 as the weights of their tokens fall: every token adds about as much to the output.

    To 400 where PyTorch must hold 127 times that in f16.
    """
    storage = {**STORAGES["int8 token"], "k_scale": scale, "v_scale": scale}
    shape = Shape(lengths=LENGTHS, dtype=dtype, max_seq_len=4096, softmax_scale=1.0, **storage)
    inputs = make_inputs(shape, device_of(backend))
    generator, deepest = torch.Generator().manual_seed(7), math.log((400 if dtype == torch.float16 else 1e3) / 1e-4)
    inputs.q.zero_()
    inputs.q[..., 0] = 1.0
    for row, length in list(enumerate(shape.lengths))[1:]:
        depth = torch.linspace(0, deepest, length).to(inputs.q.device)
        if order == "falling":
            depth = depth.flip(0)
        elif order == "random":
            depth = depth[torch.randperm(length, generator=generator).to(depth.device)]
        for page, part in zip(inputs.rows[row].tolist(), depth.split(shape.page_size), strict=True):
            inputs.k[page, :, : len(part), 0] = -127
            inputs.k_scale[page, : len(part)] = (part / 127).to(scale.dtype)[:, None]
            inputs.v_scale[page, : len(part)] = (1e-4 * part.exp()).to(scale.dtype)[:, None]
    check(inputs, backend)
