"""Attention weights on a GPU: graphs, repeats, operands that come late, far offsets, streams."""

from __future__ import annotations

import math

import pytest
import torch

import cute_kernels as ck
from tests.support.attention_cases import make_attention
from tests.support.attention_harness import run as run_attention
from tests.support.attention_harness import select as select_attention
from tests.support.late_writer import LateWriter
from tests.support.weights_cases import (
    CASES,
    Case,
    WeightsInputs,
    assert_bitwise,
    assert_close,
    bits,
    case,
    make_weights,
    outputs,
    run,
    select,
)

pytestmark = pytest.mark.gpu
NAMED = {one.name: one for one in CASES}


def moved(inputs: WeightsInputs, seed: int) -> None:
    """The same tensors with other queries, and rows that have exchanged their lengths and pages."""
    generator = torch.Generator(inputs.lse.device).manual_seed(seed)
    order = torch.randperm(len(inputs.lse), generator=generator, device=inputs.lse.device)
    for tensor in (inputs.attention.q, inputs.lse, *inputs.attention.table.operands[:2]):
        tensor.copy_(tensor[order].clone())


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("name", ["usual_bf16", "everything"])
def test_a_captured_graph_equals_eager_runs(name: str, backend: str) -> None:
    """200 replays while lengths, tables, queries and lse change on the device."""
    one = NAMED[name]
    inputs, plan = make_weights(one, "cuda"), select(one, backend)
    given, kept = inputs.given, outputs(plan.descriptor, "cuda")
    run(plan, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(**given, **kept)
    for seed in range(200):
        moved(inputs, seed)
        for tensor in kept.values():
            tensor.fill_(math.nan)
        graph.replay()
        expected = run(plan, inputs)
        assert_bitwise(ck.AttentionWeights(**kept), expected)


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_repeats_have_the_same_bits(backend: str) -> None:
    """1,000 repeats, every other one beside another kernel."""
    one = case("repeats", {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "lengths": (3000, 1, 700, 0, 128) * 3})
    inputs, plan = make_weights(one, "cuda"), select(one, backend)
    expected, kept = run(plan, inputs), outputs(plan.descriptor, "cuda")
    assert_close(inputs, expected)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    side, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for repeat in range(1000):
        if repeat % 2:
            with torch.cuda.stream(side):
                noise @ noise
        for tensor in kept.values():
            tensor.fill_(math.nan)
        plan.run(**inputs.given, **kept)
        for name, tensor in kept.items():
            wrong += (bits(tensor) != bits(getattr(expected, name))).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("name", ["usual", "everything_int8", "lengths"])
def test_operands_that_the_kernel_before_writes_late(name: str, backend: str) -> None:
    """It triggers this launch early and writes lengths, tables, q, K, scales and lse afterwards: none of it is read before."""
    one = NAMED[name]
    inputs, plan = make_weights(one, "cuda"), select(one, backend)
    expected, kept = run(plan, inputs), outputs(plan.descriptor, "cuda")
    plan.clear_status()
    live = [tensor.view(torch.uint8) if tensor.dim() > 1 else tensor.view(torch.int32) for tensor in inputs.tensors]
    writer = LateWriter(live, [torch.full_like(t, 0xFF if t.dtype == torch.uint8 else -1) for t in live])
    for _ in range(30):
        writer.spoil()
        for tensor in kept.values():
            tensor.fill_(math.nan)
        torch.cuda.synchronize()
        writer.launch()
        plan.run(**inputs.given, **kept)
        assert_bitwise(ck.AttentionWeights(**{"weights": None, "mean": None, "page_mass": None, **kept}), expected)
    assert plan.status() is None


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_more_rows_than_a_grid_axis_and_a_long_row(backend: str) -> None:
    many = case("70,000 rows", {"lengths": (17, 0, 3, 40) * 17_500, "num_heads": 4, "num_kv_heads": 2}, max_seq_len=64)
    inputs = make_many(many)
    result = run(select(many, backend), inputs)
    assert_close(inputs, result, rows=[0, 1, 2, 3, 32_768, 65_535, 65_536, 69_999])
    assert (result.mean.double().sum(-1)[::4] - 1).abs().max() < 1e-4
    long = case(
        "long row", {"lengths": (131_072, 0), "num_heads": 4, "num_kv_heads": 2}, {"softcap": 5.0}, weights_dtype=torch.bfloat16
    )
    inputs = make_weights(long, "cuda")
    assert_close(inputs, run(select(long, backend), inputs))


def make_many(one: Case) -> WeightsInputs:
    """As make_weights, with an lse of attention's: a loop over so many rows would take minutes."""
    attention = make_attention(one.attention, "cuda")
    lse = run_attention(select_attention(one.attention, "sm90"), attention)[1]
    return WeightsInputs(one, attention, lse)


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_offsets_past_2_to_31_elements(backend: str) -> None:
    """Weights of more than 2**31 elements, and pages of K behind as many."""
    batch, keys, pages = 2, 2**20 + 16, 2**19
    d = ck.AttentionWeightsDescriptor(batch, 1100, 1, 64, 16, torch.bfloat16, keys, weights_dtype=torch.bfloat16, mean=True)
    assert batch * d.num_heads * keys > 2**31 and pages * 16 * 5 * 64 > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    pool = torch.zeros(pages, 5, 16, 64, dtype=torch.bfloat16, device="cuda")
    k = pool[:, 2:3]
    k.copy_(torch.randn(k.shape, generator=generator, device="cuda"))
    q = torch.randn(batch, 1100, 64, generator=generator, device="cuda").bfloat16()
    table = (pages - 1 - torch.arange(keys // 16, device="cuda")).clamp(min=0).int().expand(2, -1).contiguous()
    lengths = torch.tensor([keys - 16, 33], dtype=torch.int32, device="cuda")
    plan = ck.AttentionWeightsPlan.select(d, "cuda", ck.PlanPreference(arch=backend))
    lse = torch.full((batch, 1100), 3.0, device="cuda")
    result = plan.run(q, k, lse, ck.PageTable.dense(table, lengths))
    for row, first in ((0, 0), (0, keys - 48), (1, 0)):
        tokens = torch.arange(first, first + 48, device="cuda")
        stored = k[table[row, tokens // 16].long(), 0, tokens % 16].double()
        exact = torch.exp(torch.einsum("hd,td->ht", q[row].double(), stored) / 8 - 3.0) * (tokens < lengths[row])
        gap = (result.weights[row, :, first : first + 48].double() - exact).abs()
        assert (gap <= 2**-7 * exact).all()
    assert not result.mean.isnan().any()


def test_a_stream_of_the_callers() -> None:
    one = NAMED["usual"]
    inputs, plan = make_weights(one, "cuda"), select(one, "sm90")
    expected, stream = run(plan, inputs), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    result = run(plan, inputs, stream=stream)
    torch.cuda.current_stream().wait_stream(stream)
    assert_bitwise(result, expected)
