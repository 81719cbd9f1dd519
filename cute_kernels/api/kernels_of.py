"""Which kernels plans would compile, for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..append.descriptor import KVAppendDescriptor
from ..append.variants import explain as explain_append
from ..attention.descriptors import DecodeProblem
from ..attention.variants import explain
from ..compile.operations import Spec
from ..config.problem import TableFormat
from ..errors import Unsupported
from ..kv.rotary import Rotary
from ..merge.descriptor import MergeStatesDescriptor
from ..merge.variants import explain as explain_merge
from ..planning.variants import Candidate, DeviceFacts, PlanPreference

APPENDS: tuple[TableFormat, ...] = ("none", "dense")  # a slot for each token, or the end of each row of a table


@dataclass(frozen=True)
class Beside:
    """What is compiled in addition to the attention of each problem.

    append: whether the append of one new token per query row to a paged cache is. rotary: the same append, with this embedding.
    merges: for each number, the merge of so many states of the problem's output.
    """

    append: bool = False
    rotary: Rotary | None = None
    merges: tuple[int, ...] = ()


def specs_of(problems: Iterable[DecodeProblem], facts: DeviceFacts, preference: PlanPreference, beside: Beside) -> list[Spec]:
    """The specs that plans on such a device compile for each problem and for `beside`, without duplicates.

    Raises Unsupported if nothing serves a problem, or nothing that is compiled, and InvalidArgument if the preference's sm_count
    exceeds the device's.
    """
    facts = preference.part_of(facts)
    found: dict[Spec, None] = {}
    for problem in problems:
        choices = [explain(problem, facts, preference).chosen]
        choices += [explain_append(each, facts, preference).chosen for each in _appends_of(problem, beside)]
        merges = (_merge_of(problem, num_states) for num_states in beside.merges)
        choices += [explain_merge(described, facts, preference).chosen for described in merges]
        found.update({_spec_of(chosen): None for chosen in choices})
    return list(found)


def _spec_of(chosen: Candidate) -> Spec:
    spec: Spec | None = chosen.spec
    if spec is None:
        raise Unsupported([f"{chosen.variant}: is plain PyTorch, nothing to compile; choose a GPU with --gpu"])
    return spec


def _appends_of(problem: DecodeProblem, beside: Beside) -> list[KVAppendDescriptor]:
    """The appends to the problem's cache; none if it is contiguous."""
    embeddings = [None] * beside.append + [beside.rotary] * (beside.rotary is not None)
    return [_append_of(problem, form, rotary) for rotary in embeddings for form in APPENDS] if problem.page_size else []


def _append_of(problem: DecodeProblem, table_format: TableFormat, rotary: Rotary | None) -> KVAppendDescriptor:
    """The append of one new token per query row to the problem's cache."""
    return KVAppendDescriptor(
        num_tokens=problem.batch_size * problem.max_q_len,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        page_size=problem.page_size,
        dtype=problem.q_dtype,
        kv_dtype=problem.kv_dtype,
        v_dtype=problem.v_dtype,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        table_format=table_format,
        rotary=rotary,
    )


def _merge_of(problem: DecodeProblem, num_states: int) -> MergeStatesDescriptor:
    """The merge of `num_states` states that plans of the problem gave."""
    shape = (problem.batch_size * problem.max_q_len, problem.num_heads, problem.head_dim)
    return MergeStatesDescriptor(num_states, *shape, problem.q_dtype, problem.lse_base)
