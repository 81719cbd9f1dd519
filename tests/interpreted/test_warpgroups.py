"""Attention by warpgroups, executed without a GPU: wgmma on tiles of 16 bits and on widened tiles, whole rows and cut rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.config.decode import DecodeConfig
from cute_kernels.kv.scale import KVScale
from cute_kernels.kv.types import KVDtype
from tests.interpreted.machine.attention import Kernel, kernel_of
from tests.interpreted.runs import attention_operands, run_attention
from tests.support.attention_cases import (
    E4M3,
    EVERYTHING,
    TOKEN_SCALES,
    Case,
    case,
    make_attention,
    make_low_attention,
    make_sunk_attention,
)
from tests.support.attention_harness import assert_close, assert_close_by_columns, spread_values
from tests.support.harness import assert_bitwise
from tests.support.logit_patterns import LOGITS, follow_logits
from tests.support.scale_patterns import follow_pattern
from tests.support.storage import STORAGES

ONE_HEAD: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128}
ROWS_64: dict[str, Any] = {"q_lens": (16, 0, 5), "max_q_len": 16}
ROWS_128: dict[str, Any] = {"q_lens": (32, 3, 9), "max_q_len": 32}
CUT, WHOLE = {"lengths": (1300, 0, 40)}, {"lengths": (200, 0, 40)}
SMALL = {"head_dim": 64, "lengths": (1500, 0, 40)}
TURNS, TOGETHER = DecodeConfig(64, 4, 8, 1, mma="warpgroup"), DecodeConfig(128, 2, 8, 1, mma="warpgroup")
WIDENED = DecodeConfig(112, 2, 8, 1, mma="warpgroup")
ALTERNATING = DecodeConfig(96, 3, 8, 1, mma="warpgroup")
ALTERNATING_BESIDE_SCALES = DecodeConfig(96, 2, 8, 1, mma="warpgroup")
CASES: dict[str, tuple[Case, DecodeConfig, Any]] = {
    "64 rows, cut": (case("64 cut", {**ONE_HEAD, **SMALL}, **ROWS_64), TURNS, "balanced"),
    "64 rows, everything": (
        case("64 everything", {**ONE_HEAD, **WHOLE, "page_size": 64}, **ROWS_64, **EVERYTHING),
        TURNS,
        "whole",
    ),
    "128 rows": (case("128", {**ONE_HEAD, **WHOLE}, **ROWS_128), TOGETHER, "whole"),
    "128 rows, cut": (case("128 cut", {**ONE_HEAD, **SMALL}, **ROWS_128), TOGETHER, "balanced"),
    "e4m3, 64 rows, cut": (case("e4m3", {**ONE_HEAD, **SMALL, "kv_dtype": E4M3}, **ROWS_64), TURNS, "balanced"),
    "e4m3, 64 rows, tiles of 96, cut": (
        case("e4m3 96", {**ONE_HEAD, **CUT, "kv_dtype": E4M3}, **ROWS_64),
        ALTERNATING,
        "balanced",
    ),
    "e4m3, 64 rows, three words a lane, cut": (
        case("e4m3 d96", {**ONE_HEAD, **CUT, "head_dim": 96, "kv_dtype": E4M3}, **ROWS_64),
        TURNS,
        "balanced",
    ),
    "e4m3 beside 16 bits, 64 rows, cut": (
        case("e4m3 beside", {**ONE_HEAD, **SMALL, "v_dtype": E4M3, "v_scale": KVScale.TOKEN}, **ROWS_64),
        TURNS,
        "balanced",
    ),
    "V of int8 and token scales, 64 rows, cut": (
        case("v int8 64", {**ONE_HEAD, **SMALL, "v_dtype": KVDtype.INT8, "v_scale": KVScale.TOKEN_F16}, **ROWS_64),
        TURNS,
        "balanced",
    ),
    "K of e4m3 and token scales, 64 rows, cut": (
        case("k 64", {**ONE_HEAD, **SMALL, "kv_dtype": E4M3, "v_dtype": KVDtype.BF16, "k_scale": KVScale.TOKEN}, **ROWS_64),
        TURNS,
        "balanced",
    ),
    "e4m3 token, 64 rows, cut": (
        case("e4m3 64", {**ONE_HEAD, **CUT, **TOKEN_SCALES, "kv_dtype": E4M3}, **ROWS_64),
        ALTERNATING_BESIDE_SCALES,
        "balanced",
    ),
    "int8 token, 64 rows, cut": (
        case("int8 64", {**ONE_HEAD, **CUT, **TOKEN_SCALES}, **ROWS_64),
        ALTERNATING_BESIDE_SCALES,
        "balanced",
    ),
    "int8 token, 64 rows, everything": (
        case("int8 everything", {**ONE_HEAD, **WHOLE, **TOKEN_SCALES, "page_size": 64}, **ROWS_64, **EVERYTHING),
        ALTERNATING_BESIDE_SCALES,
        "whole",
    ),
    "int8 token, 128 rows, cut": (case("int8 cut", {**ONE_HEAD, **CUT, **TOKEN_SCALES}, **ROWS_128), WIDENED, "balanced"),
    "int8 token, f16 queries, 64 rows, cut": (
        case("int8 64 f16", {**ONE_HEAD, **CUT, **TOKEN_SCALES, "dtype": torch.float16}, **ROWS_64),
        ALTERNATING_BESIDE_SCALES,
        "balanced",
    ),
    "int8 token, f16 queries, 128 rows": (
        case("int8 f16", {**ONE_HEAD, **WHOLE, **TOKEN_SCALES, "dtype": torch.float16}, **ROWS_128),
        WIDENED,
        "balanced",
    ),
    "int8 token, 128 rows, soft cap": (
        case("int8 cap", {**ONE_HEAD, **WHOLE, **TOKEN_SCALES}, **ROWS_128, softcap=20.0),
        WIDENED,
        "balanced",
    ),
    "int8 of heads, 128 rows": (
        case(
            "int8 head",
            {**ONE_HEAD, **WHOLE, "kv_dtype": KVDtype.INT8, "k_scale": KVScale.HEAD, "v_scale": KVScale.HEAD},
            **ROWS_128,
        ),
        WIDENED,
        "balanced",
    ),
    "V of e4m3 and token scales, 128 rows": (
        case("v e4m3", {**ONE_HEAD, **WHOLE, "v_dtype": E4M3, "v_scale": KVScale.TOKEN_F16}, **ROWS_128),
        WIDENED,
        "whole",
    ),
    "V of int8 and token scales, 128 rows": (
        case("v int8", {**ONE_HEAD, **WHOLE, "v_dtype": KVDtype.INT8, "v_scale": KVScale.TOKEN_F16}, **ROWS_128),
        WIDENED,
        "whole",
    ),
    "K of e4m3 and token scales, 128 rows": (
        case("k e4m3", {**ONE_HEAD, **WHOLE, "kv_dtype": E4M3, "v_dtype": KVDtype.BF16, "k_scale": KVScale.TOKEN}, **ROWS_128),
        WIDENED,
        "whole",
    ),
}
SLICES = 3


def made(name: str) -> tuple[Kernel, Case]:
    problem, config, partition = CASES[name]
    descriptor = problem.descriptor()
    return kernel_of(descriptor.problem, config, partition, SLICES, descriptor=descriptor), problem


@pytest.mark.parametrize("name", CASES)
def test_warpgroups(name: str) -> None:
    """Two runs over one workspace are right, and bit for bit the same whatever the order of warps and CTAs."""
    kernel, problem = made(name)
    assert kernel.spec.by_warpgroup and kernel.spec.block_rows == (128 if "128" in name else 64)
    inputs, total = make_attention(problem), sum(problem.q_lens)
    found = run_attention(kernel, inputs)
    assert_close(inputs, found)
    again = run_attention(kernel, inputs, seed=2, resident=1)
    assert_bitwise((again[0][:total], again[1][:total]), (found[0][:total], found[1][:total]))


@pytest.mark.parametrize(
    ("name", "crews"),
    [
        ("K of e4m3 and token scales, 128 rows", (range(6), range(0))),
        ("V of e4m3 and token scales, 128 rows", (range(0), range(6))),
        ("V of int8 and token scales, 128 rows", (range(0), range(6))),
        ("int8 token, 128 rows, cut", (range(3), range(3, 6))),
    ],
)
def test_no_crew_waits_for_a_tensor_of_16_bits(name: str, crews: tuple[range, range]) -> None:
    """Its readers wait for no crew: a warp two tiles behind them would wait for a phase that is over, as with seed 20."""
    kernel, problem = made(name)
    assert kernel.spec.widening_crews == crews
    inputs = make_attention(problem)
    assert_close(inputs, run_attention(kernel, inputs, seed=20))


def test_scales_of_first_boxes_are_prefetched() -> None:
    """Those of each CTA's first 32 boxes of 16 tokens, one line for 8 tokens, and nothing outside of pages in use."""
    kernel, problem = made("int8 token, 64 rows, cut")
    assert kernel.spec.prefetches_scales and kernel.spec.box_rows == 16
    inputs = make_attention(problem)
    kernel.run(*attention_operands(inputs))
    table, lengths, *_ = inputs.table.operands
    for scales, found in zip(inputs.scales.values(), kernel.prefetched, strict=True):
        begin, size, (page, slot, _) = scales.storage_offset(), scales.element_size(), scales.stride()
        every = [
            (begin + int(table[row, box]) * page + first * slot) * size
            for row, length in enumerate(lengths.tolist())
            for box in range(-(-length // 16))
            for first in (0, 8)
        ]
        assert set(every[:64]) <= found <= set(every)


def test_scales_of_tokens_beside_16_bits() -> None:
    """Two of the four warps that bring tiles only hand registers over."""
    scales = {"k_scale": KVScale.TOKEN, "v_scale": KVScale.TOKEN}
    problem = case("scales", {**ONE_HEAD, **WHOLE, "head_dim": 64, **scales}, **ROWS_128)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, TOGETHER, "whole", SLICES, descriptor=descriptor)
    inputs = make_attention(problem)
    assert_close(inputs, run_attention(kernel, inputs, seed=1))


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("cut")])
def test_rows_are_cut(name: str) -> None:
    """These cases do cut a row, as the test above assumes."""
    kernel, problem = made(name)
    stores = kernel.run(*attention_operands(make_attention(problem)))
    assert stores > 4 * 64 * kernel.spec.row_words, "no row of two pieces that are written and cleared"


