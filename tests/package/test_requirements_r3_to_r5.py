"""What three of five existing systems do, row by row: R3 paged attention, R4 FlashDecoding, R5 a paged configuration for TMA.

R1 and R2 are in test_requirements.py. Each row once, through the calls that a program of theirs comes to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.attention.variants import explain
from cute_kernels.kv import geometry
from cute_kernels.planning.variants import PRETEND
from tests.package.test_requirements import DTYPES, EVERY_BACKEND, wrong
from tests.support import attention_harness as several
from tests.support import backward_harness as gradients
from tests.support.attention_cases import case, make_attention
from tests.support.backward_cases import backward_case, make_backward
from tests.support.harness import ONE_CALL, assert_bitwise, assert_close, device_of, select
from tests.support.inputs import Shape, make_inputs

F16, BF16, F32, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8

# R3: paged attention forward and backward


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize(("head_dim", "q_len"), [(64, 1), (128, 5)], ids=["d64_q1", "d128_q5"])
def test_r3_forward(head_dim: int, q_len: int, causal: str | None, dtype: torch.dtype, backend: str) -> None:
    """q [B, Hq, Sq, D] as a view, HND pages, a dense table: O and lse, natural log."""
    lengths = (5, 64, 200, 33)
    fields = {"uniform": True, "strided": True, "q_lens": (q_len,) * 4, "max_q_len": q_len, "causal": causal}
    row = case("r3", {"lengths": lengths, "head_dim": head_dim, "dtype": dtype}, **fields)
    inputs = make_attention(row, device_of(backend))
    assert inputs.q.transpose(1, 2).is_contiguous()
    several.assert_close(inputs, several.run(several.select(row, backend), inputs))


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("causal", [None, "top_left"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_r3_backward(head_dim: int, causal: str | None, dtype: torch.dtype, backend: str) -> None:
    """Each row of dQ, dK and dV is compared with f64, over HND pages that requests share."""
    fields = {"uniform": True, "strided": True, "q_lens": (5,) * 4, "max_q_len": 5, "causal": causal}
    cache = {"lengths": (5, 64, 200, 33), "head_dim": head_dim, "dtype": dtype}
    row = backward_case("r3", cache, own={"shared": True}, **fields)
    inputs, plan = make_backward(row, device_of(backend)), gradients.select(row, backend)
    first = gradients.run(plan, inputs)
    gradients.assert_close(inputs, first)
    gradients.assert_bitwise(gradients.bits(gradients.run(plan, inputs)), gradients.bits(first))


@pytest.mark.parametrize("backend", ONE_CALL)
def test_r3_backward_by_autograd(backend: str) -> None:
    """Each row that loss.backward() gives is compared with f64; q [B, Hq, Sq, D] is a view."""
    device, dtype = device_of(backend), F32 if backend == "cpu" else BF16
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, heads, n, 64, generator=generator) for heads, n in ((8, 5), (2, 33), (2, 33), (8, 5)))
    leaves = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
    out, _ = ck.paged_attention(leaves[0].transpose(1, 2), *leaves[1:], causal="top_left")
    out.transpose(1, 2).backward(dout.to(device, dtype))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    hidden = torch.arange(33, device=device) > torch.arange(5, device=device)[:, None]
    wide_k, wide_v = (t.repeat_interleave(4, 1) for t in exact[1:])
    scores = (exact[0] @ wide_k.mT / 8).masked_fill(hidden, -math.inf)
    (scores.softmax(-1) @ wide_v).backward(dout.to(device, dtype).double())
    limit = 1e-5 if dtype == F32 else 2**-6
    for leaf, theirs in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and theirs.grad is not None
        error, size = (leaf.grad.double() - theirs.grad).norm(dim=-1), theirs.grad.norm(dim=-1)
        assert (error <= limit * size.clamp(min=size.max() / 4)).all()
    assert not any(leaf.grad[:, :, 5:].any() for leaf in leaves[1:] if leaf.grad is not None), "keys that no row sees"


def fp8_result(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of fp8 neighbours around each value, what a bf16 between takes of it, and a row's f16 weights."""
    bits, least = {torch.float8_e4m3fn: (3, 2.0**-6), torch.float8_e5m2: (2, 2.0**-14)}[dtype]
    half_a_step = 2.0 ** (exact.abs().clamp(min=least).log2().floor() - bits - 1)
    return half_a_step + 2.0**-8 * exact.abs() + 2.0**-10 * exact.abs().amax(-1, keepdim=True)


