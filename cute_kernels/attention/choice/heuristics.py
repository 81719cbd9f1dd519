"""The choice of a configuration if no tuned plan has one: the candidate that the cost model expects to end first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ...config.decode import DEALT, MAX_CP_ASYNC_TILE_N, SMEM_BYTES, TWO_CTAS_HEAD_DIM, DecodeConfig, KernelSpec, Partition
from ...config.limits import most_tile_n, supports
from ...config.mixed import BETWEEN_BYTES
from ...config.tiling import TILE_M, WARPGROUP, WARPGROUP_M, Arch, MmaScope, Target, most_warp_tiles, packed_rows
from ..descriptors import DecodeProblem
from ..kernel_spec import kernel_spec, units_of
from .cost_model import cost_of, deal, mean_keys, row_tokens

Shapes = tuple[tuple[int, int], ...]  # (tokens of a tile, consumer warps), the best first


@dataclass(frozen=True)
class BlockCosts:
    """What blocks of 192 query rows cost three warpgroups, beside those of 128 rows that two take; in keys of the latter.

    key: for each key; turn: from a block to the next; turn_of_two: the same of two warpgroups.
    """

    key: float
    turn: int
    turn_of_two: int


# (bytes of K and V of a tile, most consumer warps, CTAs per SM). Tiles of 32 KB never won, nor 8 KB with 4 warps or two CTAs.
SHAPES: dict[Arch, tuple[tuple[int, int, int], ...]] = {
    "sm90": ((16_384, 8, 1), (16_384, 4, 1), (16_384, 4, 2), (8_192, 8, 1)),
    "sm80": ((8_192, 4, 1), (8_192, 4, 2)),
}
# the same for 8 bits: 4 warps on tiles of 8 KB won by 0.3% at most; among equals the first is taken
SHAPES_OF_8_BITS: dict[Arch, tuple[tuple[int, int, int], ...]] = {
    "sm90": ((8_192, 8, 1), (8_192, 4, 2), (16_384, 4, 1)),
    "sm80": SHAPES["sm80"],
}
# the same for f32: a tile takes as long to attend to as to arrive, so more warps have one each; registers allow one CTA per SM
SHAPES_OF_F32: dict[Arch, tuple[tuple[int, int, int], ...]] = {
    "sm90": ((16_384, 8, 1), (16_384, 4, 1)),
    "sm80": ((16_384, 4, 1),),
}
# (tokens of a tile, consumer warps) for f32 if units have several m-tiles: the first that fits, with at least SPLIT_STAGES
SPLIT_SHAPES, SPLIT_STAGES = ((64, 8), (32, 8), (16, 8), (32, 4), (16, 4)), 2
# a shape as in SHAPES, if tokens have scales and a CTA takes two KV heads: a sector of scales has those of both heads
PAIRED = (8_192, 8, 1)
# (tokens of a tile, consumer warps) if warps attend to several m-tiles of 8-bit caches: two each, where registers allow that
# (TilingSpec.pairs_tiles), 7 to 22% sooner than the shapes below, which were swept on an H200, too: 8 warps on large tiles were
# fastest or within 4% of it; on smaller ones if a share has fewer than SHARE_TILES large ones; 4 warps with token scales
PAIRED_M_TILES = 32, 8
# most tokens of a row whose CTAs then take two KV heads, if tokens have scales: a CTA ends half as many pieces
PAIRED_TOKENS = 1_024
M_TILES, M_TILES_OF_SHORT, M_TILES_OF_TOKEN_SCALES = (64, 8), (32, 8), (32, 4)
SHARE_TILES = 4
M_TILES_ROWS = 32  # packed rows: with more, warpgroups end first (docs/notes/kernel-log.md)
# (tokens of a tile, consumer warps) for long queries, over 16 bits and over 8: the first that fits. Timed on an H200 at 8k: three
# warpgroups at head_dim 64 and 96, two above (docs/notes/kernel-log.md)
LONG_SHAPES = ((128, 12), (96, 12), (128, 8), (112, 8), (80, 8), (64, 8), (32, 8), (64, 4), (32, 4), (16, 4))
LONG_SHAPES_OF_8_BITS = ((112, 8), (96, 8), (80, 8), (64, 8), (32, 8), (64, 4), (32, 4), (16, 4))
LONG_STAGES = 2
# the same with scales of tokens, if three warpgroups end first (at head_dim 64 tiles of 96 are 2% later)
LONG_SHAPES_OF_THREE = (80, 12), (64, 12)
# of these, by 16 x 512 over 512 to 2k, 8 x 512 over 4k and 8k on an H200 (docs/notes/kernel-log.md): at head_dim 64 and below;
# above 96, where two warpgroups relate scores; and otherwise
THREE_UP_TO_64, THREE_BESIDE_RELATED, THREE = BlockCosts(1.32, 660, 610), BlockCosts(1.69, 286, 377), BlockCosts(1.53, 690, 630)
# over 8 bits shared memory's bandwidth is the limit, of which a query in registers takes none: beside tiles of 112, prompts over
# e4m3 2 to 10% sooner by card, 128 rows 1 to 6% at 8 x 8k and 64 x 1k, and at 64 x 8k up to 1.5% later (H100)
HOLDING = 96, 8
BLOCK_STAGES, BLOCK_WARPS = 3, (4, 2)  # of the ring that warps share on sm80: two warps if 99 KB hold no more
# (tokens of a tile, consumer warps) for the phase of few rows in a mixed kernel, and the same over 8 bits without tokens' scales
# if an SM has more than FEW_SHARE tokens: decode rows alone then took 1 to 4% less, 1 x 8k 6% more (e4m3, H100). 16-bit ones
# would take 2% less, but this phase may keep a third of the SMs for them, where it ends up to 10% later by such tiles (88 SMs)
FEW_SHAPE, FEW_SHAPE_OF_8_BITS, FEW_SHARE = (32, 8), (64, 4), 1_024
# (tokens of a tile, consumer warps) for warpgroups; tiles of 128 end up to 15% sooner if two attend to the same 16-bit tiles
WARPGROUP_SHAPES = ((64, 8), (32, 8), (64, 4), (32, 4), (16, 8), (16, 4))
OVERLAP_SHAPES = ((128, 8), (112, 8), *WARPGROUP_SHAPES)
# for more than 64 rows, up to this head_dim, if an SM has at most so many tokens and the ring no more: 71/1, 32 x 2.5k on an H100
# 6% (bf16) and 12% (e4m3) sooner than tiles of 128; a deeper ring is 4 and 2% later
SMALL_HEADS, SMALL_HEAD_DIM, SMALL_HEAD_SHARE = DecodeConfig(80, 3, 8, 1, mma="warpgroup"), 64, 1_024
# for 64 rows over 8 bits: two take tiles in turn. With token scales, larger tiles than NARROW_TURNS spill in a phase, and where a
# head is not whole column blocks of 64 (read from SASS)
TURNS_SHAPES, NARROW_TURNS = ((96, 8), (64, 8), (48, 8), (32, 8), (64, 4), (32, 4), (16, 4)), 64
# with fewer tokens per SM than so many tiles, smaller tiles end sooner: by up to 29% (docs/notes/kernel-log.md)
TILES_OF_SHORT, TILES_OF_SHORT_TURNS, TILES_OF_SHORT_SCALES, SHORTEST_TILE_N = 2, 6, 5, 32  # 5: with token scales
PAIRED_HEAD_DIM = 128  # larger ones were not measured
MOST_CTAS_PER_SM = 2
LARGEST_TILE_N = {"sm90": 64, "sm80": 32}
RING_BYTES = 131_072  # in flight on an SM, over all its CTAs: 64 KB cost 2 to 4%, 192 KB 0 to 1%
SHALLOWEST = {"sm90": 1, "sm80": 2}  # stages per warp
FOUR_WARPS_HEAD_DIMS = (176, 192)  # padded: 8 warps and a producer leave a thread 168 registers, which spill (read from SASS)
FOUR_WARPS_ROWS = (192, 4)  # the same above this padded head_dim, if there are more packed rows than this, or if only one of K
# and V has 16 bits and both have token scales


def choose(
    problem: DecodeProblem,
    arch: Arch,
    target: Target,
    sm_count: int,
    partition: Partition = "balanced",
    most_ctas_per_sm: int = MOST_CTAS_PER_SM,
    phase: bool = False,
) -> DecodeConfig:
    """The cheapest configuration of `problem` that `supports` allows, on `sm_count` SMs; if it allows none, the cheapest.

    phase: whether it is for a phase of a mixed kernel, where threads have fewer registers.
    """
    if partition in DEALT:
        return long_config(problem, sm_count, partition)
    if partition == "whole" and arch == "sm80":
        shared = block_config(problem, target, sm_count, most_ctas_per_sm)
        if shared is not None:
            return shared
    found = [c for c in candidates(problem, arch, target, sm_count, phase) if c.ctas_per_sm <= most_ctas_per_sm]
    specs = {c: kernel_spec(problem, arch, target, c, partition=partition) for c in found}
    ranked = sorted(specs, key=lambda c: cost_of(problem, specs[c], c.ctas_per_sm, sm_count).total_us)
    return next((config for config in ranked if not supports(specs[config])), ranked[0])


def candidates(problem: DecodeProblem, arch: Arch, target: Target, sm_count: int, phase: bool = False) -> list[DecodeConfig]:
    """The configurations that the choice is made from, without duplicates. phase: as in choose."""
    found: dict[DecodeConfig, None] = {}
    limit = 4 if spills_with_8_warps(problem) else 8
    shapes = [(*shape, 1) for shape in shapes_of(problem)[arch]]
    if problem.splits and arch == "sm90" and problem.query != "one" and problem.packed_rows > TILE_M:
        return [split_config(problem)]
    if arch == "sm90" and problem.packed_rows > TILE_M and not problem.splits:
        if not by_warps(problem):
            return [warpgroup_config(problem, sm_count, phase)]
        tile_n, num_warps = m_tiles_shape(problem, sm_count, phase)
        heads = 2 if not phase and pairs_rows(problem, (tile_n, num_warps), sm_count) else 1
        shapes = [(tile_n * token_bytes(problem), num_warps, 1, heads)]
    elif pairs_heads(problem, arch):
        shapes.append((*PAIRED, 2))
    for tile_bytes, most_warps, ctas_per_sm, unit_heads in shapes:
        if ctas_per_sm == 1 or (target == "sm_90a" and problem.head_dim <= TWO_CTAS_HEAD_DIM):
            tile_n = tile_tokens(problem, arch, tile_bytes)
            found[ring(problem, tile_n, min(most_warps, limit), ctas_per_sm, arch, target, unit_heads)] = None
    return list(found)


def shapes_of(problem: DecodeProblem) -> dict[Arch, tuple[tuple[int, int, int], ...]]:
    """(bytes of K and V of a tile, most consumer warps, CTAs per SM) of the candidates."""
    return SHAPES_OF_F32 if problem.splits else SHAPES_OF_8_BITS if problem.has_8_bits else SHAPES


def split_config(problem: DecodeProblem) -> DecodeConfig:
    """The configuration for f32 units of several m-tiles, one per warp: the first shape whose rows, states and tiles fit."""
    largest = most_tile_n(problem.padded_head_dim, problem.v_dtype.element_bytes)
    shapes = dict.fromkeys((min(tile_n, largest), warps) for tile_n, warps in SPLIT_SHAPES)
    configs = [ring(problem, tile_n, warps, 1, "sm90", "sm_90a") for tile_n, warps in shapes]
    return first_fitting(problem, [c for c in configs if c.num_stages >= SPLIT_STAGES] or configs, "balanced")


def by_warps(problem: DecodeProblem) -> bool:
    """Whether warps attend to several m-tiles faster than warpgroups do."""
    return problem.query != "one" and problem.has_8_bits and problem.packed_rows <= M_TILES_ROWS


def m_tiles_shape(problem: DecodeProblem, sm_count: int, phase: bool) -> tuple[int, int]:
    """(tokens of a tile, consumer warps) for a unit of several m-tiles that warps attend to. phase: as in choose."""
    if not phase and most_warp_tiles(PAIRED_M_TILES[1], problem.padded_head_dim, pairs=True) > 1:
        shape = PAIRED_M_TILES
    elif problem.has_token_scales:
        shape = M_TILES_OF_TOKEN_SCALES
    else:
        shape = M_TILES if share_tokens(problem, sm_count) >= SHARE_TILES * M_TILES[0] else M_TILES_OF_SHORT
    return min(shape[0], most_tile_n(problem.padded_head_dim, problem.v_dtype.element_bytes)), shape[1]


def share_tokens(problem: DecodeProblem, sm_count: int) -> int:
    """KV tokens for each SM."""
    return problem.batch_size * row_tokens(problem) * problem.num_kv_heads // sm_count


def long_config(problem: DecodeProblem, sm_count: int, partition: Partition) -> DecodeConfig:
    """The configuration for long queries: the first shape that fits, or the last. partition: one of DEALT.

    Ragged queries leave room for a mixed kernel's other phases.
    """
    shapes = holding_first(problem, LONG_SHAPES_OF_8_BITS, partition) if problem.has_8_bits else LONG_SHAPES
    if three_beside_scales(problem, sm_count, partition):
        shapes = LONG_SHAPES_OF_THREE + shapes
    configs = [config_of(shape) for shape in shapes]
    return first_fitting(problem, configs, partition, spare=BETWEEN_BYTES if problem.query == "ragged" else 0)


def config_of(shape: tuple[int, int]) -> DecodeConfig:
    """The configuration of warpgroups whose products overlap. shape: one of Shapes."""
    return DecodeConfig(shape[0], LONG_STAGES, shape[1], 1, 1, "warpgroup")


def three_beside_scales(problem: DecodeProblem, sm_count: int, partition: Partition) -> bool:
    """Whether three warpgroups end long queries over 8 bits with scales of tokens sooner than two, whose blocks are smaller.

    Not if queries are ragged: a mixed kernel's other phases need more registers than three warpgroups have.
    """
    if not (problem.has_8_bits and problem.has_token_scales and problem.query == "uniform"):
        return False
    first = LONG_SHAPES_OF_THREE[0], LONG_SHAPES_OF_8_BITS[0]
    specs = [kernel_spec(problem, "sm90", "sm_90a", config_of(shape), partition=partition) for shape in first]
    three, two = (deal(problem, spec, sm_count) for spec in specs)
    costs, keys = costs_of_three(specs[1]), mean_keys(problem)
    return costs.key * keys * three.blocks + costs.turn * three.rounds < keys * two.blocks + costs.turn_of_two * two.rounds


def costs_of_three(two: KernelSpec) -> BlockCosts:
    """The costs of three warpgroups beside a spec of two."""
    if two.padded_head_dim <= 64:
        return THREE_UP_TO_64
    return THREE_BESIDE_RELATED if two.relates_scores and two.padded_head_dim > 96 else THREE


def holding_first(problem: DecodeProblem, shapes: Shapes, partition: Partition) -> Shapes:
    """Shapes for warpgroups over 8 bits: HOLDING first, if registers hold the query with it and with no larger tile.

    Not with token scales where scores are not related: up to 1.4% later (head_dim 96), as shared memory is not their limit.
    """

    def spec_of(shape: tuple[int, int]) -> KernelSpec:
        return kernel_spec(problem, "sm90", "sm_90a", config_of(shape), partition=partition)

    larger = [shape for shape in shapes if shape[0] > HOLDING[0]]
    holding = spec_of(HOLDING)
    related = holding.relates_scores and problem.query != "ragged"  # mixed kernels have no registers for it
    limited = related or not problem.has_token_scales
    wanted = limited and holding.holds_query and not any(spec_of(shape).holds_query for shape in larger)
    return (HOLDING, *shapes) if wanted else shapes


def block_config(
    problem: DecodeProblem, target: Target, sm_count: int, most_ctas_per_sm: int = MOST_CTAS_PER_SM
) -> DecodeConfig | None:
    """The configuration for long queries on sm80, whose warps share a ring; None if none can be built or SMs would lack a block.

    Two CTAs per SM if shared memory has room for both, since a CTA waits at a barrier for each tile.
    """
    if problem.query == "one":
        return None
    tile_n = min(MAX_CP_ASYNC_TILE_N, most_tile_n(problem.padded_head_dim, problem.v_dtype.element_bytes))
    for num_warps, ctas_per_sm in product(BLOCK_WARPS, range(most_ctas_per_sm, 0, -1)):
        config = DecodeConfig(tile_n, BLOCK_STAGES, num_warps, ctas_per_sm)
        spec = kernel_spec(problem, "sm80", target, config, partition="whole")
        fits = not supports(spec) and ctas_per_sm * spec.smem_bytes <= SMEM_BYTES[target]
        if fits and problem.batch_size * units_of(problem, spec) >= sm_count:
            return config
    return None


def few_config(problem: DecodeProblem, arch: Arch, target: Target, sm_count: int) -> DecodeConfig:
    """The configuration of a mixed kernel's phase for few rows: tiles whose registers the phase of many rows leaves to it."""
    if problem.packed_rows > TILE_M:
        return choose(problem, arch, target, sm_count, most_ctas_per_sm=1, phase=True)
    largest = most_tile_n(problem.padded_head_dim, problem.v_dtype.element_bytes)
    larger = problem.has_8_bits and not problem.has_token_scales and share_tokens(problem, sm_count) > FEW_SHARE
    tile_n, num_warps = FEW_SHAPE_OF_8_BITS if larger and largest >= FEW_SHAPE_OF_8_BITS[0] else FEW_SHAPE
    return ring(problem, min(tile_n, largest), 4 if spills_with_8_warps(problem) else num_warps, 1, arch, target)


