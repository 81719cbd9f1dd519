"""CTAs that take two KV heads: their tiles take turns in one ring, and a warp attends to those of one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.config.decode import DecodeConfig
from tests.support.harness import assert_bitwise, assert_close, run, select_forced
from tests.support.inputs import Inputs, Shape, make_inputs

pytestmark = pytest.mark.gpu
E4M3, INT8 = ck.KVDtype.E4M3, ck.KVDtype.INT8
TOKEN, TOKEN_F16 = ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16
PAIRED = DecodeConfig(32, 16, 8, 1, 2)
LENGTHS = (0, 1, 31, 32, 33, 257, 20_000, 65, 5000, 0, 700)
INT8_TOKEN = {"kv_dtype": INT8, "k_scale": TOKEN_F16, "v_scale": TOKEN_F16}
SHAPES = {
    "32/8 int8 token": Shape(num_heads=32, num_kv_heads=8, lengths=LENGTHS, **INT8_TOKEN),
    "8/2 int8 token, rows of a few tokens": Shape(lengths=(3, 40, 0, 64, 1) * 20, **INT8_TOKEN),
    "4/4 e4m3 f32 token csr page 64": Shape(
        4, 4, page_size=64, lengths=LENGTHS, table_format="csr", kv_dtype=E4M3, k_scale=TOKEN, v_scale=TOKEN, lse_base="2"
    ),
    "12/4 K alone scaled, page 8 NHD": Shape(12, 4, page_size=8, lengths=LENGTHS, order="NHD", kv_dtype=INT8, k_scale=TOKEN_F16),
    "8/4 bf16 K, int8 V d64": Shape(
        8, 4, head_dim=64, lengths=LENGTHS, kv_dtype=ck.KVDtype.BF16, v_dtype=INT8, v_scale=TOKEN_F16
    ),
    "32/8 contiguous": Shape(num_heads=32, num_kv_heads=8, page_size=0, lengths=(3001,) * 3, **INT8_TOKEN),
}


@pytest.mark.parametrize("preference", [{}, {"max_workspace_bytes": 0}], ids=["balanced", "whole"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_f64(shape: Shape, preference: dict) -> None:
    inputs, plan = make_inputs(shape, "cuda"), select_forced(shape, PAIRED, **preference)
    first = run(plan, inputs)
    assert_close(inputs, *first)
    assert_bitwise(run(plan, inputs), first)


@pytest.mark.parametrize(
    "config", [DecodeConfig(64, 8, 4, 1, 2), DecodeConfig(32, 8, 4, 2, 2), DecodeConfig(32, 8, 2, 1, 2)], ids=str
)
def test_other_rings(config: DecodeConfig) -> None:
    shape = SHAPES["32/8 int8 token"]
    inputs = make_inputs(shape, "cuda")
    assert_close(inputs, *run(select_forced(shape, config), inputs))


def test_one_long_row_that_every_cta_has_a_part_of() -> None:
    for config in (PAIRED, DecodeConfig(32, 8, 4, 2, 2)):  # in 33 and in 66 pieces
        shape = replace(SHAPES["32/8 int8 token"], lengths=(30_000,))
        inputs = make_inputs(shape, "cuda")
        assert_close(inputs, *run(select_forced(shape, config), inputs))


@pytest.mark.parametrize("head", [0, 1])
def test_a_head_without_numbers_leaves_the_other_as_it_was(head: int) -> None:
    """Its rows see the other's keys as well, and are not to be used."""
    shape = replace(SHAPES["8/2 int8 token, rows of a few tokens"], lengths=LENGTHS)
    inputs, plan = make_inputs(shape, "cuda"), select_forced(shape, PAIRED)
    out, lse = run(plan, inputs)
    other = slice(4 * (1 - head), 4 * (2 - head))
    for spoiled in (spoil(inputs, head, math.nan), spoil(inputs, head, math.inf)):
        got = run(plan, spoiled)
        assert_bitwise(tuple(t[:, other].contiguous() for t in got), tuple(t[:, other].contiguous() for t in (out, lse)))
        live = torch.tensor(shape.lengths, device="cuda") > 0
        assert not got[0][live, 4 * head : 4 * head + 4].isfinite().all()


def spoil(inputs: Inputs, head: int, value: float) -> Inputs:
    """The same with another scale of every token of a KV head, of K and of V."""
    k_scale, v_scale = inputs.k_scale.clone(), inputs.v_scale.clone()
    k_scale[..., head], v_scale[..., head] = value, value
    return replace(inputs, k_scale=k_scale, v_scale=v_scale)


def test_a_graph_with_changing_lengths() -> None:
    shape = replace(SHAPES["32/8 int8 token"], max_seq_len=20_000)
    inputs, plan = make_inputs(shape, "cuda", dead=None), select_forced(shape, PAIRED)
    table, out = inputs.table(), torch.empty_like(inputs.q)
    lse = torch.empty(inputs.q.shape[:2], device="cuda")
    workspace = plan.new_workspace()

    def launch() -> None:
        plan.run(inputs.q, inputs.k, inputs.v, table, **inputs.scales, out=out, lse=lse, workspace=workspace)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    generator, lengths = torch.Generator().manual_seed(5), table.operands[1]
    longest = lengths.clone()
    for _ in range(50):
        lengths.copy_((longest * torch.rand(len(longest), generator=generator).cuda()).int())
        graph.replay()
        replayed = out.clone(), lse.clone()
        launch()
        assert_bitwise((out, lse), replayed)
    cut = replace(shape, lengths=tuple(lengths.tolist()))
    rows = [pages[: -(-length // 16)] for pages, length in zip(inputs.rows, cut.lengths, strict=True)]
    assert_close(replace(inputs, shape=cut, rows=rows), out, lse)
