"""Matrix products: how elements lie in registers and in shared memory, and a warpgroup's steps (wgmma)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from .memory import MemoryFault, SharedMemory
from .numbers import F16, F32, LANE, LANES, U16, U32, f32_of_bf16

GROUP, THREAD = LANE >> 2, LANE & 3  # a lane's group, and its number in the group
ROWS, DEPTH, COLUMNS = 16, 16, 8  # the extents of a warp's product


def _a_places() -> np.ndarray:
    """For each element of A [16, 16] its place in the 16-bit halves of 4 registers of 32 lanes."""
    places = np.zeros((ROWS, DEPTH), np.int64)
    for register in range(4):
        for half in range(2):
            rows, columns = GROUP + 8 * (register % 2), 2 * THREAD + half + 8 * (register // 2)
            places[rows, columns] = (register * LANES + LANE) * 2 + half
    return places


def _b_places() -> np.ndarray:
    """The same for B [16, 8] in 2 registers."""
    places = np.zeros((DEPTH, COLUMNS), np.int64)
    for register in range(2):
        for half in range(2):
            places[2 * THREAD + half + 8 * register, GROUP] = (register * LANES + LANE) * 2 + half
    return places


@cache
def accumulator_places(columns: int) -> np.ndarray:
    """[registers, lanes]: where in a row-major [16, columns] each lane's elements are."""
    places = np.zeros((columns // 2, LANES), np.int64)
    for register in range(columns // 2):
        rows = GROUP + 8 * (register % 4 // 2)
        places[register] = rows * columns + register // 4 * 8 + 2 * THREAD + register % 2
    return places


A_PLACES, B_PLACES = _a_places(), _b_places()


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """16-bit elements as f32."""
    return f32_of_bf16(bits) if kind == "bf16" else bits.view(F16).astype(F32)


def fragment(kind: str, registers: tuple[np.ndarray, ...], places: np.ndarray) -> np.ndarray:
    """The matrix whose elements lie in registers."""
    return floats(np.concatenate(registers).view(U16)[places], kind)


def warp_product(kind: str, a: tuple, b: tuple, c: tuple) -> np.ndarray:
    """The 4 registers of A B + C, with bits of f32."""
    product = fragment(kind, a, A_PLACES) @ fragment(kind, b, B_PLACES)
    return (product.ravel()[accumulator_places(COLUMNS)] + np.stack(c).view(F32)).view(U32)


def load_matrices(shared: SharedMemory, address: np.ndarray, transposed: bool) -> np.ndarray:
    """The 4 registers of four 8 x 8 matrices, whose rows of 16 bytes lie at the lanes' addresses."""
    rows = shared.load(address, 16)
    if not transposed:
        return rows.view(U32).reshape(4, LANES)
    turned = rows.view(U16).reshape(4, 8, 8).transpose(0, 2, 1)
    return np.ascontiguousarray(turned).view(U32).reshape(4, LANES)


class Descriptor(NamedTuple):
    """A warpgroup's operand in shared memory. row_bytes: the size of a swizzled row, 32, 64 or 128."""

    start: int
    leading: int
    stride: int
    row_bytes: int


def descriptor(word: int) -> Descriptor:
    """Decodes the 64 bits of a matrix descriptor."""
    layout = word >> 62 & 3
    if not layout or word >> 49 & 7:
        raise NotImplementedError(f"the interpreter does not know the matrix descriptor {word:#x}")
    return Descriptor(
        (word & 0x3FFF) << 4, (word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4, {1: 128, 2: 64, 3: 32}[layout]
    )


@cache
def _offsets(leading: int, stride: int, row_bytes: int, rows: int, transposed: bool) -> np.ndarray:
    """Byte offsets [16 deep, rows] of an operand from its start, before the swizzle."""
    depth, row = np.arange(DEPTH)[:, None], np.arange(rows)[None, :]
    if transposed:  # each row has a few columns of one depth; blocks of columns are `leading` apart
        columns = row_bytes // 2
        return row % columns * 2 + row // columns * leading + depth % 8 * row_bytes + depth // 8 * stride
    return depth * 2 + row % 8 * row_bytes + row // 8 * stride


def swizzled(address: np.ndarray, row_bytes: int) -> np.ndarray:
    """Where bytes lie after the swizzle: it XORs address bits from 4 up with bits from 7 up."""
    return address ^ ((address >> 7 & (row_bytes // 16 - 1)) << 4)


class Steps:
    """A warp's part of its warpgroup's steps. Shared memory that a step reads may not change until the wait for it."""

    def __init__(self, shared: SharedMemory, row: int) -> None:
        self.shared, self.row = shared, row  # row: the first of the warp's 16 rows of A
        self.open: list[tuple[np.ndarray, np.ndarray]] = []
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def operand(self, word: int, first: int, rows: int, transposed: bool, kind: str) -> np.ndarray:
        """[16 deep, rows] of an operand in shared memory, from row `first` on."""
        found = descriptor(word)
        offsets = _offsets(found.leading, found.stride, found.row_bytes, first + rows, transposed)[:, first:]
        address = swizzled(found.start + offsets, found.row_bytes) - self.shared.begin
        if address.min() < 0 or address.max() >= len(self.shared.data):
            raise MemoryFault(f"an operand of a warpgroup at {found.start} lies outside of shared memory")
        index = address >> 1
        bits = self.shared.data.view(U16)[index]
        self.open.append((index, bits))
        return floats(bits, kind)

    def product(
        self, kind: str, columns: int, a: tuple | np.ndarray, b: np.ndarray, transposed: list[int], added: tuple | None
    ) -> np.ndarray:
        """The registers [columns / 2, lanes] of this warp's rows of A B, to which `added` is added."""
        if isinstance(a, tuple):
            left = fragment(kind, a, A_PLACES)
        else:
            left = self.operand(int(a[0]), self.row, ROWS, bool(transposed[0]), kind).T
        right = self.operand(int(b[0]), 0, columns, bool(transposed[-1]), kind)
        found = (left @ right).ravel()[accumulator_places(columns)]
        if added is not None:
            found = found + np.stack(added).view(F32)
        return found.view(U32)

    def commit(self) -> None:
        """Ends the current group of steps."""
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        """Ends the oldest groups until `pending` are under way; the shared memory that they read must not have changed."""
        while len(self.groups) > pending:
            for index, bits in self.groups.pop(0):
                if (self.shared.data.view(U16)[index] != bits).any():
                    raise MemoryFault("shared memory changed while a step of a warpgroup that reads it was under way")