def warpgroup_config(problem: DecodeProblem, sm_count: int, phase: bool) -> DecodeConfig:
    """The configuration for warpgroups: the largest tiles of which shared memory holds enough. phase: as in choose."""
    share = share_tokens(problem, sm_count)
    shapes = warpgroup_shapes(problem, share, phase)
    configs = [ring(problem, tile_n, warps, 1, "sm90", "sm_90a", 1, "warpgroup") for tile_n, warps in shapes]
    short = SMALL_HEADS.num_stages * SMALL_HEADS.tile_n <= share <= SMALL_HEAD_SHARE
    if problem.packed_rows > WARPGROUP_M and problem.padded_head_dim <= SMALL_HEAD_DIM and short:
        configs = [SMALL_HEADS, *configs]
    return first_fitting(problem, configs, "balanced")


def warpgroup_shapes(problem: DecodeProblem, share: int, phase: bool) -> Shapes:
    """Shapes for warpgroups. share: tokens for each SM; few take small tiles."""
    if problem.packed_rows > WARPGROUP_M and share <= TILES_OF_SHORT * SHORTEST_TILE_N:
        return ((SHORTEST_TILE_N, WARPGROUP),)  # two units, each with half of the rows, so that more SMs have work
    shapes: Shapes = OVERLAP_SHAPES if problem.packed_rows > WARPGROUP_M else WARPGROUP_SHAPES
    most = share // TILES_OF_SHORT
    if problem.packed_rows > WARPGROUP_M and problem.has_8_bits:
        shapes = holding_first(problem, shapes, "balanced")
    elif problem.has_8_bits:
        shapes, most = TURNS_SHAPES, share // (TILES_OF_SHORT_SCALES if problem.has_token_scales else TILES_OF_SHORT_TURNS)
        if problem.has_token_scales and (phase or problem.padded_head_dim % 64):
            most = min(most, NARROW_TURNS)
    return tuple(shape for shape in shapes if shape[0] <= max(SHORTEST_TILE_N, most))


