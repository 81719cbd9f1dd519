"""Rows of two tensors side by side in shared memory, by cp.async: K and V of keys, q and dout of packed query rows.

One tile of each stays in shared memory (resident), other tiles stream past it through a ring of two stages. All threads of a CTA
bring each tile and meet before it is read. Tiles are swizzled (mainloop/tile.py), as both ldmatrix and wgmma read them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.backward import BackwardSpec
from ...config.problem import UNIT_BYTES
from ...config.tiling import RingShape
from ..attend.query_rows import QueryBlock, Row, place_in
from ..kv.source import Rows, page_of, slot_start
from ..ptx.cp_async import copy_async
from ..ptx.registers import quotient, remainder
from .shared import allocate_tiles
from .tile import swizzled

NUMBERS = 2  # of a query row: its lse and its delta
NUMBER_BYTES = 4


@dataclass(frozen=True)
class TwinTiles:
    """resident: two tiles; streamed: two rings; numbers: f32 [streamed row, lse or delta, stage].

    words: Int32, one per resident row; votes: Int32, one per warp.
    """

    resident: tuple
    streamed: tuple
    numbers: cute.Tensor
    words: cute.Tensor
    votes: cute.Tensor


def allocate_twins(spec: BackwardSpec) -> TwinTiles:
    """Lays out the CTA's shared memory."""
    smem = cutlass.memory.SmemAllocator()
    resident = allocate_tiles(smem, spec, (spec.resident, spec.resident))
    streamed = allocate_tiles(smem, spec, (spec.streamed, spec.streamed))
    layout = cute.make_layout((spec.tile_rows, NUMBERS, spec.num_stages))
    numbers = smem.allocate_tensor(Float32, layout, byte_alignment=16)
    words = smem.allocate_tensor(Int32, cute.make_layout(spec.resident_rows), byte_alignment=16)
    votes = smem.allocate_tensor(Int32, cute.make_layout(spec.num_warps), byte_alignment=16)
    return TwinTiles(resident, streamed, numbers, words, votes)


class QueryPlaces:
    """Where the packed rows of a query block are in q, out and their gradients."""

    def __init__(self, spec: BackwardSpec, block: QueryBlock):
        self.spec, self.block = spec, block

    def at(self, turn: int, row: Int32) -> tuple[tuple, Boolean]:
        """(coordinates without the column, whether the row exists) of a row of the block; of an existing row if it does not."""
        return self.store_at(row)

    def store_at(self, row: Int32) -> tuple[tuple, Boolean]:
        """As `at`, without a turn."""
        inside = row < self.block.rows
        return place_in(self.spec, self.block, cutlass.select_(inside, row, 0)), inside


@dataclass(frozen=True)
class KeyTile:
    """A tile of a KV head's keys from position `first` on; keys in [begin, end) are read. index, row: the request, opened."""

    index: Int32
    row: Row
    kv_head: Int32
    first: Int32
    begin: Int32
    end: Int32


def key_place(spec: BackwardSpec, rows: Rows, tile: KeyTile, row: Int32, page: Int32) -> tuple[tuple, Boolean]:
    """As QueryPlaces.at, for a row of a tile of keys in K, V and their gradients. page: page_of_key."""
    token = tile.first + row
    inside = (token >= tile.begin) & (token < tile.end) & (page >= 0) & (page < rows.num_pages)
    slot = remainder(token, spec.page_size) if spec.page_size else slot_start(spec, tile.row) + token
    return (cutlass.select_(inside, page, 0), tile.kv_head, cutlass.select_(inside, slot, 0)), inside


@cute.jit
def page_of_key(spec: cutlass.Constexpr, rows: Rows, tile: KeyTile, row: Int32) -> Int32:
    """The page of a row of a tile of keys, unchecked; -1 if the key is not to be read, and then no table entry is read."""
    page, token = Int32(-1), tile.first + row
    if (token >= tile.begin) & (token < tile.end):
        page = page_of(spec, rows.tables, tile.row.start, token)
    return page


