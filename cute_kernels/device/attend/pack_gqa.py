"""Packs the query heads that share one KV head, or those of the two of a unit, into the rows of one tensor-core tile.

Row r of m-tile m is query head kv_head * group_size + m * TILE_M + r. Columns past head_dim are zero on load. Rows past the group
are zero, or hold whatever shared memory held: no row of a product depends on another, and these are never stored. The tile is
kept as m16n8k16 A fragments, eight elements a lane and k16 step, in shared memory, and held in registers while a piece lasts
where they fit. Two buffers: the next row's query comes while this one's is in use.
"""

from itertools import product

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...config.decode import LINE_BYTES, MMA_K, KernelSpec
from ..ptx.barriers import CONSUMERS
from ..ptx.cp_async import copy_async
from ..ptx.registers import LANES, quotient, remainder
from ..tracing.fakes import ELEMENT_TYPES
from .query_range import rescale

PAIR_BYTES = 4  # of two columns of the query
FRAGMENT = 8  # elements of one lane's A fragment of a k16 step: (column pair, row, half of the columns)


def query_layout(spec: KernelSpec) -> cute.Layout:
    """(element, lane, k16 step, buffer) -> element in shared memory: a lane reads its fragment in one 16-byte load."""
    return cute.make_layout((FRAGMENT, LANES, spec.padded_head_dim // MMA_K, 2))


def fragments(tensor: cute.Tensor) -> cute.Tensor:
    """Registers [element, step] as A fragments ((2, 2, 2), 1, step)."""
    steps = cute.size(tensor) // FRAGMENT
    return cute.make_tensor(tensor.iterator, cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, FRAGMENT)))


def place_of(spec: KernelSpec, row: Int32, column: Int32) -> tuple:
    """(pair, lane, k16 step) of a pair of columns, the first of them even: as the codec leaves the columns of K (kv/codec.py)."""
    step, rest = quotient(column, MMA_K), remainder(column, MMA_K)
    half, quad = ((rest >> 1) & 1, rest >> 2) if spec.k_bytes == 1 else (rest >> 3, (rest >> 1) & 3)
    return quotient(row, 8) + 2 * half, remainder(row, 8) * 4 + quad, step


def lane_columns(spec: KernelSpec) -> list[Int32]:
    """The first of each pair of columns that this lane has of a row; some may lie past padded_head_dim."""
    return [first + 2 * cute.arch.lane_idx() for first in range(0, spec.padded_head_dim, 2 * LANES)]


def sync_consumers(spec: KernelSpec):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=spec.num_warps * 32)


