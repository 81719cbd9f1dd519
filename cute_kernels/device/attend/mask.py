"""Masks tokens that no query row sees: scores become -inf, and V rows become zero, whatever the bytes hold (NaN included).

These are the tokens past a row's end, and before a window. A page outside the pool is a hole: no byte is read for it (K and V are
zeros), and its scores become -inf. A token that only some query rows of a unit see has scores of -inf for the other rows.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...config.decode import KernelSpec
from ...config.tiling import RingShape
from ..ptx.registers import unknown
from .query_rows import KvRange, Queries, QueryBlock, Row, TilePlace, end_seen, first_seen, position_of, query_row_of

HOLE_BITS = 32  # of a word of holes
VECTOR = 8  # units of one 16-byte store


@cute.jit
def mask_scores(acc_s: cute.Tensor, coords: cute.Tensor, valid: Int32, hidden: cutlass.Constexpr = -math.inf):
    """Scores of tokens at or past `valid` become `hidden`. coords: (row, token) of each accumulator element."""
    for i in cutlass.range_constexpr(cute.size(acc_s)):
        if coords[i][1] >= valid:
            acc_s[i] = Float32(hidden)


@cute.jit
def mask_holes(
    acc_s: cute.Tensor,
    coords: cute.Tensor,
    holes: Int32,
    tokens: cutlass.Constexpr,
    hidden: cutlass.Constexpr = -math.inf,
    first: cutlass.Constexpr = 0,
):
    """Scores of the tokens whose page is not in the pool become `hidden`. Bit b of holes: `tokens` from first + b * tokens."""
    for i in cutlass.range_constexpr(cute.size(acc_s)):
        known = cutlass.const_expr(0 <= i // 4 * 8 - first < HOLE_BITS * tokens)  # four elements of an n8 step
        if known and (holes >> ((coords[i][1] - first) // tokens)) & 1 != 0:
            acc_s[i] = Float32(hidden)


@cute.jit
def zero_rows(spec: cutlass.Constexpr, tile: cute.Tensor, valid: Int32, stop: Int32, lane: Int32):
    """One warp zeroes rows [valid, stop) of a tile of V [tile_n tokens, units]: 0 * NaN must not reach the output."""
    vectors = cute.zipped_divide(tile, (1, VECTOR))
    per_row = cutlass.const_expr(spec.rings[1].units // VECTOR)
    zero = cute.make_rmem_tensor(VECTOR, tile.element_type)
    zero.fill(0)
    for i in cutlass.range(valid * per_row + lane, stop * per_row, cute.arch.WARP_SIZE):
        target = vectors[(0, None), (i // per_row, i % per_row)]
        cute.autovec_copy(zero, target)
    cute.arch.sync_warp()


def has_outside(spec: KernelSpec | RingShape, place: TilePlace) -> Boolean:
    """Whether a tile of `spec` has tokens outside the range that is seen."""
    outside = place.valid < spec.tile_n
    return outside if place.skip is None else outside | (place.skip > 0)


@cute.jit
def zero_outside(spec: cutlass.Constexpr, tile: cute.Tensor, place: TilePlace, lane: Int32):
    """A warp zeroes the rows of a tile of V that no query row sees."""
    if place.valid < spec.tile_n:
        zero_rows(spec, tile, cutlass.max(place.valid, 0), Int32(spec.tile_n), lane)
    if cutlass.const_expr(place.skip is not None):
        zero_rows(spec, tile, Int32(0), cutlass.max(cutlass.min(place.skip, spec.tile_n), 0), lane)


@dataclass(frozen=True)
class RowMask:
    """The keys that each of this lane's packed rows sees: [first, end), less the new tokens that a tree's words hide.

    positions: those of the rows' query rows among the keys. inner_begin, inner_end: every row of the unit sees the keys between
    them. tree: (words of each row, the first new token), or None.
    """

    positions: list[Int32]
    first: list[Int32] | None
    end: list[Int32]
    inner_begin: Int32 | None
    inner_end: Int32
    tree: tuple | None


def make_row_mask(
    spec: KernelSpec,
    queries: Queries,
    row: Row,
    keys: KvRange,
    block: QueryBlock,
    tree_mask: cute.Tensor | None,
    lane_rows: list[Int32],
) -> RowMask:
    """The mask of this lane's rows of an m-tile for one piece."""
    if spec.paired:  # else the lanes of a group of 8 heads have a query row in uniform registers, and 65 others spill
        lane_rows = [unknown(packed) for packed in lane_rows]
    query_rows = [query_row_of(spec, block, packed) for packed in lane_rows]
    positions = [position_of(spec, row, query_row) for query_row in query_rows]
    first = [first_seen(spec, queries, position) for position in positions] if spec.modifiers.window_left else None
    end = [cutlass.min(end_seen(spec, queries, row, position), keys.end) for position in positions]
    tree = None
    if spec.modifiers.tree_mask:
        last = row.queries - 1
        tree = (
            [tree_words(spec, tree_mask, block, cutlass.min(query_row, last)) for query_row in query_rows],
            row.length - row.queries,
        )
    return RowMask(positions, first, end, keys.inner_begin, keys.inner_end, tree)


def tree_words(spec: KernelSpec, tree_mask: cute.Tensor, block: QueryBlock, query_row: Int32) -> cute.Tensor:
    """The words of a query row of a tree."""
    query_row = cutlass.max(query_row, 0)
    return tree_mask[block.row, query_row, None] if spec.query == "uniform" else tree_mask[block.query + query_row, None]


def cuts(mask: RowMask, token: Int32, tokens: int) -> Boolean:
    """Whether some row does not see all of the `tokens` from `token` on."""
    outside = token + tokens > mask.inner_end
    return outside if mask.inner_begin is None else outside | (token < mask.inner_begin)


@cute.jit
def mask_rows(acc_s: cute.Tensor, coords: cute.Tensor, mask: RowMask, token: Int32, tokens: cutlass.Constexpr):
    """Scores of what a row does not see become -inf, in a tile of `tokens` from `token` on."""
    for r in cutlass.range_constexpr(len(mask.end)):
        seen: tuple = ()
        if cutlass.const_expr(mask.tree is not None):
            seen = tuple(seen_new_tokens(mask.tree[0][r], token + base - mask.tree[1]) for base in range(0, tokens, 32))
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            if cutlass.const_expr(i // 2 % 2 == r):
                column = coords[i][1]
                hidden = token + column >= mask.end[r]
                if cutlass.const_expr(mask.first is not None):
                    hidden = hidden | (token + column < mask.first[r])
                if cutlass.const_expr(mask.tree is not None):
                    bits = seen[i // 4 * 8 // 32]  # four elements of an n8 step
                    hidden = hidden | ((bits >> (column & 31)) & 1 == 0)
                if hidden:
                    acc_s[i] = -Float32.inf


@cute.jit
def seen_new_tokens(words: cute.Tensor, begin: Int32) -> Int32:
    """Bit b: whether a row of a tree sees new token begin + b. Bits of tokens before the first new one are set."""
    low, high = (tree_word(words, (begin >> 5) + i) for i in range(2))
    return cute.arch.inline_ptx(
        "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[low, high, begin]
    )


@cute.jit
def tree_word(words: cute.Tensor, index: Int32) -> Int32:
    """Word `index` of a row of a tree: all bits are set before the first word, none after the last."""
    word = Int32(-1) if index < 0 else Int32(0)
    if index >= 0 and index < Int32(words.shape[0]):
        word = words[index]
    return word
