"""A contiguous cache whose length each run decides: few plans for many lengths, right at each; a stated length is held."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.api import plan_cache
from cute_kernels.attention.checks import MAX_TOKENS, MIN_TILE_N
from cute_kernels.checks.fields import MAX_EXTENT

F16, INT8, TOKEN = torch.float16, ck.KVDtype.INT8, ck.KVScale.TOKEN
ANY = ck.FlashDecodingDescriptor(2, 4, 2, None, 16, torch.float32, max_seq_len=64)


def f64(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its lse in f64, by scaled_dot_product_attention's definition and not by the reference's code."""
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    scores = torch.einsum("bhd,bhnd->bhn", q.double(), k.double()[:, heads]) * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    return torch.einsum("bhn,bhnd->bhd", (scores - lse[..., None]).exp(), v.double()[:, heads]), lse


def test_a_thousand_lengths_make_a_dozen_plans_and_are_right(no_plans: None) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8)
    k, v = torch.randn(2, 1, 1, 1000, 8)
    for length in range(1, 1001):
        got = ck.decode_attention(q, k[:, :, :length], v[:, :, :length])
        for ours, right in zip(got, f64(q, k[:, :, :length], v[:, :, :length]), strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-6)
    assert plan_cache.plan_of.cache_info().currsize <= 12


def test_hints_are_a_dozen_up_to_128k_and_bound_the_length() -> None:
    hints = [plan_cache.length_hint(tokens) for tokens in range(131_073)]
    assert len(set(hints)) == 12
    assert all(hint >= tokens and hint < max(2 * tokens, 65) for tokens, hint in enumerate(hints))
    assert plan_cache.length_hint(2**31 - 1) == MAX_EXTENT


def test_the_hint_reaches_the_choice() -> None:
    assert ANY.problem.max_seq_len == 64
    assert ck.FlashDecodingDescriptor(2, 4, 2, None, 16, F16).problem.max_seq_len is None
    assert ck.FlashDecodingDescriptor(2, 4, 2, 33, 16, F16).problem.max_seq_len == 33


def test_the_one_call_describes_a_power_of_two_and_no_length(no_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[ck.FlashDecodingDescriptor] = []
    select = ck.FlashDecodingPlan.select

    def record(descriptor: ck.FlashDecodingDescriptor, *chosen_by: object) -> ck.FlashDecodingPlan:
        described.append(descriptor)
        return select(descriptor, *chosen_by)

    monkeypatch.setattr(ck.FlashDecodingPlan, "select", record)
    for length in (60, 64, 65, 100, 128):
        cache = torch.zeros(2, 2, length, 16)
        ck.decode_attention(torch.zeros(2, 4, 16), cache, cache.clone())
    assert [(d.seq_len, d.max_seq_len) for d in described] == [(None, 64), (None, 128)]


@pytest.mark.parametrize(
    ("seq_len", "max_seq_len", "fragment"),
    [(5, 8, "max_seq_len = 8: must be None beside seq_len = 5"), (None, 0, "max_seq_len = 0"), (None, 2**31, "2**31 - 1")],
)
def test_bad_hints(seq_len: int | None, max_seq_len: int, fragment: str) -> None:
    with pytest.raises(ck.InvalidProblem) as caught:
        ck.FlashDecodingDescriptor(2, 4, 2, seq_len, 16, F16, max_seq_len=max_seq_len)
    assert fragment in str(caught.value)


def test_one_plan_runs_every_length_also_none_and_past_its_hint() -> None:
    torch.manual_seed(1)
    plan = ck.FlashDecodingPlan.select(ANY, "cpu")
    q = torch.randn(2, 4, 16)
    for length in (1, 64, 65, 500):
        k, v = torch.randn(2, 2, 2, length, 16)
        for ours, right in zip(plan.run(q, k, v), f64(q, k, v), strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-6)
    empty = torch.zeros(2, 2, 0, 16)
    out, lse = plan.run(q, empty, empty)
    assert not out.any() and (lse == -torch.inf).all()


def test_scales_a_token_follow_the_length() -> None:
    torch.manual_seed(2)
    descriptor = ck.FlashDecodingDescriptor(2, 4, 2, None, 16, torch.float32, kv_dtype=INT8, k_scale=TOKEN, v_scale=TOKEN)
    plan, q = ck.FlashDecodingPlan.select(descriptor, "cpu"), torch.randn(2, 4, 16)
    for length in (3, 40):
        k, v = torch.randint(-100, 100, (2, 2, 2, length, 16), dtype=torch.int8)
        scales = torch.rand(2, 2, 2, length) + 0.5
        got = plan.run(q, k, v, k_scale=scales[0], v_scale=scales[1])
        for ours, right in zip(got, f64(q, k * scales[0][..., None], v * scales[1][..., None]), strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-4)
        with pytest.raises(ck.InvalidProblem, match=r"k_scale\.shape"):
            plan.run(q, k, v, k_scale=scales[0][:, :, 1:], v_scale=scales[1])


def test_v_must_be_as_long_as_k() -> None:
    plan = ck.FlashDecodingPlan.select(ANY, "cpu")
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 2, 9, 16)
    with pytest.raises(ck.InvalidProblem, match=r"v_cache\.shape = \(2, 2, 8, 16\): must be k_cache's"):
        plan.run(q, k, k[:, :, :8])


def test_a_stated_length_is_held() -> None:
    plan = ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor(2, 4, 2, 9, 16, torch.float32), "cpu")
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 2, 10, 16)
    with pytest.raises(ck.InvalidProblem, match=r"k_cache\.shape = \(2, 2, 10, 16\): must be .*seq_len"):
        plan.run(q, k, k)


@pytest.mark.parametrize(
    ("batch", "length", "error", "fragment"),
    [
        (1, 2**31, ck.InvalidProblem, "must have a seq_len of at most 2**31 - 1"),
        (5, MAX_TOKENS // 5, ck.Unsupported, f"a batch must stay below {MAX_TOKENS:,}"),
    ],
)
def test_more_tokens_than_the_device_counts(batch: int, length: int, error: type[Exception], fragment: str) -> None:
    descriptor = ck.FlashDecodingDescriptor(batch, 1, 1, None, 1, F16, kv_dtype=INT8)
    plan = ck.FlashDecodingPlan.select(descriptor, "cpu")
    cache = torch.empty(length + batch, dtype=torch.int8).as_strided((batch, 1, length, 1), (1, 1, 1, 1))  # never touched
    with pytest.raises(error) as caught:
        plan.can_implement(torch.zeros(batch, 1, 1, dtype=F16), cache, cache)
    assert fragment in str(caught.value)


def test_a_table_with_room_for_more_tokens_than_the_device_counts() -> None:
    descriptor = ck.PagedDecodeDescriptor(2, 1, 1, 1, 2**24, F16, kv_dtype=INT8)
    plan = ck.PagedDecodePlan.select(descriptor, "cpu")
    cache, q = torch.zeros(1, 1, 2**24, 1, dtype=torch.int8), torch.zeros(2, 1, 1, dtype=F16)
    most = (MAX_TOKENS - 2 * MIN_TILE_N - 1) // 2**24 // 2  # columns
    for columns, fits in ((most, True), (most + 1, False)):
        table = ck.PageTable.dense(torch.zeros(2, columns, dtype=torch.int32), 5)
        if fits:
            plan.can_implement(q, cache, cache, table)
        else:
            with pytest.raises(ck.Unsupported, match=r"page_table\.table\.shape = \(2, 256\) has room for 8,589,934,592 tokens"):
                plan.can_implement(q, cache, cache, table)
