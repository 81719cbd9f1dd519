"""Attention's backward on a GPU: graphs, repeats, operands that come late, long rows, streams."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from tests.support.backward_cases import CASES, BackwardInputs, backward_case, make_backward
from tests.support.backward_harness import assert_bitwise, assert_close, bits, run, select
from tests.support.late_writer import LateWriter

pytestmark = pytest.mark.gpu
NAMED = {one.name: one for one in CASES}
BACKENDS = pytest.mark.parametrize("backend", ["sm90", "sm80"])


def kept(inputs: BackwardInputs, plan: ck.PagedAttentionBackwardPlan) -> dict[str, torch.Tensor]:
    """Gradients and a workspace for every run."""
    own = inputs.attention
    made = {"dq": own.q, "dk_cache": own.k, "dv_cache": own.v}
    found = {name: torch.full_like(t, math.nan) for name, t in made.items()}
    if inputs.case.attention.sinks:
        found["dsinks"] = torch.full_like(inputs.extras["sinks"], math.nan)
    return {**found, "workspace": plan.new_workspace()}


def gradients(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [t.contiguous().view(torch.uint8).clone() for name, t in tensors.items() if name != "workspace"]


@BACKENDS
@pytest.mark.parametrize("name", ["everything", "everything_f16_base2", "d256"])
def test_a_thousand_repeats_have_the_same_bits(name: str, backend: str) -> None:
    """Pages are shared; every other run is beside another kernel."""
    inputs, plan = make_backward(NAMED[name], "cuda"), select(NAMED[name], backend)
    tensors = kept(inputs, plan)
    plan.run(**inputs.given, **tensors)
    wanted = gradients(tensors)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    side, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for repeat in range(1000):
        if repeat % 2:
            with torch.cuda.stream(side):
                noise @ noise
        for gradient, tensor in tensors.items():
            if gradient != "workspace":
                tensor.fill_(math.nan)
        plan.run(**inputs.given, **tensors)
        for ours, theirs in zip(gradients(tensors), wanted, strict=True):
            wrong += (ours != theirs).sum()
    assert int(wrong) == 0 and not tensors["workspace"].any()


@BACKENDS
@pytest.mark.parametrize("name", ["everything", "uniform", "packed"])
def test_a_captured_graph_equals_eager_runs(name: str, backend: str) -> None:
    """Replays while q, dout and lse change on the device."""
    inputs, plan = make_backward(NAMED[name], "cuda"), select(NAMED[name], backend)
    tensors = kept(inputs, plan)
    plan.run(**inputs.given, **tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(**inputs.given, **tensors)
    for seed in range(20):
        other = make_backward(NAMED[name], "cuda", seed)
        for ours, theirs in ((inputs.dout, other.dout), (inputs.attention.q, other.attention.q), (inputs.lse, other.lse)):
            ours.copy_(theirs)
        graph.replay()
        replayed = gradients(tensors)
        plan.run(**inputs.given, **tensors)
        assert_bitwise(replayed, gradients(tensors))


@BACKENDS
def test_operands_that_the_kernel_before_writes_late(backend: str) -> None:
    """It triggers this launch early: none of them is read before it is done."""
    one = NAMED["everything"]
    inputs, plan = make_backward(one, "cuda"), select(one, backend)
    wanted = bits(run(plan, inputs))
    operands = [t for t in inputs.attention.table.operands if t is not None]
    tensors = [inputs.dout, inputs.out, inputs.lse, inputs.attention.q, inputs.attention.k, inputs.attention.v, *operands]
    live = [t.view(torch.uint8) if t.dim() > 1 else t.view(torch.int32) for t in tensors]
    writer = LateWriter(live, [torch.full_like(t, 0xFF if t.dtype == torch.uint8 else -1) for t in live])
    for _ in range(10):
        writer.spoil()
        torch.cuda.synchronize()
        writer.launch()
        assert_bitwise(bits(run(plan, inputs)), wanted)
    assert plan.status() is None


@BACKENDS
@pytest.mark.parametrize("dead", [math.nan, math.inf, -math.inf, 6e4], ids=str)
@pytest.mark.parametrize("name", ["everything", "lengths_nhd_everything", "prefill_d128"])
def test_what_no_row_owns_never_reaches_a_gradient(name: str, dead: float, backend: str) -> None:
    one = NAMED[name]
    plan = select(one, backend)
    clean, poisoned = (run(plan, make_backward(one, "cuda", dead=value), fill=0.0) for value in (0.0, dead))
    rows = sum(one.attention.q_lens)
    assert torch.equal(clean.dq[:rows], poisoned.dq[:rows])
    for gradient in ("dk_cache", "dv_cache", "dsinks"):
        assert torch.equal(getattr(clean, gradient), getattr(poisoned, gradient))


LONG = [
    ("causal_d128", {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "lengths": (1000, 700)}, (1000, 300), {}),
    ("windows_d64", {"lengths": (1400,), "page_size": 64}, (1100,), {"window_left": 300}),
    ("d256", {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "lengths": (600, 40)}, (600, 40), {"softcap": 20.0}),
    ("d96_f16", {"num_heads": 6, "num_kv_heads": 2, "head_dim": 96, "lengths": (700,), "dtype": torch.float16}, (700,), {}),
]


@BACKENDS
@pytest.mark.parametrize("long", LONG, ids=lambda long: long[0])
@pytest.mark.parametrize("table", ["dense", "packed"])
def test_long_rows_beside_pytorch_in_f32(long: tuple, table: str, backend: str) -> None:
    """Many tiles of keys and of queries, on either side of the diagonal."""
    name, cache, q_lens, modifiers = long
    own = {"shared": table == "dense" and len(q_lens) > 1}
    one = backward_case(name, cache, own, q_lens=q_lens, max_q_len=max(q_lens), table=table, **modifiers)
    inputs, plan = make_backward(one, "cuda"), select(one, backend)
    assert_close(inputs, run(plan, inputs))


def test_a_stream_of_the_callers() -> None:
    one = NAMED["everything"]
    inputs, plan = make_backward(one, "cuda"), select(one, "sm90")
    wanted, stream = bits(run(plan, inputs)), torch.cuda.Stream()
    tensors = kept(inputs, plan)
    stream.wait_stream(torch.cuda.current_stream())
    plan.run(**inputs.given, **tensors, stream=stream)
    torch.cuda.current_stream().wait_stream(stream)
    assert_bitwise(gradients(tensors), wanted)


@BACKENDS
def test_a_request_has_the_same_bits_alone(backend: str) -> None:
    """Where pages are not shared no other request changes a bit."""
    one = backward_case("batch", q_lens=(8, 3, 5), max_q_len=8, cache={"lengths": (300, 77, 130)}, table="packed")
    inputs, plan = make_backward(one, "cuda"), select(one, backend)
    together = run(plan, inputs)
    alone = replace(one, attention=replace(one.attention, q_lens=(5,), cache=replace(one.attention.cache, lengths=(130,))))
    own = {"k_cache": inputs.attention.k[377:], "v_cache": inputs.attention.v[377:]}
    rows = {name: getattr(inputs, name)[8 + 3 :] for name in ("dout", "out", "lse")}
    indptr = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
    table = ck.PageTable.packed(torch.tensor([0, 130], dtype=torch.int32, device="cuda"))
    single = select(alone, backend)
    given = {**rows, **own, "q": inputs.attention.q[8 + 3 :], "page_table": table, "qo_indptr": indptr}
    result = single.run(**given, workspace=single.new_workspace())
    assert torch.equal(result.dq[:5], together.dq[11:16])
    assert torch.equal(result.dk_cache, together.dk_cache[377:]) and torch.equal(result.dv_cache, together.dv_cache[377:])
