"""Where threads read and write as they make tiles of 8 bits 16, against the layout of a tile as mainloop/tile.py describes it."""

from __future__ import annotations

from typing import Any

import pytest

from cute_kernels.config.tiling import RingShape
from cute_kernels.device.attend.widen import MOST_PLACES, NARROW_BYTES, WIDE_BYTES, Places, per_row, places_of, turns_of

SHAPES = [  # (head_dim, tokens of a tile, of a box)
    (32, 112, 16),
    (64, 112, 16),
    (96, 112, 8),
    (96, 112, 64),
    (128, 112, 16),
    (128, 128, 128),
    (160, 64, 16),
    (192, 64, 8),
    (256, 32, 16),
    (256, 32, 32),
]


THREADS = (96, 192)  # of three warps for each cache, and of six for one


def address_in(shape: RingShape, token: int, byte: int) -> int:
    """Of a token's byte in a tile: slabs of a box's rows, in each its column blocks, address bits 4 on XORed with bits 7 on."""
    rows = shape.tile_n if shape.by_block else shape.box_rows
    row_bytes = 2 * shape.column_block
    slab, row = divmod(token, rows)
    offset = slab * rows * 2 * shape.units + byte // row_bytes * rows * row_bytes + row * row_bytes + byte % row_bytes
    return offset ^ ((offset >> 7) % (row_bytes // 16) << 4)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("head_dim", "tile_n", "box_rows"), SHAPES)
def test_every_element_is_read_and_written_once_where_it_lies(head_dim: int, tile_n: int, box_rows: int, threads: int) -> None:
    """Of a tile at some address: load and store of each turn are of the same token and columns, and all together are the tile."""
    narrow, wide = RingShape(tile_n, box_rows, head_dim // 2, 2), RingShape(tile_n, tile_n, head_dim, 2, by_block=True)
    source, target = 1 << 14, 1 << 16
    found: dict[int, int] = {}
    for thread in range(threads):
        places: Any = Places((narrow, wide, threads), source, target, thread)
        for turn in range(turns_of(narrow, threads)):
            index = turn * threads + thread
            if index < tile_n * per_row(narrow):
                token, place = divmod(index, per_row(narrow))
                assert bool(places.inside(turn))
                assert places.row(turn) == token
                assert places.source(turn) == source + address_in(narrow, token, place * NARROW_BYTES)
                assert places.target(turn) == target + address_in(wide, token, place * WIDE_BYTES)
                assert found.setdefault(places.target(turn), index) == index
    assert len(found) == tile_n * head_dim * 2 // WIDE_BYTES


def test_few_places_are_kept_where_turns_repeat() -> None:
    """At head_dim 128 some turns are whole swizzles, so a thread keeps their places; slabs of 32 rows of two blocks need all."""
    assert [places_of(RingShape(112, 16, 64, 2), threads) for threads in THREADS] == [MOST_PLACES, 2] == [4, 2]
    assert [places_of(RingShape(112, 16, 48, 2), threads) for threads in THREADS] == [2, 1]
    slabs = RingShape(32, 32, 128, 2)
    assert [(places_of(slabs, threads), turns_of(slabs, threads)) for threads in THREADS] == [(11, 11), (6, 6)]
