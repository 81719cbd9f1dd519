"""What a function without a plan demands of a tensor: its type, its dtype, and the device of the tensor beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import InvalidArgument


def check_beside(name: str, tensor: Any, x: Any, *dtypes: torch.dtype) -> None:
    """`tensor` is one, of one of `dtypes` and on the device of `x`; it may be a fake one. Raises InvalidArgument."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(name, f"got {type(tensor).__name__}, must be a tensor")
    if tensor.device != x.device:
        raise InvalidArgument(name, f"is on {tensor.device}, must be on x's device, {x.device}")
    if tensor.dtype not in dtypes:
        raise InvalidArgument(name, f"has dtype {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
