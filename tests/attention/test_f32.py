"""q, caches and out in f32 on every backend: every row beside PyTorch in f32, whatever the table, the masks and the values.

On a GPU the bound is OF_SPLIT_F32: 1.25 times PyTorch's error and 4 ulp, where other f32 outputs are granted 8; long rows none.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from tests.support import attention_harness as several
from tests.support.attention_cases import CASES as ATTENTION_CASES
from tests.support.attention_cases import F32_CASES, Case, make_attention
from tests.support.harness import BACKENDS, ONE_CALL, assert_bitwise, assert_close, attend, device_of, run, select
from tests.support.inputs import CASES as DECODE_CASES
from tests.support.inputs import MIXED, NAN, Shape, make_inputs
from tests.support.storage import magnitudes
from tests.support.tolerance import OF_F32, OF_SPLIT_F32, Tolerance

F32 = torch.float32
NARROW = 16  # of fewer columns, V of both signs may cancel in all: no error is small beside what is left
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
KERNELS = [backend for backend in BACKENDS if backend.id != "cpu"]


def of_f32(shape: Shape) -> Shape:
    """With logits that are not so large that one rounding of one of them is all of a row's error."""
    return replace(shape, dtype=F32, softmax_scale=None if shape.softmax_scale is None else 0.3)


def takes_f32(cache: Shape) -> bool:
    """Whether caches have q's dtype, and no scales: caches of f32 take none."""
    return cache.kv_dtype is cache.v_dtype is None and cache.k_scale is cache.v_scale is ck.KVScale.NONE


SHAPES = [
    *(of_f32(shape) for shape in DECODE_CASES if shape.dtype == torch.bfloat16),
    Shape(name="cut_rows", lengths=(3000, 1, 700, 4096), num_heads=32, num_kv_heads=8, max_seq_len=4096, dtype=F32),
    Shape(name="group_16", lengths=MIXED, num_heads=32, dtype=F32),
    Shape(name="group_24", lengths=MIXED, num_heads=48, head_dim=64, dtype=F32),
    Shape(name="group_71", lengths=MIXED, num_heads=71, num_kv_heads=1, head_dim=64, dtype=F32),
    *(Shape(name=f"d{d}", lengths=(0, 1, 17, 129), head_dim=d, dtype=F32) for d in (16, 32, 48, 80, 96, 112, 144, 160, 192, 224)),
    *(Shape(name=f"d{d}_p8", lengths=(0, 1, 17, 129), head_dim=d, page_size=8, dtype=F32) for d in (2, 5, 33, 100, 200, 255)),
    Shape(name="page_1024", lengths=(0, 1, 1024, 1500), head_dim=64, page_size=1024, dtype=F32),
    Shape(name="contiguous", lengths=(777,) * 3, page_size=0, dtype=F32),
    Shape(name="contiguous_d80", lengths=(130,) * 3, page_size=0, head_dim=80, lse_base="2", dtype=F32),
    Shape(name="contiguous_none", lengths=(0,) * 3, page_size=0, dtype=F32),
]
NAMED_SHAPES = {shape.name: shape for shape in SHAPES}
CASES = [
    *(replace(c, cache=of_f32(c.cache)) for c in ATTENTION_CASES if takes_f32(c.cache)),
    *F32_CASES,
]
NAMED = {c.name: c for c in CASES}


def served(shape: Shape) -> bool:
    """Whether TMA boxes hold such pages and heads."""
    return shape.head_dim % 16 == 0 and shape.page_size % 8 == 0


def pairs(cases: list, fits) -> list:
    """(case, backend), but for what the TMA mainloop does not serve."""
    return [
        pytest.param(case, *backend.values, id=f"{case}-{backend.id}", marks=backend.marks)
        for case in cases
        for backend in BACKENDS
        if fits(case) or backend.id != "sm90"
    ]


def bound(backend: str) -> Tolerance:
    return OF_F32 if backend == "cpu" else OF_SPLIT_F32


@pytest.mark.parametrize(("shape", "backend"), pairs(SHAPES, served))
def test_decode(shape: Shape, backend: str) -> None:
    """Over NaN in every slot that no row owns."""
    inputs = make_inputs(shape, device_of(backend))
    if shape.head_dim < NARROW:
        inputs.v = magnitudes(inputs.v)
    plan = select(shape, backend)
    assert plan.sku.q_dtype == "f32" and plan.sku.kv_dtype == "f32"
    assert_close(inputs, *run(plan, inputs), tolerance=bound(backend))


