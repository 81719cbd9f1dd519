"""Malformed tensors, tables and workspaces: a typed error that names parameter, value and rule; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported
from tests.support.inputs import Shape, make_operands

BF16, F16, I32, U8 = torch.bfloat16, torch.float16, torch.int32, torch.uint8
DENSE = Shape(lengths=(5, 40, 17), num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, name="dense")
CSR = replace(DENSE, table_format="csr")
NHD = replace(DENSE, order="NHD")
Args = dict[str, Any]


def bad(name: str, change: Callable[[Args], Args], error: type[Exception], *fragments: str, case: Shape = DENSE) -> Any:
    """One malformed run: what is changed of good arguments, the error, and what its message names."""
    return pytest.param(case, change, error, fragments, id=name)


def tables(a: Args, **changes: Any) -> Args:
    """The arguments with some operands of their page table replaced."""
    names = {"table": 0, "seq_lens": 1} if a["page_table"].format == "dense" else {"indices": 0, "indptr": 1, "last_page_len": 2}
    operands = list(a["page_table"].operands)
    for name, change in changes.items():
        operands[names[name]] = change(operands[names[name]])
    return {"page_table": ck.PageTable(a["page_table"].format, tuple(operands))}


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same shape in fresh memory whose address is `elements` elements past a 64-byte boundary."""
    storage = torch.zeros(tensor.numel() + elements + 64, dtype=tensor.dtype)
    skip = -storage.data_ptr() % 64 // tensor.element_size()
    return storage[skip + elements :][: tensor.numel()].view(tensor.shape)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a last stride of 2."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]


def wide(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    """The same shape with rows `extra` elements farther apart."""
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + extra, dtype=tensor.dtype)[..., : tensor.shape[-1]]


