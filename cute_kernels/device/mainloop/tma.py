"""SM90 mainloop: a producer warp issues one TMA box per page into a ring of mbarriers; consumer warps take tiles in turn.

The scales of tokens have a producer warp of their own: one warp took longer to issue both boxes and scales than a tile takes to
arrive. Without scales that second warp looks ahead (L2 prefetch); with two CTAs per SM, one more warp would leave too few
registers to each. Where instructions set the pace instead, four producers take tiles in turn, one for each scheduler of the SM:
each brings boxes and scales of its tiles, and its part of the next query. Beside three warpgroups that attend over 8 bits one
producer brings both as well. In prompts over small pages of 16 bits K and V have a producer each (Load).

Tile i of a share (work partition) lies in stage i % num_stages and belongs to warp i % num_warps. num_stages is a multiple of
num_warps, so a stage always has the same reader: with several readers, a fast one passes a parity that an older phase satisfied
and reads garbage. If a unit (head block) has two KV heads, a stretch of tokens is a tile of the first head, then a tile of the
second; num_warps is even, so a warp has tiles of one head. If a unit has several m-tiles, a group of neighbouring warps (a turn)
reads each tile, each warp for its own m-tiles; groups, not warps, then alternate.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...config.decode import KernelSpec
from ...config.tiling import RingShape
from ...config.warps import PRODUCER_WARPS
from ..attend.attend import Attention, attend_tile
from ..attend.mask import has_outside, zero_outside
from ..attend.pack_gqa import prefetch_query, reader_of, turn_of
from ..attend.query_rows import Row, TilePlace, first_tile, place_of_tile
from ..kv.source import (
    box_pages,
    empty_row,
    find_holes,
    inspect_request,
    open_row_or_nothing,
    token_of_lane,
)
from ..kv.wide_scales import make_coming
from ..problem import Problem
from ..ptx.policies import EVICT_FIRST, EVICT_NORMAL
from ..ptx.registers import LANES, quotient, remainder
from ..schedule.crew import prepare_end
from ..schedule.opening import Opening, find_opening, first_pages, hear_share, meet, meet_consumers, publish, read_opening
from ..schedule.work_scheduler import Piece, Share, following, keys_of, make_piece, take_share, unfinished
from . import tile
from .beside import bring_following, make_query_barriers, prefetch_following
from .boxes import partition_boxes, tensor_map
from .shared import (
    Shared,
    announced_barrier,
    crew_barrier,
    empty_barrier,
    factor_barrier,
    full_barrier,
    narrow_barrier,
    read_holes,
    widened_barrier,
    zeroed_barrier,
)
from .token_scales import TokenScales
from .widening import Widening

AHEAD = 4  # look_ahead prefetches a quarter of the ring: more would delay the loads themselves


@dataclass(frozen=True)
class Load:
    """What a producer warp brings. caches: K (0), V (1) or both; scales: whether it brings those of tokens.

    leads: whether it finds the opening, or the items, for all.
    """

    caches: tuple[int, ...]
    scales: bool
    leads: bool


def loads_of(spec: KernelSpec) -> tuple[Load, Load]:
    """What the producers of tiles bring, and what the one beside them brings, if there is one: the scales of tokens, or V."""
    if spec.values_apart:
        return Load((0,), False, True), Load((1,), False, False)
    return Load((0, 1), spec.brings_scales, True), Load((), True, False)


class TmaMainloop(TokenScales, Widening):
    """Host part: tensor maps. Device part: producer and consumers of one CTA's range of tiles."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.producer_warps = PRODUCER_WARPS[spec.arch]  # 0: no warp only brings tiles
        self.ahead_warp = spec.num_warps + (-1 if spec.token_scales else 1)
        self.boxes = spec.tile_n // spec.box_rows
        self.loads = loads_of(spec)
        self.parts = max(1, spec.tile_producers // spec.tile_heads)  # producers that take the tiles of a KV head in turn
        self.opens_late = False  # whether a producer looks up a piece only behind the last tile of the piece before
        # arrivals at a full barrier: K and V, each lane's scales, their flags; scales come with K if V has barriers of its own
        self.arrivals = 1 + (32 + 1 if spec.token_scales and not spec.settles_scales else 0), 1
        readers = spec.readers
        widening = [len(crew) for crew in spec.widening_crews]
        self.lanes_read = LANES if spec.widens_tiles and spec.token_scales else 1  # a lane arrives for its own scales
        self.lanes_widen = 1 if spec.settles_scales else self.lanes_read, LANES if spec.scales_values else 1
        self.zeroes_alone = readers > 1 and spec.wide[1] is None
        # arrivals at an empty barrier: each lane, if it read scales or V's elements itself; one lane, if ldmatrix reads for all
        self.all_release = (spec.token_scales > 0 and not spec.widens_tiles) or (spec.splits and self.zeroes_alone)
        of_values = readers if spec.wide[1] is None else 0  # a widened V is done with once it is widened
        of_keys = readers * (LANES if self.all_release else 1) if spec.wide[0] is None else 0
        self.releases = of_keys + widening[0] * self.lanes_widen[0], of_values + widening[1]

    def operands(self, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """(K atom, K coordinates, V atom, V coordinates) of caches [pages, heads, slots, head_dim] in any strides."""
        return (*tensor_map(k, self.spec.rings[0]), *tensor_map(v, self.spec.rings[1]))

    def maps(self, operands: tuple) -> tuple:
        """The tensor maps among `operands`."""
        return operands[0], operands[2]

    def from_start(self, piece: Piece, coords: cute.Tensor) -> cute.Tensor:
        """The coordinates of a cache [slots, columns, heads, pages] from where the piece's row begins in its page."""
        if self.spec.table_format != "packed":
            return coords
        return cute.domain_offset((piece.row.start, *(0 for _ in range(cute.rank(coords) - 1))), coords)

    def order(self, piece: Piece) -> Int32:
        """This warp's place in the merge: the number of its first tile in the piece, so the merge depends on the piece alone."""
        return (turn_of(self.spec) - piece.issued * self.spec.unit_heads) & (self.spec.turns - 1)  # turns are a power of two

    @cute.jit
    def prepare(self, operands: tuple, shared: Shared):
        """The first warp prefetches the tensor maps and makes the mbarriers, while another warp finds the opening.

        The mbarriers are full ones (the producers arrive), empty ones (the stage's reader arrives), those of zeroed and widened
        tiles, and two for the crew (schedule/crew). One lane makes them: an address that differs between lanes costs a loop.
        """
        with cute.arch.elect_one():
            for atom in self.maps(operands):
                cpasync.prefetch_descriptor(atom)
            for stage in cutlass.range_constexpr(self.spec.num_stages):
                for which in cutlass.range_constexpr(1 + self.spec.overlaps):
                    cute.arch.mbarrier_init(full_barrier(self.spec, shared, stage, which), self.arrivals[which])
                    cute.arch.mbarrier_init(empty_barrier(self.spec, shared, stage, which), self.releases[which])
                if cutlass.const_expr(self.spec.readers > 1):
                    cute.arch.mbarrier_init(zeroed_barrier(self.spec, shared, stage), LANES)
            for stage in cutlass.range_constexpr(self.spec.wide_stages):
                for which in cutlass.range_constexpr(2):
                    settle = LANES if which == 0 and self.spec.settles_scales else 0
                    widen = len(self.spec.widening_crews[which]) * self.lanes_widen[which] + settle
                    read = self.lanes_read if which == 0 else 1
                    cute.arch.mbarrier_init(widened_barrier(self.spec, shared, stage, which), max(1, widen))  # 0: not in use
                    cute.arch.mbarrier_init(narrow_barrier(self.spec, shared, stage, which), self.spec.readers * read)
            for stage in cutlass.range_constexpr(self.spec.factor_barriers):
                cute.arch.mbarrier_init(factor_barrier(self.spec, shared, stage), LANES)
            if cutlass.const_expr(self.spec.query_warps > 0):
                make_query_barriers(self.spec, shared)
            for news in (crew_barrier, announced_barrier):
                cute.arch.mbarrier_init(news(self.spec, shared), 1)
        cute.arch.mbarrier_init_fence()

    def open_share(self, problem: Problem, shared: Shared) -> Opening:
        """The opening (the CTA's share and its first row), for the consumers."""
        meet_consumers(self.spec)
        return read_opening(self.spec, problem, shared)[0]

    @cute.jit
    def look_ahead(self, problem: Problem, shared: Shared):
        """Prefetches the first query and tiles of this CTA's share into L2 while the previous kernel still runs.

        Lengths and tables are read as they are: the previous kernel may still change them, but values read here serve prefetches
        only.
        """
        spec, rows, batch = self.spec, problem.rows.unsettled(), problem.batch(self.spec)
        atom_k, coords_k, atom_v, coords_v = problem.caches
        if cutlass.const_expr(spec.hears_share):
            opening = hear_share(spec, problem, shared)
            share, row = opening.share, opening.row
        else:
            share = take_share(spec, rows, batch)
            row = open_row_or_nothing(spec, rows, share.row, batch)
        piece = make_piece(spec, rows, share, share.row, row, share.tile, Int32(0))
        pages = first_pages(spec, rows, share, row)
        if unfinished(spec, share, share.row, share.tile):
            prefetch_query(spec, problem.q, piece.block)
        gmem_k = partition_boxes(atom_k, self.from_start(piece, coords_k), shared.rings[0], spec.rings[0])[1]
        gmem_v = partition_boxes(atom_v, self.from_start(piece, coords_v), shared.rings[1], spec.rings[1])[1]
        most = cutlass.const_expr(min(32, max(1, spec.num_stages // AHEAD // spec.unit_heads) * self.boxes))
        for box in cutlass.range(cutlass.min((piece.stop - piece.first) * self.boxes, most), unroll=1):
            page = cute.arch.shuffle_sync(pages, box)
            for head in cutlass.range_constexpr(spec.unit_heads):
                index = self.tile_at(piece, Int32(0)) * self.boxes + box
                for atom, gmem, shape in ((atom_k, gmem_k, spec.rings[0]), (atom_v, gmem_v, spec.rings[1])):
                    for block in cutlass.range_constexpr(tile.boxes_across(shape)):
                        cute.prefetch(atom, gmem[None, self.box_at(piece, shape, index, block, page, head)])

    def tile_at(self, piece: Piece, i: Int32) -> Int32:
        """The number, in its row, of the piece's KV tile i."""
        return first_tile(self.spec, piece.keys) + (piece.first + i)

    def box_at(self, piece: Piece, shape: RingShape, index: Int32, block: int, page: Int32, head: Int32 | int) -> tuple:
        """The coordinates of a row's box `index`, on `page`, for a column block and one of the unit's KV heads."""
        slot = remainder(index, self.spec.page_size // self.spec.box_rows) if self.spec.page_size else index
        return (slot, 0, *((block,) if shape.by_block else ()), piece.kv_head + head, page)

    @cute.jit
    def produce(self, problem: Problem, shared: Shared, part: Int32, load: cutlass.Constexpr):
        """The work of a producer warp: every tile of the share, in order, or those that are its part of tile_producers' work.

        load: what it brings. If that leads, the first one finds the opening for all warps.
        """
        spec, issued, turn = self.spec, Int32(0), Int32(0)  # turn: as consumers count rows
        part = part if cutlass.const_expr(spec.tile_producers > 1) else Int32(0)
        opening, pages = self.open_or_read(problem, shared, part, load.leads)
        share, row = opening.share, opening.row
        index, tile = share.row, share.tile
        while unfinished(spec, share, index, tile):
            piece = make_piece(spec, problem.rows, share, index, row, tile, issued)
            upcoming = following(spec, problem.rows, problem.batch(spec), piece)
            where, more = (share.unit, upcoming), unfinished(spec, share, *upcoming)
            row, pages = self.issue(problem, shared, where, piece, pages, more, part, load)
            if cutlass.const_expr(load.leads) and (piece.first == 0) & (part == 0):
                with cute.arch.elect_one():
                    inspect_request(spec, problem.rows, index, problem.status)
            if cutlass.const_expr(spec.tile_producers > 1 and spec.query_warps > 0):
                turn += Int32(upcoming[0] > index)
                if more and upcoming[0] > index:
                    bring_following(spec, problem, shared, share, upcoming[0], row, turn, part)
            if cutlass.const_expr(spec.tile_heads > 1 and load.leads):
                prefetch_following(spec, problem, share, upcoming[0], row, more & (upcoming[0] > index) & (part == 0))
            issued += piece.stop - piece.first
            index, tile = upcoming
        if cutlass.const_expr(spec.divides_combine and load.leads):
            self.end_share(problem, shared, share, opening.row, part)

    @cute.jit
    def end_share(self, problem: Problem, shared: Shared, share: Share, row: Row, part: Int32):
        """The producer that found the opening prepares the share's end. row: the share's first."""
        if part == 0:
            prepare_end(self.spec, problem, shared, share, row)

    @cute.jit
    def open_or_read(self, problem: Problem, shared: Shared, part: Int32, leads: cutlass.Constexpr) -> tuple[Opening, Int32]:
        """(the opening, the pages of its first boxes): one producer finds and publishes them, the others read them."""
        spec = self.spec
        if cutlass.const_expr(spec.tile_producers == 1 and leads):
            opening, pages = find_opening(spec, problem, shared)
            publish(spec, shared, opening, pages)
        else:
            if cutlass.const_expr(leads) and part == 0:
                publish(spec, shared, *find_opening(spec, problem, shared))
            else:
                cute.arch.griddepcontrol_wait()
                meet(spec)
            opening, pages = read_opening(spec, problem, shared)
        return opening, pages

    @cute.jit
    def issue(
        self,
        problem: Problem,
        shared: Shared,
        where: tuple,
        piece: Piece,
        pages: Int32,
        more: Boolean,
        part: Int32,
        load: cutlass.Constexpr,
    ):
        """Issues this producer's copies for a piece, each tile once its stage is free. Lane l of `pages` has the page of box l.

        Where products overlap, K of a tile goes ahead of V of the tile before, in the order in which they are read.
        Returns open_next(where) of the next piece, if there is `more`: it is looked up once the first tile is in flight, or the
        last one (opens_late).
        """
        spec, rows, num_pages = self.spec, problem.rows, problem.rows.num_pages
        tiles_ahead, tiles = cutlass.const_expr(32 // self.boxes), piece.stop - piece.first
        upcoming, holes, found = pages, Int32(0), self.no_next(problem, num_pages)
        parts, begin = cutlass.const_expr(self.parts), self.own_tile(piece, part)
        middle = cutlass.const_expr(min(tiles_ahead // 2, tiles_ahead - parts))
        settles = cutlass.const_expr(load.scales and spec.settles_scales)
        coming = make_coming(spec) if settles else None
        # tiles by which K goes ahead of V, or loads of scales ahead of their stores
        lead = cutlass.const_expr(1 if spec.overlaps and (settles or len(load.caches) > 1) else 0)
        behind = pages  # those of the tile before
        for i in cutlass.range(begin, tiles + lead, parts, unroll=1):
            ahead, tile = remainder(i, tiles_ahead), self.tile_at(piece, i)
            if cutlass.const_expr(lead == 0) or i < tiles:
                if is_first(ahead, 0, parts):
                    pages = upcoming
                    if cutlass.const_expr(spec.source == "paged" and 0 in load.caches):
                        token = token_of_lane(spec, tile - ahead)
                        holes = find_holes(token, piece.keys, spec.box_rows, pages, num_pages, piece.index, problem.status)
                for head in self.own_heads(part):
                    place = pages, ahead * self.boxes
                    if cutlass.const_expr(len(load.caches) > 0):
                        self.issue_boxes(problem, shared, piece, i, head, place, holes, (0,) if lead else load.caches)
                    if cutlass.const_expr(load.scales and not settles):
                        self.issue_scales(problem, shared, piece, i, head, place)
                if is_first(ahead, middle, parts):  # not at 0: a select takes `pages`, and the first tiles would wait
                    upcoming = box_pages(spec, rows, piece.row.start, piece.keys, tile - ahead + tiles_ahead)
            if cutlass.const_expr(settles):
                self.pass_scales(problem, shared, piece, i, (pages, ahead * self.boxes), coming)
            elif cutlass.const_expr(lead > 0):
                if i > 0:
                    place = behind, remainder(i - 1, tiles_ahead) * self.boxes
                    self.issue_boxes(problem, shared, piece, i - 1, 0, place, holes, (1,))
                behind = pages
            if is_first(i, lead, parts) and more and cutlass.const_expr(not self.opens_late):
                found = self.open_next(problem, where, piece, load.leads)
        if (cutlass.const_expr(self.opens_late) or begin >= tiles) and more:
            found = self.open_next(problem, where, piece, load.leads)
        return found

    def own_tile(self, piece: Piece, part: Int32) -> Int32:
        """The first tile of a piece that a producer brings: of all of the share's tiles every so many is its own."""
        return Int32(0) if self.parts == 1 else (part // self.spec.tile_heads - piece.issued) & (self.parts - 1)

    def own_heads(self, part: Int32) -> Iterable[Int32 | int]:
        """The unit's KV heads whose tiles a producer brings: all, or one if producers take tiles in turn."""
        heads = self.spec.unit_heads
        return range(heads) if self.spec.tile_producers == 1 else (part % heads if heads > 1 else 0,)

    def no_next(self, problem: Problem, pages: Int32) -> tuple:
        """The result of open_next past the share's end. pages: a page past the cache."""
        return empty_row(self.spec), pages

    def open_next(self, problem: Problem, where: tuple, piece: Piece, leads: bool) -> tuple[Row, Int32]:
        """(row, box_pages) of the piece after `piece`; an empty row past the batch. where: (unit, `following` the piece)."""
        unit, (index, tile) = where
        row = open_row_or_nothing(self.spec, problem.rows, index, problem.batch(self.spec))
        keys = keys_of(self.spec, problem.rows, unit, row)
        return row, box_pages(self.spec, problem.rows, row.start, keys, first_tile(self.spec, keys) + tile)

    def ordinal(self, piece: Piece, i: Int32, head: Int32 | int) -> Int32:
        """The number, in the share's stream of tiles, of the piece's tile i of a KV head."""
        return (piece.issued + i) * self.spec.unit_heads + head

    @cute.jit
    def await_stage(self, shared: Shared, ordinal: Int32, which: cutlass.Constexpr = 0) -> Int32:
        """Waits until the stage of the share's tile `ordinal` is free, and returns it. which: as in shared.empty_barrier."""
        stage, parity = self.place_in_ring(ordinal)
        cute.arch.mbarrier_wait(empty_barrier(self.spec, shared, stage, which), parity ^ 1)
        return stage

    def place_in_ring(self, ordinal: Int32) -> tuple[Int32, Int32]:
        """(stage, parity of its full barrier) of the share's tile `ordinal`."""
        if self.spec.m_tiles > 1:  # signed: 8 warps with 16 rows of several m-tiles then spill no register (read from SASS)
            return ordinal % self.spec.num_stages, ordinal // self.spec.num_stages % 2
        return remainder(ordinal, self.spec.num_stages), quotient(ordinal, self.spec.num_stages) & 1

    def place_of_holes(self, ordinal: Int32) -> Int32:
        """The first word of holes of the share's tile `ordinal`."""
        stages = self.spec.hole_stages
        stage = self.place_in_ring(ordinal)[0] if stages == self.spec.num_stages else remainder(ordinal, stages)
        return stage * self.spec.hole_words

    @cute.jit
    def issue_boxes(
        self,
        problem: Problem,
        shared: Shared,
        piece: Piece,
        i: Int32,
        head: Int32 | int,
        place: tuple[Int32, Int32],
        holes: Int32,
        caches: cutlass.Constexpr,
    ):
        """Issues K (0), V (1) or both of the piece's tile i of a KV head, box by box.

        place: (pages, lane); the tile's pages and holes are in the lanes, or bits, from `lane` on. caches: those to issue.
        """
        spec, lane = self.spec, place[1]
        atom_k, coords_k, atom_v, coords_v = problem.caches
        coords_k, coords_v = self.from_start(piece, coords_k), self.from_start(piece, coords_v)
        smem_k, gmem_k = partition_boxes(atom_k, coords_k, shared.rings[0], spec.rings[0])
        smem_v, gmem_v = partition_boxes(atom_v, coords_v, shared.rings[1], spec.rings[1])
        # KV is read once, unless several units read the same tiles
        policy = Int64(EVICT_NORMAL if cutlass.const_expr(spec.reread) else EVICT_FIRST)
        both = (atom_k, gmem_k, smem_k, spec.rings[0]), (atom_v, gmem_v, smem_v, spec.rings[1])
        together = [(which, both[which : which + 1]) for which in caches] if spec.overlaps else [(0, both)]
        for which, tiles in together:
            stage = self.await_stage(shared, self.ordinal(piece, i, head), which)
            full = full_barrier(spec, shared, stage, which)
            with cute.arch.elect_one():
                if cutlass.const_expr(which == 0):
                    shared.holes[self.place_of_holes(self.ordinal(piece, i, head))] = (holes >> lane) & (2**self.boxes - 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full, sum(shape.tile_bytes for *_, shape in tiles))
            self.copy_boxes(piece, i, head, place, (tiles, stage, full, policy))

    @cute.jit
    def copy_boxes(self, piece: Piece, i: Int32, head: Int32 | int, place: tuple[Int32, Int32], target: tuple):
        """Issues the boxes of a tile. target: (atom, global boxes, shared boxes, shape) per cache; stage, barrier, policy."""
        (pages, lane), (caches, stage, full, policy) = place, target
        for box in cutlass.range_constexpr(self.boxes):
            page = cute.arch.shuffle_sync(pages, lane + box)
            index = self.tile_at(piece, i) * self.boxes + box
            for atom, gmem, smem, shape in caches:
                for block in cutlass.range_constexpr(tile.boxes_across(shape)):
                    source = gmem[None, self.box_at(piece, shape, index, block, page, head)]
                    cute.copy(atom, source, smem[None, box, block, stage], tma_bar_ptr=full, cache_policy=policy)

    @cute.jit
    def consume(self, piece: Piece, attention: Attention, problem: Problem, shared: Shared):
        """Attends to this warp's tiles of one piece: those whose number in the CTA's stream is the warp's turn modulo `turns`."""
        spec = self.spec
        for i in cutlass.range(self.order(piece), (piece.stop - piece.first) * spec.unit_heads, spec.turns, unroll=1):
            stage, parity = self.place_in_ring(piece.issued * spec.unit_heads + i)
            cute.arch.mbarrier_wait(full_barrier(spec, shared, stage), parity)
            place = place_of_tile(spec, piece.keys, piece.first + quotient(i, spec.unit_heads))
            holes = read_holes(spec, shared, stage)
            if cutlass.const_expr(self.zeroes_alone):
                self.zero_for_readers(shared, stage, parity, place)
            attend_tile(spec, attention, shared, stage, place, holes)
            if has_outside(spec, place):
                cute.arch.fence_proxy("async.shared", space="cta")  # zeroed V rows, before TMA writes the stage again
            cute.arch.sync_warp()
            if cutlass.const_expr(self.all_release):
                cute.arch.mbarrier_arrive(empty_barrier(spec, shared, stage))
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty_barrier(spec, shared, stage))

    @cute.jit
    def zero_for_readers(self, shared: Shared, stage: Int32, parity: Int32, place: TilePlace):
        """The first of several readers zeroes the V rows that no query row sees; the other readers wait if there are any.

        The first reader waits for its own arrival each time, which delays nobody. When all readers waited for each tile, two
        warpgroups went in step (docs/notes/kernel-log.md).
        """
        spec, zeroed = self.spec, zeroed_barrier(self.spec, shared, stage)
        if reader_of(spec) == 0:
            if has_outside(spec, place):
                zero_outside(spec, shared.rings[1][None, None, stage], place, cute.arch.lane_idx())
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(zeroed)  # each lane, for what it stored
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(zeroed, arrive_count=LANES)
            cute.arch.mbarrier_wait(zeroed, parity)
        elif has_outside(spec, place):
            cute.arch.mbarrier_wait(zeroed, parity)


def is_first(number: Int32, begin: int, parts: int) -> Boolean:
    """Whether a tile is the first one from `begin` on that a producer brings, if every `parts`-th is its own."""
    return quotient(number - begin, parts) == 0  # unsigned; two comparisons for it spill a register