@cute.jit
def prefetch_query(spec: cutlass.Constexpr, q: cute.Tensor, row: Int32, head: Int32, heads: Int32):
    """A warp asks L2 for `heads` query heads of a row, from `head` on, a cache line a lane."""
    lines = cutlass.const_expr(-(-spec.head_dim * spec.q_bytes // LINE_BYTES))
    for base in cutlass.range_constexpr(0, spec.packed_rows * lines, LANES):
        line = base + cute.arch.lane_idx()
        if line < heads * lines:
            at = q.iterator + cute.crd2idx((row, head + line // lines, line % lines * (LINE_BYTES // spec.q_bytes)), q.layout)
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[at.toint()])


@cute.jit
def fetch_query(spec: cutlass.Constexpr, q: cute.Tensor, row: Int32, head: Int32, heads: Int32, shared: cute.Tensor):
    """The consumer warps start to bring `heads` query heads, from `head` on, into shared memory: settle_query ends that.

    q [batch, num_heads, head_dim]; shared: a buffer [element, lane, k16 step]. A warp brings the heads that it rescales. If it
    rescales none it brings k16 steps of all: by heads, a launch whose CTAs all read one row's ended up to 1 us later
    (1 x 16k + 15 x 64 at 8/1; why is not known).
    """
    source, lane = cute.domain_offset((head, 0), q[row, None, None]), cute.arch.lane_idx()
    stop = heads if cutlass.const_expr(spec.rescales_query) else spec.padded_head_dim // MMA_K
    for turn in cutlass.range(cute.arch.warp_idx(), stop, spec.num_warps, unroll=1):
        if cutlass.const_expr(spec.rescales_query):
            for column in lane_columns(spec):
                if column < spec.padded_head_dim:
                    fetch_pair(spec, source, turn, column, heads, shared, place_of(spec, turn, column))
        else:
            for half, rows in product(range(2), range(2)):
                column = turn * MMA_K + lane % 4 * 2 + 8 * half
                fetch_pair(spec, source, lane // 4 + 8 * rows, column, heads, shared, (rows + 2 * half, lane, turn))
    cute.arch.cp_async_commit_group()


@cute.jit
def fetch_pair(
    spec: cutlass.Constexpr, source: cute.Tensor, row: Int32, column: Int32, heads: Int32, shared: cute.Tensor, place: tuple
):
    """Starts to bring a pair of columns of query heads [heads, head_dim] to its place, or zeros where there are none.

    By cp.async; single columns, where head_dim is odd, are there when it returns.
    """
    at, lane, step = place
    pair = cutlass.const_expr(2 if spec.head_dim % 2 == 0 else 1)
    for c in cutlass.range_constexpr(0, 2, pair):
        inside = row < heads and column + c < spec.head_dim
        offset = Int64(0)
        if inside:
            offset = Int64(cute.crd2idx((row, column + c), source.layout))
        if cutlass.const_expr(pair == 2):
            target = shared.iterator + cute.crd2idx((2 * at, lane, step), shared.layout)
            copy_async((source.iterator + offset).toint(), target.toint(), PAIR_BYTES, inside)
        else:
            shared[2 * at + c, lane, step] = source.iterator[offset] if inside else shared.element_type(0.0)


@cute.jit
def settle_query(
    spec: cutlass.Constexpr, shared: cute.Tensor, inverses: cute.Tensor, heads: Int32, sign: Float32, fresh: Boolean
):
    """Each warp waits for the query heads that it fetched, and rescales them in place where K needs it (query_range.py).

    inverses: of their factors, f32 [row]; sign: of K's scale; fresh: whether the buffer is as it came. The others see all that
    behind the consumers' next barrier.
    """
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(spec.rescales_query):
        words, columns = cute.recast_tensor(shared, Int32), lane_columns(spec)
        stop = cutlass.select_(fresh, heads, 0)
        for query_row in cutlass.range(cute.arch.warp_idx(), stop, spec.num_warps, unroll=1):
            pairs = cute.make_rmem_tensor(len(columns), Int32)
            pairs.fill(0)
            for i, column in enumerate(columns):
                if column < spec.padded_head_dim:
                    pairs[i] = words[place_of(spec, query_row, column)]
            inverse = rescale(spec, pairs, sign)
            for i, column in enumerate(columns):
                if column < spec.padded_head_dim:
                    words[place_of(spec, query_row, column)] = pairs[i]
            if cute.arch.lane_idx() == 0:
                inverses[query_row] = inverse


def in_registers(spec: KernelSpec) -> bool:
    """Whether the query stays in registers: at head_dim 256, or 128 with one query head, others would spill (read from SASS)."""
    return spec.padded_head_dim <= (192 if spec.packed_rows > 1 else 96)


def hold_query(spec: KernelSpec) -> cute.Tensor | None:
    """Registers for the whole query [element, k16 step]; None where it is read from shared memory step by step."""
    shape = (FRAGMENT, spec.padded_head_dim // MMA_K)
    return cute.make_rmem_tensor(shape, ELEMENT_TYPES[spec.k_math]) if in_registers(spec) else None


def read_query(spec: KernelSpec, shared: cute.Tensor, held: cute.Tensor | None) -> cute.Tensor:
    """A settled query as query_step takes it: from a buffer [element, lane, k16 step] into the registers, or that buffer."""
    source = shared if spec.k_math == spec.element_type else cute.recast_tensor(shared, ELEMENT_TYPES[spec.k_math])
    if held is None:
        return source
    for step in range(spec.padded_head_dim // MMA_K):
        cute.autovec_copy(source[None, cute.arch.lane_idx(), step], held[None, step])
    return held


def read_inverses(spec: KernelSpec, shared: cute.Tensor) -> list[Float32] | None:
    """The inverses that settle_query left for this lane's rows; None where the query is not rescaled."""
    if not spec.rescales_query:
        return None
    return [shared[cute.arch.lane_idx() // 4 + 8 * r] for r in range(spec.lane_rows)]


def query_step(spec: KernelSpec, query: cute.Tensor, step: int) -> cute.Tensor:
    """The A fragment of one k16 step."""
    if in_registers(spec):
        return fragments(query)[None, None, step]
    fragment = cute.make_rmem_tensor(FRAGMENT, query.element_type)
    cute.autovec_copy(query[None, cute.arch.lane_idx(), step], fragment)
    return fragments(fragment)[None, None, 0]
