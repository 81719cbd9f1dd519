"""Merges attention states over disjoint parts of the KV: out = sum_s w_s out_s, w_s = exp(lse_s - lse), in state order.

This is a softmax over whole states (the merge of cascade inference and of context parallelism, as in FlashInfer), with the
arithmetic of the combine. Weights come from differences to the largest lse, taken in the lses' own base: an lse of any size
costs no precision, and the positions of empty states (lse = -inf) do not change a bit of the result.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32, Uint64

from ...config.merge import MergeSpec
from ..attend.epilogue import join_sink, lse_factor
from ..attend.softmax import finite_or_zero
from ..combine.merging import merge_parts, normalised

WORDS = {16: Uint16, 32: Uint32, 64: Uint64}  # what one load brings, by its bits


class MergeStatesKernel:
    """Launches the merge for one spec: each thread merges `columns` neighbouring columns of one head of one row."""

    def __init__(self, spec: MergeSpec):
        self.spec = spec
        self.overlap = spec.target == "sm_90a"  # programmatic dependent launch: starts while the previous kernel drains

    @cute.jit
    def __call__(self, outs, lses, out, lse, sinks, stream):
        """outs [num_states, batch, num_heads, head_dim], lses [num_states, batch, num_heads]; out, lse: without num_states.

        sinks: f32 [num_heads], or None where the spec has none.
        """
        batch, num_heads = lse.shape
        ctas = cute.ceil_div(Int32(num_heads) * self.spec.per_head, self.spec.threads)
        self.merge(outs, lses, out, lse, sinks).launch(
            grid=(Int32(batch), ctas, 1), block=(self.spec.threads, 1, 1), stream=stream, use_pdl=self.overlap
        )

    @cute.kernel
    def merge(self, outs, lses, out, lse, sinks):
        """One CTA merges a stretch of one row's heads, laid end to end."""
        spec = self.spec
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        row, stretch, _ = cute.arch.block_idx()
        item = stretch * spec.threads + cute.arch.thread_idx()[0]
        head, place = item // spec.per_head, item % spec.per_head
        if head < Int32(lse.shape[1]):
            sources = cute.zipped_divide(outs[None, row, head, None], (1, spec.columns))
            targets = cute.zipped_divide(out[row, head, None], (spec.columns,))
            sink = sinks[head] if cutlass.const_expr(spec.sinks) else None
            merged, merged_lse = merge_columns(spec, sources, lses[None, row, head], place, sink)
            cute.autovec_copy(merged, targets[(None,), place])
            if place == 0:
                lse[row, head] = merged_lse


@cute.jit
def merge_columns(spec: cutlass.Constexpr, outs: cute.Tensor, lses: cute.Tensor, place: Int32, sink: Float32 | None):
    """(a thread's merged columns, in the type of the outputs; the merged lse).

    outs: ((1, columns), (num_states, threads of a head)); lses: [num_states]; place: the thread's number in its head; sink: the
    head's sink, which joins the merged state, or None.
    """
    count = Int32(lses.shape[0])
    state = cute.make_rmem_tensor(4, Float32)  # first, second, peak in base 2 relative to the largest lse (0), total
    state.fill(0.0)
    parts = cute.make_rmem_tensor((3, spec.in_flight), Float32)
    noted = (-Float32.inf, Int32(0), Int32(0))
    if cutlass.const_expr(spec.chunked):
        noted = survey(spec, lses, noted)
        for begin in cutlass.range(0, count, spec.in_flight, unroll=1):
            load_states(spec, outs, lses, place, begin, parts)
            merge_chunk(spec, state, parts, noted[0], count - begin)
    else:
        load_states(spec, outs, lses, place, Int32(0), parts)
        noted = note(parts[2, None], Int32(0), count, noted)
        merge_chunk(spec, state, parts, noted[0], count)
    largest, live, last = noted
    (first, second), above = normalised(state)
    merged_lse = largest + above * lse_factor(spec)
    if cutlass.const_expr(spec.sinks):
        factor, joined = join_sink(sink, merged_lse * cutlass.const_expr(1.0 / lse_factor(spec)))
        first, second, merged_lse = first * factor, second * factor, joined * lse_factor(spec)
    merged = cute.make_rmem_tensor(spec.columns, outs.element_type)
    for c in cutlass.range_constexpr(spec.columns):
        merged[c] = (second if cutlass.const_expr(c) else first).to(outs.element_type)
    alone = live == 1 if cutlass.const_expr(not spec.sinks) else Boolean(False)
    if alone:  # the only state keeps its bits: also the sign of a zero and the payload of a NaN
        cute.autovec_copy(outs[(0, None), (last, place)], merged)
        merged_lse = lses[last]
    return merged, merged_lse


