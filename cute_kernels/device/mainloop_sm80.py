"""SM80 mainloop: each warp fills a cp.async ring of its own, token by token, and attends to it; no block-wide barrier.

It takes any page size and any alignment of 2 bytes or more, so it also serves pages under 8 tokens on SM90. Rows past
the end and columns past head_dim are filled with zeros by cp.async's source size.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, Int64

from ..config import ELEMENT_BYTES, KernelSpec
from . import tile
from .attend import attend_tile
from .kv_source import find_holes, find_page, inspect_row
from .shared import Shared, read_holes
from .work_scheduler import Piece


class CpAsyncMainloop:
    """Device loop of one CTA's range of tiles; the caches are read through plain pointers."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.producer_warps = 0
        self.depth = spec.num_stages // spec.num_warps
        self.vector = spec.vector_bytes // ELEMENT_BYTES

    def operands(self, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """(K, V) caches [pages, heads, slots, head_dim] in any strides."""
        return (k, v)

    def order(self, piece: Piece) -> Int32:
        """This warp's place in the merge: the residue of its tiles in the piece, so it depends on the piece alone."""
        return cute.arch.warp_idx()

    def prepare(self, operands: tuple, barriers: cute.Pointer):
        """A ring per warp needs neither barriers nor tensor maps."""

    @cute.jit
    def consume(self, piece: Piece, kernel_state: tuple, operands, shared: Shared, tables: tuple, status: tuple):
        """Warp w takes tiles w, w + num_warps, ... of the piece, `depth` - 1 of them in flight."""
        spec, depth = self.spec, self.depth
        tiled_mma, readers, query, state, scale_log2 = kernel_state
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        begin = piece.first + warp
        num_pages = Int32(operands[0].shape[0])
        pages = self.lookup(tables, piece, begin, num_pages)
        for ahead in cutlass.range_constexpr(depth - 1):
            upcoming = self.lookup(tables, piece, begin + (ahead + 1) * spec.num_warps, num_pages)
            self.fetch(operands, shared, piece, begin + ahead * spec.num_warps, warp * depth + ahead, pages, status)
            pages = upcoming
        turns = (piece.stop - begin + spec.num_warps - 1) // spec.num_warps
        for i in cutlass.range(turns, unroll=1):
            token_tile = begin + i * spec.num_warps
            cute.arch.cp_async_wait_group(depth - 2)
            cute.arch.sync_warp()
            later = token_tile + (depth - 1) * spec.num_warps
            upcoming = self.lookup(tables, piece, later + spec.num_warps, num_pages)
            self.fetch(operands, shared, piece, later, warp * depth + (i + depth - 1) % depth, pages, status)
            pages = upcoming
            stage, valid = warp * depth + i % depth, piece.length - token_tile * spec.tile_n
            holes = read_holes(spec, shared, stage)
            attend_tile(spec, tiled_mma, readers, shared.rings[1], query, state, stage, valid, holes, scale_log2)
            cute.arch.sync_warp()
        cute.arch.cp_async_wait_group(0)
        if piece.first == 0 and cute.arch.thread_idx()[0] == 0:
            inspect_row(spec, tables, piece.row, status)

    @cute.jit
    def lookup(self, tables: tuple, piece: Piece, token_tile: Int32, num_pages: Int32) -> Int32:
        """Lane l holds the page of the tile's token l."""
        token = token_tile * self.spec.tile_n + cute.arch.lane_idx()
        return find_page(self.spec, tables, piece.start, piece.length, token, num_pages)

    @cute.jit
    def fetch(self, operands, shared: Shared, piece: Piece, token_tile: Int32, stage: Int32, pages: Int32, status: tuple):
        """Starts the loads of one tile and commits them as a group; the group is empty past the piece's end."""
        spec = self.spec
        per_token = cutlass.const_expr(spec.padded_head_dim // self.vector)
        if token_tile < piece.stop:
            if cutlass.const_expr(spec.source == "paged"):
                mine, num_pages = token_tile * spec.tile_n + cute.arch.lane_idx(), Int32(operands[0].shape[0])
                holes = find_holes(mine, piece.length, pages, num_pages, piece.row, status)
                if cute.arch.lane_idx() == 0:
                    shared.holes[stage] = holes
            for i in cutlass.range(-(-spec.tile_n * per_token // 32), unroll=4):
                index = i * 32 + cute.arch.lane_idx()
                token, column = index // per_token, index % per_token * self.vector
                page = cute.arch.shuffle_sync(pages, token)
                if token < spec.tile_n:
                    position = token_tile * spec.tile_n + token
                    inside = position < piece.length and column < spec.head_dim
                    inside = inside and page >= 0 and page < Int32(operands[0].shape[0])
                    slot = position % spec.page_size if cutlass.const_expr(spec.page_size) else position
                    offset = self.swizzled(stage, token, column)
                    for cache, ring in zip(operands, shared.rings, strict=True):
                        self.fetch_vector(cache, ring, (page, piece.kv_head, slot, column), offset, inside)
        cute.arch.cp_async_commit_group()

    def swizzled(self, stage: Int32, token: Int32, column: Int32) -> Int32:
        """Byte offset of an element in the ring: tile.ring_layout with tile.swizzle applied."""
        block = self.spec.column_block
        row_bytes, bits = block * ELEMENT_BYTES, tile.SWIZZLE_BITS[block]
        offset = (column // block * self.spec.tile_n + token) * row_bytes + column % block * ELEMENT_BYTES
        offset = offset ^ ((offset >> 3) & ((2**bits - 1) << 4))
        return stage * (self.spec.tile_n * self.spec.padded_head_dim * ELEMENT_BYTES) + offset

    @cute.jit
    def fetch_vector(self, cache: cute.Tensor, ring: cute.Tensor, coord: tuple, offset: Int32, inside: Boolean):
        """One vector of a token: cp.async of 16, 8 or 4 bytes with zero fill, or a plain 2-byte load and store."""
        size = cutlass.const_expr(self.spec.vector_bytes)
        target = ring.iterator.toint() + offset
        source = cache.iterator.toint()
        if inside:
            source = (cache.iterator + cute.crd2idx(coord, cache.layout)).toint()
        if cutlass.const_expr(size >= 4):
            mode = "cg" if cutlass.const_expr(size == 16) else "ca"
            cute.arch.inline_ptx(
                f"cp.async.{mode}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
                read_only_args=[Int32(target), Int64(source), Int32(size) if inside else Int32(0)],
            )
        else:
            value = Int16(0)
            if inside:
                value = cute.make_tensor(cute.make_ptr(Int16, source, cute.AddressSpace.gmem), 1)[0]
            cute.arch.inline_ptx("st.shared.u16 [{$r0}], {$r1};", read_only_args=[Int32(target), value])
