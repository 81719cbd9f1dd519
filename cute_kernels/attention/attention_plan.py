"""The plan of attention with several query rows per request: select -> can_implement -> workspace_size -> run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kv.page_table import PageTable
from ..kv.tensors import check_page_table
from ..planning.base import selected
from ..planning.variants import PlanPreference
from .attention_descriptor import PagedAttentionDescriptor
from .checks import Rules
from .operands import Extras, Given, Operands
from .plan import AttentionPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PagedAttentionPlan(AttentionPlan):
    """Attention of several query rows per request over a paged or a contiguous cache, with masks and score modifiers."""

    _operation = "paged_attention"
    _looks_for_shortcuts = False

    def __init__(self, descriptor: PagedAttentionDescriptor, device: torch.device, preference: PlanPreference) -> None:
        nhd, num_pages, max_pages = descriptor.layout.order == "NHD", descriptor.num_pages, descriptor.max_pages
        rules = Rules(descriptor.problem, device, nhd=nhd, num_pages=num_pages, max_pages=max_pages)
        super().__init__(descriptor, rules, preference)

    @classmethod
    def select(
        cls,
        descriptor: PagedAttentionDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> PagedAttentionPlan:
        """As PagedDecodePlan.select."""
        return selected(cls, PagedAttentionDescriptor, descriptor, device, preference)

    def can_implement(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: PageTable, **given: Unpack[Given]) -> None:
        """As PagedDecodePlan.can_implement."""
        self._can_implement(q, k_cache, v_cache, page_table, given)

    def run(
        self,
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: PageTable, *,
        qo_indptr: Tensor | None = None, tree_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Launches on the current or the given stream and returns (out, lse): all rows of requests are written, no others.

        q, out: as the descriptor's query_format says, any strides with a unit last one: pass a q [batch, heads, q_len, head_dim]
        as `q.transpose(1, 2)`. lse: f32 [total_q, num_heads], for uniform rows [batch * q_len, num_heads]. Caches: in the
        descriptor's layout, or as its table_format says. Rows of q, out and lse at and past qo_indptr[batch] are padding:
        nothing is read or written there.

        These lie on the plan's device, each given if the descriptor says so and None if not: qo_indptr int32 [batch + 1], for
        ragged rows; tree_mask int32 [total_q, ceil(max_q_len / 32)]; alibi_slopes and sinks f32 [num_heads]. k_scale, v_scale:
        as PagedDecodePlan.run takes them; scales per token of a contiguous cache are [batch, num_kv_heads, max_len] whatever
        the layout, of a packed one [total_k, num_kv_heads].

        workspace, stream, synchronisation and errors are as in PagedDecodePlan.run. If qo_indptr decreases, is negative or ends
        past total_q at a request, that request has no query rows; if it gives a request more than max_q_len rows, the first
        max_q_len count. Both faults are recorded for `status`, as is other bad metadata. Under PlanPreference(validate=True) they
        raise InvalidArgument.
        """
        check_page_table(self._rules.problem.table_format, page_table)
        operands = Operands(q, k_cache, v_cache, *page_table.operands, k_scale, v_scale, out, lse, workspace)
        return self._run(operands, stream, Extras(qo_indptr, tree_mask, alibi_slopes, sinks))
