"""SM90 mainloop: one producer warp issues a TMA box per page into a ring of mbarriers; consumer warps take tiles in turn.

Tile i lies in stage i % num_stages and belongs to warp i % num_warps. num_stages is a multiple of num_warps, so a stage always
has the same reader: with several, a fast one passes a parity that an older phase satisfied and reads garbage.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..config import ELEMENT_BYTES, KernelSpec
from . import tile
from .attend import TileReader, WarpState, attend_tile
from .kv_source import RowSource, find_page

EVICT_FIRST = 0x12F0000000000000  # L2 policy: KV is read once
EVICT_NORMAL = 0x1000000000000000


class TmaMainloop:
    """Host part: tensor maps. Device part: producer and consumers of one CTA's range of tiles."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.threads = (spec.num_warps + 1) * 32
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
        return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, slab, (spec.box_rows, columns)))[:2]

    def _partition(self, atom, coords: cute.Tensor, ring: cute.Tensor) -> tuple:
        """Boxes in shared memory [box, slab, stage] and global memory [box, slot block, head, page]."""
        spec = self.spec
        slabs = cute.make_tensor(ring.iterator, tile.slab_ring_layout(spec))
        boxes = cute.zipped_divide(coords, (spec.box_rows, tile.columns(spec)))
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(slabs, 0, 2), boxes)

    @cute.jit
    def init_barriers(self, barriers: cute.Pointer):
        """Full barriers (the producer arrives), then empty ones (the stage's reader arrives)."""
        if cute.arch.thread_idx()[0] == 0:
            for stage in cutlass.range_constexpr(2 * self.spec.num_stages):
                cute.arch.mbarrier_init(barriers + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def run(self, operands, rings, barriers, source, kv_head, first, end, tiled_mma, query, state, scale_log2):
        """The CTA's tiles [first, end): producer and consumers side by side."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.spec.num_warps:
            self.produce(operands, rings, barriers, source, kv_head, first, end - first)
        else:
            self.consume(rings, barriers, source, first, end - first, warp, tiled_mma, query, state, scale_log2)

    @cute.jit
    def produce(self, operands, rings, barriers, source: RowSource, kv_head: Int32, first: Int32, tiles: Int32):
        """Each lane looks up the page of one box, 32 boxes ahead; the whole warp then issues them tile by tile."""
        spec = self.spec
        atom_k, coords_k, atom_v, coords_v = operands
        smem_k, gmem_k = self._partition(atom_k, coords_k, rings[0])
        smem_v, gmem_v = self._partition(atom_v, coords_v, rings[1])
        policy = Int64(EVICT_FIRST if cutlass.const_expr(spec.group_size <= 16) else EVICT_NORMAL)
        tiles_ahead = cutlass.const_expr(32 // self.boxes)
        token = first * spec.tile_n + cute.arch.lane_idx() * spec.box_rows
        upcoming = find_page(source, token, spec.page_size)
        pages = upcoming
        for i in cutlass.range(tiles, unroll=1):
            ahead = i % tiles_ahead
            if ahead == 0:
                pages = upcoming
                token += tiles_ahead * spec.tile_n
                upcoming = find_page(source, token, spec.page_size)
            stage = i % spec.num_stages
            full, empty = barriers + stage, barriers + spec.num_stages + stage
            cute.arch.mbarrier_wait(empty, (i // spec.num_stages + 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage_bytes)
            for box in cutlass.range_constexpr(self.boxes):
                page = cute.arch.shuffle_sync(pages, ahead * self.boxes + box)
                slot = (first + i) * self.boxes + box
                if cutlass.const_expr(spec.page_size):
                    slot = slot % (spec.page_size // spec.box_rows)
                where = (slot, 0, kv_head, page)
                cute.copy(atom_k, gmem_k[None, where], smem_k[None, box, stage], tma_bar_ptr=full, cache_policy=policy)
                cute.copy(atom_v, gmem_v[None, where], smem_v[None, box, stage], tma_bar_ptr=full, cache_policy=policy)

    @cute.jit
    def consume(self, rings, barriers, source: RowSource, first, tiles, warp, tiled_mma, query, state: WarpState, scale_log2):
        """Warp `warp` takes tiles warp, warp + num_warps, ... of the CTA's range."""
        spec = self.spec
        lane = cute.arch.lane_idx()
        readers = (TileReader(tiled_mma, lane, rings[0], False), TileReader(tiled_mma, lane, tile.transposed(rings[1]), True))
        for i in cutlass.range(warp, tiles, spec.num_warps, unroll=1):
            stage = i % spec.num_stages
            cute.arch.mbarrier_wait(barriers + stage, (i // spec.num_stages) % 2)
            valid = source.length - (first + i) * spec.tile_n
            attend_tile(spec, tiled_mma, readers, rings[1], query, state, stage, valid, scale_log2)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + spec.num_stages + stage)