@pytest.mark.parametrize(
    ("rows", "config", "storage"),
    [
        (ROWS_64, TURNS, {}),  # one warpgroup settles all columns
        (ROWS_128, TOGETHER, {}),  # each settles its own rows
        (ROWS_64, TURNS, {"kv_dtype": E4M3, "v_dtype": KVDtype.BF16}),  # each settles half of the columns
    ],
    ids=["64 rows", "128 rows", "64 rows in halves"],
)
def test_words_of_f16(rows: dict[str, Any], config: DecodeConfig, storage: dict[str, Any]) -> None:
    """As in test_several_rows: columns of V of any magnitude, infinity and NaN."""
    problem = case("f16", {**ONE_HEAD, **CUT, **storage}, **rows)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, config, "balanced", SLICES, descriptor=descriptor)
    assert kernel.spec.half_words and kernel.spec.settles_halves == bool(storage)
    inputs = make_attention(problem)
    spread_values(inputs)
    found = run_attention(kernel, inputs)
    assert_close_by_columns(inputs, found)


@pytest.mark.parametrize("parts", [9, 12])
def test_a_row_in_many_parts(parts: int) -> None:
    """Its CTAs combine more words than half of their threads, 256 or 192 each, but the last of twelve only 128."""
    config = DecodeConfig(32, 4, 8, 1, mma="warpgroup")
    problem = case("many", {**ONE_HEAD, "lengths": (parts * 144,), "kv_dtype": E4M3}, q_lens=(16,), max_q_len=16)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, config, "balanced", parts, descriptor=descriptor)
    inputs = make_attention(problem)
    found = run_attention(kernel, inputs)
    assert_close(inputs, found)
    assert_bitwise(run_attention(kernel, inputs, seed=3, resident=2), found)
    assert kernel.run(*attention_operands(inputs)) >= 2 * parts * 64 * kernel.spec.row_words


