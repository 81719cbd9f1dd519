"""dK and dV, or one of them, of a tile of keys of a request and KV head, which one CTA owns.

K and V stay in shared memory; tiles of q and dout of every request that reads one of the keys stream. The product dK of a tile is
in flight while S and dP of the next tile are computed; a tile is requested once the tile two before it, in its stage, is done.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.backward import BackwardSpec
from ...config.tiling import TILE_M
from ..attend.gradient_range import LARGEST_FIELD, ONE, move_sums, power_of_two
from ..attend.query_rows import QueryBlock
from ..attend.row_products import Products, make_products, stage_rows, store_rows, weights_of
from ..attend.score_gradients import Asked, KeyRows, QueryColumns, grade_tile, hide_tile, position_at, weigh_tile
from ..attend.seen import all_see, keys_seen, rows_seeing
from ..kv.chains import Chains, first_use, next_use, owner_of
from ..kv.source import Rows, open_row, uniform_row
from ..kv.status import PAGE_FAULT, report
from ..problem import Gradients
from ..ptx.registers import quotient, remainder
from ..ptx.votes import least_of_all
from ..ptx.warps import warp_number
from .streamed import (
    KeyPlaces,
    KeyTile,
    QueryPlaces,
    TwinTiles,
    fetch_numbers,
    fetch_twins,
    key_place,
    look_up,
    page_of_key,
    settle_copies,
    turns_of,
)

NONE = 2**31 - 1  # past every request, and every key


@dataclass(frozen=True)
class Seen:
    """The keys that a CTA owns, as keys of the request that is added. positions: of this lane's rows, below 0 if not a key.

    low, high: the least and the greatest position in the CTA; whole: whether every row of the CTA is a key of the request.
    """

    positions: list
    low: Int32
    high: Int32
    whole: Boolean


class OwnedKeys:
    """Where the gradients of a CTA's keys go. words: per row, whether some request reads it; None if all rows are read."""

    def __init__(self, spec: BackwardSpec, rows: Rows, tile: KeyTile, words: cute.Tensor | None):
        self.spec, self.rows, self.tile, self.words = spec, rows, tile, words

    def store_at(self, row: Int32) -> tuple[tuple, Boolean]:
        """As QueryPlaces.store_at, for a row of the owned keys."""
        coord, inside = key_place(self.spec, self.rows, self.tile, row, page_of_key(self.spec, self.rows, self.tile, row))
        return coord, inside if self.words is None else inside & (self.words[row] != 0)


