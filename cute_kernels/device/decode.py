"""The decode kernel: a persistent grid in which each CTA attends to its share of all (row, KV head, KV tile) work.

It composes who works on what (work_scheduler), where a tile is (kv_source), how the machine moves it (mainloop_sm90 or
mainloop_sm80), what is computed on it (attend) and where a state goes (epilogue; combine where a row was cut).
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config import KernelSpec
from . import tile
from .attend import TileReader, make_mma, make_state, reset_state
from .combine import combine_row
from .epilogue import merge_tensors, share_state, store_final, store_partial
from .kv_source import open_row, open_row_or_nothing
from .mainloop_sm80 import CpAsyncMainloop
from .mainloop_sm90 import TmaMainloop
from .pack_gqa import hold_query, load_query, query_layout, refresh_query
from .partials import open_workspace
from .work_scheduler import Piece, Share, contributors, make_piece, take_share, unfinished

LOG2_E = math.log2(math.e)
CONSUMERS = 1  # named barrier of the consumer warps; 0 is the CTA's


@dataclass(frozen=True)
class Problem:
    """Tensors of a launch: q, out [batch, num_heads, head_dim]; lse [batch, num_heads]; caches as the mainloop takes them.

    k [pages, num_kv_heads, page_size, head_dim] gives extents only. tables: the page table's tensors.
    """

    q: cute.Tensor
    k: cute.Tensor
    caches: tuple
    tables: tuple
    out: cute.Tensor
    lse: cute.Tensor


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA: the K and V rings, swizzled; the query; the merge buffer; the mbarriers.

    schedule: (prefix, cost, slices) of the share, which only its end needs: three registers fewer in the loop.
    """

    rings: tuple
    query: cute.Tensor
    merge: tuple
    barriers: cute.Pointer
    schedule: cute.Tensor


