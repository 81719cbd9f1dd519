"""Packs the query heads that share one KV head into the rows of one tensor-core tile.

Row r of m-tile m is query head kv_head * group_size + m * TILE_M + r. Rows past the group and columns past head_dim are zero on
load; such rows are never stored. The tile is kept as m16n8k16 A fragments, eight elements a lane and k16 step, in shared
memory, and held in registers while a piece lasts where they fit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ..config import MMA_K, KernelSpec
from .work_scheduler import Piece

FRAGMENT = 8  # elements of one lane's A fragment of a k16 step


def query_layout(spec: KernelSpec) -> cute.Layout:
    """(element, lane, k16 step) -> element in shared memory: a lane reads its fragment in one 16-byte load."""
    return cute.make_layout((FRAGMENT, 32, spec.padded_head_dim // MMA_K))


def fragments(tensor: cute.Tensor) -> cute.Tensor:
    """Registers [element, step] as A fragments ((2, 2, 2), 1, step)."""
    steps = cute.size(tensor) // FRAGMENT
    return cute.make_tensor(tensor.iterator, cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, FRAGMENT)))


@cute.jit
def load_query(spec: cutlass.Constexpr, q: cute.Tensor, piece: Piece, shared: cute.Tensor):
    """Each warp brings every num_warps-th k16 step of the piece's query heads into shared memory.

    q [batch, num_heads, head_dim]; pairs of columns are read as 32 bits when head_dim is even.
    """
    lane = cute.arch.lane_idx()
    heads = cute.domain_offset((piece.head, 0), q[piece.row, None, None])
    pair = cutlass.const_expr(2 if spec.head_dim % 2 == 0 else 1)
    for step in cutlass.range(cute.arch.warp_idx(), spec.padded_head_dim // MMA_K, spec.num_warps, unroll=1):
        fragment = cute.make_rmem_tensor(FRAGMENT, q.element_type)
        fragment.fill(0)
        for e in cutlass.range_constexpr(0, FRAGMENT, pair):
            row = lane // 4 + 8 * (e // 2 % 2)
            column = step * MMA_K + lane % 4 * 2 + 8 * (e // 4) + e % 2
            if row < piece.heads and column < spec.head_dim:
                if cutlass.const_expr(pair == 2):
                    source = cute.recast_ptr(heads.iterator + cute.crd2idx((row, column), heads.layout), dtype=Uint32)
                    cute.recast_tensor(fragment, Uint32)[e // 2] = cute.make_tensor(source, 1)[0]
                else:
                    fragment[e] = heads[row, column]
        cute.autovec_copy(fragment, shared[None, lane, step])


def in_registers(spec: KernelSpec) -> bool:
    """Whether the query stays in registers: at head_dim 256, or 128 with one query head, others would spill (read from SASS)."""
    return spec.padded_head_dim <= (192 if spec.packed_rows > 1 else 96)


def hold_query(spec: KernelSpec, shared: cute.Tensor) -> cute.Tensor:
    """Registers for the whole query, or the shared tensor itself where it is read step by step."""
    if not in_registers(spec):
        return shared
    return cute.make_rmem_tensor((FRAGMENT, spec.padded_head_dim // MMA_K), shared.element_type)


@cute.jit
def refresh_query(spec: cutlass.Constexpr, shared: cute.Tensor, held: cute.Tensor):
    """Reads a new piece's query into registers, where it is held there."""
    if cutlass.const_expr(in_registers(spec)):
        for step in cutlass.range_constexpr(spec.padded_head_dim // MMA_K):
            cute.autovec_copy(shared[None, cute.arch.lane_idx(), step], held[None, step])


def query_step(spec: KernelSpec, held: cute.Tensor, step: int) -> cute.Tensor:
    """The A fragment of one k16 step."""
    if in_registers(spec):
        return fragments(held)[None, None, step]
    fragment = cute.make_rmem_tensor(FRAGMENT, held.element_type)
    cute.autovec_copy(held[None, cute.arch.lane_idx(), step], fragment)
    return fragments(fragment)[None, None, 0]
