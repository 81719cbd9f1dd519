"""Widens tiles of 8 bits to 16 in shared memory, where wgmma reads them: exactly, by warps that do nothing else.

The products wait for the instructions of these warps (docs/notes/kernel-log.md). So a thread finds its places once per tile: a
few turns later its place is whole swizzles further down, in the same columns.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Int32

from ...config.problem import UNIT_BYTES
from ...config.tiling import RingShape
from ..kv.codec import HALVES, decode, decode_scaled
from ..mainloop.tile import SWIZZLE_ROWS, swizzled
from ..ptx.packed import pack, widen_pair
from ..ptx.registers import quotient, remainder
from .mask import has_outside
from .query_rows import TilePlace

NARROW_BYTES, WIDE_BYTES = 8, 16  # of a thread's load and of its store: with these neither meets a bank twice
TOGETHER = 8  # loads of a thread before the first store, past which the compiler moves no load
TOGETHER_SCALED = 5  # the same, with factors, whose registers would spill
MOST_PLACES = 4  # places that a thread keeps


def per_row(narrow: RingShape) -> int:
    """Loads per row of a tile."""
    return narrow.units * UNIT_BYTES // NARROW_BYTES


def turns_of(narrow: RingShape, threads: int) -> int:
    """Loads per thread for a tile."""
    return -(-narrow.tile_n * per_row(narrow) // threads)


def places_of(narrow: RingShape, threads: int) -> int:
    """The turns after which a thread is whole swizzles and slabs further down; all turns, if it takes more than MOST_PLACES."""
    rows = math.lcm(SWIZZLE_ROWS, narrow.box_rows if narrow.units > narrow.column_block else 1)
    turns = turns_of(narrow, threads)
    fitting = (count for count in range(1, MOST_PLACES + 1) if count * threads % (rows * per_row(narrow)) == 0)
    return min(next(fitting, turns), turns)


class Places:
    """Where a thread loads and stores in each turn: the places of the first turns, and the distance to those of later turns.

    shapes: of the narrow and the wide tile, and how many threads there are; source, target: the tiles' addresses. thread: its
    number.
    """

    def __init__(self, shapes: tuple[RingShape, RingShape, int], source: Int32, target: Int32, thread: Int32):
        self.narrow, self.wide, self.threads = shapes
        self.first, self.thread = source, thread
        self.count = places_of(self.narrow, self.threads)
        self.rows_apart = self.count * self.threads // per_row(self.narrow)
        indices = [turn * self.threads + self.thread for turn in range(self.count)]
        places = [(index // per_row(self.narrow), index % per_row(self.narrow)) for index in indices]
        self.work = self.narrow.tile_n * per_row(self.narrow)
        self.rows = [row for row, _ in places]
        self.sources = [source + swizzled(self.narrow, 0, row, place * NARROW_BYTES) for row, place in places]
        self.targets = [target + swizzled(self.wide, 0, row, place * WIDE_BYTES) for row, place in places]

    def inside(self, turn: int) -> Boolean:
        """Whether a turn has work for the thread."""
        return Boolean(True) if self.is_full(turn) else self.thread + turn * self.threads < self.work

    def is_full(self, turn: int) -> bool:
        """Whether a turn has work for all threads."""
        return (turn + 1) * self.threads <= self.work

    def token(self, turn: int) -> Int32:
        """The row of a turn; the tile's last one if the turn has none."""
        return self.row(turn) if self.is_full(turn) else cutlass.min(self.row(turn), self.narrow.tile_n - 1)

    def row(self, turn: int) -> Int32:
        """The row of a turn; it lies past the tile if the turn has none."""
        return self.rows[turn % self.count] + turn // self.count * self.rows_apart

    def target(self, turn: int) -> Int32:
        """The address of a store."""
        apart = self.rows_apart * self.wide.column_block * UNIT_BYTES
        return self.targets[turn % self.count] + turn // self.count * apart

    def source(self, turn: int) -> Int32:
        """The address of a load."""
        apart = self.rows_apart * self.narrow.tile_bytes // self.narrow.tile_n
        return self.sources[turn % self.count] + turn // self.count * apart

    def load(self, turn: int) -> cute.Tensor:
        """A turn's elements, four per word; if the turn has none, other elements."""
        return load_words(cutlass.select_(self.inside(turn), self.source(turn), self.first))


