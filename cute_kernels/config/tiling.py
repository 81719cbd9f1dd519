"""How a kernel divides a problem: tiles of keys, rows of a tensor-core tile, and the warps that work on them.

A unit (head block) is one or two KV heads and a block of their packed query rows; a turn is the warps that read one tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .problem import LDMATRIX_BYTES, UNIT_BYTES, ProblemSpec

Arch = Literal["sm90", "sm80"]
Target = Literal["sm_90a", "sm_80"]
MmaScope = Literal["warp", "warpgroup"]  # who issues a tensor-core step: m16n8k16 (mma.sync), m64 (wgmma)

FRAGMENT_BYTES = 16  # bytes of a query that a lane reads at a time
TILE_M = 16  # packed query rows of one tensor-core tile
HALF_TILE_M = 8  # packed query rows of half a tile: each lane then has one row to work on instead of two
WARPGROUP = 4  # warps that issue a wgmma together
WARPGROUP_M = WARPGROUP * TILE_M  # packed query rows of a warpgroup's tile, 16 per warp
# warps that widen 8-bit tiles to 16 bits for a warpgroup's products: two beside the producers and four alone, or all but one
# producer of the only warpgroup that three others leave
WIDENING_WARPS, WIDENING_WARPS_OF_ONE = 6, 3
# (registers of a thread that attends, of any other thread), by the number of warps that attend
WIDENING_REGISTERS = {4: (232, 136), 8: (200, 56), 12: (152, 56)}  # if other warps widen tiles
OVERLAP_REGISTERS = {8: (224, 56), 12: (160, 32)}  # if products overlap, operands are f32, or 8 warps have two m-tiles each
GATHER_REGISTERS = {4: (216, 72), 8: (216, 72)}  # if the producers bring tiles token by token
# of weights in f16 where bases move lazily, one more beside scales of V's tokens, which take a bit of the weights: few tiles move
# a base if a score may lie 4.75 or 2.75 bits past it, and not 1.75 or 0.75. With a bit less, rows whose output is of weights of
# e ** -20 alone miss bf16's precision in some batches with token scales, and with 8 bits in all
LAZY_WEIGHT_BITS = 11
OTHER_REGISTERS, OF_MODIFIERS = 32, 24  # of a warpgroup's thread, beside those that registers_with_query counts
MOST_BOXES = 8  # of a tile that four producers take in turn: 32 pages are then those of four tiles
MIN_BOX_ROWS = 8  # rows of one 128-byte swizzle atom: the smallest page part that one TMA box may bring
PRODUCER_WARPS: dict[Arch, int] = {"sm90": 2, "sm80": 0}  # one brings K and V; one brings tokens' scales, or looks ahead


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
    block_rows: packed rows (query rows x query heads of a KV head) of a unit if a request may have several query rows, 8 or a
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
    def lazy_bases(self) -> bool:
        """Whether the bases of weights move lazily (device/attend/bases.py): where instructions set the pace.

        Not in warps of two m-tiles whose weights V's scales multiply, where nine tiles of ten would move one: there they follow
        the maxima.
        """
        return self.overlaps or (self.paired and not self.scales_weights)

    @property
    def rounds_bases(self) -> bool:
        """Whether weights are relative to rounded bases, which a multiply-add subtracts, and not to maxima of unscaled scores."""
        return self.overlaps or self.paired

    @property
    def merges_bases(self) -> bool:
        """Whether states merge by the bases of their weights, which need not be maxima (device/attend/bases.py)."""
        return self.rounds_bases and self.turns > 1

    @property
    def scales_values(self) -> bool:
        """Whether scales of V's tokens go into int8 elements of V as these are widened (device/kv/value_scales.py).

        Only where a warp of its own brings the scales: where crews convert them too, their tiles would come later.
        """
        return self.v_token_scale and self.v_type == "int8" and self.settles_scales

    @property
    def scales_weights(self) -> bool:
        """Whether weights are multiplied by scales of V's tokens (device/kv/scale.py)."""
        return self.v_token_scale and not self.scales_values

    @property
    def weight_bits(self) -> int:
        """As ProblemSpec.weight_bits, but fewer where bases move lazily (device/attend/bases.py)."""
        lazy = self.lazy_bases and self.v_math == "f16"
        return LAZY_WEIGHT_BITS + self.scales_weights if lazy else super().weight_bits

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
    def warp_tiles(self) -> int:
        """M-tiles that one warp attends to together: a KV tile that the warp reads and converts serves all of them."""
        if not self.several or self.by_warpgroup:
            return 1
        return min(self.row_tiles, most_warp_tiles(self.num_warps, self.padded_v_head_dim, self.splits, self.pairs_tiles))

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
        return self.row_tiles // self.warp_tiles

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
    def warps(self) -> int:
        """Warps of a CTA: the warps that attend, bring tiles and widen tiles."""
        if not self.widens_tiles and not self.register_shares:
            return self.num_warps + PRODUCER_WARPS[self.arch]
        return self.num_warps + WARPGROUP * (2 if self.widens_tiles and not self.one_crew else 1)

    @property
    def one_crew(self) -> bool:
        """Whether one crew widens both K and V, beside one producer: three warpgroups attend, and leave a fourth alone."""
        return self.widens_tiles and self.num_warps > 2 * WARPGROUP

    @property
    def widens_alike(self) -> bool:
        """Whether the crews of K and V have the same work, and so the same code: an SM's cache of code is small."""
        alike = (self.rings[0], self.wide[0], self.k_type) == (self.rings[1], self.wide[1], self.v_type)
        return self.widens_tiles and alike and not self.one_crew and (self.k_token_scale or not self.scales_values)

    @property
    def scales_keys(self) -> bool:
        """Whether elements of K are decoded with a constant factor, by the code that scales V's."""
        return self.scales_values and self.widens_alike

    @property
    def widening_warps(self) -> int:
        """Warps that widen tiles."""
        if not self.widens_tiles:
            return 0
        return WIDENING_WARPS_OF_ONE if self.one_crew else WIDENING_WARPS

    @property
    def first_widening(self) -> int:
        """The number of the first warp that widens tiles, after those that attend."""
        return 1 if self.one_crew else PRODUCER_WARPS[self.arch]

    @property
    def widening_crews(self) -> tuple[range, range]:
        """The numbers, among the widening warps, of those for K and of those for V; all of them if there is one crew for both."""
        if None in self.wide or self.one_crew:
            return range(self.widening_warps), range(self.widening_warps)
        half = self.widening_warps // 2
        return range(half), range(half, self.widening_warps)

    @property
    def producers(self) -> int:
        """Warps that bring tiles and scales: one brings K and V, another one the scales of tokens; or all bring both."""
        return self.gatherers or max(self.tile_producers, 2 if self.token_scales and not self.brings_scales else 1)

    @property
    def tile_producers(self) -> int:
        """Warps that take tiles in turn, and bring K, V and scales of theirs: four if paired warps read scales of tokens, else 1.

        Each of an SM's schedulers then has one: a scheduler with more work holds up its consumers, and with them all others
        (docs/notes/kernel-log.md). num_stages is a multiple of four, so a stage always has the same producer. The pages that a
        producer looks up at a time are those of four tiles or more.
        """
        few = self.tile_n <= MOST_BOXES * MIN_BOX_ROWS
        return WARPGROUP if self.paired and self.token_scales and few else 1

    @property
    def brings_scales(self) -> bool:
        """Whether the warps that bring K and V bring the scales of tokens as well."""
        return self.token_scales > 0 and (self.tile_producers > 1 or self.one_crew)

    @property
    def settles_scales(self) -> bool:
        """Whether the warp that brings scales of tokens leaves them as f32 for the readers of widened tiles.

        Otherwise the warps that widen K convert them, for which a long query's products wait. Not where warpgroups take turns:
        there a tile takes no longer than such a warp's chain of loads and stores (docs/notes/kernel-log.md).
        """
        return self.widens_tiles and self.token_scales > 0 and self.turns == 1 and not self.brings_scales

    @property
    def query_warps(self) -> int:
        """Warps that bring queries and settle them beside the loop, if warps are paired: assistants, or the tiles' producers.

        If there are none, the warps that attend fetch and settle queries between pieces.
        """
        return (self.assistants or self.producers) if self.paired else 0

    @property
    def assistants(self) -> int:
        """Warps beside the loop, after the producers: they bring queries, and may store pieces (KernelSpec.stores_beside)."""
        return WARPGROUP - self.producers if self.paired else 0

    @property
    def busy_warps(self) -> frozenset[int]:
        """The numbers of the warps that have work; all other warps only hand over their registers."""
        further = self.num_warps + self.first_widening
        busy = range(self.num_warps + self.producers + self.assistants)
        return frozenset((*busy, *range(further, further + self.widening_warps)))

    @property
    def register_shares(self) -> tuple[int, int] | None:
        """(registers of a thread that attends, of any other) if warpgroups exchange registers; None if all have equally many."""
        if self.widens_tiles:
            return WIDENING_REGISTERS.get(self.num_warps)
        if self.gathers:
            return GATHER_REGISTERS.get(self.num_warps)
        exchanged = self.overlaps or (self.arch == "sm90" and (self.splits or self.paired))
        return OVERLAP_REGISTERS.get(self.num_warps) if exchanged else None

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
        """KV tokens of one slab of a tile: what one TMA box brings; the whole tile for cp.async."""
        if self.arch == "sm80" or self.source == "contiguous" or self.gathers:
            return self.tile_n
        return math.gcd(self.page_size, self.tile_n)

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
    def holds_query(self) -> bool:
        """Whether the query stays in registers, which else spill (read from SASS): at head_dim 256, or 128 with one packed row.

        Warpgroups hold it over 8 bits, where shared memory's bandwidth is the limit, but not in turns in a phase.
        """
        if self.by_warpgroup:
            shares = self.register_shares if self.widens_tiles and (self.q_lens is None or self.turns == 1) else None
            return shares is not None and self.registers_with_query <= shares[0]
        if self.splits or self.warp_tiles > 1:
            return False
        return self.padded_head_dim <= (192 if self.packed_rows > 1 else 96)

    @property
    def registers_with_query(self) -> int:
        """Registers of a thread whose warpgroup holds its query: O, scores, weights, K's scales, the query, and others."""
        tile = self.tile_n // 2 + self.tile_n // 4 * (1 + self.k_token_scale)
        others = OTHER_REGISTERS + (OF_MODIFIERS if self.modifiers.functions or self.modifiers.tree_mask else 0)
        return self.padded_v_head_dim // 2 + tile + self.padded_head_dim // 4 + others

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
