"""Appends K and V of new tokens to a paged cache: one launch that reads each value once and writes it once.

A few lanes of a warp take one (token, head) row of K and of V, 16 bytes per load if the alignment allows. The loads of all
rows that a thread has, and of their slots, are issued together; a computed scale follows from the lanes' maximum, by shuffles.
Quotients are those of IEEE division, so that every backend stores the same bits. With a rotary embedding, K is rotated between
load and store, and further CTAs, after those of K and V, rotate q.
"""

from collections.abc import Callable
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64

from ...config.append import CTA_THREADS, AppendSpec
from ...kv.quantize import LARGEST_HALF, LEAST_AMAX, LEAST_NORMAL_HALF
from ..kv.encode import beyond_half, divide, divide_largest, encode, end_of_half, quantize
from ..kv.rotary import find_angles, rotate_row
from ..kv.scale import head_scale
from ..kv.status import POSITION_FAULT, SCALE_FAULT, report
from ..ptx.packed import as_words, larger_pair, select_bytes, widen, widen_pair
from ..ptx.registers import quotient, remainder
from .append_slots import INT32_MAX, find_slot, given_slot


class AppendKernel:
    """Launches the append for one spec."""

    def __init__(self, spec: AppendSpec):
        self.spec = spec
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch: starts while the previous kernel drains

    @cute.jit
    def __call__(
        self,
        k,
        v,
        k_cache,
        v_cache,
        table0,
        table1,
        table2,
        k_scale,
        v_scale,
        q,
        q_out,
        cos_sin_cache,
        positions,
        status: Int64,
        stream,
    ):
        """k, v [tokens, num_kv_heads, head_dim]; caches: 4-D, in the spec's axis order; scales: in the spec's forms.

        table0..2: slots [tokens], or a page table's tensors. q, q_out [tokens, num_heads, head_dim], cos_sin_cache
        [max_position, rotary_dim] and positions [tokens]: None if the spec does not have them. status: address of the
        plan's 4 int32 status words.
        """
        caches, scales = (k_cache, v_cache), (k_scale, v_scale)
        tables = tuple(table for table in (table0, table1, table2) if table is not None)
        num_ctas = self.ctas_of(k)
        if cutlass.const_expr(q is not None):
            num_ctas = num_ctas + self.ctas_of(q)
        divisors = tuple(None if x is None else cute.fast_divmod_create_divisor_v2(Int32(x.shape[1])) for x in (k, q))
        self.append(k, v, caches, tables, scales, (q, q_out), (cos_sin_cache, positions), status, divisors).launch(
            grid=(num_ctas, 1, 1),
            block=(CTA_THREADS, 1, 1),
            stream=stream,
            use_pdl=self.overlap,
        )

    def ctas_of(self, rows: cute.Tensor) -> Int32:
        """How many CTAs take the rows of a tensor [tokens, heads, head_dim]."""
        return cute.ceil_div(Int32(rows.shape[0]) * Int32(rows.shape[1]), self.spec.rows_per_cta)

    @cute.kernel
    def append(
        self,
        k,
        v,
        caches: tuple,
        tables: tuple,
        scales: tuple,
        queries: tuple,
        rotary: tuple,
        status: Int64,
        divisors: tuple,
    ):
        """Each CTA takes rows_per_cta (token, head) rows, heads innermost: the first CTAs rows of K and V, the others rows of q.

        divisors: fast divisors by num_kv_heads and by num_heads; the latter is None without q.
        """
        spec = self.spec
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        cta = cute.arch.block_idx()[0]
        if cutlass.const_expr(queries[0] is None):
            append_rows(spec, k, v, caches, tables, scales, rotary, status, divisors[0], cta)
        else:
            first = self.ctas_of(k)
            if cta < first:
                append_rows(spec, k, v, caches, tables, scales, rotary, status, divisors[0], cta)
            else:
                rotate_queries(spec, *queries, rotary, divisors[1], cta - first)


def row_of(spec: AppendSpec, cta: Int32, u: int) -> tuple[Int32, Int32]:
    """(row, lane) of a thread, for its u-th row among the CTA's rows."""
    thread = cute.arch.thread_idx()[0]
    return cta * spec.rows_per_cta + u * spec.row_groups + quotient(thread, spec.lanes), remainder(thread, spec.lanes)


def token_of(row: Int32, heads) -> tuple[Int32, Int32]:
    """(token, head) of a row. heads: a fast divisor by the number of heads.

    The mask changes nothing: products with 64-bit strides are shorter if the compiler knows that a factor is not negative.
    """
    token, head = divmod(row, heads)
    return Int32(token) & INT32_MAX, Int32(head) & INT32_MAX


