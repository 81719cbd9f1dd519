"""Plans of attention: select -> can_implement -> workspace_size -> run. Of one query row a request here."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from ..config.decode import LOG2_E, KernelSpec
from ..config.mixed import MixedSpec
from ..kv.faults import first_fault, first_query_fault
from ..kv.page_table import PageTable
from ..kv.tensors import check_page_table
from ..planning.base import LAUNCH_ERRORS, SKU_ARCH, FlaggingPlan, PrecisionGuarantee, Sku, selected
from ..planning.checked import Checked, refuse_compile_in_capture, refuse_unknown
from ..planning.variants import Candidate, DeviceFacts, Launch, PlanPreference
from ..planning.workspace import check_clean, end_of
from . import checks
from .attention_descriptor import PagedAttentionDescriptor
from .checks import Rules
from .descriptors import DecodeProblem, FlashDecodingDescriptor, PagedDecodeDescriptor
from .operands import NO_EXTRAS, Extended, Extras, Given, Operands, Passage, Views, by_request, normalised, viewed
from .requests import belongs, key_lengths, query_rows, seen_keys
from .shortcut import Setting, Shortcut, never, shortcut
from .variants import explain, regions_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


MAX_SHORTCUTS = 512  # runs whose tensors it remembers, one a K cache
NO_PAGE_TABLE = PageTable.whole()
AS_THEY_ARE: Views = ("HND", ((), ()))
Descriptor = PagedDecodeDescriptor | FlashDecodingDescriptor | PagedAttentionDescriptor


def sku_of(problem: DecodeProblem, chosen: Candidate, preference: PlanPreference, operation: str | None = None) -> Sku:
    """What runs when `chosen` serves `problem`. operation: as its plan is called, where that is not a plan of decode."""
    operation = operation or ("paged_decode" if problem.source == "paged" else "flash_decoding")
    dtypes = (problem.element_type, problem.cache_type, problem.element_type)
    guarantee = PrecisionGuarantee.of(problem.q_dtype, chosen.arch == "cpu" or preference.batch_invariant)
    return Sku(operation, *dtypes, SKU_ARCH[chosen.arch], chosen.variant, chosen.config, guarantee)


class AttentionPlan(FlaggingPlan):
    """What all plans of attention share. Make one with `select`; its attributes are read-only facts."""

    _operation: str | None = None  # as `sku_of` takes it
    _looks_for_shortcuts = True  # whether its run does

    def __init__(self, descriptor: Descriptor, rules: Rules, preference: PlanPreference) -> None:
        device, problem = rules.device, rules.problem
        facts = preference.part_of(DeviceFacts.of(device))
        explanation = explain(problem, facts, preference)
        chosen = explanation.chosen
        regions = regions_of(problem, chosen)
        sku = sku_of(problem, chosen, preference, self._operation)
        super().__init__(device, facts.sm_count, sku, explanation, end_of(regions), regions)
        self.descriptor = descriptor
        self.num_ctas = chosen.num_ctas
        self._launch = _launch_of(chosen.spec, descriptor)
        self._rules = rules
        self._validate, self._check_workspace = preference.validate, preference.check_workspace
        self._inspects = self._validate or self._check_workspace
        status = self._words.data_ptr() if chosen.spec else self._words  # the reference writes the words themselves
        shared = (descriptor.scale, self.num_ctas, status)
        self._plain = problem.plain
        self._constants = shared if problem.plain else (*shared, problem.max_q_len, *descriptor.launch_values)
        of_16_bits = problem.kv_dtype.element_bytes > 1 and problem.v_dtype.element_bytes > 1
        self._views = None if of_16_bits and rules.views == AS_THEY_ARE else rules.views  # None: caches reach kernels as they are
        device_index = device.index if self._several_gpus else None
        self._setting = None  # the CPU variant refuses nothing by itself: its runs are checked
        if self._looks_for_shortcuts and chosen.spec is not None and problem.plain:
            self._setting = Setting(shared, self._workspace_bytes > 0, problem.table_format, self._views, device_index)
        self._check: Checked[Operands | Extended, Passage] = Checked(partial(checks.check_run, rules, self._workspace_bytes))
        self._shortcuts: dict[int, Shortcut] = {}  # by the id of the K cache, as the next
        self._last_q: dict[int, ref[Tensor]] = {}

    def _can_implement(self, q: Tensor, k: Tensor, v: Tensor, page_table: PageTable, given: Given) -> None:
        """What every `can_implement` does. Raises TypeError for a name that `run` does not know."""
        refuse_unknown(given, Given.__annotations__)
        check_page_table(self._rules.problem.table_format, page_table)
        k_scale, v_scale, out, lse = (given.get(name) for name in ("k_scale", "v_scale", "out", "lse"))
        operands = Operands(q, k, v, *page_table.operands, k_scale, v_scale, out, lse, None)
        checks.check(self._rules, operands, Extras(*(given.get(name) for name in Extras._fields)))

    def _run(self, operands: Operands, stream: torch.cuda.Stream | None, extras: Extras = NO_EXTRAS) -> tuple[Tensor, Tensor]:
        """Launches where no shortcut knows the operands: after the checks that their signature still needs."""
        lasting = operands.out is not None and operands.lse is not None
        if not lasting:
            operands = self._with_outputs(operands)
        passage = self._check(operands if extras is NO_EXTRAS else Extended(operands, extras))
        if passage is not Passage.DIRECT or stream is not None or self._inspects or (self._several_gpus and self._elsewhere()):
            self._run_slowly(passage, operands, extras, stream)
        else:
            if lasting and self._setting is not None:
                self._remember(self._setting, operands)
            self._start(operands if self._views is None else viewed(self._views, operands), extras)
        return operands.out, operands.lse

    def _with_outputs(self, operands: Operands) -> Operands:
        """The same with new ones for outputs that are not given."""
        q, problem = operands.q, self._rules.problem
        checks.check_query(self._rules, q)
        if operands.out is None:
            operands = operands._replace(out=torch.empty(q.shape, dtype=q.dtype, device=q.device))
        if operands.lse is None:
            lse = torch.empty((self._rules.total_q(q), problem.num_heads), dtype=torch.float32, device=q.device)
            operands = operands._replace(lse=lse)
        return operands

    def _remember(self, setting: Setting, operands: Operands) -> None:
        """A second run with the same q and K cache makes a shortcut: for tensors made anew it would not pay."""
        q, k = operands.q, operands.k_cache
        last_q = self._last_q.get(id(k))
        if last_q is not None and last_q() is q:
            self._shortcuts[id(k)] = shortcut(self._launch, setting, partial(_forget, self._shortcuts, id(k)), operands)
            return
        if len(self._last_q) >= MAX_SHORTCUTS:
            self._last_q.clear()
            self._shortcuts.clear()
        self._last_q[id(k)] = ref(q)

    def _run_slowly(self, passage: Passage, operands: Operands, extras: Extras, stream: torch.cuda.Stream | None) -> None:
        """The same for odd strides, nothing to read, a stream of the caller's, validation, or a device that is not current."""
        with self._on(stream):
            if self._validate:
                self._check_metadata(normalised(self._rules.problem, self._rules.views, operands), extras)
            if self._check_workspace:
                self._refuse_capture("check_workspace")
                check_clean(operands.workspace, self._workspace_regions)
            if passage is Passage.EMPTY:
                self._write_empty(operands, extras)
            elif passage is not Passage.NOTHING:
                self._start(normalised(self._rules.problem, self._rules.views, operands), extras)

    def _start(self, operands: Operands, extras: Extras) -> None:
        """One launch; caches and scales are as a kernel takes them. One that keeps rows whole takes no workspace."""
        if self._workspace_bytes == 0:
            operands = operands._replace(workspace=None)
        try:
            if self._plain:
                self._launch(*operands, *self._constants)
                return
            if self._rules.problem.query == "uniform":
                operands, extras = by_request(operands, extras)
            self._launch(*operands, *extras, *self._constants)
        except LAUNCH_ERRORS as error:
            raise self._launch_failed(error) from error

    def _write_empty(self, operands: Operands, extras: Extras) -> None:
        """out = 0 and lse = -inf, or the sinks, in every query row of a request; rows of none are left as they are."""
        out, lse, problem = operands.out, operands.lse, self._rules.problem
        nothing = torch.full_like(lse, -math.inf)
        if extras.sinks is not None:
            nothing.copy_(extras.sinks * (LOG2_E if problem.lse_base == "2" else 1.0))
        if extras.qo_indptr is None:
            out.zero_()
            lse.copy_(nothing)
            return
        mine = belongs(query_rows(problem.query, operands.q, extras.qo_indptr, problem.max_q_len), len(lse))[:, None]
        out.masked_fill_(mine[..., None], 0.0)
        lse.copy_(torch.where(mine, nothing, lse))

    def _check_metadata(self, operands: Operands, extras: Extras) -> None:
        """Raises InvalidArgument for the first row whose indptr, length or page ids break their rule; synchronises.

        operands: caches as a kernel takes them.
        """
        problem = self._rules.problem
        table = PageTable(problem.table_format, (operands.table0, operands.table1, operands.table2))
        fault = None
        if problem.query == "ragged" or problem.table_format != "none":
            self._refuse_capture("validate")
        if problem.query == "ragged":
            fault = first_query_fault(extras.qo_indptr, len(operands.q), problem.max_q_len)
        if fault is None and problem.table_format != "none":
            span = None
            if problem.modifiers.masks:
                rows = query_rows(problem.query, operands.q, extras.qo_indptr, problem.max_q_len)
                lengths = key_lengths(table, operands.k_cache, rows)
                span = seen_keys(problem.modifiers, *self.descriptor.launch_values[:2], rows.q_lens, lengths)
            fault = first_fault(table, operands.k_cache.shape[2], operands.k_cache.shape[0], span=span)
        if fault is not None:
            raise fault.error(table)


