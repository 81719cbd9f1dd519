"""A workspace is zeroed once and then left to plans: who makes it, who keeps it, and what finds a foreign byte in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.api import workspace_cache
from cute_kernels.api.workspace_cache import MAX_STREAMS, stream_workspace
from tests.support.inputs import Shape, make_operands

CASE = Shape(lengths=(2000, 64), head_dim=128, name="workspace")
CUDA = torch.device("cuda", 0)


class Streams:
    """A device's current stream, and the capture that goes on there: 0 is none."""

    cuda_stream = 1
    capture = 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Streams and captures of a pretended GPU, whose memory lies on the CPU."""
    found = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capture > 0)
    monkeypatch.setattr(workspace_cache, "capture_id", lambda stream: found.capture)
    monkeypatch.setattr(workspace_cache, "new_workspace", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
    workspace_cache.forget_workspaces()
    yield found
    workspace_cache.forget_workspaces()


def plan_of(**preference: object) -> ck.PagedDecodePlan:
    descriptor = replace(CASE.descriptor(), max_seq_len=131_072)
    return ck.PagedDecodePlan.select(descriptor, "cpu", ck.PlanPreference(**preference))


def test_a_new_workspace_is_zero_and_exact(pretend_h200: list) -> None:
    plan = plan_of()
    workspace = plan.new_workspace()
    assert (workspace.dtype, workspace.numel()) == (torch.uint8, plan.workspace_size())
    assert plan.workspace_size() > 0 and not workspace.any()
    assert workspace.data_ptr() % 16 == 0
    assert plan_of(max_workspace_bytes=0).new_workspace().numel() == 0


def test_a_new_workspace_outlives_the_callers_inference_mode(pretend_h200: list) -> None:
    with torch.inference_mode():
        workspace = plan_of().new_workspace()
    assert not workspace.is_inference()


def test_a_new_workspace_is_not_the_callers_threads(pretend_h200: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes what the calling thread allocates into the pool of its graphs, where nothing may be left."""
    makers, zeros = [], torch.zeros

    def recorded(*args: object, **options: object) -> torch.Tensor:
        makers.append(threading.get_ident())
        return zeros(*args, **options)

    plan = plan_of()
    monkeypatch.setattr(torch, "zeros", recorded)
    assert not plan.new_workspace().any() and makers and threading.get_ident() not in makers


@pytest.mark.parametrize("region", [0, 1])
def test_a_foreign_byte_is_named(pretend_h200: list, region: int) -> None:
    plan, inputs = plan_of(check_workspace=True), make_operands(CASE)
    workspace = plan.new_workspace()
    plan.run(*inputs, workspace=workspace)
    assert len(pretend_h200) == 1
    where = plan.workspace_regions()[region]
    workspace[where.offset + where.nbytes - 1] = 7
    with pytest.raises(
        ck.InvalidArgument, match=rf"workspace: .*{where.name}.*first 7 at byte {where.offset + where.nbytes - 1}"
    ):
        plan.run(*inputs, workspace=workspace)
    assert len(pretend_h200) == 1, "nothing was launched"
    plan_of().run(*inputs, workspace=workspace)  # unchecked, as every launch but a debugged one


def test_bytes_past_the_regions_are_not_the_plans(pretend_h200: list) -> None:
    plan = plan_of(check_workspace=True)
    workspace = torch.zeros(plan.workspace_size() + 64, dtype=torch.uint8)
    workspace[-1] = 1
    plan.run(*make_operands(CASE), workspace=workspace)
    assert len(pretend_h200) == 1


def test_the_check_is_refused_inside_a_capture(pretend_h200: list, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(check_workspace=True)
    monkeypatch.setattr(plan, "device", CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ck.InvalidArgument, match="check_workspace"):
        plan._refuse_capture("check_workspace")


def test_one_workspace_a_stream_for_all_plans(streams: Streams) -> None:
    """It grows to the largest that was asked for, zeroed anew."""
    assert stream_workspace(0, CUDA) is None
    first = stream_workspace(64, CUDA)
    assert first.numel() == 64 and not first.any()
    assert stream_workspace(32, CUDA) is first
    larger = stream_workspace(128, CUDA)
    assert larger is not first and larger.numel() == 128
    assert stream_workspace(64, CUDA) is larger
    streams.cuda_stream = 2
    assert stream_workspace(64, CUDA) is not larger
    assert stream_workspace(64, torch.device("cuda", 1)) is not stream_workspace(64, CUDA)
    streams.cuda_stream = 1
    assert stream_workspace(64, CUDA) is larger


def test_streams_that_are_not_used_give_their_workspace_back(streams: Streams) -> None:
    kept = stream_workspace(64, CUDA)
    for stream in range(2, MAX_STREAMS + 2):
        streams.cuda_stream = 1
        assert stream_workspace(64, CUDA) is kept, "the one in use stays"
        streams.cuda_stream = stream
        stream_workspace(64, CUDA)
    assert len(workspace_cache._kept) == MAX_STREAMS
    assert (CUDA, 2) not in workspace_cache._kept


def test_each_capture_has_its_own(streams: Streams) -> None:
    """Never that of eager launches, which may run beside a replay, nor that of another capture or another of its streams."""
    eager = stream_workspace(64, CUDA)
    streams.capture = 7
    first = stream_workspace(64, CUDA)
    assert first is not eager
    assert stream_workspace(64, CUDA) is first
    assert stream_workspace(96, CUDA) is not first
    streams.cuda_stream = 2
    branch = stream_workspace(64, CUDA)
    assert branch is not first
    streams.capture = 8
    assert stream_workspace(64, CUDA) is not branch
    streams.capture, streams.cuda_stream = 0, 1
    assert stream_workspace(64, CUDA) is eager
    streams.capture = 7
    assert stream_workspace(64, CUDA) is not first, "what an eager call found over is over"


def test_a_tracing_compilers_capture_keeps_nothing(streams: Streams) -> None:
    streams.capture = 7
    first = stream_workspace(64, CUDA, reuse_in_capture=False)
    assert stream_workspace(64, CUDA, reuse_in_capture=False) is not first
    assert not workspace_cache._captured
