"""SM80 mainloop: each warp fills a cp.async ring of its own, token by token, and attends to its tiles; no block-wide barrier.

It takes any page size and any alignment of at least one element, so it also serves pages below 8 tokens on SM90. Rows past
the end and columns past head_dim are filled with zeros by cp.async's source size.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int16, Int32

from ...config.decode import KernelSpec
from ...config.problem import UNIT_BYTES
from ..attend.attend import Attention, attend_tile
from ..attend.query_rows import KvRange, Row, first_tile, place_of_tile
from ..kv.scale import fetch_scales, find_scales
from ..kv.source import find_holes, find_page, inspect_request, is_seen, open_row_or_nothing, slot_start
from ..problem import Problem
from ..ptx.cp_async import copy_async
from ..ptx.warps import warp_number
from ..schedule.opening import Opening
from ..schedule.work_scheduler import Piece, take_share
from . import tile
from .shared import Shared, read_holes


@dataclass(frozen=True)
class TileTokens:
    """The tokens of a row from `first` on, as a tile of a KV head. keys: the tokens that are read; other tokens become zeros."""

    row: Row
    keys: KvRange
    kv_head: Int32
    first: Int32


class CpAsyncMainloop:
    """Device loop of one CTA's range of tiles; the caches are read through plain pointers."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.producer_warps = 0
        self.depth = spec.num_stages // spec.num_warps
        self.parts = 1  # warps that bring a tile together

    def operands(self, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """(K, V) caches [pages, heads, slots, head_dim] in any strides."""
        return (k, v)

    def order(self, piece: Piece) -> Int32:
        """This warp's place in the merge: the number of its first tile in the piece, so the merge depends on the piece alone."""
        return warp_number()

    def open_share(self, problem: Problem, shared: Shared) -> Opening:
        """The opening (the CTA's share and its first row), which each warp finds for itself."""
        spec, rows, batch = self.spec, problem.rows, problem.batch(self.spec)
        share = take_share(spec, rows, batch)
        return Opening(share, open_row_or_nothing(spec, rows, share.row, batch))

    @cute.jit
    def consume(self, piece: Piece, attention: Attention, problem: Problem, shared: Shared):
        """Warp w attends to tiles w, w + num_warps, ... of the piece, with `depth` - 1 tiles in flight."""
        spec, depth, tables = self.spec, self.depth, problem.rows.tables
        warp = cute.arch.make_warp_uniform(warp_number())
        begin = piece.first + warp
        num_pages = problem.rows.num_pages
        pages = self.lookup(tables, piece, begin, num_pages)
        for ahead in cutlass.range_constexpr(depth - 1):
            upcoming = self.lookup(tables, piece, begin + (ahead + 1) * spec.num_warps, num_pages)
            self.fetch(problem, shared, piece, begin + ahead * spec.num_warps, warp * depth + ahead, pages)
            pages = upcoming
        turns = (piece.stop - begin + spec.num_warps - 1) // spec.num_warps
        for i in cutlass.range(turns, unroll=1):
            token_tile = begin + i * spec.num_warps
            cute.arch.cp_async_wait_group(depth - 2)
            cute.arch.sync_warp()
            later = token_tile + (depth - 1) * spec.num_warps
            upcoming = self.lookup(tables, piece, later + spec.num_warps, num_pages)
            self.fetch(problem, shared, piece, later, warp * depth + (i + depth - 1) % depth, pages)
            pages = upcoming
            stage, place = warp * depth + i % depth, place_of_tile(spec, piece.keys, token_tile)
            holes = read_holes(spec, shared, stage)
            attend_tile(spec, attention, shared, stage, place, holes)
            cute.arch.sync_warp()
        cute.arch.cp_async_wait_group(0)
        if piece.first == 0 and cute.arch.thread_idx()[0] == 0:
            inspect_request(spec, problem.rows, piece.index, problem.status)

    @cute.jit
    def lookup(self, tables: tuple, piece: Piece, token_tile: Int32, num_pages: Int32) -> Int32:
        """Lane l holds the page of the tile's token l."""
        token = self.first_token(piece, token_tile) + cute.arch.lane_idx()
        return find_page(self.spec, tables, piece.row.start, piece.keys, token, 1, num_pages)

    def first_token(self, piece: Piece, token_tile: Int32) -> Int32:
        """The first token of a tile. token_tile: its number in the key range that the piece's unit sees."""
        return (first_tile(self.spec, piece.keys) + token_tile) * self.spec.tile_n

    @cute.jit
    def fetch(self, problem: Problem, shared: Shared, piece: Piece, token_tile: Int32, stage: Int32, pages: Int32):
        """Starts the loads of one tile and commits them as a group, which is empty past the piece's end."""
        spec, num_pages = self.spec, problem.rows.num_pages
        if token_tile < piece.stop:
            position = self.first_token(piece, token_tile) + cute.arch.lane_idx()
            if cutlass.const_expr(spec.source == "paged"):
                holes = find_holes(position, piece.keys, 1, pages, num_pages, piece.index, problem.status)
                if self.leads():
                    shared.holes[stage] = holes
            inside = is_seen(piece.keys, position, 1) and pages >= 0 and pages < num_pages
            position = slot_start(spec, piece.row) + position
            if cutlass.const_expr(spec.token_scales > 0):
                fetch_scales(shared.scales, [find_scales(spec, problem.scales, pages, position, piece.kv_head, inside)], stage)
            both = tuple(zip(problem.caches, shared.rings, spec.rings, strict=True))
            alike = spec.k_bytes == spec.v_bytes and spec.head_dim == spec.v_head_dim
            columns = (spec.head_dim,) if alike else (spec.head_dim, spec.v_head_dim)
            for caches, width in zip((both,) if alike else ((one,) for one in both), columns, strict=True):
                tokens = TileTokens(piece.row, piece.keys, piece.kv_head, self.first_token(piece, token_tile))
                fetch_tokens(spec, caches, width, num_pages, tokens, stage, pages, self.parts)
        cute.arch.cp_async_commit_group()

    def leads(self) -> Boolean:
        """Whether this thread writes the words that a tile has once (its holes)."""
        return cute.arch.lane_idx() == 0


@cute.jit
def fetch_tokens(
    spec: cutlass.Constexpr,
    caches: tuple,
    columns: cutlass.Constexpr,
    num_pages: Int32,
    tokens: TileTokens,
    stage: Int32,
    pages: Int32,
    parts: cutlass.Constexpr = 1,
):
    """A warp starts the loads of a tile. caches: (cache, ring, RingShape) of caches whose elements have one size.

    columns: columns of a head. Lane l of `pages` has the page of the tile's token l. parts: how many warps share these loads.
    """
    element_bytes = cutlass.const_expr(caches[0][0].element_type.width // 8)
    vector = cutlass.const_expr(spec.vector_bytes // element_bytes)
    per_token = cutlass.const_expr(caches[0][2].units * UNIT_BYTES // spec.vector_bytes)
    for i in cutlass.range(-(-spec.tile_n * per_token // (32 * parts)), unroll=4):
        turn = i if cutlass.const_expr(parts == 1) else i * parts + cute.arch.make_warp_uniform(warp_number())
        index = turn * 32 + cute.arch.lane_idx()
        token, column = index // per_token, index % per_token * vector
        page = cute.arch.shuffle_sync(pages, token)
        if token < spec.tile_n:
            position = tokens.first + token
            inside = is_seen(tokens.keys, position, 1) and column < columns
            inside = inside and page >= 0 and page < num_pages
            slot = position % spec.page_size if cutlass.const_expr(spec.page_size) else slot_start(spec, tokens.row) + position
            for cache, ring, shape in caches:
                offset = tile.swizzled(shape, stage, token, column * element_bytes)
                fetch_vector(spec, cache, ring, (page, tokens.kv_head, slot, column), offset, inside)


@cute.jit
def fetch_vector(spec: cutlass.Constexpr, cache: cute.Tensor, ring: cute.Tensor, coord: tuple, offset: Int32, inside: Boolean):
    """Copies one vector of a token: cp.async of 16, 8 or 4 bytes with zero fill, or a plain load and store of 2 or 1 bytes."""
    size = cutlass.const_expr(spec.vector_bytes)
    target = ring.iterator.toint() + offset
    source = cache.iterator.toint()
    if inside:
        source = (cache.iterator + cute.crd2idx(coord, cache.layout)).toint()
    if cutlass.const_expr(size >= 4):
        copy_async(source, target, size, inside)
    else:
        element = Int16
        if cutlass.const_expr(size == 1):
            element = Int8
        value = element(0)
        if inside:
            value = cute.make_tensor(cute.make_ptr(element, source, cute.AddressSpace.gmem), 1)[0]
        cute.arch.inline_ptx(f"st.shared.u{8 * size} [{{$r0}}], {{$r1}};", read_only_args=[Int32(target), Int16(value)])
