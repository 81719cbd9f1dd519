"""Packs the query heads that share one KV head, of all query rows of a unit (head block), into the rows of tensor-core tiles.

A unit of two KV heads packs the query heads of both. Packed row r lies in row r % TILE_M of m-tile r // TILE_M of the unit;
query_rows.place_in says where it is in q. Columns past head_dim are zero on load. Rows past the last packed row are zero, or hold
whatever shared memory held: no row of a product depends on another, and these rows are never stored. Shared memory keeps a tile
as m16n8k16 A fragments, eight elements per lane and k16 step; if they fit, registers hold them while a piece (KV split) lasts. A
warpgroup reads a tile as swizzled rows of elements (mainloop/tile.py), or copies its tile from them to registers. There are two
buffers: the next row's query comes while this row's is in use. If shared memory is short there is one: the next query comes once
this one is in registers, or once a warpgroup has read it for the last time.
"""

from itertools import product

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...config.decode import LINE_BYTES, KernelSpec
from ...config.problem import MMA_K, UNIT_BYTES, ElementType
from ...config.tiling import TILE_M, WARPGROUP, WARPGROUP_M
from ..elements import ELEMENT_TYPES
from ..mainloop.tile import SWIZZLE_ROWS, columns, swizzle, swizzled
from ..ptx.barriers import CONSUMERS, ROWS
from ..ptx.cp_async import copy_async
from ..ptx.policies import prefetch
from ..ptx.registers import LANES, quotient, remainder
from ..ptx.warps import warp_number
from .query_range import rescale
from .query_rows import QueryBlock, block_view, packed_row_of, place_in, place_in_view

PAIR_BYTES = 4  # of two 16-bit columns of the query, or of one f32 column
VECTOR = 8  # 16-bit columns of the query in 16 bytes
ROWS_TOGETHER = 4  # packed rows that a warp of a warpgroup rescales at a time, so that one row's steps hide those of another
FRAGMENT = 8  # elements of one lane's A fragment of a k16 step: (column pair, row, half of the columns)


