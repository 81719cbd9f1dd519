"""Packs the query heads that share one KV head into the rows of one tensor-core tile.

Row r of m-tile m is query head kv_head * group_size + m * TILE_M + r. Rows past the group are zero on load and never stored.
The fragment is m16n8k16's A operand: each thread holds rows lane / 4 and lane / 4 + 8, in pairs of neighbouring columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..config import TILE_M


@cute.jit
def load_query(spec: cutlass.Constexpr, thr_mma: cute.ThrMma, q: cute.Tensor, row: Int32, head: Int32, rows: Int32):
    """Returns the A fragments of `rows` query heads from `head` on, columns past head_dim zero.

    q [batch, num_heads, head_dim]; pairs of columns are read as 32 bits when head_dim is even.
    """
    coords = thr_mma.partition_A(cute.make_identity_tensor((TILE_M, spec.padded_head_dim)))
    fragment = cute.make_rmem_tensor(thr_mma.partition_shape_A((TILE_M, spec.padded_head_dim)), q.element_type)
    fragment.fill(0)
    heads = cute.domain_offset((head, 0), q[row, None, None])
    pair = 2 if cutlass.const_expr(spec.head_dim % 2 == 0) else 1
    for i in cutlass.range_constexpr(0, cute.size(fragment), pair):
        r, c = coords[i]
        if r < rows and c < spec.head_dim:
            if cutlass.const_expr(pair == 2):
                source = cute.recast_ptr(heads.iterator + cute.crd2idx((r, c), heads.layout), dtype=Uint32)
                target = cute.recast_ptr(fragment.iterator + cute.crd2idx(i, fragment.layout), dtype=Uint32)
                cute.make_tensor(target, 1)[0] = cute.make_tensor(source, 1)[0]
            else:
                fragment[i] = heads[r, c]
    return fragment