@pytest.mark.parametrize("backend", ONE_CALL)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_r3_fp8_forward(scaled: bool, dtype: torch.dtype, backend: str) -> None:
    """q, K, V and O of one fp8 type, with a scale each: against f64 on the real values, within half a step of O's type."""
    kv_dtype = E4M3 if dtype == torch.float8_e4m3fn else E5M2
    row = case("fp8", {"lengths": (5, 64, 200), "head_dim": 64, "kv_dtype": kv_dtype}, q_lens=(3, 1, 5), max_q_len=5)
    inputs = make_attention(row, device_of(backend))
    device = inputs.q.device
    factors = (0.5, 0.75, 1.5, 0.125) if scaled else (1.0,) * 4
    scales = [torch.tensor(factor, device=device) if scaled else None for factor in factors]
    q = inputs.q[:9].float().to(dtype)
    names = ("q_scale", "k_scale", "v_scale", "o_scale")
    out, lse = ck.fp8_attention(
        q, inputs.k, inputs.v, **dict(zip(names, scales, strict=True)), page_table=inputs.table,
        qo_indptr=inputs.extras["qo_indptr"], max_q_len=5,
    )  # fmt: skip
    assert out.dtype == dtype and lse.shape == (9, 8)
    for request in range(3):
        begin, n, length = row.begins[request], row.q_lens[request], row.cache.lengths[request]
        group = row.cache.num_heads // row.cache.num_kv_heads
        k, v = (inputs.kv.real(name, request).repeat_interleave(group, 0) for name in "kv")
        scores = torch.einsum("nhd,htd->hnt", q[begin : begin + n].double(), k) * (factors[0] * factors[1] / 8)
        hidden = torch.arange(length, device=device) > torch.arange(length - n, length, device=device)[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
        exact = torch.einsum("hnt,htd->nhd", scores.softmax(-1), v) * (factors[2] / factors[3])
        assert ((out[begin : begin + n].double() - exact).abs() <= fp8_result(exact, dtype)).all()
        assert (lse[begin : begin + n].double() - scores.logsumexp(-1).T).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"q": torch.zeros(1, 4, 64)}, ck.Unsupported, "q.dtype"),
        ({"k_cache": torch.zeros(2, 2, 16, 64).to(torch.float8_e5m2)}, ck.InvalidArgument, "k_cache"),
        ({"o_scale": torch.ones(2)}, ck.InvalidArgument, "o_scale"),
        ({"q_scale": 2.0}, ck.InvalidArgument, "q_scale"),
        ({"out": torch.zeros(1)}, ck.InvalidArgument, "out"),
    ],
    ids=["q", "mixed", "scale_shape", "scale_float", "out"],
)
def test_r3_fp8_forward_refuses(changes: dict, error: type[Exception], names: str) -> None:
    caches = {name: torch.zeros(2, 2, 16, 64).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    given = {"q": torch.zeros(1, 1, 4, 64).to(torch.float8_e4m3fn), **caches, "page_table": torch.zeros(1, 2, dtype=I32)}
    with pytest.raises(error, match=names):
        ck.fp8_attention(**{**given, "seq_lens": 3, **changes})


def test_r3_a_head_dim_that_no_kernel_has_is_named() -> None:
    for descriptor in (
        ck.PagedAttentionDescriptor(
            batch_size=1, num_heads=4, num_kv_heads=2, head_dim=257, page_size=16, q_dtype=F16, max_q_len=4
        ),
        ck.PagedDecodeDescriptor(1, 4, 2, 257, 16, F16),
    ):
        with pytest.raises(ck.Unsupported, match=r"head_dim=257 is outside 1\.\.256"):
            _ = explain(descriptor.problem, PRETEND["h200"]).chosen


# R4: FlashDecoding over a contiguous cache


@EVERY_BACKEND
@DTYPES
@pytest.mark.parametrize("head_dim", [1, 33, 64, 128])
@pytest.mark.parametrize("keys", [0, 1, 300])
def test_r4_decode(keys: int, head_dim: int, dtype: torch.dtype, backend: str) -> None:
    """MHA and GQA by the constructors, caches in any strides with a unit last one, no keys, another scale."""
    if backend == "sm90" and head_dim % 16:
        pytest.skip("TMA needs whole steps: the cp.async variant serves these, below")
    for heads, made in (
        (2, ck.FlashDecodingDescriptor.new(3, 2, keys, head_dim, dtype)),
        (8, ck.FlashDecodingDescriptor.new_gqa(3, 8, 2, keys, head_dim, dtype)),
    ):
        assert made.group_size == heads // 2
        shape = Shape(heads, 2, head_dim, 0, (keys,) * 3, dtype, softmax_scale=0.3)
        inputs = make_inputs(shape, device_of(backend))
        inputs.v = inputs.v.abs()  # few columns of both signs may cancel
        inputs.k, inputs.v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (inputs.k, inputs.v))
        plan = ck.FlashDecodingPlan.select(made.with_scale(0.3), device_of(backend), ck.PlanPreference(arch=backend))
        first = plan.run(inputs.q, inputs.k, inputs.v, workspace=plan.new_workspace())
        assert_close(inputs, *first)
        assert_bitwise(plan.run(inputs.q, inputs.k, inputs.v, workspace=plan.new_workspace()), first)


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ((0, 30, 8, 9, 300, torch.int8), ck.Unsupported, "dtype = torch.int8"),
        ((1, 0, 8, 9, 300, F16), ck.InvalidProblem, "num_heads = 0"),
        ((1, 30, 0, 9, 300, F16), ck.InvalidProblem, "num_kv_heads = 0"),
        ((1, 30, 8, 9, 300, F16), ck.InvalidProblem, "num_heads = 30"),
        ((1, 32, 8, 9, 300, F16), ck.Unsupported, "head_dim=300"),
    ],
    ids=["dtype", "extent", "no_kv_heads", "divisibility", "head_dim"],
)
def test_r4_errors_in_order(arguments: tuple, error: type[Exception], names: str) -> None:
    """Each call has all later mistakes too."""
    with pytest.raises(error) as caught:
        _ = explain(ck.FlashDecodingDescriptor.new_gqa(*arguments).problem, PRETEND["h200"]).chosen
    assert names in str(caught.value)


