"""perf.measure, perf.record and perf.report with a clock that needs no GPU, and the read kernel's code."""

import io
import json
import re
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from perf import record, run
from perf.append_inputs import check_append, make_append_inputs
from perf.cases import Case, Rows, append_case, fixed
from perf.correctness import OURS, PEERS, attention_f64
from perf.inputs import make_inputs
from perf.measure import DeviceFailed, Limits, measure
from perf.providers import PROVIDERS, Candidate, providers_of
from perf.providers.append import Copy, OursAppend
from perf.providers.base import NotSupported
from perf.providers.ours import Ours
from perf.providers.read import vectors
from perf.providers.sdpa import Sdpa
from perf.report import problems, summary
from perf.resume import Deadline
from perf.timing import HostRounds, Timing, host_time, summarize
from tests.support.perf_fakes import Fake, FakeClock, Timed

CPU = torch.device("cpu")
CASE = Case(4, 2, 16, 4, Rows(((3, 7),)))
RAGGED = Case(4, 2, 16, 4, Rows(((2, 9), (1, 4))))
LIMITS = Limits(replays=15, trials=2, memory_bytes=2**20, rotated_bytes=3 * CASE.kv_bytes, host_calls=0)
DEVICE_ONLY = replace(LIMITS, in_stream=0)


def wrong(inputs, index):
    return torch.zeros_like(inputs.sets[index].q), None


def crash(inputs, index):
    raise RuntimeError("no such kernel")


def refuse(inputs, index):
    raise NotSupported("page_size 4 is odd")


def by_provider(outcomes):
    return {outcome.provider: outcome for outcome in outcomes}


def test_summarize_divides_replays_by_calls():
    timing = summarize([100.0, 200.0, 300.0, 400.0, 1000.0], 10)
    samples = (10.0, 20.0, 30.0, 40.0, 100.0)
    assert timing == Timing(median=30.0, p20=pytest.approx(18.0), p80=pytest.approx(52.0), replays=5, samples=samples)


def test_host_time_counts_calls_and_synchronizes_between_chunks():
    calls, syncs = [], []
    timing = host_time(lambda: calls.append(1), 100, 20, lambda: syncs.append(len(calls)), HostRounds(2, 0.0))
    assert len(calls) == 201
    assert syncs == [1, 21, 41, 61, 81, 101, 101, 121, 141, 161, 181, 201]
    assert timing.replays == 5
    assert 0 < timing.p20 <= timing.median <= timing.p80 < 1000


def test_host_time_is_that_of_the_least_disturbed_round(monkeypatch):
    """Calls of 3, 2 and 5 us in three rounds of 40, on a clock that only they move."""
    made, now, pauses = [], [0.0], []

    def call():
        made.append(now[0])
        now[0] += (3e-6, 2e-6, 5e-6)[max(0, len(made) - 2) // 40]

    monkeypatch.setattr("perf.timing.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("perf.timing.time.sleep", pauses.append)
    timing = host_time(call, 40, 10, lambda: None, HostRounds(3, 0.25))
    assert timing.median == pytest.approx(2.0) and timing.replays == 4
    assert pauses == [0.0, 0.25, 0.25]


def test_one_failing_provider_does_not_stop_the_rest():
    providers = [
        Fake("crash", crash, tolerance=PEERS),
        Fake("wrong", wrong, tolerance=OURS),
        Fake("refuse", refuse, tolerance=PEERS),
        Fake("absent", reason="not installed"),
        Timed("read", 8.0, 5.0, 6.0),
        Sdpa(),
    ]
    outcomes = by_provider(measure(CASE, providers, LIMITS, FakeClock(), CPU))
    assert outcomes["crash"].error == "RuntimeError: no such kernel"
    assert not outcomes["crash"].failed
    assert outcomes["wrong"].failed
    assert outcomes["wrong"].us is None
    assert outcomes["refuse"].reason == "not supported: page_size 4 is odd"
    assert outcomes["absent"].not_supported == "not installed"
    assert outcomes["read"].us.median == 5.0  # the fastest of its candidates
    assert outcomes["read"].detail["shape"] == 5.0
    assert outcomes["sdpa"].gate.passed
    assert outcomes["sdpa"].ratio_to_floor == pytest.approx(2.0)


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        RAGGED,
        Case(4, 2, 16, 4, Rows(((2, 9), (1, 4))), "f16", "csr", "NHD"),
        Case(4, 1, 16, 0, fixed(2, 9), table_format="none"),
        Case(4, 2, 16, 4, Rows(((2, 9), (1, 4))), kv_dtype="e4m3"),
        Case(4, 2, 16, 4, Rows(((2, 9), (1, 4))), "f16", "csr", "NHD", "e5m2", "head"),
        Case(4, 2, 16, 4, Rows(((2, 9), (1, 4))), kv_dtype="int8", kv_scale="token-f16"),
        Case(4, 1, 16, 0, fixed(2, 9), table_format="none", kv_dtype="int8", kv_scale="token"),
    ],
)
def test_ours_passes_the_gate_with_nan_in_unused_slots(case):
    limits = Limits(15, 2, 2**20, 3 * case.kv_bytes, host_calls=20)
    outcomes = measure(case, [Ours()], limits, FakeClock(), CPU)
    assert outcomes[0].gate.passed, outcomes[0]
    assert [outcome.metric for outcome in outcomes] == ["device", "in_stream", "host.run", "host.select"]
    assert all(outcome.us.median > 0 for outcome in outcomes)
    assert outcomes[0].detail["sku"].variant == "cpu_reference"
    assert outcomes[0].detail["sku"].kv_dtype == (case.kv_dtype or case.dtype)


