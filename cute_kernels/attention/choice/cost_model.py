"""How long a launch is expected to take: an explicit sum of the terms that a configuration changes.

A plan knows no lengths: every row is taken to have max_seq_len tokens, and every cut to fall inside a row, as cuts do if lengths
differ. If rows stay whole, the SM with the most rows ends last. docs/design.md, "Choice of a configuration", has the terms and
how their constants were measured. Slices (the work partition), pieces (KV splits) and parts (partial results) are as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...config.decode import (
    ITEM_COST,
    LEAST_PIECE,
    LINE_WORDS,
    MOST_PIECES_OF_BLOCK,
    PARTS_IN_FLIGHT,
    PIECE_COST,
    SLOTS,
    DecodeConfig,
    KernelSpec,
    Partition,
)
from ...config.tiling import Arch, Target
from ..descriptors import DecodeProblem
from ..kernel_spec import grid_ctas_of, kernel_spec, units_of

ASSUMED_SEQ_LEN = 4096  # tokens per row if the descriptor gives no max_seq_len: to believe a stream long costs most if wrong
# operations per us of long queries at head_dim 128 while power limits clocks; narrower heads lose some (records of 088588c8d)
PRODUCT_RATE, PRODUCT_RATE_OF_8_BITS, PRODUCT_RATE_OF_TOKEN_SCALES = 630e6, 580e6, 440e6
NARROW_PRODUCTS = 0.2  # the part of the rate that is lost, times 128 / head_dim - 1
LONE_COLUMNS = 128  # the head_dim that lone_weight is for
CROWDING, CROWDED_ROWS = 1.5, 4  # time of a CTA next to another on its SM, as a multiple of its time alone, at so many rows
MOST_CROWDED = 64  # CTAs next to another that are counted: so many have lost, and a power of thousands overflows a float
PAIRED_TURN = 1.6  # a turn of two KV heads, as a multiple of a turn of one: 256 x 200 of int8 with token scales
MOST_CUT = 2  # pieces of a share that are parts of cut rows: of the row it continues and of the row it opens


@dataclass(frozen=True)
class ArchCosts:
    """Constants of one mainloop on an H200.

    start_us: launch, share, query, first bytes, last store. second_cta_us: how much more that takes with two CTAs per SM.
    bandwidth: KV bytes per us while all SMs stream. tile_bytes: what a tile costs the stream, in bytes beyond its own.
    idle_weight: the part of idle SMs' bandwidth that is lost (1: all of it; 0: the other SMs take it over).
    lone_weight: the part by which one CTA per SM lengthens a stream, at head_dim 128. narrow_weight: the further part, times
    128 / head_dim - 1: with fewer columns a token takes as long to attend to and has fewer bytes.
    drain_us: per KB of the last tile, attended after the last byte has come. warp_us: to merge a warp's state into a piece's.
    part_us: per packed row of a piece of a cut row, for its merge and its store to the workspace.
    level_us: for a state to pass through the workspace, from its store to its sum. word_us: per word of states that a thread
    adds up. merge_us: to merge a warp's sums with those of other warps, if a thread does not have all parts of its columns.
    turn_us: from a CTA's piece to its next, with one tile between: what short rows take if the stream does not hide it.
    row_crowding: how much CROWDING grows, for turns, with each packed row past CROWDED_ROWS.
    lone_sm: what an SM reads while few other SMs read, as a multiple of what it reads while all do.
    pair_weight: the part by which a stream is shorter if a CTA takes two KV heads. pair_us: how much longer any such launch
    takes.
    """

    start_us: float
    second_cta_us: float
    bandwidth: float
    tile_bytes: float
    idle_weight: float
    lone_weight: float
    narrow_weight: float
    drain_us: float
    warp_us: float
    part_us: float
    level_us: float
    word_us: float
    merge_us: float
    turn_us: float
    row_crowding: float
    lone_sm: float
    pair_weight: float
    pair_us: float


COSTS: dict[Arch, ArchCosts] = {
    "sm90": ArchCosts(  # near least squares over the measured launches, by hand; next to each constant, where it shows
        start_us=1.55,  # 1 x 1k, 1 x 8k; level_us is set together with it, since nearly every launch cuts rows
        second_cta_us=0.6,  # 64 x 512 and 64 x 1k: two CTAs per SM end 0.8 to 1.2 us later
        bandwidth=4.7e6,  # from 268 MB to 2.1 GB; a plain read's slope is 4.71e6
        tile_bytes=370.0,  # tiles of 8 KB against 16 KB end 0.9 us later at 268 MB
        idle_weight=0.425,  # 64 x 8k: 128 CTAs leave 4 SMs idle and end 5.2 us after 264, which pay for cut rows
        lone_weight=0.0,  # 32 x 2k with 32/32: one CTA per SM streams as fast as two
        narrow_weight=0.0,
        drain_us=0.038,  # as tile_bytes
        warp_us=0.0,  # 8 warps end 0.5 us before 4 (64 x 512 with 8/1) to 0.8 us after them (32 x 4k at head_dim 256)
        part_us=0.137,  # 64 x 1k: two CTAs per SM cut rows that one leaves whole
        level_us=0.7,
        word_us=0.11,  # 64 x 512 with 8/1: 4 warps end 0.5 us after 8
        merge_us=0.04,  # 1 x 8k, 1 x 32k: 16 parts per row
        turn_us=1.5,  # 1024 x 64: 64 rows per CTA take 98 us, of which the stream hides 61
        row_crowding=0.125,  # 4,096 x 64 with 8/1: two CTAs per SM take twice as long for a turn as one
        lone_sm=2.75,  # 1 x 8k in whole rows: 8 CTAs take 46.6 us
        pair_weight=0.0,  # no candidate
        pair_us=0.0,
    ),
    "sm80": ArchCosts(  # not measured since the first version: two CTAs per SM from 400 MB on, as found then
        start_us=3.5,
        second_cta_us=1.0,
        bandwidth=4.0e6,  # page 1 took 1.114 of a read (docs/notes/kernel-log.md), rounded down
        tile_bytes=0.0,
        idle_weight=0.0,
        lone_weight=0.01,
        narrow_weight=0.01,
        drain_us=0.0,
        warp_us=0.0,
        part_us=0.0,
        level_us=0.0,
        word_us=0.0,
        merge_us=0.0,
        turn_us=0.0,
        row_crowding=0.0,
        lone_sm=2.0,  # not measured
        pair_weight=0.0,
        pair_us=0.0,
    ),
}
COSTS_OF_8_BITS: dict[Arch, ArchCosts] = {  # measured with e4m3
    "sm90": ArchCosts(
        start_us=2.01,
        second_cta_us=0.93,  # 1 x 128k: two CTAs per SM end 0.1 to 1.4 us later
        bandwidth=4.815e6,
        tile_bytes=480.0,
        idle_weight=0.0,
        lone_weight=0.0,  # 64 x 8k: one CTA per SM ends 0.6 us after two on one H200, 7.2 us before on two others
        narrow_weight=0.05,  # 32 x 4k at head_dim 64: one CTA per SM ends 0.1 to 0.5 us after two
        drain_us=0.0882,  # a KB holds twice the tokens, converted first: at 1 x 1k tiles of 8 KB end 0.9 us before 16 KB
        warp_us=0.0,
        part_us=0.088,
        level_us=0.686,
        word_us=0.0196,
        merge_us=0.0,
        turn_us=2.55,  # 256 x 200: 16 rows per CTA take 42 us, 8 on each of two CTAs 33
        row_crowding=0.0,  # 4,096 x 64 with 8/1: 1.6 times as long
        lone_sm=1.8,  # 1 x 8k in whole rows: 36.1 us
        pair_weight=0.0,  # no candidate
        pair_us=0.0,
    ),
    "sm80": COSTS["sm80"],
}
COSTS_OF_TOKEN_SCALES: dict[Arch, ArchCosts] = {  # of 8-bit caches; measured with int8
    "sm90": ArchCosts(
        start_us=2.4,
        second_cta_us=0.9,  # 64 x 1k: two CTAs per SM end 0.9 to 1.7 us later
        bandwidth=4.56e6,
        tile_bytes=150.0,  # 64 x 8k: tiles of 8 KB end 1.0 us after 16 KB, at 128 x 4k 3.2 us
        idle_weight=0.0,
        lone_weight=0.003,  # 128 x 4k: two CTAs per SM end 1.1 us after one
        narrow_weight=0.003,
        drain_us=0.11,  # 1 x 1k: tiles of 8 KB end 1.1 us before 16 KB
        warp_us=0.0,
        part_us=0.09,
        level_us=0.7,
        word_us=0.03,  # 64 x 8k with 8/1: 8 warps end 0.14 us before 4
        merge_us=0.0,
        turn_us=2.7,  # 256 x 200: 16 rows per CTA take 47 to 50 us, 8 on each of two CTAs 37
        row_crowding=0.0,
        lone_sm=1.2,  # 1 x 8k in whole rows: 53.8 us
        pair_weight=0.018,  # 128 x 4k on page 64: two heads per CTA end 1.3% before T8
        pair_us=0.75,  # 64 x 1k: 0.7 us after one
    ),
    "sm80": COSTS["sm80"],
}


@dataclass(frozen=True)
class Cost:
    """A launch's expected time in us, term by term, and the schedule that the device is expected to derive.

    slices: equal parts of the batch, each for one CTA of every unit. pieces: of all slices of one unit. parts: of one cut row; 1
    if no row is cut.
    """

    slices: int
    pieces: int
    parts: int
    start_us: float
    stream_us: float
    drain_us: float
    pieces_us: float
    combine_us: float
    turns_us: float

    @property
    def total_us(self) -> float:
        """The sum of the terms."""
        return sum(getattr(self, f"{name}_us") for name in TERMS)

    def __str__(self) -> str:
        terms = " + ".join(f"{name} {getattr(self, f'{name}_us'):.1f}" for name in TERMS)
        cut = "no row cut" if self.parts == 1 else f"{self.parts} parts a cut row"
        return f"{self.total_us:.1f} us = {terms} ({self.slices} slices, {self.pieces} pieces, {cut})"


TERMS = ("start", "stream", "drain", "pieces", "combine", "turns")


def predict_us(
    problem: DecodeProblem, config: DecodeConfig, arch: Arch, target: Target, sm_count: int, partition: Partition = "balanced"
) -> Cost:
    """What `problem` is expected to take with `config` on a device with `sm_count` SMs."""
    return cost_of(problem, kernel_spec(problem, arch, target, config, partition=partition), config.ctas_per_sm, sm_count)


def cost_of(problem: DecodeProblem, spec: KernelSpec, ctas_per_sm: int, sm_count: int) -> Cost:
    """What `problem` is expected to take with the kernel of `spec` and `ctas_per_sm` CTAs on each of `sm_count` SMs."""
    if spec.dealt:
        return dealt_cost(problem, spec, sm_count)
    costs = costs_of(problem)[spec.arch]
    units, grid = units_of(problem, spec), grid_ctas_of(problem, spec, sm_count, ctas_per_sm)
    slices, pieces, parts = expected_schedule(problem, spec, grid)
    stream = stream_us(kv_bytes(problem), spec, costs, ctas_per_sm, grid, sm_count)
    turns = pieces / slices
    if spec.partition == "whole":
        rounds, rest = divmod(pieces, slices)  # the CTAs of all slices read a row each, `rounds` times, then those of `rest`
        turns = rounds + (rest > 0)
        row, ctas = kv_bytes(problem) // max(1, pieces), [(slices * units, rounds), (rest * units, 1)]
        stream = sum(count * round_us(row // units, n, spec, costs, ctas_per_sm, grid, sm_count) for n, count in ctas)
    return Cost(
        slices=slices,
        pieces=pieces,
        parts=parts,
        start_us=costs.start_us + costs.second_cta_us * (ctas_per_sm - 1) + costs.pair_us * (spec.unit_heads - 1),
        stream_us=stream,
        drain_us=costs.drain_us * spec.tile_bytes / 1024 + costs.warp_us * spec.num_warps,
        pieces_us=pieces_us(spec, costs, pieces / slices if parts > 1 else 0.0, -(-slices * units // sm_count)),
        combine_us=combine_us(spec, costs, parts),
        turns_us=max(0.0, turns_us(spec, costs, turns, ctas_per_sm) - stream),
    )


def dealt_cost(problem: DecodeProblem, spec: KernelSpec, sm_count: int) -> Cost:
    """The cost of long queries, which the tensor core limits: both products at a rate, in whole rounds of items (work tiles)."""
    dealt = deal(problem, spec, sm_count)
    rows = problem.batch_size * problem.num_kv_heads * problem.packed_rows
    narrow = 1 - NARROW_PRODUCTS * max(0.0, LONE_COLUMNS / spec.padded_head_dim - 1)
    products = 4 * rows * mean_keys(problem) * spec.padded_head_dim / (product_rate(problem) * narrow)
    idle = dealt.rounds * sm_count / max(1, dealt.items)
    nothing = dict.fromkeys(("drain_us", "pieces_us", "combine_us", "turns_us"), 0.0)
    start = costs_of(problem)[spec.arch].start_us
    return Cost(slices=sm_count, pieces=dealt.items, parts=dealt.pieces, start_us=start, stream_us=products * idle, **nothing)


def mean_keys(problem: DecodeProblem) -> float:
    """Keys that a query row sees, on average, if queries are the longest that a plan takes."""
    unseen = (problem.max_q_len - 1) / 2 if problem.modifiers.causal == "bottom_right" else 0.0
    return max(row_tokens(problem) - unseen, 1.0)


@dataclass(frozen=True)
class Deal:
    """How the longest queries that a plan takes are dealt: pieces of a block, items (all pieces), rounds of one item per SM.

    tiles: that the busiest SM attends to, and what items cost it beyond them.
    """

    pieces: int
    items: int
    rounds: int
    tiles: int

    @property
    def blocks(self) -> float:
        """Whole blocks that an SM attends to, rounds with idle SMs included."""
        return self.rounds / self.pieces


def deal(problem: DecodeProblem, spec: KernelSpec, sm_count: int) -> Deal:
    """The Deal of a plan, with the rule by which a launch cuts its blocks (device/schedule/pieces.py) if the spec lets it."""
    blocks = problem.batch_size * units_of(problem, spec)
    longest = -(-row_tokens(problem) // spec.tile_n)
    mean = -(-int(mean_keys(problem)) // spec.tile_n)

    def dealt(pieces: int) -> Deal:
        rounds = -(-blocks * pieces // sm_count)
        tiles = -(-max(longest, rounds * mean) // pieces) + rounds * (ITEM_COST + spec.cut_cost * (pieces > 1))
        return Deal(pieces, blocks * pieces, rounds, tiles)

    most = min(MOST_PIECES_OF_BLOCK, SLOTS[spec.partition] * sm_count // max(1, blocks), longest // LEAST_PIECE)
    return min(map(dealt, range(1, max(1, most) + 1)), key=lambda one: one.tiles)


def divided_tiles(problem: DecodeProblem, spec: KernelSpec, num_ctas: int) -> int:
    """As Deal.tiles, if the rows of each unit (head block) are divided evenly between its CTAs."""
    mean = -(-int(mean_keys(problem)) // spec.tile_n)
    return -(-problem.batch_size * mean * units_of(problem, spec) // num_ctas) + ITEM_COST + PIECE_COST


def product_rate(problem: DecodeProblem) -> float:
    """Operations per us of both products of long queries, on the whole device."""
    if not problem.has_8_bits:
        return PRODUCT_RATE
    return PRODUCT_RATE_OF_TOKEN_SCALES if problem.has_token_scales else PRODUCT_RATE_OF_8_BITS


def costs_of(problem: DecodeProblem) -> dict[Arch, ArchCosts]:
    """The constants of a problem's caches. 16-bit caches with token scales were not measured: they count as without."""
    if not problem.has_8_bits:
        return COSTS
    return COSTS_OF_TOKEN_SCALES if problem.has_token_scales else COSTS_OF_8_BITS


