"""The time of a call behind another kernel, steps beside the calls, and the machine: perf.measure on a clock of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from perf import record
from perf.cases import Case, Rows
from perf.correctness import PEERS, attention_f64
from perf.measure import DeviceFailed, Limits, measure
from perf.providers import Candidate
from perf.providers.ours import Ours
from perf.streams import TOKENS, reader_of_weights
from perf.timing import Preceded, summarize
from tests.support.perf_fakes import Fake, FakeClock, Timed, us_of

CPU = torch.device("cpu")
CASE = Case(4, 2, 16, 4, Rows(((3, 7),)))
LIMITS = Limits(replays=15, trials=2, memory_bytes=2**20, rotated_bytes=3 * CASE.kv_bytes, host_calls=0)
UUID = "01234567-89ab-cdef-0123-456789abcdef"


def exact(inputs, index):
    rows = [attention_f64(q, *inputs.row(index, row), inputs.softmax_scale)[0] for row, q in enumerate(inputs.sets[index].q)]
    return torch.stack(rows).to(torch.bfloat16), None


def of_metric(outcomes, metric):
    return {outcome.provider: outcome for outcome in outcomes if outcome.metric == metric}


def test_in_stream_is_what_a_call_adds_behind_a_kernel_that_writes_its_q():
    providers = [Ours(), Timed("read", 8.0, 4.0, 6.0), Fake("absent", reason="not installed")]
    outcomes = measure(CASE, providers, LIMITS, FakeClock(), CPU)
    device, behind = of_metric(outcomes, "device"), of_metric(outcomes, "in_stream")
    assert list(behind) == ["ours", "read"]
    assert (behind["ours"].us.median, behind["read"].us.median) == (10.0, 4.0)  # the kernel before takes 10 more
    assert behind["ours"].ratio_to_floor == 2.5
    assert [outcome.us.replays for outcome in behind.values()] == [11, 11]
    assert behind["ours"].gate is device["ours"].gate is not None
    fields = behind["ours"].fields()
    assert (fields["metric"], fields["bytes"]) == ("in_stream", CASE.kv_bytes)
    assert fields["sku"] == device["ours"].detail["sku"] and "prepare_s" not in fields and "bar" not in fields
    assert behind["read"].detail == {"shape": 4.0}, "the candidate that was chosen"


def test_behind_weights_is_what_a_call_adds_behind_a_layer_that_fills_l2():
    """The layer is the same before each call, and its time alone is taken in the same rounds."""
    rounds = []

    class Listening(FakeClock):
        def capture(self, calls):
            befores = {id(call.before if isinstance(call, Preceded) else call) for call in calls}
            return replace(super().capture(calls), replay=len(befores))

        def times(self, rotations, replays):
            rounds.append(([rotation.replay for rotation in rotations], replays))
            return super().times(rotations, replays)

    limits = replace(LIMITS, in_stream=0, behind_weights=13, weights_bytes=2**12)
    outcomes = measure(CASE, [Timed("a", 5.0), Timed("read", 4.0)], limits, Listening(), CPU)
    assert [(outcome.provider, outcome.metric) for outcome in outcomes] == [
        *(("a", "device"), ("read", "device")),
        *(("a", "behind_weights"), ("read", "behind_weights")),
    ]
    behind = of_metric(outcomes, "behind_weights")
    assert (behind["a"].us.median, behind["a"].us.replays, behind["a"].ratio_to_floor) == (5.0, 13, 1.25)
    assert behind["a"].fields()["bytes"] == CASE.kv_bytes
    assert rounds == [([3, 3], 15), ([1, 1, 1], 13)]


@pytest.mark.parametrize("nbytes", [2, 2**12, 2 * 65 * 64, 2**20])
def test_the_layer_reads_all_weights(nbytes):
    layer = reader_of_weights(nbytes, CPU)
    activation, weights = layer.args
    assert nbytes <= weights.numel() * weights.element_size() < nbytes + 32 * (nbytes / 2) ** 0.5 + 128
    product = layer().double()
    exact = activation.double() @ weights.double()
    assert torch.all((product - exact).abs() <= 2**-7 * exact.abs() + 1e-2 * weights.shape[0] ** 0.5)
    assert len(product) == TOKENS and product.count_nonzero() > 0.9 * product.numel()


def test_before_each_call_its_own_q_is_written():
    """Calls of two providers that change q after they read it: behind the writing kernel, both find the same again."""
    seen = {"a": [], "b": []}

    def provider(name):
        def call(inputs, index):
            q = inputs.sets[index].q
            seen[name].append((index, float(q[0, 0, 0])))
            q.add_(index + 1)

        return Fake(name, call)

    measure(CASE, [provider("a"), provider("b")], LIMITS, FakeClock(), CPU)
    assert [index for index, _ in seen["a"]] == [0, 1, 2, 0, 1, 2]
    assert seen["a"][:3] != seen["b"][:3], "back to back, b finds what a left"
    assert seen["a"][3:] == seen["b"][3:]
    for index in range(3):
        assert seen["a"][3 + index][1] == pytest.approx(seen["a"][index][1] + 2 * (index + 1), abs=0.1)  # written as it was


def test_the_writing_kernel_alone_is_timed_in_the_same_rounds():
    rounds = []

    class Listening(FakeClock):
        def capture(self, calls):
            rotation = super().capture(calls)
            kinds = {"pair" if isinstance(call, Preceded) else "kernel" for call in calls}
            return replace(rotation, replay=kinds.pop())

        def times(self, rotations, replays):
            rounds.append(([rotation.replay for rotation in rotations], replays))
            return super().times(rotations, replays)

    measure(CASE, [Timed("a", 1.0), Timed("b", 2.0)], LIMITS, Listening(), CPU)
    assert rounds == [(["kernel", "kernel"], 15), (["kernel", "pair", "pair"], 11)]


def test_a_time_in_a_stream_that_noise_drowns_has_a_reason():
    class Noisy(FakeClock):
        def times(self, rotations, replays):
            return [summarize([10.0 - index] * replays, 1) for index in range(len(rotations))]

    outcomes = measure(CASE, [Timed("read", 1.0), Timed("b", 1.0)], LIMITS, Noisy(), CPU)
    reasons = {outcome.provider: outcome.reason for outcome in outcomes if outcome.metric == "in_stream"}
    assert reasons == {
        "read": "not supported: a replay was 1.00 us a call faster with the calls than without them",
        "b": "not supported: a replay was 2.00 us a call faster with the calls than without them",
    }
    assert not any(outcome.failed for outcome in outcomes)


def test_a_provider_that_fails_in_a_stream_keeps_its_other_time():
    def once(inputs, index):
        calls.append(index)
        if len(calls) > 6:  # two of the gate, three of the capture
            raise RuntimeError("no more")
        return exact(inputs, index)

    calls = []
    outcomes = measure(CASE, [Fake("a", once, tolerance=PEERS), Timed("read", 4.0)], LIMITS, FakeClock(), CPU)
    assert {o.provider: o.reason for o in outcomes if o.metric == "device"} == {"a": "", "read": ""}
    behind = of_metric(outcomes, "in_stream")
    assert behind["a"].error == "RuntimeError: no more" and behind["a"].us is None
    assert behind["read"].us.median == 4.0


def test_a_device_lost_in_a_stream_is_reported_with_who_was_timed():
    class Lost(FakeClock):
        def times(self, rotations, replays):
            if replays == 11:
                raise RuntimeError("an illegal memory access was encountered")
            return super().times(rotations, replays)

    with pytest.raises(DeviceFailed) as failure:
        measure(CASE, [Timed("a", 1.0), Timed("b", 1.0)], LIMITS, Lost(), CPU)
    outcome = failure.value.outcome
    assert (outcome.metric, outcome.us) == ("in_stream", None)
    assert outcome.error == "while timing a, b: an illegal memory access was encountered"


def test_steps_of_a_candidate_have_device_times_beside_its_own():
    class Planned(Timed):
        def prepare(self, inputs):
            def plan():
                plans.append(1)

            plan.us = 3.0
            return [replace(candidate, device={"plan": plan}, host={"plan": plan}) for candidate in super().prepare(inputs)]

    plans = []
    outcomes = measure(CASE, [Planned("a", 5.0)], replace(LIMITS, host_calls=20), FakeClock(), CPU)
    assert {outcome.metric: outcome.us.median for outcome in outcomes if not outcome.metric.startswith("host")} == {
        "device": 5.0,
        "in_stream": 5.0,
        "device.plan": 3.0,
    }
    assert [outcome.metric for outcome in outcomes][-1] == "host.plan"
    assert outcomes[2].gate is None and "bytes" not in outcomes[2].fields() and plans


def test_none_of_it_is_measured_where_nothing_is_asked():
    outcomes = measure(CASE, [Timed("a", 5.0)], replace(LIMITS, in_stream=0), FakeClock(), CPU)
    assert [outcome.metric for outcome in outcomes] == ["device"]
    assert measure(CASE, [Fake("a", reason="not installed")], LIMITS, FakeClock(), CPU)[0].metric == "device"
    assert us_of(lambda: None) == 10.0 and isinstance(Candidate([]).device, dict)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of UUID, and nvidia-smi's answer, which may be changed."""
    answer = SimpleNamespace(line="580.159.04, 1965, 3201, 1980, 612.5, 54", asked=[])

    def output(command):
        answer.asked.append(command)
        return answer.line

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(record, "output", output)
    return answer


