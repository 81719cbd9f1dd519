"""Cases of attention, of several query rows or modified scores: names, bytes, bars, their reference, and ours on them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from perf.attention_cases import FEW_ROWS_BAR, VERIFY_BAR, modifier_cases, verify_cases
from perf.case_sets import bar_of, case_sets, select_cases
from perf.cases import PLAIN, WIDE, Bar, Case, Rows, attention_case, fixed
from perf.correctness import OURS, PEERS, attention_f64, check, reference_of
from perf.inputs import Inputs, make_inputs
from perf.measure import DEVICE, Limits, measure
from perf.prefill_cases import CONTIGUOUS
from perf.providers import Candidate, providers_of
from perf.providers.ours import OursAttention, OursPlain, OursWide
from perf.providers.read import ReadAttention, vectors
from perf.record import case_fields, plain
from perf.records import parse_case
from perf.scores import chain_rows, packed, tree_rows
from tests.support.perf_fakes import Fake, FakeClock, Timed

CPU = torch.device("cpu")
SMALL = attention_case(Rows(((2, 9), (1, 40))), num_heads=4, num_kv_heads=2, head_dim=16, page_size=4)
ALL_AT_ONCE = {"q_len": 4, "window_left": 3, "softcap": 1.0, "alibi": True, "sinks": True}
CHANGES = (
    {"q_len": 3},
    {"q_len": 3, "query": "ragged"},
    {"q_len": 1},
    {"window_left": 5},
    {"softcap": 2.0},
    {"alibi": True},
    {"sinks": True},
    {"q_len": 4, "tree_mask": True},
    {"q_len": 4, "tree_mask": True, "window_left": 6, "alibi": True},
    ALL_AT_ONCE,
    {"softcap": 2.0, "kv_dtype": "e4m3", "layout": "NHD"},
    {"q_len": 3, "kv_dtype": "int8", "kv_scale": "token-f16", "table_format": "csr"},
)
CASES = tuple(replace(SMALL, **change) for change in CHANGES)
IDS = ["-".join(case.score_labels) + (case.kv_dtype or "") for case in CASES]


def inputs_of(case: Case) -> Inputs:
    return make_inputs(case, CPU, memory_bytes=2**24, rotated_bytes=3 * case.kv_bytes)


def limits_of(case: Case) -> Limits:
    return Limits(replays=15, trials=2, memory_bytes=2**24, rotated_bytes=3 * case.kv_bytes, host_calls=0)


def tree_bit(inputs: Inputs, request: int, i: int, j: int) -> bool:
    """Whether query row i of a request sees its new token j, read word by word."""
    words = inputs.operands.tree_mask[request * inputs.case.q_rows + i].tolist()
    return bool((words[j // 32] & 0xFFFFFFFF) >> j % 32 & 1)


def expected(inputs: Inputs, index: int, request: int, i: int, head: int) -> tuple[torch.Tensor, float]:
    """(out, lse) of one query row and head: a loop over the keys, by the words of the meanings."""
    case, n = inputs.case, inputs.case.q_rows
    q = inputs.sets[index].q.reshape(-1, case.num_heads, case.head_dim)[request * n + i, head].double()
    k, v = (c[head * case.num_kv_heads // case.num_heads].double() for c in inputs.row(index, request))
    tokens = len(k)
    p = tokens - n + i
    scores, values = [], []
    for t in range(tokens):
        new = t - (tokens - n)
        if t > p and not case.tree_mask:
            continue
        if case.tree_mask and new >= 0 and not tree_bit(inputs, request, i, new):
            continue
        if case.window_left is not None and t < p - case.window_left:
            continue
        score = inputs.softmax_scale * float(q @ k[t])
        if case.softcap:
            score = case.softcap * math.tanh(score / case.softcap)
        if case.alibi:
            score -= 2.0 ** (-8 * (head + 1) / case.num_heads) * abs(p - t)
        scores.append(score)
        values.append(v[t])
    terms = [*scores, float(inputs.operands.sinks[head])] if case.sinks else scores
    lse = math.log(math.fsum(math.exp(term) for term in terms))
    return sum(math.exp(s - lse) * value for s, value in zip(scores, values, strict=True)), lse


@pytest.mark.parametrize("chunk", [1, 10**6])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_reference_is_that_of_each_query_row_by_itself(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.correctness.CHUNK", chunk)
    inputs = inputs_of(case)
    reference = reference_of(inputs, 1)
    assert reference.out.shape == (3 * case.q_rows, 4, 16) and reference.lse.shape == (3 * case.q_rows, 4)
    for row in range(3 * case.q_rows):
        for head in range(4):
            out, lse = expected(inputs, 1, *divmod(row, case.q_rows), head)
            torch.testing.assert_close(reference.out[row, head], out, rtol=1e-6, atol=1e-7)  # slopes are f32
            assert float(reference.lse[row, head]) == pytest.approx(lse, rel=1e-6, abs=1e-7)
    assert 0 < float((reference.torch_norm / reference.norm).max()) < 2**-7, "PyTorch rounds once"


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ours_passes_the_gate_beside_plain_decode(case: Case) -> None:
    """With NaN in every slot that no row owns; the plain one is judged as decode of the same caches."""
    outcomes = measure(case, [OursAttention(), OursPlain()], limits_of(case), FakeClock(), CPU)
    assert [(o.provider, o.metric) for o in outcomes] == [(p, m) for m in (DEVICE, "in_stream") for p in ("ours", PLAIN)]
    for outcome in outcomes:
        assert outcome.reason == "" and outcome.gate.passed and outcome.gate.tolerance == OURS, outcome
        assert outcome.gate.lse_error < 1e-6 and outcome.ratio_to_plain == 1.0
    operation = "paged_attention" if case.q_len else "paged_decode"
    assert [outcome.detail["sku"].operation for outcome in outcomes[:2]] == [operation, "paged_decode"]


MISTAKES = {
    "a window that is one key too wide": ({"window_left": 5}, {"window_left": 6}),
    "no soft cap": ({"softcap": 0.5}, {"softcap": None}),
    "another cap": ({"softcap": 0.5}, {"softcap": 0.6}),
    "no slopes": ({"alibi": True}, {"alibi": None}),
    "no sinks": ({"sinks": True}, {"sinks": None}),
    "a chain in place of a tree": ({"q_len": 4, "tree_mask": True}, {"tree_mask": None}),
}
OPERANDS = {"alibi": "alibi_slopes", "sinks": "sinks", "tree_mask": "tree_mask"}


@pytest.mark.parametrize(("change", "mistake"), MISTAKES.values(), ids=MISTAKES.keys())
def test_the_gate_finds(change: dict, mistake: dict) -> None:
    """What a result with another mask or modifier would be, beside what it has to be."""
    inputs = inputs_of(replace(SMALL, **change))
    right, dtype = reference_of(inputs, 0), inputs.sets[0].q.dtype
    dropped = replace(inputs.operands, **{OPERANDS[name]: None for name in mistake if name in OPERANDS})
    wrong = reference_of(replace(inputs, case=replace(inputs.case, **mistake), operands=dropped), 0)
    for tolerance in (OURS, PEERS):
        assert check(inputs, 0, right.out.to(dtype), right.lse.float(), tolerance).passed
        result = check(inputs, 0, wrong.out.to(dtype), None, tolerance)
        assert not result.passed and result.used > 1, tolerance


def test_the_gate_finds_query_rows_that_see_later_tokens() -> None:
    inputs = inputs_of(replace(SMALL, q_len=3))
    rows = [(inputs.sets[0].q[row, i], *inputs.row(0, row)) for row in range(3) for i in range(3)]
    out = torch.stack([attention_f64(*operands, inputs.softmax_scale)[0] for operands in rows]).bfloat16()
    result = check(inputs, 0, out, None, PEERS)
    assert not result.passed and "row 2" not in result.reason, "the last row of a request sees all"


def test_results_in_either_shape_are_compared_and_others_are_not() -> None:
    inputs = inputs_of(replace(SMALL, q_len=3))
    reference = reference_of(inputs, 0)
    out, lse = reference.out.bfloat16(), reference.lse.float()
    assert check(inputs, 0, out, lse, OURS).passed
    assert check(inputs, 0, out.view(3, 3, 4, 16), lse, OURS).passed
    for shape in ((9, 64), (9, 4, 16, 1), (3, 12, 16)):
        assert "do not fit" in check(inputs, 0, out.reshape(shape), None, OURS).reason
    assert "do not fit" in check(inputs, 0, out, lse[:6], OURS).reason


def test_plain_inputs_are_the_same_caches() -> None:
    inputs = inputs_of(replace(SMALL, q_len=3))
    plain_inputs = inputs.plain()
    assert plain_inputs.case == Case(4, 2, 16, 4, SMALL.lengths) and plain_inputs.pages is inputs.pages
    for s, of_plain in zip(inputs.sets, plain_inputs.sets, strict=True):
        assert of_plain.k is s.k and of_plain.v is s.v and torch.equal(of_plain.q, s.q[:, -1])


WIDENED = (
    {"kv_dtype": "int8", "kv_scale": "token-f16"},
    {"kv_dtype": "int8", "kv_scale": "head", "layout": "NHD"},
    {"kv_dtype": "e4m3", "kv_scale": "token", "layout": "NHD"},
    {"kv_dtype": "e5m2", "kv_scale": "head"},
    {"kv_dtype": "e4m3"},
    {"kv_dtype": "int8", "kv_scale": "token", "lengths": fixed(3, 40), **CONTIGUOUS},
    {"kv_dtype": "int8", "kv_scale": "head", "lengths": fixed(3, 40), **CONTIGUOUS},
)


@pytest.mark.parametrize("change", WIDENED, ids=["-".join(map(str, change.values())) for change in WIDENED])
def test_wide_inputs_hold_the_same_values(change: dict) -> None:
    """Of every row, as the reference finds it, and NaN in the slots that no row owns, or what an int8 has there."""
    inputs = inputs_of(replace(SMALL, q_len=3, **change))
    wide = inputs.wide()
    assert wide.case == replace(inputs.case, kv_dtype=None, kv_scale=None) and wide.pages is inputs.pages
    assert all(of_wide.q is s.q for s, of_wide in zip(inputs.sets, wide.sets, strict=True))
    for row in range(3):
        for values, real in zip(wide.row(1, row), inputs.row(1, row), strict=True):
            assert values.dtype == torch.bfloat16
            torch.testing.assert_close(values.double(), real, rtol=2**-8, atol=0.0)
    if inputs.pages is not None:
        k = wide.sets[1].k
        dead = (k.transpose(1, 2) if inputs.case.layout == "HND" else k)[inputs.pages.unused]
        assert bool(dead.isnan().all()) or inputs.case.kv_dtype == "int8"


def test_long_queries_over_8_bits_are_timed_beside_16_bits() -> None:
    """Judged on the rounded values, and refused where a comparison says nothing."""
    case = attention_case(
        fixed(1, 300), q_len=256, num_heads=2, num_kv_heads=1, head_dim=16, page_size=4, kv_dtype="int8", kv_scale="token-f16"
    )
    outcomes = {o.provider: o for o in measure(case, [OursAttention(), OursWide()], limits_of(case), FakeClock(), CPU)}
    assert list(outcomes) == ["ours", WIDE] and all(outcome.gate.passed for outcome in outcomes.values())
    for other in (case.wide, replace(case, q_len=4)):
        (refused,) = measure(other, [OursWide()], limits_of(other), FakeClock(), CPU)
        assert refused.not_supported and refused.us is None
    bar = bar_of(select_cases(["*_ps16_*_kvint8_token-f16_q8192_b1_l8k"])[0])
    assert bar.met(100.0, None, {WIDE: 85.1}) is True and bar.met(100.0, None, {WIDE: 84.9}) is False
    assert bar.met(100.0, None, {}) is None


@pytest.mark.parametrize("window", [3, 4, 20, 100])
def test_under_a_window_plain_decode_is_over_as_many_tokens(window: int) -> None:
    inputs = inputs_of(replace(SMALL, window_left=window))
    other = inputs.plain()
    assert [min(tokens, window + 1) for tokens in SMALL.tokens()] == [int(n) for n in other.pages.seq_lens]
    for row, tokens in enumerate(other.case.tokens()):
        k, _ = other.row(1, row)
        assert torch.equal(k, inputs.row(1, row)[0][:, :tokens])
        pages = other.pages.indices[other.pages.indptr[row] : other.pages.indptr[row + 1]]
        assert pages.tolist() == inputs.pages.table[row, : -(-tokens // 4)].tolist()
        assert int(other.pages.last_page_len[row]) == (tokens - 1) % 4 + 1


def test_trees_and_chains() -> None:
    rows = tree_rows(40, random.Random(1))
    for token, seen in enumerate(rows):
        assert seen >> token == 1, "itself, and nothing later"
        ancestors = [j for j in range(token) if seen >> j & 1]
        assert not ancestors or rows[ancestors[-1]] == seen & ~(1 << token), "what its parent sees"
    assert any(seen != chain for seen, chain in zip(rows, chain_rows(40), strict=True))
    assert packed(chain_rows(2)) == [[1], [3]] and packed(chain_rows(32))[31] == [-1]
    assert packed(chain_rows(33))[32] == [-1, 1]


def test_names_bytes_and_fields() -> None:
    four = attention_case(fixed(64, 8192), q_len=4)
    assert four.name == "gqa_paged_attention_h32_kv8_d128_ps16_bf16_q4_b64_l8k" and four.packed_rows == 16
    assert four.kv_bytes == 2_147_483_648 + 2 * 64 * 4 * 32 * 128 * 2
    window = attention_case(fixed(64, 32768), window_left=1023, kv_dtype="e4m3")
    assert window.name == "gqa_paged_attention_h32_kv8_d128_ps16_bf16_kve4m3_window1023_b64_l32k"
    assert window.kv_bytes == 2 * 64 * 1024 * 8 * 128 + 2 * 64 * 32 * 128 * 2 and window.cache_bytes == 32 * 2 * 64 * 1024 * 1024
    assert window.plain == Case(32, 8, 128, 16, fixed(64, 1024), kv_dtype="e4m3")
    for case in (*CASES, four, window):
        assert parse_case(plain(case_fields(case))) == case
    with pytest.raises(ValueError, match="no window in every row"):
        _ = replace(window, lengths=next(iter(select_cases(["*loguniform*"]))).lengths).plain


def test_memory_is_counted_for_what_lies_outside_a_window() -> None:
    case = replace(SMALL, window_left=3, lengths=Rows(((3, 4000),)))
    with pytest.raises(MemoryError, match=f"sets of {case.cache_bytes} bytes"):
        make_inputs(case, CPU, memory_bytes=case.cache_bytes * 3 // 2, rotated_bytes=2 * case.kv_bytes)
    assert len(make_inputs(case, CPU, memory_bytes=2**30, rotated_bytes=5 * case.kv_bytes).sets) == 5


def test_the_floor_reads_q_and_the_result_too() -> None:
    inputs = inputs_of(replace(SMALL, q_len=3, lengths=fixed(3, 40)))
    s, count = inputs.sets[0], inputs.case.kv_bytes // 32
    words = vectors(s.k, None, count, s.q)
    stream = torch.cat([s.q.flatten(), s.k.flatten()])[: 8 * count]
    assert torch.equal(words.flatten(), stream.view(torch.int32)) and words.shape == (count, 4)
    assert ReadAttention.operation == "attention" and ReadAttention.name == inputs.case.floor == "read"


def test_the_sets_hold_what_they_name_and_the_barred_ones_come_first() -> None:
    verify, modifiers = verify_cases(), modifier_cases()
    assert (len(verify), len(modifiers)) == (5 * 3 * 4 * 2 * 3 + 2 * 3 * 3, 2 * (2 + 12 + 2 * 4))
    assert tuple(verify) == case_sets()["verify"] and tuple(modifiers) == case_sets()["modifiers"]
    barred = [case for case, bar in verify.items() if bar == FEW_ROWS_BAR]
    assert all(case.packed_rows <= 16 and case.kv_dtype != "int8" and case.batch_size in (8, 64) for case in barred)
    # per page, dtype and two shapes: 3 numbers of rows of 32/8, 2 of 8/1 and of 64/8; and the ragged ones
    assert len(barred) == 2 * 2 * 2 * 7 + 4
    order = list(verify)
    assert [case.page_size for case in order] == sorted(case.page_size for case in order)
    assert all(verify[case] == FEW_ROWS_BAR for case in order[:32]) and order[0].q_len == 4
    assert {case.q_len for case in order} == {1, 2, 4, 8, 16} and {case.kv_dtype for case in order} == {None, "e4m3", "int8"}
    assert all(case.kv_dtype == "int8" and case.packed_rows > 64 for case, bar in verify.items() if bar is None)
    assert all(bar.peer is None for case, bar in verify.items() if bar and case.kv_dtype == "int8")
    assert select_cases(["*_ps16_bf16_q4_b8_l8k"])[0].name == "gqa_paged_attention_h32_kv8_d128_ps16_bf16_q4_b8_l8k"


@pytest.mark.parametrize(
    ("case", "bar"),
    [
        (attention_case(fixed(64, 32768), window_left=1023), Bar("ratio", 1.15, beside=PLAIN)),
        (attention_case(fixed(64, 8192), softcap=50.0), Bar("ratio", 1.02, beside=PLAIN)),
        (attention_case(fixed(128, 4096), sinks=True, kv_dtype="e4m3"), Bar("ratio", 1.05, beside=PLAIN)),
        (attention_case(fixed(64, 8192), alibi=True, page_size=64), Bar("ratio", 1.02, beside=PLAIN)),
        (attention_case(fixed(64, 8192), q_len=4), FEW_ROWS_BAR),
        (attention_case(fixed(8, 8192), q_len=16, num_heads=64), VERIFY_BAR),
        (attention_case(fixed(8, 8192), q_len=16, num_heads=64, kv_dtype="e4m3"), VERIFY_BAR),
        (attention_case(fixed(8, 8192), q_len=16, num_heads=64, kv_dtype="int8", kv_scale="token-f16"), None),
        (attention_case(fixed(8, 8192), q_len=2, num_heads=64), FEW_ROWS_BAR),
        (attention_case(fixed(8, 8192), q_len=32, tree_mask=True), None),
    ],
)
def test_each_bar(case: Case, bar: Bar | None) -> None:
    assert bar_of(case) == bar


@pytest.mark.parametrize(
    ("case", "limit", "plus", "peer"),
    [
        (attention_case(fixed(64, 8192), q_len=16), 1.05, 0.0, "flashinfer-fa2"),
        (attention_case(fixed(64, 1024), q_len=4), 1.05, 0.0, "flashinfer-fa2"),
        (attention_case(fixed(1, 8192), q_len=16), 1.0, 3.0, "flashinfer-fa2"),
        (attention_case(fixed(64, 8192), q_len=16, num_heads=64), 1.25, 0.0, "flashinfer-fa2"),
        (attention_case(fixed(64, 8192), q_len=8, kv_dtype="e4m3"), 1.10, 0.0, "flashinfer-fa2"),
        (attention_case(fixed(64, 8192), q_len=16, kv_dtype="e4m3"), 1.35, 0.0, "flashinfer-fa2"),
        (attention_case(fixed(8, 8192), q_len=4, kv_dtype="int8", kv_scale="token-f16"), 1.10, 0.0, None),
    ],
)
def test_wide_rows_are_held_against_one_row_and_their_bytes(case: Case, limit: float, plus: float, peer: str | None) -> None:
    """The base of 100 us and a read of 200 us, of which the further rows' q and out are a share."""
    bar = bar_of(case)
    assert bar is not None and (bar.limit, bar.plus, bar.beside, bar.peer) == (limit, plus, PLAIN, peer)
    further = 2 * (case.q_rows - 1) * case.batch_size * case.num_heads * case.head_dim * 2
    assert bar.read_share == pytest.approx(further / case.kv_bytes)
    base = limit * (100 + 200 * further / case.kv_bytes) + plus
    fa2 = {"flashinfer-fa2": 1000.0}
    assert bar.met(base - 0.01, 200.0, {PLAIN: 100.0, **fa2}) is True
    assert bar.met(base + 0.01, 200.0, {PLAIN: 100.0, **fa2}) is False
    assert bar.met(base - 0.01, None, {PLAIN: 100.0, **fa2}) is None, "without the read there is no base"
    assert f"({PLAIN} + {100 * bar.read_share:.1f}% of read)" in str(bar)


