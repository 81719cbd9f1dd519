"""Decode plans: select -> can_implement -> workspace_size -> run."""

from __future__ import annotations

import math
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from ..config.decode import KernelSpec
from ..kv.faults import first_fault
from ..kv.page_table import PageTable
from ..kv.tensors import check_page_table
from ..planning.base import LAUNCH_ERRORS, SKU_ARCH, FlaggingPlan, PrecisionGuarantee, Sku, selected
from ..planning.checked import Checked, refuse_compile_in_capture
from ..planning.variants import Candidate, DeviceFacts, Launch, PlanPreference
from ..planning.workspace import check_clean
from . import checks
from .checks import Operands, Passage, Rules
from .descriptors import DecodeProblem, FlashDecodingDescriptor, PagedDecodeDescriptor
from .shortcut import Setting, Shortcut, never, shortcut
from .variants import explain, grid_of
from .workspace import workspace_bytes, workspace_regions

MAX_SHORTCUTS = 512  # runs whose tensors it remembers, one a K cache
NO_PAGE_TABLE = ("none", (None, None, None))  # what stands for the PageTable of a contiguous cache


def sku_of(problem: DecodeProblem, chosen: Candidate, preference: PlanPreference) -> Sku:
    """What runs when `chosen` serves `problem`."""
    operation = "paged_decode" if problem.source == "paged" else "flash_decoding"
    dtypes = (problem.element_type, problem.cache_type, problem.element_type)
    guarantee = PrecisionGuarantee.of(problem.q_dtype, chosen.arch == "cpu" or preference.batch_invariant)
    return Sku(operation, *dtypes, SKU_ARCH[chosen.arch], chosen.variant, chosen.config, guarantee)


class DecodePlan(FlaggingPlan):
    """What the plans of one query row a request share. Make one with `select`; its attributes are read-only facts."""

    def __init__(
        self, descriptor: PagedDecodeDescriptor | FlashDecodingDescriptor, rules: Rules, preference: PlanPreference
    ) -> None:
        device, problem, facts = rules.device, rules.problem, DeviceFacts.of(rules.device)
        explanation = explain(problem, facts, preference)
        chosen = explanation.chosen
        grid = grid_of(problem, chosen)
        sku = sku_of(problem, chosen, preference)
        super().__init__(device, facts.sm_count, sku, explanation, workspace_bytes(*grid), workspace_regions(*grid))
        self.descriptor = descriptor
        self.num_ctas = chosen.num_ctas
        self._launch = _launch_of(chosen.spec, descriptor)
        self._rules = rules
        self._validate, self._check_workspace = preference.validate, preference.check_workspace
        self._inspects = self._validate or self._check_workspace
        status = self._words.data_ptr() if chosen.spec else self._words  # the reference writes the words themselves
        self._constants = (descriptor.scale, self.num_ctas, status)
        plain = problem.kv_dtype.element_bytes > 1 and problem.v_dtype.element_bytes > 1
        views = (rules.nhd, rules.scale_shapes)
        self._views = None if plain and views == (False, ((), ())) else views  # None: caches reach the kernel as they are
        device_index = device.index if self._several_gpus else None
        self._setting = None  # the CPU variant refuses nothing by itself: its runs are checked
        if chosen.spec is not None:
            self._setting = Setting(self._constants, self._workspace_bytes > 0, problem.table_format, self._views, device_index)
        self._check: Checked[Operands, Passage] = Checked(partial(checks.check_run, rules, self._workspace_bytes))
        self._shortcuts: dict[int, Shortcut] = {}  # by the id of the K cache, as the next
        self._last_q: dict[int, ref[Tensor]] = {}

    def _run(self, operands: Operands, stream: torch.cuda.Stream | None) -> tuple[Tensor, Tensor]:
        """Launches where no shortcut knows the operands: after the checks that their signature still needs."""
        if operands.out is None or operands.lse is None:
            operands = self._with_outputs(operands)
        passage = self._check(operands)
        if passage is not Passage.DIRECT or stream is not None or self._inspects or (self._several_gpus and self._elsewhere()):
            self._run_slowly(passage, operands, stream)
        else:
            if self._setting is not None:
                self._remember(self._setting, operands)
            self._start(operands if self._views is None else checks.viewed(self._views, operands))
        return operands.out, operands.lse

    def _with_outputs(self, operands: Operands) -> Operands:
        """The same with new ones for outputs that are not given."""
        q, problem = operands.q, self._rules.problem
        checks.check_query(self._rules, q)
        if operands.out is None:
            operands = operands._replace(out=torch.empty(q.shape, dtype=q.dtype, device=q.device))
        if operands.lse is None:
            lse = torch.empty((problem.batch_size, problem.num_heads), dtype=torch.float32, device=q.device)
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

    def _run_slowly(self, passage: Passage, operands: Operands, stream: torch.cuda.Stream | None) -> None:
        """The same for odd strides, nothing to read, a stream of the caller's, validation, or a device that is not current."""
        with self._on(stream):
            if self._validate:
                self._check_metadata(operands)
            if self._check_workspace:
                self._refuse_capture("check_workspace")
                check_clean(operands.workspace, self._workspace_regions)
            if passage is Passage.EMPTY:
                operands.out.zero_()
                operands.lse.fill_(-math.inf)
            elif passage is not Passage.NOTHING:
                self._start(checks.normalised(self._rules, operands))

    def _start(self, operands: Operands) -> None:
        """One launch; caches and scales are as a kernel takes them. One that keeps rows whole takes no workspace."""
        if self._workspace_bytes == 0:
            operands = operands._replace(workspace=None)
        try:
            self._launch(*operands, *self._constants)
        except LAUNCH_ERRORS as error:
            raise self._launch_failed(error) from error

    def _check_metadata(self, operands: Operands) -> None:
        """Raises InvalidArgument for the first row whose length, indptr or page ids break their rule; synchronises."""
        problem = self._rules.problem
        if problem.table_format == "none":
            return
        self._refuse_capture("validate")
        table = PageTable(problem.table_format, (operands.table0, operands.table1, operands.table2))
        fault = first_fault(table, problem.page_size, operands.k_cache.shape[0])
        if fault is not None:
            raise fault.error(table)


