"""Which kernels plans would compile, for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from ..append.descriptor import KVAppendDescriptor
from ..append.plan import explain as explain_append
from ..append.variants import VARIANTS as APPEND_VARIANTS
from ..append.variants import kernel_spec as append_spec
from ..attention.descriptors import DecodeProblem
from ..attention.variants import explain
from ..compile.operations import Spec
from ..config.append import AppendSpec
from ..config.decode import Arch, TableFormat
from ..errors import Unsupported
from ..planning.variants import DeviceFacts, PlanPreference

APPENDS: tuple[TableFormat, ...] = ("none", "dense")  # a slot for each token, or the end of each row of a table


def specs_of(problems: Iterable[DecodeProblem], facts: DeviceFacts, preference: PlanPreference, append: bool) -> list[Spec]:
    """What plans on such a device compile for each problem, once. append: also for appending a token a row to a paged cache.

    Raises Unsupported where nothing serves a problem, or nothing that is compiled.
    """
    found: dict[Spec, None] = {}
    for problem in problems:
        chosen = explain(problem, facts, preference).chosen
        if chosen.spec is None:
            raise Unsupported([f"{chosen.variant}: is plain PyTorch, nothing to compile; choose a GPU with --gpu"])
        found[chosen.spec] = None
        if append and problem.page_size:
            found.update({_append_spec(problem, table_format, facts, preference): None for table_format in APPENDS})
    return list(found)


def _append_spec(problem: DecodeProblem, table_format: TableFormat, facts: DeviceFacts, preference: PlanPreference) -> AppendSpec:
    described = KVAppendDescriptor(
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
    chosen = explain_append(described, facts, preference).chosen
    target = next(variant.target(facts) for variant in APPEND_VARIANTS if variant.name == chosen.variant)
    if target is None:
        raise Unsupported([f"{chosen.variant}: is plain PyTorch, nothing to compile"])
    return append_spec(described, cast(Arch, chosen.arch), target)