def test_a_machine_is_named_by_a_hash_of_its_uuid(gpu):
    facts = record.machine(torch.device("cuda", 0))
    assert facts == {
        "id": "a23d006bb020",
        "driver": "580.159.04",
        "sm_mhz": 1965.0,
        "mem_mhz": 3201.0,
        "max_sm_mhz": 1980.0,
        "watts": 612.5,
        "celsius": 54.0,
    }
    assert f"--id=GPU-{UUID}" in gpu.asked[0]
    assert UUID not in json.dumps(facts)
    gpu.line = None  # no nvidia-smi
    assert record.machine(torch.device("cuda", 0)) == {"id": facts["id"]}
    assert record.machine(CPU) == {}


def test_clocks_are_read_while_everything_timed_is_replayed(monkeypatch):
    """And only then: what is recorded of a case is of the load that its times were taken under."""
    events = []

    class Watching(FakeClock):
        def times(self, rotations, replays):
            events.append(f"times {len(rotations)}")
            return super().times(rotations, replays)

        def under_load(self, rotations, query):
            events.append(f"load {len(rotations)}")
            return super().under_load(rotations, query)

    def machine(device):
        events.append("read")
        return {"id": "0123456789ab", "sm_mhz": 1740.0}

    monkeypatch.setattr("perf.measure.machine", machine)
    providers = [Timed("a", 1.0), Timed("b", 2.0), Fake("absent", reason="not installed")]
    outcomes = measure(CASE, providers, LIMITS, Watching(), CPU)
    assert events == ["times 2", "load 2", "read", "times 3"]
    assert len(outcomes) == 5
    assert all(outcome.fields()["machine"] == {"id": "0123456789ab", "sm_mhz": 1740.0} for outcome in outcomes)
