"""Merges of attention states on every backend: against f64, and bit for bit where the contract is (adversarial case 5)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.attention.reference import decode_contiguous
from tests.support.harness import BACKENDS, device_of
from tests.support.merge_cases import Pair, assert_close, exact, make_states, same_dtype
from tests.support.tolerance import check_states, ulp

NAN, INF = math.nan, math.inf
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BITS = {F32: torch.int32, F16: torch.int16, BF16: torch.int16}
SMALL = ck.MergeStatesDescriptor(3, 4, 5, 64, BF16)


def select(d: ck.MergeStatesDescriptor, backend: str) -> ck.MergeStatesPlan:
    return ck.MergeStatesPlan.select(d, device_of(backend), ck.PlanPreference(arch=backend))


def merge(d: ck.MergeStatesDescriptor, backend: str, outs: torch.Tensor, lses: torch.Tensor) -> Pair:
    """Merges into outputs that were prefilled with NaN."""
    d = replace(d, num_states=len(outs))
    out = torch.full(d.shape, NAN, dtype=d.dtype, device=outs.device)
    lse = torch.full(d.shape[:2], NAN, device=outs.device)
    return select(d, backend).run(outs, lses, out=out, lse=lse)


def assert_bitwise(got: Pair, expected: Pair) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.contiguous().view(BITS[ours.dtype]), theirs.contiguous().view(BITS[theirs.dtype]))


NUMERICS = [
    *[replace(SMALL, num_states=states, head_dim=128) for states in (1, 2, 3, 4, 8, 9, 33)],
    *[replace(SMALL, head_dim=dim, dtype=dtype) for dim in (1, 5, 64, 128, 256) for dtype in (F32, F16, BF16)],
    replace(SMALL, num_states=33, head_dim=5, dtype=F32, lse_base="2"),
    replace(SMALL, num_states=8, dtype=F16, lse_base="2"),
    replace(SMALL, batch_size=1, num_heads=1),
    replace(SMALL, batch_size=7, num_heads=128, head_dim=128, dtype=F16),
    replace(SMALL, head_dim=520, dtype=F32),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", NUMERICS, ids=str)
def test_equals_f64(d: ck.MergeStatesDescriptor, backend: str) -> None:
    for seed, spread in enumerate((0.0, 1.0, 20.0)):
        outs, lses = make_states(d, device_of(backend), seed, spread)
        assert_close(d, merge(d, backend, outs, lses), outs, lses)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("center", [-6e4, -5e5, 5e5, 1e30])
def test_lses_of_any_size(center: float, lse_base: str, backend: str) -> None:
    """Weights depend on differences: those of large lses are exact."""
    d = replace(SMALL, lse_base=lse_base, dtype=F32, num_states=9)
    outs, lses = make_states(d, device_of(backend), center=center)
    assert_close(d, merge(d, backend, outs, lses), outs, lses)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_no_weight(backend: str) -> None:
    """Finite lses too far apart for any weight: the merge is the largest one's."""
    outs, lses = make_states(SMALL, device_of(backend))
    lses[0], lses[2] = -3e38, -200.0
    out, lse = merge(SMALL, backend, outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])
    lses[0], lses[1], lses[2] = -3e38, 3e38, 0.0
    out, lse = merge(SMALL, backend, outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])