class PagedDecodePlan(DecodePlan):
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

    def can_implement(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: PageTable,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        check_page_table(self._rules.problem.table_format, page_table)
        checks.check(self._rules, Operands(q, k_cache, v_cache, *page_table.operands, k_scale, v_scale, out, lse, None))

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: PageTable,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Launches on the current or the given stream and returns (out, lse), both fully written.

        q, out: [batch, num_heads, head_dim], also with one unit query axis; caches: 4-D in the descriptor's layout; lse: f32
        [batch, num_heads]; workspace: uint8 [workspace_size() or more], as `new_workspace` gives it: zeroed once, then written by
        launches of plans only, one at a time. Allocates only the outputs that are not given.
        An fp8 cache may be handed over as bytes (uint8).

        k_scale, v_scale: what the descriptor's KVScales say, on the plan's device. "tensor": f32 [] or [1]; "head": f32
        [num_kv_heads]; "token": [num_pages, page_size, num_kv_heads] whatever the layout, or that as one axis. Any strides.

        No host-device synchronisation. Raises, before anything is written, InvalidProblem (an extent), InvalidArgument
        (type, dtype, device, overlap), MisalignedOperand, Unsupported (strides), WorkspaceTooSmall; then LaunchFailed.

        Bad lengths and page ids on the device are masked, as `reference` says, and recorded for `status`; under
        PlanPreference(validate=True) they raise InvalidArgument before anything is written, which synchronises.
        """
        if stream is None:
            known = self._shortcuts.get(id(k_cache), never)
            done = known(q, k_cache, v_cache, page_table, k_scale, v_scale, out, lse, workspace)
            if done is not None:
                return done
        check_page_table(self._rules.problem.table_format, page_table)
        operands = Operands(q, k_cache, v_cache, *page_table.operands, k_scale, v_scale, out, lse, workspace)
        return self._run(operands, stream)


class FlashDecodingPlan(DecodePlan):
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

    def can_implement(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        checks.check(self._rules, Operands(q, k, v, *NO_PAGE_TABLE[1], k_scale, v_scale, out, lse, None))

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As PagedDecodePlan.run, with k and v [batch, num_kv_heads, seq_len, head_dim].

        Scales per token are [batch, num_kv_heads, seq_len].
        """
        if stream is None:
            known = self._shortcuts.get(id(k), never)
            done = known(q, k, v, NO_PAGE_TABLE, k_scale, v_scale, out, lse, workspace)
            if done is not None:
                return done
        return self._run(Operands(q, k, v, *NO_PAGE_TABLE[1], k_scale, v_scale, out, lse, workspace), stream)


def _launch_of(spec: KernelSpec | None, descriptor: PagedDecodeDescriptor | FlashDecodingDescriptor) -> Launch:
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