def query_layout(spec: KernelSpec) -> cute.Layout:
    """(element, lane, k16 step of each m-tile, buffer) -> element in shared memory: a lane reads its fragment in one load.

    For a warpgroup: (element, buffer).
    """
    if spec.by_warpgroup:
        return cute.make_layout((spec.block_rows * spec.padded_head_dim, spec.query_buffers))
    elements, columns = spec.query_fragment
    return cute.make_layout((elements, LANES, spec.row_tiles * (spec.padded_head_dim // columns), spec.query_buffers))


def query_buffer(spec: KernelSpec, query: cute.Tensor, index: Int32) -> cute.Tensor:
    """The buffer of row `index`: [element, lane, k16 step], for a warpgroup [element]."""
    buffer = index % spec.query_buffers if spec.query_buffers > 1 else 0
    return query[None, buffer] if spec.by_warpgroup else query[None, None, None, buffer]


def fragments(tensor: cute.Tensor) -> cute.Tensor:
    """Registers [element, step] as A fragments ((2, 2, 2), 1, step)."""
    steps = cute.size(tensor) // FRAGMENT
    return cute.make_tensor(tensor.iterator, cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, FRAGMENT)))


def load_fragment(address: Int32, element_type: ElementType) -> cute.Tensor:
    """The A fragment of a k16 step. address: lane l has that of row l % 16, column 8 (l // 16), in shared memory."""
    found = cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[Int32(address)],
    )
    words = cute.make_rmem_tensor(FRAGMENT // 2, Int32)
    for i in range(FRAGMENT // 2):
        words[i] = found[i]
    return fragments(cute.recast_tensor(words, ELEMENT_TYPES[element_type]))[None, None, 0]


def place_of(spec: KernelSpec, row: Int32, column: Int32) -> tuple | Int32:
    """(pair, lane, k16 step) of a pair of columns, the first of them even: in the codec's order of K's columns (kv/codec.py).

    For a warpgroup: the number of the pair alone.
    """
    if spec.by_warpgroup:
        return swizzled(spec.query_tile, 0, row, column * UNIT_BYTES) // PAIR_BYTES
    step, rest = quotient(column, MMA_K), remainder(column, MMA_K)
    if spec.row_tiles > 1:
        step, row = quotient(row, TILE_M) * (spec.padded_head_dim // MMA_K) + step, remainder(row, TILE_M)
    half, quad = ((rest >> 1) & 1, rest >> 2) if spec.k_bytes == 1 else (rest >> 3, (rest >> 1) & 3)
    return quotient(row, 8) + 2 * half, remainder(row, 8) * 4 + quad, step


def word_columns(spec: KernelSpec) -> int:
    """Columns of the query in a 32-bit word."""
    return PAIR_BYTES // spec.q_bytes


def lane_columns(spec: KernelSpec) -> list[Int32]:
    """The first of each pair of columns that this lane has of a row; some may lie past padded_head_dim."""
    return [first + 2 * cute.arch.lane_idx() for first in range(0, spec.padded_head_dim, 2 * LANES)]


def sync_consumers(spec: KernelSpec):
    """Barrier of the consumer warps."""
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=spec.num_warps * 32)


def warpgroup_of() -> Int32:
    """Which of the attending warpgroups this warp belongs to."""
    return quotient(cute.arch.make_warp_uniform(warp_number()), WARPGROUP)


def sync_rows(spec: KernelSpec):
    """Barrier of the warps that share a query's rows: one warpgroup if items are dealt, else all consumers."""
    if spec.dealt:
        cute.arch.barrier(barrier_id=ROWS + warpgroup_of(), number_of_threads=WARPGROUP * LANES)
    else:
        sync_consumers(spec)


@cute.jit
def prefetch_query(spec: cutlass.Constexpr, q: cute.Tensor, block: QueryBlock):
    """A warp prefetches the query of a block of packed rows into L2, one cache line per lane."""
    lines = cutlass.const_expr(-(-spec.head_dim * spec.q_bytes // LINE_BYTES))
    for base in cutlass.range_constexpr(0, spec.packed_rows * lines, LANES):
        line = base + cute.arch.lane_idx()
        if line < block.rows * lines:
            place = (*place_in(spec, block, line // lines), line % lines * (LINE_BYTES // spec.q_bytes))
            prefetch((q.iterator + cute.crd2idx(place, q.layout)).toint())


@cute.jit
def fetch_query(spec: cutlass.Constexpr, q: cute.Tensor, block: QueryBlock, shared: cute.Tensor):
    """The consumer warps start to copy the query of a block of packed rows to shared memory; settle_query waits for the copies.

    shared: a buffer [element, lane, k16 step]. A warp copies whole rows if it rescales them (brings_rows), else k16 steps of all
    rows: by heads, a launch whose CTAs all read one row's query ended up to 1 us later (1 x 16k + 15 x 64 at 8/1; why is not
    known). Where warps are paired, paired_query.py brings queries.
    """
    if cutlass.const_expr(spec.by_warpgroup):
        fetch_rows(spec, q, block, shared)
    else:
        fetch_fragments(spec, q, block, shared, warp_number())
    cute.arch.cp_async_commit_group()


@cute.jit
def fetch_fragments(spec: cutlass.Constexpr, q: cute.Tensor, block: QueryBlock, shared: cute.Tensor, warp: Int32):
    """fetch_query into the layout from which each lane reads its fragments. warp: this one's number."""
    source, lane = block_view(spec, q, block), cute.arch.lane_idx()
    columns = cutlass.const_expr(spec.query_fragment[1])
    steps = cutlass.const_expr(spec.padded_head_dim // columns)
    stop = rows_to_bring(spec, block.rows) if cutlass.const_expr(spec.brings_rows) else spec.row_tiles * steps
    for turn in cutlass.range(warp, stop, spec.num_warps, unroll=1):
        if cutlass.const_expr(spec.brings_rows):
            for column in lane_columns(spec):
                if column < spec.padded_head_dim:
                    fetch_pair(spec, source, block, packed_row_of(spec, turn), column, shared, place_of(spec, turn, column))
        else:
            first, step = Int32(0), turn
            if cutlass.const_expr(spec.row_tiles > 1):
                first, step = quotient(turn, steps) * TILE_M, remainder(turn, steps)
            for half, rows in product(range(2), range(2)):
                column = step * columns + lane % 4 * word_columns(spec) + columns // 2 * half
                word = cutlass.const_expr(half + 2 * rows if spec.splits else rows + 2 * half)
                row = packed_row_of(spec, first + lane // 4 + 8 * rows)
                fetch_pair(spec, source, block, row, column, shared, (word, lane, turn))


def rows_to_bring(spec: KernelSpec, rows: Int32) -> Int32:
    """How many rows of a unit's m-tiles warps bring: all, if the packed rows of two KV heads are in different ones."""
    return rows if spec.tile_heads == 1 else Int32(spec.block_rows)


def rows_apart(spec: KernelSpec, per_row: int) -> int:
    """Packed rows from one turn of fetch_rows to the next if these are whole query rows, and the same row of a swizzle; else 0.

    per_row: lanes that copy a row. An address is then a constant away from that of the turn before.
    """
    rows = LANES // per_row * (1 if spec.dealt else spec.num_warps)
    regular = spec.several and LANES % per_row == 0 and rows % spec.group_size == 0 and rows % SWIZZLE_ROWS == 0
    return rows if regular else 0


@cute.jit
def fetch_rows(spec: cutlass.Constexpr, q: cute.Tensor, block: QueryBlock, shared: cute.Tensor):
    """fetch_query as rows of elements: by 16 bytes if q's address and strides allow it. Rows past the last stay as they are."""
    source, warp = block_view(spec, q, block), cute.arch.make_warp_uniform(warp_number())
    per_row = cutlass.const_expr(spec.padded_head_dim // VECTOR)
    turns = cutlass.const_expr(-(-spec.block_rows // spec.num_warps * per_row // LANES))
    strides = [source.iterator.toint()] + [Int64(stride) * spec.q_bytes for stride in cute.flatten_to_tuple(source.stride)[:-1]]
    odd = strides[0]
    for stride in strides[1:]:
        odd = odd | stride
    aligned = odd % (VECTOR * spec.q_bytes) == 0
    apart = cutlass.const_expr(rows_apart(spec, per_row))
    for turn in cutlass.range_constexpr(turns):
        index = turn * LANES + cute.arch.lane_idx()
        row, column = quotient(index, per_row), remainder(index, per_row) * VECTOR
        row = warp * TILE_M + row if cutlass.const_expr(spec.dealt) else warp + row * spec.num_warps
        if cutlass.const_expr(apart == 0):
            if row < block.rows:
                copy_vector(spec, *ends_of_copy(spec, source, block, shared, row, column), aligned)
        else:
            if cutlass.const_expr(turn == 0):
                at, target = ends_of_copy(spec, source, block, shared, row, column)
            else:
                at += strides[-2] * (apart // spec.group_size)
                target += apart * spec.query_tile.column_block * UNIT_BYTES
            if row < block.rows:
                copy_vector(spec, at, target, aligned)


def ends_of_copy(
    spec: KernelSpec, source: cute.Tensor, block: QueryBlock, shared: cute.Tensor, row: Int32, column: Int32
) -> tuple[Int64, Int32]:
    """(the global, the shared address) of VECTOR columns of a packed row."""
    at = (source.iterator + cute.crd2idx((*place_in_view(spec, block, row), column), source.layout)).toint()
    return at, shared.iterator.toint() + swizzled(spec.query_tile, 0, row, column * spec.q_bytes)


@cute.jit
def copy_vector(spec: cutlass.Constexpr, at: Int64, target: Int32, aligned: Boolean):
    """Starts to copy VECTOR columns, pair by pair unless the addresses are `aligned`."""
    if aligned:
        copy_async(at, target, VECTOR * spec.q_bytes, Boolean(True))
    else:
        for pair in cutlass.range_constexpr(VECTOR // 2):
            copy_async(at + pair * PAIR_BYTES, target + pair * PAIR_BYTES, PAIR_BYTES, Boolean(True))


@cute.jit
def fetch_pair(
    spec: cutlass.Constexpr, source: cute.Tensor, block: QueryBlock, row: Int32, column: Int32, shared: cute.Tensor, place: tuple
):
    """Starts to copy a pair of columns of a packed row to its place, or zeros if there is no such pair. source: block_view.

    It uses cp.async. If head_dim is odd, single 16-bit columns are there when it returns. With f32 a pair is one column.
    """
    at, lane, step = place
    word = cutlass.const_expr(word_columns(spec))
    pair = cutlass.const_expr(word if spec.head_dim % word == 0 else 1)
    for c in cutlass.range_constexpr(0, word, pair):
        inside = row < block.rows and column + c < spec.head_dim
        offset = Int64(0)
        if inside:
            offset = Int64(cute.crd2idx((*place_in_view(spec, block, row), column + c), source.layout))
        if cutlass.const_expr(pair == word):
            target = shared.iterator + cute.crd2idx((word * at, lane, step), shared.layout)
            copy_async((source.iterator + offset).toint(), target.toint(), PAIR_BYTES, inside)
        else:
            shared[word * at + c, lane, step] = source.iterator[offset] if inside else shared.element_type(0.0)


@cute.jit
def settle_query(
    spec: cutlass.Constexpr,
    shared: cute.Tensor,
    inverses: cute.Tensor,
    heads: Int32,
    sign: Float32,
    fresh: Boolean,
):
    """Each warp waits for its copies, and rescales the packed rows that it copied, in place, if K needs it (query_range.py).

    inverses: those of the rows' factors, f32 [row]; sign: of K's scale; fresh: whether the buffer is as it came. Other warps
    see the result after a barrier.
    """
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(spec.rescales_query):
        if cutlass.const_expr(spec.by_warpgroup):
            cute.arch.sync_warp()  # a lane has fetched elements that other lanes rescale
        words, columns = cute.recast_tensor(shared, Int32), lane_columns(spec)
        begin, step, stop = warp_number(), spec.num_warps, cutlass.select_(fresh, rows_to_bring(spec, heads), 0)
        if cutlass.const_expr(spec.dealt):  # a warp has fetched the rows of its own m-tile
            begin, stop, step = begin * TILE_M, cutlass.min(stop, (begin + 1) * TILE_M), 1
        together = cutlass.const_expr(ROWS_TOGETHER if spec.by_warpgroup else 1)
        for first in cutlass.range(begin, stop, step * together, unroll=1):
            rows = [cutlass.select_(first + i * step < stop, first + i * step, first) for i in range(together)]
            pairs = [load_row(spec, words, row, columns) for row in rows]
            found = [rescale(spec, row_pairs, sign) for row_pairs in pairs]
            store_row(spec, words, rows[0], columns, pairs[0], inverses, found[0])
            for i in cutlass.range_constexpr(1, together):
                if first + i * step < stop:
                    store_row(spec, words, rows[i], columns, pairs[i], inverses, found[i])
    if cutlass.const_expr(spec.by_warpgroup):
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def load_row(spec: cutlass.Constexpr, words: cute.Tensor, row: Int32, columns: list) -> cute.Tensor:
    """This lane's pairs of columns of a packed row; zeros for a pair past the padded columns."""
    pairs = cute.make_rmem_tensor(len(columns), Int32)
    pairs.fill(0)
    for i, column in enumerate(columns):
        if column < spec.padded_head_dim:
            pairs[i] = words[place_of(spec, row, column)]
    return pairs


@cute.jit
def store_row(
    spec: cutlass.Constexpr,
    words: cute.Tensor,
    row: Int32,
    columns: list,
    pairs: cute.Tensor,
    inverses: cute.Tensor,
    inverse: Float32,
):
    """Writes what load_row reads, and the inverse of the row's factor."""
    for i, column in enumerate(columns):
        if column < spec.padded_head_dim:
            words[place_of(spec, row, column)] = pairs[i]
    if cute.arch.lane_idx() == 0:
        inverses[row] = inverse


def hold_query(spec: KernelSpec) -> cute.Tensor | None:
    """Registers for the whole query [element, k16 step]; None where it is read from shared memory step by step."""
    shape = (FRAGMENT, spec.padded_head_dim // MMA_K)
    return cute.make_rmem_tensor(shape, ELEMENT_TYPES[spec.k_math]) if spec.holds_query else None


def reader_of(spec: KernelSpec) -> Int32 | int:
    """Which of the readers of its tiles this warp is."""
    return remainder(cute.arch.make_warp_uniform(warp_number()), spec.readers) if spec.readers > 1 else 0


def turn_of(spec: KernelSpec) -> Int32:
    """The number of this warp's group of readers; these groups take KV tiles in turn."""
    warp = cute.arch.make_warp_uniform(warp_number())
    return warp if spec.readers == 1 else quotient(warp, spec.readers)


def row_tiles_of(spec: KernelSpec) -> list[Int32 | int]:
    """The m-tiles that this warp attends to."""
    first = reader_of(spec) * spec.warp_tiles
    if spec.tile_heads > 1:  # a warp has tiles of one of the unit's KV heads
        first = remainder(cute.arch.make_warp_uniform(warp_number()), spec.tile_heads) * spec.warp_tiles
    return [first + i for i in range(spec.warp_tiles)]


def read_query(spec: KernelSpec, shared: cute.Tensor, held: cute.Tensor | None, row_tile: Int32 | int) -> cute.Tensor:
    """An m-tile of a settled query as the products take it: copied from a buffer to registers, or a view of that buffer.

    shared: [element, lane, k16 step of each m-tile].
    """
    if spec.by_warpgroup:
        return row_block(spec, shared, row_tile) if held is None else hold_rows(spec, shared, held, row_tile)
    as_it_is = spec.splits or spec.k_math == spec.element_type
    source = shared if as_it_is else cute.recast_tensor(shared, ELEMENT_TYPES[spec.k_math])
    if spec.row_tiles > 1:
        source = cute.domain_offset((0, 0, row_tile * (spec.padded_head_dim // spec.query_fragment[1])), source)
    if held is None:
        return source
    for step in range(spec.padded_head_dim // MMA_K):
        cute.autovec_copy(source[None, cute.arch.lane_idx(), step], held[None, step])
    return held


def hold_rows(spec: KernelSpec, shared: cute.Tensor, held: cute.Tensor, row_tile: Int32 | int) -> cute.Tensor:
    """Copies an m-tile of a settled query, rows of elements in shared memory, to registers."""
    lane = cute.arch.lane_idx()
    row, half = row_tile * TILE_M + lane % TILE_M, lane // TILE_M
    for step in range(spec.padded_head_dim // MMA_K):
        column = (step * MMA_K + half * 8) * spec.q_bytes
        fragment = load_fragment(shared.iterator.toint() + swizzled(spec.query_tile, 0, row, column), spec.k_math)
        held[None, step].store(cute.make_tensor(fragment.iterator, cute.make_layout(FRAGMENT)).load())
    return held


def row_block(spec: KernelSpec, shared: cute.Tensor, row_tile: Int32 | int) -> cute.Tensor:
    """The 64 rows [row, column] of a settled query that the warpgroup of an m-tile multiplies."""
    shape, rows = spec.query_tile, WARPGROUP_M
    block = shape.column_block
    begin = cute.recast_ptr(shared.iterator, swizzle(shape), ELEMENT_TYPES[spec.k_math])
    layout = cute.make_layout((rows, columns(shape)), stride=(block, (1, shape.tile_n * block)))
    return cute.make_tensor(begin + quotient(row_tile, WARPGROUP) * (rows * block), layout)


def read_inverses(spec: KernelSpec, shared: cute.Tensor, row_tile: Int32 | int) -> list[Float32] | None:
    """The inverses that settle_query left for this lane's rows of an m-tile; None where all are 1."""
    return [shared[row] for row in tile_rows_of(spec, row_tile)] if spec.limits_query else None


def lane_rows_of(spec: KernelSpec, row_tile: Int32 | int) -> list[Int32]:
    """The packed rows in use that this lane holds of an accumulator of a unit's m-tile."""
    return [packed_row_of(spec, row) for row in tile_rows_of(spec, row_tile)]


def tile_rows_of(spec: KernelSpec, row_tile: Int32 | int) -> list[Int32]:
    """The rows in use, of all m-tiles of a unit, that this lane holds of an accumulator of one m-tile."""
    return [row_tile * TILE_M + cute.arch.lane_idx() // 4 + 8 * r for r in range(spec.lane_rows)]


def query_step(spec: KernelSpec, query: cute.Tensor, step: int) -> cute.Tensor:
    """The A fragment of one k16 step."""
    if spec.holds_query:
        return fragments(query)[None, None, step]
    fragment = cute.make_rmem_tensor(FRAGMENT, query.element_type)
    cute.autovec_copy(query[None, cute.arch.lane_idx(), step], fragment)
    return fragments(fragment)[None, None, 0]
