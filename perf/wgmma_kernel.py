"""A kernel that only multiplies: the floor of cases that the tensor core limits.

Each SM has a CTA whose warpgroups run wgmma after wgmma on two tiles in shared memory, which are loaded once: nothing is loaded,
waited for or stored in the loop. The speed follows from the clock that the power limit allows, and that clock from the bits that
change, so the tiles hold random numbers. At the end the first CTAs store their accumulators, as many as the launch says: none
if it is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.config.problem import MMA_K
from cute_kernels.config.tiling import WARPGROUP, WARPGROUP_M
from cute_kernels.device.attend.warpgroup_mma import descriptors, make_mma_of, wait_for_products
from cute_kernels.device.elements import ELEMENT_TYPES

ELEMENT_TYPE = "bf16"
THREADS = 32 * WARPGROUP  # threads of a warpgroup
DEPTH = 64  # the extent of k in a turn of the loop: 128 bytes, the widest swizzle of a wgmma's operands
STAGES = 2  # pairs of tiles that the turns alternate between
VECTOR = 8  # elements of a 16-byte copy
UNDER_WAY = 1  # turns whose products may be running when the next turn starts its own


@dataclass(frozen=True)
class LoopShape:
    """A CTA of `warpgroups`, each of which adds products m64n`columns`k16 to accumulators of its own."""

    columns: int
    warpgroups: int

    @property
    def rows(self) -> int:
        """Rows of A, of all warpgroups together."""
        return self.warpgroups * WARPGROUP_M

    @property
    def threads(self) -> int:
        return self.warpgroups * THREADS

    @property
    def operand_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of A and B, [stage, row or column, k]."""
        return (STAGES, self.rows, DEPTH), (STAGES, self.columns, DEPTH)

    @property
    def turn_flop(self) -> int:
        """FLOP of a CTA in a turn of the loop: a multiplication and an addition for each row, column and k."""
        return 2 * self.rows * self.columns * DEPTH

    @property
    def label(self) -> str:
        return f"{self.warpgroups} warpgroups x m{WARPGROUP_M}n{self.columns}k{MMA_K}"

    def turns(self, flop: float, sm_count: int) -> int:
        """The turns, at least one, after which `sm_count` CTAs have done as nearly `flop` operations as whole turns allow."""
        return max(1, round(flop / (sm_count * self.turn_flop)))


LOOP_SHAPES = (LoopShape(columns=256, warpgroups=2), LoopShape(columns=128, warpgroups=2), LoopShape(columns=192, warpgroups=2))


@cute.kernel
def _multiply(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mOut: cute.Tensor,
    turns: cutlass.Int32,
    stored: cutlass.Int32,
    shape: cutlass.Constexpr,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    sA, sB = (load(smem, operand, tidx, shape.threads) for operand in (mA, mB))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(tidx // THREADS)
    mma = make_mma_of(ELEMENT_TYPE, shape.columns, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
    own = cute.local_tile(sA, (WARPGROUP_M, DEPTH, STAGES), (group, 0, 0))
    rows, columns = mma.make_fragment_A(mma.get_slice(0).partition_A(own)), descriptors(mma, sB)
    acc = cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_M, shape.columns)), cutlass.Float32)
    acc.fill(0.0)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for turn in cutlass.range(turns, unroll=1):
        stage = turn % STAGES
        warpgroup.fence()
        for step in cutlass.range_constexpr(DEPTH // MMA_K):
            cute.gemm(mma, acc, rows[None, None, step, stage], columns[None, None, step, stage], acc)
        warpgroup.commit_group()
        wait_for_products(UNDER_WAY)
    wait_for_products(0)
    if bidx < stored:
        tile = cute.local_tile(mOut[bidx, None, None], (WARPGROUP_M, shape.columns), (group, 0))
        cute.autovec_copy(acc, mma.get_slice(tidx % THREADS).partition_C(tile))


def load(smem: cutlass.memory.SmemAllocator, operand: cute.Tensor, tidx: cutlass.Int32, threads: int) -> cute.Tensor:
    """An operand [stage, row, k] in shared memory, as a swizzled tensor [row, k, stage]."""
    stages, rows, depth = operand.shape
    layout = cute.make_layout((rows, depth, stages), stride=(depth, 1, rows * depth))
    swizzle = cute.make_swizzle(3, 4, 3)  # 16-byte vectors of a 128-byte row, by the row within eight
    tile = smem.allocate_tensor(ELEMENT_TYPES[ELEMENT_TYPE], layout, byte_alignment=1024, swizzle=swizzle)
    across = depth // VECTOR
    for first in range(0, rows, threads // across):
        row = first + tidx // across
        for stage in range(stages):
            source = cute.local_tile(operand[stage, row, None], (VECTOR,), (tidx % across,))
            cute.autovec_copy(source, cute.local_tile(tile[row, None, stage], (VECTOR,), (tidx % across,)))
    return tile


@cute.jit
def _launch(
    mA: cute.Tensor,  # bf16 [stage, row, k]
    mB: cute.Tensor,  # bf16 [stage, column, k]
    mOut: cute.Tensor,  # f32 [CTA, row, column]
    num_ctas: cutlass.Int32,
    turns: cutlass.Int32,
    stored: cutlass.Int32,
    stream: CUstream,
    shape: cutlass.Constexpr,
) -> None:
    _multiply(mA, mB, mOut, turns, stored, shape).launch(
        grid=(num_ctas, 1, 1), block=(shape.threads, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@lru_cache
def compile_loop(shape: LoopShape, dump_options: str = "") -> Callable:
    """Compiles one shape for sm_90a: fn(a, b, out, num_ctas, turns, stored).

    a, b: bf16, of LoopShape.operand_shapes. out: f32 [CTA, row, column], to which the first `stored` CTAs write accumulators.
    dump_options: as in read_kernel.
    """
    bf16 = ELEMENT_TYPES[ELEMENT_TYPE]
    operands = [make_fake_tensor(bf16, dims, (dims[1] * dims[2], dims[2], 1), assumed_align=16) for dims in shape.operand_shapes]
    tile = (shape.rows, shape.columns)
    out = make_fake_tensor(cutlass.Float32, (cute.sym_int(), *tile), (tile[0] * tile[1], tile[1], 1), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    counts = [cutlass.Int32(1) for _ in range(3)]
    options = f"--gpu-arch sm_90a --enable-tvm-ffi {dump_options}"
    return cute.compile(_launch, *operands, out, *counts, stream, shape, options=options)
