"""The descriptor of attention's backward: its problem, as a frozen and self-validating value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..attention.attention_descriptor import PagedAttentionDescriptor
from ..attention.descriptors import DecodeProblem
from ..checks.fields import check_extent
from ..config.backward import ROW_BYTES
from ..errors import InvalidProblem, Unsupported
from ..kv.page_table import PAGED
from ..kv.types import QUERY_DTYPES


@dataclass(frozen=True)
class PagedAttentionBackwardDescriptor:
    """The backward of the attention that a PagedAttentionDescriptor describes. Frozen and hashable: it is a cache key.

    attention: q, K and V of one dtype, without scales and without a tree mask; caches that are scaled or of 8 bits have no
    gradient and raise Unsupported. alibi_slopes have no gradient either; sinks have one.

    shared_pages: whether a page may be an entry of two requests, or twice an entry of one request, so that its gradients sum;
    None stands for True if the cache is paged. If False, a page that is shared after all gets the gradient of one of its entries.
    If True, a GPU needs num_pages and max_pages in `attention`, since they size the workspace.

    unread: the values that dk_cache and dv_cache hold, after a run, for tokens that no query row may see (tokens past a length,
    before every window, or on a page of no request): "zeros", or "untouched" for the values they held. A token whose request
    has some query row that may see it, by causality and windows, is always written.

    max_total_q: the most rows of a ragged q, batch_size * max_q_len by default; the workspace has f32 [max_total_q, num_heads].

    Raises InvalidProblem for the field that breaks its rule, then Unsupported.
    """

    attention: PagedAttentionDescriptor
    shared_pages: bool | None = None
    unread: Literal["zeros", "untouched"] = "zeros"
    max_total_q: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.attention, PagedAttentionDescriptor):
            raise InvalidProblem("attention", type(self.attention).__name__, "must be a PagedAttentionDescriptor")
        paged = self.attention.table_format in PAGED
        if self.shared_pages is None:
            object.__setattr__(self, "shared_pages", paged)
        if not isinstance(self.shared_pages, bool):
            raise InvalidProblem("shared_pages", self.shared_pages, "must be a bool or None")
        if self.shared_pages and not paged:
            table = self.attention.table_format
            raise InvalidProblem("shared_pages", True, f'must be False beside table_format = "{table}": there are no pages')
        if self.unread not in ("zeros", "untouched"):
            raise InvalidProblem("unread", self.unread, 'must be "zeros" or "untouched"')
        if self.max_total_q is not None:
            check_extent("max_total_q", self.max_total_q)
        reasons = without_gradient(self.attention)
        if reasons:
            raise Unsupported(reasons)

    @property
    def problem(self) -> DecodeProblem:
        """The problem that the choice of a kernel depends on."""
        return self.attention.general_problem

    @property
    def most_rows(self) -> int:
        """The most query rows that all requests together may have."""
        return self.max_total_q or self.attention.batch_size * self.attention.max_q_len

    @property
    def row_alignment(self) -> int:
        """Bytes that pointers and strides of q, dout, out and dq are multiples of."""
        return math.gcd(ROW_BYTES, self.attention.head_dim * self.attention.q_dtype.itemsize)

    @property
    def nodes(self) -> int:
        """The most page-table entries that all requests together may have; used if pages are shared."""
        return self.attention.batch_size * (self.attention.max_pages or 0)

    def __str__(self) -> str:
        shared = ", shared pages" if self.shared_pages else ""
        return f"backward of {self.problem}{shared}; unread keys: {self.unread}"


def without_gradient(attention: PagedAttentionDescriptor) -> list[str]:
    """Every reason why attention has no backward."""
    problem, reasons = attention.general_problem, []
    for name, stored in (("kv_dtype", problem.kv_dtype), ("v_dtype", problem.v_dtype)):
        if stored != QUERY_DTYPES[problem.q_dtype]:
            rule = "must be q's dtype: a cache of 8 bits holds rounded values, whose gradient is zero almost everywhere"
            rule = rule if stored.element_bytes == 1 else f"must be q's dtype, {problem.element_type}"
            reasons.append(f"{name} = {stored.value}: {rule}")
    for name, scale in (("k_scale", problem.k_scale), ("v_scale", problem.v_scale)):
        if scale:
            reasons.append(f"{name} = {scale}: a scaled cache has no backward, must be KVScale.NONE")
    if attention.tree_mask:
        reasons.append("tree_mask = True: has no backward, must be False")
    return list(dict.fromkeys(reasons))
