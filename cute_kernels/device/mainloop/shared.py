"""The shared memory of a CTA. Its share: a work partition; a piece: a KV split; a crew: the CTAs that combine a cut row."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, Int64

from ...config.decode import ITEMS, NEWS, KernelSpec
from ...config.tiling import TILE_M
from ..attend.pack_gqa import query_layout
from ..elements import ELEMENT_TYPES
from ..kv.scale import ScaleRing, make_scale_rings
from ..kv.source import row_fields
from . import tile
from .arena import Arena, arena_of

SHARE_WORDS = 7  # words of a Share that a warp publishes: a CTA knows unit, index and units by itself


@dataclass(frozen=True)
class Shared:
    """The swizzled rings of K and V, their tokens' scales, the query buffers, the merge buffer, holes (attend/mask).

    wide: rings of 8-bit K and V tiles widened for wgmma, [token, element, stage], else None; wide_scales: their tokens' scales.
    barriers: the mbarriers, by the functions below.

    inverses: of the row factors of each query, f32 [row, query] (attend/query_range.py).
    Only the end of a share needs the next three, which stay out of registers: opener, the slice that opened the share's first row
    (PieceResults.find_opener), or crew and combines (schedule/crew.py). opener and crew share memory: a partition needs only one.
    opening, pages: one warp finds them for the others; seen: words of an opening for the warp that looks ahead, or None
    (schedule/opening.py).
    declined: Int8 per piece of the share's first row: whether its CTA declines.
    items: words of an Item (schedule/dealing.py) [word, slot], if items are dealt.
    """

    rings: tuple
    wide: tuple[cute.Tensor | None, cute.Tensor | None]
    scales: tuple[ScaleRing | None, ScaleRing | None]
    wide_scales: tuple[ScaleRing | None, ScaleRing | None]
    query: cute.Tensor
    inverses: cute.Tensor
    merge: tuple
    barriers: cute.Pointer
    holes: cute.Tensor
    opener: cute.Tensor
    crew: cute.Tensor
    combines: cute.Tensor
    opening: cute.Tensor
    pages: cute.Tensor
    declined: cute.Tensor
    seen: cute.Tensor | None = None
    items: cute.Tensor | None = None


def crew_words(spec: KernelSpec) -> int:
    """Words of a Crew (schedule/crew.py)."""
    return 9 if spec.several else 7


def item_words(spec: KernelSpec) -> int:
    """Words of an Item (schedule/dealing.py)."""
    return 3 + 4 * spec.deals_pieces + len(row_fields(spec))


def merge_tensors(spec: KernelSpec, base: cute.Pointer) -> tuple:
    """Shared memory of the merge, f32: O [row, column, order], then row_max and row_sum [row, order], and lse [row].

    For warpgroups O has one order only, and only they have an lse. If no states merge, it is only what the combine needs.
    """
    if spec.settles_alone:
        return cute.make_tensor(base, cute.make_layout(spec.merge_floats)), None, None, None
    rows, warps, columns = spec.merge_rows, spec.merge_places, spec.merge_columns
    outputs = 1 if spec.by_warpgroup else warps
    states = cute.make_layout((rows, warps), stride=(warps, 1))
    acc = cute.make_layout((rows, columns, outputs), stride=(columns, 1, rows * columns))
    row_max = base + rows * columns * outputs
    row_sum, lse = row_max + rows * warps, row_max + 2 * rows * warps
    settled = cute.make_tensor(lse, cute.make_layout(rows)) if spec.by_warpgroup else None
    return cute.make_tensor(base, acc), cute.make_tensor(row_max, states), cute.make_tensor(row_sum, states), settled


def allocate_tiles(smem, spec: KernelSpec, shapes: tuple) -> tuple:
    """Swizzled memory for tiles of K and of V; None for a shape that is None."""
    tiles: list[cute.Tensor | None] = []
    for shape, math_type in zip(shapes, (spec.k_math, spec.v_math), strict=True):
        found = None
        if shape is not None:
            layout, swizzle = tile.ring_layout(shape), tile.swizzle(shape)
            found = smem.allocate_tensor(ELEMENT_TYPES[math_type], layout, byte_alignment=1024, swizzle=swizzle)
        tiles.append(found)
    return tuple(tiles)


def allocate(spec: KernelSpec, smem) -> Shared:
    """Lays out the CTA's shared memory. smem: an allocator."""
    tiles, states = smem, smem
    if spec.shares_ring:  # no tile is in flight while the states of a piece's end use the memory
        base = arena_of(smem, spec.ring_bytes)
        tiles, states = (Arena(base, spec.ring_bytes) for _ in range(2))
    rings = allocate_tiles(tiles, spec, spec.rings)
    wide = allocate_tiles(smem, spec, spec.wide)
    query = smem.allocate_tensor(
        ELEMENT_TYPES[spec.element_type], query_layout(spec), byte_alignment=1024 if spec.by_warpgroup else 128
    )
    merge: tuple = ()
    if spec.merge_floats:
        merge = merge_tensors(spec, states.allocate_array(Float32, spec.merge_floats, byte_alignment=16))
    barriers = smem.allocate_array(Int64, spec.barrier_count)
    opening_words, seen = SHARE_WORDS + len(row_fields(spec)), None
    shapes = spec.hole_stages * spec.hole_words, crew_words(spec) + 1, opening_words, 32
    holes, crew, opening, pages = (smem.allocate_tensor(Int32, cute.make_layout(n), byte_alignment=16) for n in shapes)
    declined = smem.allocate_tensor(Int8, cute.make_layout(spec.most_pieces), byte_alignment=16)
    if spec.hears_share:
        seen = smem.allocate_tensor(Int32, cute.make_layout(opening_words), byte_alignment=16)
    scales = (None, None) if spec.settles_scales else make_scale_rings(spec, smem, spec.num_stages)
    wide_scales = make_scale_rings(spec, smem, spec.wide_scale_stages, widened=True) if spec.widens_tiles else (None, None)
    inverses = smem.allocate_tensor(Float32, cute.make_layout((TILE_M * spec.row_tiles, 2)), byte_alignment=16)
    combines = cute.make_tensor(crew.iterator + crew_words(spec), cute.make_layout(1))
    end = crew, crew, combines  # opener, crew, combines
    items = smem.allocate_tensor(Int32, cute.make_layout((item_words(spec), ITEMS))) if spec.dealt else None
    return Shared(
        rings, wide, scales, wide_scales, query, inverses, merge, barriers, holes, *end, opening, pages, declined, seen, items
    )


