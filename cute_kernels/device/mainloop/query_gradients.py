"""dQ, and delta = rowsum(dout * out), of a query block: packed rows of a request and KV head, which one CTA owns.

q and dout stay in shared memory, tiles of K and V stream. The product dQ of a tile is in flight while S and dP of the next tile
are computed; a tile is requested once the tile two before it, in its stage, is done.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.backward import BackwardSpec
from ...config.tiling import TILE_M
from ..attend.gradient_range import LEAST, lift_rows, lower_rows
from ..attend.query_rows import QueryBlock
from ..attend.row_products import Products, make_products, stage_rows, store_rows, weights_of
from ..attend.score_gradients import Asked, KeyColumns, QueryRows, grade_tile, hide_tile, position_at, usable_lse, weigh_tile
from ..attend.seen import all_see, keys_seen
from ..attend.softmax import quad_sum
from ..problem import Gradients
from ..ptx.packed import widen
from ..ptx.registers import quotient, remainder
from ..ptx.warps import warp_number
from .streamed import KeyPlaces, KeyTile, QueryPlaces, TwinTiles, fetch_twins, look_up, settle_copies, turns_of


class QueryGradients:
    """The work of the CTAs of a launch over query rows."""

    def __init__(self, spec: BackwardSpec):
        self.spec = spec

    @cute.jit
    def own_queries(self, problem: Gradients, shared: TwinTiles, asked: Asked, block: QueryBlock, kv_head: Int32, dq):
        """Computes dQ and delta of a block of packed rows."""
        spec, places, row = self.spec, QueryPlaces(self.spec, block), asked.row
        warp = cute.arch.make_warp_uniform(warp_number())
        first = quotient(block.base, spec.group_size)
        stop = quotient(block.base + block.rows - 1, spec.group_size) + 1
        begin, end = keys_seen(spec, asked.queries, row, first, stop)
        count = quotient(end - begin + spec.tile_rows - 1, spec.tile_rows)
        fetch_twins(spec, spec.resident, spec.row_bytes, (problem.q, problem.dout), shared.resident, Int32(0), places)
        pages = cute.make_rmem_tensor(turns_of(spec, spec.streamed, spec.vector_bytes), Int32)
        tile = KeyTile(block.row, row, kv_head, begin, begin, end)
        look_up(spec, spec.streamed, problem.rows, tile, pages)
        self.fetch_keys(problem, shared, tile, pages, Int32(0))
        rows = self.query_rows(problem, asked, block, places, warp)
        positions = position_at(spec, asked, block.base), position_at(spec, asked, block.base + block.rows - 1)
        products = make_products(spec, shared.resident, shared.streamed, warp)
        sums, largest = products.make_sums(), cute.make_rmem_tensor(2, Int32)
        largest.fill(LEAST)
        for i in cutlass.range(count, unroll=1):
            settle_copies(spec)
            acc_s, acc_dp = self.start_scores(products, i & 1)
            ahead = begin + (i + 1) * spec.tile_rows
            self.fetch_keys(problem, shared, KeyTile(block.row, row, kv_head, ahead, begin, end), pages, (i + 1) & 1)
            columns = KeyColumns(begin + i * spec.tile_rows, end)
            self.add_keys(problem, products, sums, largest, (acc_s, acc_dp), rows, columns, positions, i & 1)
        self.close(products)
        if cutlass.const_expr(spec.lifts):
            lower_rows(sums, largest)
            place = cute.crd2idx((block.row, kv_head), problem.ranges.layout)
            cute.arch.atomic_max(problem.ranges.iterator + place, cutlass.max(largest[0], largest[1]))
        stage_rows(spec, sums, shared.resident[0], warp, problem.scale)
        store_rows(spec, spec.row_bytes, shared.resident[0], dq, places, warp)

    @cute.jit
    def start_scores(self, products: Products, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Starts S and dP of a tile; when it returns, the previous tile is no longer read."""
        acc_s, acc_dp = products.start_scores(0, stage), products.start_scores(1, stage)
        products.wait(2)
        cute.arch.sync_threads()
        return acc_s, acc_dp

    @cute.jit
    def add_keys(
        self, problem: Gradients, products: Products, sums: cute.Tensor, largest: cute.Tensor, started: tuple, rows: QueryRows,
        columns: KeyColumns, positions: tuple, stage: Int32,
    ):  # fmt: skip
        """Starts to add a tile of keys to dQ. started: S and dP; positions: of the block's first and last row."""
        spec, queries, (acc_s, acc_dp) = self.spec, problem.rows.queries, started
        keys = columns.first, columns.first + (spec.tile_rows - 1)
        cut = (keys[1] >= columns.end) | (not all_see(spec, queries, positions, keys))
        products.wait(1)
        slopes = weigh_tile(spec, acc_s, rows, columns, problem.scale_log2, problem.scores.softcap)
        products.wait(0)
        grade_tile(acc_dp, acc_s, slopes, rows, columns, None)
        if cut:
            hide_tile(spec, acc_dp, rows, columns, queries)
        if cutlass.const_expr(spec.lifts):
            lift_rows(acc_dp, sums, largest)
        products.start_add(sums, weights_of(spec, acc_dp), 0, stage)

    @cute.jit
    def close(self, products: Products):
        """Waits until the last tile is no longer read, by any warp."""
        products.wait(0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def fetch_keys(self, problem: Gradients, shared: TwinTiles, tile: KeyTile, pages: cute.Tensor, stage: Int32):
        """Starts to load a tile of keys whose pages are known, as one commit group, and finds the pages of the next tile."""
        spec, rows = self.spec, problem.rows
        if tile.first < tile.end:
            places = KeyPlaces(spec, rows, tile, pages)
            fetch_twins(spec, spec.streamed, spec.vector_bytes, (problem.k, problem.v), shared.streamed, stage, places)
        cute.arch.cp_async_commit_group()
        following = KeyTile(tile.index, tile.row, tile.kv_head, tile.first + spec.tile_rows, tile.begin, tile.end)
        look_up(spec, spec.streamed, rows, following, pages)

    def query_rows(self, problem: Gradients, asked: Asked, block: QueryBlock, places: QueryPlaces, warp: Int32) -> QueryRows:
        """This lane's rows of a block. Their delta is computed here, and stored for the launches over the keys."""
        spec, lses, deltas, packed = self.spec, [], [], []
        for r in range(2):
            number = warp * TILE_M + quotient(cute.arch.lane_idx(), 4) + 8 * r
            coord, inside = places.store_at(number)
            deltas.append(settle_delta(spec, problem, coord, inside))
            lses.append(read_lse(spec, problem.lse, coord, inside))
            packed.append(block.base + number)
        return QueryRows(spec, asked, packed, lses, deltas)


@cute.jit
def settle_delta(spec: cutlass.Constexpr, problem: Gradients, coord: tuple, inside: Boolean) -> Float32:
    """delta of a query row that four lanes share, returned to each of them and stored."""
    total, vectors = Float32(0.0), cutlass.const_expr(spec.head_dim // spec.vector)
    lane = remainder(cute.arch.lane_idx(), 4)
    for turn in cutlass.range_constexpr(-(-vectors // 4)):
        vector = 4 * turn + lane
        if inside & (vector < vectors):
            first, second = (read_vector(spec, tensor, (*coord, vector * spec.vector)) for tensor in (problem.dout, problem.out))
            for i in cutlass.range_constexpr(spec.vector):
                total = total + first[i] * second[i]
    total = quad_sum(total)
    if inside & (lane == 0):
        problem.delta[coord] = total
    return total


def read_vector(spec: BackwardSpec, tensor: cute.Tensor, coord: tuple) -> cute.Tensor:
    """16 bytes of a row, as f32."""
    at = (tensor.iterator + cute.crd2idx(coord, tensor.layout)).toint()
    source = cute.make_ptr(tensor.element_type, at, cute.AddressSpace.gmem, assumed_align=16)
    found = cute.make_rmem_tensor(spec.vector, tensor.element_type)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(spec.vector)), found)
    return found if spec.splits else widen(found)


@cute.jit
def read_lse(spec: cutlass.Constexpr, lses: cute.Tensor, coord: tuple, inside: Boolean) -> Float32:
    """The lse of a query row, to base 2; +inf for a missing row, so that its weights are 0."""
    lse = Float32.inf
    if inside:
        lse = usable_lse(spec, lses[coord])
    return lse
