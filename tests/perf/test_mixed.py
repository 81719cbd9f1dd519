"""Mixed batches, whose requests differ in their query rows: cases, inputs, references, floors and bars, and ours on them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from cute_kernels.planning.variants import PRETEND
from perf.case_sets import bar_of, case_sets, select_cases
from perf.cases import PARTS, PLAIN, Case, Mixed, Rows, attention_case, fixed, mixed_case
from perf.correctness import OURS, PEERS, check, reference_of
from perf.dashboard.view import label_of, page_of
from perf.inputs import make_inputs
from perf.measure import DEVICE, IN_STREAM, measure
from perf.mixed_cases import ALONE_BAR, PARTS_BAR
from perf.providers import providers_of
from perf.providers.base import NotSupported
from perf.providers.ours import OursAttention, OursParts, OursPlain, descriptor, plan_class, spec_of
from perf.record import ROOT, case_fields, plain
from perf.records import parse_case, read_records
from perf.report import cell
from perf.timing import GraphClock
from tests.perf.test_attention import inputs_of, limits_of
from tests.perf.test_long_query_peers import causal
from tests.perf.test_long_query_report import outcomes
from tests.support.perf_fakes import FakeClock
from tests.support.perf_lines import record, write

CPU = torch.device("cpu")
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
GROUPS = ((2, 40, 1), (1, 9, 1), (2, 23, 4), (1, 7, 7), (1, 41, 20))
SMALL = mixed_case(*GROUPS, max_q_len=24, **SHAPE)
TOKENS, ROWS = (40, 40, 9, 23, 23, 7, 41), (1, 1, 1, 4, 4, 7, 20)
STARTS = (0, 1, 2, 3, 7, 11, 18, 38)
CHANGES = (
    {},
    {"kv_dtype": "e4m3", "layout": "NHD"},
    {"kv_dtype": "int8", "kv_scale": "token-f16", "table_format": "csr"},
    {"window_left": 5},
)
CASES = tuple(replace(SMALL, **change) for change in CHANGES)
IDS = ["bf16", "e4m3", "int8", "window"]
BATCH = mixed_case((60, 4096, 1), (1, 8192, 2048))
ALONE = mixed_case((64, 8192, 1), max_q_len=2048)


def test_names_say_the_rows_of_each_group() -> None:
    shape = "gqa_paged_attention_h32_kv8_d128_ps16_bf16"
    assert BATCH.name == f"{shape}_q2048_ragged_b61_60x4k-q1+1x8k-q2048"
    assert ALONE.name == f"{shape}_q2048_ragged_b64_l8k-q1"
    three = mixed_case((40, 4096, 1), (20, 4096, 4), (1, 8192, 2048), page_size=64, kv_dtype="e4m3")
    assert three.name == f"{shape.replace('16_bf16', '64_bf16')}_kve4m3_q2048_ragged_b61_40x4k-q1+20x4k-q4+1x8k-q2048"
    assert select_cases(["*_60x4k-q4+*"]) == [case for case in case_sets()["mixed"] if 4 in case.query_rows()][:4]


def test_bytes_and_flop_are_those_of_each_request() -> None:
    """A token's K and V are 4 KiB in bf16, a row's q and out 16 KiB; 4 FLOP a head, element, and pair of a row and a key."""
    tokens, rows = 60 * 4096 + 8192, 60 + 2048
    assert BATCH.kv_bytes == 4096 * tokens + 2 * 8192 * rows and ALONE.kv_bytes == 4096 * 64 * 8192 + 2 * 8192 * 64
    assert replace(BATCH, kv_dtype="e4m3").kv_bytes == 2048 * tokens + 2 * 8192 * rows
    pairs = 60 * 4096 + sum(range(8192 - 2048 + 1, 8192 + 1))
    assert BATCH.tflop == pytest.approx(4e-12 * 32 * 128 * pairs, rel=1e-12)
    assert BATCH.query_shape == (2108, 32, 128) and BATCH.query_bytes == rows * 8192
    assert (BATCH.batch_size, BATCH.q_rows, BATCH.packed_rows, BATCH.q_len) == (61, 2048, 8192, 2048)
    assert (ALONE.q_rows, ALONE.packed_rows, ALONE.q_len, ALONE.query_shape) == (1, 4, 2048, (64, 32, 128))
    windowed = replace(SMALL, window_left=5)
    seen = sum(min(length, 5 + n) for length, n in zip(TOKENS, ROWS, strict=True))
    assert windowed.kv_bytes == seen * 2 * 2 * 16 * 2 + 2 * 38 * 4 * 16 * 2


def test_requests_keep_the_order_of_their_groups() -> None:
    assert (SMALL.tokens(), SMALL.query_rows(), SMALL.q_len) == (TOKENS, ROWS, 24)
    assert [(part.q_len, part.query, part.tokens()) for part in SMALL.parts()] == [
        (None, None, TOKENS[:3]),
        (4, None, TOKENS[3:5]),
        (7, None, TOKENS[5:6]),
        (20, None, TOKENS[6:]),
    ]
    assert all(part.mixed is False and part.parts() == (part,) for part in SMALL.parts())
    assert SMALL.plain == Case(4, 2, 16, 4, Rows(tuple(group[:2] for group in GROUPS), seed=None))
    assert SMALL.plain.tokens() == TOKENS
    with pytest.raises(ValueError, match="must not fall"):
        Mixed(((1, 8192, 2048), (60, 4096, 1)))


@pytest.mark.parametrize("case", [*CASES, BATCH, ALONE], ids=lambda case: case.name)
def test_a_record_holds_the_case(case: Case, tmp_path: Path) -> None:
    assert parse_case(plain(case_fields(case))) == case
    records, problems = read_records([write(tmp_path / "h200.jsonl", record(case, "ours", 10.0, 9.0))])
    assert problems == [] and records[0].case == case and records[0].name == case.name
    if case == BATCH:
        assert records[0].rows == "60 x 4k q1 + 1 x 8k q2048" and records[0].options == ("q2048", "ragged")


def test_the_inputs_hand_over_ragged_rows() -> None:
    inputs = inputs_of(SMALL)
    indptr = inputs.qo_indptr()
    assert indptr.tolist() == list(STARTS) and indptr.dtype == torch.int32
    assert all(s.q.shape == (38, 4, 16) for s in inputs.sets)
    assert inputs.pages.seq_lens.tolist() == list(TOKENS)
    uniform = make_inputs(attention_case(fixed(3, 9), q_len=5, **SHAPE), CPU, 2**24, 1)
    assert uniform.qo_indptr().tolist() == [0, 5, 10, 15], "as those of uniform rows"


def test_plain_decode_has_the_last_row_of_each_request() -> None:
    inputs = inputs_of(SMALL)
    other = inputs.plain()
    assert other.pages is inputs.pages and other.case == SMALL.plain
    for s, of_plain in zip(inputs.sets, other.sets, strict=True):
        assert of_plain.k is s.k
        assert torch.equal(of_plain.q, torch.stack([s.q[end - 1] for end in STARTS[1:]]))
    alone = inputs_of(mixed_case((3, 9, 1), max_q_len=8, **SHAPE))
    assert alone.plain().sets[0].q.data_ptr() == alone.sets[0].q.data_ptr(), "what is written before a call in a stream"


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_parts_are_views_of_the_batch(case: Case) -> None:
    inputs = inputs_of(case)
    parts, request = inputs.parts(), 0
    assert [part.case for part in parts] == list(case.parts()) and len(parts) == 4
    for part in parts:
        first = STARTS[request]
        assert part.sets[1].q.data_ptr() == inputs.sets[1].q[first].data_ptr()
        assert torch.equal(part.sets[1].q.flatten(0, -3), inputs.sets[1].q[first : STARTS[request + part.case.batch_size]])
        for own in range(part.case.batch_size):
            for found, wanted in zip(part.row(1, own), inputs.row(1, request + own), strict=True):
                assert torch.equal(found, wanted) and found.shape[1] == TOKENS[request + own]
            pages = part.pages.indices[part.pages.indptr[own] : part.pages.indptr[own + 1]]
            assert pages.tolist() == inputs.pages.table[request + own, : -(-TOKENS[request + own] // 4)].tolist()
            assert int(part.pages.seq_lens[own]) == (len(pages) - 1) * 4 + int(part.pages.last_page_len[own])
        request += part.case.batch_size
    assert request == 7


def test_no_batch_of_contiguous_keys_or_trees() -> None:
    inputs = inputs_of(SMALL)
    with pytest.raises(ValueError, match="keys are paged and whose rows are no tree"):
        replace(inputs, pages=None).parts()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_reference_is_that_of_each_request_by_itself(case: Case) -> None:
    """By PyTorch's attention in f64 under a mask, and a sum of exponentials."""
    inputs = inputs_of(case)
    reference = reference_of(inputs, 1)
    assert reference.out.shape == (38, 4, 16) and reference.lse.shape == (38, 4)
    for request, (tokens, n) in enumerate(zip(TOKENS, ROWS, strict=True)):
        rows = slice(STARTS[request], STARTS[request + 1])
        q, k, v = (t.double() for t in (inputs.sets[1].q[rows], *inputs.row(1, request)))
        position, key = torch.arange(tokens - n, tokens)[:, None], torch.arange(tokens)
        seen = (key <= position) & (key >= position - (1000 if case.window_left is None else case.window_left))
        scores = torch.einsum("nhd,htd->nht", q, k.repeat_interleave(2, 0)) / 4
        lse = scores.masked_fill(~seen[:, None], -math.inf).exp().sum(-1).log()
        torch.testing.assert_close(reference.lse[rows], lse, rtol=1e-9, atol=1e-9)
        if case.window_left is None:
            wanted = causal(q, k.transpose(0, 1), v.transpose(0, 1), 0.25)
            torch.testing.assert_close(reference.out[rows], wanted, rtol=1e-9, atol=1e-9)
    assert 0 < float((reference.torch_norm / reference.norm).max()) < 2**-7, "PyTorch rounds once"


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ours_and_its_parts_pass_the_gate(case: Case) -> None:
    """With NaN in every slot that no row owns. The parts write one result, judged as that of the whole batch."""
    outcomes = measure(case, [OursAttention(), OursPlain(), OursParts()], limits_of(case), FakeClock(), CPU)
    timed = [(metric, who) for metric in (DEVICE, IN_STREAM) for who in ("ours", PLAIN, PARTS)]
    assert [(outcome.metric, outcome.provider) for outcome in outcomes] == timed
    for outcome in outcomes:
        assert outcome.reason == "" and outcome.gate.passed and outcome.gate.tolerance == OURS, outcome
        assert outcome.gate.lse_error < 1e-6
    parts = outcomes[2].detail["parts"]
    operations = {"q1": "paged_decode", "q4": "paged_attention", "q7": "paged_attention", "q20": "paged_attention"}
    assert {name: sku.operation for name, sku in parts.items()} == operations and outcomes[2].strict


