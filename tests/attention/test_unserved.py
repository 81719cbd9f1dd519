"""Several query rows and their masks in decode_attention: what cannot change a result is taken, the rest is Unsupported."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.support.inputs import Shape, make_operands

CASE = Shape(lengths=(0, 5, 40), head_dim=64, name="unserved")
HARMLESS = {
    "causal": (None, False, "bottom_right"),
    "window": (None,),
    "window_left": (None,),
    "window_right": (None, 0, 7),
    "softcap": (None,),
    "sinks": (None,),
    "alibi": (None, False),
    "tree_mask": (None, False),
    "qo_indptr": (None,),
}
HARMFUL = {
    "causal": (True, "top_left", 1, torch.ones(1)),
    "window": (5, (5, 0)),
    "window_right": (-1, False, 1.5),
    "alibi": (True, torch.zeros(8)),
    "tree_mask": (True, torch.zeros(3, 1, dtype=torch.int32)),
    "qo_indptr": (torch.arange(4, dtype=torch.int32),),
}


def attend(**masks: object) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = make_operands(CASE)
    return ck.decode_attention(*inputs[:3], page_table=inputs.page_table, **masks)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in HARMLESS.items() for value in values])
def test_what_changes_nothing_is_taken(name: str, value: object) -> None:
    assert all(torch.equal(a, b) for a, b in zip(attend(**{name: value}), attend(), strict=True))


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in HARMFUL.items() for value in values], ids=lambda v: str(v)[:20]
)
def test_what_may_change_a_result_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ck.Unsupported) as caught:
        attend(**{name: value})
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    (reason,) = caught.value.reasons
    assert reason.startswith(f"{name} = {shown}: ") and "served" in reason


def test_every_refused_mask_is_named() -> None:
    with pytest.raises(ck.Unsupported) as caught:
        attend(window=5, causal="bottom_right", window_left=3, alibi=True)
    assert [reason.split(" = ")[0] for reason in caught.value.reasons] == ["window", "alibi"]


MALFORMED = [
    ("window_left", -1, ck.InvalidProblem, "window_left = -1: must be an int from 0"),
    ("window_left", True, ck.InvalidProblem, "window_left = True: must be an int from 0"),
    ("softcap", 0.0, ck.InvalidProblem, "softcap = 0.0: must be a finite number above 0"),
    ("softcap", [1.0], ck.InvalidProblem, "softcap = [1.0]: must be a finite number above 0"),
    ("sinks", 0.0, ck.InvalidArgument, "sinks: got float, must be a tensor"),
    ("sinks", torch.zeros(7), ck.InvalidProblem, "sinks.shape = (7,): must be [num_heads] = [8]"),
    ("sinks", torch.zeros(8).double(), ck.InvalidArgument, "sinks: has dtype torch.float64, must be torch.float32"),
    ("alibi_slopes", torch.zeros(8, 1), ck.InvalidProblem, "alibi_slopes.shape = (8, 1): must be [num_heads] = [8]"),
    ("alibi_slopes", torch.zeros(8).bfloat16(), ck.InvalidArgument, "alibi_slopes: has dtype torch.bfloat16"),
]


@pytest.mark.parametrize(("name", "value", "error", "fragment"), MALFORMED)
def test_malformed_modifiers_are_typed(name: str, value: object, error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as caught:
        attend(**{name: value})
    assert fragment in str(caught.value)


def test_an_unknown_keyword_stays_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"decode_attention\(\) got an unexpected keyword argument 'sofcap'"):
        attend(sofcap=None, alibi=True)


@pytest.mark.parametrize(("shape", "several"), [((3, 2, 8, 64), True), ((3, 8, 2, 64), True), ((3, 0, 8, 64), False)])
def test_several_query_rows(shape: tuple[int, ...], several: bool) -> None:
    """In one call and on both plans; a q that is no q at all stays an InvalidProblem."""
    inputs = make_operands(CASE)
    q = torch.zeros(shape, dtype=torch.bfloat16)
    cache = torch.zeros(3, 2, 9, 64, dtype=torch.bfloat16)
    flash = ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor(3, 8, 2, 9, 64, torch.bfloat16), "cpu")
    paged = ck.PagedDecodePlan.select(CASE.descriptor(), "cpu")
    calls = (
        lambda: ck.decode_attention(q, *inputs[1:3], page_table=inputs.page_table),
        lambda: ck.decode_attention(q, cache, cache),
        lambda: paged.run(q, *inputs[1:]),
        lambda: paged.can_implement(q, *inputs[1:]),
        lambda: flash.run(q, cache, cache),
    )
    for call in calls:
        with pytest.raises(ck.Unsupported if several else ck.InvalidProblem) as caught:
            call()
        assert f"q.shape = {shape}: " in str(caught.value)
        assert ("several query rows" in str(caught.value)) == several


@pytest.mark.parametrize("shape", [(4, 2, 8, 64), (3, 2, 8, 32), (3, 2, 7, 64), (3, 64)])
def test_a_q_of_another_problem_is_no_case_of_several_rows(shape: tuple[int, ...]) -> None:
    inputs = make_operands(CASE)
    with pytest.raises(ck.InvalidProblem, match=r"q\.shape"):
        ck.PagedDecodePlan.select(CASE.descriptor(), "cpu").run(torch.zeros(shape, dtype=torch.bfloat16), *inputs[1:])


def test_masks_that_change_nothing_compile_as_one_graph() -> None:
    inputs = make_operands(CASE)
    table, seq_lens, _ = inputs.page_table.operands

    def layer(q, k_cache, v_cache, table, seq_lens):
        masks = {"causal": "bottom_right", "window_right": 0, "softcap": None}
        return ck.decode_attention(q, k_cache, v_cache, page_table=table, seq_lens=seq_lens, **masks)

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs[:3], table, seq_lens)
    assert all(torch.equal(a, b) for a, b in zip(got, attend(), strict=True))
