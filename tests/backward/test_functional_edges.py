"""paged_attention() under torch.autograd at its edges: odd addresses, nothing to read, sinks of -inf, what a device lacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.api import torch_ops
from cute_kernels.backward import plan as backward
from cute_kernels.backward.variants import explain
from cute_kernels.planning.variants import PRETEND

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BACKENDS = [
    pytest.param("cpu", F32, id="cpu-f32"),
    pytest.param("cpu", F16, id="cpu-f16"),
    pytest.param("cuda", BF16, id="cuda-bf16", marks=pytest.mark.gpu),
]
HOW = pytest.mark.parametrize("how", ["eager", "compiled"])


def i32(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [batch, n, heads, d] over k and v [batch, kv_heads, t, d], in plain torch."""
    n, t, group = q.shape[1], k.shape[2], q.shape[2] // k.shape[1]
    k, v = (c.repeat_interleave(group, 1) for c in (k, v))
    hidden = torch.arange(t, device=q.device) > torch.arange(n, device=q.device)[:, None] + (t - n)
    scores = (torch.einsum("bnhd,bhtd->bhnt", q, k) * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf)
    return torch.einsum("bhnt,bhtd->bnhd", scores.softmax(-1), v)


def assert_gradients(step: Callable[..., Tensor], how: str, leaves: list[Tensor]) -> None:
    """Compares the gradients of step(attend, *leaves), a scalar, with those of f64, each row of head_dim by itself.

    A row whose terms cancel is allowed what one of a quarter of the largest is.
    """
    run = torch.compile(step, backend="aot_eager", fullgraph=True) if how == "compiled" else step
    mine, exact = ([t.detach().to(dtype).requires_grad_() for t in leaves] for dtype in (leaves[0].dtype, F64))
    run(lambda *t: ck.paged_attention(*t)[0], *mine).backward()
    step(dense, *exact).backward()
    limit = 2e-5 if leaves[0].dtype == F32 else 8 * torch.finfo(leaves[0].dtype).eps
    for ours, theirs in zip(mine, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        error, size = (ours.grad.double() - theirs.grad).norm(dim=-1), theirs.grad.norm(dim=-1)
        assert (error <= limit * size.clamp(min=size.max() / 4)).all(), (error / size.clamp(min=size.max() / 4)).max()


@pytest.mark.parametrize(("device", "dtype"), BACKENDS)
@HOW
@pytest.mark.parametrize("offset", [4, 8], ids=["8_bytes_of_16", "16_bytes_of_16"])
def test_q_is_a_slice_of_a_fused_projection(offset: int, how: str, device: str, dtype: torch.dtype) -> None:
    """Attention takes pairs of elements at a time, its backward 16 bytes: where a slice has less, a copy of it is read."""
    columns = offset if dtype != F32 else offset // 2
    fused = normal(2, 5, 256 + columns, dtype=dtype, device=device)
    k, v, weight = (normal(*shape, dtype=dtype, device=device) for shape in ((2, 2, 7, 64), (2, 2, 7, 64), (2, 5, 4, 64)))

    def step(attend: Callable[..., Tensor], fused: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attend(fused[..., columns:].unflatten(2, (4, 64)), k, v) * weight).sum(dtype=F64)

    assert_gradients(step, how, [fused, k, v])


@pytest.mark.parametrize(("device", "dtype"), BACKENDS)
@HOW
@pytest.mark.parametrize("kind", ["odd_address", "expanded_rows", "expanded", "transposed"])
def test_gradients_of_out_in_any_memory(kind: str, how: str, device: str, dtype: torch.dtype) -> None:
    q, k, v = (normal(*shape, dtype=dtype, device=device) for shape in ((2, 5, 4, 64), (2, 2, 7, 64), (2, 2, 7, 64)))
    weight = normal(1 + q.numel(), dtype=dtype, device=device, seed=1)

    def step(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        if kind == "odd_address":
            return (torch.cat([q.new_ones(1), out.flatten()]) * weight).sum(dtype=F64)
        if kind == "transposed":
            return (out.transpose(0, 1).flatten() * weight[1:]).sum(dtype=F64)
        return (out.sum((0, 1)) * weight[:256].view(4, 64)).sum() if kind == "expanded_rows" else out.sum()

    assert_gradients(step, how, [q, k, v])


def test_what_is_aligned_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, w = normal(2, 5, 4, 64).requires_grad_(), normal(2, 2, 7, 64), normal(2, 5, 4, 64)
    seen, run = [], backward.PagedAttentionBackwardPlan.run

    def watched(self: Any, dout: Tensor, q: Tensor, *rest: Any, **given: Any) -> Any:
        seen.append((dout.data_ptr(), q.data_ptr()))
        return run(self, dout, q, *rest, **given)

    monkeypatch.setattr(backward.PagedAttentionBackwardPlan, "run", watched)
    ck.paged_attention(q, k, k)[0].backward(w)
    assert seen == [(w.data_ptr(), q.data_ptr())]


def pages(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), -1)


NOTHING = {
    "batch_of_none": ((0, 1, 4, 64), (3, 2, 16, 64), {"page_table": torch.zeros(0, 2, dtype=torch.int32), "seq_lens": i32()}),
    "contiguous_batch_of_none": ((0, 1, 4, 64), (0, 2, 7, 64), {}),
    "csr_batch_of_none": (
        (0, 4, 64),
        (3, 2, 16, 64),
        {"page_table": ck.PageTable.csr(i32(0), i32(), i32()), "qo_indptr": i32(0)},
    ),
    "no_rows": ((0, 4, 64), (3, 2, 16, 64), {"page_table": pages([0, 1]), "seq_lens": i32(5), "qo_indptr": i32(0, 0)}),
    "no_pages": ((2, 1, 4, 64), (0, 2, 16, 64), {"page_table": pages([0], [0]), "seq_lens": i32(0, 0)}),
    "no_pages_ragged": (
        (3, 4, 64),
        (0, 2, 16, 64),
        {"page_table": pages([0], [0]), "seq_lens": i32(0, 0), "qo_indptr": i32(0, 1, 3)},
    ),
    "no_columns": ((2, 1, 4, 64), (3, 2, 16, 64), {"page_table": torch.zeros(2, 0, dtype=torch.int32), "seq_lens": i32(0, 0)}),
    "no_keys": ((2, 3, 4, 64), (2, 2, 0, 64), {}),
}


def on(device: str, value: Any) -> Any:
    if isinstance(value, ck.PageTable):
        return ck.PageTable(value.format, tuple(None if t is None else t.to(device) for t in value.operands))
    return value.to(device)


@pytest.mark.parametrize(("device", "dtype"), BACKENDS)
@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("how", ["sum", "square"])
def test_nothing_to_read_has_gradients_of_zero(how: str, name: str, device: str, dtype: torch.dtype) -> None:
    """So it is where the gradient of out has no elements, and strides of 0."""
    rows, cache, given = NOTHING[name]
    leaves = [normal(*shape, dtype=dtype, device=device).requires_grad_() for shape in (rows, cache, cache)]
    sinks = torch.zeros(4, device=device, requires_grad=True)
    out, _ = ck.paged_attention(*leaves, sinks=sinks, **{key: on(device, value) for key, value in given.items()})
    assert out.shape == rows and not out.any()
    (out.square() if how == "square" else out).sum().backward()
    for leaf in (*leaves, sinks):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize(("device", "dtype"), BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_sinks_of_minus_infinity_have_no_gradient(lse_base: str, device: str, dtype: torch.dtype) -> None:
    """It is 0 also where a row sees no key, so that its lse is -inf; a finite sink has the gradient of f64."""
    q, k, v, weight = (normal(2, n, 4, 64, dtype=dtype, device=device, seed=n) for n in (2, 5, 6, 3))
    k, v, weight = k.transpose(1, 2)[:, :2], v.transpose(1, 2)[:, :2, :5], weight[:, :2]
    sinks = torch.tensor([0.5, -math.inf, 1.0, -math.inf], device=device).requires_grad_()
    q = q.requires_grad_()
    lengths = i32(5, 0, device=device)
    out, lse = ck.paged_attention(q, k.contiguous(), v.contiguous(), seq_lens=lengths, sinks=sinks, lse_base=lse_base)
    assert lse[2:, 1].isneginf().all()
    (out * weight).sum(dtype=F64).backward()
    exact, exact_q = (t.detach().double().requires_grad_() for t in (sinks, q))
    keys, values = (t[0].double().repeat_interleave(2, 0) for t in (k, v))
    hidden = torch.arange(5, device=device) > torch.arange(2, device=device)[:, None] + 3
    scores = (torch.einsum("nhd,htd->hnt", exact_q[0], keys) / 8).masked_fill(hidden, -math.inf)
    weights, on_sink = torch.cat([scores, exact.view(4, 1, 1).expand(4, 2, 1)], -1).softmax(-1).split([5, 1], -1)
    exact_out = torch.einsum("hnt,htd->nhd", weights, values)
    (exact_out * weight[0]).sum().backward()
    assert exact.grad is not None and exact_q.grad is not None and sinks.grad is not None and q.grad is not None
    limit = 1e-5 if dtype == F32 else 2**-6
    assert sinks.grad[1] == sinks.grad[3] == 0.0 and not q.grad[1].any()
    # a row's dout . out cancels, so that the rounding of out shows by the norms of both
    sizes = (on_sink[..., 0].T * weight[0].double().norm(dim=-1) * exact_out.norm(dim=-1)).sum(0)
    assert ((sinks.grad - exact.grad).abs() <= limit / 16 * sizes).all()
    assert ((q.grad[0].double() - exact_q.grad[0]).norm(dim=-1) <= 8 * limit * exact_q.grad[0].norm(dim=-1)).all()


LACKING = [
    ({"dtype": F32, "head_dim": 62}, "sm90_backward: head_dim=62 is not a multiple of 4.*; sm80_backward: head_dim=62"),
    ({"head_dim": 60}, "sm90_backward: head_dim=60 is not a multiple of 8.*; sm80_backward: head_dim=60"),
    ({"shift": 1}, "sm90_backward: vector_bytes=2 is not 4, 8 or 16: .*; sm80_backward: vector_bytes=2"),
]


def call(device: str, dtype: torch.dtype = F16, head_dim: int = 64, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Calls attention with a q that requires gradients, and caches that begin `shift` elements past an aligned address."""
    q = normal(2, 3, 4, head_dim, dtype=dtype, device=device).requires_grad_()
    shape = (2, 2, 7, head_dim)
    k, v = (normal(math.prod(shape) + shift, dtype=dtype, device=device)[shift:].view(shape) for _ in range(2))
    return ck.paged_attention(q, k, v)


@pytest.mark.parametrize(("changes", "reasons"), LACKING, ids=str)
def test_a_device_without_a_backward_says_so_at_the_call(
    changes: dict[str, Any], reasons: str, monkeypatch: pytest.MonkeyPatch, no_plans: None
) -> None:
    """The plan is chosen as on an H200. Without gradients the call is served."""

    def on_h200(descriptor: Any, facts: Any, preference: Any) -> Any:
        return explain(descriptor, PRETEND["h200"], preference)

    monkeypatch.setattr(backward, "explain", on_h200)
    with pytest.raises(ck.Unsupported, match=reasons):
        call("cpu", **changes)
    with torch.no_grad():
        out, _ = call("cpu", **changes)
    assert not out.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize(("changes", "reasons"), LACKING, ids=str)
def test_a_gpu_without_a_backward_says_so_at_the_call(changes: dict[str, Any], reasons: str) -> None:
    with pytest.raises(ck.Unsupported, match=reasons):
        call("cuda", **changes)
    with torch.no_grad():
        call("cuda", **changes)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_backward(requires_grad: bool) -> None:
    rows, caches = [normal(2, 5, 4, 64, seed=seed) for seed in range(3)], [normal(2, 2, 7, 64, seed=seed) for seed in range(2)]
    out, lse = ck.paged_attention(rows[1], *caches)
    given = [t.clone().requires_grad_(requires_grad) for t in (rows[0], rows[1], *caches, out)]
    made = [torch.empty_like(t) for t in (rows[0], *caches)]
    masks = (None, "bottom_right", None, None, None)
    operands = (*given, lse, *(None,) * 6, *made, None, "none", *masks, None, "HND", "e")
    torch.library.opcheck(torch_ops.paged_attention_backward, operands)
