"""apply_rotary and Rotary: against complex numbers in f64, and every bad choice by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from tests.support.append_cases import cos_sin_of, naive_rotary

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
D = ck.KVAppendDescriptor(4, 2, 64, 8, BF16)


def ulps(x: torch.Tensor, exact: np.ndarray, pair_size: np.ndarray) -> float:
    """The largest error in units in the last place of x's dtype at the size of the pair: where it cancels, f32 has no more."""
    info = torch.finfo(x.dtype)
    size = np.maximum(np.abs(exact), 2.0**-10 * pair_size)
    unit = info.eps * 2.0 ** np.floor(np.log2(np.maximum(size, info.tiny)))
    return float((np.abs(x.double().numpy() - exact) / unit).max())


@settings(max_examples=60, deadline=None)
@given(
    pairing=st.sampled_from(["half", "interleaved"]),
    head_dim=st.integers(2, 40),
    share=st.floats(0, 1),
    dtype=st.sampled_from([F16, BF16]),
    seed=st.integers(0, 2**16),
)
def test_rotation_is_a_complex_product(pairing: Any, head_dim: int, share: float, dtype: torch.dtype, seed: int) -> None:
    """Within one unit in the last place of the 16-bit type; what is past rotary_dim is untouched."""
    rotary_dim = max(2, int(share * head_dim) // 2 * 2)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 3, head_dim, generator=generator).to(dtype)
    table, positions = cos_sin_of(100, rotary_dim), torch.randint(0, 100, (5,), generator=generator)
    got = ck.apply_rotary(x, table, positions, ck.Rotary(pairing, rotary_dim))
    exact, size = naive_rotary(x, table, positions, pairing)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert ulps(got[..., :rotary_dim], exact, size) <= 1.0


def test_rotation_keeps_the_length_of_a_pair_and_turns_by_the_angle() -> None:
    """One radian at position 1: (1, 0) becomes (cos 1, sin 1), in both pairings."""
    table = torch.tensor([[1.0, 0.0], [np.cos(1.0), np.sin(1.0)]], dtype=F32)
    x = torch.tensor([1.0, 0.0]).half().view(1, 1, 2)
    for pairing in ("half", "interleaved"):
        got = ck.apply_rotary(x, table, torch.tensor([1]), ck.Rotary(pairing))
        assert got.flatten().tolist() == torch.tensor([np.cos(1.0), np.sin(1.0)]).half().tolist()
        assert torch.equal(ck.apply_rotary(x, table, torch.tensor([0]), ck.Rotary(pairing)), x)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_what_is_rotated_is_what_a_plan_with_that_rotary_dim_rotates(pairing: Any) -> None:
    """rotary_dim says it, not the table's width: one of the whole head_dim is refused, None stands for head_dim."""
    d = replace(D, rotary=ck.Rotary(pairing, 24))
    (k, v), table, positions = (torch.randn(4, 2, 64).bfloat16() for _ in range(2)), cos_sin_of(9, 24), torch.tensor([3, 8, 0, 5])
    k_cache, v_cache = (torch.zeros(1, 2, 8, 64, dtype=BF16) for _ in range(2))
    ck.KVAppendPlan.select(d, "cpu").run(k, v, k_cache, v_cache, torch.arange(4), cos_sin_cache=table, positions=positions)
    got = ck.apply_rotary(k, table, positions, ck.Rotary(pairing, 24))
    assert torch.equal(got, k_cache[0, :, :4].transpose(0, 1))
    assert torch.equal(got[..., 24:], k[..., 24:]) and not torch.equal(got[:2, :, :1], k[:2, :, :1])
    exact, size = naive_rotary(k, table, positions, pairing)
    assert ulps(got[..., :24], exact, size) <= 1.0
    for rotary, columns in ((ck.Rotary(pairing, 24), 64), (ck.Rotary(pairing), 24)):
        with pytest.raises(
            ck.InvalidProblem, match=rf"cos_sin_cache\.shape = \(9, {columns}\).*rotary_dim\] = \[\*, {88 - columns}\]"
        ):
            ck.apply_rotary(k, cos_sin_of(9, columns), positions, rotary)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": [1.0]}, ck.InvalidArgument, "x: got list, must be a tensor"),
        ({"x": torch.zeros(4, 2, 64)}, ck.InvalidArgument, "x: has dtype torch.float32"),
        ({"x": torch.zeros(4, 64, dtype=BF16)}, ck.InvalidProblem, r"x\.shape = \(4, 64\): must be \[tokens, heads, head_dim\]"),
        ({"x": torch.zeros(4, 2, 5, dtype=BF16)}, ck.InvalidProblem, r"rotary\.rotary_dim = 5: must be even"),
        ({"rotary": ck.Rotary(rotary_dim=66)}, ck.InvalidProblem, r"rotary\.rotary_dim = 66: .* at most head_dim = 64"),
        ({"rotary": "half"}, ck.InvalidArgument, "rotary: got str, must be a Rotary"),
        ({"cos_sin_cache": None}, ck.InvalidArgument, "cos_sin_cache: got NoneType, must be a tensor"),
        ({"cos_sin_cache": torch.zeros(9, 64).half()}, ck.InvalidArgument, "cos_sin_cache: has dtype torch.float16"),
        ({"cos_sin_cache": torch.zeros(9, 32)}, ck.InvalidProblem, r"cos_sin_cache\.shape = \(9, 32\)"),
        ({"cos_sin_cache": torch.zeros(64)}, ck.InvalidProblem, r"cos_sin_cache\.shape = \(64,\)"),
        ({"cos_sin_cache": torch.zeros(9, 64, device="meta")}, ck.InvalidArgument, "cos_sin_cache: is on meta, must be on x's"),
        ({"positions": 3}, ck.InvalidArgument, "positions: got int, must be a tensor"),
        (
            {"positions": torch.zeros(4)},
            ck.InvalidArgument,
            "positions: has dtype torch.float32, must be torch.int32 or torch.int64",
        ),
        ({"positions": torch.arange(5)}, ck.InvalidProblem, r"positions\.shape = \(5,\): must be \[tokens\]"),
        ({"positions": torch.tensor(1)}, ck.InvalidProblem, r"positions\.shape = \(\)"),
        ({"positions": torch.zeros(4, dtype=torch.int64, device="meta")}, ck.InvalidArgument, "positions: is on meta"),
    ],
    ids=str,
)
def test_apply_rotary_names_what_is_wrong(change: Any, error: type[Exception], match: str) -> None:
    good = {"x": torch.zeros(4, 2, 64, dtype=BF16), "cos_sin_cache": torch.zeros(9, 64), "positions": torch.arange(4)}
    with pytest.raises(error, match=match) as caught:
        ck.apply_rotary(**{"rotary": ck.Rotary(), **good, **change})
    assert isinstance(caught.value, ck.CuteKernelsError)


