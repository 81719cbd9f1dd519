"""SM90 mainloop: one producer warp issues a TMA box per page into a ring of mbarriers; consumer warps take tiles in turn.

Tile i lies in stage i % num_stages and belongs to warp i % num_warps. num_stages is a multiple of num_warps, so a stage always
has the same reader: with several, a fast one passes a parity that an older phase satisfied and reads garbage.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..config import ELEMENT_BYTES, TILE_M, KernelSpec
from . import tile
from .attend import attend_tile
from .kv_source import find_holes, find_page, inspect_row, open_row_or_nothing
from .shared import Shared, read_holes
from .work_scheduler import Piece, Share, after, make_piece, unfinished

EVICT_FIRST = 0x12F0000000000000  # L2 policy: KV is read once
EVICT_NORMAL = 0x1000000000000000


class TmaMainloop:
    """Host part: tensor maps. Device part: producer and consumers of one CTA's range of tiles."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.producer_warps = 1
        self.boxes = spec.tile_n // spec.box_rows
        self.stage_bytes = 2 * spec.tile_n * spec.padded_head_dim * ELEMENT_BYTES

    def operands(self, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """(K atom, K coordinates, V atom, V coordinates) of caches [pages, heads, slots, head_dim] in any strides."""
        return (*self._tensor_map(k), *self._tensor_map(v))

    def _tensor_map(self, cache: cute.Tensor) -> tuple:
        spec, columns = self.spec, tile.columns(self.spec)
        layout = cute.make_layout(
            (cache.shape[2], columns, cache.shape[1], cache.shape[0]),
            stride=(cache.stride[2], (1, columns[0]), cache.stride[1], cache.stride[0]),
        )
        view = cute.make_tensor(cache.iterator, layout)
        slab = cute.make_composed_layout(tile.swizzle(spec), 0, tile.slab_layout(spec))
        load = cpasync.CopyBulkTensorTileG2SOp()
        return tuple(cpasync.make_tiled_tma_atom(load, view, slab, (spec.box_rows, columns)))[:2]

    def _partition(self, atom, coords: cute.Tensor, ring: cute.Tensor) -> tuple:
        """Boxes in shared memory [box, slab, stage] and global memory [box, slot block, head, page]."""
        spec = self.spec
        slabs = cute.make_tensor(ring.iterator, tile.slab_ring_layout(spec))
        boxes = cute.zipped_divide(coords, (spec.box_rows, tile.columns(spec)))
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(slabs, 0, 2), boxes)

    def order(self, piece: Piece) -> Int32:
        """This warp's place in the merge: the residue of its tiles in the piece, so it depends on the piece alone."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return (warp - piece.issued) & (self.spec.num_warps - 1)  # num_warps is a power of two

    @cute.jit
    def prepare(self, operands: tuple, barriers: cute.Pointer):
        """Fetches the tensor maps ahead. Full barriers (the producer arrives), then empty ones (the stage's reader arrives)."""
        if cute.arch.thread_idx()[0] == 0:
            for atom in (operands[0], operands[2]):
                cpasync.prefetch_descriptor(atom)
            for stage in cutlass.range_constexpr(2 * self.spec.num_stages):
                cute.arch.mbarrier_init(barriers + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def produce(self, operands, shared: Shared, tables: tuple, k: cute.Tensor, batch: Int32, share: Share, status: tuple):
        """The producer warp: every tile of the share, in order. The next piece's first pages are looked up a piece ahead."""
        spec = self.spec
        atom_k, coords_k, atom_v, coords_v = operands
        boxes_k, boxes_v = self._partition(atom_k, coords_k, shared.rings[0]), self._partition(atom_v, coords_v, shared.rings[1])
        copies, num_pages = (atom_k, *boxes_k, atom_v, *boxes_v), Int32(k.shape[0])
        row, tile, issued = share.row, share.tile, Int32(0)
        start, length = open_row_or_nothing(spec, tables, k, row, batch)
        pages = self.lookup(tables, start, length, tile, num_pages)
        while unfinished(share, row, tile):
            piece = make_piece(spec, share, row, start, length, tile, issued)
            next_row, next_tile = after(spec, piece)
            next_start, next_length = open_row_or_nothing(spec, tables, k, next_row, batch)
            next_pages = self.lookup(tables, next_start, next_length, next_tile, num_pages)
            self.issue(copies, shared, tables, piece, num_pages, pages, status)
            if piece.first == 0:
                with cute.arch.elect_one():
                    inspect_row(spec, tables, row, status)
            issued += piece.stop - piece.first
            row, tile, start, length, pages = next_row, next_tile, next_start, next_length, next_pages

    @cute.jit
    def lookup(self, tables: tuple, start: Int32, length: Int32, tile: Int32, num_pages: Int32) -> Int32:
        """Lane l holds the page of box l from `tile` on: 32 boxes ahead."""
        return find_page(self.spec, tables, start, length, self.token_of_lane(tile), num_pages)

    def token_of_lane(self, tile: Int32) -> Int32:
        """The first token of box l from `tile` on, in lane l."""
        return tile * self.spec.tile_n + cute.arch.lane_idx() * self.spec.box_rows

    @cute.jit
    def issue(self, copies, shared: Shared, tables: tuple, piece: Piece, num_pages: Int32, pages: Int32, status: tuple):
        """The tiles of one piece, box by box."""
        spec, barriers = self.spec, shared.barriers
        atom_k, smem_k, gmem_k, atom_v, smem_v, gmem_v = copies
        policy = Int64(EVICT_FIRST if cutlass.const_expr(spec.group_size <= TILE_M) else EVICT_NORMAL)
        tiles_ahead = cutlass.const_expr(32 // self.boxes)
        upcoming, holes = pages, Int32(0)
        for i in cutlass.range(piece.stop - piece.first, unroll=1):
            ahead = i % tiles_ahead
            if ahead == 0:
                pages, tile = upcoming, piece.first + i
                upcoming = self.lookup(tables, piece.start, piece.length, tile + tiles_ahead, num_pages)
                if cutlass.const_expr(spec.source == "paged"):
                    holes = find_holes(self.token_of_lane(tile), piece.length, pages, num_pages, piece.row, status)
            stage, turn = (piece.issued + i) % spec.num_stages, (piece.issued + i) // spec.num_stages
            full, empty = barriers + stage, barriers + spec.num_stages + stage
            cute.arch.mbarrier_wait(empty, (turn + 1) % 2)
            with cute.arch.elect_one():
                shared.holes[stage] = (holes >> (ahead * self.boxes)) & (2**self.boxes - 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage_bytes)
            for box in cutlass.range_constexpr(self.boxes):
                page = cute.arch.shuffle_sync(pages, ahead * self.boxes + box)
                slot = (piece.first + i) * self.boxes + box
                if cutlass.const_expr(spec.page_size):
                    slot = slot % (spec.page_size // spec.box_rows)
                box_of = (slot, 0, piece.kv_head, page)
                cute.copy(atom_k, gmem_k[None, box_of], smem_k[None, box, stage], tma_bar_ptr=full, cache_policy=policy)
                cute.copy(atom_v, gmem_v[None, box_of], smem_v[None, box, stage], tma_bar_ptr=full, cache_policy=policy)

    @cute.jit
    def consume(self, piece: Piece, kernel_state: tuple, operands, shared: Shared, tables: tuple, status: tuple):
        """This warp's tiles of one piece: those whose place in the CTA's stream is its own modulo num_warps."""
        spec, barriers = self.spec, shared.barriers
        tiled_mma, readers, query, state, scale_log2 = kernel_state
        for i in cutlass.range(self.order(piece), piece.stop - piece.first, spec.num_warps, unroll=1):
            stage, wrap = (piece.issued + i) % spec.num_stages, (piece.issued + i) // spec.num_stages
            cute.arch.mbarrier_wait(barriers + stage, wrap % 2)
            valid = piece.length - (piece.first + i) * spec.tile_n
            holes = read_holes(spec, shared, stage)
            attend_tile(spec, tiled_mma, readers, shared.rings[1], query, state, stage, valid, holes, scale_log2)
            if valid < spec.tile_n:
                cute.arch.fence_proxy("async.shared", space="cta")  # zeroed V rows, before TMA writes the stage again
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + spec.num_stages + stage)
