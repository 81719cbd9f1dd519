"""Tensors to which the previous kernel may still write."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Unsettled:
    """A tensor of a page table, or of query rows, to which the previous kernel may still write.

    Reads bypass L1, which would keep the old value. Two reads may disagree, so an index that was in bounds by one read may be out
    of bounds by the next: an index of a 1-D tensor is clamped.
    """

    tensor: cute.Tensor

    @property
    def shape(self) -> tuple:
        """The shape of the tensor."""
        return self.tensor.shape

    def __getitem__(self, coord: Int32 | tuple) -> Int32:
        """The entry as it is now."""
        if not isinstance(coord, tuple):
            coord = cutlass.max(0, cutlass.min(coord, Int32(self.shape[0]) - 1))
        return cute.arch.load(self.tensor.iterator + cute.crd2idx(coord, self.tensor.layout), Int32, cop="cg")
