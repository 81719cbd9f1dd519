"""The products of the backward: a warp's 16 resident rows times streamed tiles, by m16n8k16, or a warpgroup's 64 by wgmma.

With resident q and dout and streamed K and V, these are S = Q K^T, dP = dO V^T and dQ += dS K. With resident K and V and streamed
q and dout, they are the transposed S and dP, and dV += P^T dO, dK += dS^T Q. The accumulators of S and dP, reread as A fragments,
are operands of the other products, so that P and dS never leave registers. Over f32 a warp multiplies three bf16 parts of each
operand (split_mma.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...config.backward import BackwardSpec
from ...config.problem import MMA_K, UNIT_BYTES
from ...config.tiling import TILE_M, WARPGROUP, WARPGROUP_M
from ..elements import ELEMENT_TYPES
from ..mainloop.tile import columns, swizzled, transposed
from ..ptx.packed import pack
from ..ptx.registers import LANES, as_bits, quotient, remainder
from .epilogue import value_column
from .pack_gqa import fragments, load_fragment
from .query_heads import HALF_BYTES
from .split_mma import F32_BYTES, Parts, ValueReader, add_product, column_parts, row_parts, weight_parts
from .warp_mma import TileReader, make_mma
from .warpgroup_mma import accumulator, descriptors, in_one, make_mma_of, wait_for_products


class RowProducts:
    """The products of one warp. resident: tiles; streamed: rings, of as many tensors: tile i is multiplied by ring i."""

    def __init__(self, spec: BackwardSpec, resident: tuple, streamed: tuple, warp: Int32):
        self.spec, lane = spec, cute.arch.lane_idx()
        self.mma = make_mma(spec.k_math)
        self.readers = [TileReader(spec, self.mma, lane, ring, spec.k_type, is_v=False) for ring in streamed]
        self.turned = [self.turned_reader(ring, lane) for ring in streamed]
        row = warp * TILE_M + remainder(lane, TILE_M)
        place = swizzled(spec.resident, 0, row, quotient(lane, TILE_M) * HALF_BYTES)
        self.addresses = [Int32(tile.iterator.toint()) + place for tile in resident]

    def turned_reader(self, ring: cute.Tensor, lane: Int32) -> TileReader:
        """Reads a ring's tiles for products whose sum runs over the tiles' rows."""
        return TileReader(self.spec, self.mma, lane, ring, self.spec.k_type, is_v=True)

    def make_sums(self) -> cute.Tensor:
        """Zeroed registers for 16 rows of a gradient."""
        return zeros(self.spec.padded_head_dim)

    def start_scores(self, which: int, stage: Int32) -> cute.Tensor:
        """Starts resident rows times a tile's rows, f32 ((2, 2), 1, n8): the result is there after `wait`."""
        acc = zeros(self.spec.tile_rows)
        for step in range(self.readers[which].steps):
            tile = self.readers[which].load(step, stage)[0][None, None, 0]
            cute.gemm(self.mma, acc, self.row_fragment(which, step), tile, acc)
        return acc

    def start_add(self, sums: cute.Tensor, weights: cute.Tensor, which: int, stage: Int32):
        """Starts to add weights times a tile's rows: the result is there after `wait`. weights: as weights_of gives them."""
        for step in range(self.turned[which].steps):
            tile = self.turned[which].load(step, stage)[0][None, None, 0]
            cute.gemm(self.mma, sums, weights[None, None, step], tile, sums)

    def wait(self, pending: int):
        """Waits for all started products but the last `pending`: nothing to do, as mma.sync leaves none under way."""

    def row_fragment(self, which: int, step: int) -> cute.Tensor:
        """The A fragment of one k16 step of units."""
        shape, row_bytes = self.spec.resident, self.spec.resident.column_block * UNIT_BYTES
        block, within = divmod(step * MMA_K * UNIT_BYTES, row_bytes)
        address = (self.addresses[which] ^ within) + block * shape.tile_n * row_bytes
        return load_fragment(address, self.spec.k_math)


