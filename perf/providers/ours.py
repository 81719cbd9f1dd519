"""This package, through its plans: descriptor -> select -> run, everything preallocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch

import cute_kernels as ck
from cute_kernels.attention.choice import tuned
from cute_kernels.attention.descriptors import DecodeProblem
from cute_kernels.attention.variants import explain
from cute_kernels.compile.kernels import compile_ahead
from cute_kernels.config.decode import DecodeConfig, KernelSpec
from cute_kernels.planning.variants import DeviceFacts, VariantArch
from perf.cases import PARTS, PLAIN, WIDE, Case, Operation
from perf.correctness import OURS, OURS_F32, Tolerance
from perf.inputs import DTYPES, Inputs, InputSet, Pages
from perf.providers.base import Candidate, NotSupported, Result, require, served
from perf.storage import storage

Plan: TypeAlias = "ck.PagedDecodePlan | ck.FlashDecodingPlan | ck.PagedAttentionPlan"
Descriptor: TypeAlias = "ck.PagedDecodeDescriptor | ck.FlashDecodingDescriptor | ck.PagedAttentionDescriptor"


class OurPlan:
    """The base of this package's providers: a plan that chooses its variant by itself, or has it forced."""

    name: ClassVar[str] = "ours"
    arch: ClassVar[VariantArch | None] = None
    tolerance: ClassVar[Tolerance | None] = OURS
    reads_unused: ClassVar[bool] = False

    def available(self) -> str | None:
        return None

    def version(self) -> str:
        return ck.__version__

    def make(self, plan: Any, described: Any, device: torch.device) -> Any:
        """The plan of `described`, of the class `plan`. Raises NotSupported with the plan's own reasons."""
        try:
            return self.choose(plan, described, device, ck.PlanPreference(arch=self.arch))
        except ck.Unsupported as unsupported:
            raise NotSupported(str(unsupported)) from unsupported

    def choose(self, plan: Any, described: Any, device: torch.device, preference: ck.PlanPreference) -> Any:
        """The plan of `described`. Raises Unsupported."""
        return plan.select(described, device=device, preference=preference)

    def candidate(self, plan: Any, calls: Sequence[Callable[[], Any]], tolerance: Tolerance | None = None) -> Candidate:
        """The runs of a plan; host times are taken of one run, and of `select` for a descriptor that is known already."""
        select = partial(type(plan).select, plan.descriptor, plan.device, ck.PlanPreference(arch=self.arch))
        detail = {"sku": plan.sku, "workspace_bytes": plan.workspace_size()}
        return Candidate(calls, detail, {"run": calls[0], "select": select}, tolerance=tolerance)


class Ours(OurPlan):
    """Our decode."""

    operation: ClassVar[Operation] = "decode"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        plan = self.select(inputs)
        return [self.candidate(plan, bind(plan, inputs, *results_of(inputs)), OURS_F32 if inputs.case.dtype == "f32" else None)]

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """As CompilesAhead."""
        compile_ahead(self.specs(cases, DeviceFacts.of(torch.device("cuda", torch.cuda.current_device()))))

    def specs(self, cases: Sequence[Case], facts: DeviceFacts) -> list[KernelSpec]:
        """The kernels that such a device runs for `cases`, without those that no plan serves."""
        chosen = (spec_of(descriptor(case).problem, facts, self.arch) for case in cases)
        return [spec for spec in chosen if spec is not None]

    def select(self, inputs: Inputs) -> Plan:
        """The plan for the case of `inputs`. Raises NotSupported."""
        described = descriptor(inputs.case)
        plan: Plan = self.make(plan_class(described), described, inputs.sets[0].q.device)
        return plan


class OursSm80(Ours):
    """The SM80 variant, forced."""

    name: ClassVar[str] = "ours-sm80"
    arch: ClassVar[VariantArch | None] = "sm80"


class OursAttention(Ours):
    """Our attention of several query rows, and of one row with score modifiers."""

    operation: ClassVar[Operation] = "attention"


class OursSm80Attention(OursSm80):
    """OursAttention by the SM80 variant."""

    operation: ClassVar[Operation] = "attention"


