"""Memory of a launch: global memory that knows its tensors, and a CTA's shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from .numbers import LANES, U8, U64, UINTS, mask_of

GLOBAL_BASE, SEGMENT_BITS = 0x7000_0000_0000, 32  # each storage has a segment of 4 GiB for itself
PARAM_BASE = 0x5000_0000_0000
SHARED_BASE = 0x6000_0000_0000
SHARED_BEGIN = 1024  # the machine keeps the lower addresses for itself
READ, WRITE = 1, 2
ALL = mask_of(0xFFFFFFFF)


class MemoryFault(Exception):
    """A lane touched memory outside of the tensors, without the right to do so, or at a misaligned address."""


@dataclass
class Segment:
    """data: a storage's bytes. flags: each byte's rights, READ and WRITE, by its tensors. stores: elements stored so far.

    prefetched: offsets of bytes whose lines were prefetched.
    """

    data: np.ndarray
    flags: np.ndarray
    base: int
    stores: int = 0
    prefetched: set[int] = field(default_factory=set)


class Wide(NamedTuple):
    """How numpy holds an element of some bytes: as `count` numbers of `dtype`."""

    dtype: type
    count: int


def wide(nbytes: int) -> Wide:
    """How numpy holds an element of `nbytes` bytes."""
    return Wide(UINTS[min(nbytes, 8)], max(1, nbytes // 8))


def fill(value: int, dtype: type) -> np.integer:
    """A number of type `dtype` whose bytes all are `value`."""
    return np.full(np.dtype(dtype).itemsize, value, U8).view(dtype)[0]


class GlobalMemory:
    """The storages of a launch's tensors, each in a segment of its own. An access outside of the tensors raises MemoryFault."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.known: dict[int, Segment] = {}
        self.kept: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, rights: int = READ, whole_words: bool = False) -> int:
        """Adds a tensor; returns its address. rights: to its bytes, with whole_words to all of their 4-byte words."""
        storage = tensor.untyped_storage()
        segment = self.known.get(storage.data_ptr()) if storage.nbytes() else None
        if segment is None:
            data = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
            size = -(-len(data) // 16) * 16
            if whole_words:
                data = np.concatenate([data, np.full(size - len(data), 0xFF, U8)])
            base = GLOBAL_BASE + (len(self.segments) << SEGMENT_BITS)
            segment = Segment(data, np.zeros(size, U8), base)
            self.segments.append(segment)
            self.known[storage.data_ptr()] = segment
        self.kept.append(tensor)
        offset = tensor.storage_offset() * tensor.element_size()
        if tensor.numel():
            flags = torch.from_numpy(segment.flags)
            strides = [stride * tensor.element_size() for stride in tensor.stride()]
            view = flags.as_strided((*tensor.shape, tensor.element_size()), (*strides, 1), offset)
            view.bitwise_or_(rights)
            if whole_words:
                flags.view(-1, 4).copy_(flags.view(-1, 4).amax(1, keepdim=True).expand(-1, 4).clone())
        return segment.base + offset

    def find(self, address: np.ndarray, nbytes: int, right: int) -> tuple[Segment, np.ndarray]:
        """(segment, offsets in elements) for an access that needs `right`; address: the active lanes' addresses."""
        number = (address - U64(GLOBAL_BASE)) >> U64(SEGMENT_BITS)
        first = int(number[0])
        if (number != number[0]).any():
            raise MemoryFault(f"lanes touch several tensors: {[hex(a) for a in address[:4].tolist()]}")
        if first >= len(self.segments):
            raise MemoryFault(f"address {int(address[0]):#x} is in no tensor")
        segment = self.segments[first]
        offset = address & U64((1 << SEGMENT_BITS) - 1)
        if (offset & U64(nbytes - 1)).any():
            raise MemoryFault(f"addresses are no multiple of {nbytes}: {[hex(a) for a in address.tolist()]}")
        element = wide(nbytes)
        index = (offset // U64(nbytes)).astype(np.int64)
        if int(index.max()) >= len(segment.flags) // nbytes:
            raise MemoryFault(
                f"an access of {nbytes} bytes at {int(address.max()):#x} is behind a storage of {len(segment.data)}"
            )
        flags = segment.flags.view(element.dtype).reshape(-1, element.count)[index]
        wanted = fill(right, element.dtype)
        if ((flags & wanted) != wanted).any():
            lacking = np.flatnonzero(((flags & wanted) != wanted).any(-1))
            what, places = "read" if right == READ else "write", offset[lacking][:8].tolist()
            raise MemoryFault(
                f"{what} of {nbytes} bytes outside of the tensors, by active lanes {lacking.tolist()}:"
                f" offsets {places} of segment {first} of {len(segment.data)} bytes"
            )
        return segment, index

    def load(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        """Loads one element of up to 16 bytes per lane, as [lanes, parts]."""
        segment, index = self.find(address, nbytes, READ)
        return self.parts(segment, nbytes)[index]

    def store(self, address: np.ndarray, nbytes: int, values: np.ndarray) -> None:
        """Stores values as load returns them."""
        segment, index = self.find(address, nbytes, WRITE)
        self.parts(segment, nbytes)[index] = values
        segment.stores += len(index)

    def prefetch(self, address: np.ndarray) -> None:
        """Notes prefetches, which a GPU ignores outside of its memory, and here must be of bytes that may be read."""
        segment, index = self.find(address, 1, READ)
        segment.prefetched.update(index.tolist())

    def prefetched(self, tensor: torch.Tensor) -> set[int]:
        """The offsets, in bytes of its storage, of what a launch has prefetched of a tensor."""
        return self.segment_of(tensor).prefetched

    @staticmethod
    def parts(segment: Segment, nbytes: int) -> np.ndarray:
        """A segment as elements of `nbytes` bytes."""
        element = wide(nbytes)
        whole = len(segment.data) // nbytes * nbytes
        return segment.data[:whole].view(element.dtype).reshape(-1, element.count)

    def stores_to(self, tensor: torch.Tensor) -> int:
        """How many elements a launch has stored in a tensor's storage."""
        return self.segment_of(tensor).stores

    def segment_of(self, tensor: torch.Tensor) -> Segment:
        """The segment of a tensor's storage."""
        return self.known[tensor.untyped_storage().data_ptr()]


class SharedMemory:
    """A CTA's shared memory, which begins as NaN of every kind."""

    def __init__(self, nbytes: int) -> None:
        self.begin = SHARED_BEGIN
        self.data = np.full(-(-nbytes // 16) * 16, 0xFF, U8)
        self.views = {n: self.data.view(wide(n).dtype).reshape(-1, wide(n).count) for n in (1, 2, 4, 8, 16)}

    def index(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        """The indices of the elements of `nbytes` bytes at these addresses."""
        offset = address.astype(np.int64) - self.begin
        if (offset & (nbytes - 1)).any():
            raise MemoryFault(f"shared addresses are no multiple of {nbytes}: {address.tolist()}")
        if int(offset.min()) < 0 or int(offset.max()) >= len(self.data):
            raise MemoryFault(f"shared addresses outside of {len(self.data)} bytes: {address.tolist()}")
        return offset // nbytes

    def load(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        """Loads one element of up to 16 bytes per lane, as [lanes, parts]."""
        return self.views[nbytes][self.index(address, nbytes)]

    def store(self, address: np.ndarray, nbytes: int, values: np.ndarray) -> None:
        """Stores values as load returns them."""
        self.views[nbytes][self.index(address, nbytes)] = values


def as_registers(parts: np.ndarray, dtype: type, count: int, mask: np.ndarray | None) -> list[np.ndarray]:
    """`count` registers of 32 lanes, filled from the active lanes' parts; other lanes get 0."""
    columns = np.ascontiguousarray(parts).view(dtype).reshape(len(parts), count).T
    if mask is None or len(parts) == LANES:
        return list(np.ascontiguousarray(columns))
    found = np.zeros((count, LANES), dtype)
    found[:, mask] = columns
    return list(found)


def from_registers(registers: list[np.ndarray], nbytes: int, mask: np.ndarray | None) -> np.ndarray:
    """[active lanes, parts]: each active lane's values in the registers, side by side as one element."""
    element = wide(nbytes)
    rows = np.ascontiguousarray(np.stack(registers, axis=1))
    rows = rows if mask is None else rows[mask]
    return rows.view(element.dtype).reshape(len(rows), element.count)
