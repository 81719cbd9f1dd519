"""How the machine takes a problem: tiles of keys, rows of a tensor-core tile, and the warps that work on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .problem import LDMATRIX_BYTES, UNIT_BYTES, ProblemSpec

Arch = Literal["sm90", "sm80"]
Target = Literal["sm_90a", "sm_80"]
MmaScope = Literal["warp", "warpgroup"]  # who issues a tensor-core step: m16n8k16 (mma.sync), m64 (wgmma)

FRAGMENT_BYTES = 16  # of a query that a lane reads at a time
TILE_M = 16  # packed query rows of one tensor-core tile
HALF_TILE_M = 8  # those that leave a lane one row to work on, of its two
WARPGROUP = 4  # warps that issue a wgmma together
WARPGROUP_M = WARPGROUP * TILE_M  # packed query rows of its tile: 16 are each warp's
WIDENING_WARPS = 4  # those that make 16 bits of 8, where a warpgroup multiplies
# registers of a thread that attends and of the others, by warps that attend: where others widen, and where products overlap
WIDENING_REGISTERS = {4: (232, 136), 8: (176, 80)}
WIDENING_OVERLAP_REGISTERS = {**WIDENING_REGISTERS, 8: (200, 56)}  # the same where both do: tiles are larger
OVERLAP_REGISTERS = {8: (224, 56), 12: (160, 32)}
GATHER_REGISTERS = {4: (216, 72), 8: (216, 72)}  # the same where the others bring tiles token by token
MIN_BOX_ROWS = 8  # rows of one 128-byte swizzle atom: the smallest page part that one TMA box may bring
PRODUCER_WARPS: dict[Arch, int] = {"sm90": 2, "sm80": 0}  # one for K and V; one for tokens' scales, or to look ahead


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


@dataclass(frozen=True, kw_only=True)
class TilingSpec(ProblemSpec):
    """The fields that say how tiles are moved and multiplied.

    arch: the mainloop ("sm90": one TMA producer warp and a ring of mbarriers; "sm80": a cp.async ring per warp).
    target: what it is compiled for. unit_heads: KV heads of a unit, the share of a row that one CTA works on at a time.
    block_rows: where a request may have several query rows, packed rows (query rows x query heads of a KV head) that a unit
    holds, 8 or m-tiles of 16, each attended to by a warp of its own; many_blocks: whether a request may have more. mma:
    "warpgroup": four warps with m-tiles beside each other multiply them together; block_rows is then above 0 for one query row a
    request, too.
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
        """Whether a warpgroup has the next tile's Q K^T under way while it weighs a tile's scores (mainloop/overlap.py)."""
        return self.by_warpgroup and self.turns == 1

    @property
    def gathers(self) -> bool:
        """Whether the producers bring tiles token by token (mainloop/gather.py): pages that no TMA box can bring."""
        return self.overlaps and self.source == "paged" and self.page_size % MIN_BOX_ROWS > 0

    @property
    def gatherers(self) -> int:
        """Warps that bring tiles, where they do so token by token: each has 32 tokens of every tile."""
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
        """M-tiles that one warp attends to together: what it reads and converts of a KV tile serves all of them."""
        if not self.several or self.by_warpgroup:
            return 1
        return min(self.row_tiles, most_warp_tiles(self.num_warps, self.padded_v_head_dim, self.splits))

    @property
    def readers(self) -> int:
        """Warps that read a KV tile, for warp_tiles m-tiles of its unit each."""
        return self.row_tiles // self.warp_tiles

    @property
    def turns(self) -> int:
        """Groups of `readers` warps, which take KV tiles in turn."""
        return self.num_warps // self.readers

    @property
    def stage_turns(self) -> int:
        """Turns that share the stages of a ring: these are a multiple, so that each has one reader. All widen together."""
        return 1 if self.widens_tiles else self.turns

    @property
    def warps(self) -> int:
        """Warps of a CTA: those that attend, and those that bring tiles and widen them."""
        if not self.widens_tiles and not self.register_shares:
            return self.num_warps + PRODUCER_WARPS[self.arch]
        return self.num_warps + WARPGROUP + (WIDENING_WARPS if self.widens_tiles else 0)

    @property
    def busy_warps(self) -> frozenset[int]:
        """Those of `warps` that have work; the others only hand registers over."""
        producers = self.gatherers or (2 if self.token_scales else 1)
        widening = self.num_warps + WARPGROUP
        return frozenset((*range(self.num_warps + producers), *range(widening, widening + WIDENING_WARPS * self.widens_tiles)))

    @property
    def register_shares(self) -> tuple[int, int] | None:
        """Registers of a thread that attends and of another, where warpgroups exchange them; None where all have as many."""
        if self.widens_tiles:
            return (WIDENING_OVERLAP_REGISTERS if self.overlaps else WIDENING_REGISTERS).get(self.num_warps)
        if self.gathers:
            return GATHER_REGISTERS.get(self.num_warps)
        exchanged = self.overlaps or (self.splits and self.arch == "sm90")
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
        """Rows of a unit's tensor-core tiles where a request has one query row."""
        return self.block_rows or TILE_M

    @property
    def lane_rows(self) -> int:
        """Rows of a tensor-core tile in use that one lane holds, of its two: up to 8 query heads leave the second unused."""
        return 1 if self.packed_rows <= HALF_TILE_M else 2

    @property
    def packed_rows(self) -> int:
        """Packed rows that a unit holds at most."""
        return self.block_rows if self.several else packed_rows(self.unit_rows, self.unit_m)

    @property
    def m_tiles(self) -> int:
        """Units that share the KV heads of one where a request has one query row: a block of query heads each."""
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
        """The rings of K and V tiles that are widened to 16 bits; None where they are not."""
        found: list[RingShape | None] = []
        for nbytes, columns in ((self.k_bytes, self.padded_head_dim), (self.v_bytes, self.padded_v_head_dim)):
            shape = RingShape(self.tile_n, self.tile_n, columns, self.wide_stages, by_block=True)
            found.append(shape if self.by_warpgroup and nbytes == 1 else None)
        return found[0], found[1]

    @property
    def wide_stages(self) -> int:
        """Widened tiles: each turn reads one while the next is widened, K and V one by one where products overlap. 0: none is."""
        return max(2, self.turns + 1) if self.widens_tiles else 0

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
    def hole_words(self) -> int:
        """Words of holes of a tile, a bit a lookup."""
        return self.gatherers or 1

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V of one tile."""
        return self.tile_n * (self.padded_head_dim * self.k_bytes + self.padded_v_head_dim * self.v_bytes)

    @property
    def scale_groups(self) -> int:
        """Groups of 32 tokens of a tile, two at least: each has a word of which tokens' scales lie where (device/kv/scale.py)."""
        return max(2, self.token_groups)

    @property
    def token_groups(self) -> int:
        """Groups of as many tokens of a tile as a warp has lanes."""
        return -(-self.tile_n // 32)

    @property
    def holds_query(self) -> bool:
        """Whether the query stays in registers: at head_dim 256, or 128 with one query head, others would spill (by SASS)."""
        if self.by_warpgroup or self.splits or self.warp_tiles > 1:
            return False
        return self.padded_head_dim <= (192 if self.packed_rows > 1 else 96)

    @property
    def query_fragment(self) -> tuple[int, int]:
        """(elements of a lane, columns) of the 16 bytes that a lane reads of a query at a time, where no warpgroup does."""
        return FRAGMENT_BYTES // self.q_bytes, LDMATRIX_BYTES // self.q_bytes

    @property
    def value_columns(self) -> int:
        """Neighbouring columns of V that a lane has of a token in one access, each in an n8 step of its own: value_column."""
        if self.by_warpgroup:
            return 1
        return self.rings[1].column_block // 16 if self.splits else UNIT_BYTES // self.v_bytes


def most_warp_tiles(num_warps: int, padded_head_dim: int, splits: bool = False) -> int:
    """M-tiles for which a warp has registers: with more than 4 warps each has fewer than two outputs of 128 columns take.

    splits: whether products are of parts of f32, which take what a second m-tile would.
    """
    return 2 if num_warps <= 4 and padded_head_dim <= 128 and not splits else 1


def packed_rows(group_size: int, block_rows: int = TILE_M) -> int:
    """Rows of a unit of `block_rows` that hold a query head."""
    return min(group_size, block_rows)


def m_tiles(group_size: int, block_rows: int = TILE_M) -> int:
    """Units of `block_rows` that hold the query heads of one KV head."""
    return -(-group_size // block_rows)
