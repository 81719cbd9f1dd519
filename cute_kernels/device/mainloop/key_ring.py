"""K alone, tile by tile and KV head by KV head: each warp fills and reads a ring of its own, and waits for no other warp.

Item i of a warp is KV head i % num_kv_heads of its tile i // num_kv_heads, and lies in stage i % depth of its ring. TmaKeys
brings one box per page and waits at one mbarrier per stage; CpAsyncKeys brings tokens, one commit group per item.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...config.weights import WeightsSpec
from ..attend.query_rows import KvRange, Row
from ..kv.scale import ScaleRing, fetch_scales, find_scales
from ..kv.source import find_holes, find_page, is_seen
from ..problem import Problem
from ..ptx.policies import EVICT_FIRST
from ..ptx.registers import LANES, quotient, remainder
from ..ptx.warps import warp_number
from .boxes import arrive_after_copies, partition_boxes, tensor_map
from .cp_async import TileTokens, fetch_tokens


@dataclass(frozen=True)
class KeyRings:
    """The rings of all warps: K tiles ((token, slab), (column, block), stage), the scales of tokens, the mbarriers of TMA."""

    tiles: cute.Tensor
    scales: ScaleRing | None
    barriers: cute.Pointer


@dataclass(frozen=True)
class WarpTiles:
    """The tiles of a row that a warp takes: `count` tiles, `step` tokens apart, from token `first` on.

    index: the row's index; row: the opened row; keys: the keys that count.
    """

    index: Int32
    row: Row
    keys: KvRange
    first: Int32
    step: int
    count: Int32

    def token(self, tile: Int32) -> Int32:
        """The first token of a tile."""
        return self.first + tile * self.step


def lane_token(spec: WeightsSpec, tiles: WarpTiles, tile: Int32) -> Int32:
    """The token of a tile that this lane looks up: the first token of a box, or a single token."""
    return tiles.token(tile) + cute.arch.lane_idx() * spec.hole_tokens


def tile_pages(spec: WeightsSpec, problem: Problem, tiles: WarpTiles, tile: Int32) -> Int32:
    """Lane l holds the page of a tile's box l, or token l."""
    rows, token = problem.rows, lane_token(spec, tiles, tile)
    return find_page(spec, rows.tables, tiles.row.start, tiles.keys, token, spec.hole_tokens, rows.num_pages)


@cute.jit
def tile_holes(spec: cutlass.Constexpr, problem: Problem, tiles: WarpTiles, tile: Int32) -> Int32:
    """The holes of a tile (attend/mask.py). Reports pages that are not in the pool."""
    holes = Int32(0)
    if cutlass.const_expr(spec.source == "paged"):
        pages, token = tile_pages(spec, problem, tiles, tile), lane_token(spec, tiles, tile)
        num_pages = problem.rows.num_pages
        holes = find_holes(token, tiles.keys, spec.hole_tokens, pages, num_pages, tiles.index, problem.status)
    return holes


@cute.jit
def bring_scales(
    spec: cutlass.Constexpr,
    problem: Problem,
    rings: KeyRings,
    tiles: WarpTiles,
    token: Int32,
    head: Int32,
    pages: Int32,
    stage: Int32,
):
    """Starts to load the scales of a tile of a KV head, one token per lane. pages: tile_pages."""
    lane, num_pages = cute.arch.lane_idx(), problem.rows.num_pages
    page, position = cute.arch.shuffle_sync(pages, quotient(lane, spec.hole_tokens)), token + lane
    inside = is_seen(tiles.keys, position, 1) & (page >= 0) & (page < num_pages)
    fetch_scales((rings.scales, None), [find_scales(spec, problem.scales, page, position, head, inside)], stage)