def test_sdpa_says_why_it_cannot_run_ragged_rows():
    (outcome,) = measure(RAGGED, [Sdpa()], LIMITS, FakeClock(), CPU)
    assert outcome.reason == "not supported: rows of 2 different lengths need padding and a mask"


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("sdpa", replace(CASE, kv_dtype="e4m3"), "no kernel for e4m3 caches"),
        ("fa3", replace(CASE, kv_dtype="e5m2"), "no kernel for e5m2 caches"),
        ("fa3", replace(CASE, kv_dtype="int8", kv_scale="token-f16"), "no kernel for int8 caches"),
        ("flashinfer-fa2", replace(CASE, kv_dtype="int8", kv_scale="token-f16"), "no kernel for int8 caches"),
        ("flashinfer-fa2", replace(CASE, kv_dtype="e4m3", kv_scale="head"), "scales (head) are not passed to it"),
        ("flashinfer-xqa", replace(CASE, kv_dtype="e5m2"), "no kernel for e5m2 caches"),
    ],
)
def test_peers_say_which_caches_they_do_not_take(monkeypatch, name, case, reason):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=None))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", SimpleNamespace(xqa_batch_decode_with_kv_cache=None))
    provider = PROVIDERS[name]()
    monkeypatch.setattr(provider, "available", lambda: None)
    (outcome,) = measure(case, [provider], LIMITS, FakeClock(), CPU)
    assert outcome.reason == f"not supported: {reason}"


def test_vllm_is_called_as_its_backend_calls_it(monkeypatch):
    """A stand-in with the keywords of vLLM's function that computes what it has to."""
    seen = []

    def unified_attention(q, k, v, out, seqused_k, block_table, softmax_scale, cu_seqlens_q, k_descale, v_descale, **options):
        assert cu_seqlens_q.tolist() == [0, 1, 2, 3]
        assert k_descale.eq(1).all() and v_descale.eq(1).all()
        assert options["softmax_segm_output"].shape == (64, 4, 16, 16)  # 128 // 2 KV heads
        for row, length in enumerate(seqused_k.tolist()):
            keys, values = (c[block_table[row].long()].double().flatten(0, 1)[:length].transpose(0, 1) for c in (k, v))
            out[row] = attention_f64(q[row], keys, values, softmax_scale)[0]
        seen.append(options["kv_quant_mode"])

    modes = SimpleNamespace(NONE=0, FP8_PER_TENSOR=1)
    stand_ins = {"attention.ops.triton_unified_attention": {"unified_attention": unified_attention}}
    stand_ins["kv_cache_interface"] = {"KVQuantMode": modes}
    for name, content in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"vllm.v1.{name}", SimpleNamespace(**content))
    for parent in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    provider = PROVIDERS["vllm-triton"]()
    monkeypatch.setattr(provider, "available", lambda: None)
    outcome, _ = measure(replace(CASE, kv_dtype="e4m3"), [provider], LIMITS, FakeClock(), CPU)
    assert outcome.gate.passed, outcome
    assert outcome.gate.tolerance == PEERS
    assert set(seen) == {1}


