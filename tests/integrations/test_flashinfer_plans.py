"""What a plan() of FlashInfer's classes checks, keeps and leaves as it was; other names and forms of what they take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.integrations import flashinfer
from cute_kernels.integrations.flashinfer import cascade, decode, page, prefill
from tests.integrations.test_flashinfer import (
    DEVICES,
    DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    PAGE,
    ROWS,
    Paged,
    close,
    dense_row,
    indptr_of,
    random,
)

TOTAL, BATCH = sum(ROWS), len(LENGTHS)


def over_pages(paged: Paged, qo_indptr: Tensor | None = None, graph: list[Tensor] | None = None, **options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(paged.workspace(), "NHD", graph is not None, *(graph or ()))
    plan_pages(wrapper, paged, qo_indptr, **options)
    return wrapper


def plan_pages(wrapper: Any, paged: Paged, qo_indptr: Tensor | None = None, **options: Any) -> None:
    rows = indptr_of(ROWS) if qo_indptr is None else qo_indptr
    tables = options.pop("tables", paged.tables)
    wrapper.plan(rows, *tables, **{"head_dim_qk": DIM, "causal": True, **paged.sizes(), **options})


def over_tokens(paged: Paged, **options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(paged.workspace())
    types = {"q_data_type": paged.keys[0].dtype, "kv_data_type": paged.keys[0].dtype}
    wrapper.plan(indptr_of(ROWS), indptr_of(LENGTHS), HEADS, KV_HEADS, DIM, **{"causal": True, **types, **options})
    return wrapper


def packed(paged: Paged) -> tuple[Tensor, Tensor]:
    return torch.cat(paged.keys), torch.cat(paged.values)


def buffers(device: str = "cpu") -> list[Tensor]:
    return [torch.full((n,), -7, dtype=torch.int32, device=device) for n in (BATCH + 1, BATCH + 1, 40, BATCH)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, TOTAL - 1, TOTAL + 1])
def test_q_has_the_rows_that_an_indptr_on_the_host_says(rows: int, device: str) -> None:
    """Else the last rows of the output would be what the memory held before."""
    paged = Paged(device=device)
    q = random(rows, HEADS, DIM, device=device)
    for run in (partial(over_pages(paged).run, q, paged.cache), partial(over_tokens(paged).run, q, *packed(paged))):
        with pytest.raises(ck.InvalidProblem, match=rf"^q\.shape = \({rows}, .*must have {TOTAL} rows"):
            run()


@pytest.mark.gpu
def test_rows_past_an_indptr_on_the_device_are_padding() -> None:
    paged = Paged(device="cuda")
    q = random(TOTAL + 2, HEADS, DIM, device="cuda")
    out = torch.full_like(q, torch.nan)
    over_pages(paged, indptr_of(ROWS).cuda()).run(q, paged.cache, out=out)
    paged.check(out, None, q, ROWS)
    assert out[TOTAL:].isnan().all()


def test_a_bound_of_rows_that_a_request_exceeds() -> None:
    paged = Paged()
    for make in (over_pages, over_tokens):
        with pytest.raises(ck.InvalidProblem, match=r"^max_token_per_sequence = 3: must be at least 4"):
            make(paged, max_token_per_sequence=3)
    with pytest.raises(ck.InvalidProblem, match=r"^max_token_per_sequence = 3: must be at least 4"):
        over_pages(paged, graph=buffers(), max_token_per_sequence=3)
    q = random(TOTAL, HEADS, DIM)
    paged.check(*over_pages(paged, max_token_per_sequence=4).run(q, paged.cache, return_lse=True), q, ROWS)


def test_captured_launches_serve_every_later_plan() -> None:
    """The first plan()'s launch, replayed after each of the others, computes every row; a plan() that it cannot serve raises."""
    paged = Paged()
    wrapper = over_pages(paged, graph=buffers(), max_token_per_sequence=4)
    q, out = random(TOTAL, HEADS, DIM), torch.empty(TOTAL, HEADS, DIM)
    wrapper.run(q, paged.cache)
    (captured,) = wrapper._launches.values()
    for rows in ([4, 0, 3, 3], [1, 3, 4, 2], [2, 4, 2, 2]):
        plan_pages(wrapper, paged, indptr_of(rows))
        captured(q, paged.cache[:, 0], paged.cache[:, 1], out=out.fill_(torch.nan))
        paged.check(out, None, q, rows)
    with pytest.raises(ck.InvalidProblem, match=r"^qo_indptr\.diff\(\)\.max\(\) = 5: must be at most .* 4, the first plan\(\)'s"):
        plan_pages(wrapper, paged, indptr_of([5, 1, 2, 2]))
    with pytest.raises(
        ck.InvalidProblem, match=r"^max_token_per_sequence = None: must be given beside a qo_indptr on the device"
    ):
        wrapper._most_rows(indptr_of(ROWS).to("meta"), None)
    assert wrapper._most_rows(indptr_of(ROWS).to("meta"), 3) == 4


