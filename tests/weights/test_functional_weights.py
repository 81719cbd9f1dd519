"""attention_weights() in one call, eager and traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, Unsupported
from tests.support.harness import BACKENDS, device_of
from tests.support.weights_cases import CASES, Case, WeightsInputs, assert_bitwise, assert_close, make_weights, run, select

NAMES = ("usual", "csr", "nhd_p64", "lengths", "lengths_nhd", "whole", "int8_token_f16", "int8_token_lengths", "everything_int8")
NAMED = {one.name: one for one in CASES}


def call(inputs: WeightsInputs, **changes: Any) -> ck.AttentionWeights:
    """The case by one call."""
    case, one = inputs.case, inputs.attention.case
    given = inputs.given
    wanted = {"weights_dtype": case.weights_dtype, "mean": case.mean, "page_mass": case.page_mass, "max_seq_len": case.keys}
    modifiers = {
        "window_left": one.window_left,
        "softcap": one.softcap,
        "layout": one.cache.order,
        "lse_base": one.cache.lse_base,
    }
    if one.table in ("lengths", "none"):  # scales a token have the cache's axes
        scale = given["k_scale"]
        given["k_scale"] = scale.transpose(1, 2) if scale is not None and scale.dim() == 3 and one.cache.order == "NHD" else scale
    return ck.attention_weights(
        given.pop("q"), given.pop("k_cache"), given.pop("lse"), **{**given, **wanted, **modifiers, **changes}
    )


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.id != "sm80"])  # one call takes the first variant that serves
@pytest.mark.parametrize("case", [NAMED[name] for name in NAMES], ids=str)
def test_one_call_is_its_plan(case: Case, backend: str) -> None:
    inputs = make_weights(case, device_of(backend))
    result = call(inputs)
    assert_close(inputs, result)
    assert_bitwise(result, run(select(case, backend), inputs))


def test_tables_and_lengths_as_tensors_and_the_room_they_have() -> None:
    inputs = make_weights(NAMED["usual"])
    table, seq_lens, _ = inputs.attention.table.operands
    expected = run(select(NAMED["usual"], "cpu"), inputs)
    result = call(inputs, page_table=table, seq_lens=seq_lens, max_seq_len=None)
    keys = table.shape[1] * 16
    assert result.weights.shape[-1] == keys and result.mean.shape[-1] == keys and result.page_mass.shape[-1] == table.shape[1]
    least = min(keys, expected.weights.shape[-1])
    assert torch.equal(result.weights[..., :least], expected.weights[..., :least])
    whole = make_weights(NAMED["whole"])
    assert call(whole, max_seq_len=None).weights.shape[-1] == 300


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": "DHN"}, InvalidProblem, "layout = 'DHN'"),
        ({"kv_dtype": "e4m3"}, InvalidProblem, "kv_dtype = 'e4m3'"),
        ({"max_seq_len": 0}, InvalidProblem, "max_seq_len = 0"),
        ({"weights_dtype": torch.float16}, InvalidProblem, "weights_dtype = torch.float16"),
        ({"weights_dtype": None, "mean": False, "page_mass": False}, InvalidProblem, "weights_dtype = None"),
        ({"seq_lens": 3}, InvalidArgument, "seq_lens: given beside a PageTable"),
        ({"page_table": 3}, InvalidArgument, "page_table: got int"),
        ({"k_scale": 1.0}, InvalidArgument, "k_scale: got float"),
        ({"alibi_slopes": torch.ones(7)}, InvalidProblem, "alibi_slopes.shape"),
        ({"softcap": -1.0}, InvalidProblem, "softcap = -1.0"),
        ({"lse_base": "10"}, InvalidProblem, "lse_base = '10'"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make_weights(NAMED["usual"]), **changes)


def test_what_a_table_does_not_say() -> None:
    with pytest.raises(InvalidArgument, match="max_seq_len: is None, must be an int beside a csr table"):
        call(make_weights(NAMED["csr"]), max_seq_len=None)
    inputs = make_weights(NAMED["usual"])
    with pytest.raises(Unsupported, match="several query rows"):
        ck.attention_weights(
            torch.zeros(3, 2, 8, 64).bfloat16(), inputs.attention.k, inputs.lse, page_table=inputs.attention.table
        )
    with pytest.raises(InvalidArgument, match="lse: got float"):
        ck.attention_weights(inputs.given["q"], inputs.attention.k, 1.0, page_table=inputs.attention.table)


def test_fake_tensors_give_fake_outputs() -> None:
    inputs, mode = make_weights(NAMED["usual"]), FakeTensorMode()
    table, seq_lens, _ = (None if t is None else mode.from_tensor(t) for t in inputs.attention.table.operands)
    q, k, lse = (mode.from_tensor(t) for t in (inputs.given["q"], inputs.attention.k, inputs.lse))
    result = ck.attention_weights(q, k, lse, page_table=table, seq_lens=seq_lens, mean=True, max_seq_len=100)
    assert result.page_mass is None
    assert [(type(t), tuple(t.shape)) for t in result[:2]] == [(FakeTensor, (12, 8, 100)), (FakeTensor, (12, 100))]


def test_a_compiled_graph_writes_the_same() -> None:
    inputs = make_weights(NAMED["usual"])
    table, seq_lens, _ = inputs.attention.table.operands

    def weights_of(q: Tensor, k: Tensor, lse: Tensor, table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        found = ck.attention_weights(q, k, lse, page_table=table, seq_lens=seq_lens, mean=True, max_seq_len=1024)
        return found.weights, found.mean

    operands = (inputs.given["q"], inputs.attention.k, inputs.lse, table, seq_lens)
    compiled = torch.compile(weights_of, fullgraph=True, backend="eager")
    for ours, theirs in zip(compiled(*operands), weights_of(*operands), strict=True):
        assert torch.equal(ours, theirs)
