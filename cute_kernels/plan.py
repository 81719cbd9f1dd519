"""Plans: select -> can_implement -> workspace_size -> run."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks
from .checks import Operands, Passage, Rules
from .config import DecodeConfig, KernelSpec
from .descriptors import DecodeProblem, FlashDecodingDescriptor, PagedDecodeDescriptor
from .dispatch import Candidate, DeviceFacts, Explanation, Launch, PlanPreference, explain
from .errors import CompileFailed, InvalidArgument, LaunchFailed, Unsupported
from .page_table import PageTable
from .workspace import WorkspaceRegion, workspace_bytes, workspace_regions

MAX_CHECKED = 4096  # signatures that a plan remembers
SKU_ARCH = {"sm90": "sm90a", "sm80": "sm80", "cpu": "cpu"}
NO_TABLE = (None, None, None)


@dataclass(frozen=True)
class PrecisionGuarantee:
    """What a plan promises about its numbers.

    The error against f64 is at most `error_ratio` times that of PyTorch in the same dtype, plus `error_ulps` units in the
    last place of the output dtype. batch_invariant: a row's bits do not depend on the other rows.
    """

    accumulator: str = "f32"
    deterministic: bool = True
    bit_stable_on_same_hardware: bool = True
    batch_invariant: bool = False
    error_ratio: float = 1.25
    error_ulps: int = 2


@dataclass(frozen=True)
class Sku:
    """What really runs. config: None for the CPU variant, which has no knobs."""

    operation: str
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    arch: str
    variant: str
    config: DecodeConfig | None
    precision_guarantee: PrecisionGuarantee


def sku_of(problem: DecodeProblem, chosen: Candidate, preference: PlanPreference) -> Sku:
    """What runs when `chosen` serves `problem`."""
    operation = "paged_decode" if problem.source == "paged" else "flash_decoding"
    dtypes = (problem.element_type, problem.kv_dtype.value, problem.element_type)
    guarantee = PrecisionGuarantee(batch_invariant=chosen.arch == "cpu" or preference.batch_invariant)
    return Sku(operation, *dtypes, SKU_ARCH[chosen.arch], chosen.variant, chosen.config, guarantee)


class DecodePlan:
    """What the plans of one query row a request share. Make one with `select`; its attributes are read-only facts."""

    def __init__(
        self,
        descriptor: PagedDecodeDescriptor | FlashDecodingDescriptor,
        device: torch.device,
        rules: Rules,
        preference: PlanPreference,
    ) -> None:
        facts, problem = DeviceFacts.of(device), rules.problem
        self._explanation = explain(problem, facts, preference)
        chosen = self._explanation.chosen
        self.descriptor = descriptor
        self.device = device
        self.sm_count = facts.sm_count
        self.num_ctas = chosen.num_ctas
        self.sku = sku_of(problem, chosen, preference)
        self._rules = rules
        self._workspace_bytes = workspace_bytes(problem, chosen.cutting_ctas)
        self._scale = descriptor.scale
        self._tag = secrets.randbits(31) | 1  # marks this plan's words in a workspace that may hold anything
        self._several_gpus = device.type == "cuda" and torch.cuda.device_count() > 1
        self._checked: dict[object, Passage] = {}
        self._launch = _launch_of(chosen.spec, descriptor)

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the plan promises about its numbers."""
        return self.sku.precision_guarantee

    def explain(self) -> Explanation:
        """Every variant and why it was taken or rejected; print it, or take its `to_dict()`."""
        return self._explanation

    def workspace_size(self) -> int:
        """Exact bytes of the workspace that `run` needs; 0 where none is needed."""
        return self._workspace_bytes

    def workspace_regions(self) -> tuple[WorkspaceRegion, ...]:
        """The named regions of the workspace, in bytes."""
        return workspace_regions(self._rules.problem, self._explanation.chosen.cutting_ctas)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: tuple[Tensor | None, Tensor | None, Tensor | None],
        out: Tensor | None,
        lse: Tensor | None,
        workspace: Tensor | None,
        stream: torch.cuda.Stream | None,
    ) -> tuple[Tensor, Tensor]:
        if out is None or lse is None:
            out, lse = self._allocate(q, out, lse)
        key: object = None
        passage = None
        try:
            key = checks.signature(q, k, v, *table, out, lse, workspace)
            passage = self._checked.get(key)
        except (AttributeError, TypeError):
            pass  # not a tensor: the check names it
        if passage is None:
            passage = self._check(key, Operands(q, k, v, *table, out, lse, workspace))
        elsewhere = self._several_gpus and torch.cuda.current_device() != self.device.index
        if self._workspace_bytes == 0:
            workspace = None  # a kernel that keeps rows whole takes none
        if passage is not Passage.DIRECT or stream is not None or elsewhere:
            return self._run_slowly(passage, Operands(q, k, v, *table, out, lse, workspace), stream)
        if self._rules.nhd:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        try:
            self._launch(q, k, v, *table, out, lse, workspace, self._scale, self.num_ctas, self._tag)
        except (RuntimeError, TypeError, ValueError) as error:
            raise LaunchFailed(f"{self.sku.variant} on {self.device}: {error}") from error
        return out, lse

    def _allocate(self, q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        checks.check_query(self._rules, q)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if lse is None:
            problem = self._rules.problem
            lse = torch.empty((problem.batch_size, problem.num_heads), dtype=torch.float32, device=q.device)
        return out, lse

    def _check(self, key: object, operands: Operands) -> Passage:
        passage = checks.check(self._rules, operands)
        checks.check_workspace(self._rules, operands.workspace, self._workspace_bytes)
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked[key] = passage
        return passage

    def _run_slowly(self, passage: Passage, operands: Operands, stream: torch.cuda.Stream | None) -> tuple[Tensor, Tensor]:
        """The same for odd strides, nothing to read, a stream of the caller's, or a device that is not current."""
        with self._on(stream):
            if passage is Passage.EMPTY:
                operands.out.zero_()
                operands.lse.fill_(-math.inf)
            elif passage is not Passage.NOTHING:
                seen = checks.normalised(self._rules, operands)
                try:
                    self._launch(*seen, self._scale, self.num_ctas, self._tag)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise LaunchFailed(f"{self.sku.variant} on {self.device}: {error}") from error
        return operands.out, operands.lse

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """The plan's device and the given stream are current inside, the caller's again after."""
        if stream is None and self.device.type != "cuda":
            yield
            return
        if stream is not None and (not isinstance(stream, torch.cuda.Stream) or stream.device != self.device):
            raise InvalidArgument("stream", f"got {stream!r}, must be a torch.cuda.Stream of the plan's device, {self.device}")
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield


class PagedDecodePlan(DecodePlan):
    """Decode attention of one query row a request over a paged cache."""

    @classmethod
    def select(
        cls,
        descriptor: PagedDecodeDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> PagedDecodePlan:
        """The first variant that serves `descriptor` on `device` (default: the current GPU, else the CPU), compiled.

        Raises Unsupported with every reason when none does, or not the one that `preference` forces; CompileFailed when
        it cannot be compiled, also inside a graph capture.
        """
        if not isinstance(descriptor, PagedDecodeDescriptor):
            raise InvalidArgument("descriptor", f"got {type(descriptor).__name__}, must be a PagedDecodeDescriptor")
        preference = preference or PlanPreference()
        where = _device(device, preference)
        nhd = descriptor.layout.order == "NHD"
        rules = Rules(descriptor.problem, where, nhd=nhd, num_pages=descriptor.num_pages)
        return cls(descriptor, where, rules, preference)

    def can_implement(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: PageTable,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        checks.check_page_table(self._rules.problem, page_table)
        checks.check(self._rules, Operands(q, k_cache, v_cache, *page_table.operands, out, lse, None))

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: PageTable,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Launches on the current or the given stream and returns (out, lse), both fully written.

        q, out: [batch, num_heads, head_dim], also with one unit query axis; caches: 4-D in the descriptor's layout; lse: f32
        [batch, num_heads]; workspace: uint8 [workspace_size() or more]. Allocates only the outputs that are not given.
        No host-device synchronisation. Raises, before anything is written, InvalidProblem (an extent), InvalidArgument
        (type, dtype, device, overlap), MisalignedOperand, Unsupported (strides), WorkspaceTooSmall; then LaunchFailed.
        """
        if type(page_table) is not PageTable or page_table.format != self._rules.problem.table_format:
            checks.check_page_table(self._rules.problem, page_table)
        return self._run(q, k_cache, v_cache, page_table.operands, out, lse, workspace, stream)


class FlashDecodingPlan(DecodePlan):
    """Decode attention of one query row a request over a contiguous cache."""

    @classmethod
    def select(
        cls,
        descriptor: FlashDecodingDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> FlashDecodingPlan:
        """As PagedDecodePlan.select."""
        if not isinstance(descriptor, FlashDecodingDescriptor):
            raise InvalidArgument("descriptor", f"got {type(descriptor).__name__}, must be a FlashDecodingDescriptor")
        preference = preference or PlanPreference()
        where = _device(device, preference)
        return cls(descriptor, where, Rules(descriptor.problem, where, seq_len=descriptor.seq_len), preference)

    def can_implement(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        checks.check(self._rules, Operands(q, k, v, *NO_TABLE, out, lse, None))

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        workspace: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As PagedDecodePlan.run, with k and v [batch, num_kv_heads, seq_len, head_dim]."""
        return self._run(q, k, v, NO_TABLE, out, lse, workspace, stream)


def _device(device: torch.device | str | None, preference: PlanPreference) -> torch.device:
    """The device with its index. Raises Unsupported for one that this machine lacks."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and preference.arch != "cpu" else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument("device", f"got {device!r}, must be a torch.device or its name") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise Unsupported([f"device = {found}: must be a CUDA device or the CPU"])
    if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
        raise Unsupported([f"device = {found}: this machine has {torch.cuda.device_count()} CUDA devices"])
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def _launch_of(spec: KernelSpec | None, descriptor: PagedDecodeDescriptor | FlashDecodingDescriptor) -> Launch:
    """The callable behind a chosen variant, compiled now; the CPU variant where there is no spec."""
    if spec is None:
        from .reference import cpu_variant

        return cpu_variant(descriptor.problem)
    from .compile import compile_decode, compiled_specs

    if torch.cuda.is_current_stream_capturing() and spec not in compiled_specs():
        raise CompileFailed(f"spec = {spec}: is not compiled yet, must not be compiled inside a graph capture; select before it")
    return compile_decode(spec)
