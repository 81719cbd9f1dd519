"""paged_attention() under torch.autograd, and the reference's backward under gradcheck. Its edges: test_functional_edges.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.attention import reference as forward_reference
from cute_kernels.attention.operands import Extras
from cute_kernels.attention.operands import Operands as AttentionOperands
from cute_kernels.backward.checks import Operands
from cute_kernels.backward.reference import backward
from cute_kernels.config.modifiers import Modifiers

F64 = torch.float64
EVERYTHING = Modifiers(causal="bottom_right", window_left=True, softcap=True, alibi=True, sinks=True)
TABLE = ck.PageTable.dense(torch.tensor([[2, 0, 2], [2, 3, -1]], dtype=torch.int32), torch.tensor([8, 5], dtype=torch.int32))
INDPTR = torch.tensor([0, 3, 5], dtype=torch.int32)


class Reference(torch.autograd.Function):
    """The reference, forward and backward, in f64: two requests that share a page, which the first has twice."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scoring: forward_reference.Scoring) -> Tensor:
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=F64)
        operands = AttentionOperands(q, k, v, None, None, None, None, None, out, lse, None)
        rules = scoring._replace(sinks=sinks)
        forward_reference.attention(operands, TABLE, rules, "ragged", 3, Extras(INDPTR), F64)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scoring = rules
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        made = [torch.full_like(t, math.nan) for t in (q, k, v, sinks)]
        tensors = (dout, q, k, v, out, lse, None, None, None, INDPTR, ctx.scoring.alibi_slopes, sinks, *made, None)
        backward(Operands(*tensors), TABLE, ctx.scoring, "ragged", 3, dtype=F64)
        return *made, None


@pytest.mark.parametrize("modifiers", [Modifiers(), Modifiers(causal="top_left"), EVERYTHING], ids=str)
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_gradcheck(modifiers: Modifiers, lse_base: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=F64).requires_grad_()

    slopes = torch.rand(4, generator=generator, dtype=F64) if modifiers.alibi else None
    scoring = forward_reference.Scoring(0.6, lse_base, modifiers, 3, 0, 1.5, slopes)
    operands = normal(5, 4, 3), normal(4, 2, 3, 3), normal(4, 2, 3, 3), normal(4)
    if not modifiers.sinks:
        operands = (*operands[:3], torch.full((4,), -math.inf, dtype=F64))
    assert torch.autograd.gradcheck(lambda *t: Reference.apply(*t, scoring), operands, eps=1e-6, atol=1e-7, rtol=1e-5)


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Causal attention of q [n, num_heads, d] over k and v [num_kv_heads, t, d], in plain torch."""
    n, heads, d = q.shape
    k, v = (t.repeat_interleave(heads // len(t), 0) for t in (k, v))
    scores = torch.einsum("nhd,htd->hnt", q, k) * d**-0.5
    hidden = torch.arange(k.shape[1]) > torch.arange(n)[:, None] + (k.shape[1] - n)
    scores = scores.masked_fill(hidden.to(q.device), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).view(-1, 1, 1).expand(heads, n, 1)], -1)
    return torch.einsum("hnt,htd->nhd", scores.softmax(-1)[..., : k.shape[1]], v)


BACKENDS = [
    pytest.param("cpu", torch.float32, id="cpu"),
    pytest.param("cuda", torch.bfloat16, id="cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float32, id="cuda-f32", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "dtype"), BACKENDS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_paged_ragged_call_is_differentiable(device: str, dtype: torch.dtype, with_sinks: bool) -> None:
    """Two requests with a page in common, against autograd in f64."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(s, generator=generator).to(device, dtype) for s in ((9, 8, 64), (6, 2, 16, 64), (6, 2, 16, 64)))
    weight = torch.randn(9, 8, 64, generator=generator).to(device, dtype)
    sinks = torch.randn(8, generator=generator).to(device) if with_sinks else None
    table = torch.tensor([[4, 1, 0], [4, 2, -1]], dtype=torch.int32, device=device)
    lengths, indptr = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([40, 20], [0, 4, 9]))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *([sinks] if with_sinks else []))]
    given = {"page_table": table, "seq_lens": lengths, "qo_indptr": indptr, "sinks": leaves[3] if with_sinks else None}
    out, lse = ck.paged_attention(*leaves[:3], **given)
    assert out.requires_grad and not lse.requires_grad
    (out * weight).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    pages = [exact[1 + i].transpose(1, 2)[table[b, :n].long()].flatten(0, 1) for b, n in ((0, 3), (1, 2)) for i in range(2)]
    tokens = [t[:n].transpose(0, 1) for t, n in zip(pages, (40, 40, 20, 20), strict=True)]
    sink = exact[3] if with_sinks else None
    want = torch.cat([dense(exact[0][:4], tokens[0], tokens[1], sink), dense(exact[0][4:], tokens[2], tokens[3], sink)])
    (want * weight.double()).sum().backward()
    limit = 1e-5 if dtype == torch.float32 else 2**-6
    for ours, theirs in zip(leaves, exact, strict=True):
        assert ours.grad is not None and ours.grad.dtype == ours.dtype and theirs.grad is not None
        assert (ours.grad.double() - theirs.grad).norm() <= limit * theirs.grad.norm()
    assert not leaves[1].grad[[3, 5]].any() and not leaves[1].grad[0, :, 8:].any()  # read by nobody