class TmaKeys:
    """A warp's ring by TMA."""

    def __init__(self, spec: WeightsSpec):
        self.spec = spec
        self.boxes = spec.tile_n // spec.box_rows
        self.arrivals = 1 + (LANES + 1 if spec.k_token_scale else 0)  # for K, each lane's scales, and their flags
        self.pending = 0  # cp.async groups that may be in flight when the query has come

    def operands(self, k: cute.Tensor) -> tuple:
        """(K atom, K coordinates) of a cache [pages, heads, slots, head_dim] in any strides."""
        return tensor_map(k, self.spec.rings[0])

    @cute.jit
    def prepare(self, operands: tuple, rings: KeyRings):
        """This warp makes the mbarriers of its stages."""
        first = cute.arch.make_warp_uniform(warp_number()) * self.spec.depth  # computed by all lanes, as it shuffles
        with cute.arch.elect_one():
            cpasync.prefetch_descriptor(operands[0])
            for stage in cutlass.range_constexpr(self.spec.depth):
                cute.arch.mbarrier_init(rings.barriers + (first + stage), self.arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def issue(self, problem: Problem, rings: KeyRings, tiles: WarpTiles, item: Int32, pages: Int32, stage: Int32):
        """Starts to load an item into a free stage. pages: tile_pages of its tile."""
        spec, shape = self.spec, self.spec.rings[0]
        tile, head = quotient(item, spec.num_kv_heads), remainder(item, spec.num_kv_heads)
        token, full = tiles.token(tile), rings.barriers + stage
        atom, coords = problem.caches
        smem, gmem = partition_boxes(atom, coords, rings.tiles, shape)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, shape.tile_bytes)
        for box in cutlass.range_constexpr(self.boxes):
            page = cute.arch.shuffle_sync(pages, box)
            slot = quotient(token, spec.box_rows) + box
            if cutlass.const_expr(spec.page_size):
                slot = remainder(slot, spec.page_size // spec.box_rows)
            source, target = gmem[None, (slot, 0, head, page)], smem[None, box, 0, stage]
            cute.copy(atom, source, target, tma_bar_ptr=full, cache_policy=Int64(EVICT_FIRST))
        if cutlass.const_expr(spec.k_token_scale):
            bring_scales(spec, problem, rings, tiles, token, head, pages, stage)
            arrive_after_copies(full)
            if cute.arch.lane_idx() == 0:  # for what this lane stored itself
                cute.arch.mbarrier_arrive(full)

    def await_item(self, rings: KeyRings, item: Int32, stage: Int32):
        """Waits until an item lies in its stage."""
        cute.arch.mbarrier_wait(rings.barriers + stage, quotient(item, self.spec.depth) & 1)


class CpAsyncKeys:
    """A warp's ring by cp.async: any page size, and any alignment of an element or more."""

    def __init__(self, spec: WeightsSpec):
        self.spec = spec
        self.pending = spec.depth

    def operands(self, k: cute.Tensor) -> tuple:
        """(K,), the cache [pages, heads, slots, head_dim] in any strides."""
        return (k,)

    def prepare(self, operands: tuple, rings: KeyRings):
        """Nothing to make."""

    @cute.jit
    def issue(self, problem: Problem, rings: KeyRings, tiles: WarpTiles, item: Int32, pages: Int32, stage: Int32):
        """As TmaKeys.issue; commits an empty group past the last item."""
        spec = self.spec
        if item < tiles.count * spec.num_kv_heads:
            tile, head = quotient(item, spec.num_kv_heads), remainder(item, spec.num_kv_heads)
            tokens = TileTokens(tiles.row, tiles.keys, head, tiles.token(tile))
            if cutlass.const_expr(spec.k_token_scale):
                bring_scales(spec, problem, rings, tiles, tokens.first, head, pages, stage)
            cache = problem.caches[0], rings.tiles, spec.rings[0]
            fetch_tokens(spec, (cache,), spec.head_dim, problem.rows.num_pages, tokens, stage, pages)
        cute.arch.cp_async_commit_group()

    def await_item(self, rings: KeyRings, item: Int32, stage: Int32):
        """As TmaKeys.await_item, for the oldest item in flight."""
        cute.arch.cp_async_wait_group(self.spec.depth - 1)
        cute.arch.sync_warp()
