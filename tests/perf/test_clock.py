"""perf.measure on a GPU: the floor in every launch shape, the time in a stream, and what is recorded of the machine."""

from __future__ import annotations

import pytest
import torch

from perf.cases import Case, fixed
from perf.measure import Limits, measure
from perf.providers.ours import Ours
from perf.providers.read import Read
from perf.timing import GraphClock

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive]
WORD = 0x5EED5EED  # the checksum that the read kernel stores
CASE = Case(32, 8, 128, 16, fixed(1, 8192))


def test_a_call_behind_another_kernel_takes_as_long_as_back_to_back_or_longer() -> None:
    limits = Limits(replays=15, trials=3, memory_bytes=2**33, host_calls=0)
    outcomes = measure(CASE, [Ours(), Read()], limits, GraphClock(), torch.device("cuda"))
    assert [(outcome.provider, outcome.metric, outcome.reason) for outcome in outcomes] == [
        (provider, metric, "") for metric in ("device", "in_stream") for provider in ("ours", "read")
    ]
    ours, read, ours_behind, read_behind = (outcome.us.median for outcome in outcomes if outcome.us)
    assert read < ours and read_behind < ours_behind
    assert 0.95 * ours < ours_behind < 1.6 * ours  # an H200: 11.4 and 13.2 us
    assert 0.95 * read < read_behind < 2 * read
    for outcome in outcomes:
        facts = outcome.machine or {}
        assert len(str(facts["id"])) == 12 and int(str(facts["id"]), 16) >= 0
        assert float(str(facts["sm_mhz"])) > 0.5 * float(str(facts["max_sm_mhz"])), "not under load"


@pytest.mark.parametrize("overlap", [False, True])
def test_the_floor_reads_every_byte(overlap: bool) -> None:
    """One word in two equal buffers makes it write its sink: found wherever it lies, in each launch shape."""
    from perf.read_kernel import READ_SHAPES, compile_read

    count = 2_500_003  # of vectors: more than a persistent grid reads in one step
    sm_count = torch.cuda.get_device_properties("cuda").multi_processor_count
    pair = torch.zeros(2, count, 4, dtype=torch.int32, device="cuda")
    for shape in READ_SHAPES:
        if shape.overlap != overlap:
            continue
        read = compile_read(shape.threads, shape.unroll, shape.overlap)
        for vector, buffer in ((0, 0), (51_234, 1), (count - 2, 0)):
            sink = torch.zeros(1, dtype=torch.int32, device="cuda")
            pair[buffer, vector, 2] = WORD
            read(pair[0], pair[1], sink, shape.num_ctas(count, sm_count))
            assert sink.item() == WORD, (shape, vector)
            pair[buffer, vector, 2] = 0
