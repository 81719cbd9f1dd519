"""The schedule of long queries: blocks of query rows, each with all keys that it sees, are dealt to a persistent grid.

An item (a work tile) is a block of the packed rows of a request and KV head. Items are numbered request by request; in each
request the last block, which sees most keys, comes first, and the KV heads of a block are neighbours. In each round every CTA
takes one item. Every other round runs in reverse order: the CTA that took the longest item of one round takes the shortest of the
next. Nothing is planned: the producer finds an item from the lengths on the device while it brings the previous item's tiles, and
leaves the item to the other warps.

Few blocks, whose rounds would leave SMs idle, are cut into pieces (pieces.py, KernelSpec.deals_pieces), and each piece is an
item. First come the first pieces of all blocks, then their second ones, so that blocks of a KV head read the same keys at a time.

In a mixed kernel CTAs that serve other requests first come late. There are no rounds then: a CTA claims the next item, by a count
in the workspace, when the last tile of its previous one is on its way. A result does not depend on the CTA that computes it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.decode import KernelSpec
from ..attend.query_rows import Row, block_of_rows, first_tile, kv_range, open_queries, tiles_of
from ..kv.source import Rows, box_pages, open_row_or_nothing, row_fields
from ..mainloop.shared import Shared, item_barrier, item_words, taken_barrier
from ..problem import Problem
from ..ptx.barriers import OPENED, sync_branches
from ..ptx.registers import LANES, quotient, remainder
from .work_scheduler import Piece, warp_prefix


@dataclass(frozen=True)
class Cut:
    """An item of a launch that cuts blocks: piece `place` of `pieces` of its block, which is number `number` of `blocks`."""

    place: Int32
    pieces: Int32
    number: Int32
    blocks: Int32


@dataclass(frozen=True)
class Item:
    """Block `block` of the packed rows of request `index`, opened as `row`, and a KV head.

    index: the batch size, past the last item. cut: None if no block may be cut.
    """

    index: Int32
    block: Int32
    kv_head: Int32
    row: Row
    cut: Cut | None = None


@dataclass(frozen=True)
class Found:
    """Where a search may go on: at request `begin`, after `before` items of earlier requests.

    rest: the number of the block that was found, in its request; past the last item, how far its number is past the blocks.
    dealt: (blocks of the launch, pieces of each), None if no block may be cut.
    """

    begin: Int32
    before: Int32
    rest: Int32
    dealt: tuple[Int32, Int32] | None = None

    @property
    def past(self) -> Int32:
        """Past the last item: how many items come between."""
        if self.dealt is None:
            return self.rest
        blocks, pieces = self.dealt
        return self.rest - blocks * (pieces - 1)


def nothing_found(spec: KernelSpec, dealt: tuple[Int32, Int32] | None = None) -> Found:
    """The beginning of a search. dealt: as in Found; None if that is not known."""
    unknown = (Int32(1), Int32(1)) if spec.deals_pieces else None
    return Found(Int32(0), Int32(0), Int32(0), unknown if dealt is None else dealt)


def helpers(spec: KernelSpec) -> int:
    """Warps that take items from the producer, in addition to those that attend."""
    return spec.producers - 1 + spec.widening_warps


def meet_all(spec: KernelSpec):
    """The warps that bring, widen and attend to tiles meet: the mbarriers are made."""
    if spec.opens_kernel:
        sync_branches(OPENED, spec.num_warps + 1 + helpers(spec))


def ordinal_of(turn: Int32) -> Int32:
    """The number of the item that this CTA takes in a round."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return turn * ctas + cutlass.select_(turn & 1 == 0, cta, ctas - 1 - cta)


def claims_of(workspace: cute.Tensor) -> cute.Tensor:
    """How many items of a launch are claimed, at the start of the workspace."""
    return cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Int32), 1)


@cute.jit
def claim(claims: cute.Tensor) -> Int32:
    """A warp claims the first item that no CTA has claimed; returns its number."""
    ordinal = Int32(0)
    if cute.arch.lane_idx() == 0:
        ordinal = cute.arch.atomic_add(claims.iterator, Int32(1))
    return cute.arch.shuffle_sync(ordinal, 0)


@cute.jit
def end_claims(claims: cute.Tensor, found: Found):
    """A warp whose claim was past the last item: each CTA has one such claim, and the last of them leaves the count as it was."""
    if (found.past == cute.arch.grid_dim()[0] - 1) & (cute.arch.lane_idx() == 0):
        claims[0] = Int32(0)


def items_of(spec: KernelSpec, rows: Rows, queries: Int32) -> Int32:
    """Items of a request with `queries` query rows."""
    return quotient(queries * spec.group_size + spec.block_rows - 1, spec.block_rows) * Int32(rows.k.shape[1])


def items_at(spec: KernelSpec, rows: Rows, index: Int32) -> Int32:
    """Items of request `index`."""
    return items_of(spec, rows, open_queries(spec, rows.queries, index)[1])


