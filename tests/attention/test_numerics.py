"""Every shape class against f64 by the tolerance rule, on the CPU variant and on the GPU variants."""

import pytest
import torch

from tests.support.harness import BACKENDS, assert_close, run, select
from tests.support.inputs import LENGTHS, Shape, make_inputs
from tests.support.storage import STORAGES, magnitudes

NARROW = 16  # of fewer columns, V of both signs may cancel in all: what rounding P costs is then no part of what is left
SHORT = (0, 1, 17, 64, 129)


def check(shape: Shape, backend: str, **preference) -> None:
    inputs = make_inputs(shape, "cpu" if backend == "cpu" else "cuda")
    if shape.head_dim < NARROW:
        inputs.v = magnitudes(inputs.v)
    assert_close(inputs, *run(select(shape, backend, **preference), inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype, backend: str) -> None:
    check(Shape(head_dim=head_dim, dtype=dtype, lengths=SHORT), backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.id != "sm90"])
@pytest.mark.parametrize("head_dim", [1, 2, 5, 33, 36, 100, 120, 200, 255])
def test_padded_head_dims(head_dim: int, backend: str) -> None:
    check(Shape(head_dim=head_dim, page_size=8, lengths=SHORT), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "storage"),
    [(32, 5, 8, "e4m3"), (96, 32, 1024, "int8 token"), (160, 8, 16, "e4m3"), (192, 12, 64, "int8 token"), (224, 2, 24, "e4m3")],
    ids=str,
)
def test_other_heads_of_8_bits(head_dim: int, group: int, page_size: int, storage: str, backend: str) -> None:
    """Those of 64, 128 and 256 columns and groups of 1, 4 and 16: test_scales.py."""
    lengths = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 1, 129)
    check(Shape(2 * group, 2, head_dim, page_size, lengths, **STORAGES[storage]), backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.id != "sm90"])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "storage"),
    [(1, 2, "e4m3"), (33, 17, "int8 token"), (36, 5, "e4m3"), (80, 8, "e4m3"), (200, 1, "int8 token"), (255, 17, "e4m3")],
    ids=str,
)
def test_padded_heads_of_8_bits(head_dim: int, page_size: int, storage: str, backend: str) -> None:
    lengths = (0, 1, page_size, 31, 32, 33, 129)
    check(Shape(head_dim=head_dim, page_size=page_size, lengths=lengths, **STORAGES[storage]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [*range(1, 17), 24, 32, 128])
def test_groups(group: int, backend: str) -> None:
    check(Shape(num_heads=2 * group, num_kv_heads=2, head_dim=64, lengths=(0, 33, 150)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [8, 16, 24, 48, 64, 128, 256, 1024])
def test_page_sizes(page_size: int, backend: str) -> None:
    lengths = (page_size - 1, page_size, page_size + 1, 3 * page_size - 1, 3 * page_size + 1)
    check(Shape(page_size=page_size, lengths=lengths), backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.id != "sm90"])
@pytest.mark.parametrize("page_size", [1, 2, 5, 17])
def test_small_and_odd_page_sizes(page_size: int, backend: str) -> None:
    check(Shape(page_size=page_size, lengths=(0, 1, page_size, 31, 32, 33, 129)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("table_format", ["dense", "csr"])
def test_layouts_and_tables(table_format: str, order: str, backend: str) -> None:
    check(Shape(order=order, table_format=table_format), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_seq_len", [64, 1000, 100_000])
@pytest.mark.parametrize("base", ["e", "2"])
def test_splits_and_lse_bases(base: str, max_seq_len: int, backend: str) -> None:
    check(Shape(lse_base=base, max_seq_len=max_seq_len, lengths=(*LENGTHS, 3001)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 65, 1000])
def test_contiguous(length: int, head_dim: int, backend: str) -> None:
    check(Shape(page_size=0, head_dim=head_dim, lengths=(length,) * 3), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_scale(backend: str) -> None:
    check(Shape(softmax_scale=0.37), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_workspace_when_it_is_forbidden(backend: str) -> None:
    shape = Shape(lengths=(3001,))
    assert select(shape, backend, max_workspace_bytes=0).workspace_size() == 0
    check(shape, backend, max_workspace_bytes=0)