@pytest.mark.parametrize(
    ("storage", "rows", "config", "partition", "seed"),
    [
        ("e4m3", ROWS_64, ALTERNATING, "balanced", 0),
        ("int8 token", ROWS_64, ALTERNATING_BESIDE_SCALES, "balanced", 0),
        ("int8 token", ROWS_128, WIDENED, "dealt", 13),  # with half the largest weight, 1.2 times what is allowed
    ],
)
def test_rows_with_a_token_without_values(
    storage: str, rows: dict[str, Any], config: DecodeConfig, partition: Any, seed: int
) -> None:
    """Where bases move lazily, weights of e ** -20 keep bf16's precision: the output is of such weights alone."""
    problem = case("sink", {**ONE_HEAD, "lengths": (600, 0, 40), **STORAGES[storage], "softmax_scale": 1.0}, **rows)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, config, partition, SLICES, descriptor=descriptor)
    assert kernel.spec.overlaps and kernel.spec.widens_tiles
    inputs = make_sunk_attention(problem, seed=seed)
    assert_close(inputs, run_attention(kernel, inputs))


@pytest.mark.parametrize(("rows", "config"), [(ROWS_64, ALTERNATING_BESIDE_SCALES), (ROWS_128, WIDENED)], ids=["64", "128"])
def test_scores_below_zero_that_rise(rows: dict[str, Any], config: DecodeConfig) -> None:
    """Bases that move where no integer of a score's bits is its maximum (device/attend/bases.py)."""
    problem = case("low", {**ONE_HEAD, "lengths": (600, 0, 40), **TOKEN_SCALES}, **rows)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, config, "balanced", SLICES, descriptor=descriptor)
    inputs = make_low_attention(problem)
    assert_close(inputs, run_attention(kernel, inputs))