class OursPlain(Ours):
    """Plain decode over the caches of an attention case: several query rows and modifiers are compared with it."""

    name: ClassVar[str] = PLAIN
    operation: ClassVar[Operation] = "attention"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        plain = inputs.plain()
        return [replace(candidate, inputs=plain) for candidate in super().prepare(plain)]

    def specs(self, cases: Sequence[Case], facts: DeviceFacts) -> list[KernelSpec]:
        """As Ours."""
        return super().specs([case.plain for case in cases], facts)


class OursWide(Ours):
    """Attention over 16-bit caches of the values of an 8-bit case: what long queries over 8 bits are compared with."""

    name: ClassVar[str] = WIDE
    operation: ClassVar[Operation] = "attention"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        require_comparable(inputs.case)
        wide = inputs.wide()
        return [replace(candidate, inputs=wide) for candidate in super().prepare(wide)]

    def specs(self, cases: Sequence[Case], facts: DeviceFacts) -> list[KernelSpec]:
        """As Ours."""
        return super().specs([case.wide for case in cases if served(require_comparable, case)], facts)


class OursParts(Ours):
    """A mixed batch without a plan for all of it: one plan for each number of query rows, one after the other.

    The decode rows go through a PagedDecodePlan, verify rows and chunks each through a PagedAttentionPlan for uniform rows. Each
    plan has the kernel and the configuration that it chooses for its requests alone. All plans are launched in one call on one
    stream, and each writes its rows of one result. So the time is the sum of the parts' times, less the overlap of a launch with
    the previous one, which successive calls of one plan also have. A plan for the whole batch is compared with this time.
    """

    name: ClassVar[str] = PARTS
    operation: ClassVar[Operation] = "attention"

    def prepare(self, inputs: Inputs) -> Sequence[Candidate]:
        parts = inputs.parts()
        require(len(parts) > 1, "its requests have one number of query rows: there are no parts")
        plans = [self.select(part) for part in parts]
        out, lse = results_of(inputs)
        counts = [len(part.sets[0].q.flatten(0, -3)) for part in parts]
        calls = []
        for plan, part, *rows in zip(plans, parts, out.split(counts), lse.split(counts), strict=True):
            calls.append(bind(plan, part, rows[0].view(part.case.query_shape), rows[1]))
        detail = {
            "parts": {f"q{part.case.q_rows}": plan.sku for part, plan in zip(parts, plans, strict=True)},
            "workspace_bytes": sum(plan.workspace_size() for plan in plans),
        }
        return [Candidate([partial(in_turn, of_set, (out, lse)) for of_set in zip(*calls, strict=True)], detail)]

    def specs(self, cases: Sequence[Case], facts: DeviceFacts) -> list[KernelSpec]:
        """As Ours."""
        return super().specs([part for case in cases if case.mixed for part in case.parts()], facts)


class Configured(Ours):
    """The variant that a plan selects, with a configuration from the tuner. config: None for the heuristic's choice."""

    def __init__(self, config: DecodeConfig | None) -> None:
        self.config = config

    def choose(self, plan: Any, described: Any, device: torch.device, preference: ck.PlanPreference) -> Any:
        with tuned.forced(self.config):  # the plan is made anew, since `select` would remember it
            return plan(described, device, preference)


def require_comparable(case: Case) -> None:
    """Raises NotSupported unless attention over 16 bits says something of a case: of a long query over 8 bits."""
    require(case.kv_dtype is not None, "its caches have q's dtype already")
    require(case.long, "the memory limits it: 16-bit caches have twice its bytes")


def results_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty out, as a run is given it, and an empty lse f32 [query rows, num_heads]."""
    out = torch.empty_like(query(inputs.case, inputs.sets[0].q))
    return out, torch.empty(out.flatten(0, -3).shape[:2], dtype=torch.float32, device=out.device)


def bind(plan: Plan, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> list[Callable[[], Result]]:
    """A run of the plan on each input set, into out and lse, with a workspace that these runs share."""
    run: Callable[..., Result] = plan.run
    tables = table_of(inputs)
    workspace = plan.new_workspace() if plan.workspace_size() else None
    fixed = {**inputs.operands.given(), "out": out, "lse": lse, "workspace": workspace}
    if inputs.case.query == "ragged":
        fixed["qo_indptr"] = inputs.qo_indptr()
    return [partial(run, query(inputs.case, s.q), s.k, s.v, *tables, **scales(s), **fixed) for s in inputs.sets]


def in_turn(calls: Sequence[Callable[[], Result]], result: Result) -> Result:
    """Makes the calls, which together write `result`, and returns it."""
    for call in calls:
        call()
    return result


def spec_of(problem: DecodeProblem, facts: DeviceFacts, arch: VariantArch | None = None) -> KernelSpec | None:
    """The spec that a problem's plan compiles on such a device; None if nothing is compiled or no variant serves it."""
    try:
        return explain(problem, facts, ck.PlanPreference(arch=arch)).chosen.spec
    except ck.Unsupported:
        return None


