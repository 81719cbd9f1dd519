"""Tensors without memory: decode_attention is traced through its torch op and launches nothing; plans refuse them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cute_kernels as ck
from cute_kernels.api import attention, torch_ops
from tests.support.inputs import Shape, make_operands

CASE = Shape(lengths=(0, 5, 40), head_dim=64, name="fake")


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The eager paths must not be reached."""

    def reached(*operands: object) -> None:
        raise AssertionError("launched")

    with monkeypatch.context() as patch:
        patch.setattr(attention.plan_cache, "run_paged", reached)
        patch.setattr(attention.plan_cache, "run_contiguous", reached)
        yield


def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    return ck.decode_attention(q, k_cache, v_cache, page_table=table, seq_lens=seq_lens)


def contiguous(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return ck.decode_attention(q, k, v)


def operands_of(call: Callable[..., object]) -> tuple[Tensor, ...]:
    if call is paged:
        inputs = make_operands(CASE)
        return (*inputs[:3], *inputs.page_table.operands[:2])
    return torch.randn(2, 8, 64).half(), *torch.randn(2, 2, 2, 33, 64).half()


BOTH = pytest.mark.parametrize("call", [paged, contiguous])


@BOTH
def test_fake_tensors_give_fake_outputs(call: Callable[..., tuple[Tensor, Tensor]], no_launch: None) -> None:
    """Inside their mode and, as a fake keeps its mode, outside it."""
    mode = FakeTensorMode()
    operands = operands_of(call)
    fakes = [mode.from_tensor(operand) for operand in operands]
    with mode:
        inside = call(*fakes)
    for out, lse in (inside, call(*fakes)):
        assert isinstance(out, FakeTensor) and isinstance(lse, FakeTensor)
        assert (out.shape, out.dtype, out.device) == (operands[0].shape, operands[0].dtype, operands[0].device)
        assert (lse.shape, lse.dtype) == (operands[0].shape[:2], torch.float32)


def test_other_arguments_on_fakes(no_launch: None) -> None:
    mode = FakeTensorMode()
    q, k_cache, v_cache, table, _ = (mode.from_tensor(operand) for operand in operands_of(paged))
    out = mode.from_tensor(torch.empty(3, 1, 8, 64, dtype=torch.bfloat16))
    scale = mode.from_tensor(torch.ones(2))
    got, lse = ck.decode_attention(q[:, None], k_cache, v_cache, page_table=table, seq_lens=5, k_scale=scale, out=out)
    assert got is out and tuple(lse.shape) == (3, 8)
    sinks = mode.from_tensor(torch.ones(8))
    assert isinstance(ck.decode_attention(q, k_cache, v_cache, page_table=table, seq_lens=5, softcap=3.0)[0], FakeTensor)
    ck.decode_attention(q, k_cache, v_cache, page_table=table, seq_lens=5, window_left=3, sinks=sinks, alibi_slopes=sinks)
    with pytest.raises(ck.Unsupported, match="alibi = "):
        ck.decode_attention(q, k_cache, v_cache, page_table=table, seq_lens=5, alibi=True)
    for given in ({}, {"lse": lse}):
        with pytest.raises(ck.Unsupported, match="several query rows"):
            ck.decode_attention(q[:, None].expand(3, 2, 8, 64), k_cache, v_cache, page_table=table, seq_lens=5, **given)


@BOTH
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_op(call: Callable[..., tuple[Tensor, Tensor]], tracing_mode: str) -> None:
    """And what it recorded computes the same."""
    operands = operands_of(call)
    expected = call(*operands)
    graph = make_fx(call, tracing_mode=tracing_mode)(*operands)
    name = "paged_decode" if call is paged else "flash_decoding"
    assert [node.target for node in graph.graph.nodes].count(getattr(torch.ops.cute_kernels, name).default) == 1
    assert all(torch.equal(a, b) for a, b in zip(graph(*operands), expected, strict=True))


@BOTH
@pytest.mark.parametrize("strict", [False, True])
def test_export(call: Callable[..., tuple[Tensor, Tensor]], strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *operands: Tensor) -> tuple[Tensor, Tensor]:
            return call(*operands)

    operands = operands_of(call)
    exported = torch.export.export(Layer(), operands, strict=strict).module()
    assert all(torch.equal(a, b) for a, b in zip(exported(*operands), call(*operands), strict=True))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_plans_refuse_fake_tensors(place: int) -> None:
    """Each operand by its name, though the others are real."""
    plan = ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor(2, 8, 2, 33, 64, torch.float16), "cpu")
    operands = list(operands_of(contiguous))
    outputs = {"out": torch.empty_like(operands[0]), "lse": torch.empty(2, 8)}
    operands[place] = FakeTensorMode().from_tensor(operands[place])
    name = ("q", "k_cache", "v_cache")[place]
    for attempt in (plan.run, plan.can_implement):
        for given in ({}, outputs):
            with pytest.raises(ck.InvalidArgument, match=f"{name}: is a FakeTensor, must have memory"):
                attempt(*operands, **given)


def test_plain_tensors_and_parameters_take_the_short_way() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert not torch_ops.traced(torch.zeros(1), parameter, None, 3)
    assert torch_ops.traced(torch.zeros(1), FakeTensorMode().from_tensor(torch.zeros(1)))
