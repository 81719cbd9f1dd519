"""The semantics of attention weights in plain PyTorch, request by request. In f32 it is also the CPU variant."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.reference import Keys, Scoring, find_tokens, real_values, scores_of
from ..attention.requests import key_lengths, query_rows, seen_keys
from ..config.decode import LOG2_E
from ..kv.faults import Fault, Span, first_fault, record
from ..kv.page_table import PageTable
from ..planning.variants import Launch
from .checks import Operands
from .descriptor import AttentionWeightsDescriptor


class Counted(NamedTuple):
    """Keys per row, int64 [batch]: lengths, how many a row has; span, those with a weight, [0, max_seq_len) at most."""

    lengths: Tensor
    span: Span


def counted_keys(d: AttentionWeightsDescriptor, operands: Operands, table: PageTable) -> Counted:
    """The keys of each row, after bad metadata is masked. operands: as a kernel takes them."""
    rows = query_rows("one", operands.q, None, 1)
    lengths = key_lengths(table, operands.k_cache, rows)
    span = seen_keys(d.problem.modifiers, d.launch_values[0], 0, rows.q_lens, lengths)
    past = span.past.clamp(max=d.max_seq_len)
    return Counted(lengths, Span(torch.minimum(span.first, past), past))


def reference_weights(
    d: AttentionWeightsDescriptor, operands: Operands, table: PageTable, dtype: torch.dtype = torch.float32
) -> Counted:
    """Writes the outputs that `operands` has, computed in `dtype`; operands are as a kernel takes them, but fp8 caches as fp8."""
    counted, outputs = counted_keys(d, operands, table), (operands.weights, operands.mean, operands.page_mass)
    modifiers, window_left = d.problem.modifiers, d.launch_values[0]
    scoring = Scoring(d.scale, d.lse_base, modifiers, window_left, 0, d.launch_values[2], operands.alibi_slopes)
    lses = operands.lse.to(dtype) / (LOG2_E if d.lse_base == "2" else 1.0)
    for output in outputs:
        if output is not None:
            output.zero_()
    facts = zip(counted.lengths.tolist(), *(t.tolist() for t in counted.span), strict=True)
    for request, (length, first, past) in enumerate(facts):
        tokens = torch.arange(first, past, device=operands.q.device)
        place = find_tokens(operands.k_cache, table, request, tokens)
        k = real_values(operands.k_cache, operands.k_scale, table, place, dtype)
        scores = scores_of(operands.q[request], Keys(place.position, k, k), length - 1, scoring).flatten(0, 1)
        weights = torch.exp(scores - lses[request][:, None])
        mean = weights.mean(0)
        if operands.weights is not None:
            operands.weights[request][:, place.position] = weights.to(operands.weights.dtype)
        if operands.mean is not None:
            operands.mean[request][place.position] = mean.to(operands.mean.dtype)
        if operands.page_mass is not None and d.page_size:
            operands.page_mass[request].index_add_(0, place.position // d.page_size, mean.to(operands.page_mass.dtype))
    return counted


def cpu_variant(descriptor: AttentionWeightsDescriptor) -> Launch:
    """The CPU variant, called as a compiled kernel is, but with the status words themselves, not their address."""

    def launch(*arguments: Any) -> None:
        operands, status = Operands(*arguments[: len(Operands._fields)]), arguments[-1]
        k = operands.k_cache.view(descriptor.problem.kv_dtype.torch_dtype)  # fp8 comes as bytes
        table = PageTable(descriptor.table_format, (operands.table0, operands.table1, operands.table2))
        counted = reference_weights(descriptor, operands._replace(k_cache=k), table)
        fault = first_bad_row(descriptor, operands, table, counted)
        if fault is not None:
            record(status, fault)

    return launch


def first_bad_row(d: AttentionWeightsDescriptor, operands: Operands, table: PageTable, counted: Counted) -> Fault | None:
    """The first row whose metadata breaks a rule, or that has more than max_seq_len keys; synchronises.

    operands: as a kernel takes them.
    """
    if d.table_format == "none":
        return None
    fault = first_fault(table, operands.k_cache.shape[2], operands.k_cache.shape[0], span=counted.span)
    if fault is not None or not d.batch_size:
        return fault
    row = int((counted.lengths > d.max_seq_len).byte().argmax())
    length = int(counted.lengths[row])
    return Fault(row, "length", length) if length > d.max_seq_len else None
