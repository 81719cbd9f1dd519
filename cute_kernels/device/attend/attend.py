"""One warp attends to one KV tile: S = Q K^T, online softmax, O += P V, by m16n8k16 tensor-core steps.

The computation of FlashAttention-2 (Dao 2023) for 16 packed query rows. Both mainloops call it on a tile in shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ...config.decode import ELEMENT_BYTES, TILE_M, KernelSpec
from ..kv.codec import HALVES, PARITIES, decode
from ..kv.scale import SMALLEST_UNIT, Scaling, column_scales, scale_columns, settle_scales, widen_unit
from ..mainloop.shared import Shared
from ..mainloop.tile import transposed
from ..tracing.fakes import ELEMENT_TYPES
from .mask import RowMask, cuts, mask_holes, mask_rows, mask_scores, zero_outside, zero_rows
from .pack_gqa import fragments, query_step
from .query_rows import TilePlace
from .score import ScoreModifier, modify_scores
from .softmax import online_softmax


@dataclass(frozen=True)
class WarpState:
    """The running attention state of one warp: f32 O accumulator, row maxima and sums (this thread's part).

    unit: what sums and O are in units of, Int32 [1], where V has a scale a token (kv/scale.py); None elsewhere.
    """

    acc_o: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    unit: cute.Tensor | None


@dataclass(frozen=True)
class RowTile:
    """An m-tile of the query as a warp attends with it.

    inverses: of the query's row factors, or None (query_range.py). mask: of this lane's rows, None where all see all keys.
    modifier: of scores that are more than scaled, or None.
    """

    query: cute.Tensor
    inverses: list[Float32] | None
    state: WarpState
    mask: RowMask | None = None
    modifier: ScoreModifier | None = None


@dataclass(frozen=True)
class Attention:
    """What a warp needs to attend to a tile of a piece: the two MMAs, the readers of both rings, its m-tiles."""

    mmas: tuple
    readers: tuple
    row_tiles: tuple[RowTile, ...]
    scaling: Scaling


def make_mma(element_type: str) -> cute.TiledMma:
    """m16n8k16 with f32 accumulation, one warp; two n8 steps share one ldmatrix.x4."""
    op = warp.MmaF16BF16Op(ELEMENT_TYPES[element_type], Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=(16, 16, 16))


def make_mmas(spec: KernelSpec) -> tuple[cute.TiledMma, cute.TiledMma]:
    """Those of Q K^T and of P V."""
    return make_mma(spec.k_math), make_mma(spec.v_math)


def make_state(spec: KernelSpec, thr_mma: cute.ThrMma) -> WarpState:
    """A state in registers; reset_state gives it values."""
    acc_o = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, spec.padded_head_dim)), Float32)
    row_max, row_sum = (cute.make_rmem_tensor(spec.lane_rows, Float32) for _ in range(2))
    return WarpState(acc_o, row_max, row_sum, cute.make_rmem_tensor(1, Int32) if spec.v_token_scale else None)


def reset_state(state: WarpState):
    """Nothing seen yet: O = 0, maxima -inf, sums 0."""
    state.acc_o.fill(0.0)
    state.row_max.fill(-Float32.inf)
    state.row_sum.fill(0.0)
    if state.unit is not None:
        state.unit.fill(SMALLEST_UNIT)


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
        self.stored_type, self.by_instruction = stored_type, spec.arch == "sm90"
        self.steps = cute.size(ring, mode=[1]) // 16
        of_8_bits = self.load_v if is_v else self.load_k
        self.load = of_8_bits if ELEMENT_BYTES[stored_type] == 1 else self.load_units

    def fragment(self, rows: int) -> cute.Tensor:
        """Registers for the B fragment of one k16 step, ((2, 2), rows / 8, 1)."""
        return cute.make_rmem_tensor(self.thr_mma.partition_shape_B((rows, 16)), self.element_type)

    def load_units(self, step: int, stage: Int32) -> tuple[cute.Tensor, ...]:
        """The units of step `step` of tile `stage`: the fragment itself where a unit is an element."""
        fragment = self.fragment(self.rows)
        target = self.thr_copy.retile(fragment)
        cute.copy(self.copy, self.source[None, None, step, stage], target[None, None, 0])
        return (fragment,)

    def load_k(self, step: int, stage: Int32) -> tuple[cute.Tensor, ...]:
        """The fragments of 32 columns of 8 bits: each register of units, of 16 columns, holds both registers of a k16 step."""
        words = registers(self.load_units(step, stage)[0])
        found = self.fragment(self.rows), self.fragment(self.rows)
        for half, target in enumerate(map(registers, found)):
            for n in range(self.rows // 8):
                target[0, n], target[1, n] = decode(self.stored_type, self.by_instruction, words[half, n], HALVES)
        return found

    def load_v(self, step: int, stage: Int32) -> tuple[cute.Tensor, ...]:
        """The fragment of 16 tokens: a register of units, of two tokens, holds one of each of two n8 steps (value_column)."""
        words = registers(self.load_units(step, stage)[0])
        found = self.fragment(2 * self.rows)
        target = registers(found)
        for half in range(2):
            for n in range(self.rows // 8):
                decoded = decode(self.stored_type, self.by_instruction, words[half, n], PARITIES)
                target[half, 2 * n], target[half, 2 * n + 1] = decoded
        return (found,)


def registers(fragment: cute.Tensor) -> cute.Tensor:
    """A B fragment as 32-bit registers [half of the contraction, n8]."""
    return cute.make_tensor(cute.recast_ptr(fragment.iterator, dtype=Int32), cute.make_layout((2, cute.size(fragment) // 4)))


def value_column(spec: KernelSpec, column: int) -> int:
    """The column of V that is column `column` of the O accumulator: with 8 bits an n8 step has every other one of 16."""
    if spec.v_bytes == 2:
        return column
    return column // 16 * 16 + column % 8 * 2 + column // 8 % 2


def make_readers(spec: KernelSpec, mmas: tuple, lane: Int32, shared: Shared) -> tuple[TileReader, TileReader]:
    """The readers of K and of V."""
    readers = []
    for mma, ring, stored, is_v in zip(mmas, shared.rings, (spec.k_type, spec.v_type), (False, True), strict=True):
        readers.append(TileReader(spec, mma, lane, ring, stored, is_v))
    return tuple(readers)


def probabilities(acc_s: cute.Tensor, element_type: type) -> cute.Tensor:
    """P in 16 bits, its accumulator registers reread as A fragments: ((2,2),1,n8) -> ((2,2,2),1,n16)."""
    p = cute.make_rmem_tensor(acc_s.layout, element_type)
    p.store(acc_s.load().to(element_type))
    return fragments(p)


def row_scales(rows: RowTile, scaling: Scaling) -> list:
    """What is still to be multiplied to the scores of each row in use, to base 2, when softmax takes them."""
    in_use = cute.size(rows.state.row_max)
    return score_factors(rows, scaling) if rows.modifier is None else [Float32(1.0)] * in_use


def score_factors(rows: RowTile, scaling: Scaling) -> list:
    """What Q K^T of each row in use is multiplied by, to base 2."""
    scale, inverses = scaling.log2, rows.inverses
    return [scale if inverses is None else scale * inverses[r] for r in range(cute.size(rows.state.row_max))]


@cute.jit
def attend_tile(spec: cutlass.Constexpr, attention: Attention, shared: Shared, stage: Int32, place: TilePlace, holes: Int32):
    """Adds tile `stage` to the states of the warp's m-tiles. holes: mask.py."""
    lane, row_tiles = cute.arch.lane_idx(), attention.row_tiles
    (mma_k, mma_v), (reader_k, reader_v) = attention.mmas, attention.readers
    thr_mma = mma_k.get_slice(lane)
    peak = settle_scales(spec, shared.scales, stage)
    scores = [cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, spec.tile_n)), Float32) for _ in row_tiles]
    for acc_s in scores:
        acc_s.fill(0.0)
    for step in cutlass.range_constexpr(reader_k.steps):
        loaded = reader_k.load(step, stage)
        for i in cutlass.range_constexpr(len(loaded)):
            for acc_s, rows in zip(scores, row_tiles, strict=True):
                query = query_step(spec, rows.query, step * len(loaded) + i)
                cute.gemm(mma_k, acc_s, query, loaded[i][None, None, 0], acc_s)
    if cutlass.const_expr(spec.k_token_scale):
        columns = column_scales(spec, shared.scales[0], spec.k_scale, stage)
        for acc_s in scores:
            scale_columns(acc_s, spec.lane_rows, columns)
    coords = thr_mma.partition_C(cute.make_identity_tensor((TILE_M, spec.tile_n)))
    if cutlass.const_expr(not spec.plain):
        for acc_s, rows in zip(scores, row_tiles, strict=True):
            if cutlass.const_expr(rows.modifier is not None):
                modify_scores(acc_s, coords, score_factors(rows, attention.scaling), rows.modifier, place.token)
            if cuts(rows.mask, place.token, spec.tile_n):
                mask_rows(acc_s, coords, rows.mask, place.token, spec.tile_n)
        zero_outside(spec, shared.rings[1][None, None, stage], place, lane)
    elif place.valid < spec.tile_n:
        mask_scores(scores[0], coords, place.valid)
        zero_rows(spec, shared.rings[1][None, None, stage], place.valid, Int32(spec.tile_n), lane)
    if holes != 0:
        for acc_s in scores:
            mask_holes(acc_s, coords, holes, spec.hole_tokens)
    weights = [weights_of(spec, acc_s, rows, attention.scaling, peak) for acc_s, rows in zip(scores, row_tiles, strict=True)]
    if cutlass.const_expr(spec.v_token_scale):
        columns = column_scales(spec, shared.scales[1], spec.v_scale, stage)
        for acc_s in weights:
            scale_columns(acc_s, spec.lane_rows, columns)
    products = [probabilities(acc_s, ELEMENT_TYPES[spec.v_math]) for acc_s in weights]
    for step in cutlass.range_constexpr(reader_v.steps):
        values = reader_v.load(step, stage)[0][None, None, 0]
        for p, rows in zip(products, row_tiles, strict=True):
            cute.gemm(mma_v, rows.state.acc_o, p[None, None, step], values, rows.state.acc_o)


def weights_of(spec: KernelSpec, acc_s: cute.Tensor, rows: RowTile, scaling: Scaling, peak: Int32) -> cute.Tensor:
    """A tile's scores, in place, as softmax weights; the m-tile's state moves to its new maximum. peak: of V's scales."""
    state, weights_up = rows.state, None
    if spec.v_token_scale:
        shrink, up = widen_unit(state.unit, peak)
        weights_up = (up + spec.weight_bits, shrink)
    elif spec.weight_bits > 0:
        weights_up = (Float32(spec.weight_bits), Float32(1.0))
    online_softmax(acc_s, state.acc_o, state.row_max, state.row_sum, row_scales(rows, scaling), weights_up)
    return acc_s