def test_positions_of_either_width_and_no_tokens() -> None:
    x, table = torch.randn(3, 2, 8).half(), cos_sin_of(5, 8)
    got = ck.apply_rotary(x, table, torch.tensor([4, 1, 2]), ck.Rotary())
    assert torch.equal(got, ck.apply_rotary(x, table, torch.tensor([4, 1, 2], dtype=torch.int32), ck.Rotary()))
    assert ck.apply_rotary(x[:0], table, torch.arange(0), ck.Rotary()).shape == (0, 2, 8)


@pytest.mark.parametrize("position", [-1, 2, 2**31 - 1])
def test_a_position_without_angles_leaves_its_token(position: int) -> None:
    table, x = torch.full((2, 4), 0.5), torch.randn(2, 1, 4).half()
    got = ck.apply_rotary(x, table, torch.tensor([position, 0]), ck.Rotary())
    assert torch.equal(got[0], x[0]) and not torch.equal(got[1], x[1])
    assert torch.equal(ck.apply_rotary(x, table[:0], torch.tensor([0, 0]), ck.Rotary()), x)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("pairing", value) for value in ("neox", None, 1)],
        *[("rotary_dim", value) for value in (0, 1, 3, -2, 4.0, True)],
        *[("num_heads", value) for value in (-1, 2**31, 1.0, True)],
        *[("position_dtype", value) for value in (F32, torch.int16, None)],
    ],
)
def test_a_bad_rotary_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ck.InvalidProblem, match=rf"rotary\.{field}"):
        replace(ck.Rotary(), **{field: value})


@pytest.mark.parametrize(
    ("rotary", "match"),
    [
        (ck.Rotary(rotary_dim=66), r"rotary\.rotary_dim = 66: must be even and at most head_dim = 64"),
        (ck.Rotary(num_heads=3), "num_heads = 3: must be a multiple of num_kv_heads = 2"),
    ],
    ids=str,
)
def test_a_rotary_that_the_heads_do_not_have(rotary: ck.Rotary, match: str) -> None:
    with pytest.raises(ck.InvalidProblem, match=match):
        replace(D, rotary=rotary)