TENSORS = [
    *[
        bad(f"{name} is {kind}", lambda a, n=name, v=value: {n: v}, InvalidArgument, name, kind, "tensor")
        for name in ("q", "k_cache", "v_cache")
        for kind, value in (("NoneType", None), ("list", [1.0]), ("ndarray", np.zeros(3)))
    ],
    bad("out is a list", lambda a: {"out": [1]}, InvalidArgument, "out", "list", "tensor"),
    bad("lse is a float", lambda a: {"lse": 1.0}, InvalidArgument, "lse", "float", "tensor"),
    bad("workspace is bytes", lambda a: {"workspace": b"x"}, InvalidArgument, "workspace", "bytes", "tensor"),
    *[
        bad(f"{name} on meta", lambda a, n=name: {n: a[n].to("meta")}, InvalidArgument, name, "meta", "plan's device, cpu")
        for name in ("q", "k_cache", "v_cache", "out", "lse", "workspace")
    ],
    bad("q f16", lambda a: {"q": a["q"].half()}, InvalidArgument, "q", "torch.float16", "torch.bfloat16"),
    bad("k f32", lambda a: {"k_cache": a["k_cache"].float()}, InvalidArgument, "k_cache", "torch.float32", "torch.bfloat16"),
    bad("v uint8", lambda a: {"v_cache": a["v_cache"].to(U8)}, InvalidArgument, "v_cache", "torch.uint8", "torch.bfloat16"),
    bad("out f32", lambda a: {"out": a["out"].float()}, InvalidArgument, "out", "torch.float32", "torch.bfloat16"),
    bad("lse bf16", lambda a: {"lse": a["lse"].bfloat16()}, InvalidArgument, "lse", "torch.bfloat16", "torch.float32"),
    bad("lse f64", lambda a: {"lse": a["lse"].double()}, InvalidArgument, "lse", "torch.float64", "torch.float32"),
    bad("q batch", lambda a: {"q": a["q"][:2]}, InvalidProblem, "q.shape = (2, 8, 64)", "[3, 8, 64]"),
    bad("q heads", lambda a: {"q": a["q"][:, :4]}, InvalidProblem, "q.shape = (3, 4, 64)", "[3, 8, 64]"),
    bad("q head_dim", lambda a: {"q": a["q"][..., :32]}, InvalidProblem, "q.shape = (3, 8, 32)", "[3, 8, 64]"),
    bad("q 2-D", lambda a: {"q": a["q"][0]}, InvalidProblem, "q.shape = (8, 64)", "unit query axis"),
    bad("q two queries", lambda a: {"q": torch.zeros(3, 8, 2, 64, dtype=BF16)}, Unsupported, "q.shape = (3, 8, 2, 64)", "unit"),
    bad("k heads", lambda a: {"k_cache": a["k_cache"][:, :1]}, InvalidProblem, "k_cache.shape", "1, 16, 64", "num_kv_heads"),
    bad("k page_size", lambda a: {"k_cache": a["k_cache"][:, :, :8]}, InvalidProblem, "k_cache.shape", "2, 8, 64", "page_size"),
    bad("k head_dim", lambda a: {"k_cache": a["k_cache"][..., :32]}, InvalidProblem, "k_cache.shape", "16, 32", "head_dim"),
    bad("k 3-D", lambda a: {"k_cache": a["k_cache"][0]}, InvalidProblem, "k_cache.shape = (2, 16, 64)", "num_pages"),
    bad(
        "k layout",
        lambda a: {"k_cache": a["k_cache"].transpose(1, 2)},
        InvalidProblem,
        "k_cache.shape",
        "16, 2, 64",
        "[*, 2, 16, 64]",
    ),
    bad(
        "k layout NHD",
        lambda a: {"k_cache": a["k_cache"].transpose(1, 2)},
        InvalidProblem,
        "k_cache.shape",
        "[*, 16, 2, 64]",
        case=NHD,
    ),
    bad("v pages", lambda a: {"v_cache": a["v_cache"][:-1]}, InvalidProblem, "v_cache.shape", "k_cache's"),
    bad("v head_dim", lambda a: {"v_cache": a["v_cache"][..., :8]}, InvalidProblem, "v_cache.shape", "16, 8", "head_dim"),
    bad("out shape", lambda a: {"out": a["out"][:, :7]}, InvalidProblem, "out.shape = (3, 7, 64)", "q's shape"),
    bad("out 4-D", lambda a: {"out": a["out"][:, None]}, InvalidProblem, "out.shape = (3, 1, 8, 64)", "[3, 8, 64]"),
    bad("lse shape", lambda a: {"lse": a["lse"][:, :7]}, InvalidProblem, "lse.shape = (3, 7)", "[3, 8]"),
    bad("lse transposed", lambda a: {"lse": torch.zeros(8, 3)}, InvalidProblem, "lse.shape = (8, 3)", "[3, 8]"),
    bad("lse 3-D", lambda a: {"lse": a["lse"][..., None]}, InvalidProblem, "lse.shape = (3, 8, 1)", "[batch_size, num_heads]"),
    bad("q stride", lambda a: {"q": every_other(a["q"])}, Unsupported, "q.stride", "2)", "last must be 1"),
    bad("k stride", lambda a: {"k_cache": every_other(a["k_cache"])}, Unsupported, "k_cache.stride", "2)", "last must be 1"),
    bad("v stride", lambda a: {"v_cache": every_other(a["v_cache"])}, Unsupported, "v_cache.stride", "2)", "last must be 1"),
    bad("out stride", lambda a: {"out": every_other(a["out"])}, Unsupported, "out.stride", "2)", "last must be 1"),
    bad(
        "k expanded",
        lambda a: {"k_cache": a["k_cache"][:1].expand(9, -1, -1, -1)},
        Unsupported,
        "k_cache.stride",
        "(0,",
        "physical",
    ),
    bad("q rows", lambda a: {"q": wide(a["q"], 1)}, MisalignedOperand, "q.stride(1) = 130 bytes", "multiple of 4"),
    bad(
        "k rows",
        lambda a: {"k_cache": wide(a["k_cache"], 4)},
        MisalignedOperand,
        "k_cache.stride(2) = 136 bytes",
        "multiple of 16",
    ),
    bad(
        "v rows",
        lambda a: {"v_cache": wide(a["v_cache"], 4)},
        MisalignedOperand,
        "v_cache.stride(2) = 136 bytes",
        "multiple of 16",
        case=NHD,
    ),
    bad("out rows", lambda a: {"out": wide(a["out"], 1)}, MisalignedOperand, "out.stride(1) = 130 bytes", "multiple of 4"),
    *[
        bad(f"k shifted {n}", lambda a, n=n: {"k_cache": shifted(a["k_cache"], n)}, MisalignedOperand, "k_cache.data_ptr", "16")
        for n in (1, 2, 3, 4)
    ],
    bad("v shifted", lambda a: {"v_cache": shifted(a["v_cache"], 4)}, MisalignedOperand, "v_cache.data_ptr", "multiple of 16"),
    bad("q shifted", lambda a: {"q": shifted(a["q"], 1)}, MisalignedOperand, "q.data_ptr", "multiple of 4"),
    bad("out shifted", lambda a: {"out": shifted(a["out"], 1)}, MisalignedOperand, "out.data_ptr", "multiple of 4"),
    bad("table None", lambda a: {"page_table": None}, InvalidArgument, "page_table", "NoneType", "PageTable"),
    bad("table tensor", lambda a: {"page_table": torch.zeros(3, 4)}, InvalidArgument, "page_table", "Tensor", "PageTable"),
    bad("table csr", lambda a: {"page_table": make_operands(CSR).page_table}, InvalidArgument, "page_table", "csr", "dense"),
    bad(
        "table dense",
        lambda a: {"page_table": make_operands(DENSE).page_table},
        InvalidArgument,
        "page_table",
        "dense",
        "csr",
        case=CSR,
    ),
    bad(
        "table operands",
        lambda a: {"page_table": ck.PageTable("dense", a["page_table"].operands[:2])},
        InvalidArgument,
        "page_table",
        "PageTable.dense",
    ),
    bad(
        "table of both",
        lambda a: {"page_table": ck.PageTable("dense", (*a["page_table"].operands[:2], a["page_table"].operands[1]))},
        InvalidArgument,
        "page_table",
        "PageTable.dense",
    ),
    bad("table int64", lambda a: tables(a, table=torch.Tensor.long), InvalidArgument, "page_table.table", "int64", "int32"),
    bad("table rows", lambda a: tables(a, table=lambda t: t[:2]), InvalidProblem, "page_table.table.shape = (2,", "[3, *]"),
    bad(
        "table 1-D",
        lambda a: tables(a, table=lambda t: t[0]),
        InvalidProblem,
        "page_table.table.shape",
        "[batch_size, max_pages]",
    ),
    bad("table stride", lambda a: tables(a, table=every_other), Unsupported, "page_table.table.stride", "last must be 1"),
    bad("table on meta", lambda a: tables(a, table=lambda t: t.to("meta")), InvalidArgument, "page_table.table", "meta", "cpu"),
    bad("table list", lambda a: tables(a, table=lambda t: [[0]]), InvalidArgument, "page_table.table", "list", "tensor"),
    bad(
        "seq_lens short", lambda a: tables(a, seq_lens=lambda t: t[:2]), InvalidProblem, "page_table.seq_lens.shape = (2,)", "[3]"
    ),
    bad(
        "seq_lens int64",
        lambda a: tables(a, seq_lens=torch.Tensor.long),
        InvalidArgument,
        "page_table.seq_lens",
        "int64",
        "int32",
    ),
    bad(
        "seq_lens f32",
        lambda a: tables(a, seq_lens=torch.Tensor.float),
        InvalidArgument,
        "page_table.seq_lens",
        "float32",
        "int32",
    ),
    bad("seq_lens stride", lambda a: tables(a, seq_lens=every_other), Unsupported, "page_table.seq_lens.stride", "(2,)"),
    bad(
        "seq_lens 2-D",
        lambda a: tables(a, seq_lens=lambda t: t[:, None]),
        InvalidProblem,
        "page_table.seq_lens.shape = (3, 1)",
        "[3]",
    ),
    bad(
        "indptr short",
        lambda a: tables(a, indptr=lambda t: t[:3]),
        InvalidProblem,
        "page_table.indptr.shape = (3,)",
        "[4]",
        case=CSR,
    ),
    bad(
        "indptr int64",
        lambda a: tables(a, indptr=torch.Tensor.long),
        InvalidArgument,
        "page_table.indptr",
        "int64",
        "int32",
        case=CSR,
    ),
    bad(
        "indices 2-D",
        lambda a: tables(a, indices=lambda t: t[None]),
        InvalidProblem,
        "page_table.indices.shape",
        "[used_pages]",
        case=CSR,
    ),
    bad(
        "indices int16",
        lambda a: tables(a, indices=torch.Tensor.short),
        InvalidArgument,
        "page_table.indices",
        "int16",
        "int32",
        case=CSR,
    ),
    bad(
        "last long",
        lambda a: tables(a, last_page_len=lambda t: t.repeat(2)),
        InvalidProblem,
        "page_table.last_page_len.shape = (6,)",
        "[3]",
        case=CSR,
    ),
    bad(
        "last None",
        lambda a: tables(a, last_page_len=lambda t: None),
        InvalidArgument,
        "page_table.last_page_len",
        "NoneType",
        "tensor",
        case=CSR,
    ),
    bad("out is q", lambda a: {"out": a["q"]}, InvalidArgument, "out", "overlap q's", "its own"),
    bad("out in k", lambda a: {"out": a["k_cache"].view(-1)[:1536].view(3, 8, 64)}, InvalidArgument, "out", "overlap k_cache's"),
    bad("out in v", lambda a: {"out": a["v_cache"].view(-1)[8:1544].view(3, 8, 64)}, InvalidArgument, "out", "overlap v_cache's"),
    bad(
        "lse in seq_lens",
        lambda a: {"lse": a["page_table"].operands[1].view(torch.float32).expand(8, 3).T},
        InvalidArgument,
        "lse",
        "overlap page_table.seq_lens's",
    ),
    bad("lse in workspace", lambda a: {"lse": a["workspace"].view(torch.float32)[:24].view(3, 8)}, InvalidArgument, "overlap"),
    bad(
        "out in itself",
        lambda a: {"out": torch.zeros(8, 64, dtype=BF16).expand(3, 8, 64)},
        InvalidArgument,
        "out",
        "share memory",
    ),
    bad("lse in itself", lambda a: {"lse": torch.zeros(3, 1).expand(3, 8)}, InvalidArgument, "lse", "(1, 0)", "share memory"),
    bad("workspace in q", lambda a: {"workspace": a["q"].view(U8).view(-1)}, InvalidArgument, "workspace", "overlap q's"),
    bad("workspace f32", lambda a: {"workspace": torch.zeros(99)}, InvalidArgument, "workspace", "float32", "uint8"),
    bad("workspace 2-D", lambda a: {"workspace": torch.zeros(9, 9, dtype=U8)}, InvalidArgument, "workspace", "(9, 9)", "one-dim"),
    bad("workspace strided", lambda a: {"workspace": torch.zeros(99, dtype=U8)[::2]}, InvalidArgument, "(2,)", "contiguous"),
    bad(
        "workspace shifted",
        lambda a: {"workspace": shifted(torch.zeros(64, dtype=U8), 8)},
        MisalignedOperand,
        "workspace.data_ptr",
        "16",
    ),
    bad("stream", lambda a: {"stream": 7}, InvalidArgument, "stream", "7", "torch.cuda.Stream"),
]


