"""What flash-attention's functions refuse, by name, and what a call costs beside its plan's run."""

from __future__ import annotations

import timeit
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.api.workspace_cache import stream_workspace
from cute_kernels.attention.attention_plan import PagedAttentionPlan
from cute_kernels.integrations.flash_attn import attend as attend_module
from cute_kernels.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.support.bits import same_bits
from tests.support.flash_attention import filled

SHARE_OF_THE_RUN = 0.8  # what a call costs beside its plan's run, which has no launch and allocates outputs: measured 0.43
HEADS, DIM = 4, 64


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(**changed: Any) -> Any:
    """A good call over pages, but for what is changed."""
    cache = filled((5, 33), "cpu", page_size=16, spare=4)
    good = {"q": torch.randn(2, 1, HEADS, DIM).bfloat16(), "k_cache": cache.k, "v_cache": cache.v}
    return flash_attn_with_kvcache(**{**good, "cache_seqlens": cache.lengths, "page_table": cache.page_table, **changed})


K = torch.zeros(2, 1, 2, DIM, dtype=torch.bfloat16)
ROWS = torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16)
ANGLES = torch.zeros(80, 16)
BYTES = dict.fromkeys(("k_cache", "v_cache"), filled((5, 33), "cpu", page_size=16, dtype=torch.float8_e4m3fn).k)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"qv": K}, ck.Unsupported, "qv"),
    ({"attention_chunk": 16}, ck.Unsupported, "attention_chunk"),
    ({"dropout_p": 0.1}, ck.Unsupported, "dropout_p"),
    ({"seqused_q": ints(1, 1)}, ck.Unsupported, "seqused_q"),
    ({**BYTES, "k_descale": torch.ones(2, 2)}, ck.Unsupported, "k_descale"),
    ({**BYTES, "v_descale": torch.ones(2, 2)}, ck.Unsupported, "v_descale"),
    ({**BYTES, "k_descale": torch.ones(3)}, ck.InvalidProblem, "^k_descale"),
    ({"alibi_slopes": torch.ones(2, HEADS)}, ck.Unsupported, "alibi_slopes"),
    ({"q": torch.zeros(2, 1, HEADS, DIM, dtype=torch.float8_e4m3fn)}, ck.Unsupported, r"^q\.dtype"),
    ({"q": torch.zeros(2, 1, HEADS, DIM, requires_grad=True)}, ck.Unsupported, r"q\.requires_grad"),
    ({"q": None}, ck.InvalidArgument, "q"),
    ({"q": torch.zeros(2, HEADS, DIM).bfloat16()}, ck.InvalidProblem, "q.shape"),
    ({"window_size": 7}, ck.InvalidProblem, "window_size"),
    ({"window_size": (7,)}, ck.InvalidProblem, "window_size"),
    ({"sm_margin": -1}, ck.InvalidProblem, "sm_margin"),
    ({"sm_margin": 1}, ck.InvalidProblem, "sm_margin"),  # of the CPU's one
    ({"softcap": -1.0}, ck.InvalidProblem, "softcap"),
    ({"cache_seqlens": -1}, ck.InvalidProblem, "cache_seqlens"),
    ({"cache_seqlens": ints(5, 33).long()}, ck.InvalidArgument, "^cache_seqlens"),
    ({"cache_seqlens": ints(5, 33, 1)}, ck.InvalidProblem, "^cache_seqlens"),
    ({"cache_seqlens": True}, ck.InvalidProblem, "cache_seqlens = True"),
    ({"page_table": ints(0, 1)}, ck.InvalidProblem, "page_table"),
    ({"page_table": torch.zeros(2, 4).long()}, ck.InvalidArgument, "^page_table: has dtype torch.int64"),
    ({"page_table": None, "block_table": torch.zeros(2, 4).long()}, ck.InvalidArgument, "^block_table: has dtype torch.int64"),
    ({"page_table": None, "block_table": ints(0, 1)}, ck.InvalidProblem, r"^block_table\.shape"),
    ({"q": ROWS, "cu_seqlens_q": ints(0, 1, 2).long(), "max_seqlen_q": 1}, ck.InvalidArgument, "^cu_seqlens_q: has dtype"),
    ({"s_aux": torch.ones(3)}, ck.InvalidProblem, r"^s_aux\.shape"),
    ({"learnable_sink": torch.ones(3)}, ck.InvalidProblem, r"^learnable_sink\.shape"),
    ({"causal": torch.tensor([True])}, ck.InvalidArgument, "^causal: is a tensor"),
    ({"causal": [True]}, ck.InvalidArgument, "^causal: is .True., must be True or False"),
    ({"causal": 2}, ck.InvalidArgument, "^causal: is 2"),
    ({"softcap": torch.tensor(1.0)}, ck.InvalidArgument, "^softcap: is a tensor"),
    ({"softmax_scale": torch.tensor(1.0)}, ck.InvalidArgument, "^softmax_scale: is a tensor"),
    ({"softmax_scale": "0.1"}, ck.InvalidProblem, "^softmax_scale"),
    ({"sm_margin": torch.tensor(0)}, ck.InvalidArgument, "^sm_margin: is a tensor"),
    ({"window_size": (torch.tensor(7), 0)}, ck.InvalidArgument, "^window_size: is a tensor"),
    ({"window_size": torch.ones(2, device="meta")}, ck.InvalidArgument, "^window_size: is a tensor"),
    ({"window_size": (7.5, 0)}, ck.InvalidProblem, "^window_size"),
    ({"fa_version": 5}, ck.Unsupported, "^fa_version = 5"),
    ({"q_v": K}, ck.Unsupported, "^q_v"),
    ({"cp_world_size": 2}, ck.Unsupported, "^cp_world_size = 2"),
    ({"cp_rank": 1}, ck.Unsupported, "^cp_rank = 1"),
    ({"cp_tot_seqused_k": ints(5, 33)}, ck.Unsupported, "^cp_tot_seqused_k"),
    ({"q": ROWS[:, None][:, :0], "out": ROWS}, ck.InvalidProblem, r"^out\.shape"),
    ({"k": K, "v": K, "rotary_cos": ANGLES, "rotary_sin": ANGLES, "rotary_interleaved": torch.ones(1)}, ck.InvalidArgument,
     "^rotary_interleaved: is a tensor"),
    ({"block_table": ints(0, 1)}, ck.InvalidArgument, "block_table"),
    ({"cache_batch_idx": ints(0)}, ck.InvalidProblem, "cache_batch_idx"),
    ({"cache_leftpad": ints(0, 1).long()}, ck.InvalidArgument, "cache_leftpad"),
    ({"rotary_cos": ANGLES, "rotary_sin": ANGLES}, ck.InvalidArgument, "rotary_cos"),
    ({"k": K}, ck.InvalidArgument, "v: is None"),
    ({"k": K, "v": K, "cache_seqlens": None}, ck.InvalidArgument, "cache_seqlens"),
    ({"k": K.to(torch.float8_e4m3fn), "v": K}, ck.Unsupported, "k.dtype"),
    ({"k": K[:1], "v": K[:1]}, ck.InvalidProblem, "k.shape"),
    ({"k": K[:, 0], "v": K[:, 0], "cu_seqlens_k_new": ints(0, 1)}, ck.InvalidProblem, "cu_seqlens_k_new"),
    ({"k": K, "v": K, "rotary_cos": ANGLES, "rotary_sin": ANGLES[:1]}, ck.InvalidProblem, "rotary_cos"),
    ({"k": K, "v": K, "rotary_cos": ANGLES}, ck.InvalidArgument, "rotary_sin"),
    ({"max_seqlen_q": 1.5, "cu_seqlens_q": ints(0, 1, 2), "q": ROWS}, ck.InvalidProblem, "max_seqlen_q"),
    ({"max_seqlen_q": torch.tensor(1.5), "cu_seqlens_q": ints(0, 1, 2), "q": ROWS}, ck.InvalidProblem, "max_seqlen_q = 1.5"),
    ({"max_seqlen_q": ints(1, 1), "cu_seqlens_q": ints(0, 1, 2), "q": ROWS}, ck.InvalidArgument, "max_seqlen_q: is a tensor"),
    ({"max_seqlen_q": -1, "cu_seqlens_q": ints(0, 1, 2), "q": ROWS}, ck.InvalidProblem, "max_seqlen_q = -1"),
    ({"headdim": 3}, TypeError, "headdim"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "named"), REFUSED, ids=[f"{'-'.join(c)}" for c, _, _ in REFUSED])
