"""Operands that are changed in place between two runs: the shortcut launches what they are now, or an error says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from tests.support.harness import BACKENDS, assert_bitwise, assert_close, device_of, select
from tests.support.inputs import NAN, Inputs, Shape, make_inputs
from tests.support.storage import STORAGES

MIXED = (700, 3, 33, 1500)
SHAPES = {
    "dense": Shape(lengths=MIXED),
    "csr": Shape(lengths=MIXED, table_format="csr"),
    "NHD": Shape(lengths=MIXED, order="NHD"),
    "contiguous": Shape(lengths=(300,) * 4, page_size=0),
    "e4m3": Shape(lengths=MIXED, **STORAGES["e4m3"]),
    "int8 token": Shape(lengths=MIXED, **STORAGES["int8 token"]),
}
OTHER = {1: torch.int8, 2: torch.int16, 4: torch.float32}  # another dtype of as many bytes; of int8 and f32, uint8 and int32
Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def settled(shape: Shape, backend: str) -> tuple[Inputs, dict[str, torch.Tensor], Run]:
    """(inputs, every operand by name, a run of them that takes a shortcut)."""
    inputs, plan = make_inputs(shape, device_of(backend)), select(shape, backend)
    table = inputs.table() if shape.page_size else None
    caches = [c.transpose(1, 2) if shape.order == "NHD" and shape.page_size else c for c in (inputs.k, inputs.v)]
    out, lse = torch.full_like(inputs.q, NAN), torch.full(inputs.q.shape[:2], NAN, device=inputs.q.device)
    kept = {**inputs.scales, "out": out, "lse": lse, "workspace": plan.new_workspace()}
    tables = () if table is None else (table,)
    operands = {"q": inputs.q, "k": caches[0], "v": caches[1], **kept}
    operands |= {f"table{i}": t for i, t in enumerate(table.operands if table else ())}

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return plan.run(inputs.q, *caches, *tables, **kept)

    for _ in range(3):
        run()
    return inputs, {name: t for name, t in operands.items() if t is not None and t.numel()}, run


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    other = OTHER[tensor.itemsize]
    other = {torch.int8: torch.uint8, torch.float32: torch.int32}[other] if other == tensor.dtype else other
    return tensor.view(other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("change", [other_dtype, lambda t: t[: len(t) // 2]], ids=["dtype", "shorter"])
def test_another_dtype_or_less_of_the_same_memory_is_refused(change: Callable, shape: Shape, backend: str) -> None:
    _, operands, run = settled(shape, backend)
    for name, tensor in operands.items():
        if (name, shape.table_format, change is other_dtype) == ("table0", "csr", False):
            continue  # a shorter pool of indices is bad metadata: masked and flagged, not an error
        before = tensor.data
        tensor.data = change(before)
        with pytest.raises(ck.CuteKernelsError):
            run()
        tensor.data = before
        run()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_operands_that_move_are_followed(shape: Shape, backend: str) -> None:
    """Each in turn, to a copy; what it left behind is spoiled."""
    inputs, operands, run = settled(shape, backend)
    expected = [tensor.clone() for tensor in run()]
    assert_close(inputs, *expected)
    for name, tensor in operands.items():
        before = tensor.data
        tensor.data = before.clone() if name != "workspace" else torch.zeros_like(before)
        before.view(torch.uint8).fill_(0xFF)
        operands["out"].fill_(NAN), operands["lse"].fill_(NAN)
        assert_bitwise(run(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_misaligned_pointer_is_refused(backend: str) -> None:
    """By bytes that a copy of the same shape begins later; the CPU variant has the same rules."""
    _, operands, run = settled(replace(SHAPES["dense"], page_size=16), backend)
    for name in ("q", "k", "v", "out", "lse", "table1"):
        tensor = operands[name]
        before, room = tensor.data, torch.zeros(tensor.nbytes + 16, dtype=torch.uint8, device=tensor.device)
        off = tensor.itemsize // 2 if name in ("lse", "table1") else 2
        if off % tensor.itemsize:
            continue  # torch itself makes no such tensor
        tensor.data = room[off : off + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        with pytest.raises(ck.CuteKernelsError, match=name):
            run()
        tensor.data = before
        run()
