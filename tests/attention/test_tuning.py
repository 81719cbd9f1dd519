"""cute_kernels.tuning: what is tried, what is given up, which problems an entry serves, and what a table holds after a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.attention.choice import heuristics, tuned
from cute_kernels.attention.choice.cost_model import predict_us
from cute_kernels.attention.choice.tuned import Bucket
from cute_kernels.attention.choice.tuning import Cell, Finding, Group, around, cells, finalists, sweep, updated
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.config.decode import SMEM_BYTES, DecodeConfig
from cute_kernels.config.limits import supports

A, B, C = (DecodeConfig(32, stages, 4, 1) for stages in (4, 8, 12))


def problem(batch: int = 64, length: int | None = 8192, **changes):
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "q_dtype": torch.bfloat16}
    return ck.PagedDecodeDescriptor(batch_size=batch, max_seq_len=length, **{**fields, **changes}).problem


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("arch", "target"), [("sm90", "sm_90a"), ("sm80", "sm_90a"), ("sm80", "sm_80")])
def test_a_sweep_holds_only_what_can_be_built_and_is_not_hopeless(head_dim, arch, target) -> None:
    shape = problem(head_dim=head_dim)
    found = sweep(shape, arch, target, 132)
    assert 1 <= len(found) == len(set(found)) <= 80
    expected = [predict_us(shape, config, arch, target, 132).total_us for config in found]
    assert expected == sorted(expected)
    assert expected[-1] <= 1.25 * expected[0]
    for config in found:
        spec = kernel_spec(shape, arch, target, config, partition="balanced")
        assert supports(spec) == []
        assert config.ctas_per_sm * spec.smem_bytes <= SMEM_BYTES[target]
    if target == "sm_90a":  # what else fits than what is tried anyway
        assert len(found) >= 6
        assert heuristics.choose(shape, arch, target, 132) in found


def test_a_sweep_tries_two_kv_heads_a_cta_where_they_fit() -> None:
    stored = {"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16}
    found = sweep(problem(**stored), "sm90", "sm_90a", 132)
    assert {config.unit_heads for config in found} == {1, 2}
    assert heuristics.choose(problem(**stored), "sm90", "sm_90a", 132) in found
    for other in ({}, {**stored, "num_heads": 64}, {**stored, "v_scale": ck.KVScale.TENSOR}):
        assert {config.unit_heads for config in sweep(problem(**other), "sm90", "sm_90a", 132)} == {1}


def test_finalists_are_close_to_the_fastest() -> None:
    assert finalists({A: 10.4, B: 10.0, C: 10.6}) == [B, A]
    many = {DecodeConfig(16, stages, 1, 1): 10 + stages / 100 for stages in range(1, 20)}
    assert [config.num_stages for config in finalists(many)] == [1, 2, 3, 4, 5, 6]
    assert finalists({}) == []


def test_a_group_gives_up_what_was_far_behind_on_every_problem() -> None:
    group = Group()
    for trial in ({A: 10.0, B: 11.5, C: 12.0}, {A: 20.0, B: 24.0, C: 21.0}):
        group.learn(trial)
        assert group.worth_trying([A, B, C]) == [A, B, C]  # too little is known
    group.learn({A: 5.0, B: 6.0, C: 6.0})
    assert group.worth_trying([A, B, C]) == [A, C]  # C was within 5% once, B never within 10%
    new = DecodeConfig(64, 4, 4, 1)
    assert group.worth_trying([new]) == [new]  # what was never tried is


@pytest.mark.parametrize(
    ("us", "noise", "wins"),
    [(98.1, 0.0, False), (97.9, 0.0, True), (97.0, 0.011, False), (96.5, 0.011, True), (100.0, 0.0, False)],
)
def test_an_entry_beats_the_heuristic_by_more_than_the_noise(us, noise, wins) -> None:
    assert Finding(problem(), "sm90", A, us, 100.0, noise).wins is wins


def test_buckets_reach_halfway_by_ratio() -> None:
    assert around(64, [32, 64, 128]) == Bucket(46, 91)  # sqrt(32 * 64) = 45.3, sqrt(64 * 128) = 90.5
    assert around(4096, [4096]) == Bucket(2897, 5793)  # within a factor of sqrt(2) where nothing was measured beyond
    assert around(1, [1, 8]) == Bucket(1, 3)
    assert 1 in around(1, [1])


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=8, unique=True))
def test_buckets_hold_their_own_and_are_disjoint(measured: list[int]) -> None:
    buckets = {n: around(n, measured) for n in measured}
    for n, bucket in buckets.items():
        assert n in bucket
        assert not any(bucket.overlaps(other) for m, other in buckets.items() if m != n)


def test_cells_are_among_the_problems_of_one_kernel() -> None:
    points = [problem(1, 131072), problem(64, 4096), problem(64, 8192), problem(64, 4096, page_size=64)]
    points += [problem(8, 4096, kv_dtype=ck.KVDtype.INT8, k_scale=ck.KVScale.TOKEN_F16, v_scale=ck.KVScale.TOKEN_F16)]
    heads = Bucket(8, 9)
    assert cells([(point, "sm90") for point in points]) == [
        (heads, Bucket(1, 8), Bucket(92682, 185364)),
        (heads, Bucket(8, 91), Bucket(2897, 5793)),
        (heads, Bucket(8, 91), Bucket(5793, 11586)),
        (heads, Bucket(46, 91), Bucket(2897, 5793)),
        (heads, Bucket(6, 12), Bucket(2897, 5793)),
    ]


def findings(*outcomes: tuple[int, int, DecodeConfig, float]) -> list[tuple[Finding, Cell]]:
    """(batch, length, config, us) each against 100 us of the heuristic, with their cells."""
    problems = [problem(batch, length) for batch, length, _, _ in outcomes]
    found = [Finding(p, "sm90", config, us, 100.0, 0.0) for p, (_, _, config, us) in zip(problems, outcomes, strict=True)]
    return list(zip(found, cells([(p, "sm90") for p in problems]), strict=True))


def test_a_table_is_written_read_and_looked_up(tmp_path: Path) -> None:
    entries = updated([], findings((64, 4096, A, 90.0), (64, 8192, B, 99.0), (128, 4096, C, 80.0)), "abc")
    path = tmp_path / "h200.json"
    path.write_text(tuned.dump("NVIDIA H200", entries))
    tuned.load.cache_clear()
    assert list(tuned.load(path)) == entries
    assert len(entries) == 2  # 1% is noise
    lines = [line for line in path.read_text().splitlines() if '"arch"' in line]
    assert len(lines) == 2  # an entry a line
    assert json.loads(lines[0].rstrip(","))["us"] == 90.0
    assert tuned.lookup(problem(64, 4096), "sm90", "h200", tmp_path) == A
    assert tuned.lookup(problem(90, 4096), "sm90", "h200", tmp_path) == A
    assert tuned.lookup(problem(91, 4096), "sm90", "h200", tmp_path) == C
    assert tuned.lookup(problem(64, 8192), "sm90", "h200", tmp_path) is None
    assert tuned.lookup(problem(64, 4096, kv_dtype=ck.KVDtype.E4M3), "sm90", "h200", tmp_path) is None


def test_a_run_replaces_what_it_measured_again_and_keeps_the_rest() -> None:
    before = updated([], findings((1, 1024, A, 90.0), (64, 4096, A, 90.0), (64, 8192, A, 90.0)), "old")
    after = updated(before, findings((64, 4096, B, 80.0), (64, 8192, B, 99.5)), "new")
    assert [(entry.config, entry.measured.commit) for entry in after] == [(A, "old"), (B, "new")]
    other = [(replace(finding, problem=problem(64, 4096, page_size=64)), cell) for finding, cell in findings((64, 4096, C, 50.0))]
    assert len(updated(before, other, "new")) == 4


def test_no_entries_is_a_table_too(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text(tuned.dump("NVIDIA H200", []))
    assert json.loads(path.read_text()) == {"schema": 1, "gpu": "NVIDIA H200", "entries": []}
    tuned.load.cache_clear()
    assert tuned.load(path) == ()
