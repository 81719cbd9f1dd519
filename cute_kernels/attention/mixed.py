"""Mixed batches, with requests of few and of many query rows: the phase of a kernel that suits a request serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..config.decode import KernelSpec
from ..config.mixed import MixedSpec, mixed_supports
from ..config.problem import ANY_Q_LEN, QueryLengths
from ..config.tiling import TILE_M
from ..planning.variants import Candidate
from .descriptors import DecodeProblem

# the most packed rows of requests that get a phase of their own: one warp's tile (decode), one warpgroup's tile (verify); unless
# the blocks of the last phase are that small themselves
FEW_ROWS = (16, 64)


def with_few(problem: DecodeProblem, many: Candidate, evaluate: Callable[[DecodeProblem], Candidate]) -> Candidate:
    """The kernel that serves `problem`: `many`, or one with more phases, for requests too short for the blocks of `many`.

    evaluate: gives the kernel that would serve a problem with one CTA per SM.
    """
    spec: KernelSpec = many.spec
    if many.verdict == "rejected" or spec.query != "ragged" or not (spec.by_warpgroup and spec.many_blocks):
        return many
    least, phases, limits = 1, [], most_query_rows(problem, spec.block_rows)
    for most in limits:
        alone = evaluate(replace(problem, max_q_len=most))
        dealt_from = limits[-1] + 1 if spec.dealt and waits_for_memory(alone.spec) else 0
        phases.append(_serving(alone, QueryLengths(least, most, dealt_from)))
        least = most + 1
    phases.append(_serving(many, QueryLengths(least)))
    few, some = phases[0].spec, phases[1].spec if len(phases) > 2 else None
    mixed = MixedSpec(few=few, some=some, many=phases[-1].spec)
    if mixed_supports(mixed):
        return many
    num_ctas = max(phase.num_ctas for phase in phases)
    return replace(many, spec=mixed, num_ctas=num_ctas, phases=tuple(replace(phase, num_ctas=num_ctas) for phase in phases))


def most_query_rows(problem: DecodeProblem, block_rows: int) -> list[int]:
    """The most query rows of the requests of each phase but the last, whose blocks have `block_rows` packed rows."""
    found = dict.fromkeys(max(1, rows // problem.group_size) for rows in FEW_ROWS if rows < block_rows)
    return [most for most in found if most < problem.max_q_len]


def waits_for_memory(few: KernelSpec) -> bool:
    """Whether fewer SMs attend to requests of few query rows nearly as fast as all: over 16 bits, with one tile of rows.

    Over 8 bits an SM of an H200 attends to tiles hardly faster than they come (docs/notes/kernel-log.md).
    """
    return min(few.k_bytes, few.v_bytes) > 1 and few.packed_rows <= TILE_M


def _serving(alone: Candidate, q_lens: QueryLengths) -> Candidate:
    """A candidate as a phase of a kernel."""
    who = f"from {q_lens.least} query rows on" if q_lens.most == ANY_Q_LEN else f"up to {q_lens.most} query rows"
    who += ", which may leave CTAs to the last" if q_lens.dealt_from else ""
    return replace(alone, spec=replace(alone.spec, q_lens=q_lens), knobs=f"{who}: {alone.knobs}")