def test_an_odd_head_dim_must_say_what_is_rotated() -> None:
    with pytest.raises(ck.InvalidProblem, match=r"rotary\.rotary_dim = 5"):
        replace(D, head_dim=5, rotary=ck.Rotary())
    assert replace(D, head_dim=5, rotary=ck.Rotary(rotary_dim=4)).rotary == ck.Rotary(rotary_dim=4)
    assert replace(D, rotary=ck.Rotary()) == replace(D, rotary=ck.Rotary(rotary_dim=64))


@pytest.mark.parametrize(
    ("rotary", "columns"),
    [
        (ck.Rotary(), 8),
        (ck.Rotary("half", 40), 4),
        (ck.Rotary("half", 6), 1),
        (ck.Rotary("interleaved", 40), 8),
        (ck.Rotary("interleaved", 6), 2),
    ],
    ids=str,
)
def test_a_load_brings_columns_that_are_rotated_alike(rotary: ck.Rotary, columns: int) -> None:
    assert replace(D, rotary=rotary).columns == columns


ROTARY = replace(D, rotary=ck.Rotary(num_heads=4))
Args = dict[str, Any]


def arguments() -> Args:
    caches = [torch.zeros(2, 2, 8, 64, dtype=BF16) for _ in range(2)]
    names = ("k", "v", "k_cache", "v_cache", "slots", "q", "q_out", "cos_sin_cache", "positions")
    k, v, q, q_out = (torch.randn(4, heads, 64).bfloat16() for heads in (2, 2, 4, 4))
    return dict(zip(names, (k, v, *caches, torch.arange(4), q, q_out, torch.randn(9, 64), torch.arange(4)), strict=True))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        *[({name: None}, ck.InvalidArgument, name) for name in ("q", "cos_sin_cache", "positions")],
        ({"q": torch.zeros(4, 4, 64).half()}, ck.InvalidArgument, "q: has dtype"),
        ({"q": torch.zeros(4, 2, 64).bfloat16()}, ck.InvalidProblem, r"q\.shape.*rotary\.num_heads"),
        ({"q_out": torch.zeros(3, 4, 64).bfloat16()}, ck.InvalidProblem, r"q_out\.shape"),
        ({"q_out": torch.zeros(1024).bfloat16().as_strided((4, 4, 64), (256, 0, 1))}, ck.InvalidArgument, "q_out.*share memory"),
        ({"cos_sin_cache": torch.zeros(9, 64).double()}, ck.InvalidArgument, "cos_sin_cache: has dtype torch.float64"),
        ({"cos_sin_cache": torch.zeros(9, 32)}, ck.InvalidProblem, r"cos_sin_cache\.shape.*rotary_dim"),
        ({"cos_sin_cache": torch.zeros(9 * 65)[1:577].view(9, 64)}, ck.MisalignedOperand, r"cos_sin_cache\.data_ptr"),
        ({"positions": torch.arange(4).int()}, ck.InvalidArgument, "positions: has dtype torch.int32"),
        ({"positions": torch.arange(5)}, ck.InvalidProblem, r"positions\.shape"),
    ],
    ids=str,
)
def test_bad_operands_are_named_before_anything_is_written(change: Args, error: type[Exception], match: str) -> None:
    args = arguments() | change
    before = {name: tensor.clone() for name, tensor in args.items() if tensor is not None}
    with pytest.raises(error, match=match):
        ck.KVAppendPlan.select(ROTARY, "cpu").run(**args)
    assert all(torch.equal(args[name], tensor) for name, tensor in before.items())


def test_q_out_shares_with_q_wholly_or_not_at_all() -> None:
    args, plan = arguments(), ck.KVAppendPlan.select(ROTARY, "cpu")
    pool = torch.randn(5, 4, 64).bfloat16()
    with pytest.raises(ck.InvalidArgument, match="q_out: shares memory with q"):
        plan.run(**args | {"q": pool[:4], "q_out": pool[1:]})
    q = args["q"]
    want = ck.apply_rotary(q, args["cos_sin_cache"], args["positions"], ck.Rotary())
    made = plan.run(**args | {"q_out": None})
    assert made is not None and made.data_ptr() != q.data_ptr() and torch.equal(made, want)
    assert plan.run(**args) is args["q_out"] and torch.equal(args["q_out"], want)
    assert plan.run(**args | {"q_out": q}) is q and torch.equal(q, want)


@pytest.mark.parametrize("name", ["q", "q_out", "cos_sin_cache", "positions"])
def test_operands_of_no_rotary_are_refused(name: str) -> None:
    args = arguments()
    given = {key: args[key] for key in ("k", "v", "k_cache", "v_cache", "slots", name)}
    with pytest.raises(ck.InvalidArgument, match=f"{name}: got Tensor, must be None"):
        ck.KVAppendPlan.select(D, "cpu").run(**given)