@cute.jit
def append_rows(
    spec: cutlass.Constexpr,
    k: cute.Tensor,
    v: cute.Tensor,
    caches: tuple,
    tables: tuple,
    scales: tuple,
    rotary: tuple,
    status: Int64,
    heads,
    cta: Int32,
):
    """Appends a CTA's rows of K and V: all loads are issued before the first is waited for.

    A thread past the last token loads rows of the last token and stores nothing, so no branch precedes the loads. heads: as in
    token_of.
    """
    tokens = Int32(k.shape[0])
    k_rows = [empty_row(spec, k.element_type) for _ in range(spec.unroll)]
    v_rows = [empty_row(spec, v.element_type) for _ in range(spec.unroll)]
    found, slots = [], []
    for u in cutlass.range_constexpr(spec.unroll):
        row, lane = row_of(spec, cta, u)
        token, head = token_of(row, heads)
        inside = token < tokens
        token = cutlass.min(token, tokens - 1) & INT32_MAX
        slots.append(given_slot(spec, tables, token))
        load_row(spec, k[token, head, None], lane, k_rows[u])
        load_row(spec, v[token, head, None], lane, v_rows[u])
        found.append((token, head, lane, inside))
    for u in cutlass.range_constexpr(spec.unroll):
        token, head, lane, inside = found[u]
        speaks = inside and head == 0 and lane == 0
        place = find_slot(spec, tables, slots[u], token, Int32(caches[0].shape[0]), speaks, status)
        if cutlass.const_expr(spec.rotary is not None):
            place = rotate_key(spec, k[token, head, None], rotary, token, place, lane, k_rows[u], speaks, status)
        place = cutlass.select_(inside, place, Int32(-1))
        append_pair(spec, (k_rows[u], v_rows[u]), caches, scales, place, token, head, lane, status)


@cute.jit
def rotate_key(
    spec: cutlass.Constexpr,
    source: cute.Tensor,
    rotary: tuple,
    token: Int32,
    place: Int32,
    lane: Int32,
    row: cute.Tensor,
    speaks: Boolean,
    status: Int64,
) -> Int32:
    """Rotates a thread's part of a row of K and returns `place`; if the position has no angles, reports it and returns -1."""
    position = rotary[1][token]
    angles = find_angles(position, rotary[0])
    rotate_row(spec, source, rotary[0], angles, lane, row)
    if angles < 0 and place >= 0:
        place = Int32(-1)
        if speaks:
            report(status, token, POSITION_FAULT, clamped(position))
    return place


@cute.jit
def rotate_queries(spec: cutlass.Constexpr, q: cute.Tensor, q_out: cute.Tensor, rotary: tuple, heads, cta: Int32):
    """Rotates a CTA's rows of q. All lanes of a row load before any lane stores: q_out may be q."""
    tokens = Int32(q.shape[0])
    for u in cutlass.range_constexpr(spec.unroll):
        row, lane = row_of(spec, cta, u)
        token, head = token_of(row, heads)
        values = empty_row(spec, q.element_type)
        if token < tokens:
            load_row(spec, q[token, head, None], lane, values)
            rotate_row(spec, q[token, head, None], rotary[0], find_angles(rotary[1][token], rotary[0]), lane, values)
        cute.arch.sync_warp()
        if token < tokens:
            store_row(spec, values, q_out[token, head, None], lane)


def clamped(value) -> Int32:
    """The i32 that is nearest to an i32 or i64."""
    return Int32(cutlass.max(Int64(-INT32_MAX - 1), cutlass.min(Int64(value), Int64(INT32_MAX))))


def empty_row(spec: AppendSpec, dtype: type) -> cute.Tensor:
    """Zeros [columns, rounds]: a thread's part of a row, with one more round if its values would not come in pairs."""
    row = cute.make_rmem_tensor((spec.columns, spec.rounds + spec.columns * spec.rounds % 2), dtype)
    row.fill(0.0)
    return row


@cute.jit
def load_row(spec: cutlass.Constexpr, source: cute.Tensor, lane: Int32, row: cute.Tensor):
    """Loads a thread's part [columns, rounds] of a row [head_dim]; elements past the row stay as they are."""
    pieces = cute.zipped_divide(source, (spec.columns,))
    for r in cutlass.range_constexpr(spec.rounds):
        piece = r * spec.lanes + lane
        if piece < spec.pieces:
            cute.autovec_copy(pieces[(None,), piece], row[None, r])


@cute.jit
def append_pair(
    spec: cutlass.Constexpr,
    rows: tuple,
    caches: tuple,
    scales: tuple,
    place: Int32,
    token: Int32,
    head: Int32,
    lane: Int32,
    status: Int64,
):
    """Converts a row of K and a row of V and stores them at slot `place`, or not at all if `place` is negative.

    All lanes of the warp take part.
    """
    largest = largest_magnitudes(spec, *rows) if cutlass.const_expr(spec.computes) else (None, None)
    where = (token, head, place >= 0 and lane == 0, status)
    k_divisor = row_divisor(spec.k_type, spec.k_scale, largest[0], where)
    v_divisor = row_divisor(spec.v_type, spec.v_scale, largest[1], where)
    k_row = convert_row(spec, spec.k_type, spec.k_scale, rows[0], scales[0], head, largest[0], k_divisor)
    v_row = convert_row(spec, spec.v_type, spec.v_scale, rows[1], scales[1], head, largest[1], v_divisor)
    if place >= 0:
        page, slot = quotient(place, spec.page_size), remainder(place, spec.page_size)
        for cache, stored in zip(caches, (k_row, v_row), strict=True):
            store_row(spec, stored, cache[page, slot, head, None] if spec.nhd else cache[page, head, slot, None], lane)
        if lane == 0:
            store_scale(spec.k_scale, scales[0], page, slot, head, k_divisor)
            store_scale(spec.v_scale, scales[1], page, slot, head, v_divisor)