@EVERY_BACKEND
@DTYPES
@pytest.mark.parametrize("keys", [1, 300])
@pytest.mark.parametrize("num_kv_heads", [2, 8], ids=["gqa", "mha"])
def test_r4_weights(num_kv_heads: int, keys: int, dtype: torch.dtype, backend: str) -> None:
    """Weights [B, H, K] and their mean over the heads come from decode's lse, and are off f64 by what an lse may be off."""
    device, preference = device_of(backend), ck.PlanPreference(arch=backend)
    shape = Shape(8, num_kv_heads, 64, 0, (keys,) * 3, dtype)
    inputs = make_inputs(shape, device)
    decode = ck.FlashDecodingPlan.select(
        ck.FlashDecodingDescriptor.new_gqa(3, 8, num_kv_heads, keys, 64, dtype), device, preference
    )
    _, lse = decode.run(inputs.q, inputs.k, inputs.v, workspace=decode.new_workspace())
    d = ck.AttentionWeightsDescriptor(3, 8, num_kv_heads, 64, None, dtype, keys, table_format="none", mean=True)
    plan = ck.AttentionWeightsPlan.select(d, device, preference)
    got = plan.run(inputs.q, inputs.k, lse, ck.PageTable.whole())
    assert got.weights is not None and got.mean is not None and got.weights.shape == (3, 8, keys)
    q, k = inputs.q.double(), inputs.k.double().repeat_interleave(8 // num_kv_heads, 1)
    scores, sizes = torch.einsum("bhd,bhtd->bht", q, k) / 8, torch.einsum("bhd,bhtd->bht", q.abs(), k.abs()) / 8
    exact = scores.softmax(-1)
    allowed = 2e-5 * exact * torch.maximum(sizes, scores.logsumexp(-1, keepdim=True).abs()).clamp(min=1.0)
    assert ((got.weights - exact).abs() <= allowed).all()
    assert ((got.mean - exact.mean(1)).abs() <= allowed.mean(1)).all()
    assert ((got.weights.double().sum(-1) - 1).abs() <= allowed.sum(-1)).all()


def test_r4_workspace(pretend_h200: list) -> None:
    """Their formula, and ours: exact, 0 for an empty batch or no keys, and None is taken only where it is 0."""
    assert geometry.split_workspace_bytes(4, 32, 8, 128) == 4 * 32 * 8 * (2 + 128) * 4
    descriptor = ck.FlashDecodingDescriptor.new_gqa(2, 8, 2, 4096, 64, F16)
    plan = ck.FlashDecodingPlan.select(descriptor, "cpu")
    q, cache = torch.zeros(2, 8, 64, dtype=F16), torch.zeros(2, 2, 4096, 64, dtype=F16)
    assert plan.workspace_size() > 0
    with pytest.raises(ck.WorkspaceTooSmall):
        plan.run(q, cache, cache)
    empty = ck.FlashDecodingPlan.select(replace(descriptor, batch_size=0), "cpu")
    assert empty.workspace_size() == 0
    empty.run(q[:0], cache[:0], cache[:0])
    none = ck.FlashDecodingPlan.select(replace(descriptor, seq_len=0), "cpu")
    assert none.workspace_size() == 0 and none.workspace_regions() == ()
    out, lse = none.run(q, cache[:, :, :0], cache[:, :, :0])
    assert not out.any() and lse.isneginf().all()
    any_length = ck.FlashDecodingPlan.select(replace(descriptor, seq_len=None), "cpu")
    assert any_length.workspace_size() > 0, "a run may have keys"
    assert pretend_h200 == []


# R5: a paged configuration with TMA descriptors


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("page_size", [16, 128, 100])
def test_r5_decode(page_size: int, dtype: torch.dtype, backend: str) -> None:
    """q [B, Hq, 1, D], a dense table, lengths on the device."""
    if backend == "sm90" and page_size % 8:
        pytest.skip("TMA boxes are of 8 tokens: the cp.async variant serves these, below")
    shape = Shape(8, 2, 64, page_size, (0, 1, 127, 300), dtype)
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    out, lse = plan.run(inputs.q.unsqueeze(2), *inputs.caches(), inputs.table(), workspace=plan.new_workspace())
    assert out.shape == (4, 8, 1, 64)
    assert_close(inputs, out.squeeze(2), lse)


def test_r5_geometry() -> None:
    """Their numbers."""
    assert geometry.block_bytes(128, 64, 2) == 128 * 64 * 2 * 2
    assert geometry.page_stride_bytes(128, 64, 2) == geometry.block_bytes(128, 64, 2) // 2
    box = geometry.tma_box(64, 128, 4)
    assert (box.num_dims, box.inner, box.outer, box.element_bytes, box.nbytes) == (2, 128, 64, 4, 64 * 128 * 4)
    for head_dim, strides in ((3, ()), (128, (8,))):
        with pytest.raises(ck.MisalignedOperand):
            geometry.tma_box(64, head_dim, 2, strides)
    assert geometry.smem_bytes(64, 128, 2, 2) == 2 * 2 * 64 * 128 * 2 + 16 * 128 * 2
    assert [geometry.pages_of_row(n, 128) for n in (0, 4096, 4097)] == [0, 32, 33]
    assert geometry.group_size(32, 8) == 4 and geometry.threads("sm90", 8) == 320


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: geometry.block_bytes(1.5, 64, 2), "page_size = 1.5: must be an int of at least 1"),
        (lambda: geometry.page_stride_bytes(16, True, 2), "head_dim = True: must be an int of at least 1"),
        (lambda: geometry.pages_of_row(1.5, 128), "seq_len = 1.5: must be an int of at least 0"),
        (lambda: geometry.pages_of_row(-1, 128), "seq_len = -1: must be an int of at least 0"),
        (lambda: geometry.split_workspace_bytes(2.0, 8, 3, 64), "batch_size = 2.0: must be an int of at least 0"),
        (lambda: geometry.smem_bytes(16, 64, 2, "3"), "num_stages = '3': must be an int of at least 1"),
        (lambda: geometry.group_size(8, 0), "num_kv_heads = 0: must be an int of at least 1"),
        (lambda: geometry.tma_box(16, 64, 2, (0,)), "stride_bytes = 0: must be an int of at least 1"),
        (lambda: geometry.tma_box(16, 64, 2, (4096, -16)), "stride_bytes = -16: must be an int of at least 1"),
        (lambda: geometry.tma_box(16, 64, 2, 128), "stride_bytes = 128: must be a tuple of ints"),
        (lambda: geometry.threads("cpu", 4), "arch = 'cpu': must be 'sm90' or 'sm80'"),
        (lambda: geometry.threads("sm100", 4), "arch = 'sm100': must be 'sm90' or 'sm80'"),
        (lambda: geometry.threads("sm90", 0), "num_warps = 0: must be an int of at least 1"),
    ],
)
def test_r5_geometry_errors(call: Callable[[], object], names: str) -> None:
    with pytest.raises(ck.InvalidProblem) as caught:
        call()
    assert names in str(caught.value)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(30, 8), (4, 8)])
