"""Every 8-bit code, one token a row: K's shows in the lse of a query that picks its column, V's is the output itself."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.support.harness import BACKENDS, device_of, run, select
from tests.support.inputs import Inputs, Shape, make_inputs

K = ck.KVDtype
CODES = torch.arange(256, dtype=torch.uint8)
HEADS, GROUP, DIM = 8, 4, 64

backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("kv_dtype", [K.E4M3, K.E5M2, K.INT8], ids=lambda d: d.value)


def inputs_of(kv_dtype: ck.KVDtype, rows: int, backend: str) -> Inputs:
    """`rows` rows of one token, K, V and q all zero; pages of 16 tokens, 8 heads to 2 KV heads."""
    dtype, storage = torch.float16, {"kv_dtype": kv_dtype, "softmax_scale": 1.0}
    shape = Shape(HEADS, HEADS // GROUP, DIM, 16, (1,) * rows, dtype, **storage)
    inputs = make_inputs(shape, device_of(backend))
    for tensor in (inputs.q, inputs.k.view(torch.uint8), inputs.v.view(torch.uint8)):
        tensor.zero_()
    return inputs


def pages_of(inputs: Inputs) -> torch.Tensor:
    """The page of each row."""
    return torch.cat(inputs.rows).long()


@backends
@dtypes
def test_every_code_of_v(kv_dtype: ck.KVDtype, backend: str) -> None:
    inputs = inputs_of(kv_dtype, 2, backend)
    inputs.v.view(torch.uint8)[pages_of(inputs), :, 0] = CODES.view(2, 2, DIM).to(inputs.v.device)
    out, _ = run(select(inputs.shape, backend), inputs)
    want = CODES.view(kv_dtype.torch_dtype).half().view(2, 2, 1, DIM).expand(2, 2, GROUP, DIM).reshape(2, HEADS, DIM)
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0, equal_nan=True)


@backends
@dtypes
def test_every_code_of_k(kv_dtype: ck.KVDtype, backend: str) -> None:
    rows = len(CODES) // HEADS
    inputs, values = inputs_of(kv_dtype, rows, backend), CODES.view(kv_dtype.torch_dtype).double().view(rows, HEADS)
    columns = (torch.arange(rows)[:, None] * 2 + torch.arange(HEADS) * 8) % DIM  # of each head, another in each row
    picked = torch.zeros(rows, HEADS, DIM).scatter_(2, columns[..., None], 1.0)
    codes = torch.zeros(rows, HEADS, DIM, dtype=torch.uint8).scatter_(2, columns[..., None], CODES.view(rows, HEADS, 1))
    inputs.q.copy_(picked)
    inputs.k.view(torch.uint8)[pages_of(inputs), :, 0] = codes.view(rows, HEADS // GROUP, GROUP, DIM).amax(2).to(inputs.k.device)
    _, lse = run(select(inputs.shape, backend), inputs)
    alone = values.view(-1, GROUP).isfinite().all(1).repeat_interleave(GROUP).view_as(values)  # no NaN in another head's column
    torch.testing.assert_close(lse.cpu().double()[alone], values[alone], rtol=1e-5, atol=1e-5)
    assert alone.sum() >= 240 and not lse.cpu()[~values.isfinite()].isfinite().any()
