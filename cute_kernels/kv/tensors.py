"""Page tables and scales as real tensors: checked against what is described, and viewed as a kernel takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks.tensors import check_shape, check_tensor, check_unit_last, type_name
from ..config.problem import TableFormat
from ..errors import InvalidArgument, InvalidProblem
from .page_table import OPERAND_NAMES, PageTable, is_made
from .scale import Axes, KVScale

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_page_table(table_format: TableFormat, page_table: Any, name: str = "page_table") -> None:
    """Checks for a PageTable of the described format."""
    if not isinstance(page_table, PageTable):
        raise InvalidArgument(name, f"got {type_name(page_table)}, must be a PageTable")
    check_made(page_table, name)
    if page_table.format != table_format:
        raise InvalidArgument(name, f"is {page_table.format}, must be {table_format}: the descriptor's table_format")


def check_made(page_table: PageTable, name: str = "page_table") -> None:
    """Checks for a PageTable of any format."""
    if not is_made(page_table):
        raise _not_made(page_table, name)


def _not_made(page_table: PageTable, name: str) -> InvalidArgument:
    """What is wrong with a PageTable that none of its class methods has made."""
    table_format, operands = page_table
    if not isinstance(table_format, str) or table_format not in OPERAND_NAMES:
        return InvalidArgument(name, f"has format {table_format!r}, must be one of {', '.join(OPERAND_NAMES)}")
    names, three = OPERAND_NAMES[table_format], isinstance(operands, (tuple, list)) and len(operands) == 3
    absent = [operand for operand, tensor in zip(names, operands, strict=False) if tensor is None] if three else []
    if absent:
        return InvalidArgument(absent[0], "got NoneType, must be a tensor")
    maker = "whole" if table_format == "none" else table_format
    return InvalidArgument(name, f"has operands of another format, must be made by PageTable.{maker}")


def check_table(device: torch.device, table_format: TableFormat, batch: int, operands: tuple[Any, ...]) -> None:
    """Checks the operands of a PageTable of `batch` rows."""
    names = OPERAND_NAMES[table_format]
    tensors = operands[: len(names)]
    for name, tensor in zip(names, tensors, strict=True):
        check_tensor(device, name, tensor, torch.int32)
    for name, tensor, (shape, meaning) in zip(names, tensors, _table_shapes(table_format, batch), strict=True):
        check_shape(name, tensor, shape, meaning)
    for name, tensor in zip(names, tensors, strict=True):
        check_unit_last(name, tensor)


def _table_shapes(table_format: TableFormat, batch: int) -> list[tuple[tuple[int | None, ...], str]]:
    """The shape of each operand, with None for any extent, and the shape in words."""
    rows: tuple[tuple[int | None, ...], str] = ((batch,), "[batch_size]")
    ends: tuple[tuple[int | None, ...], str] = ((batch + 1,), "[batch_size + 1]")
    shapes: dict[str, list[tuple[tuple[int | None, ...], str]]] = {
        "dense": [((batch, None), "[batch_size, max_pages]"), rows],
        "csr": [((None,), "[used_pages]"), ends, rows],
        "lengths": [rows],
        "packed": [ends],
    }
    return shapes.get(table_format, [])


def check_scale(device: torch.device, name: str, scale: KVScale, tensor: Any, axes: Axes) -> None:
    """Checks for scales of the described granularity and dtype, with any strides; for None if there are none."""
    if not scale:
        if tensor is not None:
            raise InvalidArgument(name, f"got {type_name(tensor)}, must be None: the descriptor has no {name}")
        return
    check_tensor(device, name, tensor, scale.dtype)
    if tuple(tensor.shape) not in scale.shapes(axes):
        raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must be {scale.meaning(axes)}: the scale is per {scale}")


def as_bytes(cache: Tensor) -> Tensor:
    """The cache itself, or its bytes (uint8) if it holds fp8."""
    return cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache


def scale_view(scale: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The same scales in the kernel's shape, also from a 0-d or a flat tensor."""
    return scale if scale is None or scale.dim() == len(shape) else scale.view(shape)