def test_r5_heads_that_do_not_divide(num_heads: int, num_kv_heads: int) -> None:
    """A descriptor and a function refuse Hq % Hkv."""
    rule = f"num_heads = {num_heads}: must be a multiple of num_kv_heads = {num_kv_heads}"
    for make in (
        lambda: geometry.group_size(num_heads, num_kv_heads),
        lambda: ck.PagedDecodeDescriptor(1, num_heads, num_kv_heads, 64, 16, F16),
    ):
        with pytest.raises(ck.InvalidProblem, match=rule):
            make()


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("spoil", "error", "names"),
    [
        (wrong("q", lambda t: t.unsqueeze(2).repeat(1, 1, 2, 1)), ck.Unsupported, "q.shape"),
        (wrong("q", lambda t: t[..., :32]), ck.InvalidProblem, "q.shape"),
        (wrong("q", lambda t: t[:, :6]), ck.InvalidProblem, "q.shape"),
        (wrong("out", lambda t: t[:2]), ck.InvalidProblem, "out.shape"),
        (wrong("page_table", lambda t: ck.PageTable.dense(t.operands[0], t.operands[1][:-1])), ck.InvalidProblem, "seq_lens"),
    ],
    ids=["several_rows", "head_dim", "heads", "out", "seq_lens"],
)
def test_r5_errors(spoil: Callable[[dict], None], error: type[Exception], names: str, backend: str) -> None:
    shape = Shape(8, 2, 64, 16, (1, 127, 300), F32)
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    given: dict[str, Any] = {**inputs.operands()._asdict(), "out": torch.empty_like(inputs.q)}
    spoil(given)
    with pytest.raises(error) as caught:
        plan.can_implement(**given)
    assert names in str(caught.value)
    if names == "seq_lens":
        assert "2" in str(caught.value) and "3" in str(caught.value), "what was given and what is needed"
