"""Checks of a descriptor's fields: each raises the typed error of the field that breaks its rule."""

from __future__ import annotations

import math
from typing import TypeGuard

from ..errors import InvalidProblem

MAX_EXTENT = 2**31 - 1  # extents and lengths are int32 on the device


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_extent(name: str, value: object, least: int = 1) -> None:
    if not is_int(value) or not least <= value <= MAX_EXTENT:
        raise InvalidProblem(name, value, f"must be an int from {least} to 2**31 - 1")


def check_group(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise InvalidProblem("num_heads", num_heads, f"must be a multiple of num_kv_heads = {num_kv_heads}")


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Checks for one of `choices`. An array is none of them, though it compares with each, element by element."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        *most, last = ("None" if choice is None else f'"{choice}"' for choice in choices)
        raise InvalidProblem(name, value, f"must be {', '.join(most)} or {last}")


def check_softmax(softmax_scale: float | None, lse_base: str) -> None:
    if softmax_scale is not None:
        number = isinstance(softmax_scale, (int, float)) and not isinstance(softmax_scale, bool)
        if not number or not 0 < softmax_scale < math.inf:
            raise InvalidProblem("softmax_scale", softmax_scale, "must be a finite number above 0, or None")
    check_choice("lse_base", lse_base, ("e", "2"))


def check_alignment(name: str, alignment_bytes: int | None, allowed: tuple[int, ...] = (2, 4, 8, 16)) -> None:
    if alignment_bytes is not None and (not is_int(alignment_bytes) or alignment_bytes not in allowed):
        raise InvalidProblem(name, alignment_bytes, f"must be {', '.join(map(str, allowed))} or None")


def check_modifiers(window_left: int | None, window_right: int | None, softcap: float | None, **flags: bool) -> None:
    """Checks for windows from 0 on, a softcap above 0, and flags that are bools."""
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if window is not None and (not is_int(window) or not 0 <= window <= MAX_EXTENT):
            raise InvalidProblem(name, window, "must be an int from 0 to 2**31 - 1, or None for no bound")
    if softcap is not None:
        number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
        if not number or not 0 < softcap < math.inf:  # math.isfinite would break a graph that is traced with other caps
            raise InvalidProblem("softcap", softcap, "must be a finite number above 0, or None for no cap")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidProblem(name, flag, "must be a bool")
