"""The uses of each page, chained in the order of the requests: the CTA that owns a page's gradient walks the page's chain.

A use is an entry of the page table of which some query row sees a token. Each use has a node; a page stores the first and the
last node of its chain. The CTA of the first use owns the page's dK and dV, and adds the query rows of every use in the chain's
order, so that sums need no atomics and no partial results. Node numbers are stored plus one: zero, with which a workspace begins,
means none.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...config.backward import CHAIN_THREADS, BackwardSpec
from ..attend.query_rows import Row
from ..attend.seen import keys_seen
from ..ptx.registers import LANES, quotient
from ..ptx.votes import least_of_all
from .source import Rows, open_row, page_of, uniform_row

FIRST, LAST, CLAIM = range(3)  # rows of Chains.pages
NEXT, OWNER = range(2)  # rows of Chains.nodes


@dataclass(frozen=True)
class Chains:
    """pages: int32 [3, num_pages]; nodes: int32 [2, nodes]; offsets: int32 [batch], page j of a request has node offset + j."""

    pages: cute.Tensor
    nodes: cute.Tensor
    offsets: cute.Tensor


def used_pages(spec: BackwardSpec, rows: Rows, row: Row) -> tuple[Int32, Int32]:
    """The pages [first, stop) of a request that hold a token which some query row sees."""
    begin, end = keys_seen(spec, rows.queries, row, Int32(0), row.queries)
    first = quotient(begin, spec.page_size)
    return first, cutlass.select_(begin < end, quotient(end + spec.page_size - 1, spec.page_size), first)


@cute.jit
def chain_uses(spec: cutlass.Constexpr, rows: Rows, chains: Chains, batch: Int32, votes: cute.Tensor):
    """One CTA chains the uses of all pages, request by request. votes: Int32, one per warp.

    If a request's table repeats a page, the uses of the page are chained in table order.
    """
    thread, used, capacity = cute.arch.thread_idx()[0], Int32(0), Int32(chains.nodes.shape[1])
    for index in cutlass.range(batch, unroll=1):
        row = uniform_row(open_row(spec, rows, index))
        first, stop = used_pages(spec, rows, row)
        stop = cutlass.min(stop, first + (capacity - used))  # a CSR table whose rows overlap has more uses than entries
        if thread == 0:
            chains.offsets[index] = used - first
        for base in cutlass.range(first, stop, CHAIN_THREADS, unroll=1):
            page, node = Int32(-1), used - first + base + thread
            if base + thread < stop:
                page = page_of(spec, rows.tables, row.start, (base + thread) * spec.page_size)
            waiting = (page >= 0) & (page < rows.num_pages)
            if waiting:
                chains.nodes[OWNER, node] = index
            more = some_wait(votes, waiting)
            while more:
                waiting = take_pages(chains, page, node, thread, waiting)
                more = some_wait(votes, waiting)
        used += stop - first


def some_wait(votes: cute.Tensor, waiting: Boolean) -> Boolean:
    """Whether any thread of the CTA waits. A barrier."""
    return least_of_all(CHAIN_THREADS // LANES, votes, cutlass.select_(waiting, Int32(0), Int32(1))) == 0


@cute.jit
def take_pages(chains: Chains, page: Int32, node: Int32, thread: Int32, waiting: Boolean) -> Boolean:
    """For each page the first thread that waits for it appends its node; returns whether this thread still waits."""
    own, won = CHAIN_THREADS - thread, Boolean(False)
    if waiting:
        cute.arch.atomic_max(chains.pages.iterator + cute.crd2idx((CLAIM, page), chains.pages.layout), own)
    cute.arch.sync_threads()
    if waiting:
        won = chains.pages[CLAIM, page] == own
    if won:
        before = chains.pages[LAST, page]
        if before == 0:
            chains.pages[FIRST, page] = node + 1
        else:
            chains.nodes[NEXT, before - 1] = node + 1
        chains.pages[LAST, page] = node + 1
    cute.arch.sync_threads()
    if won:
        chains.pages[CLAIM, page] = 0
    return waiting & (not won)


@cute.jit
def owner_of(chains: Chains, use: Int32) -> Int32:
    """The request of a use (a node plus one); a number past every request if use is 0."""
    owner = Int32(2**31 - 1)
    if use > 0:
        owner = chains.nodes[OWNER, use - 1]
    return owner


@cute.jit
def first_use(spec: cutlass.Constexpr, chains: Chains, index: Int32, token: Int32, page: Int32) -> Int32:
    """The first use of the page of a token of request `index`, if it is this request's use of that page; else 0."""
    use = Int32(0)
    if page >= 0 and page < Int32(chains.pages.shape[1]):
        own = chains.offsets[index] + quotient(token, spec.page_size) + 1
        use = cutlass.select_(chains.pages[FIRST, page] == own, own, 0)
    return use


@cute.jit
def next_use(chains: Chains, use: Int32) -> Int32:
    """The next use of the same page; 0 if there is none."""
    following = Int32(0)
    if use > 0:
        following = chains.nodes[NEXT, use - 1]
    return following
