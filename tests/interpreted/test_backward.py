"""Attention's backward, executed without a GPU: gradients against torch.autograd in f64, by warps and by warpgroups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interpreted.runs import run_backward
from tests.support.attention_cases import EVERYTHING
from tests.support.backward_cases import Case, backward_case
from tests.support.backward_harness import assert_close

ROWS: dict[str, Any] = {"q_lens": (2, 3, 0, 20), "max_q_len": 20}
CACHE: dict[str, Any] = {"lengths": (0, 5, 33, 70), "num_heads": 4, "num_kv_heads": 2}
FAR: dict[str, Any] = {**CACHE, "lengths": (2, 5, 0, 150), "head_dim": 64}  # keys whose weights ALiBi makes tiny
CASES: dict[str, tuple[str, Case]] = {
    "warpgroups, shared pages": (
        "sm90",
        backward_case("d64", {**CACHE, "head_dim": 64}, own={"shared": True}, **ROWS, **EVERYTHING),
    ),
    "warps, f16": ("sm80", backward_case("f16", {**CACHE, "dtype": torch.float16, "head_dim": 40}, table="packed", **ROWS)),
    "parts of f32, d192": ("sm90", backward_case("d192", {**CACHE, "dtype": torch.float32, "head_dim": 192}, **ROWS)),
    "parts of f32, small weights": ("sm80", backward_case("alibi", {**FAR, "dtype": torch.float32}, alibi=True, **ROWS)),
}


@pytest.mark.parametrize("name", CASES)
def test_backward(name: str) -> None:
    arch, one = CASES[name]
    inputs, result = run_backward(one, arch)
    assert_close(inputs, result)
