"""S^T = K Q^T and O^T += V^T P^T of a warpgroup, by wgmma (m64nNk16): K and V come from registers, Q and P from shared memory.

A wgmma takes its first operand from registers. With tokens, or columns of V, as its 64 rows that operand is K, or V^T: ldmatrix
brings 8-bit elements, which a warp decodes on their way, each once. So no tile is written to shared memory in 16 bits. N is the
number of packed query rows. A warp has 16 tokens of a tile in S^T, and 16 columns of each 64 columns of V in O^T. Swapping the
operands is known from narrow GEMMs (CUTLASS, "swap A and B").

A register of K holds four neighbouring columns of a token. They serve as columns 2c, 2c + 1, 2c + 8 and 2c + 9 of a k16 step
(kv/codec.py), and the query lies in shared memory in that order (pack_gqa.place_of). A register of V^T holds columns 2g and
2g + 1 of two tokens: they are rows g and g + 8 of O^T.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...config.decode import KernelSpec
from ...config.problem import MMA_K
from ...config.tiling import TILE_M, WARPGROUP, WARPGROUP_M
from ..elements import ELEMENT_TYPES
from ..kv.codec import HALVES, PARITIES, decode
from ..mainloop import tile
from ..mainloop.shared import Shared
from ..mainloop.tile import swizzled, transposed
from ..ptx.matrices import load_matrices
from ..ptx.registers import LANES, remainder
from .mask import has_outside
from .pack_gqa import fragments
from .query_rows import TilePlace
from .warpgroup_mma import descriptors, in_one, make_mma_of
from .widen import is_outside

CHUNK_BYTES = 16  # of a row of an 8 x 8 matrix: 16 columns of 8 bits


class TransposedProducts:
    """The products of a warp, made with the other warps of its group."""

    def __init__(self, spec: KernelSpec, shared: Shared, lane: Int32):
        self.spec, self.lane, self.thr_mma = spec, lane, None
        self.warp = remainder(cute.arch.make_warp_uniform(cute.arch.warp_idx()), WARPGROUP)
        self.keys, self.values = (Int32(ring.iterator.toint()) for ring in shared.rings)
        self.weights = transposed(in_one(shared.weights))
        self.blocks = spec.padded_v_head_dim // WARPGROUP_M  # of 64 columns of V
        self.steps = spec.tile_n // MMA_K  # of V^T P^T

    def make_scores(self) -> cute.Tensor:
        """Registers for S^T of a tile: [query row of a pair, half of the tokens, pair], flat."""
        return cute.make_rmem_tensor(self.spec.block_rows // 2, Float32)

    def start_scores(self, acc_s: cute.Tensor, query: cute.Tensor, keys: cute.Tensor):
        """Starts K Q^T: a group to be waited for. query: [row, column]; keys: by decode_keys."""
        spec = self.spec
        mma = self.mma(spec.k_math, OperandMajorMode.K)
        rows, acc = descriptors(mma, query), self.accumulator(acc_s)
        warpgroup.fence()
        for step in range(spec.padded_head_dim // MMA_K):
            mma.set(warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(mma, acc, keys[None, None, step], rows[None, None, step], acc)
        warpgroup.commit_group()

    def keys_at(self, stage: Int32) -> Int32:
        """Where this lane begins to read a stage's K."""
        token = self.warp * TILE_M + self.lane % TILE_M
        return self.keys + swizzled(self.spec.rings[0], stage, token, self.lane // TILE_M * CHUNK_BYTES)

    def read_keys(self, first: Int32) -> cute.Tensor:
        """The warp's 16 tokens of a tile's K as it is stored: two registers for each k16 step. first: by keys_at."""
        words = cute.make_rmem_tensor(self.spec.padded_head_dim // MMA_K * 2, Int32)
        for pair in range(cute.size(words) // 4):  # of k16 steps; the columns of a row differ in swizzled bits alone
            for i, word in enumerate(load_matrices(first ^ (2 * CHUNK_BYTES * pair))):
                words[4 * pair + i] = word
        return words

    def decode_keys(self, words: cute.Tensor) -> cute.Tensor:
        """What read_keys has read as A fragments, one for each k16 step."""
        found = cute.make_rmem_tensor(2 * cute.size(words), Int32)
        for i in range(cute.size(words)):
            at = i // 2 * 4 + i % 2
            found[at], found[at + 2] = decode(self.spec.k_type, True, words[i], HALVES)
        return fragments(cute.recast_tensor(found, ELEMENT_TYPES[self.spec.k_math]))

    def read_values(self, stage: Int32, place: TilePlace) -> cute.Tensor:
        """A stage's V as it is stored: for each block of columns and k16 step two registers. Tokens that no row sees are 0."""
        shape, words = self.spec.rings[1], cute.make_rmem_tensor(self.blocks * self.steps * 2, Int32)
        for block in range(self.blocks):
            for pair in range(self.steps // 2):
                column = (block * WARPGROUP + self.warp) * CHUNK_BYTES
                address = self.values + swizzled(shape, stage, LANES * pair + self.lane, column)
                for i, word in enumerate(load_matrices(address, turned=True)):
                    words[(block * self.steps + 2 * pair) * 2 + i] = word
        hide_values(self.spec, words, self.lane, place)
        return words

    def decode_values(self, words: cute.Tensor) -> cute.Tensor:
        """What read_values has read as A fragments, one for each block of columns and k16 step."""
        found = cute.make_rmem_tensor(2 * cute.size(words), Int32)
        for i in range(cute.size(words)):
            at = i // 2 * 4 + i % 2 * 2
            found[at], found[at + 1] = decode(self.spec.v_type, True, words[i], PARITIES)
        return fragments(cute.recast_tensor(found, ELEMENT_TYPES[self.spec.v_math]))

    def start_values(self, acc_o: cute.Tensor, values: cute.Tensor, stage: Int32):
        """Starts to add V^T P^T to the output [a block's registers, block]. values: by decode_values; stage: of the weights."""
        mma = self.mma(self.spec.v_math, OperandMajorMode.MN)
        weights = descriptors(mma, self.weights[None, None, stage])
        mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for step in range(self.steps):
            for block in range(self.blocks):
                acc = self.accumulator(acc_o[None, block])
                cute.gemm(mma, acc, values[None, None, block * self.steps + step], weights[None, None, step], acc)
        warpgroup.commit_group()

    def store_weights(self, words: list, stage: Int32):
        """Writes P^T of the warp's tokens. words: for each half of the tokens, pairs of neighbouring query rows."""
        shape = self.spec.weight_ring
        for half in range(2):
            token = self.warp * TILE_M + 8 * half + self.lane // 4
            first = tile.address(self.weights, shape, stage) + swizzled(shape, 0, token, self.lane % 4 * 4)
            for pair, word in enumerate(words[half]):
                cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[first ^ (CHUNK_BYTES * pair), word])

    def mma(self, element_type: str, major: OperandMajorMode) -> cute.TiledMma:
        """The step. major: of the second operand."""
        return make_mma_of(element_type, self.spec.block_rows, warpgroup.OperandSource.RMEM, major)

    def accumulator(self, acc: cute.Tensor) -> cute.Tensor:
        """Registers as the accumulator of an m64nNk16 step."""
        return cute.make_tensor(acc.iterator, cute.make_layout(((2, 2, self.spec.block_rows // 8), 1, 1)))


@cute.jit
def hide_values(spec: cutlass.Constexpr, words: cute.Tensor, lane: Int32, place: TilePlace):
    """Zeroes what no row sees in the registers of read_values, each of two columns of two tokens."""
    if has_outside(spec, place):
        for i in cutlass.range_constexpr(cute.size(words)):
            token = cutlass.const_expr(i % (spec.tile_n // 8) * 8) + lane % 4 * 2
            for half, bits in ((0, 0xFFFF), (1, -0x10000)):
                if is_outside(place, token + half):
                    words[i] = words[i] & ~bits