def state(wrapper: Any) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(wrapper).items()}


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_kv_heads": 4}, ck.InvalidProblem, "num_heads = 6"),
    ({"head_dim_qk": 512}, ck.Unsupported, "head_dim = 512"),
    ({"page_size": 0}, ck.InvalidProblem, "page_size = 0"),
    ({"max_token_per_sequence": 9}, ck.InvalidProblem, "max_token_per_sequence = 9"),
    ({"tables": (indptr_of([1] * BATCH), torch.arange(41).int(), torch.ones(BATCH).int())}, ck.InvalidProblem, "indices"),
    ({"qo_indptr": torch.arange(BATCH).int()}, ck.InvalidProblem, r"^qo_indptr\.shape"),
    ({"qo_indptr": [0, 1, 2, 3, 4]}, ck.InvalidArgument, "^qo_indptr: got list, must be a tensor of integers"),
    ({"qo_indptr": indptr_of(ROWS).float()}, ck.InvalidArgument, "^qo_indptr: has dtype torch.float32"),
]


OF_GRAPHS = {"max_token_per_sequence", "tables"}  # what is wrong beside buffers alone
BAD_PLANS = [(*bad, graph) for bad in BAD for graph in (True, False) if graph or not OF_GRAPHS & bad[0].keys()]


@pytest.mark.parametrize(
    ("changed", "error", "named", "graph"), BAD_PLANS, ids=[f"{next(iter(c))}-{g}" for c, _, _, g in BAD_PLANS]
)
def test_a_plan_that_fails_changes_nothing(changed: dict[str, Any], error: type[Exception], named: str, graph: bool) -> None:
    paged, fixed = Paged(), buffers()
    wrapper = over_pages(paged, graph=fixed if graph else None, max_token_per_sequence=4)
    q = random(TOTAL, HEADS, DIM)
    paged.check(*wrapper.run(q, paged.cache, return_lse=True), q, ROWS)
    before, held = state(wrapper), [buffer.clone() for buffer in fixed]
    others = (indptr_of([1] * BATCH), torch.arange(BATCH).int(), torch.ones(BATCH).int())
    with pytest.raises(error, match=named):
        plan_pages(wrapper, paged, **{"tables": others, "qo_indptr": indptr_of([1] * BATCH), **changed})
    after = state(wrapper)
    assert before.keys() == after.keys() and all(same(before[name], after[name]) for name in before)
    assert all(torch.equal(buffer, then) for buffer, then in zip(fixed, held, strict=True))
    paged.check(*wrapper.run(q, paged.cache, return_lse=True), q, ROWS)


