"""One warp attends to one KV tile: S = Q K^T, online softmax, O += P V.

This is the computation of FlashAttention-2 (Dao 2023) for m-tiles of 16 packed query rows (packed GQA). The mainloops tma, block
and cp_async call it on a tile in shared memory. Whether a warp or its warpgroup multiplies is the products' affair: both leave
accumulators and A fragments alike in a lane.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import KernelSpec
from ...config.tiling import TILE_M
from ..elements import ELEMENT_TYPES
from ..kv.scale import SMALLEST_UNIT, Scaling, column_scales, scale_columns, settle_scales, widen_unit
from ..kv.value_scales import follow_unit
from ..mainloop.shared import Shared
from ..ptx.packed import pack
from .bases import WeightsUp, weigh_by_maxima
from .lazy import weigh_lazily
from .mask import HOLE_BITS, RowMask, cuts, mask_holes, mask_rows, mask_scores, zero_outside, zero_rows
from .pack_gqa import fragments
from .query_rows import TilePlace
from .relative import relate_scores
from .score import ScoreModifier, modify_scores
from .softmax import online_softmax
from .split_mma import SplitProducts
from .warp_mma import WarpProducts
from .warpgroup_mma import WarpgroupProducts

LEAST_FACTOR = 2.0**-126  # the smallest normal f32: the inverse of a row of zeros, which a small scale of K would make 0


@dataclass(frozen=True)
class WarpState:
    """The running attention state of one warp: f32 O accumulator, row maxima and sums (this thread's part).

    row_max: with lazy rescaling (bases.py), the maximum at the time when the row's base last moved; of related scores, the base.
    unit: the unit of sums and O, Int32 [1], if V has one scale per token (kv/scale.py); of O alone if that goes into V
    (kv/value_scales.py); else None.
    """

    acc_o: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    unit: cute.Tensor | None


@dataclass(frozen=True)
class RowTile:
    """An m-tile of the query with its state, as a warp attends with it.

    inverses: those of the query's row factors, or None (query_range.py). mask: what this lane's rows see, None if all see all
    keys. modifier: what changes scores, None if they are only scaled.
    """

    query: cute.Tensor
    inverses: list[Float32] | None
    state: WarpState
    mask: RowMask | None = None
    modifier: ScoreModifier | None = None


@dataclass(frozen=True)
class Attention:
    """What a warp needs to attend to a piece's tiles: what it multiplies with, its m-tiles and the scales."""

    products: WarpProducts | WarpgroupProducts | SplitProducts
    row_tiles: tuple[RowTile, ...]
    scaling: Scaling


def make_products(spec: KernelSpec, shared: Shared) -> WarpProducts | WarpgroupProducts | SplitProducts:
    """The products with which this warp multiplies."""
    kind = WarpgroupProducts if spec.by_warpgroup else SplitProducts if spec.splits else WarpProducts
    return kind(spec, shared, cute.arch.lane_idx())


def make_state(spec: KernelSpec, thr_mma: cute.ThrMma) -> WarpState:
    """A state in registers; reset_state gives it values."""
    acc_o = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE_M, spec.padded_v_head_dim)), Float32)
    row_max, row_sum = (cute.make_rmem_tensor(spec.lane_rows, Float32) for _ in range(2))
    return WarpState(acc_o, row_max, row_sum, cute.make_rmem_tensor(1, Int32) if spec.keeps_unit else None)


def reset_state(spec: KernelSpec, state: WarpState):
    """Resets a state to that before any key: O = 0, maxima -inf or bases 0, sums 0."""
    state.acc_o.fill(0.0)
    state.row_max.fill(0.0 if spec.relates_scores else -Float32.inf)
    state.row_sum.fill(0.0)
    if state.unit is not None:
        state.unit.fill(SMALLEST_UNIT)


def weight_operand(spec: KernelSpec, products, acc_s: cute.Tensor):
    """A tile's weights as the A operand of P V."""
    return products.weights(acc_s) if spec.splits else probabilities(acc_s, ELEMENT_TYPES[spec.v_math])


def probabilities(acc_s: cute.Tensor, element_type: type) -> cute.Tensor:
    """P in 16 bits, its accumulator registers reread as A fragments: ((2,2),1,n8) -> ((2,2,2),1,n16)."""
    p = cute.make_rmem_tensor(acc_s.shape, element_type)
    p.store(acc_s.load().to(element_type))
    return fragments(p)


def pack_probabilities(spec: KernelSpec, p: cute.Tensor, acc_s: cute.Tensor):
    """As `probabilities`, but into p, registers for as many 16-bit elements. The compiler moves none of this past a branch."""
    words = cute.recast_tensor(p, Int32)
    for i in range(cute.size(words)):
        words[i] = pack(spec.v_math, acc_s[2 * i], acc_s[2 * i + 1])


def row_scales(rows: RowTile, scaling: Scaling) -> list:
    """The factors, to base 2, by which softmax still multiplies the scores of each row in use."""
    in_use = cute.size(rows.state.row_max)
    return score_factors(rows, scaling) if rows.modifier is None else [Float32(1.0)] * in_use


def score_factors(rows: RowTile, scaling: Scaling) -> list:
    """The factors on Q K^T of each row in use, to base 2. They are never 0, which would turn a hidden score, -inf, into NaN."""
    scale, inverses = scaling.log2, rows.inverses
    if inverses is None:
        return [scale] * cute.size(rows.state.row_max)
    return [cute.arch.fmax(scale * inverses[r], Float32(LEAST_FACTOR)) for r in range(cute.size(rows.state.row_max))]