def test_a_lost_device_ends_the_run_with_the_culprit():
    with pytest.raises(DeviceFailed) as failure:
        measure(CASE, [Fake("ours", crash, tolerance=OURS)], LIMITS, FakeClock(lost=True), CPU)
    assert failure.value.outcome.failed


def test_a_case_too_large_is_not_supported():
    limits = Limits(15, 2, memory_bytes=10, host_calls=0)
    (outcome,) = measure(CASE, [Sdpa()], limits, FakeClock(), CPU)
    assert "10 bytes allowed" in outcome.not_supported


def test_records_are_lines_of_strict_json(tmp_path):
    path = tmp_path / "results" / "gpu.jsonl"
    providers = [Ours(), Timed("read", 4.0), Fake("wrong", wrong, tolerance=PEERS)]
    outcomes = measure(CASE, providers, DEVICE_ONLY, FakeClock(), CPU)
    for outcome in outcomes:
        record.append(path, record.case_fields(CASE) | outcome.fields() | record.environment())
    ours, read, failed = (json.loads(line) for line in path.read_text().splitlines())
    assert ours["name"] == CASE.name
    assert "kv_dtype" not in ours
    assert "kv_scale" not in ours
    rule = {"norm_factor": 1.25, "norm_ulps": 1, "element_factor": 2, "element_ulps": 2, "relative": 0.0}
    assert ours["gate"]["tolerance"] == rule
    assert 0 < ours["gate"]["relative_error"] < 0.01
    assert ours["lengths"] == {"rule": "Rows", "groups": [[3, 7]], "seed": 0}
    assert ours["us"] == {"median": 10.0, "p20": 10.0, "p80": 10.0, "replays": 15, "samples": [10.0] * 15}
    assert ours["ratio_to_read"] == 2.5
    assert ours["bytes"] == CASE.kv_bytes == 2688
    assert ours["gate"]["passed"] is True
    assert ours["sku"]["variant"] == "cpu_reference"
    assert ours["versions"]["torch"] == torch.__version__
    assert read["us"]["median"] == 4.0
    assert "gate" not in read
    assert failed["gate"]["passed"] is False
    assert "us" not in failed


@pytest.mark.parametrize("lost", [False, True])
def test_run_records_every_case_until_the_device_is_lost(tmp_path, monkeypatch, lost):
    monkeypatch.setattr(run, "GraphClock", partial(FakeClock, lost=lost))
    for module in ("run", "measure"):
        monkeypatch.setattr(f"perf.{module}.machine", lambda device: {"sm_mhz": 1980.0})
    cases, path = [CASE, RAGGED], tmp_path / "cpu.jsonl"
    providers = [Timed("read", 4.0), Fake("crash", crash, tolerance=OURS)]
    outcomes, left = run.run_cases(cases, providers, DEVICE_ONLY, CPU, path, Deadline(None))
    assert left == (1 if lost else 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(outcomes) == (1 if lost else 4)
    assert [line["name"] for line in lines if line["provider"] == "crash"] == [case.name for case in cases[: 1 if lost else 2]]
    assert all(line["machine"] == {"sm_mhz": 1980.0} and line["gpu"] == "cpu" and line["commit"] for line in lines)
    assert any(outcome.failed for outcome in outcomes)


def test_commit_override(monkeypatch):
    monkeypatch.setenv("PERF_COMMIT", "abc123-dirty")
    assert record.commit() == {"commit": "abc123", "dirty": True}
    monkeypatch.setenv("PERF_COMMIT", "abc123")
    assert record.commit() == {"commit": "abc123", "dirty": False}
    monkeypatch.delenv("PERF_COMMIT")
    assert record.commit().keys() == {"commit", "dirty"}


def test_report_shows_times_bars_and_reasons():
    case = Case(32, 8, 128, 64, fixed(1, 8192))
    outcomes = measure(case, [Fake("absent", reason="not installed")], Limits(15, 2, 2**40, 1), FakeClock(), CPU)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary(outcomes))
    console.print(problems(outcomes))
    text = console.export_text()
    assert case.name in text
    assert "33.6" in text
    assert "absent: not supported: not installed" in text


def test_report_shows_the_error_beside_the_time():
    outcomes = measure(replace(CASE, kv_dtype="e4m3"), [Ours(), Timed("read", 4.0)], LIMITS, FakeClock(), CPU)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary(outcomes))
    (found,) = re.findall(r"10\.0 \(2\.500\) (\d\.\d\d)%", console.export_text())
    assert float(found) == pytest.approx(100 * outcomes[0].gate.relative_error, abs=0.005)
    assert 0.05 < float(found) < 0.5  # bf16 rounds to 2**-9


