"""What two of five existing systems do, row by row: R1 paged decode over fp8, R2 int8 caches; the others are R3 to R5's file's.

Each row once, through the calls that a program of theirs comes to; details are other files'.
"""

from __future__ import annotations

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
from cute_kernels.planning.variants import PRETEND
from tests.support.harness import BACKENDS, assert_bitwise, assert_close, attend, device_of, run, select
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
    """Nor at a decode over other tensors and longer rows, or an append of other values to other slots."""
    inputs = make_inputs(R2, device_of(backend))
    plan = select(R2, backend)
    first = run(plan, inputs)
    kernels = compiled_specs()
    assert_bitwise(run(plan, inputs), first)
    longer = make_inputs(replace(R2, lengths=(900, 64, 7)), device_of(backend), seed=5)
    assert_close(longer, *run(plan, longer))
    assert compiled_specs() == kernels and (backend == "cpu" or len(kernels) > 0)
    x = torch.randn(2, 9, 2, 128, device=inputs.q.device).bfloat16()
    slots = torch.arange(9, device=x.device)
    first = append(backend, x, slots, 3)
    kernels = compiled_specs()
    for again, other in zip(append(backend, x, slots, 3), first, strict=True):
        assert torch.equal(again, other)
    for moved, codes in zip(append(backend, -x, slots + 20, 3)[:2], first[:2], strict=True):
        assert torch.equal(moved.flatten(0, 1)[20:29], -codes.flatten(0, 1)[:9])
    assert compiled_specs() == kernels and (backend == "cpu" or len(kernels) > 0)