AWKWARD = [0.0, -0.0, 1e-40, -1e-40, 1 / 3, -17.3, 88.7, -1e-3, 5e5 / 3, 3.4e38, -3.4e38, 0.1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("states", [1, 2, 3, 33])
def test_one_state_comes_back_bit_for_bit(states: int, dtype: torch.dtype, lse_base: str, backend: str) -> None:
    """Whatever its bits are (zeros of both signs, subnormals, infinities, NaNs), and whatever the empty states hold."""
    d = replace(SMALL, num_states=states, dtype=dtype, lse_base=lse_base, num_heads=len(AWKWARD))
    outs, lses = make_states(d, device_of(backend))
    patterns = torch.arange(outs[0].numel(), device=outs.device) * 2654435761 % 2 ** (8 * dtype.itemsize)
    kept = patterns.to(torch.int64).to(BITS[dtype]).view(dtype).view(d.shape)
    for place in {0, states // 2, states - 1}:
        outs.fill_(NAN), lses.fill_(-INF)
        outs[place], lses[place] = kept, torch.tensor(AWKWARD, device=lses.device)
        if states > 2:
            outs[(place + 1) % states] = INF
        assert_bitwise(merge(d, backend, outs, lses), (outs[place], lses[place]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("states", [1, 2, 3, 8, 33])
def test_only_empty_states(states: int, lse_base: str, backend: str) -> None:
    d = replace(SMALL, num_states=states, lse_base=lse_base)
    outs, lses = make_states(d, device_of(backend))
    for dead in (NAN, INF, 1.0):
        out, lse = merge(d, backend, outs.fill_(dead), lses.fill_(-INF))
        assert not out.view(torch.int16).any(), "+0.0"
        assert torch.isneginf(lse).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("places", [(1,), (0, 2), (0, 1, 4, 5), tuple(range(2, 30))], ids=str)
def test_empty_states_are_the_identity_wherever_they_stand(places: tuple[int, ...], backend: str) -> None:
    """Bit for bit the merge of the others, also across the chunks that a kernel loads together."""
    live, total = 3, 3 + len(places)
    d = replace(SMALL, num_states=live)
    outs, lses = make_states(d, device_of(backend))
    rest = [i for i in range(total) if i not in places]
    padded, padded_lses = outs.new_full((total, *d.shape), NAN), lses.new_full((total, *d.shape[:2]), -INF)
    padded[rest], padded_lses[rest] = outs, lses
    assert_bitwise(merge(d, backend, padded, padded_lses), merge(d, backend, outs, lses))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_differ_in_which_states_are_empty(backend: str) -> None:
    d = replace(SMALL, num_states=9, batch_size=64)
    outs, lses = make_states(d, device_of(backend))
    empty = torch.rand(lses.shape, device=lses.device, generator=torch.Generator(lses.device).manual_seed(1)) < 0.7
    empty[:, 0], empty[:, 1] = True, False
    lses[empty], outs[empty] = -INF, NAN
    assert_close(d, merge(d, backend, outs, lses), outs, lses)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("states", [2, 3, 33])
@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
def test_an_lse_of_nan_or_infinity_makes_its_merge_nan(bad: float, states: int, backend: str) -> None:
    d = replace(SMALL, num_states=states)
    for place in {0, 1, states - 1}:
        outs, lses = make_states(d, device_of(backend))
        clean = merge(d, backend, outs, lses)
        lses[place, 1, 2] = bad
        out, lse = merge(d, backend, outs, lses)
        assert out[1, 2].isnan().all() and lse[1, 2].isnan()
        out[1, 2], lse[1, 2] = clean[0][1, 2], clean[1][1, 2]
        assert_bitwise((out, lse), clean)  # only that one


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [5, 64])
def test_any_strides_with_a_unit_last_one(dim: int, backend: str) -> None:
    """States inside a row, heads outside the batch, padded rows, expanded lses: the bits of compact tensors."""
    d = replace(SMALL, head_dim=dim)
    outs, lses = make_states(d, device_of(backend))
    compact = merge(d, backend, outs, lses)
    inside = outs.transpose(0, 1).contiguous().transpose(0, 1)
    inside_lses = lses.transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise(merge(d, backend, inside, inside_lses), compact)
    wide = outs.new_full((*outs.shape[:-1], dim + 6), NAN)[..., 2 : dim + 2]
    wide.copy_(outs)
    swapped = lses.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    out = outs.new_full((d.num_heads, d.batch_size, dim + 2), NAN)
    lse = lses.new_full((d.num_heads, d.batch_size, 3), NAN)
    got = select(d, backend).run(wide, swapped, out=out[..., :dim].transpose(0, 1), lse=lse[..., 1].t())
    assert_bitwise(got, compact)
    assert out[..., dim:].isnan().all() and lse[..., ::2].isnan().all(), "nothing else is written"
    expanded = lses[:, :1, :1].expand_as(lses)
    assert_bitwise(merge(d, backend, outs, expanded), merge(d, backend, outs, expanded.contiguous()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_odd_alignment_takes_one_column_a_thread(dtype: torch.dtype, backend: str) -> None:
    d = replace(SMALL, dtype=dtype, alignment_bytes=dtype.itemsize)
    outs, lses = make_states(d, device_of(backend))
    odd = torch.full((outs.numel() // 64 * 65 + 1,), NAN, dtype=dtype, device=outs.device)[1:].view(*outs.shape[:-1], 65)[
        ..., :64
    ]
    odd.copy_(outs)
    assert_bitwise(merge(d, backend, odd, lses), merge(replace(d, alignment_bytes=None), backend, outs, lses))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_parts_of_an_attention_make_the_whole(lse_base: str, backend: str) -> None:
    """A cache of 100 tokens cut into five parts, one of them empty."""
    generator = torch.Generator(device_of(backend)).manual_seed(0)
    q, k, v = (
        torch.randn(shape, device=generator.device, generator=generator)
        for shape in ((4, 6, 64), (4, 2, 100, 64), (4, 2, 100, 64))
    )
    parts = [
        decode_contiguous(q, k[:, :, a:b], v[:, :, a:b], lse_base=lse_base)
        for a, b in ((0, 5), (5, 5), (5, 69), (69, 99), (99, 100))
    ]
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    d = ck.MergeStatesDescriptor(5, 4, 6, 64, F32, lse_base)
    out, lse = merge(d, backend, outs, lses)
    whole = decode_contiguous(q, k, v, lse_base=lse_base, dtype=torch.float64)
    same = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    check_states((out, lse), whole, same)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("states", [1, 3, 9])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sinks_join_the_merged_state_once(dtype: torch.dtype, states: int, lse_base: str, backend: str) -> None:
    """As one more state would, whose output is 0. The first row's states are all empty."""
    d = replace(SMALL, num_states=states, dtype=dtype, lse_base=lse_base, sinks=True)
    outs, lses = make_states(d, device_of(backend))
    lses[:, 0] = -math.inf
    sinks = torch.tensor([-2.0, 0.0, 3.0, 40.0, -math.inf], device=outs.device)
    out, lse = select(d, backend).run(outs, lses, sinks=sinks)
    logits = (sinks / math.log(2) if lse_base == "2" else sinks).expand_as(lses[:1])
    more = torch.cat([outs, torch.zeros_like(outs[:1])]), torch.cat([lses, logits])
    whole, same = exact(*more, lse_base), same_dtype(*more, lse_base)
    check_states((out[1:], lse[1:]), (whole[0][1:], whole[1][1:]), same[1:])
    assert not out[0].any() and torch.equal(lse[0, :4], logits[0, 0, :4]) and lse[0, 4] == -math.inf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("center", [-6e4, 20.0, 6e4, 2.2e8])
def test_sinks_beside_lses_of_any_size(center: float, lse_base: str, backend: str) -> None:
    """A sink far below the merged lse takes nothing, one far above takes all, and one near it takes its part.

    A GPU rounds the merged lse before a sink joins it, so that a near sink's part is exact to that rounding alone.
    """
    d = replace(SMALL, batch_size=64, dtype=F32, lse_base=lse_base, sinks=True)
    outs, lses = make_states(d, device_of(backend), center=center)
    unit = math.log(2) if lse_base == "2" else 1.0
    near = center * unit if backend == "cpu" else 0.0
    sinks = torch.tensor([near, 0.0, -3.0, center * unit - 100, -math.inf], device=outs.device)
    out, lse = select(d, backend).run(outs, lses, sinks=sinks)
    logits = (sinks / unit).expand_as(lses[:1])  # in f32: a rounding of a sink is part of what is asked for
    more = torch.cat([outs, torch.zeros_like(outs[:1])]), torch.cat([lses, logits])
    check_states((out, lse), exact(*more, lse_base), same_dtype(*more, lse_base))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_made_without_sinks_merge_to_attention_with_them(backend: str) -> None:
    """Each part with its sinks would count them twice."""
    generator = torch.Generator(device_of(backend)).manual_seed(0)
    q, k, v = (
        torch.randn(shape, device=generator.device, generator=generator) for shape in ((4, 6, 64), *((4, 2, 100, 64),) * 2)
    )
    sinks = torch.randn(6, device=q.device, generator=generator)
    parts = [decode_contiguous(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 40), (40, 100))]
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    d = ck.MergeStatesDescriptor(2, 4, 6, 64, F32, sinks=True)
    out, lse = select(d, backend).run(outs, lses, sinks=sinks)
    scores = torch.einsum("bhd,bhtd->bht", q.double(), k.double().repeat_interleave(3, 1)) / 8
    scores = torch.cat([scores, sinks.double()[None, :, None].expand(4, 6, 1)], 2)
    whole = torch.einsum("bht,bhtd->bhd", scores.softmax(2)[..., :-1], v.double().repeat_interleave(3, 1))
    assert torch.allclose(out.double(), whole, atol=1e-6) and torch.allclose(lse.double(), scores.logsumexp(2), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_merges_of_merges(dtype: torch.dtype, lse_base: str, backend: str) -> None:
    """Associative within the roundings of the states between: one of the dtype each."""
    d = replace(SMALL, num_states=5, dtype=dtype, lse_base=lse_base)
    outs, lses = make_states(d, device_of(backend))
    whole = merge(d, backend, outs, lses)
    largest = outs.abs().amax((0, 3))  # of a row and head
    for cut in range(1, 5):
        halves = [merge(d, backend, outs[part], lses[part]) for part in (slice(cut), slice(cut, None))]
        out, lse = merge(d, backend, *(torch.stack(tensors) for tensors in zip(*halves, strict=True)))
        assert ((out - whole[0]).abs().amax(-1) <= 3 * ulp(largest, dtype)).all()
        assert torch.allclose(lse, whole[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch(backend: str) -> None:
    d = replace(SMALL, batch_size=0)
    out, lse = merge(d, backend, *make_states(d, device_of(backend)))
    assert out.shape == (0, 5, 64) and lse.shape == (0, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    d = replace(SMALL, batch_size=257, num_states=9)
    outs, lses = make_states(d, device_of(backend))
    whole = merge(d, backend, outs, lses)
    for row in (0, 1, 100, 256):
        rows = slice(row, row + 1)
        alone = merge(replace(d, batch_size=1), backend, outs[:, rows], lses[:, rows])
        assert_bitwise(alone, (whole[0][rows], whole[1][rows]))


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_a_graph_and_a_side_stream_equal_an_eager_run(arch: str) -> None:
    d = replace(SMALL, num_states=9, batch_size=64)
    plan, (outs, lses) = select(d, arch), make_states(d, "cuda")
    out, lse = torch.empty(d.shape, dtype=d.dtype, device="cuda"), torch.empty(d.shape[:2], device="cuda")
    plan.run(outs, lses, out=out, lse=lse)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        plan.run(outs, lses, out=out, lse=lse)
    for seed in range(3):
        fresh = make_states(d, "cuda", seed)
        outs.copy_(fresh[0]), lses.copy_(fresh[1])
        eager = plan.run(outs, lses)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        assert_bitwise((out, lse), eager)
        side.wait_stream(torch.cuda.current_stream())
        streamed = plan.run(outs, lses, stream=side)
        torch.cuda.current_stream().wait_stream(side)
        assert_bitwise(streamed, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_a_batch_over_65535_and_offsets_past_32_bits(arch: str) -> None:
    d = ck.MergeStatesDescriptor(2, 70_000, 128, 128, BF16)
    outs = torch.empty(2, *d.shape, dtype=BF16, device="cuda")
    assert outs[1].numel() * 2 > 2**31 and outs.numel() > 2**31
    lses = torch.randn(2, *d.shape[:2], device="cuda")
    picked = [0, 1, 32_767, 65_535, 65_536, 69_999]
    outs[:, picked] = torch.randn(2, len(picked), *d.shape[1:], device="cuda").bfloat16()
    out, lse = select(d, arch).run(outs, lses)
    few = replace(d, batch_size=len(picked))
    assert_bitwise((out[picked], lse[picked]), merge(few, arch, outs[:, picked], lses[:, picked]))
    assert_close(few, (out[picked], lse[picked]), outs[:, picked], lses[:, picked])
