"""Bad metadata on the device: a length that the table cannot hold, a page that the cache lacks, an indptr out of order.

A kernel masks bad metadata, and computes all other rows as if nothing were wrong:

- tokens of a page outside the cache do not exist;
- a negative length counts as 0, a length past the row's capacity as the capacity, and a row with a bad indptr is empty;
- a request with a bad qo_indptr has no query rows, a request with too many has its first max_q_len;
- a token is not appended if its slot, page or position does not exist, or its row has a bad length;
- a scale outside f16's range is stored saturated.

The kernel records one fault in its plan's status words, where it stays until the caller clears it. `first_fault` and the other
first_* functions find the same faults with torch ops.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..errors import CompileFailed, InvalidArgument
from ..memory import lasting_zeros
from .page_table import PageTable, held, outside

FaultKind = Literal["page", "length", "indptr", "slot", "position", "scale", "query_indptr", "query_length"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)  # the codes 1 to 8 on the device
STATUS_WORDS = 4  # int32: the kind's code (0: none), row, value, 0; 16 bytes that a kernel stores at once
BLOCK_PLANS = 1024  # plans whose status words share one allocation
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
ARGUMENTS = {
    ("dense", "page"): "page_table.table",
    ("dense", "length"): "page_table.seq_lens",
    ("csr", "page"): "page_table.indices",
    ("csr", "length"): "page_table.last_page_len",
    ("csr", "indptr"): "page_table.indptr",
    ("lengths", "length"): "page_table.seq_lens",
    ("packed", "indptr"): "page_table.kv_indptr",
}
MESSAGES: dict[FaultKind, str] = {  # by row and value
    "page": "row {} names page {}: must be from 0 to num_pages - 1",
    "length": "row {} has length {}: must be from 0 to the tokens that its part of the table, and weights, have room for",
    "indptr": "row {} begins at indptr {}: must be from 0, at most the next row's, and end within what it indexes",
    "slot": "token {} has slot {}: must be negative (skipped) or below num_pages * page_size",
    "position": "token {} has position {}: must be from 0 to the rows of the cos_sin_cache - 1",
    "scale": "token {} needs a scale for KV head {} that f16 lacks: must be above 2**-25, below 65,520",
    "query_indptr": "row {} begins at qo_indptr {}: must be from 0, at most the next row's, and end within the rows of q",
    "query_length": "row {} has {} query rows: must be at most max_q_len",
}

_unused: dict[torch.device, Iterator[Tensor]] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Fault:
    """Metadata of `row` that breaks a rule; `row` is a token if its slot, its position or a scale is at fault.

    value, by kind: "page": a page id outside [0, num_pages). "length": a length that is negative or above what the row's part
    of the table holds (for a CSR table, the length by indptr and last_page_len; a negative last_page_len itself where that
    length is not negative). "indptr": the row's first entry, if that is negative or above the next row's, or if the row ends
    past the indices or the packed tokens. "query_indptr": the same for qo_indptr and the rows of q. "query_length": the number
    of query rows, above max_q_len. "slot": a slot at or past num_pages * page_size. "position": a position that is no row of the
    cos_sin_cache. "scale": the KV head whose scale of K or V is outside f16's range.
    """

    row: int
    kind: FaultKind
    value: int

    def __str__(self) -> str:
        return MESSAGES[self.kind].format(self.row, self.value)

    def error(self, page_table: PageTable) -> InvalidArgument:
        """The fault as the typed error of the operand that holds it."""
        of_query = self.kind in ("query_indptr", "query_length")
        return InvalidArgument("qo_indptr" if of_query else ARGUMENTS[page_table.format, self.kind], str(self))


class Span(NamedTuple):
    """The tokens of each row that count: [first, past), both int64 [batch]; (0, 0) if none does."""

    first: Tensor
    past: Tensor


def first_fault(
    page_table: PageTable, page_size: int, num_pages: int, last_page_only: bool = False, span: Span | None = None
) -> Fault | None:
    """The first row with a bad indptr, else with a bad length, else with a page id that is not in a cache of `num_pages`.

    Only table entries within a row's length count: the entries that `span` needs, or the last one if last_page_only. page_size:
    for a contiguous cache the tokens that a row has room for, for a packed cache all tokens. Runs on the table's device, and
    synchronises with it once.
    """
    if page_table.format in ("lengths", "packed"):
        return _first_fault(_contiguous_suspects(page_table, page_size))
    find = _dense_suspects if page_table.format == "dense" else _csr_suspects
    return _first_fault(find(page_table, page_size, num_pages, last_page_only, span))


def first_query_fault(qo_indptr: Tensor, total_q: int, max_q_len: int) -> Fault | None:
    """The first row whose part of qo_indptr [batch + 1] is no slice of total_q rows, else the first with more than max_q_len."""
    begin, end = qo_indptr[:-1].long(), qo_indptr[1:].long()
    bad, row = outside(begin, end, total_q), torch.arange(len(begin), device=begin.device)
    long = ~bad & (end - begin > max_q_len)
    return _first_fault([("query_indptr", bad, row, begin), ("query_length", long, row, end - begin)])


def _first_fault(suspects: list[Suspects]) -> Fault | None:
    """The first bad suspect of the first kind that has one; synchronises once."""
    suspects = [suspect for suspect in suspects if suspect[1].numel()]
    if not suspects:
        return None
    found = torch.stack([_first(*tensors) for _, *tensors in suspects]).tolist()
    for (kind, *_), (bad, row, value) in zip(suspects, found, strict=True):
        if bad:
            return Fault(row, kind, value)
    return None


def first_bad_slot(slot_mapping: Tensor, num_slots: int) -> Fault | None:
    """The first token of slot_mapping [tokens] whose slot is at or past `num_slots`; synchronises with its device once."""
    if not len(slot_mapping):
        return None
    return _first_token("slot", slot_mapping >= num_slots, slot_mapping)


def first_bad_position(positions: Tensor, appended: Tensor, num_positions: int) -> Fault | None:
    """The first `appended` token whose entry in positions [tokens] is not in [0, num_positions)."""
    return _first_token("position", appended & ((positions < 0) | (positions >= num_positions)), positions)


def first_bad_scale(beyond: Tensor) -> Fault | None:
    """The first token and KV head whose scale is outside f16's range, as beyond, bool [tokens, num_kv_heads], says."""
    if not beyond.numel():
        return None
    heads, place = beyond.shape[1], torch.arange(beyond.numel(), device=beyond.device)
    found, token, head = _first(beyond.flatten(), place // heads, place % heads).tolist()
    return Fault(token, "scale", head) if found else None


def _first_token(kind: FaultKind, bad: Tensor, values: Tensor) -> Fault | None:
    found, token, value = _first(bad, torch.arange(len(bad), device=bad.device), values.long()).tolist()
    return Fault(token, kind, value) if found else None


Suspects = tuple[FaultKind, Tensor, Tensor, Tensor]  # the kind; for each suspect, all [n]: whether it is bad, its row, its value


def _first(bad: Tensor, row: Tensor, value: Tensor) -> Tensor:
    """[3] int64: whether any is bad, and the row and the int32 value of the first that is."""
    position = bad.byte().argmax()  # among equals, the first
    return torch.stack([bad.any().long(), row.take(position), value.take(position).clamp(INT32_MIN, INT32_MAX)])


def _contiguous_suspects(page_table: PageTable, capacity: int) -> list[Suspects]:
    """The suspects in lengths, each at most `capacity`, or in the indptr of so many packed tokens."""
    entries = held(page_table, 0)
    row = torch.arange(len(entries), device=entries.device)
    if page_table.format == "lengths":
        length = entries.long()
        return [("length", (length < 0) | (length > capacity), row, length)]
    begin, end = entries[:-1].long(), entries[1:].long()
    return [("indptr", outside(begin, end, capacity), row[:-1], begin)]


def _dense_suspects(
    page_table: PageTable, page_size: int, num_pages: int, last_page_only: bool, span: Span | None
) -> list[Suspects]:
    table, seq_lens = held(page_table, 0), held(page_table, 1)
    batch, width = table.shape
    row, length = torch.arange(batch, device=table.device), seq_lens.long()
    bad_length = (length < 0) | (length > width * page_size)
    suspects: list[Suspects] = [("length", bad_length, row, length)]
    if width:
        entries = (length[:, None] + page_size - 1) // page_size
        column = torch.arange(width, device=table.device)
        used = column == entries - 1 if last_page_only else column < entries
        if span is not None:
            used = (column >= (span.first // page_size)[:, None]) & (column < ((span.past + page_size - 1) // page_size)[:, None])
        bad_page = used & ((table < 0) | (table >= num_pages))
        first = bad_page.byte().argmax(1, keepdim=True)
        suspects.append(("page", bad_page.any(1), row, table.gather(1, first)[:, 0].long()))
    return suspects


def _csr_suspects(
    page_table: PageTable, page_size: int, num_pages: int, last_page_only: bool, span: Span | None
) -> list[Suspects]:
    indices, indptr, last_page_len = (held(page_table, operand) for operand in range(3))
    begin, end = indptr[:-1].long(), indptr[1:].long()
    row, entry = torch.arange(len(begin), device=indices.device), torch.arange(len(indices), device=indices.device)
    bad_indptr = outside(begin, end, len(indices))
    count = (end - begin).masked_fill(bad_indptr, 0)
    length = ((count - 1) * page_size + last_page_len).masked_fill(count == 0, 0)
    lacking = (count > 0) & (last_page_len < 0)
    bad_length = lacking | (length > count * page_size)
    named = torch.where(lacking & (length >= 0), last_page_len, length)
    suspects: list[Suspects] = [("indptr", bad_indptr, row, begin), ("length", bad_length, row, named)]
    if len(row):
        # an owner is meaningless if an indptr is bad, but then the indptr's suspect comes first
        owner = torch.searchsorted(end, entry, right=True).clamp(max=len(row) - 1)
        past = (begin + (length + page_size - 1) // page_size)[owner]
        used = (entry >= begin[owner]) & (entry < past)
        if last_page_only:
            used &= entry == past - 1
        if span is not None:
            place = entry - begin[owner]
            used &= (place >= span.first[owner] // page_size) & (place < (span.past[owner] + page_size - 1) // page_size)
        suspects.append(("page", used & ((indices < 0) | (indices >= num_pages)), owner, indices.long()))
    return suspects


def record(words: Tensor, fault: Fault) -> None:
    """Writes `fault` into a plan's status words, as a kernel does, unless they hold one."""
    if read(words) is None:
        words.copy_(words.new_tensor([1 + KINDS.index(fault.kind), fault.row, fault.value, 0]))


def read(words: Tensor) -> Fault | None:
    """What a plan's status words say; waits for the current stream of their device."""
    code, row, value, _ = words.tolist()
    return Fault(row, KINDS[code - 1], value) if code else None


def new_status(device: torch.device) -> Tensor:
    """Zeroed status words int32 [STATUS_WORDS], 16-byte aligned, for one plan.

    They come from blocks for many plans, so that a plan which is selected inside a graph capture usually needs no new block:
    there a new block would belong to the graph, and every replay would zero it. Raises CompileFailed if one is needed there.
    """
    with _lock, torch.inference_mode(False):  # the caller's mode is not that of later runs
        words = next(_unused.get(device, iter(())), None)
        if words is None:
            _unused[device] = _block(device)
            words = next(_unused[device])
        return words


def _block(device: torch.device) -> Iterator[Tensor]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CompileFailed(f"the first plan on {device} must not be selected inside a graph capture; select one before it")
    block = lasting_zeros((BLOCK_PLANS, STATUS_WORDS), torch.int32, device)
    return (block[plan] for plan in range(BLOCK_PLANS))
