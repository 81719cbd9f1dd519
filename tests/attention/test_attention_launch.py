"""What a kernel of several query rows or of modifiers is called with: the operands in their order, as it takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.attention import plan as plan_module
from tests.support.attention_cases import CASES, Case, make_attention
from tests.support.attention_harness import assert_close, run, select
from tests.support.harness import assert_bitwise

NAMED = {c.name: c for c in CASES}
NAMES = (
    *("q", "k", "v", "table0", "table1", "table2", "k_scale", "v_scale", "out", "lse", "workspace"),
    *("qo_indptr", "tree_mask", "alibi_slopes", "sinks"),
    *("softmax_scale", "num_ctas", "status", "max_q_len", "window_left", "window_right", "softcap"),
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, no_plans: None) -> list[tuple[Any, ...]]:
    """The arguments of each launch of the CPU variant, by plans that are made here."""
    found: list[tuple[Any, ...]] = []
    real = plan_module._launch_of

    def launch_of(spec: Any, descriptor: Any) -> Callable[..., object]:
        launch = real(spec, descriptor)
        return lambda *arguments: (found.append(arguments), launch(*arguments))

    monkeypatch.setattr(plan_module, "_launch_of", launch_of)
    return found


# the shape of each tensor that a kernel of the case is given, () for none, and the four values behind status
KERNELS: dict[str, tuple[dict[str, tuple[int, ...]], tuple[int, int, int, float]]] = {
    "causal": ({"q": (29, 8, 64), "lse": (29, 8), "qo_indptr": (8,)}, (8, 0, 0, 0.0)),
    "everything": ({"q": (29, 8, 64), "lse": (29, 8), "alibi_slopes": (8,), "sinks": (8,)}, (8, 40, 0, 3.0)),
    "window_both": ({"q": (29, 8, 64)}, (8, 7, 3, 0.0)),
    "tree_2_words": ({"tree_mask": (106, 2)}, (40, 0, 0, 0.0)),
    "uniform_fewer": ({"q": (7, 4, 8, 64), "out": (7, 4, 8, 64), "lse": (7, 4, 8), "qo_indptr": ()}, (9, 20, 0, 0.0)),
    "uniform_tree": ({"q": (7, 4, 8, 64), "lse": (7, 4, 8), "tree_mask": (7, 4, 1)}, (4, 0, 0, 0.0)),
    "one_row_everything": ({"q": (7, 8, 64), "out": (7, 8, 64), "lse": (7, 8), "qo_indptr": ()}, (1, 40, 0, 3.0)),
    "lengths": ({"k": (7, 2, 262, 64), "table0": (7,), "table1": (), "table2": ()}, (8, 0, 0, 0.0)),
    "lengths_nhd_everything": ({"k": (7, 2, 262, 64), "v": (7, 2, 262, 64)}, (8, 40, 0, 3.0)),
    "packed": ({"k": (1, 2, 412, 64), "table0": (8,), "table1": ()}, (8, 0, 0, 0.0)),
    "int8_token_scales_packed": ({"k": (1, 2, 412, 64), "k_scale": (1, 2, 412)}, (8, 0, 0, 0.0)),
    "int8_token_scales_lengths": ({"k": (7, 2, 262, 64), "k_scale": (7, 2, 262)}, (8, 30, 0, 0.0)),
    "whole_nhd_top_left": ({"k": (2, 2, 70, 64), "table0": ()}, (8, 0, 0, 0.0)),
    "nhd_p64": ({"k": (14, 2, 64, 64)}, (8, 64, 0, 0.0)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_operands(launches: list[tuple[Any, ...]], name: str) -> None:
    shapes, values = KERNELS[name]
    run(select(NAMED[name], "cpu"), make_attention(NAMED[name]))
    (arguments,) = launches
    given = dict(zip(NAMES, arguments, strict=True))
    assert {n: () if given[n] is None else tuple(given[n].shape) for n in shapes} == shapes
    assert arguments[-4:] == values and [type(value) for value in arguments[-4:]] == [int, int, int, float]
    assert given["softmax_scale"] == 64**-0.5 and given["workspace"] is None


@pytest.mark.parametrize("name", ["one_row", "lengths_one_row", "packed_one_row"])
def test_a_plain_row_is_launched_as_by_decode(launches: list[tuple[Any, ...]], name: str) -> None:
    run(select(NAMED[name], "cpu"), make_attention(NAMED[name]))
    assert [len(arguments) for arguments in launches] == [14]


@pytest.mark.parametrize("name", ["uniform_strided", "uniform_tree", "uniform_strided_everything"])
def test_strided_rows_are_not_copied(launches: list[tuple[Any, ...]], name: str) -> None:
    inputs = make_attention(NAMED[name])
    run(select(NAMED[name], "cpu"), inputs)
    q, out = launches[0][0], launches[0][8]
    assert q.data_ptr() == inputs.q.data_ptr() and q.stride() == inputs.q.stride() == out.stride()
    assert q.stride(2) == q.shape[1] * 64  # heads lie outside of rows


def test_a_remembered_signature_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other extras are: in other memory, of another dtype, absent."""
    case = NAMED["everything"]
    plan, inputs = select(case, "cpu"), make_attention(case)
    out, lse = torch.empty_like(inputs.q), torch.empty(29, 8)
    checked: list[object] = []
    real = plan._check.now
    monkeypatch.setattr(plan._check, "now", lambda call: (checked.append(call), real(call))[1])
    given = {**inputs.extras, "out": out, "lse": lse}
    for _ in range(3):
        plan.run(inputs.q, inputs.k, inputs.v, inputs.table, **given)
    assert len(checked) == 1
    for name in inputs.extras:
        plan.run(inputs.q, inputs.k, inputs.v, inputs.table, **{**given, name: inputs.extras[name].clone()})
    assert len(checked) == 4
    assert_bitwise((out[:26], lse[:26]), tuple(t[:26] for t in run(plan, inputs)))


def test_a_uniform_length_may_change_between_runs() -> None:
    """One plan serves every q_len up to max_q_len."""
    fewer: Case = NAMED["uniform_fewer"]
    plan, inputs = select(fewer, "cpu"), make_attention(fewer)
    out, lse = plan.run(inputs.q[:, :3], inputs.k, inputs.v, inputs.table, **inputs.extras)
    assert out.shape == (7, 3, 8, 64) and lse.shape == (21, 8)
    assert_close(replace(inputs, case=replace(fewer, q_lens=(3,) * 7), q=inputs.q[:, :3]), (out.flatten(0, 1), lse))
