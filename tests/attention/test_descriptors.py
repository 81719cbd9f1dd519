"""Descriptors: defaults, identity, derived facts, and the order in which rules are checked."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels.kv.types import vector_bytes


def paged(**changes) -> ck.PagedDecodeDescriptor:
    fields = {"batch_size": 4, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "q_dtype": torch.bfloat16}
    return ck.PagedDecodeDescriptor(**{**fields, **changes})


def test_equal_descriptors_are_one_cache_key() -> None:
    assert paged() == paged(kv_dtype=ck.KVDtype.BF16)
    assert len({paged(), paged(kv_dtype=ck.KVDtype.BF16), paged(page_size=64)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        paged().head_dim = 64


def flash(**changes) -> ck.FlashDecodingDescriptor:
    fields = {"batch_size": 4, "num_heads": 32, "num_kv_heads": 8, "seq_len": 33, "head_dim": 128, "dtype": torch.bfloat16}
    return ck.FlashDecodingDescriptor(**{**fields, **changes})


@pytest.mark.parametrize("make", [paged, flash])
def test_storage_and_scales_are_part_of_the_key(make) -> None:
    """K and V each; a v_dtype that is kv_dtype says nothing, so that `replace` of kv_dtype changes both."""
    int8, e4m3 = ck.KVDtype.INT8, ck.KVDtype.E4M3
    changes = [
        {},
        {"kv_dtype": int8},
        {"kv_dtype": int8, "v_dtype": e4m3},
        {"v_dtype": int8},
        {"k_scale": ck.KVScale.HEAD},
        {"v_scale": ck.KVScale.HEAD},
        {"v_scale": ck.KVScale.TOKEN},
        {"v_scale": ck.KVScale.TOKEN_F16},
    ]
    assert len({make(**change) for change in changes}) == len({make(**change).problem for change in changes}) == len(changes)
    assert make(kv_dtype=int8) == make(kv_dtype=int8, v_dtype=int8)
    assert make(k_scale=ck.KVScale("none")) == make()
    assert make(v_scale=ck.KVScale("token", torch.float16)) == make(v_scale=ck.KVScale.TOKEN_F16)
    replaced = dataclasses.replace(make(v_dtype=ck.KVDtype.BF16), kv_dtype=int8).problem
    assert (replaced.kv_dtype, replaced.v_dtype, replaced.cache_type) == (int8, int8, "int8")


@pytest.mark.parametrize("make", [paged, flash])
def test_problem_of_an_8_bit_cache(make) -> None:
    problem = make(kv_dtype=ck.KVDtype.E4M3, v_dtype=ck.KVDtype.BF16, k_scale=ck.KVScale.TOKEN_F16, head_dim=24).problem
    assert (problem.kv_dtype, problem.v_dtype, problem.vector_bytes) == (ck.KVDtype.E4M3, ck.KVDtype.BF16, 8)
    assert "cache e4m3/bf16, k_scale token f16, 8-byte aligned" in str(problem)
    assert make(kv_dtype=ck.KVDtype.INT8, head_dim=5).problem.vector_bytes == 1


def test_problem_of_a_paged_descriptor() -> None:
    problem = paged(table_format="csr", max_seq_len=4096, lse_base="2").problem
    assert (problem.source, problem.table_format, problem.group_size, problem.vector_bytes) == ("paged", "csr", 4, 16)
    assert (problem.max_seq_len, problem.lse_base, problem.element_type) == (4096, "2", "bf16")


def test_scale_defaults_to_the_inverse_root_of_head_dim() -> None:
    assert paged(head_dim=64).scale == 0.125
    assert paged(softmax_scale=1).scale == 1.0


def test_flash_constructors() -> None:
    mha = ck.FlashDecodingDescriptor.new(2, 8, 100, 64, torch.float16)
    gqa = ck.FlashDecodingDescriptor.new_gqa(2, 8, 2, 100, 64, torch.float16).with_scale(0.3)
    assert (mha.num_kv_heads, mha.group_size, mha.scale) == (8, 1, 0.125)
    assert (gqa.num_kv_heads, gqa.group_size, gqa.scale, gqa.seq_len) == (2, 4, 0.3, 100)
    assert gqa.problem.source == "contiguous"
    assert gqa.problem.page_size == 0


def test_empty_batch_and_empty_cache_are_legal() -> None:
    assert paged(batch_size=0).problem.batch_size == 0
    assert ck.FlashDecodingDescriptor.new(0, 8, 0, 64, torch.float16).seq_len == 0


@pytest.mark.parametrize(
    ("row_bytes", "alignment", "expected"),
    [(256, None, 16), (256, 8, 8), (200, None, 8), (200, 16, 8), (14, None, 2), (2, None, 2), (128, 2, 2), (4, 16, 4)],
)
def test_vector_bytes(row_bytes: int, alignment: int | None, expected: int) -> None:
    assert vector_bytes(row_bytes, alignment) == expected


def test_layout_alignment_reaches_the_problem() -> None:
    assert paged(layout=ck.KVLayout.NHD.with_alignment(4)).problem.vector_bytes == 4
    assert ck.KVLayout.NHD.with_alignment(4).order == "NHD"


def test_rules_are_checked_in_order() -> None:
    """Paged: extents, divisibility, dtype. Contiguous: dtype, extents, divisibility."""
    with pytest.raises(ck.InvalidProblem, match="num_heads"):
        paged(num_heads=0, q_dtype=torch.float64)
    with pytest.raises(ck.InvalidProblem, match="num_kv_heads = 8"):
        paged(num_heads=30, k_scale=1.0, q_dtype=torch.float64)
    with pytest.raises(ck.InvalidProblem, match="kv_dtype = 8"):
        paged(kv_dtype=8, k_scale=1.0, q_dtype=torch.float64)
    with pytest.raises(ck.InvalidProblem, match=r"k_scale = 1\.0"):
        paged(k_scale=1.0, q_dtype=torch.float64)
    with pytest.raises(ck.Unsupported, match="float64"):
        paged(q_dtype=torch.float64)
    with pytest.raises(ck.Unsupported, match="float64"):
        ck.FlashDecodingDescriptor.new_gqa(2, 7, 2, -1, 64, torch.float64)
    with pytest.raises(ck.InvalidProblem, match="seq_len = -1"):
        ck.FlashDecodingDescriptor.new_gqa(2, 7, 2, -1, 64, torch.float16)
    with pytest.raises(ck.InvalidProblem, match="num_heads = 7"):
        ck.FlashDecodingDescriptor.new_gqa(2, 7, 2, 1, 64, torch.float16)
    with pytest.raises(ck.Unsupported, match="float64"):
        flash(dtype=torch.float64, v_scale=1.0)
    with pytest.raises(ck.InvalidProblem, match="multiple"):
        flash(num_heads=30, v_scale=1.0)


def test_errors_belong_to_one_hierarchy_and_survive_pickling() -> None:
    errors = [
        ck.InvalidProblem("head_dim", 0, "must be at least 1"),
        ck.InvalidArgument("q", "is on cpu"),
        ck.Unsupported(["one", "two"]),
        ck.WorkspaceTooSmall(10, 3),
        ck.MisalignedOperand("q.data_ptr", 6, 4),
        ck.CompileFailed("x"),
        ck.LaunchFailed("x"),
        ck.InvalidPlanTable("h200.json", 0, "must be a list"),
    ]
    for error in errors:
        assert isinstance(error, ck.CuteKernelsError)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert issubclass(ck.InvalidProblem, ValueError)
    assert issubclass(ck.InvalidArgument, ValueError)
    assert issubclass(ck.Unsupported, NotImplementedError)
    assert (errors[3].needed, errors[3].got) == (10, 3)
    assert errors[2].reasons == ("one", "two")