def full_barrier(spec: KernelSpec, shared: Shared, stage: Int32 | int, which: Int32 | int = 0) -> cute.Pointer:
    """The barrier "a stage's tile has come": its producers arrive. which: K (0) or V (1) if products overlap, else both."""
    return shared.barriers + full_place(spec, stage, which)


def full_place(spec: KernelSpec, stage: Int32 | int, which: Int32 | int = 0) -> Int32 | int:
    """The index of a full barrier among all mbarriers."""
    return (values_barriers(spec) * which if spec.overlaps else 0) + stage


def empty_barrier(spec: KernelSpec, shared: Shared, stage: Int32 | int, which: Int32 | int = 0) -> cute.Pointer:
    """The barrier "a stage is free": its readers arrive. As full_barrier."""
    return full_barrier(spec, shared, stage, which) + spec.num_stages


def values_barriers(spec: KernelSpec) -> int:
    """The index of the first mbarrier that V has alone: V's come after all others."""
    return spec.barrier_count - 2 * spec.num_stages


def item_barrier(spec: KernelSpec, shared: Shared, slot: Int32 | int) -> cute.Pointer:
    """The barrier "a slot has an item": the producer arrives."""
    return shared.barriers + (values_barriers(spec) - 2 * ITEMS) + slot


def taken_barrier(spec: KernelSpec, shared: Shared, slot: Int32 | int) -> cute.Pointer:
    """The barrier "all have taken a slot's item": each lane of a warp that does so arrives."""
    return shared.barriers + (values_barriers(spec) - ITEMS) + slot


