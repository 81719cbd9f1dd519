"""Q K^T and P V of one warp over f32, on tensor cores: each operand is the sum of three bf16, of whose products six count.

x = high + middle + low. Each is the bf16 of the rest that the previous ones leave, which is exact unless low is below bf16's
normal numbers. Products of 2^-24 of the largest or less are left out: middle x low, low x middle, low x low. A tensor core
truncates what it adds up. So a step of 16 starts from zero, with its small products first, and joins the sum in f32, rounded to
nearest (Ootomo and Yokota 2022, with parts of TF32). Chains of 128 would have three times the error of f32 (docs/numerics.md).

ldmatrix brings K: a lane gets word lane % 4 of a row's 16 bytes, so the columns c and c + 4 of eight are a pair of the
contraction, in the query as well (attend/pack_gqa.py). It does not bring V, since it transposes 16 bits. A lane loads up to four
neighbouring columns of each of four tokens, and each column belongs to an n8 step of its own (epilogue.value_column).
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config.decode import KernelSpec
from ...config.problem import UNIT_BYTES
from ...config.tiling import TILE_M, RingShape
from ..elements import ELEMENT_TYPES
from ..mainloop.shared import Shared
from ..mainloop.tile import distances, spread
from .softmax import rows_of
from .warp_mma import TileReader, make_mma, registers

# parts of A and of B, by size: the smallest products first
TERMS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
TOGETHER = 2  # n8 steps of P V that are made together: the parts of four would spill
F32_BYTES = 4
GROUP = 8  # tokens of V, of which a lane has two neighbouring ones


@dataclass(frozen=True)
class Parts:
    """An f32 fragment as three bf16 fragments, the largest first, and the same registers as words of two neighbours."""

    fragments: list[cute.Tensor]
    words: list[cute.Tensor]

    @classmethod
    def empty(cls, shape: Any) -> "Parts":
        """Registers for the parts of a fragment of a shape."""
        layout = cute.make_layout(shape)
        words = [cute.make_rmem_tensor(cute.size(layout) // 2, Int32) for _ in range(3)]
        bf16 = ELEMENT_TYPES["bf16"]
        return cls([cute.make_tensor(cute.recast_ptr(word.iterator, dtype=bf16), layout) for word in words], words)

    def put(self, index: int, first: Float32 | Int32, second: Float32 | Int32):
        """Splits the two elements of word `index`, f32 or their bits."""
        for words, part in zip(self.words, split_pair(first, second), strict=True):
            words[index] = part


def split_pair(first: Float32 | Int32, second: Float32 | Int32) -> tuple[Int32, Int32, Int32]:
    """Two f32, or their bits, as three words of two bf16.

    The high part is truncated, so that a finite number stays finite; the other parts are rounded.
    """
    lines = [".reg .f32 a, b, high; .reg .b32 bits;"]
    for name, value in (("a", "$r0"), ("b", "$r1")):
        lines.append(f"mov.b32 bits, {{{value}}}; and.b32 bits, bits, 0xffff0000; mov.b32 high, bits;")
        lines.append(f"mov.b32 {name}, {{{value}}}; sub.f32 {name}, {name}, high;")
    lines.append("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632; cvt.rn.bf16x2.f32 {$w1}, b, a;")
    lines.append("shl.b32 bits, {$w1}, 16; mov.b32 high, bits; sub.f32 a, a, high;")
    lines.append("and.b32 bits, {$w1}, 0xffff0000; mov.b32 high, bits; sub.f32 b, b, high; cvt.rn.bf16x2.f32 {$w2}, b, a;")
    text = f"{{ {' '.join(lines)} }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32] * 3, read_only_args=[first, second])


def add_product(mma: cute.TiledMma, acc: cute.Tensor, first: Parts, second: Parts, rows_in_use: int):
    """Adds a product of one k16 step to an accumulator ((2, 2), 1, n8), rounded to nearest, in the lane's rows in use."""
    step = cute.make_rmem_tensor(acc.shape, Float32)
    step.fill(0.0)
    for i, j in TERMS:
        cute.gemm(mma, step, first.fragments[i][None, None, 0], second.fragments[j][None, None, 0], step)
    sums, steps = rows_of(acc), rows_of(step)
    for r in range(rows_in_use):
        sums[r, None].store(sums[r, None].load() + steps[r, None].load())