def load_words(address: Int32) -> cute.Tensor:
    """Loads NARROW_BYTES from shared memory."""
    words = cute.make_rmem_tensor(NARROW_BYTES // 4, Int32)
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=NARROW_BYTES)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(NARROW_BYTES // 4)), words)
    return words


@cute.jit
def widen_tile(
    types: cutlass.Constexpr,
    shapes: cutlass.Constexpr,
    source: Int32,
    target: Int32,
    thread: Int32,
    factors: Int32 | None = None,
):
    """Writes a tile of 8-bit elements as one of 16 bits. Operands as in Places. types: (stored, of the products).

    factors: the address of what each token's elements are multiplied by (kv/value_scales.py), if by anything.
    """
    turns = cutlass.const_expr(turns_of(shapes[0], shapes[2]))
    together = cutlass.const_expr(TOGETHER if factors is None else TOGETHER_SCALED)
    places = Places(shapes, source, target, thread)
    for begin in cutlass.range_constexpr(0, turns, together):
        some = range(begin, min(begin + together, turns))
        loaded = [places.load(turn) for turn in some]
        scales = [None if factors is None else load_factor(factors, places.token(turn)) for turn in some]
        for turn, words, scale in zip(some, loaded, scales, strict=True):
            store(widened(types, words, scale), places.target(turn), places.inside(turn))


@cute.jit
def scale_in_f32(
    stored: cutlass.Constexpr, shapes: cutlass.Constexpr, source: Int32, target: Int32, thread: Int32, scales: cute.Tensor
):
    """widen_tile for factors that f16 does not hold. scales: f32, [token]."""
    narrow, wide, threads = shapes
    for index in cutlass.range(thread, narrow.tile_n * per_row(narrow), threads, unroll=1):
        row, place = quotient(index, per_row(narrow)), remainder(index, per_row(narrow))
        scale, words = scales[row], load_words(source + swizzled(narrow, 0, row, place * NARROW_BYTES))
        pairs = [widen_pair(Float16, half) for half in widened((stored, "f16"), words)]
        scaled = [pack("f16", first * scale, second * scale) for first, second in pairs]
        store(scaled, target + swizzled(wide, 0, row, place * WIDE_BYTES), Boolean(True))


@cute.jit
def zero_widened(shapes: cutlass.Constexpr, target: Int32, seen: TilePlace, thread: Int32):
    """Writes zeros over the tokens of a widened tile that no row sees. Each thread overwrites what it has written."""
    if has_outside(shapes[0], seen):
        zero(Places(shapes, target, target, thread), seen)


def zero(places: Places, seen: TilePlace):
    """zero_widened, for a tile with tokens that no row sees."""
    for turn in range(turns_of(places.narrow, places.threads)):
        outside = is_outside(seen, places.row(turn))
        store([Int32(0)] * (WIDE_BYTES // 4), places.target(turn), outside & places.inside(turn))


def load_factor(factors: Int32, token: Int32) -> tuple[Int32, Int32]:
    """(factor, offset) of a token. factors: the address of a tile's."""
    text = "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[factors + 8 * token])


def widened(types: tuple[str, str], words: cute.Tensor, scale: tuple[Int32, Int32] | None = None) -> list[Int32]:
    """8-bit elements, four per word, as words of two. types: as in widen_tile; scale: load_factor of their token, if scaled."""
    every = [words[i] for i in range(cute.size(words))]
    if scale is not None:
        return [half for word in every for half in decode_scaled(types[1], word, HALVES, *scale)]
    return [half for word in every for half in decode(types, True, word, HALVES)]


@cute.jit
def store(words: list, address: Int32, inside: Boolean):
    """Stores 16 bytes, if `inside`."""
    if inside:
        text = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
        cute.arch.inline_ptx(text, read_only_args=[address, *words])


def is_outside(place: TilePlace, token: Int32) -> Boolean:
    """Whether no row sees a token of a tile."""
    outside = token >= place.valid
    return outside if place.skip is None else outside | (token < place.skip)