@cute.jit
def find_item(spec: cutlass.Constexpr, problem: Problem, turn: Int32, found: Found) -> tuple[Item, Found]:
    """A warp finds this CTA's item of round `turn`, or claims one. found: that of the previous round."""
    rows, batch, begin, before = problem.rows, problem.batch(spec), found.begin, found.before
    ordinal, cut = claim(problem.claims) if cutlass.const_expr(spec.claims) else ordinal_of(turn), None
    if cutlass.const_expr(spec.deals_pieces):  # a search begins anew where the numbers of blocks do, with the next pieces
        ordinal, cut = cut_of_item(ordinal, *found.dealt)
        anew = ordinal < before
        begin, before = cutlass.select_(anew, 0, begin), cutlass.select_(anew, 0, before)
    if cutlass.const_expr(spec.query == "uniform"):
        each = cutlass.max(items_of(spec, rows, open_queries(spec, rows.queries, Int32(0))[1]), 1)
        index, rest = quotient(ordinal, each), remainder(ordinal, each)
    else:
        index, rest, begin, before = search(spec, rows, batch, ordinal, begin, before, items_at)
    index = cutlass.min(index, batch)
    row = open_row_or_nothing(spec, rows, index, batch)
    heads = Int32(rows.k.shape[1])
    block = quotient(items_of(spec, rows, row.queries), heads) - 1 - quotient(rest, heads)
    uniform = cute.arch.make_warp_uniform
    item = Item(uniform(index), uniform(block), uniform(remainder(rest, heads)), row, cut)
    return item, Found(begin, before, rest, found.dealt)


def cut_of_item(ordinal: Int32, blocks: Int32, pieces: Int32) -> tuple[Int32, Cut]:
    """(the number of the block of item `ordinal`, the item's Cut); past the last item the number is that of no block."""
    uniform, divisor = cute.arch.make_warp_uniform, cutlass.max(blocks, 1)
    there = (pieces > 1) & (ordinal < blocks * pieces)  # whole blocks may be more than were counted
    place = cutlass.select_(there, quotient(ordinal, divisor), 0)
    number = cutlass.select_(there, remainder(ordinal, divisor), ordinal)
    return number, Cut(*(uniform(word) for word in (place, pieces, number, blocks)))


@cute.jit
def search(
    spec: cutlass.Constexpr, rows: Rows, batch: Int32, ordinal: Int32, begin: Int32, before: Int32, items: cutlass.Constexpr
) -> tuple:
    """(request of item `ordinal`, the item's number in the request, `begin` and `before` for the next search).

    items(spec, rows, request): how many items a request has. Past the last item the request is at least `batch`, and the number
    is how many come between. A warp looks at 32 requests at a time.
    """
    count = inclusive = Int32(0)
    searching = Boolean(True)
    while searching:
        index = begin + cute.arch.lane_idx()
        count = Int32(0)
        if index < batch:
            count = items(spec, rows, index)
        inclusive = warp_prefix(count)
        total = cute.arch.shuffle_sync(inclusive, LANES - 1)
        searching = (before + total <= ordinal) & (begin + LANES < batch)
        before = cutlass.select_(searching, before + total, before)
        begin = cutlass.select_(searching, begin + LANES, begin)
    lane = cute.arch.popc(cute.arch.vote_ballot_sync(before + inclusive <= ordinal))
    earlier = inclusive - cutlass.select_(lane < LANES, count, 0)
    rest = ordinal - before - cute.arch.shuffle_sync(earlier, cutlass.min(lane, LANES - 1))
    return cutlass.select_(lane < LANES, begin + lane, batch), rest, begin, before


def piece_of(spec: KernelSpec, rows: Rows, item: Item, issued: Int32) -> Piece:
    """The item's piece (KV split): all keys that its block sees, or a part of them. issued: this CTA's tiles before it."""
    keys = kv_range(spec, rows.queries, item.row, item.block)
    tiles = tiles_of(spec, keys)
    first, stop = stretch_of(item, tiles)
    block = block_of_rows(spec, item.block, item.kv_head * spec.group_size, item.index, item.row)
    return Piece(item.index, item.row, keys, block, item.kv_head, first, stop, stop, tiles, issued)


def stretch_of(item: Item, tiles: Int32) -> tuple[Int32, Int32]:
    """The tiles [first, stop) of an item's block, of `tiles`, that the item has. A short block's pieces may have none."""
    cut = item.cut
    if cut is None:
        return Int32(0), tiles
    return quotient(tiles * cut.place, cut.pieces), quotient(tiles * (cut.place + 1), cut.pieces)


def pages_of(spec: KernelSpec, rows: Rows, item: Item) -> Int32:
    """box_pages of the first boxes of an item."""
    keys = kv_range(spec, rows.queries, item.row, item.block)
    return box_pages(spec, rows, item.row.start, keys, first_tile(spec, keys) + stretch_of(item, tiles_of(spec, keys))[0])


@cute.jit
def publish_item(spec: cutlass.Constexpr, shared: Shared, item: Item, turn: Int32):
    """The producer leaves the item of a round to the other warps, once all warps have taken the item of two rounds earlier."""
    slot = turn & 1
    cute.arch.mbarrier_wait(taken_barrier(spec, shared, slot), (turn >> 1) & 1 ^ 1)
    with cute.arch.elect_one():
        row = [getattr(item.row, name) for name in row_fields(spec)]
        cut = tuple(vars(item.cut).values()) if spec.deals_pieces else ()
        for i, word in enumerate((item.index, item.block, item.kv_head, *row, *cut)):
            shared.items[i, slot] = word
        cute.arch.mbarrier_arrive(item_barrier(spec, shared, slot))


@cute.jit
def take_item(spec: cutlass.Constexpr, shared: Shared, turn: Int32) -> Item:
    """The item of round `turn`, for a warp to which the producer leaves items."""
    slot, fields = turn & 1, row_fields(spec)
    cute.arch.mbarrier_wait(item_barrier(spec, shared, slot), (turn >> 1) & 1)
    words = [cute.arch.make_warp_uniform(shared.items[i, slot]) for i in range(item_words(spec))]
    cute.arch.mbarrier_arrive(taken_barrier(spec, shared, slot))
    row, cut = words[3 : 3 + len(fields)], words[3 + len(fields) :]
    return Item(*words[:3], Row(**dict(zip(fields, row, strict=True))), Cut(*cut) if spec.deals_pieces else None)