def test_cli_lists_cases_and_refuses_unknown_names():
    runner = CliRunner()
    listed = runner.invoke(run.app, ["--cases", "ragged", "--list"])
    assert listed.exit_code == 0
    assert "gqa_paged_decode_h8_kv1_d128_ps16_bf16_b64_loguniform128-32k" in listed.stdout.replace("\n", "")
    assert runner.invoke(run.app, ["--cases", "nothing"]).exit_code == 2
    assert runner.invoke(run.app, ["--providers", "nobody", "--list"]).exit_code == 2


def test_providers_without_a_gpu_say_so():
    for name in ("read", "flashinfer-fa2", "flashinfer-xqa", "fa3", "vllm-triton"):
        assert PROVIDERS[name]().available() == "no CUDA device"


@pytest.mark.parametrize("index", [0, -1])
def test_read_kernel_keeps_its_loads_together(tmp_path, index):
    from perf.read_kernel import READ_SHAPES, compile_read

    shape = READ_SHAPES[index]
    compile_read(shape.threads, shape.unroll, shape.overlap, f"--keep-ptx --dump-dir {tmp_path}")
    (ptx,) = (path.read_text() for path in tmp_path.glob("*.ptx"))
    instructions = re.findall(r"^\s+(ld\.global\S*|xor\.b32|st\.global\S*|griddepcontrol\.\w+)", ptx, re.MULTILINE)
    if shape.overlap:  # it loads nothing before the kernels in front of it are done
        launch, wait, *instructions = instructions
        assert (launch, wait) == ("griddepcontrol.launch_dependents", "griddepcontrol.wait")
    loads = 2 * shape.unroll
    assert instructions[:loads] == ["ld.global.L1::no_allocate.v4.b32"] * loads
    assert sum(name == "xor.b32" for name in instructions) >= 4 * loads
    assert instructions[-1].startswith("st.global")
    assert shape.overlap == (index == -1) and not any(name.startswith("griddepcontrol") for name in instructions)


def test_every_launch_shape_of_read_is_tried_plain_and_with_dependent_launch():
    from perf.read_kernel import READ_SHAPES

    plain = [shape for shape in READ_SHAPES if not shape.overlap]
    assert {replace(shape, overlap=True) for shape in plain} == set(READ_SHAPES) - set(plain)
    assert len({shape.label for shape in READ_SHAPES}) == len(READ_SHAPES) == 16
    assert [shape.label.endswith("programmatic dependent launch") for shape in READ_SHAPES] == [False] * 8 + [True] * 8


def test_read_streams_the_scales_with_the_cache():
    case = Case(4, 2, 64, 16, fixed(2, 50), kv_dtype="int8", kv_scale="token-f16")
    inputs = make_inputs(case, CPU, 2**20, rotated_bytes=1)
    layer = inputs.sets[0]
    count = case.kv_bytes // 32
    words = vectors(layer.k, layer.k_scale, count)
    assert words.shape == (count, 4)
    assert words.dtype == torch.int32
    scale_words = layer.k_scale.view(-1).view(torch.int32)
    assert torch.equal(words.view(-1)[: len(scale_words)], scale_words)
    sixteen = make_inputs(replace(case, kv_dtype=None, kv_scale=None), CPU, 2**20, rotated_bytes=1).sets[0]
    assert vectors(sixteen.k, None, 8).data_ptr() == sixteen.k.data_ptr()  # without scales it reads the cache itself