def row_tokens(problem: DecodeProblem) -> int:
    """KV tokens that every row is taken to have."""
    return ASSUMED_SEQ_LEN if problem.max_seq_len is None else problem.max_seq_len


def kv_bytes(problem: DecodeProblem) -> int:
    """Bytes of K and V and their scales. The m-tiles of a KV head share them through L2."""
    return problem.batch_size * row_tokens(problem) * problem.num_kv_heads * problem.kv_bytes


def expected_schedule(problem: DecodeProblem, spec: KernelSpec, grid: int) -> tuple[int, int, int]:
    """(slices, pieces, parts of a cut row) of one unit, as the device's work_scheduler makes them; 1 part if nothing is cut.

    If rows stay whole, slices past the batch have no work and are not counted. It does not foresee that equal rows may leave
    slices without work (equal_rows.equal_parts): the times that the model was fitted to are of before.
    """
    batch, tiles = problem.batch_size, -(-row_tokens(problem) // spec.tile_n)
    most = grid // units_of(problem, spec)
    even = max(1, min(batch * tiles // spec.min_share, most))
    alike = batch == 1 or (even == most > batch > 0 and most % batch == 0)  # as many slices for each row
    if alike and spec.partition == "balanced" and spec.q_lens is None:
        return even, even, even // batch
    cost = batch * (tiles + spec.piece_cost)
    slices = max(1, min(cost // spec.min_share, most))
    if spec.partition == "whole":
        return max(1, min(slices, batch)), batch, 1
    working = max(1, -(-slices * batch * tiles // max(cost, 1)))  # all other slices end before their row's first tile
    parts = min(working, slices // max(batch, 1) + 2)  # a row as long as x slices touches at most floor(x) + 2
    return slices, batch + working - 1, parts


def stream_us(nbytes: int, spec: KernelSpec, costs: ArchCosts, ctas_per_sm: int, grid: int, sm_count: int) -> float:
    """Time to read the KV bytes, tile by tile, at the bandwidth of the SMs that the grid fills; its fullest SM ends last."""
    idle = sm_count * -(-grid // sm_count) / grid - 1
    lone = costs.lone_weight + costs.narrow_weight * (LONE_COLUMNS / spec.padded_head_dim - 1) if ctas_per_sm == 1 else 0.0
    shared = costs.pair_weight if spec.unit_heads > 1 else 0.0
    factor = 1 + costs.idle_weight * idle + lone - shared
    return nbytes * (1 + costs.tile_bytes / spec.tile_bytes) / costs.bandwidth * factor


def round_us(nbytes: int, ctas: int, spec: KernelSpec, costs: ArchCosts, ctas_per_sm: int, grid: int, sm_count: int) -> float:
    """Time for `ctas` of the grid's CTAs to read `nbytes` each: at all SMs' bandwidth, or that of the SMs that work if longer."""
    lone = costs.bandwidth * costs.lone_sm / sm_count
    alone = nbytes * -(-ctas // sm_count) * (1 + costs.tile_bytes / spec.tile_bytes) / lone
    return max(stream_us(nbytes * ctas, spec, costs, ctas_per_sm, grid, sm_count), alone)


def pieces_us(spec: KernelSpec, costs: ArchCosts, pieces: float, shares: int) -> float:
    """Time for parts of cut rows: `pieces` in each share, `shares` on an SM. Whole rows are counted by turns_us."""
    return costs.part_us * spec.packed_rows * min(MOST_CUT, pieces) * CROWDING ** min(shares - 1, MOST_CROWDED)


def turns_us(spec: KernelSpec, costs: ArchCosts, pieces: float, ctas_per_sm: int) -> float:
    """Time between a CTA's pieces, next to another CTA of its SM if there are two."""
    crowding = CROWDING + costs.row_crowding * max(0, spec.packed_rows - CROWDED_ROWS)
    return costs.turn_us * PAIRED_TURN ** (spec.unit_heads - 1) * crowding ** (ctas_per_sm - 1) * max(0.0, pieces - 1)


def combine_us(spec: KernelSpec, costs: ArchCosts, parts: int) -> float:
    """Time to combine a cut row's parts: the CTAs of all parts but the first divide its columns (device/combine/combine.py)."""
    if parts == 1:
        return 0.0
    line = LINE_WORDS * (parts - 1)
    columns = -(-spec.packed_rows * spec.row_words // line) * LINE_WORDS  # of one CTA, in words
    words = parts * columns / (32 * spec.num_warps)
    return costs.level_us + costs.word_us * words + costs.merge_us * spec.num_warps * (parts > PARTS_IN_FLIGHT)