class KeyPlaces:
    """Where a tile's keys are. pages: found by look_up, one per turn of this thread."""

    def __init__(self, spec: BackwardSpec, rows: Rows, tile: KeyTile, pages: cute.Tensor):
        self.spec, self.rows, self.tile, self.pages = spec, rows, tile, pages

    def at(self, turn: int, row: Int32) -> tuple[tuple, Boolean]:
        """As QueryPlaces.at."""
        return key_place(self.spec, self.rows, self.tile, row, self.pages[turn])


def located(places, turn: int, row: Int32) -> tuple[tuple, Boolean]:
    """places.at as a function: in a branch, traced code may call functions, not methods."""
    return places.at(turn, row)


def turns_of(spec: BackwardSpec, shape: RingShape, vector_bytes: int) -> int:
    """Vectors of a tile that one thread brings, one per turn."""
    return -(-shape.tile_n * (shape.units * UNIT_BYTES // vector_bytes) // spec.threads)


def row_of_turn(spec: BackwardSpec, shape: RingShape, vector_bytes: int, turn: int) -> tuple[Int32, Int32]:
    """(row, byte in the row) that this thread brings in a turn; a row past the tile is not brought."""
    per_row = shape.units * UNIT_BYTES // vector_bytes
    index = turn * spec.threads + cute.arch.thread_idx()[0]
    return quotient(index, per_row), remainder(index, per_row) * vector_bytes


@cute.jit
def look_up(spec: cutlass.Constexpr, shape: cutlass.Constexpr, rows: Rows, tile: KeyTile, pages: cute.Tensor):
    """Finds the pages of the keys that this thread will bring of a tile."""
    for turn in cutlass.range_constexpr(cute.size(pages)):
        row = row_of_turn(spec, shape, spec.vector_bytes, turn)[0]
        pages[turn] = page_of_key(spec, rows, tile, row)


@cute.jit
def fetch_twins(
    spec: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    vector_bytes: cutlass.Constexpr,
    tensors: tuple,
    tiles: tuple,
    stage: Int32,
    places,
):
    """The CTA's threads start to copy a tile of each tensor to a stage. Missing rows and columns past head_dim become zeros."""
    partial = cutlass.const_expr(shape.tile_n * (shape.units * UNIT_BYTES // vector_bytes) % spec.threads > 0)
    for turn in cutlass.range_constexpr(turns_of(spec, shape, vector_bytes)):
        row, byte = row_of_turn(spec, shape, vector_bytes, turn)
        if cutlass.const_expr(not partial) or row < shape.tile_n:
            coord, inside = located(places, turn, row)
            offset = swizzled(shape, stage, row, byte)
            if cutlass.const_expr(spec.head_dim < spec.padded_head_dim):
                inside = inside & (byte < spec.head_dim * spec.q_bytes)
                byte = cutlass.select_(byte < spec.head_dim * spec.q_bytes, byte, 0)
            for tensor, tile in zip(tensors, tiles, strict=True):
                source = (tensor.iterator + cute.crd2idx((*coord, byte // spec.q_bytes), tensor.layout)).toint()
                copy_async(source, tile.iterator.toint() + offset, vector_bytes, inside)


@cute.jit
def fetch_numbers(spec: cutlass.Constexpr, sources: tuple, numbers: cute.Tensor, stage: Int32, places):
    """The CTA's threads start to copy lse and delta of a tile of query rows; both are 0 for missing rows."""
    for which in cutlass.range_constexpr(NUMBERS):
        row = cute.arch.thread_idx()[0] - which * spec.tile_rows
        if (row >= 0) & (row < spec.tile_rows):
            coord, inside = located(places, 0, row)
            source = (sources[which].iterator + cute.crd2idx(coord, sources[which].layout)).toint()
            target = numbers.iterator + cute.crd2idx((row, which, stage), numbers.layout)
            copy_async(source, target.toint(), NUMBER_BYTES, inside)


@cute.jit
def settle_copies(spec: cutlass.Constexpr):
    """Waits until all copies of the CTA's threads have landed and each thread may read them. A barrier."""
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(spec.by_warpgroup):
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