@pytest.mark.parametrize(("case", "backend"), pairs(CASES, lambda c: c.tma))
def test_several_query_rows(case: Case, backend: str) -> None:
    """Every mask, modifier and table; rows of no request are left alone."""
    plan, inputs = several.select(case, backend), make_attention(case, device_of(backend))
    plan.clear_status()
    got = several.run(plan, inputs)
    several.assert_close(inputs, got, tolerance=bound(backend))
    several.assert_padding(inputs, got, NAN)
    assert plan.status() is None


@EVERY_BACKEND
@pytest.mark.parametrize("partition", [{"batch_invariant": True}, {"max_workspace_bytes": 0}], ids=["invariant", "whole"])
def test_other_partitions(partition: dict, backend: str) -> None:
    shape = NAMED_SHAPES["cut_rows"]
    inputs = make_inputs(shape, device_of(backend))
    assert_close(inputs, *run(select(shape, backend, **partition), inputs), tolerance=bound(backend))


@EVERY_BACKEND
def test_a_row_alone_has_the_bits_it_has_in_a_batch(backend: str) -> None:
    """Under batch_invariant, at each place."""
    shape = Shape(lengths=(777, 16, 4096, 1025), dtype=F32)
    inputs = make_inputs(shape, device_of(backend))
    out, lse = run(select(shape, backend, batch_invariant=True), inputs)
    for row, length in enumerate(shape.lengths):
        alone = replace(shape, lengths=(length,))
        one = replace(inputs, shape=alone, q=inputs.q[row : row + 1], rows=inputs.rows[row : row + 1])
        assert_bitwise(run(select(alone, backend, batch_invariant=True), one), (out[row : row + 1], lse[row : row + 1]))


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["everything", "tree", "f32_prefill_d128", "lengths", "packed"])
def test_poison_of_any_kind_changes_no_bit(name: str, backend: str) -> None:
    plan = several.select(NAMED[name], backend)
    clean = several.run(plan, make_attention(NAMED[name], device_of(backend), dead=0.0), fill=0.0)
    for dead in (NAN, math.inf, -3e38):
        assert_bitwise(several.run(plan, make_attention(NAMED[name], device_of(backend), dead=dead), fill=0.0), clean)


@EVERY_BACKEND
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_that_is_seen_shows(which: str, backend: str) -> None:
    """In its own row and KV head, and in no other."""
    shape = Shape(lengths=(40, 33, 100), head_dim=64, dtype=F32)
    inputs = make_inputs(shape, device_of(backend))
    plan, group = select(shape, backend), shape.num_heads // shape.num_kv_heads
    clean, _ = run(plan, inputs)
    if which == "q":
        inputs.q[1, group, 5] = NAN
    else:
        getattr(inputs, which)[inputs.rows[1][0].long(), 1, 3, 5] = NAN
    out, _ = run(plan, inputs)
    wrong = out.isnan()
    expected = torch.zeros_like(wrong)
    heads = slice(group, group + 1) if which == "q" else slice(group, 2 * group)
    expected[1, heads, slice(5, 6) if which == "v" else slice(None)] = True
    assert torch.equal(wrong, expected)
    assert torch.equal(out[~expected], clean[~expected])


@EVERY_BACKEND
@pytest.mark.parametrize("exponent", [-60, -20, 40, 100])
def test_values_of_any_size(exponent: int, backend: str) -> None:
    """V times a power of two gives out times it, to the bit; so do q times one and K divided by it."""
    shape = Shape(lengths=(200, 77), head_dim=64, dtype=F32)
    inputs = make_inputs(shape, device_of(backend))
    plan, factor = select(shape, backend), 2.0**exponent
    lse = run(plan, inputs)[1]
    largest = inputs.real("v", 0).abs().max()
    inputs.v = inputs.v * (factor / largest)
    scaled, _ = run(plan, inputs)
    inputs.v = inputs.v / factor
    assert_bitwise((scaled, lse), (run(plan, inputs)[0] * factor, lse))
    if abs(exponent) <= 60:
        inputs.q, inputs.k = inputs.q * factor, inputs.k / factor
        assert_bitwise(run(plan, inputs), (scaled / factor, lse))


