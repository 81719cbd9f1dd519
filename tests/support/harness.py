"""A decode problem on every backend: its plan, its run, an independent f64 reference, and the tolerance rule."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels as ck
from cute_kernels.attention.choice import tuned
from cute_kernels.config.decode import DecodeConfig
from tests.support.inputs import NAN, Inputs, Shape
from tests.support.tolerance import Tolerance, check_states

BACKENDS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("sm90", id="sm90", marks=pytest.mark.gpu),
    pytest.param("sm80", id="sm80", marks=pytest.mark.gpu),
]
ONE_CALL = [backend for backend in BACKENDS if backend.id != "sm80"]  # one call takes the first variant that serves


def select(shape: Shape, backend: str, **preference: object) -> ck.PagedDecodePlan | ck.FlashDecodingPlan:
    """A plan forced onto `backend`."""
    plan = ck.PagedDecodePlan if shape.page_size else ck.FlashDecodingPlan
    return plan.select(shape.descriptor(), device_of(backend), ck.PlanPreference(arch=backend, **preference))


def select_forced(shape: Shape, config: DecodeConfig, **preference: object) -> ck.PagedDecodePlan | ck.FlashDecodingPlan:
    """A plan of the SM90 variant with this configuration, made anew since `select` would remember it."""
    plan = ck.PagedDecodePlan if shape.page_size else ck.FlashDecodingPlan
    with tuned.forced(config):
        made = plan(shape.descriptor(), torch.device("cuda", 0), ck.PlanPreference(arch="sm90", **preference))
    assert made.explain().chosen.config == config, made.explain()
    return made


def select_patched(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object, shape: Shape, backend: str, **preference: object
):
    """A plan whose kernel is compiled anew with `value` as `owner.name`, and never read from disk or kept there."""
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_KERNELS_CACHE", "off")
        patch.setattr("cute_kernels.compile.kernels._kernels", {})
        patch.setattr("cute_kernels.planning.base._plans", OrderedDict())
        patch.setattr(owner, name, value)
        return select(shape, backend, **preference)


def device_of(backend: str) -> str:
    return "cpu" if backend == "cpu" else "cuda"


def run(
    plan, inputs: Inputs, fill: float = NAN, table: ck.PageTable | None = None, concurrent: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs with outputs prefilled with `fill`. Unless `concurrent`, waits for the run and checks that the workspace is clean."""
    shape, q = inputs.shape, inputs.q
    out, lse = torch.full_like(q, fill), torch.full(q.shape[:2], fill, device=q.device)
    workspace = plan.new_workspace()
    tables = (table or inputs.table(),) if shape.page_size else ()
    plan.run(q, *inputs.caches(), *tables, **inputs.scales, out=out, lse=lse, workspace=workspace)
    if not concurrent:
        assert not workspace.any(), "a launch leaves the workspace as it found it"
    return out, lse


def attend(inputs: Inputs, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out f64, lse f64, out of same-dtype PyTorch) of one row, nothing shared with the package.

    For 8-bit and scaled caches, the real values are used, rounded to q's dtype for PyTorch. PyTorch's math backend is the same
    on every device. The query heads of a KV head become its query rows, so that K and V are not copied for each head.
    """
    shape = inputs.shape
    if not shape.lengths[row]:
        zero = torch.zeros_like(inputs.q[row])
        return zero.double(), torch.full(zero.shape[:1], -math.inf, dtype=torch.float64, device=zero.device), zero
    q, k = inputs.q[row].unflatten(0, (shape.num_kv_heads, -1)), inputs.real("k", row)
    logits = q.double() @ k.mT * shape.scale  # [num_kv_heads, group_size, length]
    k, v = k.to(shape.dtype), inputs.real("v", row)
    out, lse = torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1).flatten()
    with sdpa_kernel(SDPBackend.MATH):
        same = F.scaled_dot_product_attention(q[None], k[None], v[None].to(shape.dtype), scale=shape.scale)[0]
    return out.flatten(0, 1), lse / math.log(2) if shape.lse_base == "2" else lse, same.flatten(0, 1)


def assert_close(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, rows: list[int] | None = None, tolerance: Tolerance | None = None
) -> None:
    """Asserts that every head of every row, or of `rows`, is as near f64 as tolerance.py asks; empty rows are (+0.0, -inf)."""
    rows = list(range(len(inputs.shape.lengths))) if rows is None else rows
    exact, exact_lse, same = (torch.stack(t) for t in zip(*(attend(inputs, row) for row in rows), strict=True))
    check_states((out[rows], lse[rows]), (exact, exact_lse), same, rows, tolerance)


def assert_bitwise(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Asserts that out and lse are equal bit for bit."""
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