def test_read_shapes_cover_every_vector():
    from perf.read_kernel import READ_SHAPES

    for shape in READ_SHAPES:
        assert shape.num_ctas(1, 132) == 1
        if shape.ctas_per_sm:
            assert shape.num_ctas(10**9, 132) == shape.ctas_per_sm * 132
            assert shape.ctas_per_sm * shape.threads == 2048
        else:
            assert (shape.num_ctas(10**6 + 1, 132) - 1) * shape.tile < 10**6 + 1 <= shape.num_ctas(10**6 + 1, 132) * shape.tile


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("kv_dtype", "kv_scale"), [(None, None), ("e4m3", None), ("int8", "token-f16"), ("e5m2", "head")])
def test_an_append_is_held_to_every_byte(kv_dtype, kv_scale, layout):
    case = append_case(20, kv_dtype=kv_dtype, kv_scale=kv_scale, layout=layout, num_kv_heads=2, head_dim=16)
    limits = Limits(15, 2, 2**22, 3 * case.kv_bytes, host_calls=20)
    outcomes = measure(case, [OursAppend(), Copy()], limits, FakeClock(), CPU)
    assert [(o.provider, o.metric, o.reason) for o in outcomes] == [
        ("ours", "device", ""),
        ("copy", "device", ""),
        ("ours", "host.run", ""),
        ("ours", "host.select", ""),
    ]
    assert outcomes[0].gate.passed and outcomes[0].gate.error == 0
    assert outcomes[0].ratio_to_floor == pytest.approx(1.0), "to the copy, which took as long on this clock"
    assert outcomes[0].detail["sku"].operation == "kv_append"


@pytest.mark.parametrize(("name", "wrong"), [("k_cache", 1), ("v_scale", 2), ("k_scale", 1)])
def test_one_wrong_byte_of_an_append_fails_the_gate(name, wrong):
    case = append_case(20, kv_dtype="int8", kv_scale="token-f16", num_kv_heads=2, head_dim=16)
    inputs = make_append_inputs(case, CPU, 2**22, 3 * case.kv_bytes)
    assert len({*inputs.slots.tolist()}) == 20 and len(inputs.sets) >= 3
    (candidate,) = OursAppend().prepare(inputs)
    for index, call in enumerate(candidate.calls):
        assert check_append(inputs, index).error > 1000, "nothing is stored yet"
        call()
        assert check_append(inputs, index).passed
    getattr(inputs.sets[1], name).view(torch.uint8).view(-1)[:wrong] ^= 1
    result = check_append(inputs, 1)
    assert (result.passed, result.error) == (False, wrong) and "differ from those of the CPU variant" in result.reason


def test_a_copy_moves_as_many_bytes_as_the_append():
    case = append_case(64, num_kv_heads=2)
    inputs = make_append_inputs(case, CPU, 2**26, 2**20)
    (candidate,) = Copy().prepare(inputs)
    target, source = candidate.calls[0].args
    source.fill_(7)
    candidate.calls[0]()
    assert (target == 7).all() and 0 <= case.kv_bytes - 2 * 4 * target.numel() < 32
    assert len(candidate.calls) == len(inputs.sets)
    assert (candidate.calls[1].args[1] == 0).all(), "a buffer of its own"


def test_slots_of_large_appends_fill_whole_pages():
    case = append_case(1024, num_kv_heads=1, head_dim=16)
    slots = make_append_inputs(case, CPU, 2**28, 2**10).slots
    assert len(set(slots.tolist())) == 1024
    assert (slots.view(-1, 16) == slots.view(-1, 16)[:, :1] + torch.arange(16)).all()
    assert slots[::16].unique().numel() == 64 and (slots[::16].diff() != 16).any()


def test_an_append_that_stores_nothing_does_not_pass_for_the_one_before_it(monkeypatch):
    case = append_case(20, num_kv_heads=2, head_dim=16)
    idle = OursAppend()
    idle.name = "idle"
    monkeypatch.setattr(idle, "prepare", lambda inputs: [Candidate([lambda: None for _ in inputs.sets])])
    limits = Limits(15, 2, 2**22, 3 * case.kv_bytes, host_calls=0)
    outcomes = by_provider(measure(case, [OursAppend(), idle], limits, FakeClock(), CPU))
    assert outcomes["ours"].gate.passed and outcomes["idle"].failed and outcomes["idle"].us is None


def test_each_case_is_measured_by_the_providers_of_its_operation(monkeypatch, tmp_path):
    seen = []

    def measured(case, providers, *rest):
        seen.append([(provider.name, provider.operation) for provider in providers])
        return []

    monkeypatch.setattr(run, "measure", measured)
    monkeypatch.setattr(run, "environment", dict)
    monkeypatch.setattr(run, "machine", lambda device: {})
    competitors = providers_of(["ours", "read", "copy"])
    run.run_cases([CASE, append_case(64)], competitors, LIMITS, CPU, tmp_path / "x.jsonl", Deadline(None))
    assert seen == [[("ours", "decode"), ("read", "decode")], [("ours", "append"), ("copy", "append")]]
    with pytest.raises(ValueError, match=r"'nobody' is none of ours, .*copy"):
        providers_of(["nobody"])
