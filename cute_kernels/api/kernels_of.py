"""Which kernels plans would compile, for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterable

from ..append.descriptor import KVAppendDescriptor
from ..append.variants import explain as explain_append
from ..attention.descriptors import DecodeProblem
from ..attention.variants import explain
from ..compile.operations import Spec
from ..config.decode import TableFormat
from ..errors import Unsupported
from ..planning.variants import Candidate, DeviceFacts, PlanPreference

APPENDS: tuple[TableFormat, ...] = ("none", "dense")  # a slot for each token, or the end of each row of a table


def specs_of(problems: Iterable[DecodeProblem], facts: DeviceFacts, preference: PlanPreference, append: bool) -> list[Spec]:
    """What plans on such a device compile for each problem, once. append: also for appending a token a row to a paged cache.

    Raises Unsupported where nothing serves a problem, or nothing that is compiled.
    """
    found: dict[Spec, None] = {}
    for problem in problems:
        choices = [explain(problem, facts, preference).chosen]
        if append and problem.page_size:
            appends = (_append_of(problem, table_format) for table_format in APPENDS)
            choices += [explain_append(described, facts, preference).chosen for described in appends]
        found.update({_spec_of(chosen): None for chosen in choices})
    return list(found)


def _spec_of(chosen: Candidate) -> Spec:
    spec: Spec | None = chosen.spec
    if spec is None:
        raise Unsupported([f"{chosen.variant}: is plain PyTorch, nothing to compile; choose a GPU with --gpu"])
    return spec


def _append_of(problem: DecodeProblem, table_format: TableFormat) -> KVAppendDescriptor:
    """An append of a token a row to the problem's cache."""
    return KVAppendDescriptor(
        num_tokens=problem.batch_size,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        page_size=problem.page_size,
        dtype=problem.q_dtype,
        kv_dtype=problem.kv_dtype,
        v_dtype=problem.v_dtype,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        table_format=table_format,
    )
