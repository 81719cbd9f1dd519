"""Attention's backward, executed without a GPU: gradients against torch.autograd in f64, by warps and by warpgroups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.operands import kernel_views
from cute_kernels.backward.variants import kernel_spec
from tests.interpreted.machine.gradients import Backward, Operands, scratch
from tests.support.attention_cases import EVERYTHING
from tests.support.backward_cases import Case, backward_case, make_backward
from tests.support.backward_harness import assert_close
from tests.support.inputs import NAN

ROWS: dict[str, Any] = {"q_lens": (2, 3, 0, 20), "max_q_len": 20}
CACHE: dict[str, Any] = {"lengths": (0, 5, 33, 70), "num_heads": 4, "num_kv_heads": 2}
CASES: dict[str, tuple[str, Case]] = {
    "warpgroups, shared pages": (
        "sm90",
        backward_case("d64", {**CACHE, "head_dim": 64}, own={"shared": True}, **ROWS, **EVERYTHING),
    ),
    "warps, f16": ("sm80", backward_case("f16", {**CACHE, "dtype": torch.float16, "head_dim": 40}, table="packed", **ROWS)),
}


def run(one: Case, arch: Any) -> tuple[Any, ck.AttentionGradients]:
    """(inputs, the gradients) of a case."""
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
    operands = Operands(
        *(inputs.dout, own.q, k, v, inputs.out, lse, *own.table.operands, *extras),
        *(dq, dk_view, dv_view, dsinks, *scratch(descriptor, lse)),  # type: ignore[arg-type]
    )
    backward = Backward(spec, descriptor, operands)
    backward.run()
    assert not backward.status.any()
    return inputs, ck.AttentionGradients(dq, dk, dv, dsinks)


@pytest.mark.parametrize("name", CASES)
def test_backward(name: str) -> None:
    arch, one = CASES[name]
    inputs, result = run(one, arch)
    assert_close(inputs, result)
