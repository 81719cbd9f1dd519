"""Appends K and V of new tokens to a paged cache: one launch that reads each value once and writes it once.

A few lanes of a warp take one (token, head) row of K and of V, 16 bytes a load where the alignment allows. Both rows' loads
and the slot's go out together; a dynamic scale is the lanes' maximum, by shuffles. Quotients are those of IEEE division, so that
every backend stores the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..append_spec import CTA_THREADS, AppendSpec
from ..quantize import LEAST_AMAX
from .kv_encode import LARGEST, MAGNITUDE, bits_of, divide, encode
from .kv_source import SLOT_FAULT, report
from .registers import as_bits, as_float

INT32_MAX = 2**31 - 1


class AppendKernel:
    """Launches the append for one spec."""

    def __init__(self, spec: AppendSpec):
        self.spec = spec
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch: start while the kernel before drains

    @cute.jit
    def __call__(self, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, tag: Int32, status: Int64, stream):
        """k, v [tokens, num_kv_heads, head_dim]; caches 4-D in the spec's order; slot_mapping [tokens]; scales of its kind.

        tag: marks this plan's words; status: address of the plan's 4 int32 status words.
        """
        rows = Int32(k.shape[0]) * Int32(k.shape[1])
        self.append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, tag, status).launch(
            grid=(cute.ceil_div(rows, self.spec.rows_per_cta), 1, 1),
            block=(CTA_THREADS, 1, 1),
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def append(self, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, tag: Int32, status: Int64):
        """One CTA: rows_per_cta (token, head) rows, heads innermost."""
        spec = self.spec
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0]
        row, lane = cute.arch.block_idx()[0] * spec.rows_per_cta + thread // spec.lanes, thread % spec.lanes
        heads = Int32(k.shape[1])
        token, head = row // heads, row % heads
        slot, num_slots = Int64(-1), Int64(k_cache.shape[0]) * spec.page_size
        k_row, v_row = empty_row(spec, k.element_type), empty_row(spec, v.element_type)
        if token < Int32(k.shape[0]):
            slot = Int64(slot_mapping[token])
            load_row(spec, k[token, head, None], lane, k_row)
            load_row(spec, v[token, head, None], lane, v_row)
        if slot >= num_slots:
            if head == 0 and lane == 0:
                report((status, tag), token, SLOT_FAULT, Int32(cutlass.min(slot, Int64(INT32_MAX))))
            slot = Int64(-1)
        place = Int32(slot)  # below 2**31: the host bounds the slots
        append_row(spec, k_row, k_cache, k_scale, place, head, lane)
        append_row(spec, v_row, v_cache, v_scale, place, head, lane)


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
def append_row(spec: cutlass.Constexpr, row: cute.Tensor, cache: cute.Tensor, scale, place: Int32, head: Int32, lane: Int32):
    """Converts one row and stores it at slot `place`, nowhere where that is negative. All lanes of the warp take part."""
    stored = row
    divisor = Float32(1.0)
    if cutlass.const_expr(cache.element_type != row.element_type):
        values = cute.make_rmem_tensor((spec.columns, spec.rounds), Float32)
        values.store(row.load().to(Float32))
        if cutlass.const_expr(spec.scales == "token_dynamic"):
            divisor = dynamic_scale(spec, values)
        elif cutlass.const_expr(spec.scales == "head"):
            divisor = scale[head]
        elif cutlass.const_expr(spec.scales == "tensor"):
            divisor = scale[0]
        if cutlass.const_expr(spec.scales != "none"):
            divide(values, divisor, spec.scales == "token_dynamic")
        codes = encode(spec.stored_type, spec.arch == "sm90", values)
        stored = cute.make_tensor(codes.iterator, row.layout)
    if place >= 0:
        page, slot = place // spec.page_size, place % spec.page_size
        store_row(spec, stored, cache[page, slot, head, None] if spec.nhd else cache[page, head, slot, None], lane)
        if cutlass.const_expr(spec.scales == "token_dynamic"):
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
def dynamic_scale(spec: cutlass.Constexpr, values: cute.Tensor) -> Float32:
    """The largest magnitude of a row, at least LEAST_AMAX, over the largest stored value; NaN where the row holds one.

    Magnitudes compare as integers, in which a NaN is larger than infinity.
    """
    largest = Int32(cutlass.const_expr(bits_of(LEAST_AMAX)))
    for i in cutlass.range_constexpr(cute.size(values)):
        largest = cutlass.max(largest, as_bits(values[i]) & MAGNITUDE)
    for step in cutlass.range_constexpr(spec.lanes.bit_length() - 1):
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
    return as_float(largest) / Float32(cutlass.const_expr(LARGEST[spec.stored_type]))
