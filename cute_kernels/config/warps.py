"""What the warps of a CTA do, beside the products of those that attend, and which registers they have for it."""

from __future__ import annotations

from dataclasses import dataclass

from .tiling import MIN_BOX_ROWS, WARPGROUP, Arch, TilingSpec

# warps that widen 8-bit tiles to 16 bits for a warpgroup's products: two beside the producers and four alone, or all but one
# producer of the only warpgroup that three others leave
WIDENING_WARPS, WIDENING_WARPS_OF_ONE = 6, 3
# (registers of a thread that attends, of any other thread), by the number of warps that attend
WIDENING_REGISTERS = {4: (232, 136), 8: (200, 56), 12: (152, 56)}  # if other warps widen tiles
# the same of 8 warps whose scores are related: tiles of 96 then leave room for the query. In a mixed kernel others would spill
RELATING_REGISTERS = 208, 48
OVERLAP_REGISTERS = {8: (224, 56), 12: (160, 32)}  # if products overlap, operands are f32, or 8 warps have two m-tiles each
# the same for bf16 products where other warps only bring tiles and queries: a loop over int8 spills none of 232, one for f16 two.
# Warps that store pieces as well need more than 40 (64 x 1k over e4m3 1% later)
PAIRED_REGISTERS = 232, 40
GATHER_REGISTERS = {4: (216, 72), 8: (216, 72)}  # if the producers bring tiles token by token
# of weights in f16 where bases move lazily, one more beside scales of V's tokens, which take a bit of the weights: few tiles move
# a base if a score may lie 4.75 or 2.75 bits past it, and not 1.75 or 0.75. With a bit less, rows whose output is of weights of
# e ** -20 alone miss bf16's precision in some batches with token scales, and with 8 bits in all
LAZY_WEIGHT_BITS = 11
OTHER_REGISTERS, OF_MODIFIERS = 32, 24  # of a warpgroup's thread, beside those that registers_with_query counts
RELATING_OTHERS = 16  # the same where scores are related: K's scales are read late, and no row has factors
MOST_BOXES = 8  # of a tile that four producers take in turn: 32 pages are then those of four tiles
PRODUCER_WARPS: dict[Arch, int] = {"sm90": 2, "sm80": 0}  # one brings K and V; one brings tokens' scales, or looks ahead


