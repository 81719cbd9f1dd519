"""Which tensors share memory, exactly, and that every plan judges its operands so: what interleaves is no overlap."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels.checks.overlap import disjoint
from tests.support.inputs import Shape, make_operands

PAGED = Shape(lengths=(0, 5, 40), head_dim=64, name="overlap")


def test_disjoint() -> None:
    pool = torch.zeros(4096)
    halves = pool[:2048].view(4, 2, 16, 16)
    assert disjoint(halves[:, 0], halves[:, 1]) and disjoint(halves[:, 1], halves[:, 0]), "K and V of each page"
    assert disjoint(halves[..., :8], halves[..., 8:]), "interleaved by row"
    assert disjoint(pool[:5], pool[5:]) and disjoint(pool[:0], pool)
    assert disjoint(halves[:, 0, :15], halves.view(torch.int32)[:, 0, 15, 3:4]), "other types, one row of each page"
    assert not disjoint(halves[:, 0], halves[:, :, 3].select(1, 0))
    assert not disjoint(pool[:6], pool[5:]) and not disjoint(pool[::2], pool[1::3])
    assert not disjoint(pool.as_strided((4, 40), (64, 1)), pool.as_strided((4, 40), (64, 1), 32)), "the next period"


def test_disjoint_is_symmetric() -> None:
    """Rows and heads whose halves interleave, or are a third apart: it does not matter which begins first."""
    pool = torch.zeros(4, 8, 3, 16)
    thirds = pool.unbind(2)
    assert all(disjoint(a, b) for a in thirds for b in thirds if a is not b)
    assert all(not disjoint(a, a) and not disjoint(a, pool) and not disjoint(pool, a) for a in thirds)
    shifted = pool.as_strided((4, 7, 16), (*pool.stride()[:2], 1), 40)  # from the last 8 of a head's 48 into the next head
    assert not disjoint(thirds[0], shifted) and not disjoint(shifted, thirds[2]) and disjoint(shifted, thirds[1])


def test_disjoint_is_never_wrong() -> None:
    """Against the sets of addresses of random views."""
    generator, pool, proven = np.random.default_rng(0), torch.zeros(4096, dtype=torch.int8), 0
    for _ in range(2000):
        views, taken = [], []
        strides = generator.choice([1, 2, 3, 8, 16, 48, 96], 3)
        for _ in range(2):
            shape, offset = generator.integers(1, 5, 3).tolist(), int(generator.integers(0, 200))
            views.append(pool.as_strided(shape, strides.tolist(), offset))
            taken.append({offset + int(np.dot(index, strides)) for index in np.ndindex(*shape)})
        if disjoint(*views):
            proven += 1
            assert not taken[0] & taken[1]
    assert proven > 200


@pytest.mark.parametrize("heads_first", [False, True], ids=["rows", "heads"])
def test_decode_takes_q_and_out_that_interleave(heads_first: bool) -> None:
    """Halves of each row of one allocation, or of each head: as apart as two allocations, and so are lse and a part of them."""
    inputs = make_operands(PAGED)
    plan = ck.PagedDecodePlan.select(PAGED.descriptor(), "cpu")
    want, want_lse = plan.run(*inputs)
    pool = torch.full((3, 8, 2, 64) if heads_first else (3, 2, 8, 64), 7.0, dtype=inputs.q.dtype)
    q, out = pool.unbind(2 if heads_first else 1)
    q.copy_(inputs.q)
    lse = torch.zeros(3, 8, 2)[..., 1]
    got = plan.run(q, *inputs[1:], out=out, lse=lse)
    assert got[0] is out and torch.equal(out, want) and torch.equal(lse, want_lse) and torch.equal(q, inputs.q)


def test_decode_refuses_q_and_out_that_share_a_byte() -> None:
    """One column of one row is enough; so is a row of the other's."""
    inputs = make_operands(PAGED)
    plan = ck.PagedDecodePlan.select(PAGED.descriptor(), "cpu")
    pool = torch.zeros(4, 8, 130, dtype=inputs.q.dtype)
    q, apart, meeting = pool[:3, :, :64], pool[:3, :, 64:128], pool[:3, :, 62:126]
    plan.can_implement(q, *inputs[1:], out=apart)
    for out in (meeting, pool[1:, :, :64]):
        with pytest.raises(
            ck.InvalidArgument, match=r"out: bytes \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlap q's, must be memory of its own"
        ):
            plan.can_implement(q, *inputs[1:], out=out)


def test_a_merge_takes_outs_and_out_that_interleave() -> None:
    """One row a state: the columns of out lie between those of the states."""
    pool = torch.randn(4, 5, 2, 64)
    outs, lses = pool[:3, None, :, 0], torch.randn(3, 1, 5)
    plan = ck.MergeStatesPlan.select(ck.MergeStatesDescriptor(3, 1, 5, 64, torch.float32), "cpu")
    want = plan.run(outs.clone(), lses)
    for place in (pool[3:, :, 0], pool[3:, :, 1]):
        got = plan.run(outs, lses, out=place)
        assert got[0].data_ptr() == place.data_ptr() and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ck.InvalidArgument, match=r"out: .* overlap outs's"):
        plan.run(outs, lses, out=pool[2:3, :, 0])
