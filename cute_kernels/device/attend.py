"""One warp attends to one KV tile: S = Q K^T, online softmax, O += P V, by m16n8k16 tensor-core steps.

The computation of FlashAttention-2 (Dao 2023) for 16 packed query rows. Both mainloops call it on a tile in shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ..config import TILE_M, KernelSpec
from .mask import mask_holes, mask_scores, zero_rows
from .pack_gqa import fragments, query_step
from .softmax import online_softmax


@dataclass(frozen=True)
class WarpState:
    """The running attention state of one warp: f32 O accumulator, row maxima and sums (this thread's part)."""

    acc_o: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


def make_mma(element_type: type) -> cute.TiledMma:
    """m16n8k16 with f32 accumulation, one warp; two n8 steps share one ldmatrix.x4."""
    op = warp.MmaF16BF16Op(element_type, Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=(16, 16, 16))


def make_state(spec: KernelSpec, thr_mma: cute.ThrMma) -> WarpState:
    """A state in registers; reset_state gives it values."""
    acc_o = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, spec.padded_head_dim)), Float32)
    rows = 1 if spec.packed_rows <= TILE_M // 2 else 2
    row_max, row_sum = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
    return WarpState(acc_o, row_max, row_sum)


def reset_state(state: WarpState):
    """Nothing seen yet: O = 0, maxima -inf, sums 0."""
    state.acc_o.fill(0.0)
    state.row_max.fill(-Float32.inf)
    state.row_sum.fill(0.0)


class TileReader:
    """Reads B fragments of one ring (K, or V transposed) through ldmatrix, one k16 step at a time."""

    def __init__(self, tiled_mma: cute.TiledMma, lane: Int32, ring: cute.Tensor, transpose: bool):
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), ring.element_type)
        self.copy = cute.make_tiled_copy_B(atom, tiled_mma)
        self.thr_copy = self.copy.get_slice(lane)
        self.source = self.thr_copy.partition_S(ring)
        shape = tiled_mma.get_slice(lane).partition_shape_B((cute.size(ring, mode=[0]), 16))
        self.shape, self.element_type = shape, ring.element_type

    def load(self, step: int, stage: Int32) -> cute.Tensor:
        """The B fragment of k16 step `step` of tile `stage`."""
        fragment = cute.make_rmem_tensor(self.shape, self.element_type)
        target = self.thr_copy.retile(fragment)
        cute.copy(self.copy, self.source[None, None, step, stage], target[None, None, 0])
        return fragment


def probabilities(acc_s: cute.Tensor, element_type: type) -> cute.Tensor:
    """P in 16 bits, its accumulator registers reread as A fragments: ((2,2),1,n8) -> ((2,2,2),1,n16)."""
    p = cute.make_rmem_tensor(acc_s.layout, element_type)
    p.store(acc_s.load().to(element_type))
    return fragments(p)


@cute.jit
def attend_tile(
    spec: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    readers: tuple,
    ring_v: cute.Tensor,
    query: cute.Tensor,
    state: WarpState,
    stage: Int32,
    valid: Int32,
    holes: Int32,
    scale_log2: Float32,
):
    """Adds tile `stage` to the warp's state. valid: tokens of the tile inside the row (may exceed tile_n); holes: mask.py."""
    lane = cute.arch.lane_idx()
    reader_k, reader_v = readers
    thr_mma = tiled_mma.get_slice(lane)
    acc_s = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, spec.tile_n)), Float32)
    acc_s.fill(0.0)
    for step in cutlass.range_constexpr(spec.padded_head_dim // 16):
        cute.gemm(tiled_mma, acc_s, query_step(spec, query, step), reader_k.load(step, stage)[None, None, 0], acc_s)
    coords = thr_mma.partition_C(cute.make_identity_tensor((TILE_M, spec.tile_n)))
    if valid < spec.tile_n:
        mask_scores(acc_s, coords, valid)
        zero_rows(spec, ring_v[None, None, stage], valid, lane)
    if holes != 0:
        mask_holes(acc_s, coords, holes, spec.hole_tokens)
    online_softmax(acc_s, state.acc_o, state.row_max, state.row_sum, scale_log2)
    p = probabilities(acc_s, ring_v.element_type)
    for step in cutlass.range_constexpr(spec.tile_n // 16):
        cute.gemm(tiled_mma, state.acc_o, p[None, None, step], reader_v.load(step, stage)[None, None, 0], state.acc_o)