@cute.jit
def survey(spec: cutlass.Constexpr, lses: cute.Tensor, noted: tuple):
    """The result of `note` over all states."""
    largest, live, last = noted
    for begin in cutlass.range(0, Int32(lses.shape[0]), spec.in_flight, unroll=1):
        values = cute.make_rmem_tensor(spec.in_flight, Float32)
        for i in cutlass.range_constexpr(spec.in_flight):
            values[i] = lses[cutlass.min(begin + i, Int32(lses.shape[0]) - 1)]
        largest, live, last = note(values, begin, Int32(lses.shape[0]), (largest, live, last))
    return largest, live, last


@cute.jit
def note(values: cute.Tensor, begin: Int32, count: Int32, noted: tuple):
    """`noted` with `values` added: (the largest lse that is no NaN; how many of `count` states are not empty; the last such one).

    values: lses of states [begin, begin + size); places past the end repeat the last state.
    """
    largest, live, last = noted
    for i in cutlass.range_constexpr(cute.size(values)):
        largest = cute.arch.fmax(largest, values[i])
        if begin + i < count and values[i] != -Float32.inf:
            live, last = live + 1, begin + i
    return largest, live, last


@cute.jit
def merge_chunk(spec: cutlass.Constexpr, state: cute.Tensor, parts: cute.Tensor, largest: Float32, count: Int32):
    """Merges the first `count` of a chunk's parts (first, second, lse) into the running state."""
    for i in cutlass.range_constexpr(spec.in_flight):
        relative = (parts[2, i] - finite_or_zero(largest)) * cutlass.const_expr(1.0 / lse_factor(spec))
        parts[2, i] = cutlass.select_(i < count, relative, -Float32.inf)
    merge_parts(state, parts)


@cute.jit
def load_states(spec: cutlass.Constexpr, outs: cute.Tensor, lses: cute.Tensor, place: Int32, begin: Int32, parts: cute.Tensor):
    """parts: (first, second, lse) of states [begin, begin + in_flight). Places past the end repeat the last state.

    Each load brings one word, through `load`, before the lses: LLVM moves a plain access of the first state after the
    exponentials, and the assembler moves some other accesses there if the lses are loaded first (read from PTX and SASS).
    """
    word = WORDS[spec.columns * outs.element_type.width]
    words = cute.make_rmem_tensor(spec.in_flight, word)
    for i in cutlass.range_constexpr(spec.in_flight):
        index = cutlass.min(begin + i, Int32(lses.shape[0]) - 1)
        source = outs.iterator + cute.crd2idx(((0, 0), (index, place)), outs.layout)
        words[i] = cute.arch.load(cute.recast_ptr(source, dtype=word), word, cop="cs")
    for i in cutlass.range_constexpr(spec.in_flight):
        parts[2, i] = lses[cutlass.min(begin + i, Int32(lses.shape[0]) - 1)]
    values = cute.recast_tensor(words, outs.element_type)
    for i in cutlass.range_constexpr(spec.in_flight):
        parts[0, i] = values[i * spec.columns].to(Float32)
        parts[1, i] = values[i * spec.columns + spec.columns - 1].to(Float32)
