"""What five existing systems do, row by row: R1 paged decode over fp8, R2 int8 caches, R3 paged attention, R4 FlashDecoding,
R5 a paged configuration for TMA. Each row once, through the calls that a program of theirs comes to; details are other files'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cute_kernels as ck
from cute_kernels.attention.variants import explain
from cute_kernels.compile.kernels import compiled_specs
from cute_kernels.kv import geometry
from cute_kernels.planning.variants import PRETEND
from tests.support import attention_harness as several
from tests.support.attention_cases import case, make_attention
from tests.support.harness import BACKENDS, ONE_CALL, assert_bitwise, assert_close, attend, device_of, run, select
from tests.support.inputs import Inputs, Shape, make_inputs

F16, BF16, F32, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
R1 = Shape(
    num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, lengths=(1, 40, 300, 17), table_format="csr", lse_base="2",
    kv_dtype=E4M3, max_seq_len=4096,
)  # fmt: skip


# R1: paged decode with an fp8 cache


@EVERY_BACKEND
@DTYPES
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, None], ids=["e4m3", "e5m2", "homogeneous"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_r1_decode(head_dim: int, kv_dtype: ck.KVDtype | None, dtype: torch.dtype, backend: str) -> None:
    """HND pages, a CSR table, base 2, no scales; caches as float8 or as bytes; out of one token is the dequantised V."""
    shape = replace(R1, head_dim=head_dim, kv_dtype=kv_dtype, dtype=dtype)
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    out, lse = run(plan, inputs)
    assert_close(inputs, out, lse)
    alone = inputs.real("v", 0)[:, 0].repeat_interleave(4, 0).to(dtype)
    assert torch.equal(out[0], alone)
    if kv_dtype:
        as_bytes = replace(inputs, k=inputs.k.view(torch.uint8), v=inputs.v.view(torch.uint8))
        assert_bitwise(run(plan, as_bytes), (out, lse))


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"num_heads": 0, "head_dim": 300, "q_dtype": torch.int8}, ck.InvalidProblem, "num_heads = 0"),
        ({"page_size": 0, "num_kv_heads": 3}, ck.InvalidProblem, "page_size = 0"),
        ({"num_kv_heads": 3, "head_dim": 300, "q_dtype": torch.int8}, ck.InvalidProblem, "num_heads = 8"),
        ({"num_kv_heads": 0}, ck.InvalidProblem, "num_kv_heads = 0"),
        ({"head_dim": 300}, ck.Unsupported, "head_dim=300"),
        ({"q_dtype": torch.int8}, ck.Unsupported, "q_dtype = torch.int8"),
    ],
    ids=["extent", "extent_first", "divisibility", "no_kv_heads", "head_dim", "dtype"],
)
def test_r1_errors_of_select_in_order(changes: dict, error: type[Exception], names: str) -> None:
    """Extents, divisibility, then what no kernel serves."""
    fields = {"batch_size": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_dtype": F16}
    with pytest.raises(error) as caught:
        _ = explain(ck.PagedDecodeDescriptor(**{**fields, **changes}).problem, PRETEND["h200"]).chosen
    assert names in str(caught.value)


def wrong(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict], None]:
    def apply(given: dict[str, Any]) -> None:
        given[name] = change(given[name])

    return apply


def wrong_table(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[dict], None]:
    def apply(given: dict[str, Any]) -> None:
        indptr, indices, last = given["page_table"].operands[1], given["page_table"].operands[0], given["page_table"].operands[2]
        operands = [indptr, indices, last]
        operands[index] = change(operands[index])
        given["page_table"] = ck.PageTable.csr(*operands)

    return apply


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("spoil", "error", "names"),
    [
        (wrong("q", lambda t: t[:3]), ck.InvalidProblem, "q.shape"),
        (wrong("out", lambda t: t[..., :32]), ck.InvalidProblem, "out.shape"),
        (wrong("k_cache", lambda t: t[:, :1]), ck.InvalidProblem, "k_cache.shape"),
        (wrong("v_cache", lambda t: t[..., :32]), ck.InvalidProblem, "v_cache.shape"),
        (wrong_table(0, lambda t: t[:-1]), ck.InvalidProblem, "indptr"),
        (wrong_table(2, lambda t: t[:-1]), ck.InvalidProblem, "last_page_len"),
        (wrong("lse", lambda t: t[:, :3]), ck.InvalidProblem, "lse.shape"),
        (wrong("k_cache", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)), ck.Unsupported, "k_cache.stride"),
    ],
    ids=["q", "out", "k", "v", "indptr", "last_page_len", "lse", "strides"],
)
def test_r1_can_implement(spoil: Callable[[dict], None], error: type[Exception], names: str, backend: str) -> None:
    """Each is refused by can_implement and by run, before anything is written."""
    plan, inputs = select(R1, backend), make_inputs(R1, device_of(backend))
    given: dict[str, Any] = inputs.operands()._asdict()
    given |= {"out": torch.full_like(inputs.q, 7.0), "lse": torch.full(inputs.q.shape[:2], 7.0, device=inputs.q.device)}
    written = given["out"], given["lse"]
    spoil(given)
    for call in (plan.can_implement, plan.run):
        with pytest.raises(error) as caught:
            call(**given)
        assert names in str(caught.value)
    assert all((tensor == 7.0).all() for tensor in written)


def check_workspace(plan: Any, given: dict[str, Any]) -> None:
    needed, device = plan.workspace_size(), given["q"].device
    assert needed > 0
    for nbytes in (0, needed - 1):
        with pytest.raises(ck.WorkspaceTooSmall) as caught:
            plan.run(**given, workspace=torch.zeros(nbytes, dtype=torch.uint8, device=device))
        assert (caught.value.needed, caught.value.got) == (needed, nbytes)
    with pytest.raises(ck.WorkspaceTooSmall) as caught:
        plan.run(**given)
    assert (caught.value.needed, caught.value.got) == (needed, 0)
    plan.run(**given, workspace=torch.zeros(needed + 4096, dtype=torch.uint8, device=device))


def test_r1_workspace(pretend_h200: list) -> None:
    """None and too few bytes are refused, more is fine; none is needed where rows stay whole or the batch is empty."""
    shape, inputs = R1, make_inputs(R1, "cpu")
    check_workspace(ck.PagedDecodePlan.select(shape.descriptor(), "cpu"), inputs.operands()._asdict())
    assert len(pretend_h200) == 1, "only the run with room was launched"
    whole = ck.PagedDecodePlan.select(shape.descriptor(), "cpu", ck.PlanPreference(max_workspace_bytes=0))
    empty = ck.PagedDecodePlan.select(replace(shape.descriptor(), batch_size=0), "cpu")
    assert whole.workspace_size() == empty.workspace_size() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_r1_workspace_on_a_gpu(backend: str) -> None:
    check_workspace(select(R1, backend), make_inputs(R1, "cuda").operands()._asdict())


@EVERY_BACKEND
def test_r1_sku(backend: str) -> None:
    """The operation, q's element, the cache's, the arch and the guarantee; a backend that has no kernel there is Unsupported."""
    plan = select(R1, backend)
    sku, guarantee = plan.sku, plan.precision_guarantee
    arch = {"sm90": "sm90a"}.get(backend, backend)  # TMA and WGMMA are what this architecture alone has
    assert (sku.operation, sku.q_dtype, sku.kv_dtype, sku.arch) == ("paged_decode", "bf16", "e4m3", arch)
    assert (guarantee.accumulator, guarantee.deterministic, guarantee.bit_stable_on_same_hardware) == ("f32", True, True)
    other = "sm90" if backend == "cpu" else "cpu"
    with pytest.raises(ck.Unsupported, match=other):
        ck.PagedDecodePlan.select(R1.descriptor(), device_of(backend), ck.PlanPreference(arch=other))


# R2: int8 caches, append and decode

R2 = Shape(
    num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, lengths=(200, 33, 1), order="NHD", kv_dtype=INT8,
    k_scale=ck.KVScale.TOKEN_F16, v_scale=ck.KVScale.TOKEN_F16,
)  # fmt: skip


def append(backend: str, x: Tensor, slots: Tensor, pages: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(K codes, V codes, K scales, V scales) after an append of x [2, tokens, heads, dim] to NHD pools of 7s."""
    _, tokens, heads, dim = x.shape
    layout, scale = ck.KVLayout.NHD, ck.KVScale.TOKEN_F16
    d = ck.KVAppendDescriptor(tokens, heads, dim, 16, x.dtype, INT8, layout, k_scale=scale, v_scale=scale, slot_dtype=slots.dtype)
    plan = ck.KVAppendPlan.select(d, device_of(backend), ck.PlanPreference(arch=backend))
    codes = [torch.full((pages, 16, heads, dim), 7, dtype=torch.int8, device=x.device) for _ in range(2)]
    scales = [torch.full((pages * 16 * heads,), 7.0, dtype=F16, device=x.device) for _ in range(2)]
    plan.run(x[0], x[1], *codes, slots, k_scale=scales[0], v_scale=scales[1])
    return *codes, *scales


