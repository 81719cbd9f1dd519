"""How a kernel divides a problem: tiles of keys, rows of a tensor-core tile, and the warps that attend to them.

A unit (head block) is one or two KV heads and a block of their packed query rows; a turn is the warps that read one tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .problem import LDMATRIX_BYTES, UNIT_BYTES, ElementType, ProblemSpec, StoredType

Arch = Literal["sm90", "sm80"]
Target = Literal["sm_90a", "sm_80"]
MmaScope = Literal["warp", "warpgroup"]  # who issues a tensor-core step: m16n8k16 (mma.sync), m64 (wgmma)

FRAGMENT_BYTES = 16  # bytes of a query that a lane reads at a time
TILE_M = 16  # packed query rows of one tensor-core tile
HALF_TILE_M = 8  # packed query rows of half a tile: each lane then has one row to work on instead of two
WARPGROUP = 4  # warps that issue a wgmma together
WARPGROUP_M = WARPGROUP * TILE_M  # packed query rows of a warpgroup's tile, 16 per warp
INT8_POWER = 7  # an int8 in bf16 is 2 ** -7 of its value (device/kv/codec.py)
# most rows of a TMA box of widened tiles with scales of tokens. Prompts over int8 are 0.5 to 2% later with 32, and 3% with 8;
# over e4m3, without such scales, 1% sooner with 32, and with three warpgroups up to 1.2% with 64 (docs/notes/kernel-log.md)
SMALL_BOX = 16
MIN_BOX_ROWS = 8  # rows of one 128-byte swizzle atom: the smallest page part that one TMA box may bring


@dataclass(frozen=True)
class RingShape:
    """A ring of tiles of K or of V: tile_n tokens of `units` 16-bit units, in slabs of `box_rows` tokens (mainloop/tile.py).

    by_block: a tile consists of column blocks, as a wgmma reads it, instead of slabs; a TMA box then brings one block.
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
    def lane_columns(self) -> int:
        """Neighbouring columns of f32, two to four, that a lane loads of a row at once (device/attend/split_mma.py)."""
        return self.column_block // 16

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return self.tile_n * self.units * UNIT_BYTES


