"""Appends K and V of new tokens to a paged cache: one launch that reads each value once and writes it once.

A few lanes of a warp take one (token, head) row of K and of V, 16 bytes a load where the alignment allows. The loads of all
rows that a thread has, and of their slots, go out together; a scale that is computed is the lanes' maximum, by shuffles.
Quotients are those of IEEE division, so that every backend stores the same bits. With a rotary embedding, K is rotated in
between, and CTAs behind those of K and V do the same to q.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..append_spec import CTA_THREADS, AppendSpec
from ..quantize import LEAST_AMAX
from .append_slots import INT32_MAX, find_slot, given_slot
from .kv_encode import LARGEST, divide, encode, quantize
from .kv_scale import head_scale
from .kv_source import POSITION_FAULT, report
from .registers import as_bits, as_float, quotient, remainder
from .rotary import find_angles, rotate_row


class AppendKernel:
    """Launches the append for one spec."""

    def __init__(self, spec: AppendSpec):
        self.spec = spec
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch: start while the kernel before drains

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
        tag: Int32,
        status: Int64,
        stream,
    ):
        """k, v [tokens, num_kv_heads, head_dim]; caches 4-D in the spec's order; scales of its forms.

        table0..2: slots [tokens], or a page table's tensors. q, q_out [tokens, num_heads, head_dim], cos_sin_cache
        [max_position, rotary_dim] and positions [tokens] where the spec has them. tag: marks this plan's words; status:
        address of the plan's 4 int32 status words.
        """
        caches, scales, faults = (k_cache, v_cache), (k_scale, v_scale), (status, tag)
        tables = tuple(table for table in (table0, table1, table2) if table is not None)
        num_ctas = self.ctas_of(k)
        if cutlass.const_expr(q is not None):
            num_ctas = num_ctas + self.ctas_of(q)
        self.append(k, v, caches, tables, scales, (q, q_out), (cos_sin_cache, positions), faults).launch(
            grid=(num_ctas, 1, 1),
            block=(CTA_THREADS, 1, 1),
            stream=stream,
            use_pdl=self.overlap,
        )

    def ctas_of(self, rows: cute.Tensor) -> Int32:
        """CTAs that take the rows of a tensor [tokens, heads, head_dim]."""
        return cute.ceil_div(Int32(rows.shape[0]) * Int32(rows.shape[1]), self.spec.rows_per_cta)

    @cute.kernel
    def append(self, k, v, caches: tuple, tables: tuple, scales: tuple, queries: tuple, rotary: tuple, status: tuple):
        """CTAs of K's and V's rows first, then those of q's: rows_per_cta (token, head) rows each, heads innermost."""
        spec = self.spec
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        cta = cute.arch.block_idx()[0]
        if cutlass.const_expr(queries[0] is None):
            append_rows(spec, k, v, caches, tables, scales, rotary, status, cta)
        else:
            first = self.ctas_of(k)
            if cta < first:
                append_rows(spec, k, v, caches, tables, scales, rotary, status, cta)
            else:
                rotate_queries(spec, *queries, rotary, cta - first)


def row_of(spec: AppendSpec, cta: Int32, u: int) -> tuple[Int32, Int32]:
    """(row, lane) of a thread: its u-th row of the CTA's."""
    thread = cute.arch.thread_idx()[0]
    return cta * spec.rows_per_cta + u * spec.row_groups + quotient(thread, spec.lanes), remainder(thread, spec.lanes)


@cute.jit
def append_rows(
    spec: cutlass.Constexpr,
    k: cute.Tensor,
    v: cute.Tensor,
    caches: tuple,
    tables: tuple,
    scales: tuple,
    rotary: tuple,
    status: tuple,
    cta: Int32,
):
    """A CTA's rows of K and V: all loads go out before the first is waited for."""
    heads, tokens = Int32(k.shape[1]), Int32(k.shape[0])
    k_rows = [empty_row(spec, k.element_type) for _ in range(spec.unroll)]
    v_rows = [empty_row(spec, v.element_type) for _ in range(spec.unroll)]
    slots = cute.make_rmem_tensor(spec.unroll, Int64)
    for u in cutlass.range_constexpr(spec.unroll):
        row, lane = row_of(spec, cta, u)
        token, head = quotient(row, heads), remainder(row, heads)
        slots[u] = Int64(-1)
        if token < tokens:
            slots[u] = given_slot(spec, tables, token)
            load_row(spec, k[token, head, None], lane, k_rows[u])
            load_row(spec, v[token, head, None], lane, v_rows[u])
    for u in cutlass.range_constexpr(spec.unroll):
        row, lane = row_of(spec, cta, u)
        token, head = quotient(row, heads), remainder(row, heads)
        place = Int32(-1)
        if token < tokens:
            speaks = head == 0 and lane == 0
            place = find_slot(spec, tables, slots[u], token, Int32(caches[0].shape[0]), speaks, status)
            if cutlass.const_expr(spec.rotary is not None):
                place = rotate_key(spec, k[token, head, None], rotary, token, place, lane, k_rows[u], speaks, status)
        append_row(spec, spec.k_type, spec.k_scale, k_rows[u], caches[0], scales[0], place, head, lane)
        append_row(spec, spec.v_type, spec.v_scale, v_rows[u], caches[1], scales[1], place, head, lane)


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
    status: tuple,
) -> Int32:
    """Rotates a thread's part of a row of K and returns `place`; no place, reported, where the position has no angles."""
    position = rotary[1][token]
    angles = find_angles(position, rotary[0])
    rotate_row(spec, source, rotary[0], angles, lane, row)
    if angles < 0 and place >= 0:
        place = Int32(-1)
        if speaks:
            report(status, token, POSITION_FAULT, clamped(position))
    return place


