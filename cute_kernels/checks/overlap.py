"""Whether two strided tensors share memory, also where they interleave, as the K and V of one allocation do."""

from __future__ import annotations

from torch import Tensor

Axes = list[tuple[int, int]]  # (stride in bytes, extent) of the axes longer than one, the largest stride first


def disjoint(first: Tensor, second: Tensor) -> bool:
    """Whether provably no byte belongs to both: their spans do not meet, or they interleave within equal outer strides.

    The halves of [pages, 2, ...] interleave, or scales stored after the values of each page. Negative strides do not occur.
    """
    if not first.numel() or not second.numel():
        return True
    return _apart(_axes(first), _axes(second), second.data_ptr() - first.data_ptr(), first.element_size(), second.element_size())


def _axes(tensor: Tensor) -> Axes:
    size = tensor.element_size()
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(((stride * size, extent) for stride, extent in axes if extent > 1), reverse=True)


def _apart(first: Axes, second: Axes, distance: int, size: int, other_size: int) -> bool:
    """`disjoint` for axes: `second` begins `distance` bytes after `first`; elements have `size` and `other_size` bytes."""
    reach, other_reach = _reach(first, size), _reach(second, other_size)
    if distance >= reach or distance + other_reach <= 0:
        return True
    if not first or not second or first[0][0] != second[0][0]:
        return False
    stride, first, second = first[0][0], first[1:], second[1:]
    if max(_reach(first, size), _reach(second, other_size)) > stride:
        return False  # one period reaches into the next
    distance %= max(stride, 1)  # to the period of `second` that begins in one of `first`; the previous one may reach into it
    return all(_apart(first, second, d, size, other_size) for d in (distance, distance - stride))


def _reach(axes: Axes, size: int) -> int:
    """Bytes from the start of the first element to the end of the last."""
    return sum(stride * (extent - 1) for stride, extent in axes) + size
