"""One workspace under many launches: of six plans in turn, of graphs, of the one-call functions; and what leaves it dirty."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.api import workspace_cache
from cute_kernels.device.combine import combine
from tests.support.attention_cases import case, make_attention
from tests.support.attention_harness import run as run_attention
from tests.support.attention_harness import select as select_attention
from tests.support.bits import Result, differing_rows
from tests.support.harness import assert_bitwise, run, select, select_patched
from tests.support.inputs import NAN, Inputs, Shape, make_inputs
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
LAUNCHES = 10_000
MIXED = (3000, 1, 700, 4096, 0, 33)
SHAPES = (
    (Shape(num_heads=16, num_kv_heads=4, lengths=MIXED, max_seq_len=4096), "sm90", {}),
    (Shape(num_heads=32, num_kv_heads=8, lengths=MIXED, max_seq_len=4096, **STORAGES["int8 token"]), "sm90", {}),
    (Shape(num_heads=8, num_kv_heads=1, lengths=(9000,), max_seq_len=9000, **STORAGES["e4m3"]), "sm90", {}),
    (Shape(num_heads=8, num_kv_heads=2, head_dim=64, lengths=MIXED, max_seq_len=4096), "sm90", {"batch_invariant": True}),
    (Shape(num_heads=8, num_kv_heads=2, lengths=(2047,) * 8, page_size=0), "sm90", {}),
    (Shape(num_heads=12, num_kv_heads=2, lengths=MIXED, page_size=1, max_seq_len=4096), "sm80", {}),
)


class Job:
    """One plan's run into its own outputs over a workspace that others use too."""

    def __init__(self, shape: Shape, backend: str, preference: dict[str, object], workspace: torch.Tensor, seed: int) -> None:
        self.plan, self.inputs = select(shape, backend, **preference), make_inputs(shape, "cuda", seed=seed)
        self.tables = (self.inputs.table(),) if shape.page_size else ()
        self.expected = run(self.plan, self.inputs)
        self.out, self.lse = torch.full_like(self.inputs.q, NAN), torch.full(self.inputs.q.shape[:2], NAN, device="cuda")
        self.workspace = workspace
        self.launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()

    def launch(self) -> None:
        kept = {**self.inputs.scales, "out": self.out, "lse": self.lse, "workspace": self.workspace}
        self.plan.run(self.inputs.q, self.inputs.k, self.inputs.v, *self.tables, **kept)

    def differing(self) -> torch.Tensor:
        return differing_rows((self.out, self.lse), self.expected).sum()


def test_ten_thousand_launches_of_six_plans_over_one_workspace() -> None:
    """In a random order, eagerly and by graph, back to back: bitwise right, and zero at the end."""
    sizes = [select(shape, backend, **preference).workspace_size() for shape, backend, preference in SHAPES]
    assert min(sizes) > 0
    workspace = torch.zeros(max(sizes), dtype=torch.uint8, device="cuda")
    jobs = [Job(*job, workspace, seed) for seed, job in enumerate(SHAPES)]
    wrong = torch.zeros(len(jobs), dtype=torch.int64, device="cuda")
    picks = random.Random(17)
    for _ in range(LAUNCHES):
        index = picks.randrange(len(jobs))
        job = jobs[index]
        job.out.fill_(NAN), job.lse.fill_(NAN)
        picks.choice((job.launch, job.graph.replay))()
        wrong[index] += job.differing()
    assert wrong.tolist() == [0] * len(jobs)
    assert not workspace.any()