def first_fitting(problem: DecodeProblem, configs: list[DecodeConfig], partition: Partition, spare: int = 0) -> DecodeConfig:
    """The first of `configs` that has more than one stage and can be built for sm90; else the last.

    spare: bytes of shared memory that the configuration must leave.
    """
    for config in configs:
        spec = kernel_spec(problem, "sm90", "sm_90a", config, partition=partition)
        if config.num_stages > 1 and not supports(spec) and spec.smem_bytes + spare <= SMEM_BYTES["sm_90a"]:
            return config
    return configs[-1]


def pairs_heads(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether a CTA may take two KV heads: 8-bit caches with token scales, whose query heads fill at most half of a tile."""
    scales = {problem.k_scale.granularity, problem.v_scale.granularity}
    if problem.query != "one":
        return False
    fits = problem.num_kv_heads % 2 == 0 and 2 * problem.group_size <= TILE_M // 2 and problem.head_dim <= PAIRED_HEAD_DIM
    return arch == "sm90" and problem.has_8_bits and "token" in scales and scales <= {"token", "none"} and fits


def pairs_rows(problem: DecodeProblem, shape: tuple[int, int], sm_count: int) -> bool:
    """Whether a CTA takes two KV heads of several query rows: of short rows, if it then has half as many, all of them whole.

    shape: tokens of a tile, and consumer warps.
    """
    heads, scales = problem.num_kv_heads, {problem.k_scale.granularity, problem.v_scale.granularity}
    fits = shape == PAIRED_M_TILES and "token" in scales <= {"token", "none"} and problem.packed_rows > TILE_M
    if not fits or heads % 2 or row_tokens(problem) > PAIRED_TOKENS:
        return False
    alone, pairs = (-(-problem.batch_size // max(1, sm_count // units)) for units in (heads, heads // 2))
    return 1 < pairs <= alone / 2


def spills_with_8_warps(problem: DecodeProblem) -> bool:
    """Whether 8 consumer warps and their producers leave a thread too few registers."""
    if problem.padded_head_dim in FOUR_WARPS_HEAD_DIMS:
        return True
    head_dim, rows = FOUR_WARPS_ROWS
    mixed = problem.kv_dtype.element_bytes != problem.v_dtype.element_bytes
    both = problem.k_scale.granularity == problem.v_scale.granularity == "token"
    return problem.padded_head_dim > head_dim and (packed_rows(problem.packed_rows) > rows or (mixed and both))


def token_bytes(problem: DecodeProblem) -> int:
    """Bytes of K and V of a token in a tile."""
    return problem.padded_head_dim * (problem.kv_dtype.element_bytes + problem.v_dtype.element_bytes)


def tile_tokens(problem: DecodeProblem, arch: Arch, tile_bytes: int) -> int:
    """KV tokens of a tile: the power of two from 16 on whose K and V fill `tile_bytes`."""
    tokens = tile_bytes // token_bytes(problem)
    return max(16, min(LARGEST_TILE_N[arch], 1 << (max(tokens, 1).bit_length() - 1)))


def ring(
    problem: DecodeProblem,
    tile_n: int,
    most_warps: int,
    ctas_per_sm: int,
    arch: Arch,
    target: Target,
    unit_heads: int = 1,
    mma: MmaScope = "warp",
) -> DecodeConfig:
    """The deepest ring within RING_BYTES, with the most warps that shared memory then allows."""
    deepest = RING_BYTES // ctas_per_sm // (tile_n * token_bytes(problem))
    for num_warps in (w for w in (8, 4, 2, 1) if w <= most_warps and (mma == "warp" or w >= WARPGROUP)):
        shape = DecodeConfig(tile_n, SHALLOWEST[arch] * num_warps, num_warps, ctas_per_sm, unit_heads, mma)
        turns = max(1, kernel_spec(problem, arch, target, shape, partition="balanced").stage_turns)
        shallowest = SHALLOWEST[arch] * turns
        for num_stages in range(max(deepest // turns * turns, shallowest), shallowest - 1, -turns):
            config = DecodeConfig(tile_n, num_stages, num_warps, ctas_per_sm, unit_heads, mma)
            needed = kernel_spec(problem, arch, target, config, partition="balanced").smem_bytes
            if needed <= SMEM_BYTES[target] // ctas_per_sm:
                return config
    return DecodeConfig(tile_n, SHALLOWEST[arch], 1, ctas_per_sm)