@EVERY_BACKEND
@DTYPES
@pytest.mark.parametrize("slot_dtype", [I32, torch.int64], ids=["i32", "i64"])
def test_r2_append_then_decode(slot_dtype: torch.dtype, dtype: torch.dtype, backend: str) -> None:
    """Codes and scales by the formula, skipped tokens untouched, round trip within 0.002; decode against f32: cosine, 2%."""
    plain = replace(R2, kv_dtype=None, k_scale=ck.KVScale.NONE, v_scale=ck.KVScale.NONE, dtype=dtype)
    before = make_inputs(plain, device_of(backend), dead=None)
    before.k, before.v = (cache.clamp(-4.5, 4.5) * 0.1 for cache in (before.k, before.v))
    pages, heads = len(before.k), plain.num_kv_heads
    x = torch.stack([cache.transpose(1, 2).reshape(-1, heads, 128) for cache in (before.k, before.v)])
    x = torch.cat([x, x[:, :3]], 1)  # three more, which have no slot
    slots = torch.arange(x.shape[1], device=x.device, dtype=slot_dtype)
    slots[-3:] = -1
    *codes, k_scale, v_scale = append(backend, x, slots, pages)
    for values, stored, scale in zip(x[:, :-3], codes, (k_scale, v_scale), strict=True):
        exact = values.float().abs().amax(-1).clamp(min=1e-8) / 127
        assert torch.equal(scale.view_as(exact), exact.half())
        got = stored.flatten(0, 1).float()
        theirs, ours = (torch.round(values.float() / s.float()[..., None]).clamp(-127, 127) for s in (exact, exact.half()))
        assert torch.equal(got, ours) and (got - theirs).abs().max() <= 1, "the divisor is the scale that is stored"
        assert (stored.flatten(0, 1).float() * scale.view(-1, heads, 1).float() - values.float()).abs().max() <= 0.002
    inputs = Inputs(replace(R2, dtype=dtype), before.q, *(c.transpose(1, 2) for c in codes), before.rows)
    inputs = replace(inputs, k_scale=k_scale, v_scale=v_scale)
    out, lse = run(select(inputs.shape, backend), inputs)
    assert_close(inputs, out, lse)
    for row in range(len(plain.lengths)):
        exact, got = attend(before, row)[0], out[row].double()
        assert (F.cosine_similarity(exact, got, dim=-1) > 0.999).all()
        assert ((exact - got).abs().amax(-1) < 0.02 * exact.abs().amax(-1)).all()


def test_r2_head_dim_past_256_is_typed() -> None:
    scale = ck.KVScale.TOKEN_F16
    with pytest.raises(ck.Unsupported, match="head_dim = 288: must be at most 256"):
        ck.KVAppendDescriptor(4, 2, 288, 16, BF16, INT8, k_scale=scale, v_scale=scale)


@EVERY_BACKEND
def test_r2_nothing_is_compiled_at_a_second_call(backend: str) -> None:
    """Nor at a call over other tensors and longer rows."""
    inputs = make_inputs(R2, device_of(backend))
    plan = select(R2, backend)
    first = run(plan, inputs)
    kernels = compiled_specs()
    assert_bitwise(run(plan, inputs), first)
    longer = make_inputs(replace(R2, lengths=(900, 64, 7)), device_of(backend), seed=5)
    assert_close(longer, *run(plan, longer))
    assert compiled_specs() == kernels and (backend == "cpu" or len(kernels) > 0)


# R3: paged attention forward


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


def test_r4_workspace(pretend_h200: list) -> None:
    """Their formula, and ours: exact, 0 for an empty batch, and None is taken only where it is 0."""
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
