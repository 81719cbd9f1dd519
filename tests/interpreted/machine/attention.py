"""Kernels of attention with one or several query rows, run on CPU tensors as their plans launch them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_kernels.attention.descriptors import DecodeProblem
from cute_kernels.attention.kernel_spec import kernel_spec, units_of
from cute_kernels.attention.operands import NO_EXTRAS, Extras, Operands
from cute_kernels.attention.variants import explain
from cute_kernels.attention.workspace import joined, workspace_regions
from cute_kernels.config.decode import LOG2_E, DecodeConfig, KernelSpec, Partition
from cute_kernels.config.limits import supports
from cute_kernels.config.mixed import MixedSpec, mixed_supports
from cute_kernels.device.tracing.decode import arguments, build
from cute_kernels.device.tracing.mixed import build_mixed
from cute_kernels.planning.variants import DeviceFacts, PlanPreference
from cute_kernels.planning.workspace import end_of

from .launch import Launch, compiled
from .memory import READ, WRITE
from .program import Program

BOTH = READ | WRITE
Q, K, V, TABLES, SCALES, OUT, LSE, WORKSPACE = 0, 1, 2, (3, 4, 5), (6, 7), 8, 9, 10
FURTHER = slice(11, 15)  # qo_indptr, tree_mask, alibi_slopes, sinks
Get = Callable[[Any, Any], list[Program]]


@dataclass
class Kernel:
    """A kernel to run: its spec, program and number of CTAs, and the workspace, which every run finds as the last run left it.

    values: max_q_len, window_left, window_right and softcap of an extended kernel. prefetched: the offsets of what the last run
    prefetched of K's and of V's scales.
    """

    spec: Any
    program: Program
    num_ctas: int
    workspace: Tensor | None
    scale: float
    values: tuple[int, int, int, float] = (1, 0, 0, 0.0)
    status: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int32))
    prefetched: list[set[int]] = field(default_factory=list)

    @property
    def phases(self) -> tuple[KernelSpec, ...]:
        """The phases of a mixed kernel, or the spec alone."""
        return self.spec.phases if isinstance(self.spec, MixedSpec) else (self.spec,)

    def run(self, operands: Operands, extras: Extras = NO_EXTRAS, *, seed: int = 0, resident: int | None = None) -> int:
        """Runs it; returns how many words it stored in the workspace. operands: as a kernel takes them, except the workspace."""
        given, traced = (*operands[:WORKSPACE], self.workspace), self.phases[0]
        launch, fakes = Launch(), arguments(traced, self.workspace is not None)
        launch.tensor(given[Q], fakes[Q])
        launch.tensor(given[K], fakes[K])
        for phase in self.phases:
            for place, ring in zip((K, V), phase.rings, strict=True):
                if phase.arch == "sm90" and not phase.gathers:
                    launch.tensor_map(given[place], ring, slots_are_open=not phase.page_size)
                else:
                    launch.tensor(given[place], fakes[place])
        for i in SCALES:  # a kernel copies the whole word that holds an f16 scale
            launch.tensor(given[i], fakes[i], whole_words="token_f16" in (traced.k_scale, traced.v_scale))
        for i in TABLES:
            launch.tensor(given[i], fakes[i])
        launch.tensor(given[OUT], fakes[OUT], WRITE)
        launch.tensor(given[LSE], fakes[LSE], WRITE)
        launch.tensor(given[WORKSPACE], fakes[WORKSPACE], BOTH)
        launch.numbers("f", self.scale * LOG2_E)
        launch.numbers("q", launch.memory.add(self.status, BOTH))
        if not traced.plain:
            for tensor, fake in zip(extras, fakes[FURTHER], strict=True):
                launch.tensor(tensor, fake)
            for form, value in zip("iiif", self.values, strict=True):
                launch.numbers(form, value)
        launch.run(self.program, (self.num_ctas, 1, 1), self.spec.smem_bytes, seed=seed, resident=resident)
        self.prefetched = [launch.memory.prefetched(given[i]) for i in SCALES if given[i] is not None]
        return 0 if self.workspace is None else launch.memory.stores_to(self.workspace)


def kernel_of(
    problem: DecodeProblem,
    config: DecodeConfig,
    partition: Partition,
    slices: int,
    *,
    arch: Any = "sm90",
    descriptor: Any = None,
    get: Get = compiled,
) -> Kernel:
    """A problem's kernel on `slices` CTAs per unit (head block). descriptor: of several query rows, for its values and scale."""
    target = "sm_90a" if arch == "sm90" else "sm_80"
    spec = kernel_spec(problem, arch, target, config, partition=partition)
    assert supports(spec) == []
    (program,) = get(build, spec)
    return _kernel(problem, spec, program, slices * units_of(problem, spec), descriptor)


def mixed_kernel(problem: DecodeProblem, spec: MixedSpec, num_ctas: int, descriptor: Any, get: Get = compiled) -> Kernel:
    """A mixed kernel of a problem."""
    assert mixed_supports(spec) == []
    (program,) = get(build_mixed, spec)
    return _kernel(problem, spec, program, num_ctas, descriptor)


def chosen_kernel(descriptor: Any, facts: DeviceFacts, preference: PlanPreference) -> Kernel:
    """The kernel that a plan of several query rows would choose on a device."""
    problem = descriptor.problem
    chosen = explain(problem, facts, preference).chosen
    (program,) = compiled(build_mixed if isinstance(chosen.spec, MixedSpec) else build, chosen.spec)
    return _kernel(problem, chosen.spec, program, chosen.num_ctas, descriptor)


def _kernel(problem: DecodeProblem, spec: Any, program: Program, num_ctas: int, descriptor: Any) -> Kernel:
    values = (problem.max_q_len, *descriptor.launch_values) if descriptor is not None else (1, 0, 0, 0.0)
    scale = descriptor.scale if descriptor is not None else problem.head_dim**-0.5
    kernel = Kernel(spec, program, num_ctas, None, scale, values)
    own = (workspace_regions(problem, num_ctas, phase.partition, phase.state_words) for phase in kernel.phases)
    nbytes = end_of(joined(own, kernel.phases[-1].claims))
    kernel.workspace = torch.zeros(nbytes, dtype=torch.uint8) if nbytes else None
    return kernel
