"""The decode kernel: one CTA attends with one KV head's packed query heads to one split of one row's KV.

It composes where a tile is (kv_source), how the machine moves it (mainloop_sm90 or mainloop_sm80), what is computed on it
(attend) and where the state goes (epilogue, then combine when rows are split).
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config import KernelSpec
from . import tile
from .attend import make_mma, make_state
from .combine import WARPS, combine_row, open_partials, shared_layout
from .epilogue import share_state, store_state
from .kv_source import open_row
from .mainloop_sm80 import CpAsyncMainloop
from .mainloop_sm90 import TmaMainloop
from .pack_gqa import load_query
from .work_scheduler import m_tiles, take_work, tile_range

LOG2_E = math.log2(math.e)
MERGE_BARRIER = 1  # named barrier of the consumer warps; 0 is the CTA's


class DecodeKernel:
    """Launches decode, and combine when rows are split, for one kernel spec."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.mainloop = TmaMainloop(spec) if spec.arch == "sm90" else CpAsyncMainloop(spec)
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch of the combine

    @cute.jit
    def __call__(self, q, k, v, table0, table1, table2, out, lse, workspace, softmax_scale: Float32, num_splits: Int32, stream):
        """q, out [batch, num_heads, head_dim]; k, v [pages, num_kv_heads, page_size, head_dim] (contiguous: a page per row)."""
        spec = self.spec
        batch, heads, kv_heads = Int32(q.shape[0]), Int32(q.shape[1]), Int32(k.shape[1])
        tables = tuple(t for t in (table0, table1, table2) if t is not None)
        operands = self.mainloop.operands(k, v)
        grid = batch * kv_heads * num_splits * m_tiles(spec)
        self.decode(q, k, operands, tables, out, lse, workspace, softmax_scale * LOG2_E, num_splits).launch(
            grid=(grid, 1, 1), block=(self.mainloop.threads, 1, 1), smem=spec.smem_bytes, stream=stream
        )
        if cutlass.const_expr(spec.split):
            self.combine(out, lse, workspace, num_splits).launch(
                grid=(batch * heads, 1, 1), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=self.overlap
            )

    @cute.kernel
    def decode(self, q, k, operands, tables, out, lse, workspace, scale_log2: Float32, num_splits: Int32):
        """One CTA's work, from the row's length to its (out, lse) state."""
        spec = self.spec
        if cutlass.const_expr(spec.split and self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        rings, barriers = self.allocate(q.element_type)
        self.mainloop.init_barriers(barriers)
        work = take_work(spec, Int32(k.shape[1]), num_splits)
        source = open_row(spec, tables, k, work.row)
        first, end = tile_range(spec, source.length, work.split, num_splits)
        tiled_mma = make_mma(q.element_type)
        thr_mma = tiled_mma.get_slice(cute.arch.lane_idx())
        query = load_query(spec, thr_mma, q, work.row, work.head, work.heads)
        state = make_state(spec, thr_mma)
        self.mainloop.run(operands, rings, barriers, source, work.kv_head, first, end, tiled_mma, query, state, scale_log2)
        if cute.arch.warp_idx() < spec.num_warps:
            self.finish(rings[0], thr_mma, state, work, out, lse, workspace, scale_log2, num_splits)

    def allocate(self, element_type: type) -> tuple:
        """The K and V rings, swizzled, then the mbarriers."""
        spec = self.spec
        smem = cutlass.memory.SmemAllocator()
        rings = []
        for _ in range(2):
            layout = tile.ring_layout(spec)
            rings.append(smem.allocate_tensor(element_type, layout, byte_alignment=1024, swizzle=tile.swizzle(spec)))
        return tuple(rings), smem.allocate_array(Int64, 2 * spec.num_stages)

    @cute.jit
    def finish(self, ring, thr_mma, state, work, out, lse, workspace, scale_log2: Float32, num_splits: Int32):
        """Consumer warps merge their states over the ring and store the row, or this split's part of it."""
        spec = self.spec
        threads = spec.num_warps * 32
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=threads)
        base = cute.make_ptr(Float32, ring.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
        shared = share_state(spec, base, thr_mma, state, work.heads)
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=threads)
        if cutlass.const_expr(spec.split):
            partials = open_partials(spec, workspace, Int32(out.shape[0]), Int32(out.shape[1]), num_splits)
            target_lse = cute.domain_offset(work.head, partials[0][work.split, work.row, None])
            target = cute.domain_offset((work.head, 0), partials[1][work.split, work.row, None, None])
            store_state(spec, shared, target, target_lse, work.heads, scale_log2)
        else:
            target = cute.domain_offset((work.head, 0), out[work.row, None, None])
            target_lse = cute.domain_offset(work.head, lse[work.row, None])
            store_state(spec, shared, target, target_lse, work.heads, scale_log2)

    @cute.kernel
    def combine(self, out, lse, workspace, num_splits: Int32):
        """Combines the splits of one (row, query head); waits for the decode grid when it was launched early."""
        spec = self.spec
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate_tensor(Float32, shared_layout(spec), byte_alignment=16)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        partials = open_partials(spec, workspace, Int32(out.shape[0]), Int32(out.shape[1]), num_splits)
        combine_row(spec, partials, out, lse, num_splits, shared)