@cute.jit
def rotate_queries(spec: cutlass.Constexpr, q: cute.Tensor, q_out: cute.Tensor, rotary: tuple, cta: Int32):
    """A CTA's rows of q. A row's lanes all have loaded before one stores: q_out may be q."""
    heads, tokens = Int32(q.shape[1]), Int32(q.shape[0])
    for u in cutlass.range_constexpr(spec.unroll):
        row, lane = row_of(spec, cta, u)
        token, head = quotient(row, heads), remainder(row, heads)
        values = empty_row(spec, q.element_type)
        if token < tokens:
            load_row(spec, q[token, head, None], lane, values)
            rotate_row(spec, q[token, head, None], rotary[0], find_angles(rotary[1][token], rotary[0]), lane, values)
        cute.arch.sync_warp()
        if token < tokens:
            store_row(spec, values, q_out[token, head, None], lane)


def clamped(value) -> Int32:
    """An i32 or i64 as the nearest i32."""
    return Int32(cutlass.max(Int64(-INT32_MAX - 1), cutlass.min(Int64(value), Int64(INT32_MAX))))


def empty_row(spec: AppendSpec, dtype: type) -> cute.Tensor:
    """Zeros [columns, rounds]: a thread's part of a row."""
    row = cute.make_rmem_tensor((spec.columns, spec.rounds), dtype)
    row.fill(0.0)
    return row


@cute.jit
def load_row(spec: cutlass.Constexpr, source: cute.Tensor, lane: Int32, row: cute.Tensor):
    """A thread's part [columns, rounds] of a row [head_dim]; what is past the row stays as it is."""
    pieces = cute.zipped_divide(source, (spec.columns,))
    for r in cutlass.range_constexpr(spec.rounds):
        piece = r * spec.lanes + lane
        if piece < spec.pieces:
            cute.autovec_copy(pieces[(None,), piece], row[None, r])


@cute.jit
def append_row(
    spec: cutlass.Constexpr,
    stored_type: cutlass.Constexpr,
    form: cutlass.Constexpr,
    row: cute.Tensor,
    cache: cute.Tensor,
    scale,
    place: Int32,
    head: Int32,
    lane: Int32,
):
    """Converts one row and stores it at slot `place`, nowhere where that is negative. All lanes of the warp take part."""
    stored = row
    divisor = Float32(1.0)
    computed = cutlass.const_expr(form.startswith("token"))
    if cutlass.const_expr(cache.element_type != row.element_type):
        values = cute.make_rmem_tensor((spec.columns, spec.rounds), Float32)
        values.store(row.load().to(Float32))
        by_instruction = cutlass.const_expr(spec.arch == "sm90")
        if cutlass.const_expr(computed):
            divisor = computed_scale(spec, stored_type, values)
            codes = quantize(stored_type, by_instruction, values, divisor)
        else:
            if cutlass.const_expr(form == "head"):
                divide(values, head_scale(scale, head), bounded=False)
            codes = encode(stored_type, by_instruction, values)
        stored = cute.make_tensor(codes.iterator, row.layout)
    if place >= 0:
        page, slot = quotient(place, spec.page_size), remainder(place, spec.page_size)
        store_row(spec, stored, cache[page, slot, head, None] if spec.nhd else cache[page, head, slot, None], lane)
        if cutlass.const_expr(computed):
            scales = scale[page, slot, None]
            if lane == 0:
                scales[head] = divisor.to(scale.element_type)


@cute.jit
def store_row(spec: cutlass.Constexpr, stored: cute.Tensor, target: cute.Tensor, lane: Int32):
    """A thread's part [columns, rounds] to its place in a row [head_dim]."""
    pieces = cute.zipped_divide(target, (spec.columns,))
    for r in cutlass.range_constexpr(spec.rounds):
        piece = r * spec.lanes + lane
        if piece < spec.pieces:
            cute.autovec_copy(stored[None, r], pieces[(None,), piece])


@cute.jit
def computed_scale(spec: cutlass.Constexpr, stored_type: cutlass.Constexpr, values: cute.Tensor) -> Float32:
    """The largest magnitude of a row, at least LEAST_AMAX, over the largest stored value; NaN where the row holds one.

    Maxima of magnitudes are compared between lanes as integers, in which a NaN is larger than infinity.
    """
    largest = Float32(LEAST_AMAX)
    for i in cutlass.range_constexpr(cute.size(values)):
        largest = larger(largest, values[i])
    bits = as_bits(largest)
    for step in cutlass.range_constexpr(spec.lanes.bit_length() - 1):
        bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
    return as_float(bits) / Float32(cutlass.const_expr(LARGEST[stored_type]))


def larger(magnitude: Float32, value: Float32) -> Float32:
    """The larger of a magnitude and a value's; NaN where either is."""
    text = "{ .reg .f32 m; abs.f32 m, {$r1}; max.NaN.f32 {$w0}, {$r0}, m; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[magnitude, value])
