"""What the generator of all decode problems leaves around a problem is as hostile as the tests that use it take it to be."""

from __future__ import annotations

import math

import pytest

import cute_kernels as ck
from tests.support.inputs import CASES, INT_MAX, INT_MIN, SPARE_PAGES, Shape, make_inputs

SCALED = Shape(kv_dtype=ck.KVDtype.E4M3, k_scale=ck.KVScale.TOKEN, v_scale=ck.KVScale.TOKEN_F16, name="token scales")


@pytest.mark.parametrize("shape", [*CASES, SCALED], ids=str)
def test_every_slot_of_no_row_holds_poison_and_no_other(shape: Shape) -> None:
    """Token by token, from the rows' pages; a page is one row's, and some are none's."""
    inputs = make_inputs(shape, "cpu")
    pages = [int(page) for row in inputs.rows for page in row]
    assert len(set(pages)) == len(pages) == len(inputs.k) - SPARE_PAGES
    tensors = [cache.transpose(1, 2).float() for cache in (inputs.k, inputs.v)]
    tensors += [scale.float() for scale in inputs.scales.values() if scale is not None]
    for tensor in tensors:
        poisoned = {(p, s) for p in range(len(inputs.k)) for s in range(shape.page_size) if tensor[p, s].isnan().all()}
        clean = {(p, s) for p in range(len(inputs.k)) for s in range(shape.page_size) if tensor[p, s].isfinite().all()}
        owned = {
            (int(inputs.rows[row][token // shape.page_size]), token % shape.page_size)
            for row, length in enumerate(shape.lengths)
            for token in range(length)
        }
        assert clean == owned and len(poisoned) + len(clean) == math.prod(tensor.shape[:2])


def test_entries_past_a_rows_pages_are_garbage_of_every_kind() -> None:
    inputs = make_inputs(CASES[0], "cpu")
    table, pool = inputs.table().operands[0].tolist(), len(inputs.k)
    past = [entries[len(row) :] for row, entries in zip(inputs.rows, table, strict=True)]
    assert {entry for entries in past for entry in entries} == {-1, INT_MIN, INT_MAX, pool}
    assert min(map(len, past)) == 2