@cute.jit
def attend_tile(spec: cutlass.Constexpr, attention: Attention, shared: Shared, stage: Int32, place: TilePlace, holes: Int32):
    """Adds tile `stage` to the states of the warp's m-tiles. holes: mask.py."""
    row_tiles, products = attention.row_tiles, attention.products
    token_scales = shared.scales, stage
    peak = settle_scales(spec, *token_scales, attention.scaling.keys)
    scores = products.scores([rows.query for rows in row_tiles], stage)
    hide_scores(spec, attention, shared, scores, stage, columns_of(spec, token_scales, 0), place, (holes,))
    factors = [row_scales(rows, attention.scaling) for rows in row_tiles]
    ups = [weights_up(spec, rows.state, peak) for rows in row_tiles]
    if cutlass.const_expr(spec.lazy_bases):
        weigh_lazily(spec, scores, [rows.state for rows in row_tiles], factors, ups[0])
    else:
        for acc_s, rows, row_factors, up in zip(scores, row_tiles, factors, ups, strict=True):
            if cutlass.const_expr(spec.rounds_bases):
                weigh_by_maxima(acc_s, rows.state, row_factors, up)
            else:
                online_softmax(acc_s, rows.state.acc_o, rows.state.row_max, rows.state.row_sum, row_factors, up)
    if cutlass.const_expr(spec.scales_weights):
        columns = columns_of(spec, token_scales, 1)
        for acc_s in scores:
            scale_columns(acc_s, spec.lane_rows, columns)
    weights = [weight_operand(spec, products, acc_s) for acc_s in scores]
    products.add_values([rows.state.acc_o for rows in row_tiles], weights, stage)


def columns_of(spec: KernelSpec, token_scales: tuple, which: int) -> cute.Tensor | None:
    """Scales of this lane's columns of a tile, K's (0) or V's (1); None if tokens have none.

    token_scales: (rings of K's and V's scales, the tile's stage there).
    """
    rings, stage = token_scales
    form = (spec.k_scale, spec.v_scale)[which]
    return None if rings[which] is None else column_scales(spec, rings[which], form, stage)


def is_cut(spec: KernelSpec, rows: RowTile, place: TilePlace) -> Boolean:
    """Whether some row of an m-tile does not see all of a tile."""
    return place.valid < spec.tile_n if spec.plain else cuts(rows.mask, place.token, spec.tile_n)


@cute.jit
def hide_scores(
    spec: cutlass.Constexpr,
    attention: Attention,
    shared: Shared,
    scores: list,
    stage: Int32,
    columns: cute.Tensor | None,
    place: TilePlace,
    holes: tuple,
    cut: Boolean | None = None,
):
    """Applies K's scales per token, score functions and masks to a tile's scores, in place: what a row does not see becomes -inf.

    Where K's scales hold the softmax factor, scores become related ones (relative.py).

    With one reader per tile, tokens of V that no row sees become zeros too. columns: columns_of the tile's K. holes: its words of
    holes (mask.py). cut: is_cut of the only m-tile, if it is already known.
    """
    lane, row_tiles, products = cute.arch.lane_idx(), attention.row_tiles, attention.products
    if cutlass.const_expr(columns is not None):
        for acc_s, rows in zip(scores, row_tiles, strict=True):
            if cutlass.const_expr(spec.relates_scores):
                relate_scores(acc_s, rows.state, columns)
            else:
                scale_columns(acc_s, spec.lane_rows, columns)
    coords = products.thr_mma.partition_C(cute.make_identity_tensor((TILE_M, spec.tile_n)))
    if cutlass.const_expr(not spec.plain):
        for acc_s, rows in zip(scores, row_tiles, strict=True):
            if cutlass.const_expr(rows.modifier is not None):
                modify_scores(acc_s, coords, score_factors(rows, attention.scaling), rows.modifier, place.token)
            if is_cut(spec, rows, place) if cutlass.const_expr(cut is None) else cut:
                mask_rows(acc_s, coords, rows.mask, place.token, spec.tile_n)
        if cutlass.const_expr(spec.readers == 1):
            zero_outside(spec, shared.rings[1][None, None, stage], place, lane)
    elif is_cut(spec, row_tiles[0], place) if cutlass.const_expr(cut is None) else cut:
        mask_scores(scores[0], coords, place.valid)
        if cutlass.const_expr(spec.readers == 1):
            zero_rows(spec, shared.rings[1][None, None, stage], place.valid, Int32(spec.tile_n), lane)
    for number, word in enumerate(holes):
        if word != 0:
            for acc_s in scores:
                mask_holes(acc_s, coords, word, spec.hole_tokens, first=number * HOLE_BITS * spec.hole_tokens)


def weights_up(spec: KernelSpec, state: WarpState, peak: Int32) -> WeightsUp | None:
    """How the tile's scales of V change weights, sums and O; None if nothing does. peak: from settle_scales."""
    if spec.scales_values:
        return WeightsUp(Float32(spec.weight_bits), Float32(1.0), follow_unit(state.unit, peak))
    if spec.keeps_unit:
        shrink, up = widen_unit(state.unit, peak)
        return WeightsUp(up + spec.weight_bits, shrink, shrink)
    return WeightsUp(Float32(spec.weight_bits), Float32(1.0), Float32(1.0)) if spec.weight_bits > 0 else None
