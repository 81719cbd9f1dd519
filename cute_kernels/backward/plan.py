"""The plan of attention's backward: select -> can_implement -> workspace_size -> run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..attention.checks import check_query
from ..attention.operands import Passage
from ..attention.requests import belongs, query_rows
from ..checks.tensors import check_tensor
from ..config.backward import BackwardSpec
from ..kv.page_table import PageTable
from ..kv.tensors import check_page_table
from ..planning.base import LAUNCH_ERRORS, SKU_ARCH, FlaggingPlan, PrecisionGuarantee, Sku, selected
from ..planning.checked import Checked, refuse_compile_in_capture, refuse_unknown
from ..planning.variants import DeviceFacts, Launch, PlanPreference
from ..planning.workspace import check_clean, end_of
from .checks import BackwardRules, Given, Operands, check, check_run, viewed
from .descriptor import PagedAttentionBackwardDescriptor
from .variants import explain
from .workspace import workspace_regions, workspace_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

NO_WORKSPACE = (None,) * 5  # delta, ranges and chains


class AttentionGradients(NamedTuple):
    """The tensors that a run wrote. dsinks: None if there are no sinks."""

    dq: Tensor
    dk_cache: Tensor
    dv_cache: Tensor
    dsinks: Tensor | None


class PagedAttentionBackwardPlan(FlaggingPlan):
    """The gradients of attention over a paged or a contiguous cache: of q, of K and V in the caches' layout, of the sinks."""

    descriptor: PagedAttentionBackwardDescriptor

    def __init__(self, descriptor: PagedAttentionBackwardDescriptor, device: torch.device, preference: PlanPreference) -> None:
        facts = preference.part_of(DeviceFacts.of(device))
        explanation = explain(descriptor, facts, preference)
        chosen = explanation.chosen
        spec: BackwardSpec | None = chosen.spec
        regions = workspace_regions(descriptor) if spec else ()
        problem = descriptor.problem
        guarantee = PrecisionGuarantee.of(problem.q_dtype, batch_invariant=not descriptor.shared_pages)
        dtypes = (problem.element_type, problem.cache_type, problem.element_type)
        sku = Sku("paged_attention_backward", *dtypes, SKU_ARCH[chosen.arch], chosen.variant, spec, guarantee)
        super().__init__(device, facts.sm_count, sku, explanation, end_of(regions), regions)
        self.descriptor, self._validate, self._check_workspace = descriptor, preference.validate, preference.check_workspace
        self._rules = BackwardRules.of(descriptor, device, self._workspace_bytes)
        self._check: Checked[Operands, Passage] = Checked(partial(check_run, self._rules))
        status = self._words.data_ptr() if spec else self._words  # the CPU variant writes the words themselves
        attention = descriptor.attention
        self._constants = (attention.scale, attention.max_q_len, *attention.launch_values, status)
        self._launch = _launch_of(spec, descriptor)

    @classmethod
    def select(
        cls,
        descriptor: PagedAttentionBackwardDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> PagedAttentionBackwardPlan:
        """As PagedDecodePlan.select."""
        return selected(cls, PagedAttentionBackwardDescriptor, descriptor, device, preference)

    def can_implement(
        self, dout: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor, page_table: PageTable,
        **given: Unpack[Given],
    ) -> None:  # fmt: skip
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors.

        Gradients that are not given count as new tensors.
        """
        check_page_table(self.descriptor.attention.table_format, page_table)
        refuse_unknown(given, Given.__annotations__)
        known: dict[str, Any] = {**dict.fromkeys(Given.__annotations__), **given}
        operands = Operands(dout, q, k_cache, v_cache, out, lse, *page_table.operands, **known, workspace=None)
        check(self._rules, self._with_outputs(operands))

    def run(
        self, dout: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor, page_table: PageTable, *,
        qo_indptr: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
        dq: Tensor | None = None, dk_cache: Tensor | None = None, dv_cache: Tensor | None = None, dsinks: Tensor | None = None,
        workspace: Tensor | None = None, stream: torch.cuda.Stream | None = None,
    ) -> AttentionGradients:  # fmt: skip
        """Launches on the current or the given stream and returns (dq, dk_cache, dv_cache, dsinks).

        dout: the gradient of out. q, k_cache, v_cache, page_table, qo_indptr, alibi_slopes, sinks: the operands of the attention
        run that returned out and lse (f32 [total_q, num_heads], in the descriptor's lse_base). q, dout, out and dq have one
        shape, a unit last stride, and other strides and an address that are multiples of gcd(16, bytes of a head) bytes.

        dq: q's shape; every query row that belongs to a request is written, other rows are not read and keep their bits.
        dk_cache, dv_cache: the caches' shapes, any strides that a cache may have; the descriptor's `unread` says which values
        tokens get that no query row may see. dsinks: f32 [num_heads], given only with sinks. Gradients that are not given are
        allocated, with zeros wherever a run does not write; nothing else is allocated. workspace: as in PagedDecodePlan.run.

        No host-device synchronisation; the same bits in every run. With an out or lse of another run the gradients mean
        nothing: a weight, exp(score - lse), is then held to at most 2, so that finite operands give finite sums. Raises, before
        anything is written, InvalidProblem (an extent), InvalidArgument (type, dtype, device, overlap), MisalignedOperand,
        Unsupported (strides), WorkspaceTooSmall; then LaunchFailed. Bad metadata is masked and recorded for `status` as
        PagedAttentionPlan does; under PlanPreference(validate=True) it raises InvalidArgument, which synchronises.
        """
        check_page_table(self.descriptor.attention.table_format, page_table)
        extras = (qo_indptr, alibi_slopes, sinks, dq, dk_cache, dv_cache, dsinks, workspace)
        operands = self._with_outputs(Operands(dout, q, k_cache, v_cache, out, lse, *page_table.operands, *extras))
        passage = self._check(operands)
        with self._on(stream):
            self._run(passage, operands)
        return AttentionGradients(operands.dq, operands.dk_cache, operands.dv_cache, operands.dsinks)

    def _with_outputs(self, operands: Operands) -> Operands:
        """The same operands, with new tensors for gradients that are not given."""
        wanted = ("dq", "dk_cache", "dv_cache", *(("dsinks",) if self.descriptor.attention.sinks else ()))
        if all(getattr(operands, name) is not None for name in wanted):
            return operands
        rules = self._rules.attention
        changes: dict[str, Tensor] = {}
        check_query(rules, operands.q)
        if operands.dq is None:
            changes["dq"] = torch.zeros(operands.q.shape, dtype=operands.q.dtype, device=operands.q.device)
        for name in ("k_cache", "v_cache"):
            if getattr(operands, f"d{name}") is None:
                like = getattr(operands, name)
                check_tensor(rules.device, name, like, rules.problem.q_dtype)
                new = torch.empty if self.descriptor.unread == "zeros" else torch.zeros
                changes[f"d{name}"] = new(like.shape, dtype=like.dtype, device=like.device)
        if operands.dsinks is None and self.descriptor.attention.sinks:
            changes["dsinks"] = torch.empty(operands.q.shape[-2], dtype=torch.float32, device=operands.q.device)
        return operands._replace(**changes)

    def _run(self, passage: Passage, operands: Operands) -> None:
        made = viewed(self._rules, operands)
        if self._validate:
            self._check_metadata(made)
        if self._check_workspace and operands.workspace is not None:
            self._refuse_capture("check_workspace")
            check_clean(operands.workspace, self._workspace_regions)
        if self.descriptor.unread == "zeros":  # the launch then overwrites every token that some query row may see
            for gradient in (operands.dk_cache, operands.dv_cache):
                gradient.zero_()
        if passage is not Passage.DIRECT:
            self._write_nothing(passage, made)
            return
        workspace = NO_WORKSPACE
        if self._workspace_bytes:
            workspace = workspace_tensors(self.descriptor, self._workspace_regions, operands.workspace, made.lse.shape[:-1])
        try:
            self._launch(*made[:-1], *workspace, *self._constants)
        except LAUNCH_ERRORS as error:
            raise self._launch_failed(error) from error
        if self._workspace_bytes:
            operands.workspace[: self._workspace_bytes].zero_()

    def _write_nothing(self, passage: Passage, operands: Operands) -> None:
        """Serves a run without keys or without query rows: zeros dsinks, and dq in the requests' rows."""
        if operands.dsinks is not None:
            operands.dsinks.zero_()
        if passage is Passage.EMPTY:
            problem, dq = self.descriptor.problem, operands.dq
            if operands.qo_indptr is None:
                dq.zero_()
            else:
                rows = query_rows(problem.query, operands.q, operands.qo_indptr, problem.max_q_len)
                dq.masked_fill_(belongs(rows, len(dq))[:, None, None], 0.0)

    def _check_metadata(self, operands: Operands) -> None:
        """Raises InvalidArgument for the first request whose metadata breaks a rule; synchronises."""
        from ..attention.reference import first_bad_row
        from .reference import spans_of

        self._refuse_capture("validate")
        d = self.descriptor
        table = PageTable(d.attention.table_format, (operands.table0, operands.table1, operands.table2))
        span, rows = spans_of(d, operands, table), (operands.qo_indptr, d.problem.max_q_len)
        fault = first_bad_row(operands.q, operands.k_cache, table, span, *rows)
        if fault is not None:
            raise fault.error(table)


def _launch_of(spec: BackwardSpec | None, descriptor: PagedAttentionBackwardDescriptor) -> Launch:
    """The callable that launches a chosen variant, compiled now; the CPU variant if there is no spec."""
    if spec is None:
        from .reference import cpu_variant

        return cpu_variant(descriptor)
    from ..compile.kernels import compile_backward

    refuse_compile_in_capture(spec)
    return compile_backward(spec)
