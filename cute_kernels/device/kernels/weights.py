"""Attention weights from K and the lse that decode returned: a CTA takes a chunk of one row's keys, with all heads.

The lse is known, so nothing waits for a maximum or a sum, and a chunk depends on no other chunk. Warps take the tiles of a chunk
in turn, and a warp walks the KV heads of its tile: a K tile is read once for its query heads, and the mean over all heads stays
in registers. There is one CTA per chunk. The hardware runs several CTAs per SM, so that one opens its row while others stream.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...config.decode import LOG2_E
from ...config.tiling import TILE_M
from ...config.weights import WeightsSpec
from ..attend.pack_gqa import lane_rows_of
from ..attend.query_heads import HeadProducts, fetch_heads, packed_head, rescale_heads
from ..attend.query_rows import KvRange, Queries, Row, TilePlace, kv_range
from ..attend.score import ScoreModifier
from ..attend.weights import LaneRow, add_heads, base_2, share_sums, store_weights, weigh, zero_weights
from ..elements import ELEMENT_TYPES
from ..kv.scale import column_scales, head_scale, make_scale_rings, scale_columns, settle_scales
from ..kv.source import Rows, inspect_request, open_row, uniform_row
from ..kv.status import LENGTH_FAULT, report
from ..mainloop.key_ring import CpAsyncKeys, KeyRings, TmaKeys, WarpTiles, tile_holes, tile_pages
from ..mainloop.shared import allocate_tiles
from ..problem import Problem, ScoreOperands
from ..ptx.registers import LANES, quotient, remainder
from ..ptx.warps import warp_number


@dataclass(frozen=True)
class Shared:
    """query: all query heads of the row (attend/query_heads.py). factors: f32 [num_heads], factors on the scores, to base 2.

    lses: f32 [num_heads], in base 2. means: f32 [tokens of the chunk], the mean over the heads; None if no output needs it.
    """

    rings: KeyRings
    query: cute.Tensor
    factors: cute.Tensor
    lses: cute.Tensor
    means: cute.Tensor | None


@dataclass(frozen=True)
class Outputs:
    """weights [batch, num_heads, max_seq_len], mean [batch, max_seq_len], page_mass [batch, max_pages]; None if not wanted."""

    weights: cute.Tensor | None
    mean: cute.Tensor | None
    page_mass: cute.Tensor | None
    max_seq_len: Int32


@dataclass(frozen=True)
class Chunk:
    """Keys [begin, end) of a row that a CTA writes, up to max_seq_len; its tiles [first, stop) hold the keys that count.

    index: the row's index; row: the opened row; keys: the keys of the row that count.
    """

    index: Int32
    row: Row
    keys: KvRange
    begin: Int32
    end: Int32
    first: Int32
    stop: Int32


@dataclass(frozen=True)
class Work:
    """What a CTA reads and writes, and for which keys."""

    problem: Problem
    shared: Shared
    outputs: Outputs
    chunk: Chunk


@dataclass(frozen=True)
class HeadTile:
    """A tile of a KV head, in a stage of the rings. holes: bits of its pages outside the pool (attend/mask.py)."""

    place: TilePlace
    kv_head: Int32
    stage: Int32
    holes: Int32


def allocate(spec: WeightsSpec) -> Shared:
    """Lays out the CTA's shared memory."""
    smem = cutlass.memory.SmemAllocator()
    tiles = allocate_tiles(smem, spec, (spec.rings[0], None))[0]
    scales = make_scale_rings(spec, smem, spec.num_stages)[0]
    query = smem.allocate_tensor(
        ELEMENT_TYPES[spec.element_type], cute.make_layout(spec.num_heads * spec.padded_head_dim), byte_alignment=128
    )
    barriers = smem.allocate_array(Int64, spec.num_stages)
    factors, lses = (smem.allocate_tensor(Float32, cute.make_layout(spec.num_heads), byte_alignment=4) for _ in range(2))
    means = None
    if spec.means:
        means = smem.allocate_tensor(Float32, cute.make_layout(spec.chunk_tiles * spec.tile_n), byte_alignment=16)
    return Shared(KeyRings(tiles, scales, barriers), query, factors, lses, means)