def columns_of(acc: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """`count` n8 steps, from `first` on, of an accumulator ((2, 2), 1, n8)."""
    return cute.make_tensor(acc.iterator + 4 * first, cute.make_layout(((2, 2), 1, count), stride=((1, 2), 0, 4)))


def row_parts(values: list, rows_in_use: int = 2) -> Parts:
    """The A fragment of a lane's eight elements: (pair, row, half).

    A second row that is not in use keeps what registers held: no row of a product depends on another, and zeros cost moves.
    """
    parts = Parts.empty(((2, 2, 2), 1, 1))
    for index in range(4):
        if index % 2 < rows_in_use:
            parts.put(index, values[2 * index], values[2 * index + 1])
    return parts


def weight_parts(acc: cute.Tensor, rows_in_use: int = 2) -> list[Parts]:
    """An accumulator ((2, 2), 1, n8), reread as the A fragments of k16 steps over its columns."""
    flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    return [row_parts([flat[8 * step + i] for i in range(8)], rows_in_use) for step in range(cute.size(acc) // 8)]


def column_parts(reader: TileReader, step: int, stage: Int32) -> Parts:
    """The B fragment of 16 columns of a tile's rows: each k16 step of units is a half of it."""
    parts = Parts.empty(reader.thr_mma.partition_shape_B((reader.rows, 16)))
    for half in range(2):
        words = registers(reader.load(2 * step + half, stage)[0])
        for n in range(reader.rows // 8):
            parts.put(2 * n + half, words[0, n], words[1, n])
    return parts


class ValueReader:
    """Reads B fragments whose contraction runs over a tile's tokens, as of V in P V: no ldmatrix transposes 32 bits.

    A lane loads `width` neighbouring columns of a token at once. Each is in an n8 step of its own: the product's columns have the
    order of epilogue.value_column.
    """

    def __init__(self, ring: cute.Tensor, shape: RingShape, thr_mma: cute.ThrMma, lane: Int32):
        self.ring, self.shape, self.thr_mma, self.lane = ring, shape, thr_mma, lane
        self.width = shape.lane_columns

    def add(self, mma: cute.TiledMma, outputs: list, weights: list, stage: Int32, rows_in_use: int):
        """Adds the products of weights, each the Parts of every k16 step over the tokens, with the tile in a stage."""
        for step in range(self.shape.tile_n // (2 * GROUP)):
            for block in range(self.shape.units * UNIT_BYTES // (8 * F32_BYTES * self.width)):
                cute.arch.sync_warp()  # no load moves above this: with more loads at once registers spill
                loaded = self.rows(step, block, stage)
                for first in range(0, self.width, TOGETHER):
                    values = self.fragment(loaded, first)
                    for p, acc_o in zip(weights, outputs, strict=True):
                        some = columns_of(acc_o, block * self.width + first, TOGETHER)
                        add_product(mma, some, p[step], values, rows_in_use)

    def rows(self, step: int, block: int, stage: Int32) -> list[list[cute.Tensor]]:
        """This lane's columns of a column block, for its four of 16 tokens: [half of the 16][which of two neighbours]."""
        return [[self.row(2 * step + half, which, block, stage) for which in range(2)] for half in range(2)]

    def fragment(self, loaded: list[list[cute.Tensor]], first: int) -> Parts:
        """The B fragment of 16 tokens, for the TOGETHER n8 steps of this lane's columns from `first` on."""
        parts = Parts.empty(self.thr_mma.partition_shape_B((8 * TOGETHER, 16)))
        for half, pair in enumerate(loaded):
            for i in range(TOGETHER):
                parts.put(2 * i + half, pair[0][first + i], pair[1][first + i])
        return parts

    def row(self, group: int, which: int, block: int, stage: Int32) -> cute.Tensor:
        """This lane's columns of token 2 (lane % 4) + which of a group of eight: no access of a warp meets a bank twice."""
        shape, width = self.shape, self.width
        mine = lane_offset(shape, width, self.lane, which) + group_offset(shape, group, block)
        at = self.ring.iterator.toint() + (stage * shape.tile_bytes + mine)
        source = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=width * F32_BYTES)
        found = cute.make_rmem_tensor(width, Float32)
        cute.autovec_copy(cute.make_tensor(source, width), found)
        return found


class SplitProducts:
    """The products of a warp with the m-tile that it attends to, over f32."""

    def __init__(self, spec: KernelSpec, shared: Shared, lane: Int32):
        self.spec, self.lane = spec, lane
        self.mma = make_mma(spec.k_math)
        self.thr_mma = self.mma.get_slice(lane)
        self.reader_k = TileReader(spec, self.mma, lane, shared.rings[0], spec.k_type, is_v=False)
        self.reader_v = ValueReader(shared.rings[1], spec.rings[1], self.thr_mma, lane)

    def scores(self, queries: list, stage: Int32) -> list[cute.Tensor]:
        """Q K^T of each query with the tile in a stage, f32 ((2, 2), 1, n8)."""
        spec = self.spec
        scores = [cute.make_rmem_tensor(self.thr_mma.partition_shape_C((TILE_M, spec.tile_n)), Float32) for _ in queries]
        for acc_s in scores:
            acc_s.fill(0.0)
        for step in range(self.reader_k.steps // 2):
            cute.arch.sync_warp()  # as in ValueReader.add
            keys = column_parts(self.reader_k, step, stage)
            for acc_s, query in zip(scores, queries, strict=True):
                add_product(self.mma, acc_s, self.query(query, step), keys, spec.lane_rows)
        return scores

    def add_values(self, outputs: list, weights: list, stage: Int32):
        """Adds P V to each output. weights: P as `weights` returns it."""
        self.reader_v.add(self.mma, outputs, weights, stage, self.spec.lane_rows)

    def weights(self, acc_s: cute.Tensor) -> list[Parts]:
        """P as A fragments of each k16 step, from its accumulator ((2, 2), 1, n8)."""
        return weight_parts(acc_s, self.spec.lane_rows)

    def query(self, query: cute.Tensor, step: int) -> Parts:
        """The A fragment of a k16 step of the query, which is [element, lane, 8 columns] in shared memory."""
        found = []
        for half in range(2):
            some = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(query[None, self.lane, 2 * step + half], some)
            found += [some[i] for i in range(4)]
        return row_parts(found, self.spec.lane_rows)


def lane_offset(shape: RingShape, width: int, lane: Int32, which: int) -> Int32:
    """Bytes from a group of eight tokens of a column block to a lane's columns of token `which` of its two neighbours."""
    token, column = 2 * (lane % 4) + which, lane // 4 * (width * F32_BYTES)
    return spread(shape, token * (shape.column_block * UNIT_BYTES) + column)


def group_offset(shape: RingShape, group: int, block: int) -> int:
    """Bytes from a tile's start to a column block of a group of eight tokens."""
    slab, between = distances(shape)
    token = GROUP * group
    units = token // shape.box_rows * slab + token % shape.box_rows * shape.column_block + block * between
    return units * UNIT_BYTES
