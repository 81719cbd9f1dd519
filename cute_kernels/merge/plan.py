"""Merging attention states: (out, lse) of several calls over disjoint parts of the KV become those of the whole.

For a prefix that requests share (cascade) and for a KV cache spread over devices (context parallelism): each part is attended
to on its own, and softmax over the whole is a weighted sum of the parts, out = sum_s exp(lse_s - lse) out_s with
lse = log sum_s exp(lse_s) (Milakov and Gimelshein 2018; the merge of FlashInfer's cascade inference).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..checks.fields import check_alignment, check_extent, check_softmax
from ..checks.tensors import check_shape, check_strides, check_tensor, refuse_overlap
from ..config.decode import LseBase, Target
from ..config.merge import MAX_COLUMNS, MAX_CTAS_PER_ROW, MergeSpec, StateType, merge_spec, merge_supports
from ..errors import InvalidProblem, Unsupported
from ..kv.types import QUERY_DTYPES, vector_bytes
from ..planning.base import ANY_VARIANT, LAUNCH_ERRORS, SKU_ARCH, Plan, PrecisionGuarantee, Sku, selected
from ..planning.checked import Checked, refuse_compile_in_capture
from ..planning.variants import VARIANTS as DECODE_VARIANTS
from ..planning.variants import Candidate, DeviceFacts, Explanation, Launch, PlanPreference, Variant, choice, device_reasons

AXES = ("num_states", "batch_size", "num_heads", "head_dim")
NAMES = {"sm90": "sm90_merge", "sm80": "sm80_merge", "cpu": "cpu_reference"}
VARIANTS = tuple(replace(variant, name=NAMES[variant.arch]) for variant in DECODE_VARIANTS)  # decode's devices and targets


@dataclass(frozen=True)
class MergeStatesDescriptor:
    """A merge of `num_states` states of [batch_size, num_heads, head_dim]. Frozen and hashable: it is a cache key.

    dtype: of the outputs, f32, f16 or bf16; lses are f32, in `lse_base`. alignment_bytes: 2, 4, 8 or 16, what strides and
    pointers of outputs are multiples of; None stands for what compact ones have. batch_size 0 is legal.

    Raises InvalidProblem for an extent or a choice that breaks its rule, then Unsupported for a dtype that no variant knows.
    """

    num_states: int
    batch_size: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    lse_base: LseBase = "e"
    alignment_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_states", 1), ("batch_size", 0), ("num_heads", 1), ("head_dim", 1)):
            check_extent(name, getattr(self, name), least)
        check_softmax(None, self.lse_base)
        check_alignment("alignment_bytes", self.alignment_bytes)
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidProblem("dtype", self.dtype, "must be a torch.dtype")
        if self.dtype not in QUERY_DTYPES:
            raise Unsupported([f"dtype = {self.dtype}: must be torch.float32, torch.float16 or torch.bfloat16"])

    @property
    def element_type(self) -> StateType:
        """The short name of dtype."""
        return cast(StateType, QUERY_DTYPES[self.dtype].value)

    @property
    def columns(self) -> int:
        """Neighbouring columns that one access of a kernel moves: two, or one where a pair is not aligned."""
        nbytes = vector_bytes(self.head_dim * self.dtype.itemsize, self.alignment_bytes)
        return max(1, min(MAX_COLUMNS, nbytes // self.dtype.itemsize))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one state's output, and of the merged one."""
        return self.batch_size, self.num_heads, self.head_dim

    def __str__(self) -> str:
        return (
            f"merge of {self.num_states} states, batch {self.batch_size}, heads {self.num_heads}, head_dim {self.head_dim}, "
            f"{self.element_type}, lse base {self.lse_base}"
        )


