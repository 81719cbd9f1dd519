"""Runs attention and its backward on the interpreter, with the problems of the GPU tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.attention.checks import Rules
from cute_kernels.attention.operands import Extras, Operands, by_request, kernel_views, normalised, viewed
from cute_kernels.backward.variants import kernel_spec
from tests.interpreted.machine.attention import Kernel
from tests.interpreted.machine.gradients import Backward, scratch
from tests.interpreted.machine.gradients import Operands as BackwardOperands
from tests.support.attention_cases import AttentionInputs
from tests.support.backward_cases import BackwardInputs, make_backward
from tests.support.backward_cases import Case as BackwardCase
from tests.support.inputs import NAN, Inputs

State = tuple[Tensor, Tensor]
CPU = torch.device("cpu")


def decode_operands(inputs: Inputs) -> Operands:
    """The operands of a plan with one query row per request; outputs hold NaN."""
    shape, q = inputs.shape, inputs.q
    descriptor = shape.descriptor()
    rules = Rules(descriptor.problem, CPU, nhd=shape.order == "NHD")
    tables = inputs.table().operands if shape.page_size else (None, None, None)
    out, lse = torch.full_like(q, NAN), torch.full(q.shape[:2], NAN)
    scales = inputs.k_scale, inputs.v_scale
    return viewed(rules.views, Operands(q, *inputs.caches(), *tables, *scales, out, lse, None))


def attention_operands(inputs: AttentionInputs) -> tuple[Operands, Extras]:
    """The same for several query rows, or for modified scores."""
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
    """Returns (out, lse); asserts that no fault is reported and the workspace is zero as it was."""
    operands = decode_operands(inputs)
    kernel.run(operands, seed=seed, resident=resident)
    check_left(kernel)
    return operands.out, operands.lse


def run_attention(kernel: Kernel, inputs: AttentionInputs, *, seed: int = 0, resident: int | None = None) -> State:
    """The same for attention, as [total_q, ...]."""
    operands, extras = attention_operands(inputs)
    kernel.run(operands, extras, seed=seed, resident=resident)
    check_left(kernel)
    out, lse = operands.out, operands.lse
    return (out.flatten(0, 1), lse.flatten(0, 1)) if lse.dim() == 3 else (out, lse)


def check_left(kernel: Kernel) -> None:
    """Asserts that the workspace is zero and no fault is reported."""
    assert kernel.workspace is None or not kernel.workspace.any(), "a launch leaves the workspace as it found it"
    assert not kernel.status.any(), f"a fault is reported: {kernel.status.tolist()}"


def run_backward(one: BackwardCase, arch: Any) -> tuple[BackwardInputs, ck.AttentionGradients]:
    """Returns (inputs, the gradients) of a case."""
    inputs, descriptor = make_backward(one, "cpu"), one.descriptor()
    spec = kernel_spec(descriptor, arch, "sm_90a" if arch == "sm90" else "sm_80")
    own, attention = inputs.attention, one.attention
    order: Any = "packed" if attention.table == "packed" else attention.cache.order
    fill = 0.0 if one.unread == "zeros" else NAN
    dq, dk, dv = torch.full_like(own.q, NAN), torch.full_like(own.k, fill), torch.full_like(own.v, fill)
    k, v, _, _ = kernel_views(order, ((), ()), own.k, own.v, None, None)
    dk_view, dv_view, _, _ = kernel_views(order, ((), ()), dk, dv, None, None)
    lse = inputs.lse.view(*own.q.shape[:-1])
    dsinks = torch.full((own.q.shape[-2],), NAN) if attention.sinks else None
    extras = (inputs.extras.get(name) for name in ("qo_indptr", "alibi_slopes", "sinks"))
    operands = BackwardOperands(
        *(inputs.dout, own.q, k, v, inputs.out, lse, *own.table.operands, *extras),
        *(dq, dk_view, dv_view, dsinks, *scratch(descriptor, lse)),  # type: ignore[arg-type]
    )
    backward = Backward(spec, descriptor, operands)
    backward.run()
    assert not backward.status.any()
    return inputs, ck.AttentionGradients(dq, dk, dv, dsinks)