@dataclass(frozen=True, kw_only=True)
class TilingSpec(ProblemSpec):
    """The fields that say how tiles are moved and multiplied.

    arch: the mainloop ("sm90": one TMA producer warp and a ring of mbarriers; "sm80": a cp.async ring per warp, or one that all
    warps share). target: what the kernel is compiled for. unit_heads: KV heads of a unit, which one CTA works on at a time.
    block_rows: packed rows (query rows x query heads) of a unit if a request may have several query rows, 8 or a
    multiple of 16 (m-tiles); many_blocks: whether a request may have more. mma: "warpgroup": four warps with neighbouring
    m-tiles multiply together; block_rows is then above 0 also if a request has one query row.
    """

    arch: Arch
    target: Target
    tile_n: int
    num_stages: int
    num_warps: int
    unit_heads: int = 1
    block_rows: int = 0
    many_blocks: bool = False
    mma: MmaScope = "warp"

    @property
    def by_warpgroup(self) -> bool:
        """Whether warpgroups issue the tensor-core steps."""
        return self.mma == "warpgroup"

    def math_of(self, stored: StoredType) -> ElementType:
        """As ProblemSpec.math_of, but bf16 for int8 where more than 16 rows of bf16 queries are multiplied together.

        bf16 holds each int8 exactly, too, and its range leaves the query, weights and units alone: instructions set the pace. P
        then has bf16's precision, as over 16 bits.
        """
        if stored == "int8" and self.element_type == "bf16" and (self.by_warpgroup or self.paired):
            return "bf16"
        return super().math_of(stored)

    @property
    def brings_rows(self) -> bool:
        """Whether a warp brings whole rows of a query: to rescale them, or in the codec's order of columns."""
        return self.rescales_query or (self.k_bytes == 1 and not self.by_warpgroup)

    @property
    def decoded_powers(self) -> tuple[int, int]:
        """K's and V's elements are decoded as 2 ** -power of their values (device/kv/codec.py)."""
        every = (self.k_type, self.k_math), (self.v_type, self.v_math)
        k_power, v_power = (INT8_POWER if both == ("int8", "bf16") else 0 for both in every)
        return k_power, v_power

    @property
    def widens_tiles(self) -> bool:
        """Whether tiles of 8 bits are widened to 16 in shared memory, from which alone wgmma reads K and V."""
        return self.by_warpgroup and min(self.k_bytes, self.v_bytes) == 1

    @property
    def overlaps(self) -> bool:
        """Whether a warpgroup has the next tile's Q K^T under way during the softmax of a tile (mainloop/overlap.py)."""
        return self.by_warpgroup and (self.turns == 1 or self.widens_tiles)

    @property
    def settles_alone(self) -> bool:
        """Whether each warp settles its rows in its registers: products overlap, and one group of warps attends to all tiles."""
        return self.overlaps and self.turns == 1

    @property
    def settles_halves(self) -> bool:
        """Whether two warpgroups that attended in turn settle half of the columns each, if a piece is a part of a row.

        Without widened tiles one of them settles all: 0.7 us sooner at 1 x 8k, 1.1 at 8 x 8k (docs/notes/kernel-log.md). So
        it is in a phase of a mixed kernel, where a register would spill.
        """
        return self.overlaps and self.turns > 1 and self.q_lens is None

    @property
    def rounds_bases(self) -> bool:
        """Whether weights are relative to rounded bases, which a multiply-add subtracts, and not to maxima of unscaled scores."""
        return self.overlaps or self.paired

    @property
    def merges_bases(self) -> bool:
        """Whether states merge by the bases of their weights, which need not be maxima (device/attend/bases.py)."""
        return self.rounds_bases and self.turns > 1

    @property
    def gathers(self) -> bool:
        """Whether the producers bring tiles token by token (mainloop/gather.py), as no TMA box can bring such pages."""
        return self.overlaps and self.source == "paged" and self.page_size % MIN_BOX_ROWS > 0

    @property
    def gatherers(self) -> int:
        """Warps that bring tiles token by token, each 32 tokens of every tile; 0 if tiles are not gathered."""
        return self.token_groups if self.gathers else 0

    @property
    def shares_ring(self) -> bool:
        """Whether the warps of a CTA fill one ring by cp.async together, and attend to each tile of it (mainloop/block.py)."""
        return self.arch == "sm80" and self.row_tiles > 1

    @property
    def row_tiles(self) -> int:
        """M-tiles of a unit."""
        return max(1, self.block_rows // TILE_M)

    @property
    def tile_heads(self) -> int:
        """KV heads of a unit, each of which has m-tiles of its own. If a request has one query row, they have one m-tile."""
        return self.unit_heads if self.several else 1

    @property
    def warp_tiles(self) -> int:
        """M-tiles that one warp attends to together: a KV tile that the warp reads and converts serves all of them."""
        if not self.several or self.by_warpgroup:
            return 1
        of_head = max(1, self.row_tiles // self.tile_heads)
        return min(of_head, most_warp_tiles(self.num_warps, self.padded_v_head_dim, self.splits, self.pairs_tiles))

    @property
    def pairs_tiles(self) -> bool:
        """Whether 8 warps may attend to two m-tiles each, with registers that the other warps give up.

        Only over 8 bits, which every reader of a tile converts anew. A phase of a mixed kernel has the registers of the phase for
        long queries instead.
        """
        return self.arch == "sm90" and self.several and self.q_lens is None and min(self.k_bytes, self.v_bytes) == 1

    @property
    def paired(self) -> bool:
        """Whether more than a warpgroup's warps attend to several m-tiles each."""
        return self.warp_tiles > 1 and self.num_warps > WARPGROUP

    @property
    def readers(self) -> int:
        """Warps that read a KV tile, each for warp_tiles m-tiles of the unit."""
        return max(1, self.row_tiles // (self.warp_tiles * self.tile_heads))

    @property
    def turns(self) -> int:
        """How many groups of `readers` warps there are; the groups take KV tiles in turn."""
        return self.num_warps // self.readers

    @property
    def stage_turns(self) -> int:
        """Turns that divide a ring's stages, so that a stage always has the same readers; 1 if K and V are both widened.

        num_stages is a multiple of it.
        """
        return self.turns if None in self.wide else 1

    @property
    def reread(self) -> bool:
        """Whether several units read the same KV tiles."""
        return self.many_blocks or (not self.several and self.group_size > self.unit_m)

    @property
    def unit_rows(self) -> int:
        """Query heads of a unit's KV heads: its packed rows for one query row."""
        return self.group_size * self.unit_heads

    @property
    def unit_m(self) -> int:
        """Rows of a unit's tensor-core tiles if a request has one query row."""
        return self.block_rows or TILE_M

    @property
    def lane_rows(self) -> int:
        """Rows in use of the two rows of a tensor-core tile that one lane holds: up to 8 packed rows leave the second unused."""
        return 1 if self.packed_rows <= HALF_TILE_M else 2

    @property
    def packed_rows(self) -> int:
        """The most packed rows that a unit holds."""
        return self.block_rows if self.several else packed_rows(self.unit_rows, self.unit_m)

    @property
    def m_tiles(self) -> int:
        """Units that share the same KV heads, each with a block of query heads; 1 if a request may have several query rows."""
        return 1 if self.several else m_tiles(self.unit_rows, self.unit_m)

    @property
    def rings(self) -> tuple[RingShape, RingShape]:
        """The rings of K and V tiles in shared memory."""
        k_units = self.padded_head_dim * self.k_bytes // UNIT_BYTES
        v_units = self.padded_v_head_dim * self.v_bytes // UNIT_BYTES
        shape, stages = (self.tile_n, self.box_rows), self.num_stages
        k_by_block, v_by_block = (self.by_warpgroup and nbytes > 1 for nbytes in (self.k_bytes, self.v_bytes))
        return RingShape(*shape, k_units, stages, k_by_block), RingShape(*shape, v_units, stages, v_by_block)

    @property
    def wide(self) -> tuple[RingShape | None, RingShape | None]:
        """The rings of K and V tiles that are widened to 16 bits; None for a cache whose tiles are not."""
        found: list[RingShape | None] = []
        for nbytes, columns in ((self.k_bytes, self.padded_head_dim), (self.v_bytes, self.padded_v_head_dim)):
            shape = RingShape(self.tile_n, self.tile_n, columns, self.wide_stages, by_block=True)
            found.append(shape if self.by_warpgroup and nbytes == 1 else None)
        return found[0], found[1]

    @property
    def wide_stages(self) -> int:
        """Stages of widened tiles; 0 if no tile is. One turn reads one while the next is widened; two turns have one each."""
        return 2 if self.widens_tiles else 0

    @property
    def wide_scale_stages(self) -> int:
        """Stages of widened tiles' scales: a turn still reads those of one tile when K of its next tile is widened."""
        return self.wide_stages + self.turns if self.widens_tiles else 0

    @property
    def lane_scales(self) -> int:
        """Words from a lane's scales of a widened tile to the next lane's: four lanes read 16 bytes each, no bank twice."""
        return self.tile_n // 4 + (4 if self.tile_n % 64 == 0 else 0)

    @property
    def factor_words(self) -> int:
        """Words of a tile's factors: one and its offset for each token (device/kv/value_scales.py)."""
        return 2 * self.tile_n

    @property
    def box_rows(self) -> int:
        """KV tokens of one slab of a tile: what one TMA box brings; the whole tile for cp.async.

        At most SMALL_BOX rows if tiles are widened, tokens have scales, and two warpgroups attend to the same tiles.
        """
        if self.arch == "sm80" or self.source == "contiguous" or self.gathers:
            return self.tile_n
        rows = math.gcd(self.page_size, self.tile_n)
        two = self.num_warps == 2 * WARPGROUP and self.turns == 1
        return math.gcd(rows, SMALL_BOX) if self.widens_tiles and self.token_scales and two else rows

    @property
    def hole_tokens(self) -> int:
        """KV tokens that one page lookup serves: those of a TMA box, or one for cp.async."""
        return self.box_rows if self.arch == "sm90" and not self.gathers else 1

    @property
    def hole_stages(self) -> int:
        """Stages of holes: as many as tiles of K that wait, narrow or widened, until a turn reads their holes."""
        return self.num_stages + (self.wide_stages if self.wide[0] else 0)

    @property
    def hole_words(self) -> int:
        """Words of a tile that mark its holes (tokens whose page is not in the cache), one bit per page lookup."""
        return self.gatherers or 1

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V of one tile."""
        return self.tile_n * (self.padded_head_dim * self.k_bytes + self.padded_v_head_dim * self.v_bytes)

    @property
    def scale_groups(self) -> int:
        """Groups of 32 tokens of a tile, at least two: each has a word that says where its scales lie (device/kv/scale.py)."""
        return max(2, self.token_groups)

    @property
    def token_groups(self) -> int:
        """Groups of 32 tokens of a tile: one token per lane of a warp."""
        return -(-self.tile_n // 32)

    @property
    def query_fragment(self) -> tuple[int, int]:
        """(elements per lane, columns) of a query that are read at a time, 16 bytes per lane, if no warpgroup reads it."""
        return FRAGMENT_BYTES // self.q_bytes, LDMATRIX_BYTES // self.q_bytes

    @property
    def value_columns(self) -> int:
        """Neighbouring columns of a token's V that a lane reads in one access, each for another n8 step (value_column)."""
        if self.by_warpgroup:
            return 1
        return self.rings[1].lane_columns if self.splits else UNIT_BYTES // self.v_bytes


def most_warp_tiles(num_warps: int, padded_head_dim: int, splits: bool = False, pairs: bool = False) -> int:
    """M-tiles for which a warp has registers: two outputs of 128 columns take more than an equal share for 8 warps.

    splits: whether operands are f32, whose parts take the registers of a second m-tile. pairs: TilingSpec.pairs_tiles.
    """
    return 2 if num_warps <= (8 if pairs else 4) and padded_head_dim <= 128 and not splits else 1


def packed_rows(group_size: int, block_rows: int = TILE_M) -> int:
    """Rows of a unit of `block_rows` rows that hold a query head."""
    return min(group_size, block_rows)


def m_tiles(group_size: int, block_rows: int = TILE_M) -> int:
    """Units of `block_rows` rows that hold the query heads of one KV head."""
    return -(-group_size // block_rows)