def test_the_parts_write_every_row_of_one_result() -> None:
    """Wherever a part writes, it writes its own rows: the result is the batch's own, row by row."""
    inputs = inputs_of(SMALL)
    (whole,), (parts,) = OursAttention().prepare(inputs), OursParts().prepare(inputs)
    for one, other in zip(whole.calls, parts.calls, strict=True):
        (out, lse), (other_out, other_lse) = one(), other()
        assert other_out.shape == (38, 4, 16) and other_lse.shape == (38, 4)
        torch.testing.assert_close(other_lse, lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other_out, out, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("case", [attention_case(fixed(3, 9), q_len=4, **SHAPE), mixed_case((3, 9, 1), max_q_len=8, **SHAPE)])
def test_one_number_of_query_rows_has_no_parts(case: Case) -> None:
    with pytest.raises(NotSupported, match="one number of query rows"):
        OursParts().prepare(inputs_of(case))


def shifted(starts: list[int]) -> list[int]:
    """The same bounds of rows, of which the first request of four rows has one less and the next one more."""
    return [start - (index == 4) for index, start in enumerate(starts)]


def test_the_gate_finds_rows_that_another_request_owns() -> None:
    """By the same kernels with a qo_indptr in which one row has changed hands."""
    inputs = inputs_of(SMALL)
    (candidate,) = OursAttention().prepare(inputs)
    out, lse = candidate.calls[0]()
    for tolerance in (OURS, PEERS):
        assert check(inputs, 0, out, lse, tolerance).passed
    wrong = torch.tensor(shifted(list(STARTS)), dtype=torch.int32)
    out, lse = candidate.calls[0](qo_indptr=wrong)
    for tolerance in (OURS, PEERS):
        result = check(inputs, 0, out, None, tolerance)
        assert not result.passed and result.used > 1


def test_the_plan_is_described_for_the_longest_chunk() -> None:
    """Decode rows alone go through a plan for 2,048 ragged rows; each part through the plan of its own rows."""
    d = descriptor(ALONE)
    assert (d.max_q_len, d.query_format, d.batch_size, d.max_seq_len) == (2048, "ragged", 64, 8192)
    assert plan_class(d).__name__ == "PagedAttentionPlan"
    decode, chunk = BATCH.parts()
    assert plan_class(descriptor(decode)).__name__ == "PagedDecodePlan"
    assert (descriptor(chunk).max_q_len, descriptor(chunk).query_format, chunk.batch_size) == (2048, "uniform", 1)


def test_every_case_is_served_on_the_gpu() -> None:
    for case in case_sets()["mixed"]:
        for served in (case, case.plain, *case.parts()):
            spec = spec_of(descriptor(served).problem, PRETEND["h200"])
            assert spec is not None, served.name


def test_the_parts_are_compiled_ahead() -> None:
    facts = PRETEND["h200"]
    parts = [spec_of(descriptor(part).problem, facts) for part in BATCH.parts()]
    assert len(parts) == 2 and None not in parts and parts[0] != parts[1]
    assert OursParts().specs([attention_case(fixed(64, 8192), q_len=4), BATCH], facts) == parts


def test_the_set_and_its_bars() -> None:
    cases = case_sets()["mixed"]
    assert len(cases) == len(set(cases)) == 24
    batches = [case for case in cases if case.mixed and case.q_rows == 2048]
    alone = [case for case in cases if case.mixed and case.q_rows == 1]
    assert (len(batches), len(alone)) == (10, 12) and {case.q_len for case in cases} == {2048}
    assert {bar_of(case) for case in batches} == {PARTS_BAR} and {bar_of(case) for case in alone} == {ALONE_BAR}
    assert [bar_of(case) for case in cases if not case.mixed] == [None, None]
    for found in (batches, alone):
        assert {(c.page_size, c.kv_dtype) for c in found} >= {(16, None), (16, "e4m3"), (64, None)}
    others = {case for name, found in case_sets().items() if name != "mixed" for case in found}
    assert not others & set(cases)


def test_what_limits_a_batch() -> None:
    """A batch with a chunk multiplies for longer than it reads; decode rows alone read, whatever the plan is described for."""
    cases = case_sets()["mixed"]
    assert {case.floor for case in cases if case.q_rows == 2048} == {"wgmma"}
    assert {case.floor for case in cases if case.q_rows == 1} == {"read"}
    many = mixed_case((256, 16384, 1), (1, 8192, 2048))
    assert many.floor == "read", "4 M tokens take longer to read than one chunk to multiply"
    for case in (many, BATCH):
        multiplying, reading = (
            case.tflop / (132 * 4096 * 1.6e-3),
            case.kv_bytes / 4.5e12,
        )  # seconds: TFLOP over TFLOPS, bytes over B/s
        assert (multiplying > reading) == case.long
    assert not many.long and BATCH.long


@pytest.mark.parametrize(("us", "met"), [(600.0, True), (600.1, False)])
def test_a_batch_is_held_against_its_parts(us: float, met: bool) -> None:
    found = outcomes(BATCH, wgmma=330.0, ours=us, ours_parts=600.0, ours_plain=250.0)
    assert found["ours"].bar_met is met and found[PARTS].bar is None and str(found["ours"].bar) == "1 x ours-parts"
    assert str(cell(found["ours"])) == f"{us:.1f} ({BATCH.tflops(us):.0f} TFLOPS, {us / 330:.3f})"
    assert str(cell(found[PARTS])) == f"600.0 ({BATCH.tflops(600.0):.0f} TFLOPS, {600 / 330:.3f})"
    assert str(cell(found[PLAIN])) == "250.0", "it has one query row of the chunk"
    assert outcomes(BATCH, ours=us)["ours"].bar_met is None


@pytest.mark.parametrize(("us", "met"), [(501.5, True), (501.6, False)])
def test_decode_rows_alone_are_held_against_plain_decode(us: float, met: bool) -> None:
    found = outcomes(ALONE, read=480.0, ours=us, ours_plain=500.0)
    assert found["ours"].bar_met is met and str(cell(found["ours"])) == f"{us:.1f} ({us / 480:.3f})"


def test_the_parts_are_chosen_by_name() -> None:
    """Their times would be refusals in every other case of attention."""
    assert [p.name for p in providers_of(["ours", PARTS]) if p.operation == "attention"] == ["ours", PLAIN, PARTS]
    assert PARTS not in [p.name for p in providers_of(["ours"])]


def test_the_page_shows_a_batch(tmp_path: Path) -> None:
    times = {"wgmma": 330.0, "ours": 550.0, PARTS: 600.0, PLAIN: 250.0}
    path = write(tmp_path / "h200.jsonl", *(record(BATCH, who, us, 330.0) for who, us in times.items()))
    (gpu,) = page_of(*read_records([path])).gpus
    case = gpu.cases[BATCH.name]
    assert (case.rows, case.options, case.floor) == ("60 x 4k q1 + 1 x 8k q2048", "q2048, ragged", "wgmma")
    assert case.long and not case.has_peers and case.ragged
    rates = {who: result.tflops for who, result in case.results.items() if result.tflops is not None}
    assert rates == pytest.approx({who: BATCH.tflops(us) for who, us in times.items() if who != PLAIN})
    assert case.results[PARTS].faster == pytest.approx(600 / 550) and label_of(PARTS) == "our plans in turn"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, "e4m3"])
