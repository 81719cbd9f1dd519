"""Shared memory that the phases of a kernel use one after the other: each phase lays out its own from the same beginning."""

import cutlass
import cutlass.cute as cute

ALIGNMENT = 1024  # bytes: that of swizzled tiles


class Arena:
    """An allocator, as mainloop/shared.allocate takes it, over `nbytes` that are allocated already.

    barriers: memory for a phase's mbarriers outside of `nbytes`, or None if none are allocated from it. Memory that held an
    mbarrier must not be used for anything else (PTX, mbarrier.inval): the mbarrier's state was written over scales that the
    next phase had copied there, and they were NaN.
    """

    def __init__(self, base: cute.Pointer, nbytes: int, barriers: cute.Pointer | None = None):
        self.base, self.nbytes, self.barriers, self.offset = base, nbytes, barriers, 0

    def allocate_array(self, element_type, count: int, byte_alignment: int = 8) -> cute.Pointer:
        """A pointer to `count` elements."""
        if element_type is cutlass.Int64:
            return self.barriers
        return cute.recast_ptr(self._take(count * element_type.width // 8, byte_alignment), dtype=element_type)

    def allocate_tensor(self, element_type, layout, byte_alignment: int = 8, swizzle=None) -> cute.Tensor:
        """A tensor, swizzled if `swizzle` is given."""
        begin = self._take(cute.cosize(layout) * element_type.width // 8, byte_alignment)
        return cute.make_tensor(cute.recast_ptr(begin, swizzle_=swizzle, dtype=element_type), layout)

    def _take(self, nbytes: int, byte_alignment: int) -> cute.Pointer:
        begin = -(-self.offset // byte_alignment) * byte_alignment
        self.offset = begin + nbytes
        if self.offset > self.nbytes:
            raise ValueError(f"the phases share {self.nbytes} bytes, one needs {self.offset}")
        return (self.base + begin).align(byte_alignment)


def arena_of(smem: cutlass.memory.SmemAllocator, nbytes: int) -> cute.Pointer:
    """The beginning of the `nbytes` of an Arena."""
    return smem.allocate(nbytes, byte_alignment=ALIGNMENT)
