"""Q K^T and P V of a warpgroup, by wgmma (m64nNk16): K and V are read from shared memory, P and, over 8 bits, Q from registers.

A warp's rows of an m64 tile lie in its lanes like the rows of an m16n8k16 tile, so the warps of a group have neighbouring
m-tiles, and all work between the products is a warp's own. Tiles of 8 bits are first widened to 16 in shared memory, by warps
that do nothing else (widen.py).
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...config.decode import KernelSpec
from ...config.problem import MMA_K
from ...config.tiling import TILE_M, WARPGROUP_M
from ..elements import ELEMENT_TYPES
from ..mainloop.shared import Shared
from ..mainloop.tile import transposed
from .pack_gqa import fragments
from .warp_mma import make_mma


class WarpgroupProducts:
    """The products of a warp's m-tile, made with the other warps of its group."""

    def __init__(self, spec: KernelSpec, shared: Shared, lane: Int32):
        self.spec = spec
        keys, values = (in_one(ring if wide is None else wide) for ring, wide in zip(shared.rings, shared.wide, strict=True))
        self.keys, self.values = keys, transposed(values)
        self.thr_mma = make_mma(spec.k_math).get_slice(lane)

    def scores(self, queries: list, stage: Int32) -> list[cute.Tensor]:
        """Q K^T with the tile in a stage, f32 ((2, 2), 1, n8)."""
        acc_s = self.make_scores()
        self.start_scores(acc_s, queries[0], stage)
        wait_for_products(0)
        return [acc_s]

    def add_values(self, outputs: list, weights: list, stage: Int32):
        """Adds P V to the output. weights: P as A fragments."""
        self.start_values(outputs[0], weights[0], stage)
        wait_for_products(0)

    def make_scores(self) -> cute.Tensor:
        """Registers for the scores of a tile."""
        return cute.make_rmem_tensor(self.thr_mma.partition_shape_C((TILE_M, self.spec.tile_n)), Float32)

    def start_scores(self, acc_s: cute.Tensor, query: cute.Tensor, stage: Int32):
        """Starts Q K^T with the tile in a stage: a group to be waited for."""
        spec, acc = self.spec, accumulator(acc_s, self.spec.tile_n)
        source = warpgroup.OperandSource.RMEM if spec.holds_query else warpgroup.OperandSource.SMEM
        mma = make_mma_of(spec.k_math, spec.tile_n, source, OperandMajorMode.K)
        rows = fragments(query) if spec.holds_query else mma.make_fragment_A(mma.get_slice(0).partition_A(query))
        keys = descriptors(mma, self.keys[None, None, stage])
        warpgroup.fence()
        for step in range(spec.padded_head_dim // MMA_K):
            mma.set(warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(mma, acc, rows[None, None, step], keys[None, None, step], acc)
        warpgroup.commit_group()

    def start_values(self, acc_o: cute.Tensor, p: cute.Tensor, stage: Int32):
        """Starts to add P V to the output: a group to be waited for. p: A fragments."""
        spec, acc = self.spec, accumulator(acc_o, self.spec.padded_v_head_dim)
        mma = make_mma_of(spec.v_math, spec.padded_v_head_dim, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        values = descriptors(mma, self.values[None, None, stage])
        warpgroup.fence()
        for step in range(spec.tile_n // MMA_K):
            cute.gemm(mma, acc, p[None, None, step], values[None, None, step], acc)
        warpgroup.commit_group()


def wait_for_products(groups: int):
    """Waits until, of the groups that this warp started, at most the last `groups` are under way."""
    warpgroup.wait_group(groups)


def make_mma_of(element_type: str, columns: int, source: warpgroup.OperandSource, major: OperandMajorMode) -> cute.TiledMma:
    """m64nNk16 with f32 accumulation. source: of the first operand; major: of the second."""
    op = warpgroup.MmaF16BF16Op(
        ELEMENT_TYPES[element_type], Float32, (WARPGROUP_M, columns, MMA_K), source, OperandMajorMode.K, major
    )
    return cute.make_tiled_mma(op)


def accumulator(acc: cute.Tensor, columns: int) -> cute.Tensor:
    """A warp's accumulator as that of an m64nNk16 step."""
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, 2, columns // 8), 1, 1)))


def in_one(ring: cute.Tensor) -> cute.Tensor:
    """A ring of tiles [token, column, stage] whose slabs lie one after the other, with one mode of tokens."""
    (rows, slabs), *others = ring.shape
    layout = cute.make_layout((rows * slabs, *others), stride=(ring.stride[0][0], *ring.stride[1:]))
    return cute.make_tensor(ring.iterator, layout)


def descriptors(mma: cute.TiledMma, tensor: cute.Tensor) -> cute.Tensor:
    """What a wgmma takes for a tensor [column or token, k] in shared memory, by k16 step."""
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tensor))
