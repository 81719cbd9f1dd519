"""The knobs of an attention kernel, and the spec that is compiled for them.

`DecodeConfig` is what heuristics and tuned plans choose. `KernelSpec` is everything that changes generated code: equal
specs give the same kernel, and a spec is the key of the compile cache. limits.py says which specs cannot be built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .tiling import TILE_M, MmaScope, RingShape
from .warps import WarpSpec

Partition = Literal["whole", "balanced", "invariant", "dealt", "dealt_pieces"]
DEALT: tuple[Partition, ...] = ("dealt", "dealt_pieces")  # query blocks of long queries, whole or in pieces

LOG2_E = math.log2(math.e)  # from a natural logarithm to base 2
MAX_TILE_ELEMENTS = 8192  # tile_n x padded head_dim of a 16-row tile: above this, registers spill (read from SASS)
MAX_SPLIT_TILE_ELEMENTS = 2048  # the same for f32, except that a tile always has at least 16 tokens
SMEM_BYTES = {"sm_90a": 232_448, "sm_80": 101_376}  # what one CTA may use (227 KiB; 99 KiB serves 8.0, 8.6 and 8.9)
SCALE_BYTES = 4  # of a token's scale in shared memory
TWO_CTAS_HEAD_DIM = 128  # above this, two CTAs need more registers than an SM has
MERGE_PADDING = {
    4: 4,
    2: 8,
    1: 16,
}  # f32 of padding after a row of the merge buffer, by V's element bytes: a warp's stores of 8 or 16 bytes hit every bank
PIECE_ELEMENTS = {1: 49_152, 2: 16_384}  # of K and V that stream while a piece is opened, merged and stored, by CTAs per SM
SHARE_BYTES = 32_768  # KV bytes of the smallest share of a CTA
MIN_TILES = 2  # no cut leaves fewer tiles of a row on either side
MAX_BLOCKS = 32  # parts of a row under the invariant partition
MIN_BLOCK = 16  # tiles of the smallest such part
SLOTS: dict[Partition, int] = {  # partial states that a CTA may leave in the workspace
    "whole": 0,
    "dealt": 0,
    "balanced": 2,  # of the row it continues and of the row it opens
    "invariant": 2 * MAX_BLOCKS,  # every block of the row it works on alone and of the row it opens for others
    "dealt_pieces": 4,  # of the items that it is dealt: blocks are cut only if there are no more (device/schedule/pieces.py)
}
MOST_PIECES_OF_BLOCK = 32  # of long queries: a lane of a warp judges each number of pieces
LEAST_PIECE = 4  # tiles of the longest block's pieces: fewer are not worth a turn
ITEM_COST, PIECE_COST = 1, 8  # tiles that an item takes beyond its own, and in addition the state of a piece and its join
CLAIMED_PIECE_COST = 12  # PIECE_COST where items are claimed: pieces of 320 rows over 8k ended 4% later than whole blocks (H100)
ARRIVAL_WORDS = 4  # words of 16 bytes after a state: how many pieces of a block have arrived, for each of up to 16 m-tiles
LINE_BYTES = 128  # of a cache line
HALF_ROWS = 32  # packed rows of a state whose words are of f16 (device/combine/halves.py)
LINE_WORDS = 8  # words of a state in a cache line: fewer columns are not worth a CTA (device/combine/combine.py)
WORDS_AN_LSE = 4  # most wide words of a state for each copy of its row's lse (device/combine/partials.py)
WORDS_IN_FLIGHT = 16  # words of a state that a thread of the combine waits for together, if one CTA combines a row
PARTS_IN_FLIGHT = 4  # parts that a thread of the combine waits for together: few rows have more, and each costs instructions
MOST_PIECES = 512  # of a row whose combine is divided; with more, the CTA of the last piece combines the row alone
LANES = 32  # of a warp
KEPT_REQUESTS = 1, LANES, 2 * LANES, 4 * LANES  # whose costs a warp may keep while it finds a share
ITEMS = 2  # items (work tiles) in shared memory: the current one and the next (device/schedule/dealing.py)
NEWS = 2  # mbarriers for what the producer finds out for the share's end: crew_barrier, announced_barrier
TWO_QUERIES = 4 * 128  # up to so many m-tiles x padded head_dim, a query that warpgroups read from shared memory has two buffers
MAX_CP_ASYNC_TILE_N = 32  # each lane of a warp looks up the page of one token of the tile


@dataclass(frozen=True)
class DecodeConfig:
    """Knobs of one launch: KV tokens per tile, tiles in shared memory, consumer warps, CTAs of the persistent grid per SM.

    unit_heads: KV heads that a CTA takes together. mma: the scope of its tensor-core steps.
    """

    tile_n: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int
    unit_heads: int = 1
    mma: MmaScope = "warp"


@dataclass(frozen=True, kw_only=True)
class KernelSpec(WarpSpec):
    """Everything that changes the generated code of an attention kernel. Hashable; the compile cache's key.

    Its fields come in three groups: the problem (problem.py), tiles and warps (tiling.py, warps.py), and the schedule.
    partition: how rows are divided between CTAs. "whole": not at all; "balanced": wherever the shares (the CTAs' equal parts of
    the work) end; "invariant": at places that depend on the row's length only. The parts (partial results) of a cut row meet in
    the workspace. "dealt": rows are not cut, and query blocks of long queries go to the CTAs one by one
    (device/schedule/dealing.py). "dealt_pieces": so they do, in pieces (KV splits) if there are few blocks, and long ones
    (device/schedule/pieces.py).

    kept_requests: requests whose costs a warp keeps in registers while it finds the CTA's share, one of KEPT_REQUESTS. They are
    as few as the batch needs, as every launch waits for that warp; in a larger batch than the last it searches for the share.
    """

    partition: Partition
    kept_requests: int = KEPT_REQUESTS[-1]

    @property
    def one_request(self) -> bool:
        """Whether the batch is one request: a share then needs no sums over lanes, and no code for what follows its row.

        What a launch executes once costs 10 ns for 8 instructions: 1 x 1k takes 0.3 to 0.45 us less (docs/notes/kernel-log.md).
        """
        return self.kept_requests == 1

    @property
    def lane_requests(self) -> int:
        """Requests that each lane of a warp reads at a time."""
        return -(-self.kept_requests // LANES)

    @property
    def split(self) -> bool:
        """Whether rows may be cut between CTAs, so that partial states go through the workspace."""
        return SLOTS[self.partition] > 0

    @property
    def dealt(self) -> bool:
        """Whether blocks of query rows, each with all its keys, are dealt to the CTAs (device/schedule/dealing.py)."""
        return self.partition in DEALT

    @property
    def deals_pieces(self) -> bool:
        """Whether blocks that are dealt may be cut into pieces (KV splits), whose states meet in the workspace."""
        return self.partition == "dealt_pieces"

    @property
    def values_apart(self) -> bool:
        """Whether K and V have a producer each: of prompts over 16 bits, where one issues 32 TMA boxes a tile for pages of 16.

        Over 8 bits the crews set the pace, and in a mixed kernel it was not timed.
        """
        boxes = self.tile_n > self.box_rows and not self.gathers
        return self.dealt and boxes and not self.widens_tiles and not self.token_scales and self.q_lens is None

    @property
    def claims(self) -> bool:
        """Whether a CTA claims items when it comes to them: CTAs that serve an earlier phase come late."""
        return self.dealt and self.q_lens is not None

    @property
    def cut_cost(self) -> int:
        """Tiles that an item takes beyond ITEM_COST if its block is cut."""
        return CLAIMED_PIECE_COST if self.claims else PIECE_COST

    @property
    def most_pieces(self) -> int:
        """Bytes in shared memory, one for each piece of a cut row (device/schedule/crew.py); only 16 if items are dealt."""
        return 16 if self.dealt else MOST_PIECES

    @property
    def divides_combine(self) -> bool:
        """Whether the CTAs of a cut row divide its combine (device/schedule/crew.py)."""
        return self.partition == "balanced"

    @property
    def hears_share(self) -> bool:
        """Whether the warp that looks ahead hears of the share, as it seems to be, from the one that finds it.

        So it executes no second copy of that code, for which both would wait: a launch of few tiles begins 0.2 us sooner.
        """
        return self.looks_ahead and self.register_shares is not None and self.q_lens is None and not self.dealt

    @property
    def piece_cost(self) -> int:
        """What opening a piece (KV split) costs, in tiles."""
        columns = self.padded_head_dim + self.padded_v_head_dim
        return max(1, PIECE_ELEMENTS[self.min_ctas_per_sm] // (self.tile_n * columns * self.unit_heads))

    @property
    def min_share(self) -> int:
        """Tiles of a CTA's smallest share: at least twice MIN_TILES, so that two cuts never meet."""
        return max(2 * MIN_TILES, SHARE_BYTES // (self.tile_bytes * self.unit_heads))

    @property
    def query_buffers(self) -> int:
        """Two, so that the next row's query arrives while the current one is in use; one if two would take the ring's room."""
        if self.dealt:
            return 2 if self.smem_with(2) <= SMEM_BYTES[self.target] else 1
        if self.by_warpgroup:
            return 2 if self.row_tiles * self.padded_head_dim <= TWO_QUERIES and not self.widens_tiles else 1
        if self.shares_ring:
            return 1
        if self.splits:
            return 2 if self.row_tiles <= 2 and self.smem_with(2) <= SMEM_BYTES[self.target] else 1
        return 1 if self.row_tiles > 2 and (self.holds_query or self.tile_heads > 1) else 2

    @property
    def query_tile(self) -> RingShape:
        """The query as tensor-core steps of a warpgroup read it: each buffer a stage."""
        return RingShape(self.block_rows, self.block_rows, self.padded_head_dim, self.query_buffers)

    @property
    def merge_floats(self) -> int:
        """f32 of the buffer in which states merge: for each turn and packed row, a padded output, a maximum and a sum.

        The buffer holds at least what the combine needs (device/combine/combine.py): for the words of each thread their columns,
        a maximum and a sum. Warpgroups merge in registers and need, per packed row, one output, its lse, and a maximum and a sum
        for each turn; with one turn nothing merges.
        """
        combine = self.num_warps * 32 * (self.word_columns + 2) * self.combine_words
        if self.settles_alone:  # no states merge: each goes from registers to memory
            return combine if self.split and not self.dealt else 0
        states = self.packed_rows * (self.merge_columns + 1 + 2 * self.turns)
        if not self.by_warpgroup:
            states = self.merge_places * self.merge_rows * (self.merge_columns + 2)
        return max(states, combine)

    @property
    def folds(self) -> bool:
        """Whether the later half of the turns' states joins the first half before the merge, whose buffer all would not fit."""
        return self.paired and self.turns > 1

    @property
    def stores_beside(self) -> bool:
        """Whether the warps that bring queries also store pieces, while the others go on: long ones that others follow.

        Not under the invariant partition, where the warps that attend combine a row once its last block is stored. Not beside
        scales of tokens, where instructions set the pace: two of an SM's schedulers then have more of them (64 x 1k 7% later).
        """
        return self.folds and self.partition != "invariant" and not self.token_scales

    @property
    def merge_places(self) -> int:
        """States of a packed row in the merge buffer."""
        return self.turns // 2 if self.folds else self.turns

    @property
    def merge_rows(self) -> int:
        """Rows of a place in the merge buffer: a unit's packed rows, or those of the KV head that its warps attend to."""
        return self.packed_rows // self.tile_heads

    @property
    def ring_bytes(self) -> int:
        """Bytes of all K and V tiles; if warps share a ring, at least those of the states that lie there at a piece's end."""
        return max(self.num_stages * self.tile_bytes, 4 * self.merge_floats if self.shares_ring else 0)

    @property
    def wide_words(self) -> bool:
        """Whether a word of a state holds four columns, or eight: if states have many (device/combine/partials.py)."""
        return self.several or self.by_warpgroup

    @property
    def half_words(self) -> bool:
        """Whether a word of a state holds eight columns in f16: of many rows whose output is less precise than f16.

        Not if blocks are dealt, of which few are cut, nor in a phase of a mixed kernel: at head_dim 64 ptxas then moves values to
        uniform registers in the loop over tiles. A row has whole groups of WORDS_AN_LSE words.
        """
        several = self.wide_words and self.packed_rows >= HALF_ROWS and self.padded_v_head_dim % (8 * WORDS_AN_LSE) == 0
        return several and self.element_type == "bf16" and not self.dealt and self.q_lens is None

    @property
    def words_an_lse(self) -> int:
        """Wide words for each copy of their row's lse: one of f16 if states merge in shared memory.

        There the lanes of an lse would have to loop together to find a power of two, and ptxas makes a worse loop over tiles.
        """
        return 1 if self.half_words and not self.by_warpgroup else WORDS_AN_LSE

    @property
    def word_columns(self) -> int:
        """Columns of a word of a state."""
        if self.half_words:
            return 8
        return 4 if self.wide_words else 2

    @property
    def row_words(self) -> int:
        """Words of a packed row's output."""
        return self.padded_v_head_dim // self.word_columns

    @property
    def state_words(self) -> int:
        """Words of 16 bytes of a unit's state in the workspace; wide words also have 8 bytes of lse per words_an_lse of them.

        ARRIVAL_WORDS come last if blocks that are dealt may be cut.
        """
        words = self.packed_rows * self.row_words
        return words + (-(-words // (2 * self.words_an_lse)) if self.wide_words else 0) + self.deals_pieces * ARRIVAL_WORDS

    @property
    def store_columns(self) -> int:
        """Neighbouring columns of a result that a thread stores together: more if a state has more columns per thread.

        Of 4 f32 in the merge buffer, the eight threads that read together meet no bank twice.
        """
        columns, threads = self.packed_rows * self.padded_v_head_dim, 32 * self.num_warps
        return 4 if columns > 2 * threads else 2

    @property
    def store_groups(self) -> int:
        """Groups of store_columns that a thread stores of a row: their merge weights are computed once.

        Two where warps are paired: with four, ptxas makes a loop over tiles that takes 4 to 9% more time
        (docs/notes/kernel-log.md). Two for warpgroups: with one, 64 rows over int8 take 2 to 7% more.
        """
        if not self.wide_words or self.store_columns < 4:
            return 1
        return 2 if self.paired or self.by_warpgroup else self.words_together

    @property
    def words_together(self) -> int:
        """Words of a row that a thread merges and sends together, up to four: their merge weights are computed once.

        The number of wide words in a row is a multiple of four, since its padded columns are a multiple of 16, or of 32 for f16.
        """
        if not self.wide_words:
            return self.combine_words
        own = 1 if self.by_warpgroup else self.packed_rows * self.row_words // (32 * self.num_warps)
        return next((count for count in (4, 2) if count <= own), 1)

    @property
    def combine_words(self) -> int:
        """Words that a thread combines together."""
        if self.wide_words:
            return 2 if self.by_warpgroup and not self.half_words else 1
        return self.store_columns // 2

    @property
    def parts_in_flight(self) -> int:
        """Parts of a row that a thread of the combine waits for together.

        Twice as many where warps have registers: the 16 parts of 1 x 8k, 32 rows over 8 bits, are one round then, 0.4 us sooner.
        And of f16, whose words are half as many.
        """
        if not self.divides_combine:
            return WORDS_IN_FLIGHT // self.combine_words
        return PARTS_IN_FLIGHT * (2 if self.half_words or (self.register_shares is not None and not self.by_warpgroup) else 1)

    @property
    def merge_columns(self) -> int:
        """f32 from one row of the merge buffer to the next. A warpgroup's lanes have neighbouring columns whatever V's bytes."""
        return self.padded_v_head_dim + MERGE_PADDING[2 if self.by_warpgroup else self.v_bytes]

    @property
    def min_ctas_per_sm(self) -> int:
        """CTAs per SM for which the compiler must leave registers: 168 per thread for two CTAs of six warps.

        One if warpgroups exchange registers, since they divide all registers of an SM.
        """
        fits = self.padded_head_dim <= TWO_CTAS_HEAD_DIM and not self.splits
        two = fits and 2 * self.smem_bytes <= SMEM_BYTES[self.target]
        alone = self.num_warps > 4 or self.register_shares is not None
        return 2 if self.arch == "sm90" and two and not alone else 1

    @property
    def tile_barriers(self) -> int:
        """mbarriers of tiles: full, empty and (if there are several readers) zeroed for each stage; full and empty if widened.

        If products overlap, V has a full and an empty barrier of its own.
        """
        stage = 2 + (self.readers > 1) + 2 * self.overlaps
        return stage * self.num_stages + 4 * self.wide_stages + self.factor_barriers

    @property
    def factor_barriers(self) -> int:
        """mbarriers of factors that wait for V's crew (device/kv/value_scales.py)."""
        return self.wide_scale_stages if self.scales_values else 0

    @property
    def barrier_count(self) -> int:
        """All mbarriers: of tiles, of news for a share's end, of items, of queries (device/mainloop/shared.py)."""
        return self.tile_barriers + NEWS + (2 * ITEMS if self.dealt else 0) + self.query_barriers

    @property
    def query_barriers(self) -> int:
        """mbarriers of warps beside the loop (device/mainloop/beside.py).

        Full and empty for each query buffer, and one for a free merge buffer; if these warps store pieces, also one for a full
        merge buffer and one for the first of two states in each of its places.
        """
        return 2 * self.query_buffers + 1 + (1 + self.merge_places) * self.stores_beside if self.query_warps else 0

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes: rings of tiles and their scales, queries, the merge buffer, barriers, and 1 KiB."""
        return self.smem_with(self.query_buffers)

    @property
    def alignment_bytes(self) -> int:
        """What lies unused between the swizzled rings that a warpgroup reads, each of which begins at a multiple of 1 KiB."""
        rings = [shape.tile_bytes * shape.num_stages for shape in (*self.rings, *self.wide) if shape]
        return sum(-nbytes % 1024 for nbytes in rings) if self.by_warpgroup else 0

    def smem_with(self, query_buffers: int) -> int:
        """smem_bytes with this many query buffers."""
        groups = 4 * self.scale_groups  # a word per group: where its tokens' scales lie
        scales = 0 if self.settles_scales else self.token_scales * (self.tile_n * SCALE_BYTES + groups)
        factors = 4 * self.factor_words * self.scales_values
        wide_scales = self.token_scales * (4 * self.lane_scales * SCALE_BYTES + groups)
        query = query_buffers * self.row_tiles * TILE_M * self.padded_head_dim * self.q_bytes
        query += 2 * (self.row_tiles - 1) * TILE_M * 4  # the inverses of further m-tiles
        query += self.alignment_bytes
        wide = sum(shape.tile_bytes * shape.num_stages for shape in self.wide if shape)
        wide += self.wide_scale_stages * (wide_scales + factors) + self.scales_keys * factors
        stages = self.num_stages * scales + 4 * self.hole_stages * self.hole_words + 8 * self.tile_barriers
        rest = self.most_pieces + 1024  # alignment, words
        merge = 0 if self.shares_ring else 4 * self.merge_floats
        return self.ring_bytes + stages + query + wide + merge + rest


def grid_ctas(units: int, sm_count: int, ctas_per_sm: int) -> int:
    """CTAs of the persistent grid: as many slices of the batch as fit, at least one, for each of `units` (KV head, m-tile)."""
    return units * max(1, sm_count * ctas_per_sm // units)
