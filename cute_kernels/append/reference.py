"""The semantics of an append in PyTorch, also its CPU variant: which slot a token takes, and which values are stored there."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv.faults import Fault, first_bad_position, first_bad_scale, first_bad_slot, first_fault, record
from ..kv.page_table import PageTable, held
from ..kv.quantize import beyond_half, quantize_kv
from ..kv.rotary import apply_rotary
from ..kv.scale import KVScale
from ..planning.variants import Launch
from .checks import Operands
from .descriptor import KVAppendDescriptor

NO_SLOT = -1


def cpu_variant(descriptor: KVAppendDescriptor) -> Launch:
    """The CPU variant, called as a compiled kernel is, but with the status words themselves, not their address."""
    d = descriptor

    def launch(*arguments: object) -> None:
        *tensors, status = arguments
        operands = Operands(*tensors)
        error = first_error(d, operands)
        if error is not None and isinstance(status, Tensor):
            record(status, error[1])
        slots, k = appended_slots(d, operands), rotated_k(d, operands)
        if d.rotary is not None and operands.q is not None:
            operands.q_out.copy_(apply_rotary(operands.q, operands.cos_sin_cache, operands.positions, d.rotary))
        kept = slots >= 0
        place = (slots[kept] // d.page_size, slots[kept] % d.page_size)
        caches, scales = (operands.k_cache, operands.v_cache), (operands.k_scale, operands.v_scale)
        for x, cache, scale, stored, kind in zip((k, operands.v), caches, scales, d.stored, d.scales, strict=True):
            computed = kind.granularity == "token"
            codes, found = quantize_kv(x[kept], stored, kind, scale=None if computed else scale)
            by_token = cache if d.nhd else cache.transpose(1, 2)
            by_token[place] = codes.view(cache.dtype)
            if computed:
                scale[place] = found

    return launch


def rotated_k(d: KVAppendDescriptor, operands: Operands) -> Tensor:
    """K as it is stored, before it is converted."""
    if d.rotary is None:
        return operands.k
    return apply_rotary(operands.k, operands.cos_sin_cache, operands.positions, d.rotary)


def appended_slots(d: KVAppendDescriptor, operands: Operands) -> Tensor:
    """int64 [tokens]: each token's slot; negative if it is skipped, or if its slot, page, length or position is bad."""
    num_pages = operands.k_cache.shape[0]
    if d.table_format == "none":
        slots = operands.table0.long()
        slots = slots.masked_fill(slots >= num_pages * d.page_size, NO_SLOT)
    else:
        slots = last_slots(_page_table(d, operands), d.page_size, num_pages)
    if d.rotary is not None:
        known = (operands.positions >= 0) & (operands.positions < len(operands.cos_sin_cache))
        slots = slots.masked_fill(~known, NO_SLOT)
    return slots


def last_slots(page_table: PageTable, page_size: int, num_pages: int) -> Tensor:
    """int64 [batch]: the slot page * page_size + offset of each row's last token, NO_SLOT for a row that is empty or at fault."""
    if page_table.format == "dense":
        table, seq_lens = held(page_table, 0), held(page_table, 1)
        length, entries = seq_lens.long(), table.reshape(-1)
        sound = (length > 0) & (length <= table.shape[1] * page_size)
        first = torch.arange(len(length), device=table.device) * table.shape[1]
    else:
        entries, indptr, last_page_len = (held(page_table, operand) for operand in range(3))
        first, end = indptr[:-1].long(), indptr[1:].long()
        length = (end - first - 1) * page_size + last_page_len
        sound = (first >= 0) & (end > first) & (end <= len(entries)) & (length > 0)
        sound &= (last_page_len >= 0) & (last_page_len <= page_size)
    last = length - 1
    page = torch.full_like(length, NO_SLOT)
    page[sound] = entries[(first + last // page_size)[sound]].long()
    sound &= (page >= 0) & (page < num_pages)
    return torch.where(sound, page * page_size + last % page_size, NO_SLOT)


def first_error(d: KVAppendDescriptor, operands: Operands) -> tuple[str, Fault] | None:
    """The first slot, row of the table, position or computed scale that is out of range, and the operand that holds it."""
    num_pages = operands.k_cache.shape[0]
    if d.table_format == "none":
        fault = first_bad_slot(operands.table0, num_pages * d.page_size)
        appended = operands.table0 >= 0
        if fault is not None:
            return "slots", fault
    else:
        table = _page_table(d, operands)
        fault = first_fault(table, d.page_size, num_pages, last_page_only=True)
        if fault is not None:
            return fault.error(table).arg, fault
        appended = last_slots(table, d.page_size, num_pages) >= 0
    if d.rotary is not None:
        fault = first_bad_position(operands.positions, appended, len(operands.cos_sin_cache))
        if fault is not None:
            return "positions", fault
    return _first_bad_scale(d, operands)


def _first_bad_scale(d: KVAppendDescriptor, operands: Operands) -> tuple[str, Fault] | None:
    """The first appended token whose scale f16 cannot hold; K's tokens are checked first, then V's."""
    for name, stored, kind in zip(("k", "v"), d.stored, d.scales, strict=True):
        if kind != KVScale.TOKEN_F16:
            continue
        x = rotated_k(d, operands) if name == "k" else operands.v
        fault = first_bad_scale(beyond_half(x, stored) & (appended_slots(d, operands) >= 0)[:, None])
        if fault is not None:
            return name, fault
    return None


def _page_table(d: KVAppendDescriptor, operands: Operands) -> PageTable:
    return PageTable("csr" if d.table_format == "csr" else "dense", (operands.table0, operands.table1, operands.table2))