def crew_barrier(spec: KernelSpec, shared: Shared) -> cute.Pointer:
    """The barrier "the crew lies in shared memory": the producer arrives."""
    return shared.barriers + 2 * spec.num_stages


def announced_barrier(spec: KernelSpec, shared: Shared) -> cute.Pointer:
    """The barrier "the row's last CTA has announced itself": the producer arrives."""
    return shared.barriers + 2 * spec.num_stages + 1


def query_barrier(spec: KernelSpec, shared: Shared, buffer: Int32 | int) -> cute.Pointer:
    """The barrier "a query buffer has a settled query": each lane of the warps that bring queries arrives."""
    return shared.barriers + (spec.barrier_count - spec.query_barriers) + buffer


def used_barrier(spec: KernelSpec, shared: Shared, buffer: Int32 | int) -> cute.Pointer:
    """The barrier "a query buffer is free": each lane of the consumer warps arrives."""
    return query_barrier(spec, shared, buffer) + spec.query_buffers


def merged_barrier(spec: KernelSpec, shared: Shared) -> cute.Pointer:
    """The barrier "the merge buffer is free": the warps that store pieces arrive once they have stored their parts of one."""
    return query_barrier(spec, shared, 2 * spec.query_buffers)


def mergeable_barrier(spec: KernelSpec, shared: Shared) -> cute.Pointer:
    """The barrier "the merge buffer has a piece": each lane of the consumer warps arrives."""
    return query_barrier(spec, shared, 2 * spec.query_buffers + 1)


def left_barrier(spec: KernelSpec, shared: Shared, place: Int32 | int) -> cute.Pointer:
    """The barrier "a place of the merge has the first of its two states": each lane of the warp that left it arrives."""
    return query_barrier(spec, shared, 2 * spec.query_buffers + 2) + place


def zeroed_barrier(spec: KernelSpec, shared: Shared, stage: Int32 | int) -> cute.Pointer:
    """The barrier "unseen rows of a stage's V are zero": the first of several readers arrives."""
    return shared.barriers + 2 * spec.num_stages + NEWS + stage


def widened_barrier(spec: KernelSpec, shared: Shared, stage: Int32 | int, which: Int32 | int = 0) -> cute.Pointer:
    """The barrier "a wide stage has its tile": the warps that widen arrive. As full_barrier; scales come with K.

    If the warp that brings scales settles them (settles_scales), each of its lanes arrives for K too.
    """
    return shared.barriers + (3 * spec.num_stages + NEWS) + 2 * spec.wide_stages * which + stage


def narrow_barrier(spec: KernelSpec, shared: Shared, stage: Int32 | int, which: Int32 | int = 0) -> cute.Pointer:
    """The barrier "a wide stage is free": its readers arrive. As full_barrier; scales go with K."""
    return widened_barrier(spec, shared, stage, which) + spec.wide_stages


def factor_barrier(spec: KernelSpec, shared: Shared, stage: Int32 | int) -> cute.Pointer:
    """The barrier "a stage has the factors of V's tokens" (kv/value_scales.py): each lane of the warp that made them arrives."""
    return widened_barrier(spec, shared, 0) + 4 * spec.wide_stages + stage


@cute.jit
def read_holes(spec: cutlass.Constexpr, shared: Shared, word: Int32) -> Int32:
    """A word of a stage's holes, for all lanes. Only lane 0, which also frees the stage, reads it."""
    holes = Int32(0)
    if cutlass.const_expr(spec.source == "paged"):
        if cute.arch.lane_idx() == 0:
            holes = shared.holes[word]
        holes = cute.arch.shuffle_sync(holes, 0)
    return holes