class SplitRowProducts(RowProducts):
    """The same over f32. A k16 step of units is 8 columns: a lane's words are columns c and c + 4 of both its rows."""

    def turned_reader(self, ring: cute.Tensor, lane: Int32) -> ValueReader:
        """As RowProducts.turned_reader."""
        return ValueReader(ring, self.spec.streamed, self.mma.get_slice(lane), lane)

    def start_scores(self, which: int, stage: Int32) -> cute.Tensor:
        """As RowProducts.start_scores."""
        acc, reader = zeros(self.spec.tile_rows), self.readers[which]
        for step in range(reader.steps // 2):
            cute.arch.sync_warp()  # as in ValueReader.add
            add_product(self.mma, acc, self.row_parts(which, step), column_parts(reader, step, stage), rows_in_use=2)
        return acc

    def start_add(self, sums: cute.Tensor, weights: list[Parts], which: int, stage: Int32):
        """As RowProducts.start_add."""
        self.turned[which].add(self.mma, [sums], [weights], stage, rows_in_use=2)

    def row_parts(self, which: int, step: int) -> Parts:
        """The A fragment of 16 columns, in the order in which column_parts has them."""
        values = []
        for half in range(2):
            words = cute.recast_tensor(self.row_fragment(which, 2 * step + half), Int32)
            values += [words[0], words[2], words[1], words[3]]  # of the first row, then of the second
        return row_parts(values)


class WarpgroupRowProducts:
    """The products of a warpgroup, by wgmma: its 64 resident rows and the tiles are read from shared memory."""

    def __init__(self, spec: BackwardSpec, resident: tuple, streamed: tuple, warp: Int32):
        self.spec, shape = spec, spec.resident
        block = shape.column_block
        layout = cute.make_layout((WARPGROUP_M, columns(shape)), stride=(block, (1, shape.tile_n * block)))
        begin = quotient(warp, WARPGROUP) * (WARPGROUP_M * block)
        self.rows = [cute.make_tensor(tile.iterator + begin, layout) for tile in resident]
        self.tiles = [in_one(ring) for ring in streamed]

    def make_sums(self) -> cute.Tensor:
        """As RowProducts.make_sums."""
        return zeros(self.spec.padded_head_dim)

    def start_scores(self, which: int, stage: Int32) -> cute.Tensor:
        """As RowProducts.start_scores."""
        spec, found = self.spec, accumulators(self.spec.tile_rows)
        mma = make_mma_of(spec.element_type, spec.tile_rows, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
        rows = mma.make_fragment_A(mma.get_slice(0).partition_A(self.rows[which]))
        tile, acc = descriptors(mma, self.tiles[which][None, None, stage]), accumulator(found, spec.tile_rows)
        warpgroup.fence()
        for step in range(spec.padded_head_dim // MMA_K):
            mma.set(warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(mma, acc, rows[None, None, step], tile[None, None, step], acc)
        warpgroup.commit_group()
        return found

    def start_add(self, sums: cute.Tensor, weights: cute.Tensor, which: int, stage: Int32):
        """As RowProducts.start_add."""
        spec = self.spec
        mma = make_mma_of(spec.element_type, spec.padded_head_dim, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        tile, acc = descriptors(mma, transposed(self.tiles[which])[None, None, stage]), accumulator(sums, spec.padded_head_dim)
        warpgroup.fence()
        for step in range(spec.tile_rows // MMA_K):
            cute.gemm(mma, acc, weights[None, None, step], tile[None, None, step], acc)
        warpgroup.commit_group()

    def wait(self, pending: int):
        """As RowProducts.wait."""
        wait_for_products(pending)


Products = RowProducts | WarpgroupRowProducts


def make_products(spec: BackwardSpec, resident: tuple, streamed: tuple, warp: Int32) -> Products:
    """The products of this warp."""
    kind = WarpgroupRowProducts if spec.by_warpgroup else SplitRowProducts if spec.splits else RowProducts
    return kind(spec, resident, streamed, warp)


def accumulators(columns: int) -> cute.Tensor:
    """Registers for 16 rows of `columns` columns, as an m16n8k16 step leaves them: f32 ((2, 2), 1, n8)."""
    return cute.make_rmem_tensor(cute.make_layout(((2, 2), 1, columns // 8)), Float32)


def zeros(columns: int) -> cute.Tensor:
    """`accumulators`, zeroed."""
    acc = accumulators(columns)
    acc.fill(0.0)
    return acc


def weights_of(spec: BackwardSpec, acc: cute.Tensor) -> cute.Tensor | list[Parts]:
    """Scores in 16 bits, reread as A fragments; of f32 their parts."""
    if spec.splits:
        return weight_parts(acc)
    rounded = cute.make_rmem_tensor(acc.shape, ELEMENT_TYPES[spec.element_type])
    rounded.store(acc.load().to(rounded.element_type))
    return fragments(rounded)


@cute.jit
def stage_rows(spec: cutlass.Constexpr, sums: cute.Tensor, tile: cute.Tensor, warp: Int32, factor: Float32):
    """A warp writes its 16 rows of a gradient, times `factor` and rounded, over its rows of a resident tile."""
    lane, base = cute.arch.lane_idx(), tile.iterator.toint()
    for n in cutlass.range_constexpr(cute.size(sums) // 4):
        for r in cutlass.range_constexpr(2):
            row, column = warp * TILE_M + quotient(lane, 4) + 8 * r, 8 * n + 2 * remainder(lane, 4)
            pair = [sums[4 * n + 2 * r + c] * factor for c in range(2)]
            if cutlass.const_expr(spec.splits):
                for c in cutlass.range_constexpr(2):
                    byte = value_column(spec, column + c) * F32_BYTES
                    write_word(base + swizzled(spec.resident, 0, row, byte), as_bits(pair[c]))
            else:
                write_word(base + swizzled(spec.resident, 0, row, column * UNIT_BYTES), pack(spec.element_type, *pair))
    cute.arch.sync_warp()


def write_word(address: Int32, word: Int32):
    """Writes four bytes of shared memory."""
    cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4), 1)[0] = word


def stored_at(places, row: Int32) -> tuple[tuple, Boolean]:
    """Calls places.store_at: a loop of traced code may call functions, not methods."""
    return places.store_at(row)


@cute.jit
def store_rows(
    spec: cutlass.Constexpr, vector_bytes: cutlass.Constexpr, tile: cute.Tensor, target: cute.Tensor, places, warp: Int32
):
    """A warp stores its 16 rows of a resident tile to their places in a tensor. places: mainloop/streamed.py."""
    per_row = cutlass.const_expr(spec.head_dim * spec.q_bytes // vector_bytes)
    words = cutlass.const_expr(vector_bytes // 4)
    for i in cutlass.range(cute.arch.lane_idx(), TILE_M * per_row, LANES, unroll=1):
        row, column = warp * TILE_M + quotient(i, per_row), remainder(i, per_row) * (vector_bytes // spec.q_bytes)
        coord, inside = stored_at(places, row)
        if inside:
            address = tile.iterator.toint() + swizzled(spec.resident, 0, row, column * spec.q_bytes)
            at = (target.iterator + cute.crd2idx((*coord, column), target.layout)).toint()
            source = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=vector_bytes)
            sink = cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=vector_bytes)
            found = cute.make_rmem_tensor(words, Int32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(words)), found)
            cute.autovec_copy(found, cute.make_tensor(sink, cute.make_layout(words)))
