"""apply_rotary and Rotary: against complex numbers in f64, and every bad choice by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decode.append_cases import cos_sin_of, naive_rotary
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck

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
    got = ck.apply_rotary(x, table, positions, ck.Rotary(pairing))
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