@pytest.mark.parametrize(("device", "dtype"), BACKENDS)
@pytest.mark.parametrize("wanted", ["q", "k_cache", "v_cache"])
def test_one_operand_alone_may_want_a_gradient(wanted: str, device: str, dtype: torch.dtype) -> None:
    """Over a contiguous cache; out.sum() gives a gradient of stride 0."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"q": (2, 5, 4, 64), "k_cache": (2, 2, 7, 64), "v_cache": (2, 2, 7, 64)}
    given = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    given[wanted].requires_grad_()
    out, _ = ck.paged_attention(**given, layout="HND")
    out.float().sum().backward()
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    want = [dense(exact["q"][b], exact["k_cache"][b], exact["v_cache"][b], None) for b in range(2)]
    sum(t.sum() for t in want).backward()
    ours, theirs = given[wanted].grad, exact[wanted].grad
    assert ours is not None and theirs is not None
    assert (ours.double() - theirs).norm() <= (1e-5 if dtype == torch.float32 else 2**-6) * theirs.norm()
    assert all(t.grad is None for name, t in given.items() if name != wanted)


def operands(**changes: Any) -> dict[str, Any]:
    """Of a call without a page table."""
    shapes = {"q": (2, 5, 4, 64), "k_cache": (2, 2, 7, 64), "v_cache": (2, 2, 7, 64)}
    return {**{name: torch.ones(shape, requires_grad=name == "q") for name, shape in shapes.items()}, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"k_cache": torch.ones(2, 2, 7, 64).to(torch.float8_e4m3fn)}, ck.Unsupported, "k_cache is stored as e4m3"),
        ({"v_cache": torch.ones(2, 2, 7, 64, dtype=torch.int8)}, ck.Unsupported, "v_cache is stored as int8: .*zero almost"),
        ({"k_scale": torch.ones(1)}, ck.Unsupported, "k_scale is given: a scaled cache has no backward"),
        ({"tree_mask": torch.ones(10, 1, dtype=torch.int32)}, ck.Unsupported, "tree_mask is given"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, ck.Unsupported, "alibi_slopes.requires_grad = True"),
        ({"out": torch.ones(2, 5, 4, 64)}, ck.InvalidArgument, "out: given beside operands that require gradients"),
        ({"lse": torch.ones(10, 4)}, ck.InvalidArgument, "lse: given beside operands"),
    ],
    ids=str,
)
def test_what_has_no_gradient_is_refused(changes: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ck.paged_attention(**operands(**changes))
    if "alibi_slopes" not in changes and "k_cache" not in changes and "v_cache" not in changes:
        with torch.no_grad():
            ck.paged_attention(**operands(**changes))


def test_8_bit_caches_that_require_gradients_are_refused() -> None:
    k = torch.ones(2, 2, 7, 64).to(torch.float8_e4m3fn).requires_grad_()
    given = operands(k_cache=k, v_cache=k.detach().clone())
    with pytest.raises(ck.Unsupported, match="whose gradient is zero almost everywhere"):
        ck.paged_attention(**{**given, "q": given["q"].detach()})


def test_without_gradients_nothing_is_recorded() -> None:
    with torch.no_grad():
        out, _ = ck.paged_attention(**operands())
    assert not out.requires_grad
    given = operands()
    out, _ = ck.paged_attention(**{**given, "q": given["q"].detach()})
    assert out.grad_fn is None


def test_a_cache_that_changes_before_the_backward_is_noticed() -> None:
    given = operands()
    out, _ = ck.paged_attention(**given)
    given["k_cache"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_have_no_gradients() -> None:
    given = operands()
    (dq,) = torch.autograd.grad(ck.paged_attention(**given)[0].square().sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_a_compiled_call_is_differentiable() -> None:
    """Traced, both are torch ops."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(s, generator=generator) for s in ((2, 5, 4, 64), (2, 2, 7, 64), (2, 2, 7, 64)))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ck.paged_attention(q, k, v, softcap=2.0)[0].square().sum()

    found = []
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        call(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)