def arguments(case: Shape) -> Args:
    """Good arguments of run, with outputs and workspace full of a pattern."""
    inputs = make_operands(case)._asdict()
    written = {"out": torch.full((3, 8, 64), 7.0, dtype=BF16), "lse": torch.full((3, 8), 7.0)}
    return {**inputs, **written, "workspace": torch.full((4096,), 0xCD, dtype=U8)}


@pytest.mark.parametrize(("case", "change", "error", "fragments"), TENSORS)
def test_tensors(case: Shape, change: Callable[[Args], Args], error: type[Exception], fragments: tuple[str, ...]) -> None:
    plan = ck.PagedDecodePlan.select(case.descriptor(), device="cpu")
    good = arguments(case)
    bad = {**good, **change(good)}
    before = {name: bad[name].clone() for name in ("out", "lse", "workspace") if isinstance(bad[name], torch.Tensor)}
    with pytest.raises(error) as caught:
        plan.run(**bad)
    assert isinstance(caught.value, ck.CuteKernelsError)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    for name, value in before.items():
        if not value.is_meta:
            torch.testing.assert_close(bad[name], value, rtol=0, atol=0, equal_nan=True)
    plan.run(**good)  # the plan is as good as before


@pytest.mark.parametrize("got", [None, 0, 1, -1])
def test_workspace_too_small(pretend_h200: list, got: int | None) -> None:
    plan = ck.PagedDecodePlan.select(replace(DENSE.descriptor(), max_seq_len=131_072), device="cpu")
    needed = plan.workspace_size()
    assert needed > 0
    size = needed - 1 if got == -1 else got
    workspace = None if size is None else torch.empty(size, dtype=U8)
    with pytest.raises(ck.WorkspaceTooSmall, match=str(needed)) as caught:
        plan.run(**{**arguments(DENSE), "workspace": workspace})
    assert (caught.value.needed, caught.value.got, pretend_h200) == (needed, size or 0, [])