def same(one: Any, other: Any) -> bool:
    """Whether a field is the same object, or a dict of the same ones."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return one is other


def test_decode_and_a_forward_that_fail_change_nothing() -> None:
    paged = Paged()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(paged.workspace())
    wrapper.plan(*paged.tables, head_dim=DIM, **paged.sizes())
    q = random(BATCH, HEADS, DIM)
    for changed in ({"q_len_per_req": 0}, {"q_len_per_req": 2, "num_kv_heads": 4}, {"num_kv_heads": 4}):
        with pytest.raises(ck.InvalidProblem):
            wrapper.plan(indptr_of([1]), torch.zeros(1).int(), torch.ones(1).int(), head_dim=DIM, **{**paged.sizes(), **changed})
        paged.check(*wrapper.run(q, paged.cache, return_lse=True), q, [1] * BATCH)
    with pytest.raises(ck.InvalidProblem, match="softmax_scale"):
        wrapper.forward(q, paged.cache, sm_scale=-1.0)
    paged.check(*wrapper.run(q, paged.cache, return_lse=True), q, [1] * BATCH)
    for number, wrong in enumerate(([0, 1], torch.zeros(2), torch.zeros(3).int())):
        for position in (0, 2):
            tables: list[Any] = list(paged.tables)
            tables[position] = wrong
            with pytest.raises((ck.InvalidArgument, ck.InvalidProblem)[number == 2], match=r"^(indptr|last_page_len)"):
                wrapper.plan(*tables, head_dim=DIM, **paged.sizes())


@pytest.mark.parametrize("device", DEVICES)
def test_the_older_verbs_of_packed_tokens(device: str) -> None:
    """What `forward` says of scores takes the place of what was planned."""
    paged = Paged(device=device)
    q, kv, wrapper = random(TOTAL, HEADS, DIM, device=device), packed(paged), over_tokens(paged, causal=False)
    paged.check(wrapper.forward(q, *kv, True), None, q, ROWS)
    paged.check(*wrapper.forward_return_lse(q, *kv, False, "NONE", False, 4, 1.5, 0.3), q, ROWS, causal=False,
                window_left=4, logits_soft_cap=1.5, sm_scale=0.3)  # fmt: skip
    paged.check(*wrapper.forward_return_lse(q, *kv, causal=True, return_lse=True), q, ROWS)
    with pytest.raises(ck.Unsupported, match=r"^use_fp16_qk_reduction"):
        wrapper.forward(q, *kv, use_fp16_qk_reduction=True)


@pytest.mark.parametrize("device", DEVICES)
def test_fast_decode_plan_takes_the_place_of_plan(device: str) -> None:
    """As an engine puts it there, with its own wrapper."""
    paged = Paged(device=device)
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(paged.workspace(), use_tensor_cores=True)
    wrapper.begin_forward = partial(flashinfer.fast_decode_plan, wrapper)
    dtype = paged.keys[0].dtype
    more = {"data_type": dtype, "q_data_type": dtype, "non_blocking": True, "fixed_split_size": None, "disable_split_kv": False}
    host = paged.indptr.cpu()
    wrapper.begin_forward(*paged.tables, HEADS, KV_HEADS, DIM, PAGE, "NONE", 6, 1.5, **more, global_override_indptr_cpu=host)
    q = random(BATCH, HEADS, DIM, device=device)
    got = wrapper.run(q, paged.cache, return_lse=True)
    paged.check(*got, q, [1] * BATCH, window_left=6, logits_soft_cap=1.5)
    wrapper.begin_forward(*paged.tables, HEADS, KV_HEADS, DIM, PAGE, sm_scale=0.3, q_len_per_req=2, **more)
    q = random(2 * BATCH, HEADS, DIM, device=device)
    paged.check(*wrapper.run_return_lse(q, paged.cache, return_lse=True), q, [2] * BATCH, sm_scale=0.3)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_and_packed_tokens_of_any_strides(device: str) -> None:
    def turned(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    paged = Paged(device=device)
    q, kv = random(TOTAL, HEADS, DIM, device=device), packed(paged)
    paged.check(*over_pages(paged).run(turned(q), paged.cache, return_lse=True), q, ROWS)
    paged.check(*over_tokens(paged).run(turned(q), *map(turned, kv), return_lse=True), q, ROWS)
    with pytest.raises(ck.Unsupported, match=r"k_cache\.stride"):
        over_pages(paged).run(q, turned(paged.cache))
    last = LENGTHS[-1] - 1
    out = flashinfer.single_decode_with_kv_cache(turned(q)[-1], paged.keys[-1], paged.values[-1])
    close(out, dense_row(q[-1], paged.keys[-1], paged.values[-1], last)[0])
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(turned(q)[-2:], paged.keys[-1], paged.values[-1], causal=True)
    for row in range(2):
        expected, expected_lse = dense_row(q[-2 + row], paged.keys[-1], paged.values[-1], last - 1 + row)
        close(out[row], expected), close(lse[row], expected_lse)


def test_a_batch_without_rows() -> None:
    paged = Paged()
    none = [0] * BATCH
    out, lse = over_pages(paged, indptr_of(none)).run(random(0, HEADS, DIM), paged.cache, return_lse=True)
    assert (out.shape, lse.shape) == ((0, HEADS, DIM), (0, HEADS))


def test_a_workspace_changes_nothing_but_its_device_counts() -> None:
    paged = Paged()
    wrapper, q = over_pages(paged), random(TOTAL, HEADS, DIM)
    wrapper.reset_workspace_buffer(torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8))
    paged.check(wrapper.run(q, paged.cache), None, q, ROWS)
    with pytest.raises(ck.InvalidArgument, match=r"^float_workspace_buffer: is on meta, must be on cpu"):
        wrapper.reset_workspace_buffer(torch.empty(8, device="meta"), torch.empty(8))


def test_names_are_in_the_modules_that_programs_import() -> None:
    homes = {
        prefill: ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "single_prefill_with_kv_cache"),
        decode: ("BatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan", "single_decode_with_kv_cache"),
        page: ("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
        cascade: ("MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states"),
    }
    for module, names in homes.items():
        assert all(getattr(module, name) is getattr(flashinfer, name) for name in names)


class Levels:
    """Pages of 3 requests behind one prefix of two pages; two of them share a further page. All of them in one cache."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.rows, self.device = [2, 1, 3], device
        self.cache = random(9, 2, PAGE, KV_HEADS, DIM, device=device)
        self.pages = torch.tensor([4, 0, 7, 2, 8, 1, 3]).int().to(device)
        self.qo = [indptr_of(rows) for rows in ([6], [3, 3], self.rows)]
        self.indptr = [indptr_of(counts).to(device) for counts in ([2], [1, 0], [1, 2, 1])]
        self.indices = [self.pages[:2], self.pages[2:3], self.pages[3:]]
        self.last = [torch.tensor(last).int().to(device) for last in ([PAGE], [PAGE, 0], [3, 1, 4])]
        tables, lengths = ([4, 0, 7, 2], [4, 0, 7, 8, 1], [4, 0, 3]), (3 * PAGE + 3, 4 * PAGE + 1, 2 * PAGE + 4)
        self.held = [(self.cache[table].transpose(0, 1).flatten(1, 2)[:, :n]) for table, n in zip(tables, lengths, strict=True)]

    def plan(self, wrapper: Any, *scores: Any, **options: Any) -> None:
        types = {"q_data_type": self.cache.dtype, "kv_data_type": self.cache.dtype}
        tables = (self.qo, self.indptr, self.indices, self.last)
        wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, *scores, **{**types, **options})

    def check(self, out: Tensor, q: Tensor, **scores: Any) -> None:
        first = 0
        for n, (keys, values) in zip(self.rows, self.held, strict=True):
            for i in range(n):
                close(out[first + i], dense_row(q[first + i], keys, values, len(keys) - n + i, **scores)[0])
            first += n


