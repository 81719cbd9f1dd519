"""A kernel that only reads: the floor that every time is divided by.

It loads two buffers with 16-byte loads that bypass L1 and xors them together. The launch that reaches a GPU's read ceiling
depends on the size, so there are a few launch shapes, each as a plain launch and with programmatic dependent launch; the caller
times all and keeps the fastest. A dependent launch loads nothing before its wait: a decode kernel may not read K and V there
either.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

VECTOR_BYTES = 16
WORDS = VECTOR_BYTES // 4


@dataclass(frozen=True)
class ReadShape:
    """A launch of the read kernel: `threads` per CTA, each loading `unroll` vectors of K and as many of V in one step.

    ctas_per_sm: CTAs of a persistent grid; 0 gives every CTA one tile. ptxas keeps to 32 registers, so an SM holds 2,048
    threads with 4 or 5 loads each in flight: at least 128 KiB. overlap: whether it is launched with programmatic dependent
    launch, so that its CTAs start while the previous kernel ends.
    """

    threads: int
    unroll: int
    ctas_per_sm: int
    overlap: bool = False

    @property
    def tile(self) -> int:
        """Vectors of one buffer that a CTA loads in one step."""
        return self.threads * self.unroll

    @property
    def label(self) -> str:
        grid = f"{self.ctas_per_sm} per SM" if self.ctas_per_sm else "one tile each"
        launch = ", programmatic dependent launch" if self.overlap else ""
        return f"{self.threads} threads x 2 x {self.unroll} loads, {grid}{launch}"

    def num_ctas(self, num_vectors: int, sm_count: int) -> int:
        """CTAs for buffers of `num_vectors` 16-byte vectors each."""
        tiles = -(-num_vectors // self.tile)
        return min(tiles, self.ctas_per_sm * sm_count) if self.ctas_per_sm else tiles


PLAIN_SHAPES = (
    ReadShape(threads=256, unroll=4, ctas_per_sm=0),
    ReadShape(threads=512, unroll=4, ctas_per_sm=0),
    ReadShape(threads=128, unroll=8, ctas_per_sm=0),
    ReadShape(threads=1024, unroll=4, ctas_per_sm=0),
    ReadShape(threads=256, unroll=4, ctas_per_sm=8),
    ReadShape(threads=512, unroll=4, ctas_per_sm=4),
    ReadShape(threads=512, unroll=8, ctas_per_sm=4),
    ReadShape(threads=1024, unroll=4, ctas_per_sm=2),
)
READ_SHAPES = (*PLAIN_SHAPES, *(replace(shape, overlap=True) for shape in PLAIN_SHAPES))


@cute.kernel
def _read(
    mK: cute.Tensor,
    mV: cute.Tensor,
    mSink: cute.Tensor,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
    overlap: cutlass.Constexpr,
) -> None:
    if cutlass.const_expr(overlap):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    load = cute.make_copy_atom(
        CopyG2ROp(),
        cutlass.Int32,
        num_bits_per_copy=8 * VECTOR_BYTES,
        l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE,
    )
    last = cutlass.Int64(mK.shape[0]) - 1
    num_tiles = cutlass.Int32((last + threads * unroll) // (threads * unroll))
    rK = cute.make_rmem_tensor(cute.make_layout((unroll, WORDS), stride=(WORDS, 1)), cutlass.Int32)
    rV = cute.make_rmem_tensor_like(rK)
    checksum = cutlass.Int32(0)
    for tile in cutlass.range(bidx, num_tiles, num_ctas, unroll=1):
        first = cutlass.Int64(tile) * (threads * unroll) + tidx
        for i in cutlass.range_constexpr(unroll):
            vector = cutlass.min(first + i * threads, last)  # past the end: the last vector again, from L2
            cute.copy(load, mK[vector, None], rK[i, None])
            cute.copy(load, mV[vector, None], rV[i, None])
        for i in cutlass.range_constexpr(unroll):
            for word in cutlass.range_constexpr(WORDS):
                checksum = checksum ^ rK[i, word] ^ rV[i, word]
    if checksum == 0x5EED5EED:  # one thread in 2^32: enough to keep the loads
        mSink[0] = checksum


@cute.jit
def _launch(
    mK: cute.Tensor,  # int32 [vectors, 4]
    mV: cute.Tensor,  # int32 [vectors, 4]
    mSink: cute.Tensor,  # int32 [1]
    num_ctas: cutlass.Int32,
    stream: CUstream,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
    overlap: cutlass.Constexpr,
) -> None:
    _read(mK, mV, mSink, threads, unroll, overlap).launch(
        grid=(num_ctas, 1, 1), block=(threads, 1, 1), stream=stream, use_pdl=overlap
    )


@lru_cache
def compile_read(threads: int, unroll: int, overlap: bool = False, dump_options: str = "") -> Callable:
    """Compiles one launch shape for sm_90a: fn(k, v, sink, num_ctas) over int32 tensors [vectors, 4] and [1].

    overlap: as in ReadShape. dump_options: further compiler options, such as those that keep the PTX.
    """
    vectors = cute.sym_int64()
    buffers = [make_fake_tensor(cutlass.Int32, (vectors, WORDS), (WORDS, 1), assumed_align=VECTOR_BYTES) for _ in "kv"]
    sink = make_fake_tensor(cutlass.Int32, (1,), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--gpu-arch sm_90a --enable-tvm-ffi {dump_options}"
    return cute.compile(_launch, *buffers, sink, cutlass.Int32(1), stream, threads, unroll, overlap, options=options)
