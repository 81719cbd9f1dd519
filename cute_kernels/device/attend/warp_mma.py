"""Q K^T and P V of one warp, by m16n8k16 tensor-core steps: ldmatrix brings K and V, which are decoded in registers."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ...config.decode import KernelSpec
from ...config.problem import ELEMENT_BYTES
from ...config.tiling import TILE_M
from ..elements import ELEMENT_TYPES
from ..kv.codec import HALVES, PARITIES, decode
from ..mainloop.shared import Shared
from ..mainloop.tile import transposed
from .pack_gqa import query_step


def make_mma(element_type: str) -> cute.TiledMma:
    """m16n8k16 with f32 accumulation, one warp; two n8 steps share one ldmatrix.x4."""
    op = warp.MmaF16BF16Op(ELEMENT_TYPES[element_type], Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=(16, 16, 16))


class TileReader:
    """Reads B fragments of one ring (K, or V transposed) through ldmatrix, 16 units of the contraction at a time."""

    def __init__(self, spec: KernelSpec, tiled_mma: cute.TiledMma, lane: Int32, ring: cute.Tensor, stored_type: str, is_v: bool):
        ring = transposed(ring) if is_v else ring
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=is_v, num_matrices=4), ring.element_type)
        self.copy = cute.make_tiled_copy_B(atom, tiled_mma)
        self.thr_copy = self.copy.get_slice(lane)
        self.source = self.thr_copy.partition_S(ring)
        self.thr_mma = tiled_mma.get_slice(lane)
        self.rows, self.element_type = cute.size(ring, mode=[0]), ring.element_type
        self.types, self.by_instruction = (stored_type, spec.math_of(stored_type)), spec.arch == "sm90"
        self.steps = cute.size(ring, mode=[1]) // 16
        of_8_bits = self.load_v if is_v else self.load_k
        self.load = of_8_bits if ELEMENT_BYTES[stored_type] == 1 else self.load_units

    def fragment(self, rows: int) -> cute.Tensor:
        """Registers for the B fragment of one k16 step, ((2, 2), rows / 8, 1)."""
        return cute.make_rmem_tensor(self.thr_mma.partition_shape_B((rows, 16)), self.element_type)

    def load_units(self, step: int, stage: Int32) -> tuple[cute.Tensor, ...]:
        """The units of step `step` of tile `stage`: the fragment itself if a unit is an element."""
        fragment = self.fragment(self.rows)
        target = self.thr_copy.retile(fragment)
        cute.copy(self.copy, self.source[None, None, step, stage], target[None, None, 0])
        return (fragment,)

    def load_k(self, step: int, stage: Int32) -> tuple[cute.Tensor, ...]:
        """The fragments of 32 columns of 8 bits: a register of units, for 16 columns, holds both registers of a k16 step."""
        words = registers(self.load_units(step, stage)[0])
        found = self.fragment(self.rows), self.fragment(self.rows)
        for half, target in enumerate(map(registers, found)):
            for n in range(self.rows // 8):
                target[0, n], target[1, n] = decode(self.types, self.by_instruction, words[half, n], HALVES)
        return found

    def load_v(self, step: int, stage: Int32) -> tuple[cute.Tensor, ...]:
        """The fragment of 16 tokens: a register of units, for two tokens, holds one for each of two n8 steps (value_column)."""
        words = registers(self.load_units(step, stage)[0])
        found = self.fragment(2 * self.rows)
        target = registers(found)
        for half in range(2):
            for n in range(self.rows // 8):
                decoded = decode(self.types, self.by_instruction, words[half, n], PARITIES)
                target[half, 2 * n], target[half, 2 * n + 1] = decoded
        return (found,)


class KeyProducts:
    """Q K^T of a warp with a ring of K tiles: what the warp reads and decodes of a tile serves all its queries."""

    def __init__(self, spec: KernelSpec, ring: cute.Tensor, lane: Int32):
        self.spec = spec
        self.mma_k = make_mma(spec.k_math)
        self.reader_k = TileReader(spec, self.mma_k, lane, ring, spec.k_type, is_v=False)
        self.thr_mma = self.mma_k.get_slice(lane)

    def scores(self, queries: list, stage: Int32) -> list[cute.Tensor]:
        """Q K^T of each query with the tile in a stage, f32 ((2, 2), 1, n8)."""
        spec = self.spec
        scores = [cute.make_rmem_tensor(self.thr_mma.partition_shape_C((TILE_M, spec.tile_n)), Float32) for _ in queries]
        for acc_s in scores:
            acc_s.fill(0.0)
        for step in range(self.reader_k.steps):
            loaded = self.reader_k.load(step, stage)
            for i in range(len(loaded)):
                for acc_s, query in zip(scores, queries, strict=True):
                    fragment = self.query_step(query, step * len(loaded) + i)
                    cute.gemm(self.mma_k, acc_s, fragment, loaded[i][None, None, 0], acc_s)
        return scores

    def query_step(self, query, step: int) -> cute.Tensor:
        """The A fragment of one k16 step of a query."""
        return query_step(self.spec, query, step)


class WarpProducts(KeyProducts):
    """The products of a warp with the m-tiles that it attends to."""

    def __init__(self, spec: KernelSpec, shared: Shared, lane: Int32):
        super().__init__(spec, shared.rings[0], lane)
        self.mma_v = make_mma(spec.v_math)
        self.reader_v = TileReader(spec, self.mma_v, lane, shared.rings[1], spec.v_type, is_v=True)

    def add_values(self, outputs: list, weights: list, stage: Int32):
        """Adds P V to each output. weights: P as A fragments."""
        for step in range(self.reader_v.steps):
            values = self.reader_v.load(step, stage)[0][None, None, 0]
            for p, acc_o in zip(weights, outputs, strict=True):
                cute.gemm(self.mma_v, acc_o, p[None, None, step], values, acc_o)


def registers(fragment: cute.Tensor) -> cute.Tensor:
    """A B fragment as 32-bit registers [half of the contraction, n8]."""
    return cute.make_tensor(cute.recast_ptr(fragment.iterator, dtype=Int32), cute.make_layout((2, cute.size(fragment) // 4)))
