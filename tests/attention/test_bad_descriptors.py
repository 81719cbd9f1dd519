"""Malformed descriptors, layouts, preferences and devices: a typed error that names parameter, value and rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cute_kernels as ck
from tests.support.inputs import Shape

BF16, F16, I32 = torch.bfloat16, torch.float16, torch.int32
Args = dict[str, Any]

DESCRIPTOR = Shape(lengths=(5, 40, 17), head_dim=64, name="any").descriptor()
PAGED = {"batch_size": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_dtype": BF16}
FLASH = {"batch_size": 4, "num_heads": 8, "num_kv_heads": 2, "seq_len": 33, "head_dim": 64, "dtype": BF16}

STORED = [(fields, name) for fields in (PAGED, FLASH) for name in ("kv_dtype", "v_dtype")]
SCALED = [(fields, name) for fields in (PAGED, FLASH) for name in ("k_scale", "v_scale")]

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
    (PAGED, {"max_pages": 0}, ck.InvalidProblem, ("max_pages = 0", "from 1")),
    (PAGED, {"max_pages": 2.0}, ck.InvalidProblem, ("max_pages = 2.0", "int")),
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
    *[(fields, {name: "int8"}, ck.InvalidProblem, (f"{name} = 'int8'", "KVDtype")) for fields, name in STORED],
    *[(fields, {name: "head"}, ck.InvalidProblem, (f"{name} = 'head'", "KVScale")) for fields, name in SCALED],
    *[(fields, {name: None}, ck.InvalidProblem, (f"{name} = None", "KVScale")) for fields, name in SCALED],
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


ATTENTION = {**PAGED, "max_q_len": 2}
OF_ATTENTION = ("query_format", "table_format", "lse_base", "causal", "softmax_scale", "max_q_len", "max_seq_len", "layout")


@pytest.mark.parametrize("value", [[1], {}, np.zeros(3), np.zeros(1), torch.zeros(3)], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("make", "fields", "name"),
    [
        *[(ck.PagedAttentionDescriptor, ATTENTION, name) for name in OF_ATTENTION],
        *[(ck.PagedDecodeDescriptor, PAGED, name) for name in ("lse_base", "softmax_scale", "window_left", "softcap")],
        (ck.FlashDecodingDescriptor, FLASH, "lse_base"),
    ],
)
def test_what_has_no_hash_or_compares_by_element_is_no_choice(
    make: Callable[..., object], fields: Args, name: str, value: object
) -> None:
    with pytest.raises(ck.InvalidProblem, match=f"^{name} = ") as caught:
        make(**{**fields, name: value})
    assert caught.value.parameter == name


CHOICES: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    (lambda: ck.KVLayout("HDN"), ck.InvalidProblem, ("layout.order = 'HDN'", '"NHD"')),
    (lambda: ck.KVLayout.HND.with_alignment(32), ck.InvalidProblem, ("layout.alignment_bytes = 32", "16")),
    (lambda: ck.KVScale("page"), ck.InvalidProblem, ("scale.granularity = 'page'", "none, tensor, head, token")),
    (lambda: ck.KVScale(None), ck.InvalidProblem, ("scale.granularity = None", "token")),
    *[
        (lambda g=g: ck.KVScale(g, F16), ck.InvalidProblem, ("scale.dtype = torch.float16", "torch.float32"))
        for g in ("none", "tensor", "head")
    ],
    (lambda: ck.KVScale("token", BF16), ck.InvalidProblem, ("scale.dtype = torch.bfloat16", "torch.float16 per token")),
    (lambda: ck.PlanPreference(max_workspace_bytes=-1), ck.InvalidArgument, ("max_workspace_bytes", "-1", "at least 0")),
    (lambda: ck.PlanPreference(max_workspace_bytes=1.5), ck.InvalidArgument, ("max_workspace_bytes", "1.5", "int")),
    (lambda: ck.PlanPreference(arch="sm100"), ck.InvalidArgument, ("arch", "'sm100'", '"sm90"')),
    (lambda: ck.PlanPreference(deterministic=1), ck.InvalidArgument, ("deterministic", "1", "bool")),
    (lambda: ck.PlanPreference(batch_invariant=None), ck.InvalidArgument, ("batch_invariant", "None", "bool")),
    (lambda: ck.PlanPreference(validate=1), ck.InvalidArgument, ("validate", "1", "bool")),
    (lambda: ck.PagedDecodePlan.select(DESCRIPTOR, "cpu", {}), ck.InvalidArgument, ("preference", "dict", "PlanPreference")),
    (lambda: ck.PagedDecodePlan.select("x"), ck.InvalidArgument, ("descriptor", "str", "PagedDecodeDescriptor")),
    (lambda: ck.FlashDecodingPlan.select(DESCRIPTOR), ck.InvalidArgument, ("descriptor", "FlashDecodingDescriptor")),
    (lambda: ck.PagedDecodePlan.select(DESCRIPTOR, "gpu"), ck.InvalidArgument, ("device", "'gpu'", "torch.device")),
    (lambda: ck.PagedDecodePlan.select(DESCRIPTOR, "meta"), ck.Unsupported, ("device = meta", "CUDA device or the CPU")),
    (lambda: ck.PagedDecodePlan.select(DESCRIPTOR, "cuda:77"), ck.Unsupported, ("device = cuda:77", "CUDA devices")),
    (lambda: ck.PageTable.dense(torch.zeros(2, 2, dtype=I32), -1), ck.InvalidProblem, ("page_table.seq_lens = -1", "from 0")),
    (lambda: ck.PageTable.dense(torch.zeros(2, 2, dtype=I32), 1.5), ck.InvalidProblem, ("page_table.seq_lens = 1.5", "int")),
    *[
        (
            lambda n=n: ck.PageTable.dense(torch.zeros(2, 2, dtype=I32), n),
            ck.InvalidProblem,
            (f"page_table.seq_lens = {n}", "to 2**31 - 1"),
        )
        for n in (2**31, 2**32, 2**63, True)
    ],
    (
        lambda: ck.PageTable.dense(torch.zeros(2, dtype=I32), 1),
        ck.InvalidArgument,
        ("page_table.table", "(2,)", "[batch, max_pages]"),
    ),
    (lambda: ck.PageTable.dense([[0]], 1), ck.InvalidArgument, ("page_table.table", "list", "tensor")),
]


def test_the_largest_length_is_an_int32() -> None:
    lengths = ck.PageTable.dense(torch.zeros(2, 2, dtype=I32), 2**31 - 1).operands[1]
    assert (lengths.dtype, lengths.tolist()) == (I32, [2**31 - 1] * 2)


@pytest.mark.parametrize(("make", "error", "fragments"), CHOICES)
def test_choices(make: Callable[[], object], error: type[Exception], fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        make()
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
