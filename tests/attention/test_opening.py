"""A share found from lengths as they were before the wait (device/schedule/opening.py): what it foresees changes no bit."""

import pytest
from cutlass import Boolean

from cute_kernels.device.kv import source as kv_source
from cute_kernels.device.schedule import opening
from tests.support.harness import assert_bitwise, assert_close, run, select, select_patched
from tests.support.inputs import Shape, make_inputs
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
MIXED = (700, 0, 33, 4100, 1, 2048) * 16  # 96 rows: three a lane, and a fourth that it lacks
SHAPES = {
    "one row": Shape(num_heads=32, num_kv_heads=8, lengths=(5000,)),
    "dense": Shape(num_heads=32, num_kv_heads=8, lengths=MIXED),
    "csr": Shape(num_heads=8, num_kv_heads=1, lengths=MIXED[:40], table_format="csr"),
    "contiguous": Shape(num_heads=8, num_kv_heads=2, lengths=(1000,) * 64, page_size=0),
    "int8": Shape(num_heads=16, num_kv_heads=2, lengths=MIXED[:64], **STORAGES["int8 token"]),
    "128 rows": Shape(num_heads=8, num_kv_heads=2, lengths=(*MIXED, *MIXED[:32])),
    "129 rows": Shape(num_heads=8, num_kv_heads=2, lengths=(*MIXED, *MIXED[:33])),
}


def never(rows: object, others: object) -> Boolean:
    return Boolean(False)


def halved(self: kv_source.Unsettled, coord: object, real=kv_source.Unsettled.__getitem__) -> object:
    """Lengths and pages that are others once the wait is over."""
    return real(self, coord) >> 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(opening, "same_rows", never), (kv_source.Unsettled, "__getitem__", halved)],
    ids=["anew", "stale"],
)
def test_a_share_found_anew_is_the_same(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object, shape: Shape
) -> None:
    inputs = make_inputs(shape, "cuda")
    expected = run(select(shape, "sm90"), inputs)
    assert_close(inputs, *expected)
    plan = select_patched(monkeypatch, owner, name, value, shape, "sm90")
    for _ in range(3):
        assert_bitwise(run(plan, inputs), expected)