def test_refused(changed: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        call(**changed)


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    cache = filled((5, 33), "cpu", page_size=16, spare=4, dtype=torch.float8_e4m3fn)
    before = cache.k.clone()
    with pytest.raises(ck.Unsupported, match="k_descale"):
        call(k_cache=cache.k, v_cache=cache.v, k=K + 1, v=K + 1, k_descale=torch.ones(2, 2))
    assert same_bits(cache.k, before)


def test_no_gradient_is_no_obstacle_where_none_is_recorded() -> None:
    q = torch.randn(2, 1, HEADS, DIM).bfloat16().requires_grad_()
    with torch.no_grad():
        assert torch.equal(call(q=q), call(q=q.detach()))
    with pytest.raises(ck.Unsupported, match="requires_grad"):
        call(q=q)


PAGED = {**dict.fromkeys("kv", torch.zeros(4, 16, 2, DIM).bfloat16()), "cu_seqlens_k": None, "block_table": ints(1, 1)[:, None]}
VARLEN_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens_q": None}, ck.InvalidArgument, "cu_seqlens_q"),
    ({"cu_seqlens_k": None}, ck.InvalidArgument, "cu_seqlens_k"),
    ({"seqused_k": ints(1, 1)}, ck.Unsupported, "seqused_k"),
    ({"seqused_q": ints(1, 1)}, ck.Unsupported, "seqused_q"),
    ({"cu_seqlens_k": None, "page_table": ints(1, 1)[:, None]}, ck.InvalidArgument, "seqused_k"),
    ({"cu_seqlens_q": ints(0, 2, 4).long()}, ck.InvalidArgument, "^cu_seqlens_q: has dtype torch.int64"),
    ({"cu_seqlens_k": ints(0, 3, 6).long()}, ck.InvalidArgument, "^cu_seqlens_k: has dtype torch.int64"),
    ({"cu_seqlens_k": [0, 3, 6]}, ck.InvalidArgument, "^cu_seqlens_k: got list"),
    ({"cu_seqlens_k": [0, 3], "block_table": ints(1, 1)[:, None]}, ck.InvalidArgument, "^cu_seqlens_k: got list"),
    ({**PAGED, "seqused_k": ints(1, 1).long()}, ck.InvalidArgument, "^seqused_k: has dtype torch.int64"),
    ({**PAGED, "cu_seqlens_k": ints(0, 3, 6).long()}, ck.InvalidArgument, "^cu_seqlens_k: has dtype torch.int64"),
    (
        {**PAGED, "seqused_k": ints(1, 1), "block_table": ints(1, 1)[:, None].long()},
        ck.InvalidArgument,
        "^block_table: has dtype",
    ),
    ({"k": torch.zeros(6, 2, DIM).long()}, ck.InvalidArgument, "^k: has dtype torch.int64"),
]


