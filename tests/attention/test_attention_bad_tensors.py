"""Malformed tensors of attention with several query rows: a typed error that names parameter, value and rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported
from tests.support.attention_cases import CASES, Case, case, make_attention
from tests.support.attention_harness import select

NAMED = {c.name: c for c in CASES}
ALL = case("all", tree=True, window_left=40, softcap=3.0, alibi=True, sinks=True)
UNIFORM = NAMED["uniform"]
Args = dict[str, Any]
Change = Callable[[Args], Args]


def arguments(of: Case) -> Args:
    """Good arguments of a run, with outputs."""
    inputs = make_attention(of, dead=0.5)
    rows = inputs.q.shape[0] * inputs.q.shape[1] if of.uniform else len(inputs.q)
    outputs = {"out": torch.full_like(inputs.q, 7.0), "lse": torch.full((rows, of.cache.num_heads), 7.0)}
    caches = {"k_cache": inputs.k, "v_cache": inputs.v, "page_table": inputs.table}
    return {"q": inputs.q, **caches, **inputs.scales, **inputs.extras, **outputs}


def bad(name: str, change: Change, error: type[Exception], *fragments: str, of: Case = ALL) -> Any:
    """One malformed run: what is changed of good arguments, the error, and what its message names."""
    return pytest.param(of, change, error, fragments, id=name)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a last stride of 2."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]


def odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape one element behind an aligned address."""
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def between_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The same values two bytes behind an aligned address: no element of four bytes begins there."""
    moved = torch.frombuffer(bytearray(tensor.nbytes + 2), dtype=tensor.dtype, offset=2).view(tensor.shape)
    assert moved.data_ptr() % 4 == 2
    return moved.copy_(tensor)


def with_operand(table: ck.PageTable, place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> ck.PageTable:
    """The table with one of its operands changed."""
    return table._replace(operands=tuple(change(t) if i == place else t for i, t in enumerate(table.operands)))


EXTRAS = ("qo_indptr", "tree_mask", "alibi_slopes", "sinks")
TENSORS = [
    *[bad(f"no {n}", lambda a, n=n: {n: None}, InvalidArgument, n, "NoneType", "must be a tensor") for n in EXTRAS],
    *[bad(f"{n} is a list", lambda a, n=n: {n: [1]}, InvalidArgument, n, "list", "must be a tensor") for n in EXTRAS],
    *[bad(f"{n} on meta", lambda a, n=n: {n: a[n].to("meta")}, InvalidArgument, n, "meta", "plan's device, cpu") for n in EXTRAS],
    *[
        bad(f"{n} undescribed", lambda a, n=n: {n: torch.zeros(8)}, InvalidArgument, n, "must be None", of=UNIFORM)
        for n in EXTRAS
    ],
    *[bad(f"{n} f64", lambda a, n=n: {n: a[n].double()}, InvalidArgument, n, "torch.float64") for n in EXTRAS],
    *[bad(f"{n} int64", lambda a, n=n: {n: a[n].long()}, InvalidArgument, n, "torch.int64", "torch.int32") for n in EXTRAS[:2]],
    *[bad(f"{n} bf16", lambda a, n=n: {n: a[n].bfloat16()}, InvalidArgument, n, "bfloat16", "float32") for n in EXTRAS[2:]],
    bad("qo_indptr short", lambda a: {"qo_indptr": a["qo_indptr"][1:]}, InvalidProblem, "qo_indptr.shape = (7,)", "[8]"),
    bad("qo_indptr 2-D", lambda a: {"qo_indptr": a["qo_indptr"][None]}, InvalidProblem, "qo_indptr.shape = (1, 8)", "[8]"),
    bad("mask rows", lambda a: {"tree_mask": a["tree_mask"][1:]}, InvalidProblem, "tree_mask.shape = (28, 1)", "[29, 1]"),
    bad("mask width", lambda a: {"tree_mask": torch.zeros(29, 2).int()}, InvalidProblem, "tree_mask.shape = (29, 2)", "[29, 1]"),
    bad("mask 1-D", lambda a: {"tree_mask": a["tree_mask"][:, 0]}, InvalidProblem, "tree_mask.shape = (29,)", "max_q_len / 32"),
    bad("slopes heads", lambda a: {"alibi_slopes": torch.ones(7)}, InvalidProblem, "alibi_slopes.shape = (7,)", "[8]"),
    bad("slopes 2-D", lambda a: {"alibi_slopes": torch.ones(7, 8)}, InvalidProblem, "alibi_slopes.shape = (7, 8)", "[8]"),
    bad("sinks heads", lambda a: {"sinks": torch.ones(2)}, InvalidProblem, "sinks.shape = (2,)", "[8]"),
    *[
        bad(f"{n} strided", lambda a, n=n: {n: every_other(a[n])}, Unsupported, f"{n}.stride", "last must be 1")
        for n in ("qo_indptr", "alibi_slopes", "sinks", "q")
    ],
    bad("q f16", lambda a: {"q": a["q"].half()}, InvalidArgument, "q", "torch.float16", "torch.bfloat16"),
    bad("q 4-D", lambda a: {"q": a["q"][None]}, InvalidProblem, "q.shape = (1, 29, 8, 64)", "[total_q, num_heads, head_dim]"),
    bad("q heads", lambda a: {"q": a["q"][:, :4]}, InvalidProblem, "q.shape = (29, 4, 64)", "[*, 8, 64]"),
    bad("q 3-D", lambda a: {"q": a["q"][0]}, InvalidProblem, "q.shape = (4, 8, 64)", "q_len", of=UNIFORM),
    bad("q batch", lambda a: {"q": a["q"][1:]}, InvalidProblem, "q.shape = (6, 4, 8, 64)", "[7, *, 8, 64]", of=UNIFORM),
    bad(
        "q too long",
        lambda a: {"q": torch.zeros(7, 5, 8, 64).bfloat16()},
        InvalidProblem,
        "q.shape = (7, 5, 8, 64)",
        "from 1 to max_q_len = 4",
        of=UNIFORM,
    ),
    bad("q of no rows", lambda a: {"q": a["q"][:, :0]}, InvalidProblem, "q.shape = (7, 0, 8, 64)", "q_len from 1", of=UNIFORM),
    *[
        bad(f"{n} between elements", lambda a, n=n: {n: between_elements(a[n])}, MisalignedOperand, f"{n}.data_ptr", "of 4 bytes")
        for n in (*EXTRAS, "lse")
    ],
    *[
        bad(
            f"{name} between elements",
            lambda a, place=place: {"page_table": with_operand(a["page_table"], place, between_elements)},
            MisalignedOperand,
            f"page_table.{name}.data_ptr",
            "multiple of 4 bytes",
        )
        for place, name in enumerate(("table", "seq_lens"))
    ],
    bad("q misaligned", lambda a: {"q": odd_address(a["q"])}, MisalignedOperand, "q.data_ptr"),
    bad("out rows", lambda a: {"out": a["out"][1:]}, InvalidProblem, "out.shape = (28, 8, 64)", "q's shape"),
    bad("out f32", lambda a: {"out": a["out"].float()}, InvalidArgument, "out", "torch.float32"),
    bad("out of 3 axes", lambda a: {"out": a["out"].flatten(0, 1)}, InvalidProblem, "out.shape", "q's shape", of=UNIFORM),
    bad("lse rows", lambda a: {"lse": a["lse"][1:]}, InvalidProblem, "lse.shape = (28, 8)", "[total_q, num_heads] = [29, 8]"),
    bad("lse 3-D", lambda a: {"lse": a["lse"].view(7, 4, 8)}, InvalidProblem, "lse.shape = (7, 4, 8)", "[28, 8]", of=UNIFORM),
    bad("lse f64", lambda a: {"lse": a["lse"].double()}, InvalidArgument, "lse", "torch.float64"),
    bad("out is q", lambda a: {"out": a["q"]}, InvalidArgument, "out", "overlap q's"),
    bad("lse is the sinks", lambda a: {"lse": a["sinks"].expand(29, 8)}, InvalidArgument, "lse", "overlap sinks's"),
    bad("out expanded", lambda a: {"out": a["out"][:1].expand(29, 8, 64)}, InvalidArgument, "out", "share memory"),
    *[
        bad(f"table {made.format}", lambda a, made=made: {"page_table": made}, InvalidArgument, made.format, "must be dense")
        for made in (ck.PageTable.lengths(torch.zeros(7).int()), ck.PageTable.whole(), ck.PageTable.packed(torch.zeros(8).int()))
    ],
    bad("no table", lambda a: {"page_table": None}, InvalidArgument, "page_table", "NoneType"),
    bad(
        "lengths batch",
        lambda a: {"page_table": ck.PageTable.lengths(torch.zeros(6).int())},
        InvalidProblem,
        "page_table.seq_lens.shape = (6,)",
        "[7]",
        of=NAMED["lengths"],
    ),
    bad(
        "lengths int64",
        lambda a: {"page_table": ck.PageTable.lengths(torch.zeros(7).long())},
        InvalidArgument,
        "page_table.seq_lens",
        "torch.int64",
        of=NAMED["lengths"],
    ),
    bad(
        "packed indptr",
        lambda a: {"page_table": ck.PageTable.packed(torch.zeros(7).int())},
        InvalidProblem,
        "page_table.kv_indptr.shape = (7,)",
        "[8]",
        of=NAMED["packed"],
    ),
    bad(
        "operands of a foreign table",
        lambda a: {"page_table": ck.PageTable("lengths", a["page_table"].operands[:1] * 2 + (None,))},
        InvalidArgument,
        "PageTable.lengths",
        of=NAMED["lengths"],
    ),
    bad("packed 4-D", lambda a: {"k_cache": a["k_cache"][None]}, InvalidProblem, "k_cache.shape", "total_k", of=NAMED["packed"]),
    bad("packed V", lambda a: {"v_cache": a["v_cache"][1:]}, InvalidProblem, "v_cache.shape", "k_cache's", of=NAMED["packed"]),
    bad("lengths 3-D", lambda a: {"k_cache": a["k_cache"][0]}, InvalidProblem, "k_cache.shape", "seq_len", of=NAMED["lengths"]),
    bad(
        "packed scales",
        lambda a: {"k_scale": a["k_scale"][None]},
        InvalidProblem,
        "k_scale.shape",
        "[total_k, num_kv_heads]",
        of=NAMED["int8_token_scales_packed"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("of", "change", "error", "fragments"), TENSORS)
def test_tensors(of: Case, change: Change, error: type[Exception], fragments: tuple[str, ...]) -> None:
    plan, good = select(of, "cpu"), arguments(of)
    broken = {**good, **change(good)}
    before = {name: broken[name].clone() for name in ("out", "lse")}
    for attempt in (plan.run, plan.can_implement):
        with pytest.raises(error) as caught:
            attempt(**broken)
        assert isinstance(caught.value, ck.CuteKernelsError)
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    assert all(torch.equal(broken[name], kept) for name, kept in before.items())
    plan.run(**good)
    plan.can_implement(**good)


@pytest.mark.parametrize("kind", ["paged", "flash"])
def test_decode_takes_what_its_descriptor_says(kind: str) -> None:
    """Slopes and sinks where they are described, and nowhere else, also where a run without them is remembered."""
    q, k, extra = torch.zeros(2, 8, 64).bfloat16(), torch.zeros(2, 2, 16, 64).bfloat16(), torch.ones(8)
    if kind == "flash":
        descriptor: Any = ck.FlashDecodingDescriptor(2, 8, 2, 16, 64, torch.bfloat16)
        plan_of, given = ck.FlashDecodingPlan, (q, k, k.clone())
    else:
        descriptor = ck.PagedDecodeDescriptor(2, 8, 2, 64, 16, torch.bfloat16)
        plan_of, given = ck.PagedDecodePlan, (q, k, k.clone(), ck.PageTable.dense(torch.zeros(2, 1).int(), 3))
    plain = plan_of.select(descriptor, "cpu")
    plain.run(*given)
    for name in ("alibi_slopes", "sinks"):
        for attempt in (plain.run, plain.can_implement):
            with pytest.raises(InvalidArgument, match=f"^{name}: got Tensor, must be None"):
                attempt(*given, **{name: extra})
        described = plan_of.select(
            type(descriptor)(**{**vars(descriptor), {"alibi_slopes": "alibi"}.get(name, name): True}), "cpu"
        )
        described.run(*given, **{name: extra})
        described.can_implement(*given, **{name: extra})
        with pytest.raises(InvalidArgument, match=f"^{name}: got NoneType, must be a tensor"):
            described.run(*given)
        with pytest.raises(InvalidProblem, match=rf"^{name}.shape = \(7,\): must be \[num_heads\] = \[8\]"):
            described.run(*given, **{name: extra[1:]})
