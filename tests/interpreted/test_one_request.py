"""Kernels for one request, executed without a GPU: right, and bit for bit what a kernel for more requests gives."""

from __future__ import annotations

from typing import Any

import pytest

from cute_kernels.attention import kernel_spec
from cute_kernels.config.decode import DecodeConfig
from tests.interpreted.machine.attention import kernel_of
from tests.interpreted.runs import run_attention
from tests.support.attention_cases import E4M3, EVERYTHING, TOKEN_SCALES, Case, case, make_attention
from tests.support.attention_harness import assert_close
from tests.support.harness import assert_bitwise

ONE_HEAD: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "lengths": (1500,)}
SMALL = {**ONE_HEAD, "head_dim": 64}
HEADS = {**SMALL, "num_heads": 8, "num_kv_heads": 2}
FEW, PAIRED, TWO_HEADS = DecodeConfig(32, 8, 4, 1), DecodeConfig(16, 8, 8, 1), DecodeConfig(16, 8, 8, 1, 2)
TURNS, TOGETHER = DecodeConfig(64, 4, 8, 1, mma="warpgroup"), DecodeConfig(128, 2, 8, 1, mma="warpgroup")
ALTERNATING, BESIDE_SCALES = DecodeConfig(96, 3, 8, 1, mma="warpgroup"), DecodeConfig(96, 2, 8, 1, mma="warpgroup")
WIDENED = DecodeConfig(112, 2, 8, 1, mma="warpgroup")


def rows(count: int, **fields: Any) -> dict[str, Any]:
    """One request with `count` query rows; the plan is for more of them if the queries are ragged."""
    return {"q_lens": (count,), "max_q_len": count if fields.get("uniform") else count + 1, **fields}


CASES: dict[str, tuple[Case, DecodeConfig, str]] = {
    "few rows": (case("few", SMALL, **rows(4, uniform=True)), FEW, "balanced"),
    "few rows, ragged, everything": (case("few", SMALL, table="csr", **rows(3, **EVERYTHING)), FEW, "balanced"),
    "few rows, invariant": (case("few", SMALL, **rows(4, uniform=True)), FEW, "invariant"),
    "few rows, whole": (case("few", SMALL, **rows(4, uniform=True)), FEW, "whole"),
    "no keys": (case("empty", {**SMALL, "lengths": (0,)}, **rows(2, sinks=True)), FEW, "balanced"),
    "a key": (case("a key", {**SMALL, "lengths": (1,)}, **rows(1, uniform=True)), FEW, "balanced"),
    "32 rows of e4m3": (case("32", {**ONE_HEAD, "kv_dtype": E4M3}, **rows(8, uniform=True)), PAIRED, "balanced"),
    "32 rows of int8": (case("32", {**SMALL, **TOKEN_SCALES}, **rows(8, uniform=True)), PAIRED, "balanced"),
    "32 rows of int8, invariant": (case("32", {**SMALL, **TOKEN_SCALES}, **rows(7)), PAIRED, "invariant"),
    "two KV heads": (case("heads", {**HEADS, **TOKEN_SCALES}, **rows(8, uniform=True)), TWO_HEADS, "balanced"),
    "64 rows": (case("64", SMALL, **rows(16, uniform=True)), TURNS, "balanced"),
    "64 rows of e4m3": (case("64", {**ONE_HEAD, "kv_dtype": E4M3}, **rows(16, uniform=True)), ALTERNATING, "balanced"),
    "64 rows of int8": (case("64", {**ONE_HEAD, **TOKEN_SCALES}, **rows(15)), BESIDE_SCALES, "balanced"),
    "128 rows": (case("128", SMALL, **rows(32, uniform=True)), TOGETHER, "balanced"),
    "128 rows of int8": (case("128", {**ONE_HEAD, **TOKEN_SCALES}, **rows(32, uniform=True)), WIDENED, "balanced"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over a workspace that it has used before, whatever the order of warps and CTAs."""
    problem, config, partition = CASES[name]
    descriptor, inputs, count, found = problem.descriptor(), make_attention(problem), problem.q_lens[0], []
    for kept in (1, 32):
        monkeypatch.setattr(kernel_spec, "kept_requests_of", lambda *_, kept=kept: kept)
        kernel = kernel_of(descriptor.problem, config, partition, 4, descriptor=descriptor)
        assert kernel.spec.one_request == (kept == 1)
        states = [run_attention(kernel, inputs), run_attention(kernel, inputs, seed=2, resident=1)]
        found += [tuple(one[:count] for one in state) for state in states]
    assert_close(inputs, found[0])
    for one in found[1:]:
        assert_bitwise(one, found[0])


def test_one_request_without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case("sm80", {**SMALL, "page_size": 5}, **rows(4, uniform=True, tma=False))
    descriptor, inputs, found = problem.descriptor(), make_attention(problem), []
    for kept in (1, 32):
        monkeypatch.setattr(kernel_spec, "kept_requests_of", lambda *_, kept=kept: kept)
        kernel = kernel_of(descriptor.problem, FEW, "balanced", 4, arch="sm80", descriptor=descriptor)
        found.append(run_attention(kernel, inputs))
    assert_close(inputs, found[0])
    assert_bitwise(found[1], found[0])
