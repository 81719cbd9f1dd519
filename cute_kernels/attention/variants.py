"""Which attention problems each variant can serve on which device, its configuration, and every reason why it cannot."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..checks.fields import MAX_EXTENT
from ..config.decode import CLAIMED_PIECE_COST, DEALT, DecodeConfig, KernelSpec, Partition
from ..config.limits import supports
from ..config.tiling import Arch, Target
from ..kv.types import QUERY_DTYPES
from ..planning.variants import (
    VARIANTS,
    Candidate,
    DeviceFacts,
    Explanation,
    PlanPreference,
    Variant,
    Verdict,
    choice,
    device_reasons,
)
from ..planning.workspace import WorkspaceRegion
from .choice import heuristics, tuned
from .choice.cost_model import cost_of, deal, divided_tiles, row_tokens
from .descriptors import DecodeProblem
from .kernel_spec import grid_ctas_of, kernel_spec, units_of
from .mixed import with_few
from .workspace import joined, workspace_bytes, workspace_regions

# of the time that divided rows take, pieces must be expected to take less (H200, 192 rows: over 64k 8% less, over 32k 4% more)
DIVIDED = 0.85
INVARIANT_BATCH = 8  # rows that an invariant plan's config is chosen for, whatever the batch


def explain(problem: DecodeProblem, facts: DeviceFacts, preference: PlanPreference | None = None) -> Explanation:
    """Every variant's answer for `problem` on such a device, here or not: nothing is compiled and no GPU is needed."""
    preference = preference or PlanPreference()
    answers = (_serve(variant, problem, facts, preference) for variant in VARIANTS)
    return choice(answers, str(problem), facts, preference)


def _serve(variant: Variant, problem: DecodeProblem, facts: DeviceFacts, preference: PlanPreference) -> Candidate:
    """A variant's answer: one kernel; it has phases if requests of few query rows get a phase of their own."""
    alone = _evaluate(variant, problem, facts, preference)
    if alone.spec is None or preference.max_workspace_bytes is not None:
        return alone
    target = alone.spec.target

    def few(problem: DecodeProblem) -> Candidate:
        seen = any_batch(problem) if preference.batch_invariant else problem
        config = heuristics.few_config(seen, alone.spec.arch, target, facts.sm_count)
        return _evaluate(variant, problem, facts, preference, config)

    return with_few(problem, alone, few)


def _evaluate(
    variant: Variant, problem: DecodeProblem, facts: DeviceFacts, preference: PlanPreference, given: DecodeConfig | None = None
) -> Candidate:
    """A variant's answer with a kernel of one phase. given: its configuration; None if it is chosen here."""
    unread = _dtype_reasons(variant, problem)
    reasons = [*device_reasons(variant, facts), *unread]
    if variant.arch == "cpu" or unread:
        return Candidate(variant.name, variant.arch, "rejected" if reasons else "fits", tuple(reasons))
    target = variant.target(facts) or variant.targets[-1][1]  # on another device: to list what else is lacking
    config, source = (given, "heuristics") if given else _config(variant.arch, target, problem, facts, preference)
    spec = kernel_spec(problem, variant.arch, target, config, partition="invariant" if preference.batch_invariant else "balanced")
    num_ctas = grid_ctas_of(problem, spec, facts.sm_count, config.ctas_per_sm)
    partition, why = _whole_because(problem, spec, num_ctas, facts.sm_count, preference)
    if given is not None and partition in DEALT:  # a given configuration cuts rows
        partition, why = "balanced", ""
    if why:
        if given is None:
            config, source = _config(variant.arch, target, problem, facts, preference, partition)
        spec = kernel_spec(problem, variant.arch, target, config, partition=partition)
        num_ctas = grid_ctas_of(problem, spec, facts.sm_count, config.ctas_per_sm)
    why += _passes(problem, spec)
    reasons += misfits(problem, spec)
    if num_ctas > MAX_EXTENT:
        reasons.append(f"max_q_len = {problem.max_q_len}: {num_ctas:,} CTAs exceed a grid's 2**31 - 1")
    verdict: Verdict = "rejected" if reasons else "fits"
    cost = cost_of(problem, spec, config.ctas_per_sm, facts.sm_count)
    knobs = " ".join(f"{name}={value}" for name, value in asdict(config).items())
    line = f"{knobs} ({source}{why}, modelled {cost.total_us:.1f} us on an H200)"
    return Candidate(variant.name, variant.arch, verdict, tuple(reasons), line, spec, num_ctas, config, source + why, cost)


def _whole_because(
    problem: DecodeProblem, spec: KernelSpec, num_ctas: int, sm_count: int, preference: PlanPreference
) -> tuple[Partition, str]:
    """(partition, why it is not "balanced": rows stay whole, or query blocks are dealt); no reason if rows are divided."""
    limit, needed = preference.max_workspace_bytes, workspace_bytes(problem, num_ctas, spec.partition, spec.state_words)
    if limit is not None and needed > limit:
        return "whole", f", whole rows: cutting them needs {needed:,} workspace bytes"
    if spec.by_warpgroup and spec.many_blocks and may_cut(problem, spec, num_ctas, sm_count, preference):
        return "dealt_pieces", ", blocks of query rows in pieces"
    if spec.several and num_ctas == units_of(problem, spec):
        return "dealt" if spec.by_warpgroup else "whole", f", whole rows: {num_ctas} units fill the GPU"
    return "balanced", ""


