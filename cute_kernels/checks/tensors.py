"""Checks of real tensors: each raises the typed error of the tensor that breaks its rule, before anything is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported
from .overlap import disjoint

# what operations raise for a tensor that has no plain address, or for too few operands
MALFORMED_ERRORS = (AttributeError, RuntimeError, TypeError, ValueError)


def check_tensor(device: torch.device, name: str, tensor: Any, *dtypes: torch.dtype) -> None:
    """Checks for a tensor of one of `dtypes` in plain memory on `device`, at a multiple of an element's size."""
    if type(tensor) is not Tensor:  # else neither of these slower questions needs asking
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(name, f"got {type_name(tensor)}, must be a tensor")
        if isinstance(tensor, FakeTensor):
            raise InvalidArgument(name, "is a FakeTensor, must have memory: trace decode_attention, which is a torch op there")
    address = plain_address(name, tensor)
    if tensor.device != device:
        raise InvalidArgument(name, f"is on {tensor.device}, must be on the plan's device, {device}")
    if tensor.dtype not in dtypes:
        raise InvalidArgument(name, f"has dtype {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
    if address % tensor.element_size():
        raise MisalignedOperand(f"{name}.data_ptr", address, tensor.element_size())


def plain_address(name: str, tensor: Tensor) -> int:
    """The address of a tensor. Raises InvalidArgument for a tensor whose values do not lie in memory by its strides."""
    try:
        address = tensor.data_ptr()  # sparse tensors have none
    except RuntimeError as error:
        kind = "in torch.vmap or torch.func.grad" if tensor.layout is torch.strided else str(tensor.layout)
        raise InvalidArgument(name, f"has no address ({kind}), must be strided and have memory") from error
    if tensor.is_nested:
        raise InvalidArgument(name, "is nested, must be strided")
    if tensor.is_neg():
        raise InvalidArgument(name, "is a negative view (Tensor.is_neg), must be resolved by Tensor.resolve_neg")
    return address


def refuse_unplain(tensors: dict[str, Any]) -> None:
    """Raises InvalidArgument for the first tensor that has no plain address. A call asks this after one of MALFORMED_ERRORS.

    Nothing is refused where tensors are traced, which have no memory.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
            plain_address(name, tensor)


def check_tensors(**tensors: object) -> None:
    """Raises InvalidArgument unless each is a tensor, real or fake."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(name, f"got {type(tensor).__name__}, must be a tensor")


def check_tensors_or_none(**tensors: object) -> None:
    """Raises InvalidArgument unless each is a tensor, real or fake, or None."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InvalidArgument(name, f"got {type(tensor).__name__}, must be a tensor or None")


def check_beside(name: str, tensor: Any, x: Any, *dtypes: torch.dtype) -> None:
    """Raises InvalidArgument unless `tensor` is a tensor, real or fake, of one of `dtypes` and on x's device."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(name, f"got {type(tensor).__name__}, must be a tensor")
    if tensor.device != x.device:
        raise InvalidArgument(name, f"is on {tensor.device}, must be on x's device, {x.device}")
    if tensor.dtype not in dtypes:
        raise InvalidArgument(name, f"has dtype {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    fits = tensor.dim() == len(shape) and all(want in (None, got) for got, want in zip(tensor.shape, shape, strict=True))
    if not fits:
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must be {meaning} = [{wanted}]")


def check_unit_last(name: str, tensor: Tensor) -> None:
    """Checks for a last stride of 1. A tensor without elements may have any: no address follows from its strides."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise Unsupported([f"{name}.stride = {tensor.stride()}: the last must be 1"])


def check_strides(name: str, tensor: Tensor, alignment: int) -> None:
    """Checks for a last stride of 1; the other strides and the pointer must be multiples of `alignment` bytes."""
    check_unit_last(name, tensor)
    if tensor.numel() == 0:
        return
    size = tensor.element_size()
    *outer, _ = zip(tensor.shape, tensor.stride(), strict=True)
    for axis, (extent, stride) in enumerate(outer):
        if extent > 1 and stride * size % alignment:
            raise MisalignedOperand(f"{name}.stride({axis})", stride * size, alignment)
    if tensor.data_ptr() % alignment:
        raise MisalignedOperand(f"{name}.data_ptr", tensor.data_ptr(), alignment)


def refuse_overlap(operands: dict[str, Any], written: tuple[str, ...]) -> None:
    """No written tensor may share bytes with another operand or, except the workspace, with itself; tensors may interleave."""
    tensors = {name: t for name, t in operands.items() if isinstance(t, Tensor) and t.numel()}
    for name in (name for name in written if name in tensors):
        for other, tensor in tensors.items():
            if other != name and not disjoint(tensors[name], tensor):
                low, high = span(tensors[name])
                raise InvalidArgument(name, f"bytes [{low:#x}, {high:#x}) overlap {other}'s, must be memory of its own")
    for name in (name for name in written if name in tensors and name != "workspace"):
        if overlaps_itself(tensors[name]):
            strides = tensors[name].stride()
            raise InvalidArgument(name, f"strides {strides} make elements share memory, each must have its own")


def span(tensor: Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first to its last element: [low, high)."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    axes = sorted((stride, extent) for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1)
    reach = 0  # the largest offset within the axes so far
    for stride, extent in axes:
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def has_odd_unit_strides(tensor: Tensor, alignment: int) -> bool:
    """Whether an axis of extent one has a stride that a kernel's signature would refuse, though it is never used."""
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    odd = any(extent == 1 and (stride * tensor.element_size() % alignment or stride == 0) for extent, stride in outer)
    return odd or last[1] != 1


def with_unit_strides(tensor: Tensor, head_dim: int) -> Tensor:
    """The same elements; an axis of extent one gets a row's stride, `head_dim`, or 1 if it is the last axis."""
    strides = [head_dim if extent == 1 else stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, (*strides[:-1], 1))


def type_name(value: object) -> str:
    return type(value).__name__
