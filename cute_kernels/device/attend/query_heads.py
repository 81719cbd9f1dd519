"""All query heads of a row in shared memory, one after the other: ldmatrix reads A fragments for any KV head.

A kernel that walks the KV heads of a tile needs every head's query at any time. As swizzled rows of elements (mainloop/tile.py),
queries take group_size rows per KV head, while fragments (pack_gqa.py) take 16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.problem import MMA_K
from ...config.tiling import TILE_M
from ...config.weights import WeightsSpec
from ..mainloop.tile import swizzled
from ..ptx.cp_async import copy_async
from ..ptx.registers import quotient, remainder
from ..ptx.warps import warp_number
from .pack_gqa import PAIR_BYTES, lane_columns, load_fragment
from .query_range import rescale
from .warp_mma import KeyProducts

HALF_BYTES = 16  # of a row of an 8 x 8 matrix


def pair_place(spec: WeightsSpec, head: Int32, column: Int32) -> Int32:
    """Byte offset of a pair of columns of a query head, the first of them even."""
    return swizzled(spec.heads_shape, 0, head, column * spec.q_bytes)


def codec_column(spec: WeightsSpec, column: Int32) -> Int32:
    """Where a pair of columns goes to meet, in a k16 step, its columns of K as the codec leaves them (pack_gqa.place_of)."""
    if spec.k_bytes > 1:
        return column
    rest = remainder(column, MMA_K)
    return column - rest + 8 * ((rest >> 1) & 1) + 2 * (rest >> 2)


@cute.jit
def fetch_heads(spec: cutlass.Constexpr, q: cute.Tensor, row: Int32, shared: cute.Tensor):
    """The CTA's threads start to copy all query heads of a row of q [batch, num_heads, head_dim], by cp.async.

    Columns past head_dim become zeros. If head_dim is odd, single columns are copied and are there when it returns.
    """
    per_head = cutlass.const_expr(spec.padded_head_dim // 2)
    thread, threads = cute.arch.thread_idx()[0], cutlass.const_expr(32 * spec.num_warps)
    for i in cutlass.range(thread, spec.num_heads * per_head, threads, unroll=4):
        head, column = quotient(i, per_head), remainder(i, per_head) * 2
        target = shared.iterator.toint() + pair_place(spec, head, column)
        if cutlass.const_expr(spec.head_dim % 2 == 0):
            inside = column < spec.head_dim
            source = q.iterator + cute.crd2idx((row, head, cutlass.select_(inside, column, 0)), q.layout)
            copy_async(source.toint(), target, PAIR_BYTES, inside)
        else:
            for c in cutlass.range_constexpr(2):
                value = q.element_type(0.0)
                if column + c < spec.head_dim:
                    value = q[row, head, column + c]
                element = cute.make_ptr(q.element_type, target + c * spec.q_bytes, cute.AddressSpace.smem)
                cute.make_tensor(element, 1)[0] = value
    cute.arch.cp_async_commit_group()


@cute.jit
def rescale_heads(spec: cutlass.Constexpr, shared: cute.Tensor, factors: cute.Tensor):
    """The CTA's warps bring settled query heads into f16's range, in the codec's order of columns (query_range.py).

    factors: f32 [num_heads], those of the scores; each is multiplied by the inverse of its head's factor.
    """
    words, columns = cute.recast_tensor(shared, Int32), lane_columns(spec)
    for head in cutlass.range(warp_number(), spec.num_heads, spec.num_warps, unroll=1):
        pairs = cute.make_rmem_tensor(len(columns), Int32)
        pairs.fill(0)
        for i, column in enumerate(columns):
            if column < spec.padded_head_dim:
                pairs[i] = words[quotient(pair_place(spec, head, column), PAIR_BYTES)]
        inverse = rescale(spec, pairs, Float32(1.0))
        cute.arch.sync_warp()  # all lanes have read words that other lanes overwrite
        for i, column in enumerate(columns):
            if column < spec.padded_head_dim:
                words[quotient(pair_place(spec, head, codec_column(spec, column)), PAIR_BYTES)] = pairs[i]
        if cute.arch.lane_idx() == 0:
            factors[head] = factors[head] * inverse


def packed_head(spec: WeightsSpec, kv_head: Int32, packed: Int32) -> Int32:
    """The query head of a packed row of a KV head; past the group, the group's last head."""
    return kv_head * spec.group_size + cutlass.min(packed, spec.group_size - 1)


class HeadProducts(KeyProducts):
    """Q K^T with queries that lie in shared memory as rows. `query` says which row a lane reads."""

    def __init__(self, spec: WeightsSpec, shared: cute.Tensor, ring: cute.Tensor, lane: Int32):
        super().__init__(spec, ring, lane)
        self.base, self.lane = shared.iterator.toint(), lane

    def query(self, kv_head: Int32, row_tile: Int32 | int) -> Int32:
        """The query head whose row a lane reads of an m-tile of a KV head: `scores` takes it."""
        return packed_head(self.spec, kv_head, row_tile * TILE_M + remainder(self.lane, TILE_M))

    def query_step(self, query: Int32, step: int) -> cute.Tensor:
        """The A fragment of one k16 step."""
        column = step * MMA_K * self.spec.q_bytes + quotient(self.lane, TILE_M) * HALF_BYTES
        address = self.base + swizzled(self.spec.heads_shape, 0, query, column)
        return load_fragment(address, self.spec.k_math)