@pytest.mark.parametrize("sm_count", [64, 128])
def test_a_workspace_may_begin_inside_a_cache_line(sm_count: int) -> None:
    """A kernel of several phases writes nothing behind a workspace of just the bytes it needs, 16 bytes into a cache line."""
    described = case(
        "mixed", {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "lengths": (3000, 900)}, q_lens=(8, 1), max_q_len=300
    )
    inputs, plan = make_attention(described, "cuda"), select_attention(described, "sm90", sm_count=sm_count)
    expected, size = run_attention(plan, inputs), plan.workspace_size()
    memory = torch.zeros(size + 256, dtype=torch.uint8, device="cuda")
    memory[16 + size :] = 0xAB
    out, lse = torch.full_like(inputs.q, NAN), torch.full_like(expected[1], NAN)
    given = {"out": out, "lse": lse, "workspace": memory[16 : 16 + size]}
    plan.run(inputs.q, inputs.k, inputs.v, inputs.table, **inputs.scales, **inputs.extras, **given)
    assert_bitwise((out, lse), expected)
    assert not memory[: 16 + size].any() and (memory[16 + size :] == 0xAB).all()


def one_call(inputs: Inputs) -> Callable[..., Result]:
    table = inputs.table()

    def call(**outputs: torch.Tensor) -> Result:
        return ck.decode_attention(
            inputs.q, inputs.k, inputs.v, page_table=table, max_seq_len=inputs.shape.max_seq_len, **inputs.scales, **outputs
        )

    return call


@pytest.mark.parametrize("storage", ["16 bits", "e4m3"])
def test_the_one_call_function_in_graphs_of_one_pool(storage: str) -> None:
    """Both graphs' memory between two calls, and after them, is handed to tensors that fill it with ones."""
    shapes = [replace(SHAPES[0][0], **STORAGES[storage]), replace(SHAPES[0][0], lengths=(4000, 17, 2500), **STORAGES[storage])]
    calls = [one_call(make_inputs(shape, "cuda", seed=seed)) for seed, shape in enumerate(shapes)]
    expected = [call() for call in calls]
    pool, graphs, found = torch.cuda.graph_pool_handle(), [], []
    for call in calls:
        outputs = []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(3):
                outputs.append(call())
                workspace_cache._captured.clear()  # as when an eager call finds the capture over
                torch.full((32 << 20,), 0xFF, dtype=torch.uint8, device="cuda")
        graphs.append(graph)
        found.append(outputs)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(200):
        index = turn % 2
        for out, lse in found[index]:
            out.fill_(NAN), lse.fill_(NAN)
        graphs[index].replay()
        for result in found[index]:
            wrong += differing_rows(result, expected[index]).sum()
    assert int(wrong) == 0


def test_a_capture_zeroes_one_workspace_for_all_of_its_calls() -> None:
    """Not each call its own, which would cost a node of the graph each."""
    call = one_call(make_inputs(SHAPES[0][0], "cuda"))
    call()
    seen = set()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
            seen |= {id(held.workspace) for held in workspace_cache._captured.values()}
    assert len(seen) == 1
    eager = {workspace.data_ptr() for workspace in workspace_cache._kept.values()}
    assert not eager & {held.workspace.data_ptr() for held in workspace_cache._captured.values()}
    call()
    assert not workspace_cache._captured or all(key[1] for key in workspace_cache._captured)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "invariant"])
def test_control_a_combine_that_never_clears(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> None:
    shape = SHAPES[0][0]
    plan = select_patched(monkeypatch, combine, "clear", lambda *_: None, shape, "sm90", batch_invariant=batch_invariant)
    with pytest.raises(AssertionError, match="as it found it"):
        run(plan, make_inputs(shape, "cuda"))


@pytest.mark.parametrize("preference", [{}, {"batch_invariant": True}], ids=["default", "invariant"])
def test_a_foreign_byte_on_the_device_is_named(preference: dict[str, object]) -> None:
    shape = SHAPES[0][0]
    plan, inputs = select(shape, "sm90", check_workspace=True, **preference), make_inputs(shape, "cuda")
    workspace = plan.new_workspace()
    for _ in range(2):
        plan.run(inputs.q, inputs.k, inputs.v, inputs.table(), workspace=workspace)
    workspace[1000] = 3
    with pytest.raises(ck.InvalidArgument, match="partial_states, the first 3 at byte 1000"):
        plan.run(inputs.q, inputs.k, inputs.v, inputs.table(), workspace=workspace)