def test_a_bar_beside_other_providers() -> None:
    met = FEW_ROWS_BAR.met
    assert str(FEW_ROWS_BAR) == "1.05 x ours-plain, flashinfer-fa2" and str(VERIFY_BAR) == "1 x flashinfer-fa2"
    assert met(105.0, None, {PLAIN: 100.0, "flashinfer-fa2": 105.0}) is True
    assert met(105.0, None, {PLAIN: 100.0, "flashinfer-fa2": 104.9}) is False
    assert met(105.1, None, {PLAIN: 100.0, "flashinfer-fa2": 200.0}) is False
    assert met(105.1, None, {PLAIN: 100.0}) is False, "whatever the peer takes"
    assert met(105.0, 1.0, {PLAIN: 100.0}) is None and met(105.0, 1.0, {"flashinfer-fa2": 200.0}) is None
    assert met(105.0, 1.0) is None
    assert FEW_ROWS_BAR.fields() == {"metric": "ratio", "limit": 1.05, "plus": 0.0, "beside": PLAIN, "peer": "flashinfer-fa2"}
    assert Bar("ratio", 1.06).fields() == {"metric": "ratio", "limit": 1.06, "plus": 0.0}


class Answer(Fake):
    """The right answer in as many microseconds."""

    operation = "attention"

    def __init__(self, name: str, us: float, tolerance=PEERS) -> None:
        super().__init__(name, tolerance=tolerance)
        self.us = us

    def prepare(self, inputs: Inputs) -> list[Candidate]:
        plain_inputs = inputs.plain() if self.name == PLAIN else None
        judged = plain_inputs or inputs
        calls = []
        for index in range(len(inputs.sets)):
            out = reference_of(judged, index).out.bfloat16()
            calls.append(lambda out=out: (out, None))
        calls[0].us = self.us
        return [Candidate(calls, inputs=plain_inputs)]


