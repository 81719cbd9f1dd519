"""What FlashInfer's own tests run beside the package: the reference, devices that are the CPU, the module in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.flashinfer import reference
from tests.support.flashinfer.on_cpu import RecordedGraph, capture, moved, recorded
from tests.support.flashinfer.stand_in import StandIn, ours_where_modified, repeat_sinks
from tests.support.naive import naive_row

HEADS, KV_HEADS, DIM = 6, 2, 32


def close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_reference_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    outs = reference.single_prefill_with_kv_cache(q, k, v, causal=True)
    for row in range(7):
        expected, _ = naive_row(q[row], k[: row + 1].tolist(), v[: row + 1].tolist(), DIM**-0.5)
        close(outs[row], torch.tensor(expected))
    close(reference.single_decode_with_kv_cache(q[6], k, v), outs[6])
    mask = torch.ones(7, 7, dtype=torch.bool).tril() & ~torch.ones(7, 7, dtype=torch.bool).tril(-3)
    windowed = reference.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=2)
    close(windowed, reference.single_prefill_with_kv_cache(q, k, v, custom_mask=mask))


def test_slopes_are_those_of_the_paper() -> None:
    assert reference.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    close(reference.alibi_slopes(6), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]))


def test_a_graph_is_what_was_called_into_the_same_outputs() -> None:
    class Counted:
        calls = 0

    def run(counted: Any, *, out: Any = None, lse: Any = None, return_lse: bool = False) -> Any:
        counted.calls += 1
        out, lse = torch.zeros(1) if out is None else out, torch.zeros(1) if lse is None else lse
        out.fill_(counted.calls), lse.fill_(-counted.calls)
        return (out, lse) if return_lse else out

    for return_lse in (False, True):
        graph, counted = RecordedGraph(), Counted()
        with capture(graph):
            got = recorded(run)(counted, return_lse=return_lse)
        graph.replay()
        assert [t.item() for t in got] == [2, -2] if return_lse else got.item() == 2


def test_stand_ins() -> None:
    module = StandIn("flashinfer.jit")
    assert (module.Spec | None) is not None
    with pytest.raises(NotImplementedError, match=r"flashinfer.jit.build has no stand-in"):
        module.build([])
    assert repeat_sinks(torch.arange(2.0), "h -> b h m 1", b=3, m=4).shape == (3, 2, 4, 1)
    call = ours_where_modified(lambda *_args, **_options: "ours", lambda *_args, **_options: "reference")
    some: tuple[Any, Any, Any] = (None, None, None)
    assert [call(*some), call(*some, logits_soft_cap=0.0), call(*some, window_left=-1)] == ["reference"] * 3
    assert [call(*some, logits_soft_cap=1.0), call(*some, window_left=0), call(*some, pos_encoding_mode="ALIBI")] == ["ours"] * 3
    cpu = torch.device("cpu")
    assert [moved("cuda:0", False), moved(torch.device("cuda"), False), moved(0, True)] == [cpu] * 3
    assert (moved(0, False), moved(True, True), moved("cpu", True)) == (0, True, "cpu")