@pytest.mark.parametrize("device", DEVICES)
def test_levels_of_pages_are_merged(device: str) -> None:
    """Beside dense attention of each row over all the pages of its request; the second level has a request without pages."""
    levels = Levels(device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, torch.empty(0, device=device), "NHD")
    q = random(6, HEADS, DIM, device=device)
    levels.plan(wrapper, True)
    levels.check(wrapper.run(q, levels.cache), q)
    levels.check(wrapper.forward(q, (levels.cache[:, 0], levels.cache[:, 1])), q)
    levels.plan(wrapper, True, "NONE", False, 0.3, -1, 1.5)
    levels.check(wrapper.run(q, levels.cache), q, sm_scale=0.3, logits_soft_cap=1.5)
    levels.plan(wrapper, sm_scale=0.2)
    levels.check(wrapper.run(q, levels.cache), q, sm_scale=0.2, causal=False)
    wrapper.reset_workspace_buffer(torch.empty(0, device=device), [])
    wrapper.end_forward()


def test_a_plan_of_levels_that_fails_changes_none() -> None:
    levels = Levels("cpu")
    fixed = [[torch.zeros(n).int() for n in sizes] for sizes in ((2, 3, 4), (2, 3, 4), (4, 4, 8), (1, 2, 3))]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, torch.empty(0), "NHD", True, *fixed)
    assert wrapper.is_cuda_graph_enabled
    levels.plan(wrapper, True)
    q = random(6, HEADS, DIM)
    levels.check(wrapper.run(q, levels.cache), q)
    held = [[buffer.clone() for buffer in level] for level in fixed]
    good, levels.indptr = levels.indptr, [indptr_of([1]), indptr_of([0, 1]), indptr_of([1])]
    with pytest.raises(ck.InvalidProblem, match=r"^paged_kv_indptr\.shape"):
        levels.plan(wrapper, True)
    assert all(
        torch.equal(one, other) for some, others in zip(fixed, held, strict=True) for one, other in zip(some, others, strict=True)
    )
    levels.check(wrapper.run(q, levels.cache), q)
    levels.indptr = good[:2]
    with pytest.raises(ck.InvalidProblem, match=r"^len\(paged_kv_indptr_arr\) = 2: must be num_levels = 3"):
        levels.plan(wrapper, True)
    with pytest.raises(ck.InvalidProblem, match=r"^len\(qo_indptr_buf_arr\) = 3"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0), "NHD", True, *fixed)
    with pytest.raises(ck.InvalidArgument, match=r"^qo_indptr_buf"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0), "NHD", True)