class PagedDecodePlan(AttentionPlan):
    """Decode attention of one query row a request over a paged cache."""

    def __init__(self, descriptor: PagedDecodeDescriptor, device: torch.device, preference: PlanPreference) -> None:
        nhd, num_pages, max_pages = descriptor.layout.order == "NHD", descriptor.num_pages, descriptor.max_pages
        rules = Rules(descriptor.problem, device, nhd=nhd, num_pages=num_pages, max_pages=max_pages)
        super().__init__(descriptor, rules, preference)

    @classmethod
    def select(
        cls,
        descriptor: PagedDecodeDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> PagedDecodePlan:
        """The first variant that serves `descriptor` on `device` (default: the current GPU, else the CPU), compiled.

        The same descriptor, device and preference give the same plan, which is kept. Raises Unsupported with every reason
        when no variant serves, or not the one that `preference` forces; CompileFailed when it cannot be compiled, also inside
        a graph capture.
        """
        return selected(cls, PagedDecodeDescriptor, descriptor, device, preference)

    def can_implement(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: PageTable, **given: Unpack[Given]) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        self._can_implement(q, k_cache, v_cache, page_table, given)

    def run(
        self,
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: PageTable, *,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Launches on the current or the given stream and returns (out, lse), both fully written.

        q, out: [batch, num_heads, head_dim], also with one unit query axis; caches: 4-D in the descriptor's layout; lse: f32
        [batch, num_heads]; workspace: uint8 [workspace_size() or more], as `new_workspace` gives it: zeroed once, then written by
        launches of plans only, one at a time. Allocates only the outputs that are not given.
        An fp8 cache may be handed over as bytes (uint8).

        k_scale, v_scale: what the descriptor's KVScales say, on the plan's device. "tensor": f32 [] or [1]; "head": f32
        [num_kv_heads]; "token": [num_pages, page_size, num_kv_heads] whatever the layout, or that as one axis. Any strides.
        alibi_slopes, sinks: f32 [num_heads] where the descriptor says so.

        No host-device synchronisation. Raises, before anything is written, InvalidProblem (an extent), InvalidArgument
        (type, dtype, device, overlap), MisalignedOperand, Unsupported (strides), WorkspaceTooSmall; then LaunchFailed.

        Bad lengths and page ids on the device are masked, as `reference` says, and recorded for `status`; under
        PlanPreference(validate=True) they raise InvalidArgument before anything is written, which synchronises.
        """
        if stream is alibi_slopes is sinks is None:
            known = self._shortcuts.get(id(k_cache), never)
            done = known(q, k_cache, v_cache, page_table, k_scale, v_scale, out, lse, workspace)
            if done is not None:
                return done
        check_page_table(self._rules.problem.table_format, page_table)
        operands = Operands(q, k_cache, v_cache, *page_table.operands, k_scale, v_scale, out, lse, workspace)
        if alibi_slopes is sinks is None:
            return self._run(operands, stream)
        return self._run(operands, stream, Extras(None, None, alibi_slopes, sinks))


class FlashDecodingPlan(AttentionPlan):
    """Decode attention of one query row a request over a contiguous cache."""

    def __init__(self, descriptor: FlashDecodingDescriptor, device: torch.device, preference: PlanPreference) -> None:
        super().__init__(descriptor, Rules(descriptor.problem, device, seq_len=descriptor.seq_len), preference)

    @classmethod
    def select(
        cls,
        descriptor: FlashDecodingDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> FlashDecodingPlan:
        """As PagedDecodePlan.select."""
        return selected(cls, FlashDecodingDescriptor, descriptor, device, preference)

    def can_implement(self, q: Tensor, k: Tensor, v: Tensor, **given: Unpack[Given]) -> None:
        """As PagedDecodePlan.can_implement."""
        self._can_implement(q, k, v, NO_PAGE_TABLE, given)

    def run(
        self,
        q: Tensor, k: Tensor, v: Tensor, *,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As PagedDecodePlan.run, with k and v [batch, num_kv_heads, seq_len, head_dim].

        Scales per token are [batch, num_kv_heads, seq_len].
        """
        if stream is alibi_slopes is sinks is None:
            known = self._shortcuts.get(id(k), never)
            done = known(q, k, v, NO_PAGE_TABLE, k_scale, v_scale, out, lse, workspace)
            if done is not None:
                return done
        operands = Operands(q, k, v, *NO_PAGE_TABLE.operands, k_scale, v_scale, out, lse, workspace)
        if alibi_slopes is sinks is None:
            return self._run(operands, stream)
        return self._run(operands, stream, Extras(None, None, alibi_slopes, sinks))


def _launch_of(spec: KernelSpec | MixedSpec | None, descriptor: Descriptor) -> Launch:
    """The callable behind a chosen variant, compiled now; the CPU variant where there is no spec."""
    if spec is None:
        from .reference import cpu_variant

        return cpu_variant(descriptor.problem)
    from ..compile.kernels import compile_decode

    refuse_compile_in_capture(spec)
    return compile_decode(spec)


def _forget(shortcuts: dict[int, Shortcut], key: int, _: object) -> None:
    """Drops a shortcut when one of its tensors has died, whose reference is the last argument."""
    shortcuts.pop(key, None)
