"""Kernels that other processes compile: found by compile_decode, and on a GPU as right as those compiled here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
import cute_kernels.compile.kernels as compiler
from cute_kernels.compile.operations import Operation
from cute_kernels.config.decode import KernelSpec
from cute_kernels.planning.base import forget_plans
from cute_kernels.planning.variants import PRETEND
from perf.providers.ours import spec_of
from tests.support.harness import assert_close, run, select
from tests.support.inputs import Shape, make_inputs

DESCRIBED = ck.PagedDecodeDescriptor(4, 8, 2, 128, 16, torch.bfloat16, max_seq_len=512)
H200 = PRETEND["h200"]


def no_build(operation: Operation, spec: KernelSpec) -> None:
    raise AssertionError(f"compiled here: {spec}")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "off")
    monkeypatch.setattr(compiler, "_kernels", {})


def test_kernels_of_other_processes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = spec_of(DESCRIBED.problem, H200)
    assert one is not None
    two, unfit = replace(one, lse_base="2"), replace(one, tile_n=17)
    monkeypatch.setattr(Operation, "build", no_build)
    assert compiler.compile_ahead([one, two, one, unfit], processes=2) == 2
    assert compiler.compiled_specs() == [one, two]
    assert compiler.compile_decode(one) is not compiler.compile_decode(two)
    assert compiler.compile_ahead([two, one], processes=2) == 0
    with pytest.raises(ck.Unsupported, match="tile_n=17"):
        compiler.compile_decode(unfit)


def test_one_kernel_is_compiled_here() -> None:
    one = spec_of(DESCRIBED.problem, H200)
    assert one is not None
    assert compiler.compile_ahead([one]) == 1
    assert compiler.compiled_specs() == [one]


@pytest.mark.parametrize("count", [1, 2])
def test_what_fails_ahead_is_left_to_compile_decode(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = spec_of(DESCRIBED.problem, H200)
    assert one is not None
    unknown = [replace(one, target="sm_90a", lse_base=base, partition="none") for base in ("e", "2")[:count]]  # no such partition
    assert compiler.compile_ahead(unknown, processes=2) == 0
    assert compiler.compiled_specs() == []
    with pytest.raises(ck.CompileFailed):
        compiler.compile_decode(unknown[0])


@pytest.mark.gpu
def test_a_kernel_of_another_process_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(8, 2, 128, 16, (0, 1, 700, 129))
    forget_plans()
    select(shape, "sm90")
    (spec,) = compiler.compiled_specs()
    forget_plans()
    monkeypatch.setattr(compiler, "_kernels", {})
    assert isinstance(spec, KernelSpec)
    assert compiler.compile_ahead([spec, replace(spec, lse_base="2")], processes=2) == 2
    monkeypatch.setattr(Operation, "build", no_build)
    inputs = make_inputs(shape, "cuda")
    assert_close(inputs, *run(select(shape, "sm90"), inputs))
    forget_plans()