class WeightsKernel:
    """Launches the kernel of one spec."""

    def __init__(self, spec: WeightsSpec):
        self.spec = spec
        self.keys = TmaKeys(spec) if spec.arch == "sm90" else CpAsyncKeys(spec)
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch: starts while the previous kernel drains

    @cute.jit
    def __call__(
        self,
        q,
        k,
        table0,
        table1,
        table2,
        k_scale,
        lse,
        alibi_slopes,
        weights,
        mean,
        page_mass,
        softmax_scale: Float32,
        max_seq_len: Int32,
        window_left: Int32,
        softcap: Float32,
        status: Int64,
        stream,
    ):
        """q [batch, num_heads, head_dim]; k [pages, num_kv_heads, page_size, head_dim] (contiguous: one page per row).

        Tables and k_scale: as DecodeKernel's; lse f32 [batch, num_heads]; alibi_slopes f32 [num_heads]; outputs: see Outputs. An
        operand that the spec does not have is None. status: address of the plan's 4 int32 status words.
        """
        tables = tuple(table for table in (table0, table1, table2) if table is not None)
        queries = Queries(None, Int32(1), Int32(1), window_left, Int32(0))
        scores = ScoreOperands(None, alibi_slopes, None, softcap)
        caches, outputs = self.keys.operands(k), (weights, mean, page_mass, max_seq_len)
        chunks = cute.ceil_div(max_seq_len, self.spec.chunk)
        operands = (q, k, caches, (k_scale, None), tables, queries, lse, scores)
        self.weights(operands, outputs, softmax_scale * LOG2_E, chunks, status).launch(
            grid=(Int32(q.shape[0]) * chunks, 1, 1),
            block=(32 * self.spec.num_warps, 1, 1),
            smem=self.spec.smem_bytes,
            min_blocks_per_mp=self.spec.min_ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def weights(self, operands: tuple, outputs: tuple, scale_log2: Float32, chunks: Int32, status: Int64):
        """The work of one CTA: a chunk of a row's keys."""
        spec, shared, wanted = self.spec, allocate(self.spec), Outputs(*outputs)
        q, k, caches, scales, tables, queries, lse, scores = operands
        problem = Problem(q, caches, scales, Rows(tables, k, queries), None, lse, None, scale_log2, status, scores)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        self.keys.prepare(caches, shared.rings)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        chunk = open_chunk(spec, problem, wanted.max_seq_len, chunks)
        if cutlass.const_expr(spec.means):
            for i in cutlass.range(cute.arch.thread_idx()[0], cute.size(shared.means), 32 * spec.num_warps, unroll=1):
                shared.means[i] = Float32(0.0)
        if chunk.first < chunk.stop:
            self.attend(Work(problem, shared, wanted, chunk))
        elif cutlass.const_expr(spec.means):
            cute.arch.sync_threads()
        if cutlass.const_expr(wanted.weights is not None):
            first, stop = chunk.begin + chunk.first * spec.tile_n, chunk.begin + chunk.stop * spec.tile_n
            zero_weights(spec, wanted.weights, chunk.index, chunk.begin, cutlass.min(first, chunk.end))
            zero_weights(spec, wanted.weights, chunk.index, stop, chunk.end)
        if cutlass.const_expr(spec.means):
            store_means(spec, shared.means, wanted, chunk)

    @cute.jit
    def attend(self, work: Work):
        """Attends to the tiles of a chunk that hold keys which count."""
        spec, heads = self.spec, cutlass.const_expr(self.spec.num_kv_heads)
        problem, shared, chunk = work.problem, work.shared, work.chunk
        warp = cute.arch.make_warp_uniform(warp_number())
        fetch_heads(spec, problem.q, chunk.index, shared.query)
        tiles = warp_tiles(spec, chunk, warp)
        pages = Int32(0)
        for item in cutlass.range_constexpr(spec.depth):
            pages = self.issue(problem, shared.rings, tiles, Int32(item), pages, warp)
        self.settle(problem, shared, chunk.index)
        products = HeadProducts(spec, shared.query, shared.rings.tiles, cute.arch.lane_idx())
        for tile in cutlass.range(tiles.count, unroll=1):
            holes = tile_holes(spec, problem, tiles, tile)
            sums = cute.make_rmem_tensor((2, spec.tile_n // 8), Float32)
            sums.fill(0.0)
            for head in cutlass.range(heads, unroll=1):
                item = tile * heads + head
                stage = warp * spec.depth + remainder(item, spec.depth)
                self.keys.await_item(shared.rings, item, stage)
                self.attend_head(products, work, HeadTile(place_of(chunk, tiles.token(tile)), head, stage, holes), sums)
                cute.arch.sync_warp()
                pages = self.issue(problem, shared.rings, tiles, item + spec.depth, pages, warp)
            if cutlass.const_expr(spec.means):
                share_sums(spec, sums, shared.means, tiles.token(tile) - chunk.begin)
        if cutlass.const_expr(spec.arch == "sm80"):
            cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def issue(self, problem: Problem, rings: KeyRings, tiles: WarpTiles, item: Int32, pages: Int32, warp: Int32) -> Int32:
        """Starts to load an item, if the warp has it. pages: tile_pages of the previous item; returns those of this item."""
        spec = self.spec
        live = item < tiles.count * spec.num_kv_heads
        if live and remainder(item, spec.num_kv_heads) == 0:
            pages = tile_pages(spec, problem, tiles, quotient(item, spec.num_kv_heads))
        if live or cutlass.const_expr(spec.arch == "sm80"):
            self.keys.issue(problem, rings, tiles, item, pages, warp * spec.depth + remainder(item, spec.depth))
        return pages

    @cute.jit
    def settle(self, problem: Problem, shared: Shared, row: Int32):
        """Puts the row's query heads, their factors and their lses into shared memory, for all warps."""
        spec = self.spec
        for head in cutlass.range(cute.arch.thread_idx()[0], spec.num_heads, 32 * spec.num_warps, unroll=1):
            factor = problem.scale_log2
            if cutlass.const_expr(spec.k_scale == "head"):
                factor = factor * head_scale(problem.scales[0], quotient(head, spec.group_size))
            shared.factors[head] = factor
            shared.lses[head] = base_2(spec, problem.lse[row, head], LOG2_E)
        cute.arch.cp_async_wait_group(self.keys.pending)
        cute.arch.sync_threads()
        if cutlass.const_expr(spec.k_bytes == 1):
            rescale_heads(spec, shared.query, shared.factors)
            cute.arch.sync_threads()

    @cute.jit
    def attend_head(self, products: HeadProducts, work: Work, tile: HeadTile, sums: cute.Tensor):
        """Stores the weights of a tile of a KV head, and adds them to the sums over the heads."""
        spec = self.spec
        settle_scales(spec, (work.shared.rings.scales, None), tile.stage)
        if cutlass.const_expr(spec.m_tiles == 1):
            self.attend_rows(products, work, tile, 0, sums)
        else:
            for row_tile in cutlass.range(spec.m_tiles, unroll=1):
                self.attend_rows(products, work, tile, row_tile, sums)

    @cute.jit
    def attend_rows(self, products: HeadProducts, work: Work, tile: HeadTile, row_tile: Int32 | int, sums: cute.Tensor):
        """Does attend_head's work for one m-tile of the query heads."""
        spec, shared, chunk = self.spec, work.shared, work.chunk
        acc_s = products.scores([products.query(tile.kv_head, row_tile)], tile.stage)[0]
        coords = products.thr_mma.partition_C(cute.make_identity_tensor((TILE_M, spec.tile_n)))
        rows = lane_rows(spec, shared, tile.kv_head, row_tile)
        if cutlass.const_expr(spec.k_token_scale):
            scale_columns(acc_s, spec.lane_rows, column_scales(spec, shared.rings.scales, spec.k_scale, tile.stage))
        modifier = modifier_of(spec, work.problem.scores, chunk.row, rows)
        weigh(spec, acc_s, coords, rows, modifier, tile.place, tile.holes)
        if cutlass.const_expr(spec.means):
            add_heads(acc_s, rows, sums)
        if cutlass.const_expr(spec.weights_type != "none"):
            store_weights(spec, acc_s, rows, work.outputs.weights, chunk.index, tile.place.token, chunk.end)


@cute.jit
def open_chunk(spec: cutlass.Constexpr, problem: Problem, max_seq_len: Int32, chunks: Int32) -> Chunk:
    """This CTA's chunk. A row's first chunk reports what is wrong with the row; keys past max_seq_len do not count."""
    cta, queries = cute.arch.block_idx()[0], problem.rows.queries
    index, begin = quotient(cta, chunks), remainder(cta, chunks) * spec.chunk
    row = uniform_row(open_row(spec, problem.rows, index))
    if begin == 0 and cute.arch.thread_idx()[0] == 0:
        inspect_request(spec, problem.rows, index, problem.status)
        if row.length > max_seq_len:
            report(problem.status, index, LENGTH_FAULT, row.length)
    keys = kv_range(spec, queries, row, None)
    keys = replace(keys, end=cutlass.min(keys.end, max_seq_len))
    end = cutlass.min(begin + spec.chunk, max_seq_len)
    stop = quotient(cutlass.max(cutlass.min(keys.end, end) - begin, 0) + spec.tile_n - 1, spec.tile_n)
    first = Int32(0)
    if cutlass.const_expr(keys.begin is not None):
        first = cutlass.min(quotient(cutlass.max(keys.begin - begin, 0), spec.tile_n), stop)
    return Chunk(index, row, keys, begin, end, first, stop)


def place_of(chunk: Chunk, token: Int32) -> TilePlace:
    """The place of the tile that begins at `token`."""
    keys = chunk.keys
    return TilePlace(token, keys.end - token, None if keys.begin is None else keys.begin - token)


def warp_tiles(spec: WeightsSpec, chunk: Chunk, warp: Int32) -> WarpTiles:
    """The tiles of a chunk that a warp takes: every num_warps-th tile."""
    mine = chunk.first + warp
    count = quotient(cutlass.max(chunk.stop - mine, 0) + spec.num_warps - 1, spec.num_warps)
    first = chunk.begin + mine * spec.tile_n
    return WarpTiles(chunk.index, chunk.row, chunk.keys, first, spec.num_warps * spec.tile_n, count)


def lane_rows(spec: WeightsSpec, shared: Shared, kv_head: Int32, row_tile: Int32 | int) -> list[LaneRow]:
    """This lane's rows of an m-tile of a KV head."""
    found = []
    for packed in lane_rows_of(spec, row_tile):
        head = packed_head(spec, kv_head, packed)
        found.append(LaneRow(head, packed < spec.group_size, shared.factors[head], shared.lses[head]))
    return found


def modifier_of(spec: WeightsSpec, scores: ScoreOperands, row: Row, rows: list[LaneRow]) -> ScoreModifier | None:
    """The modifier of this lane's scores; None if scores are only scaled. The query row stands at the row's last key."""
    if not spec.modifiers.functions:
        return None
    slopes = [scores.slopes[row.head] * LOG2_E for row in rows] if spec.modifiers.alibi else None
    return ScoreModifier(scores.softcap if spec.modifiers.softcap else None, slopes, [row.length - 1] * len(rows))


@cute.jit
def store_means(spec: cutlass.Constexpr, means: cute.Tensor, outputs: Outputs, chunk: Chunk):
    """Stores the mean over the heads, and its sum over each page of the chunk, which a warp adds up in a fixed order."""
    thread, threads = cute.arch.thread_idx()[0], cutlass.const_expr(32 * spec.num_warps)
    if cutlass.const_expr(outputs.mean is not None):
        for i in cutlass.range(thread, chunk.end - chunk.begin, threads, unroll=1):
            outputs.mean[chunk.index, chunk.begin + i] = means[i]
    if cutlass.const_expr(outputs.page_mass is not None):
        size = cutlass.const_expr(spec.page_size)
        pages = quotient(chunk.end - chunk.begin + size - 1, size)
        for page in cutlass.range(warp_number(), pages, spec.num_warps, unroll=1):
            mass = Float32(0.0)
            for slot in cutlass.range(cute.arch.lane_idx(), size, LANES, unroll=1):
                mass = mass + means[page * size + slot]
            for offset in cutlass.range_constexpr(5):
                mass = mass + cute.arch.shuffle_sync_bfly(mass, offset=1 << offset)
            if cute.arch.lane_idx() == 0:
                outputs.page_mass[chunk.index, quotient(chunk.begin, size) + page] = mass