def descriptor(case: Case) -> Descriptor:
    """The descriptor of a case."""
    return paged_descriptor(case) if case.page_size else contiguous_descriptor(case)


def plan_class(described: Descriptor) -> type[Plan]:
    """The class of the plans for such a descriptor."""
    if isinstance(described, ck.FlashDecodingDescriptor):
        return ck.FlashDecodingPlan
    return ck.PagedDecodePlan if isinstance(described, ck.PagedDecodeDescriptor) else ck.PagedAttentionPlan


def paged_descriptor(case: Case) -> ck.PagedDecodeDescriptor | ck.PagedAttentionDescriptor:
    """The descriptor of a paged case, with the longest row as its hint. Several query rows are causal."""
    fields: dict[str, Any] = {
        "batch_size": case.batch_size,
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "page_size": case.page_size,
        "q_dtype": DTYPES[case.dtype],
        **storage(case),
        "layout": ck.KVLayout(case.layout),
        "table_format": "csr" if case.table_format == "csr" else "dense",
        "max_seq_len": max(case.tokens()),
    }
    modifiers = {name: getattr(case, name) for name in ("window_left", "softcap", "alibi", "sinks", "tree_mask")}
    fields |= {name: value for name, value in modifiers.items() if value is not None}
    if case.q_len is None:
        return ck.PagedDecodeDescriptor(**fields)
    return ck.PagedAttentionDescriptor(**fields, max_q_len=case.q_len, query_format=case.query or "uniform")


def contiguous_descriptor(case: Case) -> ck.FlashDecodingDescriptor | ck.PagedAttentionDescriptor:
    """The descriptor of a contiguous case."""
    if case.q_len is not None:
        fields: dict[str, Any] = {
            "max_q_len": case.q_len,
            "query_format": case.query or "uniform",
            "max_seq_len": max(case.tokens()),
        }
        fields |= {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim, "page_size": None}
        fields |= {"q_dtype": DTYPES[case.dtype], "table_format": "lengths", **storage(case)}
        return ck.PagedAttentionDescriptor(case.batch_size, **fields)
    shape = (case.batch_size, case.num_heads, case.num_kv_heads, case.tokens()[0], case.head_dim, DTYPES[case.dtype])
    return ck.FlashDecodingDescriptor(*shape, **storage(case))


def query(case: Case, q: torch.Tensor) -> torch.Tensor:
    """q as a run is given it: ragged query rows of all requests lie in one axis."""
    return q.flatten(0, -3) if case.query == "ragged" else q


def scales(layer: InputSet) -> dict[str, torch.Tensor]:
    """The scale tensors that a run is given; none if the caches have none."""
    given = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    return {name: scale for name, scale in given.items() if scale is not None}


def table_of(inputs: Inputs) -> tuple[ck.PageTable, ...]:
    """A run's page table: for contiguous rows with several query rows each, their lengths; for contiguous decode, nothing."""
    if inputs.pages is not None:
        return (page_table(inputs.case, inputs.pages),)
    if inputs.case.q_len is None:
        return ()
    lengths = torch.tensor(inputs.case.tokens(), dtype=torch.int32, device=inputs.sets[0].q.device)
    return (ck.PageTable.lengths(lengths),)


def page_table(case: Case, pages: Pages) -> ck.PageTable:
    """The page table in the case's format."""
    if case.table_format == "csr":
        return ck.PageTable.csr(pages.indptr, pages.indices, pages.last_page_len)
    return ck.PageTable.dense(pages.table, pages.seq_lens)