def reference_merge(outs: Tensor, lses: Tensor, lse_base: LseBase = "e") -> tuple[Tensor, Tensor]:
    """The semantics in plain PyTorch, computed in f32, or in f64 where outs are; in state order.

    outs [num_states, ..., head_dim], lses [num_states, ...]. Returns out [..., head_dim] and lse [...], of the inputs' dtypes.
    An empty state (lse = -inf) weighs nothing, whatever its out holds; without others the result is (+0.0, -inf). One state that
    is not empty is returned bit for bit. Otherwise an lse of NaN or +inf makes the merge NaN.
    """
    dtype = torch.promote_types(outs.dtype, torch.float32)
    power, log = (torch.exp2, torch.log2) if lse_base == "2" else (torch.exp, torch.log)
    largest = lses.to(dtype).amax(0)
    weights = power(lses.to(dtype) - largest.where(largest != -math.inf, 0.0))
    merged, total = torch.zeros_like(outs[0], dtype=dtype), torch.zeros_like(largest)
    for weight, state in zip(weights.unsqueeze(-1), outs, strict=True):
        merged += (weight * state).where(weight != 0.0, 0.0)
        total += weight[..., 0]
    out = (merged / total.where(total != 0.0, 1.0)[..., None]).to(outs.dtype)
    lse = (largest + log(total)).to(lses.dtype)
    live = lses != -math.inf
    for only, state, state_lse in zip(live & (live.sum(0) == 1), outs, lses, strict=True):
        out, lse = state.where(only[..., None], out), state_lse.where(only, lse)
    return out, lse


class Operands(NamedTuple):
    """What one run is given; out and lse may be absent."""

    outs: Any
    lses: Any
    out: Any
    lse: Any

    def signature(self) -> tuple[object, ...]:
        """All that `check` depends on, as a key. Devices are left out: a pointer belongs to one device."""
        outs, lses, out, lse = self
        # fmt: off
        return (
            outs.shape, outs.stride(), outs.dtype, outs.data_ptr(),
            lses.shape, lses.stride(), lses.dtype, lses.data_ptr(),
            out.shape, out.stride(), out.dtype, out.data_ptr(),
            lse.shape, lse.stride(), lse.dtype, lse.data_ptr(),
        )
        # fmt: on


@dataclass(frozen=True)
class MergeRules:
    """What a plan demands of its tensors."""

    descriptor: MergeStatesDescriptor
    device: torch.device


def check(rules: MergeRules, operands: Operands) -> None:
    """Raises the typed error of the first rule that is broken: outs, lses, out, lse, then overlap."""
    states, shape = rules.descriptor.num_states, rules.descriptor.shape
    _check_output(rules, "outs", operands.outs, (states, *shape))
    _check_lse(rules, "lses", operands.lses, (states, *shape[:2]))
    if operands.out is not None:
        _check_output(rules, "out", operands.out, shape)
    if operands.lse is not None:
        _check_lse(rules, "lse", operands.lse, shape[:2])
    refuse_overlap(operands._asdict(), ("out", "lse"))


