"""Malformed descriptors, tables, tensors and workspaces: a typed error that names parameter, value and rule; nothing written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cute_kernels as ck
from tests.cases import Case, make_inputs

BF16, F16, I32, U8 = torch.bfloat16, torch.float16, torch.int32, torch.uint8
DENSE = Case("dense", (5, 40, 17), num_heads=8, num_kv_heads=2, head_dim=64, page_size=16)
CSR = replace(DENSE, table_format="csr")
NHD = replace(DENSE, layout="NHD")
Args = dict[str, Any]

PAGED = {"batch_size": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_dtype": BF16}
FLASH = {"batch_size": 4, "num_heads": 8, "num_kv_heads": 2, "seq_len": 33, "head_dim": 64, "dtype": BF16}

# what is changed, the error, and what its message names: parameter, value, rule
DESCRIPTORS = [
    *[(PAGED, {name: 0}, ck.InvalidProblem, (f"{name} = 0", "from 1")) for name in list(PAGED)[1:5]],
    *[(PAGED, {name: -3}, ck.InvalidProblem, (f"{name} = -3", "from")) for name in list(PAGED)[:5]],
    (PAGED, {"batch_size": 2**31}, ck.InvalidProblem, ("batch_size = 2147483648", "2**31 - 1")),
    (PAGED, {"head_dim": 64.0}, ck.InvalidProblem, ("head_dim = 64.0", "int")),
    (PAGED, {"num_heads": "8"}, ck.InvalidProblem, ("num_heads = '8'", "int")),
    (PAGED, {"num_heads": None}, ck.InvalidProblem, ("num_heads = None", "int")),
    (PAGED, {"page_size": True}, ck.InvalidProblem, ("page_size = True", "int")),
    (PAGED, {"num_heads": 7}, ck.InvalidProblem, ("num_heads = 7", "multiple of num_kv_heads = 2")),
    (PAGED, {"num_kv_heads": 16}, ck.InvalidProblem, ("num_heads = 8", "multiple of num_kv_heads = 16")),
    (PAGED, {"num_pages": 0}, ck.InvalidProblem, ("num_pages = 0", "from 1")),
    (PAGED, {"max_seq_len": -1}, ck.InvalidProblem, ("max_seq_len = -1", "from 1")),
    (PAGED, {"softmax_scale": math.nan}, ck.InvalidProblem, ("softmax_scale = nan", "finite")),
    (PAGED, {"softmax_scale": math.inf}, ck.InvalidProblem, ("softmax_scale = inf", "finite")),
    (PAGED, {"softmax_scale": 0.0}, ck.InvalidProblem, ("softmax_scale = 0.0", "above 0")),
    (PAGED, {"softmax_scale": -1}, ck.InvalidProblem, ("softmax_scale = -1", "above 0")),
    (PAGED, {"softmax_scale": "1"}, ck.InvalidProblem, ("softmax_scale = '1'", "number")),
    (PAGED, {"lse_base": "10"}, ck.InvalidProblem, ("lse_base = '10'", '"e" or "2"')),
    (PAGED, {"lse_base": 2}, ck.InvalidProblem, ("lse_base = 2", '"e" or "2"')),
    (PAGED, {"table_format": "coo"}, ck.InvalidProblem, ("table_format = 'coo'", '"dense" or "csr"')),
    (PAGED, {"layout": "HND"}, ck.InvalidProblem, ("layout = 'HND'", "KVLayout")),
    (PAGED, {"kv_dtype": torch.int8}, ck.InvalidProblem, ("kv_dtype = torch.int8", "KVDtype")),
    (PAGED, {"q_dtype": "bf16"}, ck.InvalidProblem, ("q_dtype = 'bf16'", "torch.dtype")),
    (PAGED, {"q_dtype": torch.float64}, ck.Unsupported, ("q_dtype = torch.float64", "torch.bfloat16")),
    (PAGED, {"q_dtype": torch.int32}, ck.Unsupported, ("q_dtype = torch.int32", "torch.bfloat16")),
    *[(FLASH, {name: -1}, ck.InvalidProblem, (f"{name} = -1", "from")) for name in list(FLASH)[:5]],
    (FLASH, {"num_heads": 9}, ck.InvalidProblem, ("num_heads = 9", "multiple of num_kv_heads = 2")),
    (FLASH, {"dtype": torch.int8}, ck.Unsupported, ("dtype = torch.int8", "torch.bfloat16")),
    (FLASH, {"dtype": 16}, ck.InvalidProblem, ("dtype = 16", "torch.dtype")),
    (FLASH, {"softmax_scale": -math.inf}, ck.InvalidProblem, ("softmax_scale = -inf", "finite")),
    (FLASH, {"alignment_bytes": 3}, ck.InvalidProblem, ("alignment_bytes = 3", "2, 4, 8, 16")),
    (FLASH, {"lse_base": "E"}, ck.InvalidProblem, ("lse_base = 'E'", '"e" or "2"')),
]


@pytest.mark.parametrize(("fields", "changes", "error", "fragments"), DESCRIPTORS, ids=lambda value: str(value)[:40])
def test_descriptors(fields: Args, changes: Args, error: type[Exception], fragments: tuple[str, ...]) -> None:
    make = ck.PagedDecodeDescriptor if fields is PAGED else ck.FlashDecodingDescriptor
    make(**fields)
    with pytest.raises(error) as caught:
        make(**{**fields, **changes})
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


CHOICES: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    (lambda: ck.KVLayout("HDN"), ck.InvalidProblem, ("layout.order = 'HDN'", '"NHD"')),
    (lambda: ck.KVLayout.HND.with_alignment(32), ck.InvalidProblem, ("layout.alignment_bytes = 32", "16")),
    (lambda: ck.PlanPreference(max_workspace_bytes=-1), ck.InvalidArgument, ("max_workspace_bytes", "-1", "at least 0")),
    (lambda: ck.PlanPreference(max_workspace_bytes=1.5), ck.InvalidArgument, ("max_workspace_bytes", "1.5", "int")),
    (lambda: ck.PlanPreference(arch="sm100"), ck.InvalidArgument, ("arch", "'sm100'", '"sm90"')),
    (lambda: ck.PlanPreference(deterministic=1), ck.InvalidArgument, ("deterministic", "1", "bool")),
    (lambda: ck.PlanPreference(batch_invariant=None), ck.InvalidArgument, ("batch_invariant", "None", "bool")),
    (lambda: ck.PagedDecodePlan.select("x"), ck.InvalidArgument, ("descriptor", "str", "PagedDecodeDescriptor")),
    (lambda: ck.FlashDecodingPlan.select(DENSE.descriptor), ck.InvalidArgument, ("descriptor", "FlashDecodingDescriptor")),
    (lambda: ck.PagedDecodePlan.select(DENSE.descriptor, "gpu"), ck.InvalidArgument, ("device", "'gpu'", "torch.device")),
    (lambda: ck.PagedDecodePlan.select(DENSE.descriptor, "meta"), ck.Unsupported, ("device = meta", "CUDA device or the CPU")),
    (lambda: ck.PagedDecodePlan.select(DENSE.descriptor, "cuda:77"), ck.Unsupported, ("device = cuda:77", "CUDA devices")),
    (lambda: ck.PageTable.dense(torch.zeros(2, 2, dtype=I32), -1), ck.InvalidProblem, ("page_table.seq_lens = -1", "from 0")),
    (lambda: ck.PageTable.dense(torch.zeros(2, 2, dtype=I32), 1.5), ck.InvalidProblem, ("page_table.seq_lens = 1.5", "int")),
    (
        lambda: ck.PageTable.dense(torch.zeros(2, dtype=I32), 1),
        ck.InvalidArgument,
        ("page_table.table", "(2,)", "[batch, max_pages]"),
    ),
    (lambda: ck.PageTable.dense([[0]], 1), ck.InvalidArgument, ("page_table.table", "list", "tensor")),
]


@pytest.mark.parametrize(("make", "error", "fragments"), CHOICES)
def test_choices(make: Callable[[], object], error: type[Exception], fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        make()
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


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


# name, case, what is changed, the error, what its message names
TENSORS: list[tuple[str, Case, Callable[[Args], Args], type[Exception], tuple[str, ...]]] = [
    *[
        (f"{name} is {kind}", DENSE, lambda a, n=name, v=value: {n: v}, ck.InvalidArgument, (name, kind, "tensor"))
        for name in ("q", "k_cache", "v_cache")
        for kind, value in (("NoneType", None), ("list", [1.0]), ("ndarray", np.zeros(3)))
    ],
    ("out is a list", DENSE, lambda a: {"out": [1]}, ck.InvalidArgument, ("out", "list", "tensor")),
    ("lse is a float", DENSE, lambda a: {"lse": 1.0}, ck.InvalidArgument, ("lse", "float", "tensor")),
    ("workspace is bytes", DENSE, lambda a: {"workspace": b"x"}, ck.InvalidArgument, ("workspace", "bytes", "tensor")),
    *[
        (
            f"{name} on meta",
            DENSE,
            lambda a, n=name: {n: a[n].to("meta")},
            ck.InvalidArgument,
            (name, "meta", "plan's device, cpu"),
        )
        for name in ("q", "k_cache", "v_cache", "out", "lse", "workspace")
    ],
    ("q f16", DENSE, lambda a: {"q": a["q"].half()}, ck.InvalidArgument, ("q", "torch.float16", "torch.bfloat16")),
    (
        "k f32",
        DENSE,
        lambda a: {"k_cache": a["k_cache"].float()},
        ck.InvalidArgument,
        ("k_cache", "torch.float32", "torch.bfloat16"),
    ),
    (
        "v uint8",
        DENSE,
        lambda a: {"v_cache": a["v_cache"].to(U8)},
        ck.InvalidArgument,
        ("v_cache", "torch.uint8", "torch.bfloat16"),
    ),
    ("out f32", DENSE, lambda a: {"out": a["out"].float()}, ck.InvalidArgument, ("out", "torch.float32", "torch.bfloat16")),
    ("lse bf16", DENSE, lambda a: {"lse": a["lse"].bfloat16()}, ck.InvalidArgument, ("lse", "torch.bfloat16", "torch.float32")),
    ("lse f64", DENSE, lambda a: {"lse": a["lse"].double()}, ck.InvalidArgument, ("lse", "torch.float64", "torch.float32")),
    ("q batch", DENSE, lambda a: {"q": a["q"][:2]}, ck.InvalidProblem, ("q.shape = (2, 8, 64)", "[3, 8, 64]")),
    ("q heads", DENSE, lambda a: {"q": a["q"][:, :4]}, ck.InvalidProblem, ("q.shape = (3, 4, 64)", "[3, 8, 64]")),
    ("q head_dim", DENSE, lambda a: {"q": a["q"][..., :32]}, ck.InvalidProblem, ("q.shape = (3, 8, 32)", "[3, 8, 64]")),
    ("q 2-D", DENSE, lambda a: {"q": a["q"][0]}, ck.InvalidProblem, ("q.shape = (8, 64)", "unit query axis")),
    (
        "q two queries",
        DENSE,
        lambda a: {"q": torch.zeros(3, 8, 2, 64, dtype=BF16)},
        ck.InvalidProblem,
        ("q.shape = (3, 8, 2, 64)", "unit"),
    ),
    (
        "k heads",
        DENSE,
        lambda a: {"k_cache": a["k_cache"][:, :1]},
        ck.InvalidProblem,
        ("k_cache.shape", "1, 16, 64", "num_kv_heads"),
    ),
    (
        "k page_size",
        DENSE,
        lambda a: {"k_cache": a["k_cache"][:, :, :8]},
        ck.InvalidProblem,
        ("k_cache.shape", "2, 8, 64", "page_size"),
    ),
    (
        "k head_dim",
        DENSE,
        lambda a: {"k_cache": a["k_cache"][..., :32]},
        ck.InvalidProblem,
        ("k_cache.shape", "16, 32", "head_dim"),
    ),
    ("k 3-D", DENSE, lambda a: {"k_cache": a["k_cache"][0]}, ck.InvalidProblem, ("k_cache.shape = (2, 16, 64)", "num_pages")),
    (
        "k layout",
        DENSE,
        lambda a: {"k_cache": a["k_cache"].transpose(1, 2)},
        ck.InvalidProblem,
        ("k_cache.shape", "16, 2, 64", "[*, 2, 16, 64]"),
    ),
    (
        "k layout NHD",
        NHD,
        lambda a: {"k_cache": a["k_cache"].transpose(1, 2)},
        ck.InvalidProblem,
        ("k_cache.shape", "[*, 16, 2, 64]"),
    ),
    ("v pages", DENSE, lambda a: {"v_cache": a["v_cache"][:-1]}, ck.InvalidProblem, ("v_cache.shape", "k_cache's")),
    (
        "v head_dim",
        DENSE,
        lambda a: {"v_cache": a["v_cache"][..., :8]},
        ck.InvalidProblem,
        ("v_cache.shape", "16, 8", "head_dim"),
    ),
    ("out shape", DENSE, lambda a: {"out": a["out"][:, :7]}, ck.InvalidProblem, ("out.shape = (3, 7, 64)", "q's shape")),
    ("out 4-D", DENSE, lambda a: {"out": a["out"][:, None]}, ck.InvalidProblem, ("out.shape = (3, 1, 8, 64)", "[3, 8, 64]")),
    ("lse shape", DENSE, lambda a: {"lse": a["lse"][:, :7]}, ck.InvalidProblem, ("lse.shape = (3, 7)", "[3, 8]")),
    ("lse transposed", DENSE, lambda a: {"lse": torch.zeros(8, 3)}, ck.InvalidProblem, ("lse.shape = (8, 3)", "[3, 8]")),
    (
        "lse 3-D",
        DENSE,
        lambda a: {"lse": a["lse"][..., None]},
        ck.InvalidProblem,
        ("lse.shape = (3, 8, 1)", "[batch_size, num_heads]"),
    ),
    ("q stride", DENSE, lambda a: {"q": every_other(a["q"])}, ck.Unsupported, ("q.stride", "2)", "last must be 1")),
    (
        "k stride",
        DENSE,
        lambda a: {"k_cache": every_other(a["k_cache"])},
        ck.Unsupported,
        ("k_cache.stride", "2)", "last must be 1"),
    ),
    (
        "v stride",
        DENSE,
        lambda a: {"v_cache": every_other(a["v_cache"])},
        ck.Unsupported,
        ("v_cache.stride", "2)", "last must be 1"),
    ),
    ("out stride", DENSE, lambda a: {"out": every_other(a["out"])}, ck.Unsupported, ("out.stride", "2)", "last must be 1")),
    (
        "k expanded",
        DENSE,
        lambda a: {"k_cache": a["k_cache"][:1].expand(9, -1, -1, -1)},
        ck.Unsupported,
        ("k_cache.stride", "(0,", "physical"),
    ),
    ("q rows", DENSE, lambda a: {"q": wide(a["q"], 1)}, ck.MisalignedOperand, ("q.stride(1) = 130 bytes", "multiple of 4")),
    (
        "k rows",
        DENSE,
        lambda a: {"k_cache": wide(a["k_cache"], 4)},
        ck.MisalignedOperand,
        ("k_cache.stride(2) = 136 bytes", "multiple of 16"),
    ),
    (
        "v rows",
        NHD,
        lambda a: {"v_cache": wide(a["v_cache"], 4)},
        ck.MisalignedOperand,
        ("v_cache.stride(2) = 136 bytes", "multiple of 16"),
    ),
    (
        "out rows",
        DENSE,
        lambda a: {"out": wide(a["out"], 1)},
        ck.MisalignedOperand,
        ("out.stride(1) = 130 bytes", "multiple of 4"),
    ),
    *[
        (
            f"k shifted {n}",
            DENSE,
            lambda a, n=n: {"k_cache": shifted(a["k_cache"], n)},
            ck.MisalignedOperand,
            ("k_cache.data_ptr", "16"),
        )
        for n in (1, 2, 3, 4)
    ],
    (
        "v shifted",
        DENSE,
        lambda a: {"v_cache": shifted(a["v_cache"], 4)},
        ck.MisalignedOperand,
        ("v_cache.data_ptr", "multiple of 16"),
    ),
    ("q shifted", DENSE, lambda a: {"q": shifted(a["q"], 1)}, ck.MisalignedOperand, ("q.data_ptr", "multiple of 4")),
    ("out shifted", DENSE, lambda a: {"out": shifted(a["out"], 1)}, ck.MisalignedOperand, ("out.data_ptr", "multiple of 4")),
    ("table None", DENSE, lambda a: {"page_table": None}, ck.InvalidArgument, ("page_table", "NoneType", "PageTable")),
    (
        "table tensor",
        DENSE,
        lambda a: {"page_table": torch.zeros(3, 4)},
        ck.InvalidArgument,
        ("page_table", "Tensor", "PageTable"),
    ),
    (
        "table csr",
        DENSE,
        lambda a: {"page_table": make_inputs(CSR).page_table},
        ck.InvalidArgument,
        ("page_table", "csr", "dense"),
    ),
    (
        "table dense",
        CSR,
        lambda a: {"page_table": make_inputs(DENSE).page_table},
        ck.InvalidArgument,
        ("page_table", "dense", "csr"),
    ),
    (
        "table int64",
        DENSE,
        lambda a: tables(a, table=torch.Tensor.long),
        ck.InvalidArgument,
        ("page_table.table", "int64", "int32"),
    ),
    (
        "table rows",
        DENSE,
        lambda a: tables(a, table=lambda t: t[:2]),
        ck.InvalidProblem,
        ("page_table.table.shape = (2,", "[3, *]"),
    ),
    (
        "table 1-D",
        DENSE,
        lambda a: tables(a, table=lambda t: t[0]),
        ck.InvalidProblem,
        ("page_table.table.shape", "[batch_size, max_pages]"),
    ),
    (
        "table stride",
        DENSE,
        lambda a: tables(a, table=every_other),
        ck.Unsupported,
        ("page_table.table.stride", "last must be 1"),
    ),
    (
        "table on meta",
        DENSE,
        lambda a: tables(a, table=lambda t: t.to("meta")),
        ck.InvalidArgument,
        ("page_table.table", "meta", "cpu"),
    ),
    ("table list", DENSE, lambda a: tables(a, table=lambda t: [[0]]), ck.InvalidArgument, ("page_table.table", "list", "tensor")),
    (
        "seq_lens short",
        DENSE,
        lambda a: tables(a, seq_lens=lambda t: t[:2]),
        ck.InvalidProblem,
        ("page_table.seq_lens.shape = (2,)", "[3]"),
    ),
    (
        "seq_lens int64",
        DENSE,
        lambda a: tables(a, seq_lens=torch.Tensor.long),
        ck.InvalidArgument,
        ("page_table.seq_lens", "int64", "int32"),
    ),
    (
        "seq_lens f32",
        DENSE,
        lambda a: tables(a, seq_lens=torch.Tensor.float),
        ck.InvalidArgument,
        ("page_table.seq_lens", "float32", "int32"),
    ),
    ("seq_lens stride", DENSE, lambda a: tables(a, seq_lens=every_other), ck.Unsupported, ("page_table.seq_lens.stride", "(2,)")),
    (
        "seq_lens 2-D",
        DENSE,
        lambda a: tables(a, seq_lens=lambda t: t[:, None]),
        ck.InvalidProblem,
        ("page_table.seq_lens.shape = (3, 1)", "[3]"),
    ),
    (
        "indptr short",
        CSR,
        lambda a: tables(a, indptr=lambda t: t[:3]),
        ck.InvalidProblem,
        ("page_table.indptr.shape = (3,)", "[4]"),
    ),
    (
        "indptr int64",
        CSR,
        lambda a: tables(a, indptr=torch.Tensor.long),
        ck.InvalidArgument,
        ("page_table.indptr", "int64", "int32"),
    ),
    (
        "indices 2-D",
        CSR,
        lambda a: tables(a, indices=lambda t: t[None]),
        ck.InvalidProblem,
        ("page_table.indices.shape", "[used_pages]"),
    ),
    (
        "indices int16",
        CSR,
        lambda a: tables(a, indices=torch.Tensor.short),
        ck.InvalidArgument,
        ("page_table.indices", "int16", "int32"),
    ),
    (
        "last long",
        CSR,
        lambda a: tables(a, last_page_len=lambda t: t.repeat(2)),
        ck.InvalidProblem,
        ("page_table.last_page_len.shape = (6,)", "[3]"),
    ),
    (
        "last None",
        CSR,
        lambda a: tables(a, last_page_len=lambda t: None),
        ck.InvalidArgument,
        ("page_table.last_page_len", "NoneType", "tensor"),
    ),
    ("out is q", DENSE, lambda a: {"out": a["q"]}, ck.InvalidArgument, ("out", "overlap q's", "its own")),
    (
        "out in k",
        DENSE,
        lambda a: {"out": a["k_cache"].view(-1)[:1536].view(3, 8, 64)},
        ck.InvalidArgument,
        ("out", "overlap k_cache's"),
    ),
    (
        "out in v",
        DENSE,
        lambda a: {"out": a["v_cache"].view(-1)[8:1544].view(3, 8, 64)},
        ck.InvalidArgument,
        ("out", "overlap v_cache's"),
    ),
    (
        "lse in seq_lens",
        DENSE,
        lambda a: {"lse": a["page_table"].operands[1].view(torch.float32).expand(8, 3).T},
        ck.InvalidArgument,
        ("lse", "overlap page_table.seq_lens's"),
    ),
    (
        "lse in workspace",
        DENSE,
        lambda a: {"lse": a["workspace"].view(torch.float32)[:24].view(3, 8)},
        ck.InvalidArgument,
        ("overlap",),
    ),
    (
        "out in itself",
        DENSE,
        lambda a: {"out": torch.zeros(8, 64, dtype=BF16).expand(3, 8, 64)},
        ck.InvalidArgument,
        ("out", "share memory"),
    ),
    (
        "lse in itself",
        DENSE,
        lambda a: {"lse": torch.zeros(3, 1).expand(3, 8)},
        ck.InvalidArgument,
        ("lse", "(1, 0)", "share memory"),
    ),
    (
        "workspace in q",
        DENSE,
        lambda a: {"workspace": a["q"].view(U8).view(-1)},
        ck.InvalidArgument,
        ("workspace", "overlap q's"),
    ),
    ("workspace f32", DENSE, lambda a: {"workspace": torch.zeros(99)}, ck.InvalidArgument, ("workspace", "float32", "uint8")),
    (
        "workspace 2-D",
        DENSE,
        lambda a: {"workspace": torch.zeros(9, 9, dtype=U8)},
        ck.InvalidArgument,
        ("workspace", "(9, 9)", "one-dim"),
    ),
    (
        "workspace strided",
        DENSE,
        lambda a: {"workspace": torch.zeros(99, dtype=U8)[::2]},
        ck.InvalidArgument,
        ("(2,)", "contiguous"),
    ),
    (
        "workspace shifted",
        DENSE,
        lambda a: {"workspace": shifted(torch.zeros(64, dtype=U8), 8)},
        ck.MisalignedOperand,
        ("workspace.data_ptr", "16"),
    ),
    ("stream", DENSE, lambda a: {"stream": 7}, ck.InvalidArgument, ("stream", "7", "torch.cuda.Stream")),
]


def arguments(case: Case) -> Args:
    """Good arguments of run, with outputs and workspace full of a pattern."""
    inputs = make_inputs(case)._asdict()
    written = {"out": torch.full((3, 8, 64), 7.0, dtype=BF16), "lse": torch.full((3, 8), 7.0)}
    return {**inputs, **written, "workspace": torch.full((4096,), 0xCD, dtype=U8)}


@pytest.mark.parametrize(
    ("case", "change", "error", "fragments"), [case[1:] for case in TENSORS], ids=[case[0] for case in TENSORS]
)
def test_tensors(case: Case, change: Callable[[Args], Args], error: type[Exception], fragments: tuple[str, ...]) -> None:
    plan = ck.PagedDecodePlan.select(case.descriptor, device="cpu")
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
    plan = ck.PagedDecodePlan.select(replace(DENSE.descriptor, max_seq_len=131_072), device="cpu")
    needed = plan.workspace_size()
    assert needed > 0
    size = needed - 1 if got == -1 else got
    workspace = None if size is None else torch.empty(size, dtype=U8)
    with pytest.raises(ck.WorkspaceTooSmall, match=str(needed)) as caught:
        plan.run(**{**arguments(DENSE), "workspace": workspace})
    assert (caught.value.needed, caught.value.got, pretend_h200) == (needed, size or 0, [])


def test_num_pages_is_binding() -> None:
    inputs = make_inputs(DENSE)
    plan = ck.PagedDecodePlan.select(replace(DENSE.descriptor, num_pages=2), device="cpu")
    with pytest.raises(ck.InvalidProblem, match=r"k_cache\.shape.*num_pages.*\[2, 2, 16, 64\]"):
        plan.run(*inputs)


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