@pytest.mark.parametrize(("changed", "error", "named"), VARLEN_REFUSED, ids=["-".join(c) for c, _, _ in VARLEN_REFUSED])
def test_varlen_refused(changed: dict[str, Any], error: type[Exception], named: str) -> None:
    q, k = torch.randn(4, HEADS, DIM).bfloat16(), torch.randn(6, 2, DIM).bfloat16()
    good = {"q": q, "k": k, "v": k, "cu_seqlens_q": ints(0, 2, 4), "cu_seqlens_k": ints(0, 3, 6)}
    with pytest.raises(error, match=named):
        flash_attn_varlen_func(**{**good, **changed})


def test_dense_refuses_gradients() -> None:
    q = torch.zeros(1, 2, HEADS, DIM)
    with pytest.raises(ck.Unsupported, match=r"v\.requires_grad"):
        flash_attn_func(q, q, q.clone().requires_grad_())


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No plan is kept under a key; and no stream is captured, which a machine without a GPU cannot say."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    attend_module.forget_plans()
    yield
    attend_module.forget_plans()


def test_one_plan_for_calls_alike(no_plans: None, no_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors, lengths and numbers of packed rows and keys take the plan that is there; another mask takes another."""
    made: list[Any] = []
    real = attend_module.attention_plan
    monkeypatch.setattr(attend_module, "attention_plan", lambda *given, **named: (made.append(given), real(*given, **named))[1])
    for lengths in (ints(5, 33), ints(1, 2)):
        call(cache_seqlens=lengths)
    assert len(made) == 1
    call(causal=True)
    assert len(made) == 2
    for rows, keys in ((4, 6), (5, 9)):
        q, k = torch.randn(rows, HEADS, DIM).bfloat16(), torch.randn(keys, 2, DIM).bfloat16()
        flash_attn_varlen_func(q, k, k, ints(0, 2, rows), ints(0, 3, keys), 4, 16)
    assert len(made) == 3


def test_sms_are_left_to_others(pretend_h200: list, no_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ck.DeviceFacts("cuda", "NVIDIA H200", (9, 0), 132)
    monkeypatch.setattr("cute_kernels.integrations.flash_attn.arguments.DeviceFacts.of", lambda _: facts)
    seen: list[ck.PlanPreference] = []
    select = PagedAttentionPlan.select
    chosen = lambda descriptor, device, preference: (seen.append(preference), select(descriptor, device, preference))[1]  # noqa: E731
    monkeypatch.setattr(PagedAttentionPlan, "select", chosen)
    call(sm_margin=32)
    assert seen == [ck.PlanPreference(sm_count=100)]


def test_a_call_costs_little_beside_the_run(pretend_h200: list, no_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = filled((5, 33), "cpu", page_size=16), torch.randn(2, 1, HEADS, DIM).bfloat16()
    table = ck.PageTable.dense(cache.page_table, cache.lengths)
    plans: list[Any] = []
    real = attend_module.attention_plan
    monkeypatch.setattr(
        attend_module, "attention_plan", lambda *given, **named: (plans.append(real(*given, **named)), plans[-1])[1]
    )

    def ours() -> None:
        flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.page_table, causal=True)

    ours()
    (plan,) = plans
    monkeypatch.setattr(plan, "_launch", lambda *_: None)
    row = q[:, 0]
    workspace = stream_workspace(plan.workspace_size(), plan.device)
    calls = (ours, lambda: plan.run(row, cache.k, cache.v, table, workspace=workspace))
    times = [[timeit.timeit(call, number=50) for call in calls] for _ in range(120)]  # in turn: a busy machine slows both
    call, run = (min(column) for column in zip(*times, strict=True))
    assert call - run < SHARE_OF_THE_RUN * run, (call / 50, run / 50)