def _check_output(rules: MergeRules, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    descriptor = rules.descriptor
    check_tensor(rules.device, name, tensor, descriptor.dtype)
    check_shape(name, tensor, shape, f"[{', '.join(AXES[-len(shape) :])}]")
    check_strides(name, tensor, descriptor.columns * descriptor.dtype.itemsize)


def _check_lse(rules: MergeRules, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    check_tensor(rules.device, name, tensor, torch.float32)
    check_shape(name, tensor, shape, f"[{', '.join(AXES[-len(shape) - 1 : -1])}]")


def explain(descriptor: MergeStatesDescriptor, facts: DeviceFacts, preference: PlanPreference = ANY_VARIANT) -> Explanation:
    """Every variant's answer for `descriptor` on such a device, here or not: nothing is compiled and no GPU is needed."""
    answers = [_evaluate(variant, descriptor, facts) for variant in VARIANTS]
    return choice(answers, str(descriptor), facts, preference)


def _evaluate(variant: Variant, descriptor: MergeStatesDescriptor, facts: DeviceFacts) -> Candidate:
    """One variant's answer."""
    reasons = device_reasons(variant, facts)
    target = variant.target(facts)
    if target is None:
        return Candidate(variant.name, variant.arch, "rejected" if reasons else "fits", tuple(reasons))
    spec = kernel_spec(descriptor, target)
    reasons += merge_supports(spec)
    ctas = spec.ctas_per_row(descriptor.num_heads)
    if ctas > MAX_CTAS_PER_ROW:
        row = f"num_heads = {descriptor.num_heads:,} of head_dim = {descriptor.head_dim:,}"
        reasons.append(f"{row}: a row takes {ctas:,} CTAs, must be at most {MAX_CTAS_PER_ROW:,}")
    if reasons:
        return Candidate(variant.name, variant.arch, "rejected", tuple(reasons))
    knobs = f"columns={spec.columns} in_flight={spec.in_flight} num_warps={spec.num_warps} ({target})"
    return Candidate(variant.name, variant.arch, "fits", (), knobs, spec, ctas * descriptor.batch_size)


def kernel_spec(descriptor: MergeStatesDescriptor, target: Target) -> MergeSpec:
    """The compile key of `descriptor`: what changes generated code, and no more."""
    d = descriptor
    return merge_spec(target, d.element_type, d.columns, d.num_states, d.num_heads, d.head_dim, d.lse_base)


class MergeStatesPlan(Plan):
    """Merges the states of several attention calls over disjoint parts of the KV. Needs no workspace."""

    descriptor: MergeStatesDescriptor

    def __init__(self, descriptor: MergeStatesDescriptor, device: torch.device, preference: PlanPreference) -> None:
        facts = DeviceFacts.of(device)
        explanation = explain(descriptor, facts, preference)
        chosen = explanation.chosen
        spec = chosen.spec
        dtypes = (descriptor.element_type,) * 3
        guarantee = PrecisionGuarantee.of(descriptor.dtype, batch_invariant=True)
        sku = Sku("merge_states", *dtypes, SKU_ARCH[chosen.arch], chosen.variant, spec, guarantee)
        super().__init__(device, facts.sm_count, sku, explanation)
        self.descriptor = descriptor
        rules = MergeRules(descriptor, device)
        self._check: Checked[Operands, None] = Checked(lambda operands: check(rules, operands))
        self._launch = _launch_of(spec, descriptor.lse_base)

    @classmethod
    def select(
        cls,
        descriptor: MergeStatesDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> MergeStatesPlan:
        """The first variant that serves `descriptor` on `device` (default: the current GPU, else the CPU), compiled.

        Raises Unsupported with every reason when none does, or not the one that `preference` forces; CompileFailed when
        it cannot be compiled, also inside a graph capture.
        """
        return selected(cls, MergeStatesDescriptor, descriptor, device, preference)

    def can_implement(self, outs: Tensor, lses: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        self._check.now(Operands(outs, lses, out, lse))

    def run(
        self,
        outs: Tensor,
        lses: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Launches on the current or the given stream and returns (out, lse), both fully written.

        outs: [num_states, batch, num_heads, head_dim] of the descriptor's dtype, any strides with a unit last one; lses: f32
        [num_states, batch, num_heads], any strides. out: [batch, num_heads, head_dim]; lse: f32 [batch, num_heads]. out and
        lse may not overlap an input. Allocates only the outputs that are not given. No host-device synchronisation.

        States are merged in f32 in their order. An empty one (lse = -inf) is the identity, whatever its out holds; all
        empty give (+0.0, -inf); one alone is returned bit for bit. Otherwise an lse of NaN or +inf makes its merge NaN.

        Raises, before anything is written, InvalidProblem (an extent), InvalidArgument (type, dtype, device, overlap),
        MisalignedOperand, Unsupported (strides); then LaunchFailed.
        """
        if stream is None and not self._elsewhere():
            return self._run(outs, lses, out, lse)
        with self._on(stream):
            return self._run(outs, lses, out, lse)

    def _run(self, outs: Tensor, lses: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = self.descriptor.shape
        if out is None:
            out = torch.empty(shape, dtype=self.descriptor.dtype, device=self.device)
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
        self._check(Operands(outs, lses, out, lse))
        if shape[0]:
            try:
                self._launch(outs, lses, out, lse)
            except LAUNCH_ERRORS as error:
                raise self._launch_failed(error) from error
        return out, lse


def _launch_of(spec: MergeSpec | None, lse_base: LseBase) -> Launch:
    """The callable behind a chosen variant, compiled now; the CPU variant where there is no spec."""
    if spec is None:
        return _cpu_variant(lse_base)
    from ..compile.kernels import compile_merge

    refuse_compile_in_capture(spec)
    return compile_merge(spec)


def _cpu_variant(lse_base: LseBase) -> Launch:
    """The CPU variant, called as a compiled kernel is."""

    def launch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        merged, merged_lse = reference_merge(outs, lses, lse_base)
        out.copy_(merged)
        lse.copy_(merged_lse)

    return launch