class KeyGradients:
    """The work of the CTAs of a launch over keys."""

    def __init__(self, spec: BackwardSpec):
        self.spec = spec

    @cute.jit
    def own_keys(self, problem: Gradients, shared: TwinTiles, tile: KeyTile, outputs: tuple):
        """Computes dK and dV of keys that no other request has."""
        spec, warp = self.spec, cute.arch.make_warp_uniform(warp_number())
        self.inspect_pages(problem, tile)
        self.fetch_resident(problem, shared, tile, outputs)
        products = make_products(spec, shared.resident, shared.streamed, warp)
        sums = [None if tensor is None else products.make_sums() for tensor in outputs]
        numbers = [tile.first + (warp * TILE_M + quotient(cute.arch.lane_idx(), 4) + 8 * r) for r in range(2)]
        positions = [cutlass.select_(number < tile.end, number, -1) for number in numbers]
        stop = tile.first + spec.resident_rows
        seen = Seen(positions, tile.first, cutlass.min(stop, tile.end) - 1, stop <= tile.end)
        asked = Asked(problem.rows.queries, tile.row, problem.scores, tile.kv_head * spec.group_size)
        lift = self.add_request(problem, shared, products, sums, asked, tile.index, seen, Int32(LARGEST_FIELD))
        self.store(problem, shared, sums, outputs, OwnedKeys(spec, problem.rows, tile, None), lift, warp)

    @cute.jit
    def own_shared_keys(self, problem: Gradients, shared: TwinTiles, chains: Chains, tile: KeyTile, outputs: tuple):
        """Computes dK and dV of the keys whose page this request uses first, summed over all requests that use the page."""
        spec, rows, thread = self.spec, problem.rows, cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(warp_number())
        self.inspect_pages(problem, tile)
        products = make_products(spec, shared.resident, shared.streamed, warp)
        sums = [None if tensor is None else products.make_sums() for tensor in outputs]
        mine = thread < spec.resident_rows
        token, use, written = tile.first + thread, Int32(0), Int32(0)
        if mine:
            use = first_use(spec, chains, tile.index, token, page_of_key(spec, rows, tile, thread))
        owner = owner_of(chains, use)
        request, lift = least_of_all(spec.num_warps, shared.votes, owner), Int32(LARGEST_FIELD)
        some = request < NONE
        if some:
            self.fetch_resident(problem, shared, tile, outputs)
        while request < NONE:
            row = uniform_row(open_row(spec, rows, request))
            begin, end = keys_seen(spec, rows.queries, row, Int32(0), row.queries)
            position = Int32(-1)
            if owner == request:
                position = (use - 1 - chains.offsets[request]) * spec.page_size + remainder(token, spec.page_size)
            position = cutlass.select_((position >= begin) & (position < end), position, -1)
            written = cutlass.select_(position >= 0, 1, written)
            if mine:
                shared.words[thread] = position
            low = least_of_all(spec.num_warps, shared.votes, cutlass.select_(position >= 0, position, NONE))
            high = -least_of_all(spec.num_warps, shared.votes, cutlass.select_(position >= 0, -position, NONE))
            whole = least_of_all(spec.num_warps, shared.votes, cutlass.select_((position >= 0) | (not mine), 1, 0)) == 1
            if low <= high:
                lane_row = warp * TILE_M + quotient(cute.arch.lane_idx(), 4)
                seen = Seen([shared.words[lane_row + 8 * r] for r in range(2)], low, high, whole)
                asked = Asked(rows.queries, row, problem.scores, tile.kv_head * spec.group_size)
                lift = self.add_request(problem, shared, products, sums, asked, request, seen, lift)
            if owner == request:
                use = next_use(chains, use)
            owner = owner_of(chains, use)
            request = least_of_all(spec.num_warps, shared.votes, owner)
        if some:
            if mine:
                shared.words[thread] = written
            self.store(problem, shared, sums, outputs, OwnedKeys(spec, rows, tile, shared.words), lift, warp)

    @cute.jit
    def inspect_pages(self, problem: Gradients, tile: KeyTile):
        """Reports pages that are not in the pool, in the CTAs of KV head 0."""
        spec, thread = self.spec, cute.arch.thread_idx()[0]
        if cutlass.const_expr(spec.source == "paged"):
            token = tile.first + thread
            if tile.kv_head == 0 and thread < spec.resident_rows and token < tile.end:
                page = page_of_key(spec, problem.rows, tile, thread)
                if page < 0 or page >= problem.rows.num_pages:
                    report(problem.status, tile.index, PAGE_FAULT, page)

    @cute.jit
    def fetch_resident(self, problem: Gradients, shared: TwinTiles, tile: KeyTile, outputs: tuple):
        """Starts to load K of the owned keys, and V if dK is wanted (only dK needs V). One commit group."""
        spec = self.spec
        tensors = (problem.k, problem.v) if cutlass.const_expr(outputs[0] is not None) else (problem.k,)
        pages = cute.make_rmem_tensor(turns_of(spec, spec.resident, spec.vector_bytes), Int32)
        look_up(spec, spec.resident, problem.rows, tile, pages)
        places = KeyPlaces(spec, problem.rows, tile, pages)
        fetch_twins(spec, spec.resident, spec.vector_bytes, tensors, shared.resident[: len(tensors)], Int32(0), places)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def add_request(
        self, problem: Gradients, shared: TwinTiles, products: Products, sums: list, asked: Asked, index: Int32, seen: Seen,
        lift: Int32,
    ) -> Int32:  # fmt: skip
        """Adds the contribution of a request's query rows to dK and dV of the CTA's keys.

        lift: the exponent field of the factor on dK so far; returns the field from here on (gradient_range.py).
        """
        spec, group = self.spec, self.spec.group_size
        first, stop = rows_seeing(spec, asked.queries, asked.row, seen.low, seen.high)
        base, total = first * group, (stop - first) * group
        count = quotient(total + spec.tile_rows - 1, spec.tile_rows)
        block = QueryBlock(index, asked.head, total, asked.row.query, base)
        cute.arch.sync_threads()
        self.fetch_queries(problem, shared, block, Int32(0))
        rows, factor = KeyRows(seen.positions), None
        if cutlass.const_expr(spec.lifts and sums[0] is not None):
            lift = move_sums(sums[0], lift, problem.ranges, (index, quotient(asked.head, group)))
            factor = power_of_two(lift - spec.weight_bits)
        for i in cutlass.range(count, unroll=1):
            settle_copies(spec)
            acc_s, acc_dp = self.start_scores(products, sums, i & 1)
            self.fetch_queries(problem, shared, block, i + 1)
            columns = QueryColumns(spec, asked, shared.numbers[None, None, i & 1], base + i * spec.tile_rows)
            self.add_queries(problem, products, sums, (acc_s, acc_dp), rows, columns, seen, base + total, i & 1, factor)
        products.wait(0)
        return lift

    @cute.jit
    def start_scores(self, products: Products, sums: list, stage: Int32) -> tuple[cute.Tensor, cute.Tensor | None]:
        """Starts S^T of a tile, and dP^T if dK is wanted; when it returns, the previous tile is no longer read."""
        acc_s, acc_dp = products.start_scores(0, stage), None
        if cutlass.const_expr(sums[0] is not None):
            acc_dp = products.start_scores(1, stage)
        products.wait(1 if cutlass.const_expr(acc_dp is None) else 2)
        cute.arch.sync_threads()
        return acc_s, acc_dp

    @cute.jit
    def add_queries(
        self, problem: Gradients, products: Products, sums: list, started: tuple, rows: KeyRows, columns: QueryColumns,
        seen: Seen, stop: Int32, stage: Int32, factor: Float32 | None,
    ):  # fmt: skip
        """Starts to add a tile of packed rows below `stop` to dK and dV. started: S^T and dP^T; factor: see grade_tile."""
        spec, asked, (acc_s, acc_dp) = self.spec, columns.asked, started
        last = cutlass.min(columns.base + spec.tile_rows, stop) - 1
        positions = position_at(spec, asked, columns.base), position_at(spec, asked, last)
        cut = (not seen.whole) | (not all_see(spec, asked.queries, positions, (seen.low, seen.high)))
        products.wait(0 if cutlass.const_expr(acc_dp is None) else 1)
        slopes = weigh_tile(spec, acc_s, rows, columns, problem.scale_log2, problem.scores.softcap)
        if cut:
            hide_tile(spec, acc_s, rows, columns, asked.queries)
        if cutlass.const_expr(sums[1] is not None):
            products.start_add(sums[1], weights_of(spec, acc_s), 1, stage)
        if cutlass.const_expr(acc_dp is not None):
            products.wait(1 if cutlass.const_expr(sums[1] is not None) else 0)
            grade_tile(acc_dp, acc_s, slopes, rows, columns, factor)
            if cut:
                hide_tile(spec, acc_dp, rows, columns, asked.queries)
            products.start_add(sums[0], weights_of(spec, acc_dp), 0, stage)
            products.wait(1)  # with two in flight across tiles, ptxas puts a wait after each wgmma (read from SASS)

    @cute.jit
    def fetch_queries(self, problem: Gradients, shared: TwinTiles, block: QueryBlock, tile: Int32):
        """Starts to load tile `tile` of the packed rows of a block, with their lse and delta, as one commit group."""
        spec, begin = self.spec, tile * self.spec.tile_rows
        if begin < block.rows:
            part = QueryBlock(block.row, block.head, block.rows - begin, block.query, block.base + begin)
            places, stage = QueryPlaces(spec, part), tile & 1
            fetch_twins(spec, spec.streamed, spec.row_bytes, (problem.q, problem.dout), shared.streamed, stage, places)
            fetch_numbers(spec, (problem.lse, problem.delta), shared.numbers, stage, places)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def store(self, problem: Gradients, shared: TwinTiles, sums: list, outputs: tuple, places, lift: Int32, warp: Int32):
        """Stores dK, times softmax_scale, and dV of the keys that a CTA owns. lift: as add_request returns it."""
        spec, factors = self.spec, (problem.scale, Float32(1.0))
        if cutlass.const_expr(spec.lifts):
            factors = problem.scale * power_of_two(2 * ONE - lift), Float32(2.0**-spec.weight_bits)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for which in cutlass.range_constexpr(2):
            if cutlass.const_expr(sums[which] is not None):
                tile = shared.resident[which]
                stage_rows(spec, sums[which], tile, warp, factors[which])
                store_rows(spec, spec.vector_bytes, tile, outputs[which], places, warp)
