"""The backward of attention: dQ by CTAs that own query rows, then dK and dV by CTAs that own keys.

Both launches recompute S and dP from the lse (FlashAttention-2, Dao 2023): seven products instead of the five of one kernel, but
nothing is summed in memory. Every gradient is summed in the registers of one warp, in an order that depends on the problem alone.
The query heads of a KV head are packed as rows, so that dK and dV are summed over them too. If requests share pages, the owner of
a page walks the chain of its uses (kv/chains.py).

The launch over query rows comes first: it stores delta = rowsum(dout * out) of each row for the launches over keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...config.backward import CHAIN_THREADS, MOST_EXPONENT, SINK_WARPS, WORDS_BYTES, BackwardSpec
from ...config.decode import LOG2_E
from ..attend.query_rows import Queries, QueryBlock, Row, open_queries
from ..attend.score_gradients import Asked, usable_lse
from ..attend.seen import keys_seen
from ..kv.chains import Chains, chain_uses, used_pages
from ..kv.source import Rows, bounded, inspect_requests, open_row, uniform_row
from ..mainloop.key_gradients import KeyGradients
from ..mainloop.query_gradients import QueryGradients
from ..mainloop.streamed import KeyTile, allocate_twins
from ..problem import Gradients, ScoreOperands
from ..ptx.registers import LANES, quotient, remainder
from ..ptx.warps import warp_number
from ..schedule.dealing import search


def blocks_of_rows(spec: BackwardSpec, queries: Int32) -> Int32:
    """How many blocks of packed rows a KV head of a request has. queries: its query rows."""
    return quotient(queries * spec.group_size + spec.resident_rows - 1, spec.resident_rows)


def query_items(spec: BackwardSpec, rows: Rows, index: Int32) -> Int32:
    """How many CTAs own query rows of request `index`."""
    return blocks_of_rows(spec, open_queries(spec, rows.queries, index)[1]) * Int32(rows.k.shape[1])


def owned_keys(spec: BackwardSpec, rows: Rows, row: Row) -> tuple[Int32, Int32]:
    """The keys [begin, end) of a request that CTAs own: the seen keys, extended to whole pages if pages are shared."""
    if not spec.shared_pages:
        return keys_seen(spec, rows.queries, row, Int32(0), row.queries)
    first, stop = used_pages(spec, rows, row)
    return first * spec.page_size, stop * spec.page_size


def key_tiles(spec: BackwardSpec, rows: Rows, row: Row) -> Int32:
    """How many CTAs own keys of one KV head of a request."""
    begin, end = owned_keys(spec, rows, row)
    return quotient(end - begin + spec.resident_rows - 1, spec.resident_rows)


def key_items(spec: BackwardSpec, rows: Rows, index: Int32) -> Int32:
    """How many CTAs own keys of request `index`."""
    return key_tiles(spec, rows, open_row(spec, rows, index)) * Int32(rows.k.shape[1])


class BackwardKernel:
    """Launches the backward of one spec."""

    def __init__(self, spec: BackwardSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        dout, q, k, v, out, lse, table0, table1, table2, qo_indptr, alibi_slopes, sinks, dq, dk, dv, dsinks,
        delta, ranges, pages, nodes, offsets,
        softmax_scale: Float32, max_q_len: Int32, window_left: Int32, window_right: Int32, softcap: Float32,
        status: Int64, stream,
    ):  # fmt: skip
        """q, dout, out, dq [batch, q_len, num_heads, head_dim] or [total_q, num_heads, head_dim]; lse, delta: without columns.

        k, v, dk, dv, the tables and the further operands: as AttentionKernel's; dsinks f32 [num_heads], if there are sinks.
        ranges: int32 zeros [batch, num_kv_heads], for f16 only. pages, nodes, offsets: zeros for Chains, if pages are shared.
        Unused operands are None.
        """
        spec = self.spec
        tables = tuple(table for table in (table0, table1, table2) if table is not None)
        extent = Int32(q.shape[1 if spec.query == "uniform" else 0])
        queries = Queries(qo_indptr, extent, max_q_len, window_left, window_right)
        scores = ScoreOperands(None, alibi_slopes, sinks, softcap)
        operands = (q, dout, out, lse, delta, ranges, k, v, tables, queries, scores, softmax_scale, status)
        chains, heads = (pages, nodes, offsets), Int32(k.shape[1])
        batch = Int32(qo_indptr.shape[0]) - 1 if cutlass.const_expr(spec.query == "ragged") else Int32(q.shape[0])
        shape = {"block": (spec.threads, 1, 1), "smem": spec.smem_bytes, "min_blocks_per_mp": 1, "stream": stream}
        if cutlass.const_expr(spec.shared_pages):
            block = (CHAIN_THREADS, 1, 1)
            self.chain(operands, chains).launch(grid=(1, 1, 1), block=block, smem=WORDS_BYTES, stream=stream)
        self.queries(operands, dq).launch(grid=(self.most_query_blocks(q, batch) * heads, 1, 1), **shape)
        for wanted in spec.passes:
            outputs = tuple(tensor if asked else None for tensor, asked in zip((dk, dv), wanted, strict=True))
            tiles = self.most_key_tiles(k, tables, batch)
            self.keys(operands, outputs, chains).launch(grid=(tiles * heads, 1, 1), **shape)
        if cutlass.const_expr(spec.modifiers.sinks):
            block = (SINK_WARPS * LANES, 1, 1)
            self.sinks(operands, dsinks).launch(grid=(Int32(dsinks.shape[0]), 1, 1), block=block, smem=WORDS_BYTES, stream=stream)

    def most_query_blocks(self, q, batch: Int32) -> Int32:
        """The most blocks of packed rows that one KV head may have in the batch."""
        spec = self.spec
        if spec.query == "uniform":
            return batch * blocks_of_rows(spec, Int32(q.shape[1]))
        return blocks_of_rows(spec, Int32(q.shape[0])) + batch

    def most_key_tiles(self, k, tables: tuple, batch: Int32) -> Int32:
        """The most tiles of keys that one KV head may have in the batch."""
        spec = self.spec
        if spec.table_format == "dense":
            return batch * cute.ceil_div(bounded(Int32(tables[0].shape[1]), spec.page_size), spec.resident_rows)
        if spec.table_format == "csr":
            return cute.ceil_div(bounded(Int32(tables[0].shape[0]), spec.page_size), spec.resident_rows) + batch
        tiles = cute.ceil_div(Int32(k.shape[2]), spec.resident_rows)
        return tiles + batch if spec.table_format == "packed" else tiles * batch

    def named(self, operands: tuple) -> Gradients:
        """The operands of a launch, by name."""
        *tensors, k, v, tables, queries, scores, scale, status = operands
        return Gradients(*tensors, k, v, Rows(tables, k, queries), scores, scale, status)

    @cute.kernel
    def chain(self, operands: tuple, chains: tuple):
        """One CTA chains the uses of pages."""
        problem = self.named(operands)
        smem = cutlass.memory.SmemAllocator()
        votes = smem.allocate_tensor(Int32, cute.make_layout(CHAIN_THREADS // LANES), byte_alignment=16)
        chain_uses(self.spec, problem.rows, Chains(*chains), problem.batch(self.spec), votes)

    @cute.kernel
    def queries(self, operands: tuple, dq):
        """A CTA owns a block of packed rows of a request and KV head: it computes their delta and dQ."""
        spec, problem, shared = self.spec, self.named(operands), allocate_twins(self.spec)
        rows, batch = problem.rows, problem.batch(self.spec)
        if warp_number() == 0:
            inspect_requests(spec, rows, batch, problem.status)
        index, rest, _, _ = search(spec, rows, batch, cute.arch.block_idx()[0], Int32(0), Int32(0), query_items)
        index, rest = (cute.arch.make_warp_uniform(word) for word in (index, rest))
        if index < batch:
            row = uniform_row(open_row(spec, rows, index))
            blocks = blocks_of_rows(spec, row.queries)
            kv_head, number = quotient(rest, blocks), blocks - 1 - remainder(rest, blocks)  # the last blocks see most keys
            base, head = number * spec.resident_rows, kv_head * spec.group_size
            count = cutlass.min(row.queries * spec.group_size - base, spec.resident_rows)
            block = QueryBlock(index, head, count, row.query, base)
            QueryGradients(spec).own_queries(problem, shared, Asked(rows.queries, row, problem.scores, head), block, kv_head, dq)

    @cute.kernel
    def keys(self, operands: tuple, outputs: tuple, chains: tuple):
        """A CTA owns a tile of keys of a request and KV head: it computes their dK, dV or both."""
        spec, problem, shared = self.spec, self.named(operands), allocate_twins(self.spec)
        rows, batch = problem.rows, problem.batch(self.spec)
        index, rest, _, _ = search(spec, rows, batch, cute.arch.block_idx()[0], Int32(0), Int32(0), key_items)
        index, rest = (cute.arch.make_warp_uniform(word) for word in (index, rest))
        if index < batch:
            row = uniform_row(open_row(spec, rows, index))
            begin, end = owned_keys(spec, rows, row)
            tiles = key_tiles(spec, rows, row)
            kv_head, first = quotient(rest, tiles), begin + remainder(rest, tiles) * spec.resident_rows
            tile = KeyTile(index, row, kv_head, first, begin, end)
            if cutlass.const_expr(spec.shared_pages):
                KeyGradients(spec).own_shared_keys(problem, shared, Chains(*chains), tile, outputs)
            else:
                KeyGradients(spec).own_keys(problem, shared, tile, outputs)

    @cute.kernel
    def sinks(self, operands: tuple, dsinks):
        """A CTA sums the gradient of a head's sink: minus the sink's weight times delta, over all query rows."""
        spec, problem = self.spec, self.named(operands)
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(SINK_WARPS), byte_alignment=16)
        head, warp, lane = cute.arch.block_idx()[0], warp_number(), cute.arch.lane_idx()
        sink, total = problem.scores.sinks[head] * LOG2_E, Float32(0.0)
        for index in cutlass.range(warp, problem.batch(spec), SINK_WARPS, unroll=1):
            query, count = open_queries(spec, problem.rows.queries, index)
            for i in cutlass.range(lane, count, LANES, unroll=4):
                coord = (index, i, head) if cutlass.const_expr(spec.query == "uniform") else (query + i, head)
                exponent = cute.arch.fmin(sink - usable_lse(spec, problem.lse[coord]), Float32(MOST_EXPONENT), nan=True)
                total = total - cute.math.exp2(exponent, fastmath=True) * problem.delta[coord]
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if lane == 0:
            sums[warp] = total
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(SINK_WARPS):
                total = total + sums[i]
            dsinks[head] = total
