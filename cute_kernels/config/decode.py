"""The knobs of a kernel of attention, and what is compiled for them.

`DecodeConfig` is what heuristics and tuned plans choose. `KernelSpec` is everything that changes generated code: equal
specs give the same kernel, and it is the key of the compile cache. What cannot be built: limits.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .modifiers import UNMODIFIED, Modifiers, QueryForm

Arch = Literal["sm90", "sm80"]
Target = Literal["sm_90a", "sm_80"]
Source = Literal["paged", "contiguous"]
TableFormat = Literal["dense", "csr", "none", "lengths", "packed"]  # the last three: contiguous, and how long its rows are
ElementType = Literal["f16", "bf16"]
StoredType = Literal["f16", "bf16", "e4m3", "e5m2", "int8"]
ScaleForm = Literal["none", "head", "token_f16", "token_f32"]
LseBase = Literal["e", "2"]
Partition = Literal["whole", "balanced", "invariant", "dealt"]
MmaScope = Literal["warp", "warpgroup"]  # who issues a tensor-core step: m16n8k16 (mma.sync), m64 (wgmma)

LOG2_E = math.log2(math.e)  # from a natural logarithm to base 2
MMA_K = 16  # depth of one m16n8k16 step
WIDENING_WARPS = 4  # those that make 16 bits of 8, where a warpgroup multiplies
# registers of a thread that attends and of the others, by warps that attend: where others widen, and where products overlap
WIDENING_REGISTERS = {4: (232, 136), 8: (176, 80)}
OVERLAP_REGISTERS = {8: (224, 56), 12: (160, 32)}
PRODUCER_WARPS: dict[Arch, int] = {"sm90": 2, "sm80": 0}  # one for K and V; one for tokens' scales, or to look ahead
TILE_M = 16  # packed query rows of one tensor-core tile
WARPGROUP = 4  # warps that issue a wgmma together
WARPGROUP_M = WARPGROUP * TILE_M  # packed query rows of its tile: 16 are each warp's
HALF_TILE_M = 8  # those that leave a lane one row to work on, of its two
MAX_TILE_ELEMENTS = 8192  # tile_n x padded head_dim of a 16-row tile: above, registers spill (read from SASS)
MIN_BOX_ROWS = 8  # rows of one 128-byte swizzle atom: the smallest page part that one TMA box may bring
SMEM_BYTES = {"sm_90a": 232_448, "sm_80": 101_376}  # what one CTA may use (227 KiB; 99 KiB serves 8.0, 8.6 and 8.9)
ELEMENT_BYTES: dict[StoredType, int] = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "int8": 1}
LDMATRIX_BYTES = 32  # of a token that one ldmatrix.x4 brings: rows of the caches are padded to it
UNIT_BYTES = 2  # tiles are kept, moved and read in units of 16 bits, whatever they hold
SCALE_BYTES = 4  # of a token's scale in shared memory
WEIGHT_BITS = 14  # softmax weights reach 2 ** 14 where P is f16, so that those 2 ** 38 times smaller still count
TWO_CTAS_HEAD_DIM = 128  # above, two CTAs need more registers than an SM has
MERGE_PADDING = {2: 8, 1: 16}  # f32 between rows of the merge buffer: then a warp's stores, of 8 or 16 bytes, hit every bank
PIECE_ELEMENTS = {1: 49_152, 2: 16_384}  # of K and V that stream while a piece is opened, merged and stored, by CTAs an SM
SHARE_BYTES = 32_768  # KV bytes of the smallest share of a CTA
MIN_TILES = 2  # no cut leaves less of a row on either side
MAX_BLOCKS = 32  # parts of a row under the invariant partition
MIN_BLOCK = 16  # tiles of the smallest of them
SLOTS: dict[Partition, int] = {  # partial states that a CTA may leave in the workspace
    "whole": 0,
    "dealt": 0,
    "balanced": 2,  # of the row it continues and of the row it opens
    "invariant": 2 * MAX_BLOCKS,  # every block of the row it works on alone and of the row it opens for others
}
LINE_BYTES = 128  # of a cache line
LINE_WORDS = 8  # words of a state in a cache line: fewer columns are not worth a CTA (device/combine/combine.py)
PARTS_IN_FLIGHT = 4  # parts that a thread of the combine waits for together: few rows have more, and each costs instructions
MOST_PIECES = 512  # of a row whose combine is divided; beyond, the CTA of its last piece does it alone
MANY_ROWS = 32  # packed rows: with more, and so many columns for each CTA of a crew, a thread combines one pair at a time
TWO_QUERIES = 4 * 128  # m-tiles x padded head_dim of a query that has two buffers, where warpgroups read it from shared memory
MAX_CP_ASYNC_TILE_N = 32  # each lane of a warp looks up the page of one token of the tile


@dataclass(frozen=True)
class DecodeConfig:
    """Knobs of one launch: KV tokens a tile, tiles in shared memory, consumer warps, CTAs of the persistent grid an SM.

    unit_heads: KV heads that a CTA takes together. mma: the scope of its tensor-core steps.
    """

    tile_n: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int
    unit_heads: int = 1
    mma: MmaScope = "warp"


@dataclass(frozen=True)
class RingShape:
    """A ring of tiles of K, or of V: tile_n tokens of `units` units of 16 bits, `box_rows` tokens a slab (mainloop/tile.py).

    by_block: column blocks lie one behind the other, as a wgmma reads them, not slabs; a box then brings one block.
    """

    tile_n: int
    box_rows: int
    units: int
    num_stages: int
    by_block: bool = False

    @property
    def column_block(self) -> int:
        """Units of one swizzled column block: the largest of 16, 32 and 64 that divides a row."""
        return math.gcd(self.units, 64)

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return self.tile_n * self.units * UNIT_BYTES


@dataclass(frozen=True)
class KernelSpec:
    """Everything that changes the generated code of a decode kernel. Hashable; the compile cache's key.

    arch: the mainloop ("sm90": one TMA producer warp and a ring of mbarriers; "sm80": a cp.async ring per warp).
    target: what it is compiled for. element_type: of q and out; k_type, v_type: what the caches store. k_scale, v_scale: "head"
    for a scale a KV head or one for all, "token_..." for one a token and KV head.
    vector_bytes: bytes one cp.async moves (16 for TMA). page_size: 0 when contiguous.
    partition: how rows are divided between CTAs. "whole": not at all; "balanced": wherever the shares of the CTAs end;
    "invariant": at places that depend on the row's length only. Parts of a row meet in the workspace. "dealt": not at all, and
    units of long queries go to the CTAs one by one (device/schedule/dealing.py).
    unit_heads: KV heads of a unit, the share of a row that one CTA works on at a time.
    query: how many query rows a request has; where it may be several, block_rows: packed rows (query rows x query heads of a KV
    head) that a unit holds, 8 or m-tiles of 16, each attended to by a warp of its own; many_blocks: whether a request may have
    more. modifiers: of the scores. mma: "warpgroup": four warps with m-tiles beside each other multiply them together; block_rows
    is then above 0 for one query row a request, too.
    """

    arch: Arch
    target: Target
    source: Source
    table_format: TableFormat
    element_type: ElementType
    k_type: StoredType
    v_type: StoredType
    k_scale: ScaleForm
    v_scale: ScaleForm
    head_dim: int
    group_size: int
    page_size: int
    vector_bytes: int
    tile_n: int
    num_stages: int
    num_warps: int
    partition: Partition
    lse_base: LseBase
    unit_heads: int = 1
    query: QueryForm = "one"
    block_rows: int = 0
    many_blocks: bool = False
    modifiers: Modifiers = UNMODIFIED
    mma: MmaScope = "warp"

    @property
    def plain(self) -> bool:
        """Whether a request has one query row whose scores are only scaled: such a kernel takes no further operands."""
        return self.query == "one" and self.modifiers == UNMODIFIED

    @property
    def several(self) -> bool:
        """Whether a request may have several query rows."""
        return self.query != "one"

    @property
    def row_tiles(self) -> int:
        """M-tiles of a unit."""
        return max(1, self.block_rows // TILE_M)

    @property
    def warp_tiles(self) -> int:
        """M-tiles that one warp attends to together: what it reads and converts of a KV tile serves all of them."""
        if not self.several or self.by_warpgroup:
            return 1
        return min(self.row_tiles, most_warp_tiles(self.num_warps, self.padded_head_dim))

    @property
    def by_warpgroup(self) -> bool:
        """Whether warpgroups issue the tensor-core steps."""
        return self.mma == "warpgroup"

    @property
    def widens_tiles(self) -> bool:
        """Whether tiles of 8 bits are widened to 16 in shared memory, from which alone wgmma reads K and V."""
        return self.by_warpgroup and min(self.k_bytes, self.v_bytes) == 1

    @property
    def overlaps(self) -> bool:
        """Whether a warpgroup has the next tile's Q K^T under way while it weighs a tile's scores (mainloop/overlap.py)."""
        return self.by_warpgroup and self.turns == 1

    @property
    def readers(self) -> int:
        """Warps that read a KV tile, for warp_tiles m-tiles of its unit each."""
        return self.row_tiles // self.warp_tiles

    @property
    def turns(self) -> int:
        """Groups of `readers` warps, which take KV tiles in turn."""
        return self.num_warps // self.readers

    @property
    def warps(self) -> int:
        """Warps of a CTA: those that attend, and those that bring tiles and widen them."""
        if not self.widens_tiles and not self.register_shares:
            return self.num_warps + PRODUCER_WARPS[self.arch]
        return self.num_warps + WARPGROUP + (WIDENING_WARPS if self.widens_tiles else 0)

    @property
    def register_shares(self) -> tuple[int, int] | None:
        """Registers of a thread that attends and of another, where warpgroups exchange them; None where all have as many."""
        if self.widens_tiles:
            return WIDENING_REGISTERS.get(self.num_warps)
        return OVERLAP_REGISTERS.get(self.num_warps) if self.overlaps else None

    @property
    def reread(self) -> bool:
        """Whether several units read the same KV tiles."""
        return self.many_blocks or (not self.several and self.group_size > self.unit_m)

    @property
    def unit_rows(self) -> int:
        """Query heads of a unit's KV heads."""
        return self.group_size * self.unit_heads

    @property
    def unit_m(self) -> int:
        """Rows of a unit's tensor-core tiles where a request has one query row."""
        return self.block_rows or TILE_M

    @property
    def split(self) -> bool:
        """Whether rows may be cut between CTAs, so that partial states go through the workspace."""
        return SLOTS[self.partition] > 0

    @property
    def dealt(self) -> bool:
        """Whether blocks of query rows, each with all its keys, are dealt to the CTAs (device/schedule/dealing.py)."""
        return self.partition == "dealt"

    @property
    def divides_combine(self) -> bool:
        """Whether the CTAs of a cut row divide its combine (device/schedule/crew.py)."""
        return self.partition == "balanced"

    @property
    def padded_head_dim(self) -> int:
        """head_dim rounded up to the columns that one ldmatrix.x4 brings of the narrower cache."""
        return padded_head_dim(self.head_dim, min(self.k_bytes, self.v_bytes))

    @property
    def q_bytes(self) -> int:
        """Bytes of an element of q, and of out."""
        return ELEMENT_BYTES[self.element_type]

    @property
    def k_bytes(self) -> int:
        """Bytes of an element of K."""
        return ELEMENT_BYTES[self.k_type]

    @property
    def v_bytes(self) -> int:
        """Bytes of an element of V."""
        return ELEMENT_BYTES[self.v_type]

    @property
    def k_math(self) -> ElementType:
        """The type of the operands of Q K^T: f16 holds every 8-bit element exactly."""
        return "f16" if self.k_bytes == 1 else self.element_type

    @property
    def v_math(self) -> ElementType:
        """The type of the operands of P V."""
        return "f16" if self.v_bytes == 1 else self.element_type

    @property
    def lane_rows(self) -> int:
        """Rows of a tensor-core tile in use that one lane holds, of its two: up to 8 query heads leave the second unused."""
        return 1 if self.packed_rows <= HALF_TILE_M else 2

    @property
    def rescales_query(self) -> bool:
        """Whether rows of the query are multiplied by a power of two and a sign (device/attend/query_range.py)."""
        return self.k_bytes == 1 or self.k_scale == "head"

    @property
    def k_token_scale(self) -> bool:
        """Whether K has a scale a token."""
        return self.k_scale.startswith("token")

    @property
    def v_token_scale(self) -> bool:
        """Whether V has a scale a token."""
        return self.v_scale.startswith("token")

    @property
    def token_scales(self) -> int:
        """How many of K and V have a scale a token."""
        return self.k_token_scale + self.v_token_scale

    @property
    def weight_bits(self) -> int:
        """Softmax weights are at most 2 ** weight_bits."""
        return WEIGHT_BITS if self.v_math == "f16" else 0

    @property
    def rings(self) -> tuple[RingShape, RingShape]:
        """The rings of K and V tiles in shared memory."""
        k_units, v_units = (self.padded_head_dim * nbytes // UNIT_BYTES for nbytes in (self.k_bytes, self.v_bytes))
        shape, stages = (self.tile_n, self.box_rows), self.num_stages
        k_by_block, v_by_block = (self.by_warpgroup and nbytes > 1 for nbytes in (self.k_bytes, self.v_bytes))
        return RingShape(*shape, k_units, stages, k_by_block), RingShape(*shape, v_units, stages, v_by_block)

    @property
    def wide(self) -> tuple[RingShape | None, RingShape | None]:
        """The rings of K and V tiles that are widened to 16 bits; None where they are not."""
        shape = RingShape(self.tile_n, self.tile_n, self.padded_head_dim, self.wide_stages, by_block=True)
        k_wide, v_wide = (shape if self.by_warpgroup and nbytes == 1 else None for nbytes in (self.k_bytes, self.v_bytes))
        return k_wide, v_wide

    @property
    def wide_stages(self) -> int:
        """Widened tiles: each turn reads one, or where products overlap two, while the next is widened. 0 where none is."""
        return max(2, self.turns + 1) + self.overlaps if self.widens_tiles else 0

    @property
    def stage_turns(self) -> int:
        """Turns that share the stages of a ring: these are a multiple, so that each has one reader. All widen together."""
        return 1 if self.widens_tiles else self.turns

    @property
    def box_rows(self) -> int:
        """KV tokens of one slab of a tile: what one TMA box brings; the whole tile for cp.async."""
        if self.arch == "sm80" or self.source == "contiguous":
            return self.tile_n
        return math.gcd(self.page_size, self.tile_n)

    @property
    def hole_tokens(self) -> int:
        """KV tokens that one page lookup serves: those of a TMA box, or one for cp.async."""
        return self.box_rows if self.arch == "sm90" else 1

    @property
    def packed_rows(self) -> int:
        """Packed rows that a unit holds at most."""
        return self.block_rows if self.several else packed_rows(self.unit_rows, self.unit_m)

    @property
    def m_tiles(self) -> int:
        """Units that share the KV heads of one where a request has one query row: a block of query heads each."""
        return 1 if self.several else m_tiles(self.unit_rows, self.unit_m)

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V of one tile."""
        return self.tile_n * self.padded_head_dim * (self.k_bytes + self.v_bytes)

    @property
    def piece_cost(self) -> int:
        """What opening a piece of work costs, in tiles."""
        return max(1, PIECE_ELEMENTS[self.min_ctas_per_sm] // (2 * self.tile_n * self.padded_head_dim * self.unit_heads))

    @property
    def min_share(self) -> int:
        """Tiles of a CTA's smallest share: at least twice MIN_TILES, so that two cuts never meet."""
        return max(2 * MIN_TILES, SHARE_BYTES // (self.tile_bytes * self.unit_heads))

    @property
    def holds_query(self) -> bool:
        """Whether the query stays in registers: at head_dim 256, or 128 with one query head, others would spill (by SASS)."""
        return not self.by_warpgroup and self.warp_tiles == 1 and self.padded_head_dim <= (192 if self.packed_rows > 1 else 96)

    @property
    def query_buffers(self) -> int:
        """Two: the next row's query comes while this one's is in use. One where both would take the ring's room."""
        if self.dealt:
            return 2 if self.smem_with(2) <= SMEM_BYTES[self.target] else 1
        if self.by_warpgroup:
            return 2 if self.row_tiles * self.padded_head_dim <= TWO_QUERIES and not self.widens_tiles else 1
        return 1 if self.row_tiles > 2 and self.holds_query else 2

    @property
    def query_tile(self) -> RingShape:
        """The query as tensor-core steps of a warpgroup read it: each buffer a stage."""
        return RingShape(self.block_rows, self.block_rows, self.padded_head_dim, self.query_buffers)

    @property
    def merge_floats(self) -> int:
        """f32 of the buffer in which the warps' states merge: of each warp and packed row its padded output, maximum and sum.

        At least what the combine needs (device/combine/combine.py): four of each thread's pairs of columns. Warpgroups merge in
        registers: one output of each packed row, its lse, and a maximum and a sum of each turn; with one turn nothing merges.
        """
        combine = self.num_warps * 4 * 32 * self.column_pairs
        if self.overlaps:  # no states meet: each goes from registers to memory
            return combine if self.split else 0
        states = self.packed_rows * (self.merge_columns + 1 + 2 * self.turns)
        if not self.by_warpgroup:
            states = self.turns * self.packed_rows * (self.merge_columns + 2)
        return max(states, combine)

    @property
    def row_pairs(self) -> int:
        """Pairs of neighbouring columns of a packed row's output."""
        return self.padded_head_dim // 2

    @property
    def column_pairs(self) -> int:
        """Neighbouring pairs of columns that a thread stores together: two where a state has more pairs than the CTA threads."""
        if self.by_warpgroup:
            return 4
        return 1 if self.packed_rows * self.row_pairs <= 32 * self.num_warps else 2

    @property
    def combine_pairs(self) -> int:
        """Those that it combines together. With 64 packed rows and 16 parts two take 2.2 us longer than one after the other."""
        return 1 if self.packed_rows > MANY_ROWS and not self.by_warpgroup else self.column_pairs

    @property
    def merge_columns(self) -> int:
        """f32 from a row of the merge buffer to the next."""
        return self.padded_head_dim + MERGE_PADDING[self.v_bytes]

    @property
    def min_ctas_per_sm(self) -> int:
        """CTAs that an SM's registers must hold, a limit to the compiler: 168 a thread for two CTAs of five warps."""
        two = self.padded_head_dim <= TWO_CTAS_HEAD_DIM and 2 * self.smem_bytes <= SMEM_BYTES[self.target]
        return 2 if self.arch == "sm90" and self.num_warps <= 4 and two else 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes: rings of tiles and their scales, two queries, the merge, barriers, and 1 KiB."""
        return self.smem_with(self.query_buffers)

    def smem_with(self, query_buffers: int) -> int:
        """smem_bytes with so many queries."""
        stage = self.tile_bytes + self.token_scales * self.tile_n * SCALE_BYTES
        barriers = 2 * 8 + 4 + 8 * self.token_scales  # full, empty, the tile's holes, where in its words the scales are
        query = query_buffers * self.row_tiles * TILE_M * self.padded_head_dim * self.q_bytes
        query += 2 * (self.row_tiles - 1) * TILE_M * 4  # the inverses of further m-tiles
        query += 1024 if self.by_warpgroup else 0  # alignment
        barriers += 8 if self.readers > 1 else 0  # zeroed
        barriers += 16 if self.overlaps else 0  # full and empty ones of V alone
        wide = sum(shape.tile_bytes * shape.num_stages for shape in self.wide if shape) + 16 * self.wide_stages
        rest = MOST_PIECES + 1024  # alignment, words
        return self.num_stages * (stage + barriers) + query + wide + 4 * self.merge_floats + rest


def most_warp_tiles(num_warps: int, padded_head_dim: int) -> int:
    """M-tiles for which a warp has registers: with more than 4 warps each has fewer than two outputs of 128 columns take."""
    return 2 if num_warps <= 4 and padded_head_dim <= 128 else 1


def packed_rows(group_size: int, block_rows: int = TILE_M) -> int:
    """Rows of a unit of `block_rows` that hold a query head."""
    return min(group_size, block_rows)


def m_tiles(group_size: int, block_rows: int = TILE_M) -> int:
    """Units of `block_rows` that hold the query heads of one KV head."""
    return -(-group_size // block_rows)


def grid_ctas(units: int, sm_count: int, ctas_per_sm: int) -> int:
    """CTAs of the persistent grid: as many slices of the batch as fit, at least one, for each of `units` (KV head, m-tile)."""
    return units * max(1, sm_count * ctas_per_sm // units)


def padded_head_dim(head_dim: int, element_bytes: int) -> int:
    """head_dim rounded up to a multiple of the columns that one ldmatrix.x4 brings: 16 of 16 bits, 32 of 8."""
    columns = LDMATRIX_BYTES // element_bytes
    return -(-head_dim // columns) * columns
