"""Real tensors of a merge against its descriptor: each violation is its typed error, raised before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..checks.tensors import check_shape, check_strides, check_tensor, refuse_overlap, type_name
from ..errors import InvalidArgument
from .descriptor import AXES, MergeStatesDescriptor


class Operands(NamedTuple):
    """What one run is given, in a kernel's order; out, lse and sinks may be absent."""

    outs: Any
    lses: Any
    out: Any
    lse: Any
    sinks: Any = None

    def signature(self) -> tuple[object, ...]:
        """All that `check` depends on, as a key. Devices are part of the key: an address may come back on another one."""
        outs, lses, out, lse, sinks = self
        # fmt: off
        return (
            outs.shape, outs.stride(), outs.dtype, outs.data_ptr(), outs.device,
            lses.shape, lses.stride(), lses.dtype, lses.data_ptr(), lses.device,
            out.shape, out.stride(), out.dtype, out.data_ptr(), out.device,
            lse.shape, lse.stride(), lse.dtype, lse.data_ptr(), lse.device,
            None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.data_ptr(), sinks.device),
        )
        # fmt: on


@dataclass(frozen=True)
class MergeRules:
    """What a plan demands of its tensors."""

    descriptor: MergeStatesDescriptor
    device: torch.device


def check(rules: MergeRules, operands: Operands) -> None:
    """Raises the typed error of the first rule that is broken: outs, lses, sinks, out, lse, then overlap."""
    states, shape = rules.descriptor.num_states, rules.descriptor.shape
    _check_output(rules, "outs", operands.outs, (states, *shape))
    _check_lse(rules, "lses", operands.lses, (states, *shape[:2]))
    _check_sinks(rules, operands.sinks)
    if operands.out is not None:
        _check_output(rules, "out", operands.out, shape)
    if operands.lse is not None:
        _check_lse(rules, "lse", operands.lse, shape[:2])
    refuse_overlap(operands._asdict(), ("out", "lse"))


def _check_sinks(rules: MergeRules, sinks: Any) -> None:
    """A logit a head where the descriptor says so, else None."""
    if rules.descriptor.sinks:
        check_tensor(rules.device, "sinks", sinks, torch.float32)
        check_shape("sinks", sinks, (rules.descriptor.num_heads,), "[num_heads]")
    elif sinks is not None:
        raise InvalidArgument("sinks", f"got {type_name(sinks)}, must be None: the descriptor has no sinks")


def _check_output(rules: MergeRules, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    descriptor = rules.descriptor
    check_tensor(rules.device, name, tensor, descriptor.dtype)
    check_shape(name, tensor, shape, f"[{', '.join(AXES[-len(shape) :])}]")
    check_strides(name, tensor, descriptor.columns * descriptor.dtype.itemsize)


def _check_lse(rules: MergeRules, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    check_tensor(rules.device, name, tensor, torch.float32)
    check_shape(name, tensor, shape, f"[{', '.join(AXES[-len(shape) - 1 : -1])}]")
