"""Fresh random inputs of a case: one page table and several caches, as the layers of a model have them.

Steps use one cache after another, and find none of a cache in L2, because together the caches exceed L2 many times.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from cute_kernels import KVDtype
from perf.cases import Case
from perf.scores import NO_OPERANDS, ScoreOperands, make_operands
from perf.storage import fill, quantize_normal, raw, scale_of

ROTATED_BYTES = 600 * 2**20  # bytes of K and V over all sets: ten times the 60 MB L2 of an H200
MIN_SETS = 2
SPARE_PAGES = 1  # pages that no table names
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Reference:
    """The result that one input set must have, and how far same-dtype PyTorch is from it, f64.

    out: [query rows, num_heads, head_dim], of all requests in their order. The other tensors have no head_dim: lse (natural
    log), norm and largest (2-norm and largest magnitude of out), torch_norm and torch_largest (the same for PyTorch's error).
    """

    out: torch.Tensor
    lse: torch.Tensor
    norm: torch.Tensor
    largest: torch.Tensor
    torch_norm: torch.Tensor
    torch_largest: torch.Tensor


@dataclass(frozen=True)
class InputSet:
    """One layer's tensors: q, of the case's query_shape, and the caches in the case's layout, on one device.

    k, v: HND [pages, num_kv_heads, page_size, head_dim], NHD [pages, page_size, num_kv_heads, head_dim], or contiguous
    [batch, num_kv_heads, tokens, head_dim]. k_scale, v_scale: [1], [num_kv_heads], per token [pages, page_size, num_kv_heads]
    in either layout (contiguous: [batch, num_kv_heads, tokens]), or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Pages:
    """The page table of a paged case in both formats, int32 on the device; pages are shuffled over the pool.

    table [batch, max_pages], -1 past a row's pages; seq_lens, last_page_len [batch]; indptr [batch + 1]; indices [used pages].
    unused: bool [pages, page_size], the slots that no row owns.
    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    unused: torch.Tensor

    def of(self, requests: slice) -> Pages:
        """The page table of some neighbouring requests, over the same pages."""
        indptr = self.indptr[requests.start : requests.stop + 1]
        indices = self.indices[int(indptr[0]) : int(indptr[-1])]
        seq_lens, last_page_len = self.seq_lens[requests], self.last_page_len[requests]
        return Pages(self.table[requests], seq_lens, indptr - indptr[0], indices, last_page_len, self.unused)


@dataclass(frozen=True)
class Inputs:
    """The inputs of providers: the sets to rotate over, and the page table that all sets share (None for a contiguous case).

    operands: the tensors that modify scores, for all sets. references: the correctness gate's reference of each set, by index.
    """

    case: Case
    sets: tuple[InputSet, ...]
    pages: Pages | None
    operands: ScoreOperands = NO_OPERANDS
    references: dict[int, Reference] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def softmax_scale(self) -> float:
        return self.case.head_dim**-0.5

    def qo_indptr(self) -> torch.Tensor:
        """Where the query rows of each request begin and end: int32 [batch + 1]."""
        ends = accumulate(self.case.query_rows())
        return torch.tensor([0, *ends], dtype=torch.int32, device=self.sets[0].q.device)

    def plain(self) -> Inputs:
        """The same caches for `case.plain`: each request's last query row, and under a window the first tokens of each row."""
        case = self.case.plain
        sets = tuple(replace(s, q=self._last_rows(s.q)) for s in self.sets)
        pages = self.pages
        if pages is not None and case.tokens() != self.case.tokens():
            pages = first_tokens(pages, case)
        return Inputs(case, sets, pages)

    def _last_rows(self, q: torch.Tensor) -> torch.Tensor:
        """The last query row of each request: [batch, num_heads, head_dim]. With one row per request, q itself."""
        if self.case.mixed and self.case.q_rows > 1:
            return q[self.qo_indptr()[1:].long() - 1]
        return q.view(self.case.batch_size, self.case.q_rows, *q.shape[-2:])[:, -1].contiguous()

    def wide(self) -> Inputs:
        """The same q and page table over caches of q's dtype, in which every slot has its real value, rounded."""
        sets = (InputSet(s.q, self._rounded(s.k, s.k_scale), self._rounded(s.v, s.v_scale)) for s in self.sets)
        return Inputs(self.case.wide, tuple(sets), self.pages, self.operands)

    def _rounded(self, cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """A cache in its own layout, in q's dtype, times its scales."""
        values = cache.float()
        if scale is not None:
            tokens_first = values.transpose(1, 2) if self.pages is None or self.case.layout == "HND" else values
            of_tokens = scale.transpose(1, 2) if self.pages is None and scale.dim() == 3 else scale
            tokens_first *= of_tokens.float()[..., None]
        return values.to(DTYPES[self.case.dtype])

    def parts(self) -> tuple[Inputs, ...]:
        """The inputs of each of `case.parts`, over the same pages: q is a view of this q's rows.

        Raises ValueError for a mixed batch with contiguous keys or with a tree.
        """
        if not self.case.mixed:
            return (self,)
        if self.pages is None or self.operands.tree_mask is not None:
            raise ValueError(f"case: {self.case.name} is a mixed batch, whose keys are paged and whose rows are no tree")
        found, request, row = [], 0, 0
        for case in self.case.parts():
            requests, rows = case.batch_size, case.batch_size * case.q_rows
            sets = tuple(replace(s, q=s.q[row : row + rows].view(case.query_shape)) for s in self.sets)
            found.append(Inputs(case, sets, self.pages.of(slice(request, request + requests)), self.operands))
            request, row = request + requests, row + rows
        return tuple(found)

    def fill_unused(self, value: float) -> None:
        """Writes `value` to every slot that no row owns, in all caches and scales per token (see storage.fill)."""
        if self.pages is None:
            return
        for s in self.sets:
            for cache in (s.k, s.v):
                fill(cache.transpose(1, 2) if self.case.layout == "HND" else cache, self.pages.unused, value)
            for scale in (s.k_scale, s.v_scale):
                if scale is not None and scale.dim() == 3:
                    fill(scale, self.pages.unused, value)

    def row(self, index: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one row of set `index`, gathered: [num_kv_heads, tokens, head_dim] (see rows)."""
        k, v = self.rows(index, [row])
        return k[0], v[0]

    def rows(self, index: int, rows: list[int], heads: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some rows of one length in set `index`, for the KV heads `heads`: [rows, heads, tokens, head_dim].

        Returns real values: 16-bit elements as they are, 8-bit elements times their scales, in f64.
        """
        s = self.sets[index]
        return self._real(s.k, s.k_scale, rows, heads), self._real(s.v, s.v_scale, rows, heads)

    def _real(self, cache: torch.Tensor, scale: torch.Tensor | None, rows: list[int], heads: slice) -> torch.Tensor:
        heads_first = self.pages is not None and self.case.layout == "HND"
        stored = self._gathered(raw(cache.transpose(1, 2) if heads_first else cache), rows, heads).view(cache.dtype)
        if self.case.kv_dtype is None:
            return stored
        if scale is None:
            return stored.double()
        per_token = scale.dim() == 3
        scale = (
            self._gathered(scale, rows, heads)[..., None]
            if per_token
            else scale.expand(self.case.num_kv_heads)[heads, None, None]
        )
        return stored.double() * scale.double()

    def _gathered(self, slots: torch.Tensor, rows: list[int], heads: slice) -> torch.Tensor:
        """Slots [pages, page_size, num_kv_heads, ...], or [batch, num_kv_heads, tokens, ...] -> [rows, heads, tokens, ...]."""
        if self.pages is None:
            return slots[:, heads][rows]
        tokens = self.case.tokens()[rows[0]]
        ids = self.pages.table[rows, : -(-tokens // self.case.page_size)].long()
        return slots[:, :, heads][ids].flatten(1, 2)[:, :tokens].transpose(1, 2).contiguous()


def num_sets(kv_bytes: int, memory_bytes: int, rotated_bytes: int, set_bytes: int | None = None) -> int:
    """How many sets to rotate over: at least two, and as many as read `rotated_bytes`, within `memory_bytes`.

    kv_bytes: bytes that a step reads of a set; set_bytes: bytes that a set takes, if that is more. If memory is short, one set
    is enough if it exceeds `rotated_bytes` by itself. Raises MemoryError if the sets do not fit.
    """
    set_bytes = kv_bytes if set_bytes is None else set_bytes
    wanted = max(MIN_SETS, -(-rotated_bytes // kv_bytes))
    fitting = memory_bytes // set_bytes
    if fitting >= wanted:
        return wanted
    if fitting >= 1 and fitting * kv_bytes >= rotated_bytes:
        return fitting
    raise MemoryError(f"{wanted} sets of {set_bytes} bytes exceed the {memory_bytes} bytes allowed for inputs")


def make_inputs(case: Case, device: torch.device, memory_bytes: int, rotated_bytes: int = ROTATED_BYTES) -> Inputs:
    """Random q, K, V and scales for `case` with NaN in every unused slot (127 in int8); the same numbers each time.

    memory_bytes: bytes that K and V of all sets may take; rotated_bytes: bytes that they must exceed. MemoryError: see num_sets.
    """
    lengths = case.tokens()
    pages = make_pages(case, device) if case.page_size else None
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(case.name.encode()))
    heads_first = pages is None or case.layout == "HND"
    count, slots = (len(lengths), lengths[0]) if pages is None else pages.unused.shape
    heads = case.num_kv_heads
    shape = (count, heads, slots, case.head_dim) if heads_first else (count, slots, heads, case.head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPES[case.dtype], device=device)

    def cache() -> tuple[torch.Tensor, torch.Tensor | None]:
        if case.kv_dtype is None:
            return normal(*shape), None
        kv_dtype = KVDtype(case.kv_dtype)
        stored = torch.empty(shape, dtype=kv_dtype.torch_dtype, device=device)
        tokens_first = stored.transpose(1, 2) if heads_first else stored
        scale = quantize_normal(tokens_first, kv_dtype, scale_of(case), normal)
        if scale is not None and scale.dim() == 3 and pages is None:
            scale = scale.transpose(1, 2).contiguous()
        return stored, scale

    def layer() -> InputSet:
        q = normal(*case.query_shape)
        (k, k_scale), (v, v_scale) = cache(), cache()
        return InputSet(q, k, v, k_scale, v_scale)

    layers = num_sets(case.kv_bytes, memory_bytes, rotated_bytes, max(case.kv_bytes, case.cache_bytes))
    inputs = Inputs(case, tuple(layer() for _ in range(layers)), pages, make_operands(case, device))
    inputs.fill_unused(float("nan"))
    return inputs


def make_pages(case: Case, device: torch.device) -> Pages:
    """The page table of a paged case; a row's pages are drawn at random from the pool."""
    lengths = torch.tensor(case.tokens(), dtype=torch.int64)
    counts = -(-lengths // case.page_size)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    used = int(indptr[-1])
    shuffle = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    indices = torch.randperm(used + SPARE_PAGES, generator=shuffle)[:used]
    column = torch.arange(int(counts.max()))
    live = column < counts[:, None]
    table = torch.full(live.shape, -1, dtype=torch.int64)
    table[live] = indices
    last_page_len = lengths - (counts - 1) * case.page_size
    unused = torch.ones(used + SPARE_PAGES, case.page_size, dtype=torch.bool)
    unused[indices] = False
    unused[indices[indptr[1:] - 1]] = torch.arange(case.page_size) >= last_page_len[:, None]
    table, lengths, indptr, indices, last_page_len = (
        t.to(device, torch.int32) for t in (table, lengths, indptr, indices, last_page_len)
    )
    return Pages(table, lengths, indptr, indices, last_page_len, unused.to(device))


def first_tokens(pages: Pages, case: Case) -> Pages:
    """The page table of the same pages for the row lengths of `case`, none longer than those of `pages`."""
    seq_lens = torch.tensor(case.tokens(), dtype=torch.int32)
    counts = -(-seq_lens // case.page_size)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
    last_page_len = seq_lens - (counts - 1) * case.page_size
    device = pages.table.device
    live = torch.arange(int(counts.max())) < counts[:, None]
    table = pages.table[:, : live.shape[1]]
    indices = table[live.to(device)]
    seq_lens, indptr, last_page_len = (t.to(device) for t in (seq_lens, indptr, last_page_len))
    return replace(
        pages, table=table.contiguous(), seq_lens=seq_lens, indptr=indptr, indices=indices, last_page_len=last_page_len
    )