class DecodeKernel:
    """Launches decode for one kernel spec."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.mainloop = TmaMainloop(spec) if spec.arch == "sm90" else CpAsyncMainloop(spec)
        self.threads = (spec.num_warps + self.mainloop.producer_warps) * 32
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch: start while the kernel before drains

    @cute.jit
    def __call__(
        self, q, k, v, table0, table1, table2, out, lse, workspace, softmax_scale: Float32, num_ctas: Int32, tag: Int32, stream
    ):
        """q, out [batch, num_heads, head_dim]; k, v [pages, num_kv_heads, page_size, head_dim] (contiguous: a page per row)."""
        tables = tuple(t for t in (table0, table1, table2) if t is not None)
        caches = self.mainloop.operands(k, v)
        self.decode(q, k, caches, tables, out, lse, workspace, softmax_scale * LOG2_E, tag).launch(
            grid=(num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.spec.smem_bytes,
            min_blocks_per_mp=self.spec.min_ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def decode(self, q, k, caches, tables, out, lse, workspace, scale_log2: Float32, tag: Int32):
        """One CTA's share: a producer warp runs ahead, consumer warps attend, merge and store piece by piece."""
        spec = self.spec
        problem, shared = Problem(q, k, caches, tables, out, lse), self.allocate(q.element_type)
        self.mainloop.prepare(caches, shared.barriers)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        batch = Int32(q.shape[0])
        share = take_share(spec, tables, k, batch)
        if cutlass.const_expr(self.mainloop.producer_warps > 0):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == spec.num_warps:
                self.mainloop.produce(caches, shared.rings, shared.barriers, tables, k, batch, share)
            else:
                self.consume(problem, shared, workspace, share, scale_log2, tag)
        else:
            self.consume(problem, shared, workspace, share, scale_log2, tag)

    def allocate(self, element_type: type) -> Shared:
        """Lays out the CTA's shared memory."""
        spec, smem = self.spec, cutlass.memory.SmemAllocator()
        ring, swizzle = tile.ring_layout(spec), tile.swizzle(spec)
        rings = tuple(smem.allocate_tensor(element_type, ring, byte_alignment=1024, swizzle=swizzle) for _ in range(2))
        query = smem.allocate_tensor(element_type, query_layout(spec), byte_alignment=128)
        merge = merge_tensors(spec, smem.allocate_array(Float32, spec.merge_floats, byte_alignment=16))
        barriers = smem.allocate_array(Int64, 2 * spec.num_stages)
        return Shared(rings, query, merge, barriers, cute.make_tensor(smem.allocate_array(Int32, 3), cute.make_layout(3)))

    @cute.jit
    def consume(self, problem: Problem, shared: Shared, workspace, share: Share, scale_log2: Float32, tag: Int32):
        """The consumer warps: every piece of the share, in order, then the row that the share ended for others."""
        spec, lane, threads = self.spec, cute.arch.lane_idx(), cutlass.const_expr(self.spec.num_warps * 32)
        batch = Int32(problem.q.shape[0])
        tiled_mma = make_mma(problem.q.element_type)
        thr_mma = tiled_mma.get_slice(lane)
        reader_k = TileReader(tiled_mma, lane, shared.rings[0], transpose=False)
        reader_v = TileReader(tiled_mma, lane, tile.transposed(shared.rings[1]), transpose=True)
        query, state = hold_query(spec, shared.query), make_state(spec, thr_mma)
        attention = (tiled_mma, (reader_k, reader_v), query, state, scale_log2)
        if cute.arch.thread_idx()[0] == 0:
            shared.schedule[0], shared.schedule[1], shared.schedule[2] = share.prefix, share.cost, share.slices
        row, first, issued = share.row, share.tile, Int32(0)
        start, length = open_row_or_nothing(spec, problem.tables, problem.k, row, batch)
        while unfinished(share, row, first):
            piece = make_piece(spec, share, row, start, length, first, issued)
            load_query(spec, problem.q, piece, shared.query)
            reset_state(state)
            cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=threads)
            refresh_query(spec, shared.query, query)
            self.mainloop.consume(piece, attention, problem.caches, shared.rings, shared.barriers, problem.tables)
            cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=threads)
            share_state(spec, shared.merge, thr_mma, state, piece.heads, self.mainloop.order(piece))
            cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=threads)
            self.store(problem, shared, workspace, piece, scale_log2, tag)
            issued += piece.stop - piece.first
            row, first = row + 1, Int32(0)
            start, length = open_row_or_nothing(spec, problem.tables, problem.k, row, batch)
        if cutlass.const_expr(spec.split):
            self.finish(problem, shared, workspace, share, tag)

    @cute.jit
    def store(self, problem: Problem, shared: Shared, workspace, piece: Piece, scale_log2: Float32, tag: Int32):
        """A whole row is a result; a part of one goes to this CTA's slot of the workspace."""
        if piece.first > 0 or piece.stop < piece.tiles:
            if cutlass.const_expr(self.spec.split):
                words = open_workspace(self.spec, workspace)
                slot = 2 * cute.arch.block_idx()[0] + (piece.first == 0)
                store_partial(self.spec, shared.merge, piece, words, slot, tag, scale_log2)
        else:
            store_final(self.spec, shared.merge, piece, problem.out, problem.lse, scale_log2)

    @cute.jit
    def finish(self, problem: Problem, shared: Shared, workspace, share: Share, tag: Int32):
        """Combines the row that this share began inside and ended, if there is one."""
        if share.tile > 0 and share.row < share.end_row:
            start, length = open_row(self.spec, problem.tables, problem.k, share.row)
            piece = make_piece(self.spec, share, share.row, start, length, share.tile, Int32(0))
            slice_of_first, pieces = contributors(shared.schedule, piece.tiles)
            first = slice_of_first * share.units + share.unit
            words = open_workspace(self.spec, workspace)
            slots = (2 * first + 1, 2 * (first + share.units), 2 * share.units)
            combine_row(self.spec, words, slots, piece, pieces, tag, problem.out, problem.lse)
