"""Joins the states of the pieces (KV splits) of a block that was dealt (schedule/dealing.py).

No warp waits for another: the pieces of a block may be items of CTAs that have not started. A warp leaves its m-tile's state of a
piece and counts its arrival; the warp that arrives last joins the states of all pieces, in order, so that a result does not
depend on which warp that is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...config.decode import ARRIVAL_WORDS, KernelSpec
from ..attend.epilogue import SettledRows, join_lses, send_rows
from ..attend.softmax import rows_of
from ..schedule.dealing import Cut
from .partials import WRITTEN, clear, load_pair, lse_at, receive_columns, without_mark, word_at, word_of_column

TOGETHER = 8  # words of a row that a lane reads together: 32 registers


@cute.jit
def leave_piece(
    spec: cutlass.Constexpr, settled: SettledRows, heads: Int32, words: cute.Tensor, cut: Cut, row_tile: Int32
) -> Int32:
    """A warp leaves its settled rows of a piece in the item's slot; returns how many pieces of the block came before.

    heads: packed rows of the block; row_tile: the warp's m-tile.
    """
    send_rows(spec, settled, heads, words, slot_of(cut, cut.place), Int32(WRITTEN))
    cute.arch.sync_warp()
    before = Int32(0)
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(arrivals_at(spec, words, slot_of(cut, 0), row_tile), Int32(1), sem="acq_rel", scope="gpu")
    before = cute.arch.shuffle_sync(before, 0)
    cute.arch.sync_warp()
    return before


def slot_of(cut: Cut, place: Int32 | int) -> Int32:
    """The slot of a piece of an item's block: the piece's number as an item of the launch."""
    return place * cut.blocks + cut.number


def arrivals_at(spec: KernelSpec, words: cute.Tensor, slot: Int32, row_tile: Int32) -> cute.Pointer:
    """Where arrivals at an m-tile of a block are counted, whose first piece has slot `slot`."""
    address = word_at(words, spec.state_words - ARRIVAL_WORDS, slot) + row_tile * 4
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


@cute.jit
def join_pieces(
    spec: cutlass.Constexpr,
    settled: SettledRows,
    lses: cute.Tensor,
    heads: Int32,
    words: cute.Tensor,
    cut: Cut,
    row_tile: Int32,
):
    """The warp that arrived last makes its settled rows, and their `lses`, those of all pieces; leaves the workspace as zeros."""
    settled.acc_o.fill(0.0)
    for r in cutlass.range_constexpr(len(settled.rows)):
        lses[r] = -Float32.inf
    for place in cutlass.range(cut.pieces, unroll=1):
        slot = slot_of(cut, place)
        for r in cutlass.range_constexpr(len(settled.rows)):
            if settled.rows[r] < heads:
                add_row(spec, settled, lses, r, words, slot)
        cute.arch.sync_warp()  # all lanes have read the lse that they share
        for r in cutlass.range_constexpr(len(settled.rows)):
            clear_row(spec, settled, r, heads, words, slot)
    arrivals = cute.make_tensor(arrivals_at(spec, words, slot_of(cut, 0), row_tile), 1)
    if cute.arch.lane_idx() == 0:
        arrivals[0] = Int32(0)


def words_of_row(spec: KernelSpec, settled: SettledRows, r: int) -> list[Int32]:
    """The words of a state that this lane holds of one of its rows, in the order of its columns."""
    columns = range(0, cute.size(rows_of(settled.acc_o), mode=[1]), spec.word_columns)
    return [settled.rows[r] * spec.row_words + word_of_column(spec, settled.coords[r, c][1]) for c in columns]


def clear_row(spec: KernelSpec, settled: SettledRows, r: int, heads: Int32, words: cute.Tensor, slot: Int32):
    """Clears the words of a state that this lane holds of one of its rows, if there is that row."""
    for index in words_of_row(spec, settled, r):
        clear(spec, words, index, slot, settled.rows[r] < heads)


def add_row(spec: KernelSpec, settled: SettledRows, lses: cute.Tensor, r: int, words: cute.Tensor, slot: Int32):
    """Adds a piece's state of one of a lane's rows to what the lane has of the pieces before; both are normalised."""
    outputs, indices, nothing = rows_of(settled.acc_o), words_of_row(spec, settled, r), (Float32(0.0),) * 4
    lse = load_pair((lse_at(spec, words, indices[0], slot), Int64(0)), (Float32(0.0), Int32(0)))[0]
    for begin in range(0, len(indices), TOGETHER):
        some = range(begin, min(begin + TOGETHER, len(indices)))
        found = [receive_columns(spec, words, indices[i], slot, nothing) for i in some]
        if begin == 0:  # once the loads are under way
            factors, lses[r] = join_lses(lses[r], lse)
        for i, columns in zip(some, found, strict=True):
            for j, value in enumerate((without_mark(spec, columns[0]), *columns[1:])):
                place = i * spec.word_columns + j
                outputs[r, place] = outputs[r, place] * factors[0] + value * factors[1]
