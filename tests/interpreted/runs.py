"""Runs of decode and of several query rows on the interpreter, from the problems that the tests of a GPU have."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.attention.checks import Rules
from cute_kernels.attention.operands import Extras, Operands, by_request, normalised, viewed
from tests.interpreted.machine.attention import Kernel
from tests.support.attention_cases import AttentionInputs
from tests.support.inputs import NAN, Inputs

State = tuple[Tensor, Tensor]
CPU = torch.device("cpu")


def decode_operands(inputs: Inputs) -> Operands:
    """What a plan of one query row a request hands to its kernel, with outputs of NaN."""
    shape, q = inputs.shape, inputs.q
    descriptor = shape.descriptor()
    rules = Rules(descriptor.problem, CPU, nhd=shape.order == "NHD")
    tables = inputs.table().operands if shape.page_size else (None, None, None)
    out, lse = torch.full_like(q, NAN), torch.full(q.shape[:2], NAN)
    scales = inputs.k_scale, inputs.v_scale
    return viewed(rules.views, Operands(q, *inputs.caches(), *tables, *scales, out, lse, None))


def attention_operands(inputs: AttentionInputs) -> tuple[Operands, Extras]:
    """The same of several query rows, or of modified scores."""
    case, q = inputs.case, inputs.q
    problem = case.descriptor().problem
    rules = Rules(problem, CPU, nhd=case.cache.order == "NHD")
    rows = q.shape[0] * q.shape[1] if case.uniform else len(q)
    out, lse = torch.full_like(q, NAN), torch.full((rows, q.shape[-2]), NAN)
    scales = inputs.scales["k_scale"], inputs.scales["v_scale"]
    operands = Operands(q, inputs.k, inputs.v, *inputs.table.operands, *scales, out, lse, None)
    extras = Extras(**inputs.extras)
    if problem.query == "one":
        return normalised(problem, rules.views, operands), extras
    if problem.query == "uniform":
        operands, extras = by_request(operands, extras)
    return viewed(rules.views, operands), extras


def run_decode(kernel: Kernel, inputs: Inputs, *, seed: int = 0, resident: int | None = None) -> State:
    """(out, lse); no fault is reported, and the workspace is zero as it was."""
    operands = decode_operands(inputs)
    kernel.run(operands, seed=seed, resident=resident)
    check_left(kernel)
    return operands.out, operands.lse


def run_attention(kernel: Kernel, inputs: AttentionInputs, *, seed: int = 0, resident: int | None = None) -> State:
    """The same, as [total_q, ...]."""
    operands, extras = attention_operands(inputs)
    kernel.run(operands, extras, seed=seed, resident=resident)
    check_left(kernel)
    out, lse = operands.out, operands.lse
    return (out.flatten(0, 1), lse.flatten(0, 1)) if lse.dim() == 3 else (out, lse)


def check_left(kernel: Kernel) -> None:
    """What a launch leaves beside its outputs."""
    assert kernel.workspace is None or not kernel.workspace.any(), "a launch leaves the workspace as it found it"
    assert not kernel.status.any(), f"a fault is reported: {kernel.status.tolist()}"