def test_num_pages_is_binding() -> None:
    inputs = make_operands(DENSE)
    plan = ck.PagedDecodePlan.select(replace(DENSE.descriptor(), num_pages=2), device="cpu")
    with pytest.raises(ck.InvalidProblem, match=r"k_cache\.shape.*num_pages.*\[2, 2, 16, 64\]"):
        plan.run(*inputs)


@pytest.mark.parametrize(("case", "widest"), [(DENSE, 5), (CSR, 2)], ids=str)
def test_max_pages_is_binding(case: Shape, widest: int) -> None:
    """The table of three rows has five columns, the CSR one six indices: two for each row."""
    inputs = make_operands(case)
    fits = ck.PagedDecodePlan.select(replace(case.descriptor(), max_pages=widest), device="cpu")
    expected = ck.PagedDecodePlan.select(case.descriptor(), device="cpu").run(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(fits.run(*inputs), expected, strict=True))
    plan = ck.PagedDecodePlan.select(replace(case.descriptor(), max_pages=widest - 1), device="cpu")
    name, most = ("table", "max_pages = 4 columns") if case is DENSE else ("indices", "batch_size * max_pages = 3 entries")
    for attempt in (plan.run, plan.can_implement):
        with pytest.raises(ck.InvalidProblem) as caught:
            attempt(*inputs)
        assert f"page_table.{name}.shape" in str(caught.value)
        assert most in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "fragment"),
    [
        ("k", lambda k: k[:, :, :9], "[3, 2, 10, 64]"),
        ("k", lambda k: k[:2], "[3, 2, 10, 64]"),
        ("v", lambda v: v[:, :1], "num_kv_heads"),
        ("v", lambda v: v[..., :8], "head_dim"),
    ],
)
def test_contiguous_shapes(name: str, change: Callable[[torch.Tensor], torch.Tensor], fragment: str) -> None:
    plan = ck.FlashDecodingPlan.select(ck.FlashDecodingDescriptor.new_gqa(3, 8, 2, 10, 64, F16), device="cpu")
    good = {"q": torch.zeros(3, 8, 64).half(), "k": torch.zeros(3, 2, 10, 64).half(), "v": torch.zeros(3, 2, 10, 64).half()}
    plan.run(**good)
    with pytest.raises(ck.InvalidProblem) as caught:
        plan.run(**{**good, name: change(good[name])})
    assert fragment in str(caught.value)