@pytest.mark.parametrize("pattern", LOGITS)
@pytest.mark.parametrize(
    ("storage", "rows", "config"),
    [
        ("16 bits", ROWS_128, TOGETHER),
        ("int8 token", ROWS_64, ALTERNATING_BESIDE_SCALES),
        ("int8 token", ROWS_128, WIDENED),
    ],
    ids=["16 bits", "int8 in turns", "int8"],
)
def test_logits(storage: str, rows: dict[str, Any], config: DecodeConfig, pattern: str) -> None:
    """Bases in bf16 that move with each tile, with few of them, with none, or out of range; over int8 scores are related."""
    problem = case("logits", {**ONE_HEAD, "lengths": (600, 0, 40), **STORAGES[storage], "softmax_scale": 1.0}, **rows)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, config, "balanced", SLICES, descriptor=descriptor)
    assert kernel.spec.v_math == "bf16" and kernel.spec.relates_scores == (storage == "int8 token")
    inputs = follow_logits(make_attention(problem), pattern)
    assert_close(inputs, run_attention(kernel, inputs))


@pytest.mark.parametrize("pattern", ["rising", "spread", "bursts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("keys", [(KVDtype.INT8, KVScale.TOKEN_F16), (E4M3, KVScale.HEAD)], ids=["int8", "e4m3"])
def test_scales_of_values_far_apart(keys: tuple[KVDtype, KVScale], dtype: torch.dtype, pattern: str) -> None:
    """A unit that grows from tile to tile, and tiles in which V's scales differ by 2**20 or 2**16, all or some of them.

    K and V are widened by the same code, or by code of their own. In f16 the scales go into V, though its range does not hold
    them; in bf16 they go into P.
    """
    stored = {"kv_dtype": keys[0], "k_scale": keys[1], "v_dtype": KVDtype.INT8, "v_scale": KVScale.TOKEN, "dtype": dtype}
    problem = case("far", {**ONE_HEAD, "lengths": (600, 0, 40), **stored}, **ROWS_128)
    descriptor = problem.descriptor()
    kernel = kernel_of(descriptor.problem, WIDENED, "balanced", SLICES, descriptor=descriptor)
    in_values = dtype is torch.float16
    assert kernel.spec.scales_values == in_values and kernel.spec.scales_keys == (in_values and keys[0] is KVDtype.INT8)
    inputs = follow_pattern(make_attention(problem), pattern)
    assert_close(inputs, run_attention(kernel, inputs))
