"""Asynchronous copies, which land at once or late: lanes' copies (cp.async) when waited for, TMA boxes at some later time."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from .matrix import swizzled
from .memory import GLOBAL_BASE, MemoryFault
from .numbers import LANES, U8, mask_of

MAP_BYTES, MAP_MAGIC = 128, b"tensor map of an interpreted run"
EVERY = mask_of(0xFFFFFFFF)


@dataclass(frozen=True)
class TensorMap:
    """A tensor of 16-bit units for TMA: its address, extents, strides in bytes (the first is 2) and box, innermost first."""

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    row_bytes: int

    def __post_init__(self) -> None:
        assert self.strides[0] == 2 and 2 * self.box[0] == self.row_bytes in (32, 64, 128)
        assert self.address % 16 == 0 and all(stride % 16 == 0 for stride in self.strides[1:])
        assert max(self.box) <= 256 and len(self.extents) == len(self.strides) == len(self.box) <= 5

    def pack(self) -> bytes:
        """The 128 bytes that a kernel is given."""
        dims = len(self.extents)
        padded = [(*part, *(0,) * (5 - dims)) for part in (self.extents, self.strides, self.box)]
        body = struct.pack("<qBB5q", self.address, dims, self.row_bytes, *padded[1])
        return (MAP_MAGIC[:16] + body + struct.pack("<5i5H", *padded[0], *padded[2])).ljust(MAP_BYTES, b"\0")

    @staticmethod
    def unpack(text: bytes) -> TensorMap:
        """The map that was packed into these bytes."""
        if text[:16] != MAP_MAGIC[:16]:
            raise MemoryFault("a copy's tensor map is none")
        body = struct.calcsize("<qBB5q")
        address, dims, row_bytes, *strides = struct.unpack("<qBB5q", text[16 : 16 + body])
        rest = struct.unpack("<5i5H", text[16 + body : 16 + body + struct.calcsize("<5i5H")])
        return TensorMap(address, rest[:dims], tuple(strides[:dims]), rest[5 : 5 + dims], row_bytes)


def land_box(cta: Any, tensor_map: TensorMap, to: int, corner: tuple[int, ...]) -> int:
    """Copies a box to shared memory, with zeros outside of the tensor; returns how many bytes came."""
    axes = [np.arange(begin, begin + count) for begin, count in zip(corner, tensor_map.box, strict=True)]
    inside, offset = np.ones((), bool), np.zeros((), np.int64)
    for axis, extent, stride in zip(axes, tensor_map.extents, tensor_map.strides, strict=True):
        inside = inside[None] & ((axis >= 0) & (axis < extent)).reshape(-1, *[1] * inside.ndim)
        offset = offset[None] + (axis * stride).reshape(-1, *[1] * offset.ndim)
    flat, there = offset.ravel(), inside.ravel()
    memory = cta.grid.memory
    segment = memory.segments[(tensor_map.address - GLOBAL_BASE) >> 32]
    place = np.where(there, flat + tensor_map.address - segment.base, 0)
    if (there & (segment.flags[place] & segment.flags[np.minimum(place + 1, len(segment.flags) - 1)] & 1 == 0)).any():
        raise MemoryFault(f"a box at {corner} reads outside of the tensors")
    units = segment.data[: len(segment.data) // 2 * 2].view(np.uint16)
    values = np.where(there, units[place >> 1], np.uint16(0))
    begin = to - cta.shared.begin
    if to % 128 or begin < 0 or begin + 2 * len(values) > len(cta.shared.data):
        raise MemoryFault(f"a box of {2 * len(values)} bytes is copied to {to}")
    where = swizzled(to + 2 * np.arange(len(values)), tensor_map.row_bytes) - cta.shared.begin
    cta.shared.data.view(np.uint16)[where >> 1] = values
    return 2 * len(values)


@dataclass
class LaneCopy:
    """A cp.async of some lanes. group: for each lane, the number of its group; waiting: the lanes whose copy has not landed."""

    to: np.ndarray
    of: np.ndarray
    size: int
    given: np.ndarray
    group: np.ndarray
    waiting: np.ndarray


class LaneCopies:
    """A warp's cp.async copies. Each reads and lands at once, or when it is waited for."""

    def __init__(self, warp: Any) -> None:
        self.warp, self.cta = warp, warp.cta
        self.group = np.zeros(LANES, np.int64)  # the group that each lane fills
        self.under_way: list[LaneCopy] = []

    def start(self, to: np.ndarray, of: np.ndarray, size: int, given: np.ndarray, mask: np.ndarray | None) -> None:
        lanes = EVERY if mask is None else mask
        if (given[lanes] > size).any():
            raise MemoryFault(f"a copy of {size} bytes is given {given.tolist()}")
        copy = LaneCopy(to, of, size, given, self.group.copy(), lanes.copy())
        if self.cta.grid.lands_at_once():
            self.land(copy, lanes)
        else:
            self.under_way.append(copy)

    def commit(self, mask: np.ndarray | None) -> None:
        """Ends each active lane's current group."""
        self.group = self.group + (1 if mask is None else mask)

    def wait(self, pending: int, mask: np.ndarray | None) -> None:
        """Lands copies until each active lane has at most `pending` groups under way."""
        last = self.group - pending
        for copy in self.under_way:
            ready = copy.waiting & (copy.group < last)
            self.land(copy, ready if mask is None else ready & mask)
        self.under_way = [copy for copy in self.under_way if copy.waiting.any()]

    def land(self, copy: LaneCopy, lanes: np.ndarray) -> None:
        """Copies these lanes' bytes to shared memory: the given bytes, then zeros up to the copy's size."""
        if not lanes.any():
            return
        copy.waiting = copy.waiting & ~lanes
        values = np.zeros((LANES, copy.size), U8)
        whole = lanes & (copy.given == copy.size)
        if whole.any():
            values[whole] = self.cta.grid.memory.load(copy.of[whole], copy.size).view(U8).reshape(-1, copy.size)
        for lane in np.flatnonzero(lanes & ~whole):
            for i in range(int(copy.given[lane])):
                values[lane, i] = self.cta.grid.memory.load(copy.of[lane : lane + 1] + np.uint64(i), 1)[0, 0]
        view = self.cta.shared.views[copy.size]
        self.cta.shared.store(copy.to[lanes], copy.size, values[lanes].view(view.dtype).reshape(-1, view.shape[1]))
        self.cta.grid.changed()

    def arrive(self, address: np.ndarray, mask: np.ndarray | None) -> None:
        """Lands the lanes' copies so far, at once or later; then the lanes arrive at an mbarrier."""
        lanes, copies = (EVERY if mask is None else mask).copy(), list(self.under_way)

        def landed() -> None:
            for copy in copies:
                self.land(copy, copy.waiting & lanes)
            self.under_way = [copy for copy in self.under_way if copy.waiting.any()]
            self.cta.barriers.arrive(address, np.ones(LANES, np.int64), lanes)

        self.cta.begin(landed)
