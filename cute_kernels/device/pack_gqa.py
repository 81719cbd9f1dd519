"""Packs the query heads that share one KV head into the rows of one tensor-core tile.

Row r of m-tile m is query head kv_head * group_size + m * TILE_M + r. Rows past the group and columns past head_dim are zero on
load; such rows are never stored. The tile is kept as m16n8k16 A fragments, eight elements a lane and k16 step, in shared
memory, and held in registers while a piece lasts where they fit. Two buffers: the next row's query comes while this one's is
in use.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..config import LINE_BYTES, MMA_K, QUERY_BYTES, KernelSpec
from .barriers import CONSUMERS
from .cp_async import copy_async
from .query_range import FRAGMENT, load_step, rescaled, row_factors
from .registers import LANES
from .tracing import ELEMENT_TYPES

PAIR_BYTES = 4  # of two columns of the query


def query_layout(spec: KernelSpec) -> cute.Layout:
    """(element, lane, k16 step, buffer) -> element in shared memory: a lane reads its fragment in one 16-byte load."""
    return cute.make_layout((FRAGMENT, 32, spec.padded_head_dim // MMA_K, 2))


def fragments(tensor: cute.Tensor) -> cute.Tensor:
    """Registers [element, step] as A fragments ((2, 2, 2), 1, step)."""
    steps = cute.size(tensor) // FRAGMENT
    return cute.make_tensor(tensor.iterator, cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, FRAGMENT)))


def column_of(spec: KernelSpec, lane: Int32, e: int) -> Int32:
    """The column of a k16 step that is element e of a lane's A fragment: as the codec leaves the columns of K (kv_codec.py)."""
    if spec.k_bytes == 1:
        return lane % 4 * 4 + 2 * (e // 4) + e % 2
    return lane % 4 * 2 + 8 * (e // 4) + e % 2


def sync_consumers(spec: KernelSpec):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=spec.num_warps * 32)


@cute.jit
def prefetch_query(spec: cutlass.Constexpr, q: cute.Tensor, row: Int32, head: Int32, heads: Int32):
    """A warp asks L2 for `heads` query heads of a row, from `head` on, a cache line a lane."""
    lines = cutlass.const_expr(-(-spec.head_dim * QUERY_BYTES // LINE_BYTES))
    for base in cutlass.range_constexpr(0, spec.packed_rows * lines, LANES):
        line = base + cute.arch.lane_idx()
        if line < heads * lines:
            at = q.iterator + cute.crd2idx((row, head + line // lines, line % lines * (LINE_BYTES // QUERY_BYTES)), q.layout)
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[at.toint()])


@cute.jit
def fetch_query(spec: cutlass.Constexpr, q: cute.Tensor, row: Int32, head: Int32, heads: Int32, shared: cute.Tensor):
    """Each warp starts to bring every num_warps-th k16 step of `heads` query heads, from `head` on, into shared memory.

    q [batch, num_heads, head_dim]. Pairs of columns go by cp.async, one group a call; single columns, where head_dim is odd,
    are there when it returns. shared: a buffer [element, lane, k16 step].
    """
    lane = cute.arch.lane_idx()
    source = cute.domain_offset((head, 0), q[row, None, None])
    pair = cutlass.const_expr(2 if spec.head_dim % 2 == 0 else 1)
    for step in cutlass.range(cute.arch.warp_idx(), spec.padded_head_dim // MMA_K, spec.num_warps, unroll=1):
        for e in cutlass.range_constexpr(0, FRAGMENT, pair):
            query_row = lane // 4 + 8 * (e // 2 % 2)
            column = step * MMA_K + column_of(spec, lane, e)
            inside = query_row < heads and column < spec.head_dim
            offset = Int64(0)
            if inside:
                offset = Int64(cute.crd2idx((query_row, column), source.layout))
            if cutlass.const_expr(pair == 2):
                target = shared.iterator + cute.crd2idx((e, lane, step), shared.layout)
                copy_async((source.iterator + offset).toint(), target.toint(), PAIR_BYTES, inside)
            else:
                shared[e, lane, step] = source.iterator[offset] if inside else q.element_type(0.0)
    cute.arch.cp_async_commit_group()


def in_registers(spec: KernelSpec) -> bool:
    """Whether the query stays in registers: at head_dim 256, or 128 with one query head, others would spill (read from SASS)."""
    return spec.padded_head_dim <= (192 if spec.packed_rows > 1 else 96)


def hold_query(spec: KernelSpec) -> tuple:
    """(registers for the whole query [element, k16 step], for row_factors' inverses [2]), each None where there is no need.

    A query that is not held is read from shared memory step by step; one that is not rescaled has no factors.
    """
    shape = (FRAGMENT, spec.padded_head_dim // MMA_K)
    held = cute.make_rmem_tensor(shape, ELEMENT_TYPES[spec.k_math]) if in_registers(spec) else None
    return held, cute.make_rmem_tensor(2, Float32) if spec.rescales_query else None


def read_query(spec: KernelSpec, shared: cute.Tensor, held) -> cute.Tensor:
    """A query as query_step takes it: from a buffer [element, lane, k16 step] into the registers, or the buffer itself."""
    source = in_math_type(spec, shared)
    if held is None:
        return source
    for step in range(spec.padded_head_dim // MMA_K):
        cute.autovec_copy(source[None, cute.arch.lane_idx(), step], held[None, step])
    return held


def in_math_type(spec: KernelSpec, shared: cute.Tensor) -> cute.Tensor:
    """A buffer as it is once it is rescaled."""
    return shared if spec.k_math == spec.element_type else cute.recast_tensor(shared, ELEMENT_TYPES[spec.k_math])


@cute.jit
def rescale_query(spec: cutlass.Constexpr, shared: cute.Tensor, inverses: cute.Tensor, sign: Float32, wanted: Boolean):
    """Rescales a query in its buffer where that is `wanted`: each step by one warp, once all have read it.

    inverses: of its row factors, f32 [2], set here. sign: of K's scale. A query that more than one piece needs is rescaled once.
    """
    if wanted:
        factors, target = row_factors(spec, shared, inverses), in_math_type(spec, shared)
        sync_consumers(spec)
        for step in cutlass.range(cute.arch.warp_idx(), spec.padded_head_dim // MMA_K, spec.num_warps, unroll=1):
            fragment = rescaled(load_step(shared, step), factors, sign, target.element_type)
            cute.autovec_copy(fragment, target[None, cute.arch.lane_idx(), step])
        sync_consumers(spec)


def query_step(spec: KernelSpec, query: cute.Tensor, step: int) -> cute.Tensor:
    """The A fragment of one k16 step."""
    if in_registers(spec):
        return fragments(query)[None, None, step]
    return fragments(load_step(query, step))[None, None, 0]