def may_cut(problem: DecodeProblem, spec: KernelSpec, num_ctas: int, sm_count: int, preference: PlanPreference) -> bool:
    """Whether long queries end sooner if their blocks are dealt in pieces than whole, or divided between `num_ctas` CTAs.

    They do if few blocks leave SMs idle, and keys are many. How many blocks ragged queries have is known on the device alone, so
    they may be cut wherever keys may be many, unless `num_ctas` divides them.
    """
    if preference.batch_invariant:
        return False
    config = heuristics.choose(problem, spec.arch, spec.target, sm_count, "dealt_pieces")
    cut = kernel_spec(problem, spec.arch, spec.target, config, partition="dealt_pieces")
    limit, needed = preference.max_workspace_bytes, workspace_bytes(problem, sm_count, cut.partition, cut.state_words)
    if misfits(problem, cut) or (limit is not None and needed > limit):
        return False
    whole = num_ctas == units_of(problem, spec)
    if problem.query == "ragged":
        return whole and row_tokens(problem) > 2 * CLAIMED_PIECE_COST * cut.tile_n  # fewer keys pay for no piece
    dealt = deal(problem, cut, sm_count)
    sooner = whole or dealt.tiles * cut.tile_n < DIVIDED * divided_tiles(problem, spec, num_ctas) * spec.tile_n
    return dealt.pieces > 1 and sooner


def _passes(problem: DecodeProblem, spec: KernelSpec) -> str:
    """The note for a plan whose requests have more packed rows than a unit (head block) holds; otherwise empty."""
    if not spec.many_blocks:
        return ""
    passes = -(-problem.packed_rows // spec.block_rows)
    return f", up to {passes} passes over the cache, {spec.block_rows} packed rows each"


def _dtype_reasons(variant: Variant, problem: DecodeProblem) -> list[str]:
    reasons = []
    stored = {"kv_dtype": problem.kv_dtype}
    if problem.v_dtype != problem.kv_dtype:
        stored["v_dtype"] = problem.v_dtype
    for name, dtype in stored.items():
        same = dtype == QUERY_DTYPES[problem.q_dtype]
        if problem.splits and variant.arch != "cpu" and not same:
            reasons.append(f"{name} = {dtype.value}: beside q_dtype = torch.float32 the tensor-core variants take f32 alone")
        elif dtype.element_bytes > 1 and not same:
            reasons.append(f"{name} = {dtype.value}: must be q's, {problem.element_type}, or an 8-bit one")
    return reasons


def _config(
    arch: Arch,
    target: Target,
    problem: DecodeProblem,
    facts: DeviceFacts,
    preference: PlanPreference,
    partition: Partition = "balanced",
) -> tuple[DecodeConfig, str]:
    # on a part of the device, a grid for two CTAs per SM may spread over more SMs, one CTA on each
    most = heuristics.MOST_CTAS_PER_SM if preference.sm_count is None else 1
    if preference.batch_invariant:
        dealt: Partition = "dealt" if partition == "dealt" else "balanced"  # rows that a workspace keeps whole have one choice
        return heuristics.choose(any_batch(problem), arch, target, facts.sm_count, dealt, most), "heuristics for any batch"
    whole = preference.sm_count is None  # entries are measured on all of a device
    config, source = tuned.lookup(problem, arch, facts.slug) if whole else None, f"plans/{facts.slug}.json"
    if config is None or misfits(problem, kernel_spec(problem, arch, target, config, partition=partition)):
        config, source = heuristics.choose(problem, arch, target, facts.sm_count, partition, most), "heuristics"
    return config, source


def any_batch(problem: DecodeProblem) -> DecodeProblem:
    """The problem as an invariant plan's choice sees it: a row's bits may depend neither on the batch nor on its lengths."""
    return replace(problem, batch_size=INVARIANT_BATCH, max_seq_len=None)


def grid_of(problem: DecodeProblem, kernel: Candidate) -> tuple[DecodeProblem, int, Partition, int]:
    """The arguments of a launch's workspace: (problem, CTAs, partition, words of a state). The CPU variant cuts no row."""
    if kernel.spec is None:
        return problem, kernel.num_ctas, "whole", 0
    return problem, kernel.num_ctas, kernel.spec.partition, kernel.spec.state_words


def regions_of(problem: DecodeProblem, chosen: Candidate) -> tuple[WorkspaceRegion, ...]:
    """The regions of a plan's workspace; for a mixed kernel, its claims and the regions of each phase, one after the other."""
    claims = bool(chosen.phases) and chosen.phases[-1].spec.claims
    return joined((workspace_regions(*grid_of(problem, phase)) for phase in chosen.phases or (chosen,)), claims)


def misfits(problem: DecodeProblem, spec: KernelSpec) -> list[str]:
    """Every reason why the kernel of `spec` cannot serve `problem`: those of `supports`, and KV heads that units do not fit."""
    reasons = supports(spec)
    if problem.num_kv_heads % spec.unit_heads:
        reasons.append(f"unit_heads={spec.unit_heads} does not divide num_kv_heads={problem.num_kv_heads}")
    return reasons