def test_graphs_hold_both(kv_dtype: Literal["e4m3"] | None) -> None:
    """The batch through one plan and through its parts, gated and captured behind each other on the GPU."""
    case = mixed_case((5, 1000, 1), (3, 700, 4), (1, 900, 300), max_q_len=512, kv_dtype=kv_dtype)
    limits = replace(limits_of(case), memory_bytes=2**30, in_stream=0)
    found = measure(case, [OursAttention(), OursPlain(), OursParts()], limits, GraphClock(), torch.device("cuda"))
    assert [(outcome.provider, outcome.metric, outcome.reason) for outcome in found] == [
        (who, DEVICE, "") for who in ("ours", PLAIN, PARTS)
    ]
    assert all(outcome.gate.passed and outcome.us.median > 0 for outcome in found)


def test_what_is_recorded_has_kept_its_names_bytes_and_fields() -> None:
    """Of every record of every file: a case that is read from it is written as it was."""
    records, _ = read_records(sorted((ROOT / "perf" / "results").glob("*.jsonl")))
    assert len(records) > 6000
    for found in records:
        fields = plain(case_fields(found.case))
        assert isinstance(fields, dict) and {name: found.fields[name] for name in fields} == fields
        if found.metric == DEVICE and "bytes" in found.fields:
            assert found.fields["bytes"] == found.case.kv_bytes, found.name
