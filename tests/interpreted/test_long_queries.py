"""Long queries, mixed batches and f32, executed without a GPU: dealt blocks, gathered pages, phases, products by parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.attention.choice.cost_model import deal
from cute_kernels.attention.variants import explain
from cute_kernels.config.decode import DecodeConfig
from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.interpreted.machine.attention import Kernel, chosen_kernel, kernel_of, mixed_kernel
from tests.interpreted.runs import attention_operands, run_attention
from tests.support.attention_cases import EVERYTHING, Case, case, make_attention
from tests.support.attention_harness import assert_close
from tests.support.harness import assert_bitwise
from tests.support.storage import STORAGES

ONE_HEAD: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}
PROMPTS: dict[str, Any] = {"q_lens": (70, 3, 50), "max_q_len": 70}
ROWS_64: dict[str, Any] = {"uniform": True, "q_lens": (16,) * 3, "max_q_len": 16}
CACHE: dict[str, Any] = {**ONE_HEAD, "lengths": (270, 3, 150)}
LONG_CACHE: dict[str, Any] = {**ONE_HEAD, "lengths": (1000, 3, 150)}
VERIFY: dict[str, Any] = {"q_lens": (8, 3, 1), "max_q_len": 8}
WIDE = {"head_dim": 128, "lengths": (300, 3, 40)}


def by_warpgroup(tile_n: int, warps: int = 8) -> DecodeConfig:
    return DecodeConfig(tile_n, 2, warps, 1, mma="warpgroup")


def int8_token(cache: dict[str, Any]) -> Case:
    """Prompts over a cache in int8 with scales of tokens."""
    return case("int8", {**cache, **STORAGES["int8 token"], "head_dim": 128}, **PROMPTS)


CASES: dict[str, tuple[Case, DecodeConfig, str, str]] = {
    "dealt, everything": (case("dealt", CACHE, **PROMPTS, **EVERYTHING), by_warpgroup(128), "sm90", "dealt"),
    "dealt, 12 warps, packed": (case("12", CACHE, **PROMPTS, table="packed"), by_warpgroup(128, 12), "sm90", "dealt"),
    "dealt, 12 warps, int8 token": (int8_token(CACHE), by_warpgroup(64, 12), "sm90", "dealt"),
    "dealt, int8 token, pages of 64": (int8_token({**CACHE, "page_size": 64}), by_warpgroup(96), "sm90", "dealt"),
    "gathered, pages of 5": (case("5", {**CACHE, "page_size": 5}, **PROMPTS), by_warpgroup(128), "sm90", "dealt"),
    "gathered, one warpgroup": (case("5", {**CACHE, "page_size": 5}, **PROMPTS), by_warpgroup(64, 4), "sm90", "dealt"),
    "in pieces": (case("pieces", LONG_CACHE, **PROMPTS), by_warpgroup(64), "sm90", "dealt_pieces"),
    "in pieces, everything": (case("pieces", LONG_CACHE, **PROMPTS, **EVERYTHING), by_warpgroup(64), "sm90", "dealt_pieces"),
    "in pieces, 12 warps, int8 token": (int8_token(LONG_CACHE), by_warpgroup(64, 12), "sm90", "dealt_pieces"),
    "in pieces, gathered": (case("5", {**LONG_CACHE, "page_size": 5}, **PROMPTS), by_warpgroup(64), "sm90", "dealt_pieces"),
    "sm80, one ring for all warps": (case("block", CACHE, **PROMPTS), DecodeConfig(32, 2, 4, 1), "sm80", "whole"),
    "f32, cut": (case("f32", {**CACHE, **WIDE, "dtype": torch.float32}, **VERIFY), DecodeConfig(16, 4, 8, 1), "sm90", "balanced"),
}


def check(kernel: Kernel, problem: Case) -> None:
    """Two runs over one workspace are right, and bit for bit the same whatever the order of warps and CTAs."""
    inputs, total = make_attention(problem), sum(problem.q_lens)
    found = run_attention(kernel, inputs)
    assert_close(inputs, found)
    again = run_attention(kernel, inputs, seed=2, resident=1)
    assert_bitwise((again[0][:total], again[1][:total]), (found[0][:total], found[1][:total]))


@pytest.mark.parametrize("name", CASES)
def test_long_queries(name: str) -> None:
    problem, config, arch, partition = CASES[name]
    descriptor = problem.descriptor()
    slices = 7 if partition == "dealt_pieces" else 2  # so many CTAs that blocks are cut
    kernel = kernel_of(descriptor.problem, config, partition, slices, arch=arch, descriptor=descriptor)  # type: ignore[arg-type]
    assert kernel.spec.gathers == ("gathered" in name) and kernel.spec.shares_ring == ("ring" in name)
    check(kernel, problem)


@pytest.mark.parametrize("storage", STORAGES)
def test_what_one_sm_chooses(storage: str) -> None:
    """A plan for one SM, where no row is cut: its items, of 64 packed rows, are dealt."""
    problem, preference = case("one SM", {**CACHE, **STORAGES[storage]}, **ROWS_64), PlanPreference(arch="sm90", sm_count=1)
    kernel = chosen_kernel(problem.descriptor(), preference.part_of(PRETEND["h200"]), preference)
    assert kernel.spec.by_warpgroup and kernel.spec.dealt
    check(kernel, problem)


def test_blocks_are_cut_as_the_cost_model_expects() -> None:
    """A launch leaves as many pieces in the workspace as `deal` says, by the lengths that it finds: 1 piece leaves nothing."""
    found, stores, stored = [], [], 2 * 384 * (16 + 4)  # stored: words that a piece's 384 rows of 64 columns write and clear
    for slices, length in ((1, 1000), (2, 1000), (3, 1000), (4, 1000), (3, 250)):
        problem = case("cut", {**ONE_HEAD, "lengths": (length,)}, q_lens=(96,), max_q_len=96, uniform=True)
        descriptor = problem.descriptor()
        kernel = kernel_of(descriptor.problem, by_warpgroup(64), "dealt_pieces", slices, descriptor=descriptor)
        check(kernel, problem)
        stores.append(kernel.run(*attention_operands(make_attention(problem))))
        found.append(deal(replace(descriptor.problem, max_seq_len=length), kernel.spec, kernel.num_ctas).pieces)
    arrived = 24  # m-tiles, of which each piece counts an arrival; the last one clears the count
    words = [pieces * (stored + arrived) + arrived if pieces > 1 else 0 for pieces in found]
    assert found == [1, 1, 3, 4, 1] and stores == words


def test_decode_rows_leave_ctas_to_a_prompt() -> None:
    """Beside a long prompt a decode row is cut for fewer CTAs than beside a short one, or beside rows of a phase between."""
    stores = []
    for prompt, between in ((2600, 0), (100, 0), (2600, 16)):
        cache = {**ONE_HEAD, "lengths": (3000, prompt, 40), "max_seq_len": 8192}
        problem = case("mixed", cache, q_lens=(1, 80, between), max_q_len=8192)
        descriptor = problem.descriptor()
        spec = whole_blocks(explain(descriptor.problem, PRETEND["h200"]).chosen.spec)
        kernel = mixed_kernel(descriptor.problem, spec, 6, descriptor)
        check(kernel, problem)
        stores.append(kernel.run(*attention_operands(make_attention(problem))))
    left, short, beside = stores
    assert 0 < 2 * left < min(short, beside), f"words stored in the workspace: {stores}"


def whole_blocks(spec: Any) -> Any:
    """The spec of a mixed kernel, but for blocks of long queries, which are dealt whole."""
    return replace(spec, many=replace(spec.many, partition="dealt"))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("prompt", "ctas"), [(150, 3), (3900, 7)], ids=("blocks whole", "in pieces"))
def test_a_mixed_batch(storage: str, prompt: int, ctas: int) -> None:
    """The batch has requests of each phase: decode rows and drafts that are cut, some rows, a prompt of 384 packed rows.

    A long prompt's blocks are cut: words are stored as in test_blocks_are_cut_as_the_cost_model_expects, and items are claimed.
    """
    cache = {**ONE_HEAD, "lengths": (1400, prompt, 300, 0), "max_seq_len": 8192, **STORAGES[storage]}
    problem = case("mixed", cache, q_lens=(2, 96, 16, 1), max_q_len=8192)
    descriptor = problem.descriptor()
    spec: Any = explain(descriptor.problem, PRETEND["h200"]).chosen.spec
    assert [phase.partition for phase in spec.phases] == ["balanced", "balanced", "dealt_pieces"]
    kernel, whole = (mixed_kernel(descriptor.problem, one, ctas, descriptor) for one in (spec, whole_blocks(spec)))
    check(kernel, problem)
    more, least = (one.run(*attention_operands(make_attention(problem))) for one in (kernel, whole))
    blocks, pieces = {128: (3, 2), 192: (2, 3)}[spec.many.block_rows]
    words = pieces * (2 * 384 * (16 + 4) + 24) + 24 + (pieces - 1) * blocks
    assert more - least == (words if prompt == 3900 else 0)