def store_scale(form: str, scales, page: Int32, slot: Int32, head: Int32, scale: Float32) -> None:
    """Stores the scale of a row, if scales are computed."""
    if form.startswith("token"):
        row = scales[page, slot, None]
        row[head] = scale.to(scales.element_type)


@cute.jit
def row_divisor(stored_type: cutlass.Constexpr, form: cutlass.Constexpr, largest, where: tuple):
    """The divisor of a row, which is stored as its scale; None if no scale is computed.

    largest: the row's largest magnitude. where: (token, head, whether this thread reports, status), for a scale beyond f16.
    """
    if cutlass.const_expr(not form.startswith("token")):
        return None
    exact = divide_largest(stored_type, largest)
    if cutlass.const_expr(form == "token_f32"):
        return exact
    token, head, speaks, status = where
    divisor = exact.to(Float16).to(Float32)
    if not (exact >= LEAST_NORMAL_HALF and exact <= LARGEST_HALF):
        divisor = end_of_half(exact)
        if speaks and beyond_half(exact, largest):
            report(status, token, SCALE_FAULT, head)
    return divisor


@cute.jit
def convert_row(
    spec: cutlass.Constexpr,
    stored_type: cutlass.Constexpr,
    form: cutlass.Constexpr,
    row: cute.Tensor,
    scale,
    head: Int32,
    largest,
    divisor,
) -> cute.Tensor:
    """A row [columns, rounds] as it is stored. largest, divisor: its magnitude and row_divisor, if a scale is computed."""
    codes = row
    if cutlass.const_expr(stored_type != spec.element_type):
        by_instruction = cutlass.const_expr(spec.arch == "sm90")
        values = widen(row)
        if cutlass.const_expr(form.startswith("token")):
            codes = quantize(stored_type, row.element_type, form == "token_f16", by_instruction, values, divisor, largest)
        else:
            if cutlass.const_expr(form == "head"):
                divide(values, head_scale(scale, head), bounded=False)
            codes = encode(stored_type, by_instruction, values)
    return cute.make_tensor(codes.iterator, row.layout)


@cute.jit
def store_row(spec: cutlass.Constexpr, stored: cute.Tensor, target: cute.Tensor, lane: Int32):
    """Stores a thread's part [columns, rounds] at its place in a row [head_dim]."""
    pieces = cute.zipped_divide(target, (spec.columns,))
    for r in cutlass.range_constexpr(spec.rounds):
        piece = r * spec.lanes + lane
        if piece < spec.pieces:
            cute.autovec_copy(stored[None, r], pieces[(None,), piece])


def largest_magnitudes(spec: AppendSpec, k_row: cute.Tensor, v_row: cute.Tensor) -> tuple[Float32, Float32]:
    """The largest magnitudes of a row of K and of a row of V, at least LEAST_AMAX; NaN if the row holds a NaN.

    The lanes of the rows exchange both in one word.
    """
    larger = partial(larger_pair, k_row.element_type, spec.target)
    k_pair, v_pair = (largest_pair(larger, row) for row in (k_row, v_row))
    pair = larger(select_bytes(k_pair, v_pair, 0x5410), select_bytes(k_pair, v_pair, 0x7632))
    for step in range(spec.lanes.bit_length() - 1):
        pair = larger(pair, cute.arch.shuffle_sync_bfly(pair, offset=1 << step))
    low, high = widen_pair(k_row.element_type, pair)
    return at_least(low), at_least(high)


def largest_pair(larger: Callable[[Int32, Int32], Int32], row: cute.Tensor) -> Int32:
    """The largest magnitudes in a thread's part of a row: of the even values in the low half, of the odd ones in the high half.

    The reduction is a tree, for a short dependency chain. Each result may have either sign.
    """
    words = as_words(row)
    pairs = [words[i] for i in range(cute.size(words))]
    while len(pairs) > 1:
        pairs = [larger(*pairs[i : i + 2]) if pairs[i + 1 :] else pairs[i] for i in range(0, len(pairs), 2)]
    return pairs[0]


def at_least(value: Float32) -> Float32:
    """The larger of |value| and LEAST_AMAX; NaN if value is NaN."""
    text = "{ .reg .f32 m; abs.f32 m, {$r0}; max.NaN.f32 {$w0}, m, {$r1}; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[value, Float32(LEAST_AMAX)])
