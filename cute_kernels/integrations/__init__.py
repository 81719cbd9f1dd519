"""Other libraries' interfaces over the plans of this package, and the helpers that several of them share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import CuteKernelsError, InvalidArgument


def renamed(error: CuteKernelsError, names: Mapping[str, str]) -> CuteKernelsError:
    """Returns the same error in a caller's words: `names` has the caller's name for each name of this package."""
    words = re.compile(rf"(?<![\w.])(?:{'|'.join(re.escape(name) for name in sorted(names, key=len, reverse=True))})(?!\w)")

    def told(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(told, part))
        return words.sub(lambda found: names[found[0]], part) if isinstance(part, str) else part

    return type(error)(*map(told, error.args))


def with_unit_last_stride(x: Tensor) -> Tensor:
    """Returns x, or a contiguous copy of x if its last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refuse_tensor(name: str, value: object) -> None:
    """Raises InvalidArgument for a tensor, since a plain value is needed."""
    if isinstance(value, Tensor):
        raise InvalidArgument(name, f"is {shown(value)}, must be a plain value: no call waits for what a tensor holds")


def shown(value: object) -> str:
    """Returns a value as a message shows it: a tensor, whose values may lie on a device, is shown by its shape."""
    return f"a tensor {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