@dataclass(frozen=True, kw_only=True)
class WarpSpec(TilingSpec):
    """What follows from the problem and its tiles for warps: who brings and widens tiles, and how weights keep their range."""

    @property
    def lazy_bases(self) -> bool:
        """Whether the bases of weights move lazily (device/attend/bases.py): where instructions set the pace.

        Not in warps of two m-tiles whose weights V's scales multiply in f16, where nine tiles of ten would move one: there they
        follow the maxima.
        """
        return self.overlaps or (self.paired and not (self.scales_weights and self.v_math == "f16"))

    @property
    def scales_values(self) -> bool:
        """Whether scales of V's tokens go into int8 elements of V as these are widened (device/kv/value_scales.py).

        Only where a warp of its own brings the scales: where crews convert them too, their tiles would come later. Not in turns,
        where that was later, nor in bf16: V would be rounded beside P, for 3% less time (docs/notes/kernel-log.md).
        """
        settled = self.settles_scales and self.turns == 1
        return self.v_token_scale and self.v_type == "int8" and settled and self.v_math == "f16"

    @property
    def scales_weights(self) -> bool:
        """Whether weights are multiplied by scales of V's tokens (device/kv/scale.py)."""
        return self.v_token_scale and not self.scales_values

    @property
    def wide_scale_bytes(self) -> tuple[int, int]:
        """Bytes of a scale of K, and of V, of a widened tile: f32, or f16 for V's that multiply weights.

        Readers then convert each scale, and still take 1% less: shared memory has fewer reads. But three warpgroups take 2% more
        (docs/notes/kernel-log.md).
        """
        halves = self.v_scale == "token_f16" and self.scales_weights and not self.one_crew
        return 4, 2 if halves else 4

    @property
    def interleaves_weights(self) -> bool:
        """Whether exponentials are interleaved with the other steps of softmax (device/attend/interleaved.py).

        Without scales of tokens there are too few such steps, and in turns 64 rows take 2 to 4% more so.
        """
        return self.scales_weights and self.overlaps and self.turns == 1

    @property
    def keeps_unit(self) -> bool:
        """Whether sums and O are multiples of a unit, as V's scales of tokens may leave f16's range (device/kv/scale.py).

        Or O alone, if these scales go into V.
        """
        return self.v_token_scale and self.v_math == "f16"

    @property
    def relates_scores(self) -> bool:
        """Whether K's scales of tokens hold the softmax factor, so that one step scales a score and subtracts its base.

        Rows then have no factors of their own, and weights no bits on top (device/attend/relative.py).
        """
        if self.k_type != "int8" or not self.k_token_scale or self.modifiers.functions:
            return False
        settled = self.overlaps or (self.paired and self.readers == 1)  # each scale by one warp
        return settled and self.k_math == self.v_math == "bf16"

    @property
    def weight_bits(self) -> int:
        """As ProblemSpec.weight_bits, but fewer where bases move lazily (device/attend/bases.py)."""
        lazy = self.lazy_bases and self.v_math == "f16"
        return LAZY_WEIGHT_BITS + self.scales_weights if lazy else super().weight_bits

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
        """The numbers, among the widening warps, of those for K and of those for V: all of them if there is one crew for both.

        K's crew also converts scales of tokens that no other warp settles. No warp has work with a tensor of 16 bits alone: its
        readers, who wait for no crew, could pass such a warp by a whole turn of the barriers.
        """
        every, half = range(self.widening_warps), self.widening_warps // 2
        if None not in self.wide and not self.one_crew:
            return every[:half], every[half:]
        works = self.wide[0] is not None or self.brings_scales, self.wide[1] is not None
        return (every if works[0] else every[:0]), (every if works[1] else every[:0])

    @property
    def producers(self) -> int:
        """Warps that bring tiles and scales: one brings K and V, another one the scales of tokens, or V; or all bring both."""
        two = (self.token_scales and not self.brings_scales) or self.values_apart
        return self.gatherers or max(self.tile_producers, 2 if two else 1)

    @property
    def values_apart(self) -> bool:
        """Whether K and V have a producer each (KernelSpec)."""
        return False

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
        """Whether the warp that brings scales of tokens converts them for the readers of widened tiles.

        Otherwise the warps that widen K convert them, and products wait for it (docs/notes/kernel-log.md).
        """
        return self.widens_tiles and self.token_scales > 0 and not self.brings_scales

    @property
    def prefetches_scales(self) -> bool:
        """Whether a warp that widens tiles prefetches scales of tokens into L2 while it waits for the first tile.

        The warp that brings them looks only one tile ahead. Behind other kernels, which leave nothing in L2, 64 rows over int8 at
        1 x 8k are 0.15 us sooner for it, on pages of 64 0.3 (docs/notes/kernel-log.md). A CTA with many pieces wins nothing.
        """
        return self.settles_scales and self.source == "paged"

    @property
    def query_warps(self) -> int:
        """Warps that bring queries and settle them beside the loop, if warps are paired: assistants, or the tiles' producers.

        If there are none, the warps that attend fetch and settle queries between pieces. So it is where a unit has two KV heads:
        there is one buffer for its query, and four warps would bring it for longer than a turn takes.
        """
        return (self.assistants or self.producers) if self.paired and self.tile_heads == 1 else 0

    @property
    def looks_ahead(self) -> bool:
        """Whether a warp prefetches the share's first tiles while the kernel before this one runs (device/mainloop/tma.py).

        Not where registers are handed over and every warp brings tiles, scales or queries, or widens: all others would wait. Nor
        beside widened tiles: such a launch begins 0.2 us later for it, and 0.4 behind another kernel (64 rows over e4m3, 1 x 8k).
        """
        if self.register_shares is None or self.q_lens is not None:
            return True
        return not self.token_scales and not self.widens_tiles

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
            related = self.relates_scores and self.num_warps == 2 * WARPGROUP and self.q_lens is None
            return RELATING_REGISTERS if related else WIDENING_REGISTERS.get(self.num_warps)
        if self.gathers:
            return GATHER_REGISTERS.get(self.num_warps)
        if self.paired and not self.assistants and self.v_math == "bf16":
            return PAIRED_REGISTERS
        exchanged = self.overlaps or (self.arch == "sm90" and (self.splits or self.paired))
        return OVERLAP_REGISTERS.get(self.num_warps) if exchanged else None

    @property
    def holds_query(self) -> bool:
        """Whether the query stays in registers, which else spill (read from SASS): at head_dim 256, or 128 with one packed row.

        Warpgroups hold it where products overlap: shared memory's bandwidth is the limit over 8 bits, and power over 16. But not
        in turns in a phase.
        """
        if self.by_warpgroup:
            shares = self.register_shares if self.overlaps and (self.q_lens is None or self.turns == 1) else None
            return shares is not None and self.registers_with_query <= shares[0]
        if self.splits or self.warp_tiles > 1:
            return False
        return self.padded_head_dim <= (192 if self.packed_rows > 1 else 96)

    @property
    def registers_with_query(self) -> int:
        """Registers of a thread whose warpgroup holds its query: O, scores, weights, K's scales, the query, and others."""
        tile = self.tile_n // 2 + self.tile_n // 4 * (1 + self.k_token_scale)
        others = RELATING_OTHERS if self.relates_scores else OTHER_REGISTERS
        others += OF_MODIFIERS if self.modifiers.functions or self.modifiers.tree_mask else 0
        return self.padded_v_head_dim // 2 + tile + self.padded_head_dim // 4 + others