@EVERY_BACKEND
def test_digits_past_those_of_tf32_and_of_two_bf16(backend: str) -> None:
    """Equal keys weigh alike, so out is the mean of V: values that agree in their first 16 bits differ in it."""
    shape = Shape(lengths=(64,), num_heads=4, num_kv_heads=1, head_dim=64, dtype=F32)
    inputs = make_inputs(shape, device_of(backend))
    inputs.k[:] = inputs.k[inputs.rows[0][0].long(), :, :1].clone()
    bits = torch.arange(64, device=inputs.v.device, dtype=torch.int32)
    inputs.v[:] = (0x3F800000 + 32 * bits).view(F32)
    out, _ = run(select(shape, backend), inputs)
    exact = 1.0 + 32 * bits.double() * 2.0**-23
    assert (out.double() - exact).abs().max() <= 12 * 2.0**-23


@EVERY_BACKEND
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_long_rows_are_as_exact_as_pytorch(shift: float, head_dim: int, backend: str) -> None:
    """The median of a row's heads, without an ulp of allowance; shifted, no logit is small."""
    shape = Shape(lengths=(300, 1000, 2500), head_dim=head_dim, num_heads=32, num_kv_heads=8, max_seq_len=2500, dtype=F32)
    inputs = make_inputs(shape, device_of(backend))
    inputs.q += shift
    inputs.k += shift
    out, lse = run(select(shape, backend), inputs)
    for row in range(len(shape.lengths)):
        exact, exact_lse, same = attend(inputs, row)
        units = exact.norm(dim=-1)
        ours, theirs = ((result.double() - exact).norm(dim=-1) / units for result in (out[row], same))
        assert ours.median() <= 1.25 * theirs.median()
        assert (lse[row] - exact_lse).abs().max() <= 1e-5 * exact_lse.abs().max().clamp(min=1)


@pytest.mark.parametrize("backend", ONE_CALL)
def test_one_call_and_its_views(backend: str) -> None:
    """decode_attention and paged_attention, over NHD pages, give what the plan does."""
    shape = Shape(lengths=(129, 40, 0), head_dim=64, order="NHD", dtype=F32)
    inputs = make_inputs(shape, device_of(backend))
    expected = run(select(shape, backend), inputs)
    table, seq_lens = inputs.table().operands[:2]
    given = {"page_table": table, "seq_lens": seq_lens, "layout": "NHD"}
    indptr = torch.arange(4, dtype=torch.int32, device=table.device)
    for out, lse in (
        ck.decode_attention(inputs.q, *inputs.caches(), **given),
        ck.paged_attention(inputs.q, *inputs.caches(), **given, qo_indptr=indptr, max_q_len=1),
    ):
        assert_close(inputs, out, lse, tolerance=bound(backend))
        assert (out - expected[0]).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
def test_a_thousand_repeats_and_replays_are_bitwise_equal(backend: str) -> None:
    """Eager and captured, with cut rows."""
    shape = NAMED_SHAPES["cut_rows"]
    plan, inputs = select(shape, backend), make_inputs(shape, "cuda")
    assert plan.workspace_size() > 0
    table, first = inputs.table(), run(plan, inputs)
    for _ in range(1000):
        assert_bitwise(run(plan, inputs, table=table), first)
    out, lse = torch.empty_like(first[0]), torch.empty_like(first[1])
    workspace, graph = plan.new_workspace(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(inputs.q, *inputs.caches(), table, out=out, lse=lse, workspace=workspace)
    lengths = table.operands[1]
    for changed in ((5, 900, 64, 1), (0, 0, 0, 0), shape.lengths):
        lengths.copy_(torch.tensor(changed))
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        assert_bitwise((out, lse), plan.run(inputs.q, *inputs.caches(), table, workspace=workspace))
    assert_bitwise((out, lse), first)


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.parametrize("backend", KERNELS)
def test_offsets_past_2_31_elements(backend: str) -> None:
    """A pool of 2.2e9 elements a cache, 18 GB for both; the rows' pages lie at its very end."""
    shape = Shape(num_heads=32, num_kv_heads=8, page_size=64, lengths=(200, 1000), max_seq_len=1000, dtype=F32)
    inputs = make_inputs(shape, "cuda")
    pages = -(-2_200_000_000 // inputs.k[0].numel())
    shift, big = pages - inputs.k.shape[0], []
    for cache in (inputs.k, inputs.v):
        pool = torch.full((pages, *cache.shape[1:]), NAN, device="cuda")
        pool[shift:] = cache
        big.append(pool)
    moved = replace(inputs, k=big[0], v=big[1], rows=[row + shift for row in inputs.rows])
    plan = select(shape, backend)
    assert_bitwise(run(plan, moved), run(plan, inputs))