@pytest.mark.parametrize(("us", "met"), [(10.4, True), (10.6, False)])
def test_a_record_holds_the_ratio_to_plain_decode_and_its_bar(us: float, met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, q_len=2)
    monkeypatch.setattr("perf.measure.bar_of", {case: FEW_ROWS_BAR}.get)
    providers = [Answer("ours", us, OURS), Answer(PLAIN, 10.0, OURS), Answer("flashinfer-fa2", 20.0), Timed("read", 8.0)]
    outcomes = {o.provider: o for o in measure(case, providers, limits_of(case), FakeClock(), CPU) if o.metric == DEVICE}
    fields = outcomes["ours"].fields()
    assert fields["ratio_to_plain"] == pytest.approx(us / 10) and fields["ratio_to_read"] == pytest.approx(us / 8)
    assert fields["bar"] == FEW_ROWS_BAR.fields() | {"met": met} and fields["bytes"] == case.kv_bytes
    assert outcomes[PLAIN].gate.passed and outcomes[PLAIN].bar is None


def test_plain_decode_comes_with_ours() -> None:
    found = [(p.name, p.operation) for p in providers_of(["ours", "read"])]
    attention = [name for name, operation in found if operation == "attention"]
    assert attention == ["ours", PLAIN, "read"] and ("ours", "decode") in found and ("ours", "append") in found
    assert [p.name for p in providers_of(["read", "fa3"]) if p.operation == "attention"] == ["read", "fa3"]
